// The kernels for NEON with dot products, so that instruction sets compile at the same time: see native.cpp.
#undef ADALOG_PART
#define ADALOG_PART 5
#include "native.cpp"
