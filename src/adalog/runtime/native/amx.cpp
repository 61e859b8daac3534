// The kernels for AMX, so that instruction sets compile at the same time: see native.cpp.
#undef ADALOG_PART
#define ADALOG_PART 4
#include "native.cpp"
