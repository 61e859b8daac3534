// Peak rates of this processor: how fast its instructions multiply bytes, read memory and compute functions.
//
// `roof.py` compiles and times these loops. Like native.cpp, this file includes itself once for each instruction set.
// Values stay in registers, and no result depends on the result before, so only the instructions themselves take time.

#ifndef ADALOG_ROOF

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#define ADALOG_X86 1
#include <immintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

namespace {

// Each function returns the number of products, bytes or values that its loop processed.
struct Roofs {
    int64_t (*dots)(int64_t rounds);
    int64_t (*bytes)(const uint8_t* data, int64_t size, int64_t rounds);
    int64_t (*exps)(int64_t rounds);
    int64_t (*erfs)(int64_t rounds);
    int64_t (*narrow)(int64_t rounds);
};

constexpr int CHAINS = 12;  // independent accumulators, more than the latency of an instruction in cycles

}  // namespace

#define ADALOG_ROOF 0
namespace roof_scalar {
#include "roof.cpp"
}
#undef ADALOG_ROOF
#ifdef ADALOG_X86
#define ADALOG_ROOF 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace roof_avx2 {
#include "roof.cpp"
}
#pragma GCC pop_options
#undef ADALOG_ROOF
#define ADALOG_ROOF 2
#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")
namespace roof_avxvnni {
#include "roof.cpp"
}
#pragma GCC pop_options
#undef ADALOG_ROOF
#define ADALOG_ROOF 3
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni")
namespace roof_avx512 {
#include "roof.cpp"
}
#pragma GCC pop_options
#undef ADALOG_ROOF
#define ADALOG_ROOF 4
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8")
namespace roof_amx {
#include "roof.cpp"
}
#pragma GCC pop_options
#undef ADALOG_ROOF
#endif

// Runs one loop at a level, which the caller knows to run here. what: 0 multiplies bytes, 1 reads bytes from `data`, 2
// computes 2^x, 3 computes erf, 4 multiplies bytes whose sums of products fit in 16 bits. Returns the number of products, bytes or values, or -1 if an argument is not valid.
API int64_t roof(int level, int what, const uint8_t* data, int64_t size, int64_t rounds) {
    static const Roofs* all[] = {
        &roof_scalar::roofs,
#ifdef ADALOG_X86
        &roof_avx2::roofs, &roof_avxvnni::roofs, &roof_avx512::roofs, &roof_amx::roofs,
#endif
    };
    if (level < 0 || level >= int(sizeof all / sizeof *all) || rounds < 0) return -1;
    if (what == 0) return all[level]->dots(rounds);
    if (what == 1) return data && size >= 0 ? all[level]->bytes(data, size, rounds) : -1;
    if (what == 2) return all[level]->exps(rounds);
    if (what == 3) return all[level]->erfs(rounds);
    return what == 4 ? all[level]->narrow(rounds) : -1;
}

#else  // ADALOG_ROOF: the loops =========================================================================================

namespace {

// --- vectors of W floats ---------------------------------------------------------------------------------------------

// `touch` makes the compiler assume that a value has changed and is needed, so it neither hoists nor drops the work.
#if ADALOG_ROOF >= 3
constexpr int W = 16;
using F = __m512;
INLINE F set(float x) { return _mm512_set1_ps(x); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F clamped(F a, F b) { return _mm512_max_ps(_mm512_min_ps(a, b), _mm512_sub_ps(_mm512_setzero_ps(), b)); }
INLINE F power_of_two(F x) {
    const F whole = _mm512_roundscale_ps(x, 8), rest = _mm512_sub_ps(x, whole);
    F y = fma(set(0.00134004f), rest, set(0.00967604f));
    y = fma(fma(y, rest, set(0.05550327f)), rest, set(0.24022107f));
    return _mm512_scalef_ps(fma(fma(y, rest, set(0.69314721f)), rest, set(1.0f)), whole);
}
INLINE void touch(F& x) { asm volatile("" : "+v"(x)); }
#elif ADALOG_ROOF
constexpr int W = 8;
using F = __m256;
INLINE F set(float x) { return _mm256_set1_ps(x); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F clamped(F a, F b) { return _mm256_max_ps(_mm256_min_ps(a, b), _mm256_sub_ps(_mm256_setzero_ps(), b)); }
INLINE F power_of_two(F x) {
    const F whole = _mm256_round_ps(x, 8), rest = _mm256_sub_ps(x, whole);
    F y = fma(set(0.00134004f), rest, set(0.00967604f));
    y = fma(fma(y, rest, set(0.05550327f)), rest, set(0.24022107f));
    y = fma(fma(y, rest, set(0.69314721f)), rest, set(1.0f));
    const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return mul(y, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23)));
}
INLINE void touch(F& x) { asm volatile("" : "+x"(x)); }
#else
constexpr int W = 1;
using F = float;
INLINE F set(float x) { return x; }
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F clamped(F a, F b) { return a > b ? b : a < -b ? -b : a; }
INLINE F power_of_two(F x) { return std::exp2(x); }
INLINE void touch(F& x) { asm volatile("" : "+m"(x)); }
#endif

// erf with an error of at most 3e-5: an odd polynomial up to 3, beyond which erf is 1 to within that error.
INLINE F erf_of(F x) {
    x = clamped(x, set(3.0f));
    const F t = mul(x, x);
    F y = fma(set(-4.469939085538499e-09f), t, set(2.3021529216293857e-07f));
    y = fma(y, t, set(-5.322654487827094e-06f));
    y = fma(y, t, set(7.394709973596036e-05f));
    y = fma(y, t, set(-0.000700995500665158f));
    y = fma(y, t, set(0.004897189326584339f));
    y = fma(y, t, set(-0.02645343542098999f));
    y = fma(y, t, set(0.11256714910268784f));
    y = fma(y, t, set(-0.376056432723999f));
    return mul(x, fma(y, t, set(1.1283761262893677f)));
}

template <class Function>
INLINE int64_t values(int64_t rounds, float start, Function function) {
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < CHAINS; i++) {
            F x = set(start);
            touch(x);
            F y = function(x);
            touch(y);
        }
    return rounds * CHAINS * W;
}

