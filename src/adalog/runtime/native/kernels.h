// The functions of native.cpp, for programs that link it. Arguments are structures in the layout of structures.h.
#pragma once

#include <cstdint>

extern "C" {
unsigned adalog_features(void);
int adalog_abi(void);
void* adalog_open(int threads, int level);
void adalog_close(void* context);
void* adalog_weights(const uint8_t* codes, const int32_t* zero, int64_t columns, int64_t terms, int bits, int left_zero,
                     int left_top);
void adalog_weights_free(void* weights);
int adalog_linear(void* context, const void* linear);
int adalog_product(void* context, const void* matrices);
int adalog_attention(void* context, const void* attention);
int adalog_norm(void* context, const void* norm);
int adalog_encode(void* context, const void* encode);
int adalog_patches(void* context, const void* patches);
int adalog_depthwise(void* context, const void* depthwise);
}
