/* Runs packs by the library of adalog.h, for tests/test_native_model.py.
 *
 *     pack LEVEL THREADS PACK IMAGES < inputs > outputs   runs a file
 *     pack PACK WIDTH HEIGHT < picture > image            prepares a picture by examples/c
 *     pack LEVEL MEMORY < packs                           opens and runs many packs: each has 8 bytes of length before it
 *
 * The last form prints the status and the message of each pack. All outputs are in memory of exactly their size.
 */
#include <stdio.h>
#include <stdlib.h>

#include "adalog.h"
#include "prepare.h"

#define MOST 16

static int fail(const adalog_error* error) {
    fprintf(stderr, "%d %s\n", (int)error->status, error->message);
    return 1;
}

/* Runs some images, from `file`, or of ones if it is null, and writes the outputs to `out`, if it is not null. */
static adalog_status run(adalog_model* model, int64_t images, FILE* file, FILE* out, adalog_error* error) {
    const adalog_description* about = adalog_model_describe(model);
    adalog_buffer inputs[MOST], outputs[MOST];
    if (about->input_count > MOST || about->output_count > MOST) return ADALOG_OK;
    for (size_t i = 0; i < about->input_count; i++) {
        const size_t bytes = about->inputs[i].bytes * (size_t)images;
        float* values = malloc(bytes ? bytes : 1);
        if (file && bytes && fread(values, bytes, 1, file) != 1) exit(3);
        for (size_t j = 0; !file && j < bytes / 4; j++) values[j] = 1;
        inputs[i] = (adalog_buffer){values, bytes};
    }
    for (size_t i = 0; i < about->output_count; i++) {
        const size_t bytes = about->outputs[i].bytes * (size_t)images;
        outputs[i] = (adalog_buffer){malloc(bytes ? bytes : 1), bytes};
    }
    const adalog_status status = adalog_model_run(model, images, inputs, about->input_count, outputs, about->output_count, error);
    for (size_t i = 0; i < about->output_count; i++) {
        if (out && !status) fwrite(outputs[i].data, 1, outputs[i].bytes, out);
        free(outputs[i].data);
    }
    for (size_t i = 0; i < about->input_count; i++) free(inputs[i].data);
    return status;
}

/* Prepares a picture for the model. All bytes are in memory of exactly their size. */
static int prepare_picture(const adalog_model* model, int width, int height) {
    const adalog_preprocessing* wants = adalog_model_describe(model)->preprocessing;
    const size_t bytes = 3 * (size_t)width * height, prepared = 12 * (size_t)wants->width * wants->height;
    unsigned char* rgb = malloc(bytes);
    float* image = malloc(prepared);
    const int good = fread(rgb, bytes, 1, stdin) == 1 && !prepare(rgb, width, height, wants, image);
    if (good) fwrite(image, prepared, 1, stdout);
    free(rgb);
    free(image);
    return !good;
}

int main(int count, char** given) {
    adalog_options options = {0};
    adalog_model* model;
    adalog_error error;
    if (count == 4) {
        if (adalog_model_open(given[1], &options, &model, &error)) return fail(&error);
        const int failed = prepare_picture(model, atoi(given[2]), atoi(given[3]));
        adalog_model_close(model);
        return failed;
    }
    options.level = given[1];
    if (count == 5) {
        options.threads = atoi(given[2]);
        if (adalog_model_open(given[3], &options, &model, &error)) return fail(&error);
        if (run(model, atoi(given[4]), stdin, stdout, &error)) return fail(&error);
        adalog_model_close(model);
        return 0;
    }
    options.memory = (size_t)atoll(given[2]);
    for (int64_t size; fread(&size, 8, 1, stdin) == 1;) {
        char* bytes = malloc(size ? (size_t)size : 1);
        if (size && fread(bytes, (size_t)size, 1, stdin) != 1) return 3;
        adalog_status status = adalog_model_open_memory(bytes, (size_t)size, &options, &model, &error);
        free(bytes);
        if (!status) status = run(model, 3, NULL, NULL, &error);
        printf("%d %s\n", (int)status, error.message);
        fflush(stdout);
        adalog_model_close(model);
    }
    return 0;
}