int64_t exps(int64_t rounds) {
    return values(rounds, -1.7f, [&](F x) { return power_of_two(x); });
}
int64_t erfs(int64_t rounds) {
    return values(rounds, 0.7f, [&](F x) { return erf_of(x); });
}

// --- products of bytes -------------------------------------------------------------------------------------------------

#if ADALOG_ROOF == 4

int64_t dots(int64_t rounds) {
    struct alignas(64) Tiles {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Tiles tiles;
    asm volatile("" : : "r"(&tiles) : "memory");
    _tile_loadconfig(&tiles);
    for (int64_t round = 0; round < rounds; round++) {  // four accumulators of two by two operands
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
    return rounds * 4 * 16 * 16 * 64;
}

#elif ADALOG_ROOF

// Adds products to each accumulator in turn. step: adds those of a vector, which the compiler takes for a new one each time.
template <class I, class Step>
INLINE int64_t chains(int64_t rounds, I left, Step step) {
    I sums[CHAINS] = {};
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) asm volatile("" : "+x"(sums[i]));  // else the compiler merges equal sums
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            asm volatile("" : "+x"(left));
            sums[i] = step(sums[i], left);
        }
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) asm volatile("" : "+x"(sums[i]));
    return rounds * CHAINS;
}

#if ADALOG_ROOF == 3
int64_t dots(int64_t rounds) {
    const __m512i right = _mm512_set1_epi32(0x7f010203);
    auto step = [&](__m512i sum, __m512i left) { return _mm512_dpbusd_epi32(sum, left, right); };
    return 64 * chains(rounds, _mm512_set1_epi32(0x01020304), step);
}
#elif ADALOG_ROOF == 2
int64_t dots(int64_t rounds) {
    const __m256i right = _mm256_set1_epi32(0x7f010203);
    auto step = [&](__m256i sum, __m256i left) { return _mm256_dpbusd_avx_epi32(sum, left, right); };
    return 32 * chains(rounds, _mm256_set1_epi32(0x01020304), step);
}
#else
// Bytes are multiplied as 16-bit numbers, so that a sum of two products does not saturate.
int64_t dots(int64_t rounds) {
    const __m256i right = _mm256_set1_epi32(0x007f0003);
    auto step = [&](__m256i sum, __m256i left) { return _mm256_add_epi32(sum, _mm256_madd_epi16(left, right)); };
    return 16 * chains(rounds, _mm256_set1_epi32(0x00020004), step);
}
// Sums of products stay in 16 bits, as if all of them fitted there.
int64_t narrow(int64_t rounds) {
    const __m256i right = _mm256_set1_epi32(0x01010203);
    auto step = [&](__m256i sum, __m256i left) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(left, right)); };
    return 32 * chains(rounds, _mm256_set1_epi32(0x01020301), step);
}
#endif

#else

int64_t dots(int64_t rounds) {
    int32_t sums[4] = {};
    uint32_t left = 3;
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(sums[i]));
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < 4; i++) {
            asm volatile("" : "+r"(left));
            sums[i] += int32_t(left) * 5;
        }
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(sums[i]));
    return rounds * 4;
}

#endif

// --- bytes -------------------------------------------------------------------------------------------------------------

int64_t bytes(const uint8_t* data, int64_t size, int64_t rounds) {
    constexpr int64_t STEP = 8 * 64;
    for (int64_t round = 0; round < rounds; round++)
        for (int64_t at = 0; at + STEP <= size; at += STEP) {
#if ADALOG_ROOF >= 3
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                __m512i line = _mm512_loadu_si512(data + at + 64 * i);
                asm volatile("" : : "v"(line));
            }
#elif ADALOG_ROOF
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32 * i));
                asm volatile("" : : "x"(line));
            }
#else
#pragma GCC unroll 64
            for (int i = 0; i < 64; i++) {
                uint64_t word;
                std::memcpy(&word, data + at + 8 * i, 8);
                asm volatile("" : : "r"(word));
            }
#endif
        }
    return rounds * (size / STEP) * STEP;
}

}  // namespace

#if ADALOG_ROOF != 1
int64_t narrow(int64_t rounds) { return dots(rounds); }
#endif
const Roofs roofs{dots, bytes, exps, erfs, narrow};

#endif
