/* Classify a raw image with a pack.
 *
 *     classify model.adalog image.raw
 *
 * image.raw: the float32 values of one image, channels first, prepared as the model wants (which this program prints).
 */
#include <stdio.h>
#include <stdlib.h>

#include <adalog.h>

static int fail(const char* what) {
    fprintf(stderr, "classify: %s\n", what);
    return 1;
}

int main(int count, char** given) {
    if (count != 3) return fail("give a pack and an image");
    adalog_model* model;
    adalog_error error;
    const adalog_options options = {0}; /* one thread, the fastest kernels */
    if (adalog_model_open(given[1], &options, &model, &error)) return fail(error.message);

    const adalog_description* about = adalog_model_describe(model);
    if (about->input_count != 1 || about->output_count != 1 || about->outputs[0].type != ADALOG_FLOAT32 ||
        !about->outputs[0].bytes)
        return fail("the model is not a classifier of images");
    printf("%s, %s kernels\n", about->bits, about->level);
    if (about->preprocessing) {
        const adalog_preprocessing* wants = about->preprocessing;
        printf("wants %d x %d pixels (%s), mean %g %g %g, std %g %g %g\n", wants->height, wants->width,
               wants->interpolation, wants->mean[0], wants->mean[1], wants->mean[2], wants->std[0], wants->std[1],
               wants->std[2]);
    }

    adalog_buffer image = {malloc(about->inputs[0].bytes), about->inputs[0].bytes};
    adalog_buffer logits = {malloc(about->outputs[0].bytes), about->outputs[0].bytes};
    if (!image.data || !logits.data) return fail("there is not enough memory");
    FILE* file = fopen(given[2], "rb");
    if (!file || fread(image.data, 1, image.bytes, file) != image.bytes) return fail("the image is missing or too short");
    fclose(file);
    if (adalog_model_run(model, 1, &image, 1, &logits, 1, &error)) return fail(error.message);

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
