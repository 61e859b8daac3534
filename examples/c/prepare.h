/* Prepare a picture as a model expects it. */
#ifndef PREPARE_H
#define PREPARE_H

#include <adalog.h>

/* Resize, crop or pad, and normalise a picture with the filters of Pillow. rgb: height x width x 3 bytes. image: becomes
 * 3 x wants->height x wants->width numbers, channels first. Returns 0, or 1 if there is not enough memory or the resized
 * picture is too long. */
int prepare(const unsigned char* rgb, int width, int height, const adalog_preprocessing* wants, float* image);

#endif
