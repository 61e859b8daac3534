// The kernels for NEON with matrix products of bytes, so that instruction sets compile at the same time: see native.cpp.
#undef ADALOG_PART
#define ADALOG_PART 6
#include "native.cpp"
