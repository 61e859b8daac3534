// Runs recorded calls of the compiled kernels on a processor that has no Python.
//
//     replay FILE LEVEL THREADS: FILE holds calls as recorded_kernels.py writes them; what they wrote goes to standard output.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

static FILE* file;

static int64_t number() {
    int64_t found;
    if (std::fread(&found, 8, 1, file) != 1) std::exit(3);
    return found;
}
// Each in memory of its own, which ends where it ends.
static uint8_t* bytes(int64_t& count) {
    count = number();
    uint8_t* found = static_cast<uint8_t*>(std::aligned_alloc(64, (count + 63) / 64 * 64 + 64));
    if (count && std::fread(found, count, 1, file) != 1) std::exit(3);
    return found;
}

int main(int, char** given) {
    file = std::fopen(given[1], "rb");
    const int level = std::atoi(given[2]);
    void* context = adalog_open(std::atoi(given[3]), level);
    if (!file || !context) return 4;  // this processor lacks the level
    using Kernel = int (*)(void*, const void*);
    const Kernel kernels[] = {adalog_linear, adalog_product, adalog_attention, adalog_norm,
                              adalog_encode, adalog_patches, adalog_depthwise};
    for (int64_t calls = number(); calls; calls--) {
        const int64_t kernel = number();
        std::vector<uint8_t*> memory(number());
        std::vector<int64_t> sizes(memory.size());
        for (size_t i = 0; i < memory.size(); i++) memory[i] = bytes(sizes[i]);
        int64_t size;
        uint8_t* arguments = bytes(size);
        for (int64_t pointers = number(); pointers; pointers--) {
            const int64_t at = number(), which = number();
            std::memcpy(arguments + at, &memory[which], sizeof(void*));
        }
        if (kernel == 0) {  // a stored weight: columns, terms, bits, left_zero, left_top
            int64_t told[5];
            for (int64_t& each : told) each = number();
            void* weights = adalog_weights(memory[0], reinterpret_cast<int32_t*>(memory[1]), told[0], told[1], told[2], told[3], told[4]);
            std::memcpy(arguments, &weights, sizeof weights);
        }
        if (kernels[kernel](context, arguments)) return 5;
        for (int64_t written = number(); written; written--) {
            const int64_t which = number();
            std::fwrite(memory[which], sizes[which], 1, stdout);
        }
    }
    return 0;
}
