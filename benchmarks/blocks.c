/* A plugin of QEMU that counts how often each block of a program runs: see arm.py.
 *
 *     qemu-aarch64 -plugin blocks.so,counts=COUNTS program
 *
 * Each line of COUNTS has the address of a block, its instructions, and how often it ran. The declarations are those of
 * QEMU's plugin interface, of which Debian has no header. They are of version 1, which QEMU up to 8 has.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*done)(uint64_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int operation, void* number, uint64_t operand);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*done)(uint64_t, void*), void* data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);

enum { ADD = 0 }; /* the operation that adds to a number */

int qemu_plugin_version = 1;

typedef struct Block {
    uint64_t address, count;
    size_t instructions;
    struct Block* before;
} Block;

static Block* last;
static const char* path;

static void translated(uint64_t id, struct qemu_plugin_tb* tb) {
    (void)id;
    Block* block = malloc(sizeof *block);
    if (!block) abort();
    *block = (Block){qemu_plugin_tb_vaddr(tb), 0, qemu_plugin_tb_n_insns(tb), last};
    last = block;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD, &block->count, 1);
}

static void finished(uint64_t id, void* data) {
    (void)id, (void)data;
    FILE* file = fopen(path, "w");
    if (!file) abort();
    for (const Block* block = last; block; block = block->before)
        fprintf(file, "%" PRIu64 " %zu %" PRIu64 "\n", block->address, block->instructions, block->count);
    fclose(file);
}

int qemu_plugin_install(uint64_t id, const void* info, int count, char** given) {
    (void)info;
    if (count != 1) return 1;
    path = given[0] + sizeof "counts=" - 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
