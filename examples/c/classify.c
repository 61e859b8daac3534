/* Classify a raw image with a pack.
 *
 *     classify model.adalog image.raw
 *
 * image.raw: the float32 values of one image, channels first, prepared as this program prints.
 */
#include <stdio.h>
#include <stdlib.h>

#include <adalog.h>

static int fail(const char* file, const char* what) {
    fprintf(stderr, "classify: %s: %s\n", file, what);
    return 1;
}

int main(int count, char** given) {
    if (count != 3) {
        fprintf(stderr, "usage: classify model.adalog image.raw\n");
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
    if (about->preprocessing) {
        const adalog_preprocessing* wants = about->preprocessing;
        if (wants->resize_shorter) printf("resize the shorter side to %d", wants->resize_shorter);
        else printf("resize to %d x %d (%s)", wants->resize_height, wants->resize_width, wants->fit);
        printf(" with the %s filter, %s to %d x %d (%s)\n", wants->interpolation, wants->pads ? "crop or pad" : "crop",
               wants->height, wants->width, wants->position);
        if (wants->pads) printf("fill with %g %g %g\n", wants->fill[0], wants->fill[1], wants->fill[2]);
        printf("%s times %g, mean %g %g %g, std %g %g %g\n", wants->channels, wants->rescale, wants->mean[0],
               wants->mean[1], wants->mean[2], wants->std[0], wants->std[1], wants->std[2]);
    }

    adalog_buffer image = {malloc(about->inputs[0].bytes), about->inputs[0].bytes};
    adalog_buffer logits = {malloc(about->outputs[0].bytes), about->outputs[0].bytes};
    if (!image.data || !logits.data) return fail(given[1], "there is not enough memory");
    FILE* file = fopen(given[2], "rb");
    if (!file || fread(image.data, 1, image.bytes, file) != image.bytes || fgetc(file) != EOF)
        return fail(given[2], "the image is missing or has another size");
    fclose(file);
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
