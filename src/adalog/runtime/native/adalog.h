/* Run packs, which `adalog pack` writes, in C or C++: quantized models on the CPU, without Python.
 *
 *     adalog_model* model;
 *     adalog_error error;
 *     if (adalog_model_open("model.adalog", NULL, &model, &error)) { fprintf(stderr, "%s\n", error.message); return 1; }
 *     adalog_buffer image = {pixels, bytes_of_pixels}, logits = {numbers, bytes_of_numbers};
 *     if (adalog_model_run(model, 1, &image, 1, &logits, 1, &error)) { ... }
 *     adalog_model_close(model);
 *
 * A pack may be hostile: it is either refused, or it runs within memory that the library allocates. Functions return 0 or
 * another `adalog_status`; then `error` has a message of one line. No function throws, prints or changes global state,
 * except that on a processor with AMX, opening a model asks Linux for the registers of AMX, which the process keeps.
 * Different models may be used by different threads. Calls of one model wait for each other. All names that begin with
 * adalog_ or ADALOG_ belong to the library.
 */
#ifndef ADALOG_H
#define ADALOG_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ADALOG_OK = 0,
    ADALOG_BAD_ARGUMENT = 1, /* an argument of the call is not valid */
    ADALOG_BAD_FILE = 2,     /* the file cannot be read, or is not a valid pack for this version of the library */
    ADALOG_NO_MEMORY = 3,    /* the machine, or the limit in the options, does not have enough memory */
    ADALOG_FAILED = 4        /* a step of the model cannot run */
} adalog_status;

typedef struct {
    adalog_status status;
    char message[256]; /* UTF-8, cut to this length, ends with 0; it does not name the file */
} adalog_error;

/* Zeros select the defaults. */
typedef struct {
    int threads;       /* threads that share the work of a call, 1 to 1024; default 1 */
    const char* level; /* the kernels: "scalar", "avx2", "avxvnni", "avx512vnni", "amx", "neon", "i8mm" or "wasm"; default
                        * the fastest */
    size_t memory;     /* limit on the bytes of the open model; default 2 GiB. Opening a model also takes its file, which
                        * has the same limit, its JSON, and the codes of one weight. While the model runs, each thread
                        * takes up to 256 MiB more. */
} adalog_options;

typedef enum {
    ADALOG_FLOAT32 = 0,
    ADALOG_FLOAT64 = 1,
    ADALOG_UINT8 = 2,
    ADALOG_INT32 = 3,
    ADALOG_INT64 = 4,
    ADALOG_BOOL = 5
} adalog_type;

/* An input or an output, for one image. In memory, images follow each other, and the last dimension is dense. */
typedef struct {
    const char* name;
    adalog_type type; /* inputs are always ADALOG_FLOAT32 */
    int rank;
    const int64_t* shape; /* rank sizes */
    size_t bytes;         /* of one image */
} adalog_value;

/* How to prepare an image for the model. The caller resizes the image, crops or pads it, orders its channels,
 * multiplies values 0-255 by `rescale`, subtracts `mean` and divides by `std`.
 *
 * interpolation: the filters of Pillow. All but "nearest" average pixels if an image gets smaller. They round to bytes
 * after each of two passes, first along the rows. Other filters can change predictions. examples/c/prepare.c has all
 * steps.
 *
 * fit, if resize_shorter is 0: "stretch" resizes to exactly the height and width. The others keep the proportions: "cover"
 * makes the image as small as possible without falling below either side, and "contain" as large as possible without
 * exceeding either. position: "center" rounds half a pixel to the nearest even number, "center-floor" rounds it down. */
typedef struct {
    int height, width;               /* after the crop */
    int resize_height, resize_width; /* before the crop; equal if resize_shorter is not 0 */
    int resize_shorter;              /* not 0: resize the shorter side to this size; the other is rounded down */
    const char* interpolation;       /* "bilinear", "bicubic", "lanczos" or "nearest" */
    const char* fit;                 /* "stretch", "cover" or "contain" */
    const char* position;            /* of the crop or padded image: "center", "center-floor" or "top-left" */
    const char* channels;            /* "rgb" or "bgr" */
    int pads;                        /* not 0: pad smaller images with the colour `fill` */
    double fill[3];                  /* red, green and blue, 0-255 */
    double mean[3], std[3], rescale; /* the first channel is that of `channels` */
} adalog_preprocessing;

/* All pointers stay valid until the model is closed. */
typedef struct {
    const adalog_value* inputs;
    size_t input_count;
    const adalog_value* outputs;
    size_t output_count;
    const int64_t* batches; /* numbers of images that run at once, ascending */
    size_t batch_count;
    const adalog_preprocessing* preprocessing; /* NULL if the pack does not record it */
    const char* const* classes;                /* NULL if the pack does not name the classes */
    size_t class_count;
    const char* bits;  /* such as "w4a4" */
    const char* level; /* the kernels in use */
    int threads;
    size_t memory; /* bytes that the model takes */
} adalog_description;

typedef struct {
    void* data; /* aligned to the size of its numbers */
    size_t bytes;
} adalog_buffer;

typedef struct adalog_model adalog_model;

#if defined(__GNUC__)
#define ADALOG_API __attribute__((visibility("default")))
#else
#define ADALOG_API
#endif

/* Open a pack. options and error may be NULL. The model does not keep the file, or the bytes, after the call. */
ADALOG_API adalog_status adalog_model_open(const char* path, const adalog_options* options, adalog_model** model,
                                           adalog_error* error);
ADALOG_API adalog_status adalog_model_open_memory(const void* bytes, size_t count, const adalog_options* options,
                                                  adalog_model** model, adalog_error* error);

/* Describe the inputs and outputs. Returns NULL for NULL. */
ADALOG_API const adalog_description* adalog_model_describe(const adalog_model* model);

/* Compute the outputs of `images` images, 0 or more. Each input and each output has one buffer, with exactly
 * `images` times the bytes of one image. The inputs stay as they are, and no output may share memory with an input. Inputs with NaN are
 * refused. If the call fails, the outputs may be written in part. */
ADALOG_API adalog_status adalog_model_run(adalog_model* model, int64_t images, const adalog_buffer* inputs,
                                          size_t input_count, const adalog_buffer* outputs, size_t output_count,
                                          adalog_error* error);

/* Free the model. No other call with this model may be running. NULL is allowed. */
ADALOG_API void adalog_model_close(adalog_model* model);

#ifdef __cplusplus
}
#endif

#endif
