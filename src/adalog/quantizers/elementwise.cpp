// Elementwise kernels that take one pass over the values: fake quantization, its gradient, and the errors of a search's
// candidates. `elementwise.py` and the search's `fused.py` call them. Without this library, PyTorch computes the same.
//
// Values are (outer, groups, inner). There is one scale and one sum per group (and candidate). The candidates of a
// matrix are adjacent, (blocks, count, block), so that one product takes all of them. Values and errors are the same to
// the bit as PyTorch's: nothing is contracted to fused multiply-adds, and halves round to even.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math", "fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif
// C libraries other than glibc, such as musl, cannot choose between clones of a function when they load it.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(NO_CLONES)
#define CLONES
#define DISPATCHED __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DISPATCHED
#endif
#define API extern "C" __attribute__((visibility("default"))) DISPATCHED
#define INLINE static inline __attribute__((always_inline))

namespace {

typedef uint16_t bfloat16;

// Round to the nearest whole number, halves to even. If the processor may lack an instruction for that, the builtin
// would be a function call per value. Adding 1.5 * 2^23 rounds as well, up to 2^22, which is beyond all codes. For
// doubles these numbers are 1.5 * 2^52 and 2^51.
INLINE float rounded(float value) {
#if defined(CLONES) || defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_nearbyintf(value);
#else
    value = value < -4194304.0f ? -4194304.0f : value;
    value = value > 4194304.0f ? 4194304.0f : value;
    return (value + 12582912.0f) - 12582912.0f;
#endif
}

INLINE double rounded(double value) {
#if defined(CLONES) || defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_nearbyint(value);
#else
    value = value < -2251799813685248.0 ? -2251799813685248.0 : value;
    value = value > 2251799813685248.0 ? 2251799813685248.0 : value;
    return (value + 6755399441055744.0) - 6755399441055744.0;
#endif
}

INLINE void put(float* to, float value) { *to = value; }

INLINE void put(bfloat16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *to = bfloat16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float get(float value) { return value; }

INLINE float get(bfloat16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// The number of consecutive elements that share a matrix and a group. One of the two sizes divides the other.
INLINE int64_t least(int64_t inner, int64_t block) { return inner < block ? inner : block; }

// The index of the value `at` in the first candidate of its matrix.
INLINE int64_t place(int64_t at, int64_t count, int64_t block) { return at / block * count * block + at % block; }

template <typename T>
INLINE void uniform_errors(const float* values, int64_t outer, int64_t groups, int64_t inner, int64_t block,
                           const float* scale, const float* zero_point, float top, int64_t count, T* out) {
    const int64_t size = outer * groups * inner, piece = least(inner, block);
    for (int64_t at = 0; at < size; at += piece)
        for (int64_t k = 0; k < count; k++) {
            const int64_t own = k * groups + at / inner % groups;
            const float step = scale[own], low = -zero_point[own], high = top + low, *from = values + at;
            T* to = out + place(at, count, block) + k * block;
            for (int64_t i = 0; i < piece; i++) {
                float code = rounded(from[i] / step);
                code = code < low ? low : code;
                code = code > high ? high : code;
                put(to + i, code * step - from[i]);
            }
        }
}

template <typename T>
INLINE void table_errors(const float* values, const int32_t* bins, int64_t size, int64_t block, const float* tables,
                         int64_t bin_count, int64_t count, T* out) {
    for (int64_t at = 0; at < size; at += block)
        for (int64_t k = 0; k < count; k++) {
            const float *table = tables + k * bin_count, *from = values + at;
            const int32_t* bin = bins + at;
            T* to = out + place(at, count, block) + k * block;
            for (int64_t i = 0; i < block; i++) put(to + i, table[bin[i]] - from[i]);
        }
}

// The sum of (product + base)^2, or of (product + 2 base) error for a Gram matrix. It uses many partial sums: a single
// one would lose digits, and each addition would wait for the previous one.
template <typename T, bool gram>
INLINE float block_sum(const T* product, const float* base, const T* error, int64_t size) {
    const int lanes = 64;
    float part[lanes] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + lanes <= size; i += lanes)
        for (int j = 0; j < lanes; j++) {
            const float value = get(product[i + j]) + (gram ? 2 : 1) * base[i + j];
            part[j] += value * (gram ? get(error[i + j]) : value);
        }
    for (; i < size; i++) {
        const float value = get(product[i]) + (gram ? 2 : 1) * base[i];
        part[i % lanes] += value * (gram ? get(error[i]) : value);
    }
    for (int j = 0; j < lanes; j++) sum += part[j];
    return sum;
}

template <typename T, bool gram>
INLINE void sums(const T* product, const float* base, const T* error, int64_t outer, int64_t groups, int64_t inner,
                 int64_t block, int64_t count, double* out) {
    const int64_t all = outer * groups * inner, piece = least(least(inner, block), 2048);
    for (int64_t at = 0; at < all;) {
        const int64_t group = at / inner % groups, from = place(at, count, block);
        const int64_t left = least(inner - at % inner, block - at % block), size = least(left, piece);
        for (int64_t k = 0; k < count; k++)
            out[k * groups + group] += block_sum<T, gram>(product + from + k * block, base + at,
                                                          gram ? error + from + k * block : nullptr, size);
        at += size;
    }
}

// The nearest level of a logarithmic quantizer. The leading bits of a value select a bin; NaN counts as the least value.
// ends: the threshold in each bin. levels: two per bin, above the threshold and up to it.
INLINE float log_level(float value, float lowest, float highest, int32_t drop, int32_t first, const float* ends,
                       const float* levels) {
    value = value > lowest ? value : lowest;
    value = value < highest ? value : highest;
    int32_t bits, sign;
    std::memcpy(&bits, &value, 4);
    const int32_t bin = (bits >> drop) - first;
    const float below = ends[bin] - value;
    std::memcpy(&sign, &below, 4);
    return levels[2 * bin + 1 + (sign >> 31)];
}

// The gradient of one value. Its contributions to the gradients of low, high and step are added to the sums.
template <bool mixed>
INLINE float straight_through(float given, float x, float hat, float low, float high, float middle, float above,
                              float* by_low, float* by_high, float* by_step) {
    float clipped = x < low ? low : x;
    clipped = clipped > high ? high : clipped;
    if (mixed) clipped = hat == x + above ? x : clipped;
    const float by_x = given * (clipped == x ? 1.0f : 0.0f), outside = given - by_x;
    const float beyond = x > middle ? outside : 0;
    *by_low += outside - beyond;
    *by_high += beyond;
    *by_step += given * (hat - clipped - above);
    return by_x;
}

// The same for many values of one group. sums: the gradients of low, high and step.
template <bool mixed>
INLINE void straight_through(const float* gradient, const float* values, const float* hats, int64_t size, float low,
                             float high, float above, float* out, double* sums) {
    const int lanes = 32;
    const int64_t piece = 2048;
    const float middle = (low + high) / 2;
    for (int64_t at = 0; at < size; at += piece) {
        const int64_t end = at + least(piece, size - at);
        float part[3][lanes] = {{0}};
        int64_t i = at;
        for (; i + lanes <= end; i += lanes)
            for (int j = 0; j < lanes; j++)
                out[i + j] = straight_through<mixed>(gradient[i + j], values[i + j], hats[i + j], low, high, middle,
                                                     above, part[0] + j, part[1] + j, part[2] + j);
        for (; i < end; i++)
            out[i] = straight_through<mixed>(gradient[i], values[i], hats[i], low, high, middle, above, part[0],
                                             part[1], part[2]);
        for (int kind = 0; kind < 3; kind++) {
            float sum = 0;
            for (int j = 0; j < lanes; j++) sum += part[kind][j];
            sums[kind] += sum;
        }
    }
}

// The codes of a few outputs of one group; see `adalog_codes_in_turn`. width: the number of these outputs, at most 32.
INLINE void codes_in_turn(const double* left, const double* form, const double* base, const double* scale,
                          const double* zero_point, double top, int64_t rows, int64_t outputs, int64_t width,
                          const int64_t* strides, double* codes, double* moved) {
    double held[64][32];  // `moved`, whose rows can be so far apart in memory that the cache would not hold them
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = row * outputs;
        const double own = form[row * (strides[0] + strides[1])];
        double pull[32], *move = held[row];
        for (int64_t i = 0; i < width; i++) pull[i] = left[at + i];
        for (int64_t before = 0; before < row; before++) {
            const double factor = form[before * strides[0] + row * strides[1]];
            for (int64_t i = 0; i < width; i++) pull[i] -= factor * held[before][i];
        }
        for (int64_t i = 0; i < width; i++) {
            const double value = base ? base[at + i] + pull[i] / own : pull[i];
            double code = rounded(value / scale[i]) + zero_point[i];
            code = code < 0 ? 0 : code;
            code = code > top ? top : code;
            const double level = (code - zero_point[i]) * scale[i];
            codes[at + i] = code;
            moved[at + i] = move[i] = base ? level - base[at + i] : (value - level) / own;
        }
    }
}

}  // namespace

