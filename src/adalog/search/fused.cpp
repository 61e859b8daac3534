// The elementwise work of a search on its candidates, in one pass. `fused.py` calls it, and has the same in PyTorch.
//
// Values are (outer, groups, inner). There is one scale and one sum per group and candidate. Errors are the same to the
// bit as PyTorch's: nothing is contracted to fused multiply-adds, and halves round to even.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math", "fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif
// Other C libraries, such as musl, cannot choose between clones of a function when they load it.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define DISPATCHED __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DISPATCHED
#endif
#define API extern "C" __attribute__((visibility("default"))) DISPATCHED
#define INLINE static inline __attribute__((always_inline))

namespace {

typedef uint16_t bfloat16;

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

template <typename T>
INLINE void uniform_errors(const float* values, int64_t outer, int64_t groups, int64_t inner, const float* scale,
                           const float* zero_point, float top, int64_t count, T* out) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t o = 0; o < outer; o++)
            for (int64_t g = 0; g < groups; g++) {
                const float step = scale[k * groups + g], low = -zero_point[k * groups + g], high = top + low;
                const float* from = values + (o * groups + g) * inner;
                T* to = out + ((k * outer + o) * groups + g) * inner;
                for (int64_t i = 0; i < inner; i++) {
                    float code = __builtin_nearbyintf(from[i] / step);
                    code = code < low ? low : code;
                    code = code > high ? high : code;
                    put(to + i, code * step - from[i]);
                }
            }
}

template <typename T>
INLINE void table_errors(const float* values, const int32_t* bins, int64_t size, const float* table, T* out) {
    for (int64_t i = 0; i < size; i++) put(out + i, table[bins[i]] - values[i]);
}

// The sum of (product + base)^2, or of (product + 2 base) error for a Gram matrix. It has many partial sums, because a
// single one would lose digits, and each addition would wait for the one before.
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
                 int64_t count, double* out) {
    const int64_t block = 2048;
    for (int64_t k = 0; k < count; k++)
        for (int64_t o = 0; o < outer; o++)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t at = (o * groups + g) * inner, from = k * outer * groups * inner + at;
                double sum = 0;
                for (int64_t i = 0; i < inner; i += block) {
                    const int64_t size = inner - i < block ? inner - i : block;
                    sum += block_sum<T, gram>(product + from + i, base + at + i, gram ? error + from + i : nullptr, size);
                }
                out[k * groups + g] = sum + (o ? out[k * groups + g] : 0);
            }
}

}  // namespace

API void adalog_uniform_errors_float(const float* values, int64_t outer, int64_t groups, int64_t inner,
                                     const float* scale, const float* zero_point, float top, int64_t count, float* out) {
    uniform_errors(values, outer, groups, inner, scale, zero_point, top, count, out);
}

API void adalog_uniform_errors_bfloat16(const float* values, int64_t outer, int64_t groups, int64_t inner,
                                        const float* scale, const float* zero_point, float top, int64_t count,
                                        bfloat16* out) {
    uniform_errors(values, outer, groups, inner, scale, zero_point, top, count, out);
}

API void adalog_table_errors_float(const float* values, const int32_t* bins, int64_t size, const float* table,
                                   float* out) {
    table_errors(values, bins, size, table, out);
}

API void adalog_table_errors_bfloat16(const float* values, const int32_t* bins, int64_t size, const float* table,
                                      bfloat16* out) {
    table_errors(values, bins, size, table, out);
}

// error: null where there is no Gram matrix.
API void adalog_sums_float(const float* product, const float* base, const float* error, int64_t outer, int64_t groups,
                           int64_t inner, int64_t count, double* out) {
    if (error)
        sums<float, true>(product, base, error, outer, groups, inner, count, out);
    else
        sums<float, false>(product, base, error, outer, groups, inner, count, out);
}

API void adalog_sums_bfloat16(const bfloat16* product, const float* base, const bfloat16* error, int64_t outer,
                              int64_t groups, int64_t inner, int64_t count, double* out) {
    if (error)
        sums<bfloat16, true>(product, base, error, outer, groups, inner, count, out);
    else
        sums<bfloat16, false>(product, base, error, outer, groups, inner, count, out);
}
