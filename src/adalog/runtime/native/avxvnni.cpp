// The kernels for AVX2 with AVX-VNNI, so that instruction sets compile at the same time: see native.cpp.
#undef ADALOG_PART
#define ADALOG_PART 2
#include "native.cpp"
