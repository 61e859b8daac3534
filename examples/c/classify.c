/* Classify an image with a pack.
 *
 *     classify model.adalog image
 *
 * image: a picture as a binary PPM file with 8 bits per channel, which most programs for pictures write; or the float32
 * values of a prepared image, channels first.
 */
#include <stdio.h>
#include <stdlib.h>

#include <adalog.h>

#include "prepare.h"

static int fail(const char* file, const char* what) {
    fprintf(stderr, "classify: %s: %s\n", file, what);
    return 1;
}

/* Read a number of a PPM header, and the character after it. Returns 0 if there is none. */
static int read_number(FILE* file) {
    int number = 0, letter = fgetc(file);
    for (; letter == '#' || letter == ' ' || letter == '\n' || letter == '\r' || letter == '\t'; letter = fgetc(file))
        if (letter == '#') /* a comment, to the end of the line */
            while ((letter = fgetc(file)) != '\n' && letter != EOF) continue;
    for (; letter >= '0' && letter <= '9' && number < 1 << 14; letter = fgetc(file)) number = 10 * number + letter - '0';
    return letter >= '0' && letter <= '9' ? 0 : number; /* a longer number is refused */
}

/* Read a binary PPM file: height x width x 3 bytes, which the caller frees. Returns NULL for another file. */
static unsigned char* read_ppm(const char* path, int* width, int* height) {
    unsigned char* rgb = NULL;
    FILE* file = fopen(path, "rb");
    if (file && fgetc(file) == 'P' && fgetc(file) == '6') {
        *width = read_number(file), *height = read_number(file);
        const size_t bytes = 3 * (size_t)*width * *height;
        if (bytes && read_number(file) == 255) rgb = malloc(bytes);
        if (rgb && fread(rgb, 1, bytes, file) != bytes) free(rgb), rgb = NULL;
    }
    if (file) fclose(file);
    return rgb;
}

/* Read a picture and prepare it, or read a prepared image. Returns 0 if the file is neither of them. */
static int read_image(const char* path, const adalog_preprocessing* wants, const adalog_buffer* image) {
    int width, height;
    unsigned char* rgb = read_ppm(path, &width, &height);
    if (rgb) {
        const int fits = wants && image->bytes == 3 * sizeof(float) * wants->height * wants->width;
        const int good = fits && !prepare(rgb, width, height, wants, image->data);
        free(rgb);
        return good;
    }
    FILE* file = fopen(path, "rb");
    const int good = file && fread(image->data, 1, image->bytes, file) == image->bytes && fgetc(file) == EOF;
    if (file) fclose(file);
    return good;
}

int main(int count, char** given) {
    if (count != 3) {
        fprintf(stderr, "usage: classify model.adalog image\n");
        return 1;
    }
    adalog_model* model;
    adalog_error error;
    const adalog_options options = {0}; /* one thread, the fastest kernels */
    if (adalog_model_open(given[1], &options, &model, &error)) return fail(given[1], error.message);

    const adalog_description* about = adalog_model_describe(model);
    if (about->input_count != 1 || about->output_count != 1 || about->outputs[0].type != ADALOG_FLOAT32 ||
        !about->outputs[0].bytes)
        return fail(given[1], "the model is not a classifier of images");
    printf("%s, %s kernels\n", about->bits, about->level);

    adalog_buffer image = {malloc(about->inputs[0].bytes), about->inputs[0].bytes};
    adalog_buffer logits = {malloc(about->outputs[0].bytes), about->outputs[0].bytes};
    if (!image.data || !logits.data) return fail(given[1], "there is not enough memory");
    if (!read_image(given[2], about->preprocessing, &image))
        return fail(given[2], "it is neither a picture that can be prepared for this model, nor a prepared image");
    if (adalog_model_run(model, 1, &image, 1, &logits, 1, &error)) return fail(given[2], error.message);

    const float* values = logits.data;
    size_t best = 0;
    for (size_t i = 1; i < logits.bytes / sizeof *values; i++)
        if (values[i] > values[best]) best = i;
    printf("class %zu", best);
    if (about->classes) printf(", %s", about->classes[best]);
    printf(", logit %g\n", values[best]);

    free(image.data);
    free(logits.data);
    adalog_model_close(model);
    return 0;
}
