// The kernels for AVX2, so that instruction sets compile at the same time: see native.cpp.
#undef ADALOG_PART
#define ADALOG_PART 1
#include "native.cpp"
