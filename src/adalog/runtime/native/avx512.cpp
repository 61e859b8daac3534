// The kernels for AVX-512-VNNI, so that instruction sets compile at the same time: see native.cpp.
#undef ADALOG_PART
#define ADALOG_PART 3
#include "native.cpp"