API void adalog_nearest_uniform(const float* values, int64_t outer, int64_t groups, int64_t inner, const float* scale,
                                const float* zero_point, float top, float* out) {
    const int64_t size = outer * groups * inner;
    for (int64_t at = 0; at < size; at += inner) {
        const float step = scale[at / inner % groups], zero = zero_point[at / inner % groups];
        for (int64_t i = at; i < at + inner; i++) {
            float code = rounded(values[i] / step) + zero;
            code = code < 0 ? 0 : code;
            code = code > top ? top : code;
            out[i] = (code - zero) * step;
        }
    }
}

API void adalog_nearest_log(const float* values, int64_t size, float offset, float scale, float lowest, float highest,
                            int32_t drop, int32_t first, const float* __restrict ends, const float* __restrict levels,
                            float* __restrict out) {
    for (int64_t i = 0; i < size; i++)
        out[i] = log_level((values[i] + offset) / scale, lowest, highest, drop, first, ends, levels);
}

// sums: (groups, 3), zero at the start.
API void adalog_straight_through(const float* gradient, const float* values, const float* hats, int64_t outer,
                                 int64_t groups, int64_t inner, const float* low, const float* high, float above,
                                 int mixed, float* out, double* sums) {
    const int64_t size = outer * groups * inner;
    for (int64_t at = 0; at < size; at += inner) {
        const int64_t own = at / inner % groups;
        if (mixed)
            straight_through<true>(gradient + at, values + at, hats + at, inner, low[own], high[own], above, out + at,
                                   sums + 3 * own);
        else
            straight_through<false>(gradient + at, values + at, hats + at, inner, low[own], high[own], above, out + at,
                                    sums + 3 * own);
    }
}

