// The structures that the kernels of native.cpp take, and the table of their fields. Python fills in the same structures
// (see abi.py), which compares its own fields with this table. model.cpp fills them in from the JSON of a tape.
#ifndef ADALOG_STRUCTURES_H
#define ADALOG_STRUCTURES_H

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace {  // native.cpp completes `Weights` with types of its own

// A function of a float that takes few values: it is values[i] if i of the 2^depth - 1 thresholds are above x. The
// thresholds form a heap that starts at index 1. The larger thresholds of node k are below node 2 k, and the smaller ones
// below node 2 k + 1. The search goes to 2 k + 1 if x is less than the threshold at k, and ends at 2^depth + i. length:
// the entries of either array.
//
// Buckets of equal width give the same function. x falls into bucket slope x + origin, without the fraction and clamped
// to 0 ... count - 1. A bucket with at most one threshold stores the threshold, the value below it, and the value from it
// on. The threshold of a bucket with more of them is NaN, and the heap is searched instead.
//
// shift: if it is not 0, buckets do not have equal width. The first half of the buckets is for x below `center`, and the
// second half for x from `center` on. The bits of the float32 |x - center|, without the last `shift` bits and minus
// `least`, count buckets from the middle. So buckets are narrow near the centre and grow with the distance.
struct Bucket {
    float threshold;
    uint16_t below, above;
};
struct Steps {
    const float* heap;
    const int32_t* values;  // bytes of up to two planes: low + 256 high
    int64_t length;
    int32_t depth, planes;
    const Bucket* buckets;
    int64_t count;
    float slope, origin, center;
    int32_t shift, least;
    int32_t top;  // the largest byte of either plane
    // For up to 31 thresholds, 32 buckets with at most `most` thresholds each, 1 to 3, fit in registers. near: (4, 32),
    // three rows of thresholds, which are NaN if a bucket has fewer, and a row of int32, the number of thresholds above
    // the lower end of the bucket. most is 0 if there are too many thresholds.
    int32_t most;
    const float* near;
    int64_t near_length;  // entries
    float near_slope, near_origin;
};

// The kind of results that are stored for accumulators, or for normalised values, x. For each column y = x scale + bias.
enum Kind {
    SUMS,    // x itself, int32
    FLOATS,  // y, plus `residual`: float32
    CODES,   // y rounded to a whole number and clamped to 0 ... high: uint8
    STEPS,   // steps(y): uint8, in one plane or two
    ACTIVE   // within the kernels only: FLOATS or CODES with an activation
};
// A function f of y, or of y plus `residual`. It is stored as FLOATS, or as the CODES of f code_scale + code_zero.
enum Activation { NONE, RELU, GELU, GELU_TANH, SILU, HARDSWISH, SIGMOID };
struct Output {
    int32_t kind;
    const float *scale, *bias, *high;
    const uint8_t* top;     // high, as bytes
    int64_t parameters;     // entries of each of the four fields above
    const float* residual;  // has the same distance between rows as the output
    int64_t residual_bytes;
    void *data, *more;      // more: the second plane, with the high bytes
    int64_t bytes;          // bytes of data, and of more
    int64_t row;            // entries from one row to the next
    // For outputs without batches and heads. place: the number of the row at which each row is stored, or -1 to drop it.
    // added_to: the number of the row of the residual that is added to it. Null means the row's own number. No two rows
    // have the same place.
    const int32_t *place, *added_to;
    int64_t places;         // entries of place, and of added_to
    int32_t activation;
    const float *code_scale, *code_zero;  // for CODES with an activation; `parameters` entries each
    Steps steps;
};

struct Weights;
struct Linear {
    const Weights* weights;
    const uint8_t *data, *more;  // the left operand, (rows, terms); more: high bytes
    int64_t bytes, row, rows;    // row: bytes from one row to the next
    Output out;
};

// Matrices of bytes, one per batch and head: entry (b, h, i, j) is at b batch + h head + i row + j.
struct Side {
    const uint8_t *data, *more;
    int64_t bytes, batch, head, row;
    const int32_t* zero;  // zero points, one per head
    int32_t bits;
    int32_t transposed;  // for the right operand of a product: entry (i, j) of the matrix that is multiplied is (j, i) here
    int32_t top;         // the largest byte of a left operand
};
struct Matrices {
    int64_t batches, heads, rows, terms, columns;
    Side left, right;
    Output out;                     // parameters: (heads, columns)
    int64_t out_batch, out_head;    // entries
};
struct Attention {
    Matrices scores;        // queries and keys; its `out` is not used
    const float* factor;   // value of one unit of the accumulator, in log2 units, one per head
    const float* bias;     // added to scores, in log2 units: (bias_tables, bias_heads, rows, columns); may be null
    const int32_t* bias_of;  // the table that each batch uses
    int64_t bias_bytes, bias_tables, bias_heads, bias_batches;  // bias_batches: entries of bias_of
    Steps steps;           // maps log2 of a probability to its bytes
    int32_t zero;          // zero point of the probabilities' codes
    float code_scale;      // for a uniform quantizer: code = probability * code_scale + zero, without steps; otherwise 0
    int64_t columns;       // columns of the values
    Side values;
    Output out;
    int64_t out_batch, out_head;
};

struct Norm {
    const float* data;
    int64_t bytes, row, rows, columns;
    float epsilon;
    int32_t about_zero;  // 0 for LayerNorm, 1 for RMSNorm, which does not subtract the mean
    Output out;
};
// Encodes values as the quantizers do: here CODES divide by `scale`, round, and then add `bias`.
struct Encode {
    const float* data;
    int64_t bytes, row, rows, columns;
    Output out;
};
// Copies the window of each output of a convolution:
// (images, channels, height, width) -> (images * outputs, channels * kernel).
struct Patches {
    const uint8_t* data;
    int64_t bytes, images, channels, height, width;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    int32_t fill;
    uint8_t* out;
    int64_t out_bytes, row;
};

// Convolves each channel of codes alone. The images have their channels last in memory, (images, height, width,
// channels). The output has one row of channels for each of its pixels.
struct Depthwise {
    const uint8_t* data;
    int64_t bytes, images, channels, height, width;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    const uint8_t* zero;     // the zero point of each channel, which is also the padding
    const int16_t* factors;  // the weights minus their zero points, two taps of the kernel together: (pairs, channels, 2)
    int64_t pairs;           // if the kernel has an odd number of taps, the second factor of the last pair is zero
    Output out;
};

// --- the table of all fields -------------------------------------------------------------------------------------------

// The types of fields. PAIR: two int64.
enum class FieldType { INT32, INT64, FLOAT, PAIR, POINTER, STRUCTURE };

struct Field {
    const char* name;  // "Structure", which begins its rows, or "Structure.field"
    int64_t offset, size;
    FieldType type;
    // For pointers: the bytes of an entry (1 for void), whether the entries are constant, and the field that counts entries.
    // A count whose name ends in "bytes" counts bytes. For structures: the name of the type.
    int64_t entry;
    bool constant;
    const char* more;
};

template <class T>
constexpr FieldType type_of() {
    if constexpr (std::is_pointer_v<T>) return FieldType::POINTER;
    else if constexpr (std::is_array_v<T>) return FieldType::PAIR;
    else if constexpr (std::is_class_v<T>) return FieldType::STRUCTURE;
    else if constexpr (std::is_floating_point_v<T>) return FieldType::FLOAT;
    else return sizeof(T) == 8 ? FieldType::INT64 : FieldType::INT32;
}
template <class T>
constexpr int64_t entry_of() {
    using Entry = std::remove_cv_t<std::remove_pointer_t<T>>;
    if constexpr (!std::is_pointer_v<T> || std::is_void_v<Entry> || std::is_same_v<Entry, Weights>) return 1;
    else return sizeof(Entry);
}

#define WHOLE(structure) {#structure, 0, sizeof(structure), FieldType::STRUCTURE, 0, false, #structure}
#define MORE(structure, field, more)                                                                                    \
    {#structure "." #field, offsetof(structure, field), sizeof(structure::field), type_of<decltype(structure::field)>(), \
     entry_of<decltype(structure::field)>(), std::is_const_v<std::remove_pointer_t<decltype(structure::field)>>, more}
#define FIELD(structure, field) MORE(structure, field, nullptr)
const Field FIELDS[] = {
    WHOLE(Steps),
    MORE(Steps, heap, "length"), MORE(Steps, values, "length"), FIELD(Steps, length), FIELD(Steps, depth),
    FIELD(Steps, planes), MORE(Steps, buckets, "count"), FIELD(Steps, count), FIELD(Steps, slope), FIELD(Steps, origin),
    FIELD(Steps, center), FIELD(Steps, shift), FIELD(Steps, least), FIELD(Steps, top), FIELD(Steps, most),
    MORE(Steps, near, "near_length"), FIELD(Steps, near_length), FIELD(Steps, near_slope), FIELD(Steps, near_origin),
    WHOLE(Output),
    FIELD(Output, kind), MORE(Output, scale, "parameters"), MORE(Output, bias, "parameters"),
    MORE(Output, high, "parameters"), MORE(Output, top, "parameters"), FIELD(Output, parameters),
    MORE(Output, residual, "residual_bytes"), FIELD(Output, residual_bytes), MORE(Output, data, "bytes"),
    MORE(Output, more, "bytes"), FIELD(Output, bytes), FIELD(Output, row), MORE(Output, place, "places"),
    MORE(Output, added_to, "places"), FIELD(Output, places), FIELD(Output, activation),
    MORE(Output, code_scale, "parameters"), MORE(Output, code_zero, "parameters"), MORE(Output, steps, "Steps"),
    WHOLE(Linear),
    FIELD(Linear, weights), MORE(Linear, data, "bytes"), MORE(Linear, more, "bytes"), FIELD(Linear, bytes),
    FIELD(Linear, row), FIELD(Linear, rows), MORE(Linear, out, "Output"),
    WHOLE(Side),
    MORE(Side, data, "bytes"), MORE(Side, more, "bytes"), FIELD(Side, bytes), FIELD(Side, batch), FIELD(Side, head),
    FIELD(Side, row), MORE(Side, zero, "heads"), FIELD(Side, bits), FIELD(Side, transposed), FIELD(Side, top),
    WHOLE(Matrices),
    FIELD(Matrices, batches), FIELD(Matrices, heads), FIELD(Matrices, rows), FIELD(Matrices, terms),
    FIELD(Matrices, columns), MORE(Matrices, left, "Side"), MORE(Matrices, right, "Side"), MORE(Matrices, out, "Output"),
    FIELD(Matrices, out_batch), FIELD(Matrices, out_head),
    WHOLE(Attention),
    MORE(Attention, scores, "Matrices"), MORE(Attention, factor, "heads"), MORE(Attention, bias, "bias_bytes"),
    MORE(Attention, bias_of, "bias_batches"), FIELD(Attention, bias_bytes), FIELD(Attention, bias_tables),
    FIELD(Attention, bias_heads), FIELD(Attention, bias_batches), MORE(Attention, steps, "Steps"),
    FIELD(Attention, zero), FIELD(Attention, code_scale), FIELD(Attention, columns), MORE(Attention, values, "Side"),
    MORE(Attention, out, "Output"), FIELD(Attention, out_batch), FIELD(Attention, out_head),
    WHOLE(Norm),
    MORE(Norm, data, "bytes"), FIELD(Norm, bytes), FIELD(Norm, row), FIELD(Norm, rows), FIELD(Norm, columns),
    FIELD(Norm, epsilon), FIELD(Norm, about_zero), MORE(Norm, out, "Output"),
    WHOLE(Encode),
    MORE(Encode, data, "bytes"), FIELD(Encode, bytes), FIELD(Encode, row), FIELD(Encode, rows), FIELD(Encode, columns),
    MORE(Encode, out, "Output"),
    WHOLE(Patches),
    MORE(Patches, data, "bytes"), FIELD(Patches, bytes), FIELD(Patches, images), FIELD(Patches, channels),
    FIELD(Patches, height), FIELD(Patches, width), FIELD(Patches, kernel), FIELD(Patches, stride),
    FIELD(Patches, padding), FIELD(Patches, dilation), FIELD(Patches, fill), MORE(Patches, out, "out_bytes"),
    FIELD(Patches, out_bytes), FIELD(Patches, row),
    WHOLE(Depthwise),
    MORE(Depthwise, data, "bytes"), FIELD(Depthwise, bytes), FIELD(Depthwise, images), FIELD(Depthwise, channels),
    FIELD(Depthwise, height), FIELD(Depthwise, width), FIELD(Depthwise, kernel), FIELD(Depthwise, stride),
    FIELD(Depthwise, padding), FIELD(Depthwise, dilation), MORE(Depthwise, zero, "channels"),
    MORE(Depthwise, factors, "factor_count"), FIELD(Depthwise, pairs), MORE(Depthwise, out, "Output"),
};
#undef WHOLE
#undef MORE
#undef FIELD

}  // namespace

#endif
