#include "prepare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PI 3.14159265358979323846

/* Pillow's factors are whole numbers. */
enum { BITS = 22, ONE = 1 << BITS };

/* How one side of a picture is resized: each new pixel is a sum of `counts` old ones from `starts` on, times `values`. */
typedef struct {
    int count, most; /* new pixels, and the most old pixels of one */
    int *starts, *counts, *values;
} side;

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }
static int is(const char* word, const char* other) { return !strcmp(word, other); }
static double sinc(double x) { return x == 0 ? 1 : sin(PI * x) / (PI * x); }

static double filter(const char* name, double x) {
    x = fabs(x);
    if (is(name, "bilinear")) return fmax(1 - x, 0);
    if (is(name, "lanczos")) return x < 3 ? sinc(x) * sinc(x / 3) : 0;
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1; /* bicubic */
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

static void find_resized(int width, int height, const adalog_preprocessing* wants, int* wide, int* high) {
    *wide = wants->resize_width, *high = wants->resize_height;
    if (wants->resize_shorter) {
        const double longer = (double)wants->resize_shorter * most(width, height) / least(width, height);
        *(width <= height ? high : wide) = (int)fmin(longer, 1 << 30);
    } else if (!is(wants->fit, "stretch")) {
        const double down = (double)height / wants->resize_height, across = (double)width / wants->resize_width;
        const double ratio = is(wants->fit, "cover") ? fmin(down, across) : fmax(down, across);
        *wide = most((int)fmin(nearbyint(width / ratio), 1 << 30), 1);
        *high = most((int)fmin(nearbyint(height / ratio), 1 << 30), 1);
    }
}

/* Return where a side of the crop begins in the resized picture; negative if the picture is padded. */
static int find_start(int resized, int size, const char* position) {
    if (is(position, "top-left")) return 0;
    if (resized < size) return -((size - resized) / 2);
    return is(position, "center-floor") ? (resized - size) / 2 : (int)nearbyint((resized - size) / 2.0);
}

/* Find the factors of the new pixels from `first` on, of a side of `old` pixels that is resized to `resized`. */
static int make_side(side* to, int old, int resized, int first, int count, const char* name) {
    const double scale = (double)old / resized, widened = fmax(scale, 1);
    const double radius = widened * (is(name, "bilinear") ? 1 : is(name, "bicubic") ? 2 : 3);
    const int nearest = is(name, "nearest");
    to->count = count, to->most = nearest ? 1 : least(2 * (int)ceil(radius) + 1, old);
    to->starts = malloc(sizeof(int) * count), to->counts = malloc(sizeof(int) * count);
    to->values = malloc(sizeof(int) * count * to->most);
    double* weights = malloc(sizeof(double) * to->most);
    const int good = to->starts && to->counts && to->values && weights;
    double summed = scale / 2; /* Pillow adds the scale up for "nearest", which rounds otherwise than a product */
    for (int i = 0; good && nearest && i < first + count; i++, summed += scale)
        if (i >= first)
            to->starts[i - first] = least((int)summed, old - 1), to->counts[i - first] = 1, to->values[i - first] = ONE;
    for (int i = 0; good && !nearest && i < count; i++) {
        const double center = (first + i + 0.5) * scale;
        const int start = most((int)(center - radius + 0.5), 0), end = least((int)(center + radius + 0.5), old);
        double total = 0;
        for (int k = 0; k < end - start; k++)
            total += weights[k] = filter(name, (start + k - center + 0.5) * (1 / widened));
        to->starts[i] = start, to->counts[i] = end - start;
        for (int k = 0; k < end - start; k++)
            to->values[i * to->most + k] = (int)(weights[k] / total * ONE + (weights[k] < 0 ? -0.5 : 0.5));
    }
    free(weights);
    return good;
}

/* Resize one side of a picture. along: bytes from one pixel to the next on this side. across: bytes from one line of such
 * pixels to the next. The lines of the result go the other way. */
static unsigned char* resize(const unsigned char* bytes, size_t along, size_t across, int lines, const side* by) {
    unsigned char* result = malloc(3 * (size_t)lines * by->count);
    unsigned char* to = result;
    for (int i = 0; result && i < by->count; i++)
        for (int line = 0; line < lines; line++)
            for (int channel = 0; channel < 3; channel++) {
                const unsigned char* from = bytes + line * across + by->starts[i] * along + channel;
                long long sum = ONE / 2;
                for (int k = 0; k < by->counts[i]; k++, from += along)
                    sum += *from * (long long)by->values[i * by->most + k];
                *to++ = (unsigned char)(sum < 0 ? 0 : least((int)(sum >> BITS), 255));
            }
    return result;
}

int prepare(const unsigned char* rgb, int width, int height, const adalog_preprocessing* wants, float* image) {
    int wide, high;
    find_resized(width, height, wants, &wide, &high);
    if (most(wide, high) >= 1 << 24) return 1;
    const int left = find_start(wide, wants->width, wants->position);
    const int top = find_start(high, wants->height, wants->position);
    const int column = most(left, 0), row = most(top, 0);
    const int columns = least(left + wants->width, wide) - column, rows = least(top + wants->height, high) - row;
    side across = {0}, down = {0};
    unsigned char *turned = NULL, *pixels = NULL;
    if (make_side(&across, width, wide, column, columns, wants->interpolation) &&
        make_side(&down, height, high, row, rows, wants->interpolation))
        turned = resize(rgb, 3, 3 * (size_t)width, height, &across);
    if (turned) pixels = resize(turned, 3, 3 * (size_t)height, columns, &down);
    for (int channel = 0; pixels && channel < 3; channel++, image += wants->width * wants->height) {
        const int from = is(wants->channels, "bgr") ? 2 - channel : channel;
        const float rescale = (float)wants->rescale, mean = (float)wants->mean[channel], std = (float)wants->std[channel];
        for (int y = 0; y < wants->height; y++)
            for (int x = 0; x < wants->width; x++) {
                const int at_y = y + top - row, at_x = x + left - column;
                const int inside = at_y >= 0 && at_y < rows && at_x >= 0 && at_x < columns;
                const float value = inside ? pixels[3 * (at_y * columns + at_x) + from] : (float)wants->fill[from];
                const float scaled = value * rescale;
                image[y * wants->width + x] = (scaled - mean) / std;
            }
    }
    const int failed = !pixels;
    free(across.starts), free(across.counts), free(across.values);
    free(down.starts), free(down.counts), free(down.values);
    free(turned), free(pixels);
    return failed;
}