API void adalog_uniform_errors_float(const float* values, int64_t outer, int64_t groups, int64_t inner, int64_t block,
                                     const float* scale, const float* zero_point, float top, int64_t count, float* out) {
    uniform_errors(values, outer, groups, inner, block, scale, zero_point, top, count, out);
}

API void adalog_uniform_errors_bfloat16(const float* values, int64_t outer, int64_t groups, int64_t inner,
                                        int64_t block, const float* scale, const float* zero_point, float top,
                                        int64_t count, bfloat16* out) {
    uniform_errors(values, outer, groups, inner, block, scale, zero_point, top, count, out);
}

API void adalog_table_errors_float(const float* values, const int32_t* bins, int64_t size, int64_t block,
                                   const float* tables, int64_t bin_count, int64_t count, float* out) {
    table_errors(values, bins, size, block, tables, bin_count, count, out);
}

API void adalog_table_errors_bfloat16(const float* values, const int32_t* bins, int64_t size, int64_t block,
                                      const float* tables, int64_t bin_count, int64_t count, bfloat16* out) {
    table_errors(values, bins, size, block, tables, bin_count, count, out);
}

// out: zero at the start. error: null without a Gram matrix.
API void adalog_sums_float(const float* product, const float* base, const float* error, int64_t outer, int64_t groups,
                           int64_t inner, int64_t block, int64_t count, double* out) {
    if (error)
        sums<float, true>(product, base, error, outer, groups, inner, block, count, out);
    else
        sums<float, false>(product, base, error, outer, groups, inner, block, count, out);
}

API void adalog_sums_bfloat16(const bfloat16* product, const float* base, const bfloat16* error, int64_t outer,
                              int64_t groups, int64_t inner, int64_t block, int64_t count, double* out) {
    if (error)
        sums<bfloat16, true>(product, base, error, outer, groups, inner, block, count, out);
    else
        sums<bfloat16, false>(product, base, error, outer, groups, inner, block, count, out);
}

// Choose the codes of up to 64 consecutive rows, one row after another, for weights that are transposed: (groups, rows,
// outputs). Before the code of a row is chosen, moved[j] * form[j, row] is subtracted from left[row] for each row j
// before it. Without a base, left is what is quantized, and moved is the error relative to form[row, row]. With a base,
// left / form[row, row] is added to the base, and moved is the change of the level.
// stride: between the groups of left, base and codes. strides: between the groups, rows and columns of form, (groups,
// rows, rows). scale, zero_point: (groups, outputs). moved: (groups, rows, outputs).
API void adalog_codes_in_turn(const double* left, const double* form, const double* base, const double* scale,
                              const double* zero_point, double top, int64_t groups, int64_t rows, int64_t outputs,
                              int64_t stride, int64_t form_group, int64_t form_row, int64_t form_column, double* codes,
                              double* moved) {
    const int64_t strides[2] = {form_row, form_column};
    for (int64_t group = 0; group < groups; group++)
        for (int64_t first = 0; first < outputs; first += 32) {
            const int64_t at = group * stride + first, own = group * outputs + first;
            const double *each = form + group * form_group, *from = base ? base + at : nullptr;
            double* to = moved + group * rows * outputs + first;
            if (outputs - first >= 32)  // a constant width makes faster loops
                codes_in_turn(left + at, each, from, scale + own, zero_point + own, top, rows, outputs, 32, strides,
                              codes + at, to);
            else
                codes_in_turn(left + at, each, from, scale + own, zero_point + own, top, rows, outputs,
                              outputs - first, strides, codes + at, to);
        }
}
