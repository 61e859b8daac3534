// Kernels of the executor "native": products of codes, and the float operations around them. Plain C ABI, no dependency.
//
// g++ -O3 -std=c++17 -shared -fPIC -pthread native.cpp -o _native.so; which instructions are used is found out at run
// time. `native.py` is the only caller.

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#define ADALOG_X86 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

// --- what runs here --------------------------------------------------------------------------------------------------

enum Level { SCALAR = 0, AVX2 = 1, AVX512 = 2, AMX = 3 };  // each can do what those before it can

// Bits of adalog_features: 0 scalar, 1 AVX2, 2 AVX-512-VNNI, 3 AMX-int8, 4 AVX-512-bf16. What both processor and
// operating system support; AMX only if Linux grants its registers.
API unsigned adalog_features(void) {
    unsigned found = 1u << SCALAR;
#ifdef ADALOG_X86
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return found;  // no XGETBV
    bool fma = (c >> 12 & 1) && (c >> 29 & 1);                            // FMA3 and F16C come with AVX2
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    if (fma && (low & 0x6) == 0x6 && (b >> 5 & 1)) found |= 1u << AVX2;
    // AVX-512 F, DQ, BW, VL, and VBMI and VNNI
    bool wide = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (c >> 1 & 1) && (c >> 11 & 1);
    if (!(found >> AVX2 & 1) || !wide || (low & 0xe6) != 0xe6) return found;
    found |= 1u << AVX512;
    bool tiles = (d >> 24 & 1) && (d >> 25 & 1) && (low & 0x60000) == 0x60000;
    if (tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0) found |= 1u << AMX;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1)) found |= 1u << 4;
#endif
    return found;
}

// Of this interface: native.py refuses a library of another one.
API int adalog_abi(void) { return 1; }
