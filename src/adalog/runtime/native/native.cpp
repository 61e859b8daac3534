// Kernels of the executor "native": products of codes, and the float operations around them. Plain C ABI, no dependencies.
//
//     g++ -O2 -std=c++17 -shared -fPIC -pthread native.cpp ../../quantizers/elementwise.cpp -o _native.so
//
// The instruction set is chosen at run time. `abi.py` and `model.cpp` are the callers. docs/reference/kernels.md has the design.
//
// The file has two parts. The first part is the same for all instruction sets. It includes this file again for each
// instruction set. This compiles the second part, the kernels, once per instruction set in a separate namespace.
//
// Instruction sets can also be compiled at the same time: with ADALOG_PART, this file compiles only one of them, or for
// ADALOG_PART = 0 the interface and the kernels of all processors. `avx2.cpp` and the files like it are the other parts.
//
// Integers: operands are bytes. A left operand is codes (uint8), and a right operand is codes minus a middle (int8), so
// that one instruction multiplies them. The parts of the zero points that were not subtracted are corrected by a constant
// per column (`base`) and, if a right operand has 8 bits, by a multiple of the row's sum (`moved`). All sums are modulo
// 2^32. The bounds that `reference.plan` proves guarantee that the result fits.

#ifndef ADALOG_LEVEL

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <vector>

#include "structures.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#if defined(__x86_64__) && defined(__linux__)
#define ADALOG_X86 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

#ifdef __aarch64__
#define ADALOG_ARM 1
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

#ifdef __wasm_simd128__
#define ADALOG_WASM_SIMD 1
#include <wasm_simd128.h>
#endif

// Properties of the level that the kernels are compiled for.
#define ADALOG_YMM (ADALOG_LEVEL == 1 || ADALOG_LEVEL == 2)
#define ADALOG_WIDE (ADALOG_LEVEL == 3 || ADALOG_LEVEL == 4)
#define ADALOG_NEON (ADALOG_LEVEL == 5 || ADALOG_LEVEL == 6)
#define ADALOG_WASM (ADALOG_LEVEL == 7)

// All functions between these two may use the instructions that `features` names.
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

#ifndef API  // CMakeLists.txt hides these functions: programs in C call those of adalog.h
#define API extern "C" __attribute__((visibility("default")))
#endif
#define INLINE inline __attribute__((always_inline))
#define NOT_INLINE __attribute__((noinline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace {

// On a processor that has several of them, a later level is at least as fast as those before it.
enum Level { SCALAR = 0, AVX2 = 1, AVXVNNI = 2, AVX512 = 3, AMX = 4, NEON = 5, I8MM = 6, WASM = 7 };

constexpr int PANEL = 16;       // columns of a right operand that are stored together
constexpr int QUAD = 4;         // panels that a product computes at once
constexpr int GROUP = 4;        // terms of one column that are stored together: one lane of a dot product
constexpr int LINE = 64;        // bytes of one group of a panel
constexpr int STEP = 64;        // terms are padded to a multiple of this: one AMX tile
constexpr int ROWS = 16;        // most rows of accumulators at once
constexpr int64_t MOST = int64_t(1) << 40;  // limit of all sizes, so that checks of their products do not overflow
constexpr int64_t LONGEST = 1 << 24;        // limit of the terms and columns of a product's operand
constexpr size_t MOST_SCRATCH = 1 << 28;    // limit of a thread's scratch bytes; rows may overlap, so memory sizes do not limit it

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// --- memory and threads ------------------------------------------------------------------------------------------------

template <class T>
struct Aligned {  // an array of zeros that is aligned to a cache line
    std::unique_ptr<uint8_t[]> memory;
    T* data = nullptr;
    size_t bytes = 0;
    void resize(uint64_t count) {
        if (count * sizeof(T) <= bytes) return;
        if (count > (PTRDIFF_MAX - LINE) / sizeof(T)) throw std::bad_alloc();  // only if addresses have 32 bits
        data = nullptr, bytes = 0;
        memory.reset(new uint8_t[count * sizeof(T) + LINE]());
        data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + LINE - 1) / LINE * LINE);
        bytes = count * sizeof(T);
    }
};

// Divides a thread's scratch memory into parts. With start = 0 it only counts the bytes that they take.
struct Carver {
    uintptr_t start;
    uint64_t used = 0;  // may exceed what addresses of 32 bits reach: `Context::run` refuses that
    template <class T>
    T* take(uint64_t count) {
        T* part = reinterpret_cast<T*>(uintptr_t(start + used));
        used += rounded_up(count * sizeof(T), LINE);
        return part;
    }
};
template <class Scratch, class Arguments>
uint64_t size_of(const Arguments& of) {
    Carver carver{0};
    Scratch scratch(carver, of);
    return carver.used;
}

struct Context;
using Task = void (*)(const void* arguments, int64_t number, uint8_t* scratch);

// The kernels of an instruction set. Each of them runs one task of an operation.
struct Kernels {
    Task linear, product, attention, norm, encode, depthwise;
    void (*begin)(), (*end)();  // called before and after a thread's tasks
};

struct Context {
    int level;
    const Kernels* kernels;

    Context(int threads, int which) : level(which), ranges(threads), scratch(threads) {
        try {
            for (int i = 1; i < threads; i++) workers.emplace_back([this, i] { work(i); });
        } catch (...) {  // this machine cannot start more threads
            stop();
            throw;
        }
    }
    ~Context() { stop(); }
    // True in a forked child of the process that started the workers. They do not exist in it, so they can neither work
    // nor be joined.
    bool deserted() const { return !workers.empty() && getpid() != process; }
    // Runs tasks 0 ... count - 1 in any order on any thread. No result depends on the order or the thread. Returns 0, or
    // 2 if there is not enough memory or a task needs too much.
    int run(Task task, const void* arguments, int64_t count, uint64_t bytes) noexcept {
        if (bytes > MOST_SCRATCH) return 2;
        try {
            std::lock_guard<std::mutex> one_at_a_time(one);
            for (auto& each : scratch) each.resize(bytes);
            todo = {task, arguments};
            const int64_t threads = int64_t(ranges.size()), each = count / threads, more = count % threads;
            for (int64_t i = 0, end = 0; i < threads; i++)
                ranges[i].next = end, ranges[i].end = end = end + each + (i < more);
            if (workers.empty() || count < 2 || deserted()) {
                share(0);
                return 0;
            }
            gate.store(OPEN);
            if (asleep.load()) make_way();
            {
                std::lock_guard<std::mutex> lock(mutex);
                round.fetch_add(1);
            }
            wake.notify_all();
            share(0);
            // Do not wait for a worker that has not joined yet: on a busy machine it may not get a processor.
            gate.fetch_and(~OPEN);
            for (int i = 0; gate.load(); i++) i < 1000 ? pause() : std::this_thread::yield();
            return 0;
        } catch (...) {
            return 2;
        }
    }

private:
    std::mutex one;  // held during an operation
    struct {
        Task task;
        const void* arguments;
    } todo{};
    // The tasks of a thread. Other threads take them only when they have no tasks of their own left. The tasks cover
    // neighbouring rows, and the next operation mostly covers the same rows, so the rows stay in the thread's own cache.
    struct alignas(64) Range {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    std::vector<Range> ranges;
    static constexpr int OPEN = 1 << 30;
    std::atomic<int> gate{0}, asleep{0};  // gate: the number of workers in the operation, and OPEN if more may join
    std::atomic<unsigned> round{0};
    bool stopping = false;
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<Aligned<uint8_t>> scratch;
    std::vector<std::thread> workers;
    const pid_t process = getpid();

    // Keeps workers off the caller's processor. Linux often wakes them there, and they would share that processor with
    // the caller while others are idle.
    void make_way() {
#if defined(__linux__) && !defined(__ANDROID__)  // Android lacks the call until API level 36
        const int here = sched_getcpu();
        if (here < 0 || here == avoided) return;
        cpu_set_t others;
        if (sched_getaffinity(0, sizeof others, &others) || CPU_COUNT(&others) < 2) return;
        CPU_CLR(here, &others);
        for (auto& worker : workers) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
        avoided = here;
#endif
    }
#if defined(__linux__) && !defined(__ANDROID__)
    int avoided = -1;  // the processor that workers avoid
#endif
    static void pause() {
#ifdef ADALOG_X86
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
            round.fetch_add(1);
        }
        wake.notify_all();
        for (auto& worker : workers) worker.join();
    }
    void share(int who) {
        if (scratch[who].data) *reinterpret_cast<int64_t*>(scratch[who].data) = -1;  // see LinearScratch::summed
        kernels->begin();
        for (size_t i = 0; i < ranges.size(); i++) {
            Range& range = ranges[(who + i) % ranges.size()];
            for (int64_t number; (number = range.next.fetch_add(1)) < range.end;)
                todo.task(todo.arguments, number, scratch[who].data);
        }
        kernels->end();
    }
    void work(int who) {
        for (unsigned seen = 0;;) {
            for (int i = 0; i < 4000 && round.load(std::memory_order_acquire) == seen; i++) pause();
            if (round.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                asleep.fetch_add(1);
                wake.wait(lock, [&] { return round.load() != seen; });
                asleep.fetch_sub(1);
            }
            seen = round.load(std::memory_order_acquire);
            if (stopping) return;
            int now = gate.load();
            while (now & OPEN && !gate.compare_exchange_weak(now, now + 1)) {}
            if (!(now & OPEN)) continue;  // too late: the operation is done
            share(who);
            gate.fetch_sub(1);
        }
    }
};

// --- right operands ----------------------------------------------------------------------------------------------------

#ifdef ADALOG_WASM_SIMD
// What WebAssembly's kernels need to know about four panels to multiply two rows of left bytes below 16 at once.
struct Pairs {
    int32_t lines[QUAD];            // lines whose products, two per line, can be summed in 12 bits
    int32_t columns[QUAD * PANEL];  // eight times the sum of each column
};
#endif

// A right operand: bytes minus the middle m, in panels of 16 columns, and within a panel in lines of 4 terms. Panel p,
// line g, column c, term t is at p panel + 64 g + 4 c + t. Terms are padded with zeros.
struct Right {
    const int8_t* data;
    int64_t panel, lines;
    const int32_t* base;   // start value of the accumulators, per column
    const int32_t* moved;  // factor of the row sums of the left operand, per column; or null
    int together;          // lines whose products, two per line, can be summed in 16 bits; 0 if not even one line can
#ifdef ADALOG_WASM_SIMD
    const Pairs* pairs;    // or null, if two rows cannot be multiplied at once
#endif
};

// The number that is subtracted from codes to make them signed bytes. It is the zero point unless codes have 8 bits.
int middle(int bits, int zero) { return bits < 8 ? zero : 128; }

// `Right::together` for left bytes up to left_top and right codes of this many bits minus their middle.
int added_together(int left_top, int bits) {
    return 32767 / (2 * std::max(1, left_top) * (bits < 8 ? (1 << bits) - 1 : 128));
}

// A stored right operand. With up to 4 bits, two codes share a byte: of the 16 lines of a step, line g is in the low
// halves of stored line g % 8, or in the high halves if g is 8 or more.
struct Weights {
    int64_t columns, terms, lines, panels;
    int bits, together;
    bool halves;
    Aligned<uint8_t> data;
    Aligned<uint8_t> middles;      // the middle for each byte of a line: (panels, 64)
    Aligned<int32_t> base, moved;  // (panels * 16)
    bool moves = false;
    int64_t panel_bytes() const { return lines * LINE / (halves ? 2 : 1); }
};

bool fits(int64_t rows, int64_t row, int64_t columns, int64_t size, int64_t bytes) {
    if (rows < 0 || columns < 0 || row < columns || rows > MOST || row > MOST) return false;
    if (!rows || !columns) return true;
    __int128 last = (__int128(rows - 1) * row + columns) * size;
    return last <= bytes;
}

bool is_byte(int32_t zero) { return zero >= 0 && zero <= 255; }
bool is_length(int64_t count) { return count >= 1 && count <= LONGEST; }

// True if the last entry of (batches, heads, rows, columns) with these distances lies within the memory.
bool fits(const Side& side, int64_t batches, int64_t heads, int64_t rows, int64_t columns) {
    if (!side.data || side.batch < 0 || side.head < 0 || side.row < 0 || batches < 0 || heads < 0) return false;
    if (batches > MOST || heads > MOST || rows > MOST || columns > MOST || rows < 0 || columns < 0) return false;
    if (side.batch > MOST || side.head > MOST || side.row > MOST) return false;
    if (!batches || !heads) return true;
    // Kernels read these for each head, even if there are no rows.
    if (!side.zero || side.bits < 2 || side.bits > 8 || !is_byte(side.top)) return false;
    if (!std::all_of(side.zero, side.zero + heads, is_byte)) return false;
    if (!rows || !columns) return true;
    __int128 last = __int128(batches - 1) * side.batch + __int128(heads - 1) * side.head +
                    __int128(rows - 1) * side.row + columns;
    return last <= side.bytes;
}

bool good(const Steps& steps) {
    return steps.heap && steps.values && steps.depth >= 4 && steps.depth <= 16 && steps.planes >= 1 &&
           steps.planes <= 2 && steps.length >= (int64_t(1) << steps.depth) + 32 && steps.buckets && steps.count >= 1 &&
           steps.count <= 1 << 16 && (!steps.shift || (steps.shift >= 16 && steps.shift < 24 && steps.count > 1)) &&
           steps.least >= 0 && steps.least <= 1 << 15 && steps.top >= 0 && steps.top <= 255 &&
           (!steps.most || (steps.most >= 1 && steps.most <= 3 && steps.near && steps.near_length >= 4 * 32));
}

// Checks all fields, but not that the data fits in its memory.
bool good(const Output& out, int64_t parameters) {
    if (!out.data || out.kind < SUMS || out.kind > STEPS) return false;
    if (out.kind != SUMS && (!out.scale || !out.bias || out.parameters < parameters)) return false;
    if (out.kind == CODES && (!out.high || !out.top)) return false;
    if (out.activation < NONE || out.activation > SIGMOID) return false;
    if (out.activation && out.kind != FLOATS && (out.kind != CODES || !out.code_scale || !out.code_zero)) return false;
    if (out.kind == STEPS && (!good(out.steps) || (out.steps.planes > 1 && !out.more))) return false;
    return !out.residual || out.kind == FLOATS || (out.kind == CODES && out.activation);
}
int64_t size_of(const Output& out) { return out.kind == SUMS || out.kind == FLOATS ? 4 : 1; }

int64_t placed(const int32_t* places, int64_t row) { return places ? places[row] : row; }

// Returns the number of rows that the memory must have for these places, or -1 if a place is below `least`.
int64_t reach(const int32_t* places, int64_t count, int64_t rows, int32_t least) {
    if (!places) return rows;
    if (rows < 0 || count < rows) return -1;
    int32_t low = least, high = -1;
    for (int64_t r = 0; r < rows; r++) low = std::min(low, places[r]), high = std::max(high, places[r]);
    return low < least ? -1 : int64_t(high) + 1;
}

bool good(const Output& out, int64_t parameters, int64_t rows, int64_t columns) {
    const int64_t reached = reach(out.place, out.places, rows, -1);
    if (!good(out, parameters) || !fits(reached, out.row, columns, size_of(out), out.bytes)) return false;
    return !out.residual || fits(reach(out.added_to, out.places, rows, 0), out.row, columns, 4, out.residual_bytes);
}
bool good(const Output& out, int64_t parameters, int64_t batches, int64_t batch, int64_t heads, int64_t head,
          int64_t rows, int64_t columns) {
    if (!good(out, parameters) || out.place || out.added_to || batch < 0 || head < 0 || out.row < 0) return false;
    if (batch > MOST || head > MOST || out.row > MOST) return false;
    if (!batches || !heads || !rows || !columns) return true;
    __int128 last =
        __int128(batches - 1) * batch + __int128(heads - 1) * head + __int128(rows - 1) * out.row + columns;
    return last * size_of(out) <= out.bytes && (!out.residual || last * 4 <= out.residual_bytes);
}

// --- scratch memory of tasks ---------------------------------------------------------------------------------------------

// Rows per task of a linear. The left operand of a task is at most about half a megabyte, which stays in the second-level
// cache, and all tasks have about the same number of rows.
int64_t rows_of(const Linear& of) {
    const int64_t most = std::min<int64_t>(1024, std::max<int64_t>(2 * ROWS, (1 << 19) / (of.weights->lines * GROUP) / ROWS * ROWS));
    const int64_t rows = std::max<int64_t>(of.rows, 1), parts = rounded_up(rows, most) / most;
    return rounded_up(rounded_up(rows, parts) / parts, ROWS);
}
struct LinearScratch {
    int64_t* summed;        // number of the task rows that row_sums is for; it is first, so that `share` can reset it
    int8_t* right;          // (4 panels, lines, 64), if two codes share a byte
    int32_t* sums;          // (2, 16, 64)
    uint8_t *left, *more;   // (16, padded terms)
    int32_t* row_sums;      // of all rows of a task
    LinearScratch(Carver& carver, const Linear& of) {
        int64_t terms = of.weights->lines * GROUP;
        summed = carver.take<int64_t>(1);
        right = carver.take<int8_t>(of.weights->halves ? QUAD * PANEL * terms : 0);
        sums = carver.take<int32_t>(2 * ROWS * QUAD * PANEL);
        left = carver.take<uint8_t>(ROWS * terms);
        more = carver.take<uint8_t>(of.more ? ROWS * terms : 0);
        row_sums = carver.take<int32_t>(of.weights->moves ? rows_of(of) : 0);
    }
};

// A right operand that is packed just before it is multiplied.
struct PackedScratch {
    int8_t* data;
    int32_t *base, *moved;
    uint8_t* ones;
    int64_t panels, lines;
    PackedScratch(Carver& carver, int64_t terms, int64_t columns) {
        lines = rounded_up(terms, STEP) / GROUP, panels = rounded_up(columns, PANEL * QUAD) / PANEL;
        data = carver.take<int8_t>(panels * lines * LINE);
        base = carver.take<int32_t>(panels * PANEL);
        moved = carver.take<int32_t>(panels * PANEL);
        ones = carver.take<uint8_t>(PANEL * lines * GROUP);
    }
};
struct ProductScratch {
    PackedScratch right;
    uint8_t *left, *more;
    int32_t *sums, *row_sums;
    ProductScratch(Carver& carver, const Matrices& of) : right(carver, of.terms, of.columns) {
        left = carver.take<uint8_t>(PANEL * right.lines * GROUP);
        more = carver.take<uint8_t>(of.left.more ? PANEL * right.lines * GROUP : 0);
        sums = carver.take<int32_t>(PANEL * right.panels * PANEL);
        row_sums = carver.take<int32_t>(PANEL);
    }
};
struct AttentionScratch {
    ProductScratch scores;
    PackedScratch values;
    uint8_t *left, *more;  // bytes of probabilities, (16, padded keys)
    int32_t *sums, *row_sums;
    AttentionScratch(Carver& carver, const Attention& of)
        : scores(carver, of.scores), values(carver, of.scores.columns, of.columns) {
        left = carver.take<uint8_t>(PANEL * values.lines * GROUP);
        more = carver.take<uint8_t>(of.steps.planes > 1 ? PANEL * values.lines * GROUP : 0);
        sums = carver.take<int32_t>(PANEL * values.panels * PANEL);
        row_sums = carver.take<int32_t>(PANEL);
    }
};
constexpr int64_t NORM_ROWS = 32;
struct DepthwiseScratch {
    int32_t *start, *sums;  // (channels): of a pixel, before and after its products are added
    const uint8_t** seen;   // the pixel under each tap of the kernel: (pairs, 2)
    int64_t* steps;         // from there to the pixel under the tap for the next output: (pairs, 2)
    DepthwiseScratch(Carver& carver, const Depthwise& of) {
        start = carver.take<int32_t>(of.channels);
        sums = carver.take<int32_t>(of.channels);
        seen = carver.take<const uint8_t*>(2 * of.pairs);
        steps = carver.take<int64_t>(2 * of.pairs);
    }
};
constexpr int64_t MOST_PAIRS = 128;  // limit of pairs of taps: sums of this many products of 16 by 9 bits fit in 32 bits

// Computes the height and width of a convolution's output. Returns false if the sizes are not valid.
template <class Windows>
bool sizes_of(const Windows& of, int64_t size[2]) {
    for (int64_t value : {of.images, of.channels, of.height, of.width})
        if (value < 0 || value > 1 << 24) return false;
    for (int i = 0; i < 2; i++) {
        const int64_t full = i ? of.width : of.height;
        for (int64_t value : {of.kernel[i], of.stride[i], of.dilation[i]})
            if (value < 1 || value > 1 << 16) return false;
        if (of.padding[i] < 0 || of.padding[i] > 1 << 16) return false;
        const int64_t reach = of.dilation[i] * (of.kernel[i] - 1) + 1;
        if (full + 2 * of.padding[i] < reach) return false;
        size[i] = (full + 2 * of.padding[i] - reach) / of.stride[i] + 1;
    }
    if (__int128(of.images) * size[0] * size[1] > MOST) return false;
    return __int128(of.images) * of.channels * of.height * of.width <= of.bytes;
}

// Copies the windows of one row of the output. For one channel and one row of the kernel, a window is a run of bytes.
void patches(const void* arguments, int64_t number, uint8_t*) {
    const Patches& of = *static_cast<const Patches*>(arguments);
    int64_t size[2];
    sizes_of(of, size);
    const int64_t image = number / size[0], y = number % size[0], wide = of.kernel[1], across = of.dilation[1];
    uint8_t* out = of.out + number * size[1] * of.row;
    for (int64_t part = 0; part < of.channels * of.kernel[0]; part++, out += wide) {
        const int64_t down = y * of.stride[0] - of.padding[0] + part % of.kernel[0] * of.dilation[0];
        const bool outside = down < 0 || down >= of.height;
        const int64_t line = ((image * of.channels + part / of.kernel[0]) * of.height + down) * of.width;
        int64_t x = 0;
        auto one_by_one = [&](int64_t end) {
            for (; x < end; x++)
                for (int64_t j = 0; j < wide; j++) {
                    const int64_t at = x * of.stride[1] - of.padding[1] + j * across;
                    out[x * of.row + j] = outside || at < 0 || at >= of.width ? uint8_t(of.fill) : of.data[line + at];
                }
        };
        // Copies `take` bytes at once. The next part overwrites the bytes that are too many.
        auto at_once = [&](auto take) {
            if (of.width < take) return;
            one_by_one(std::min(size[1], rounded_up(of.padding[1], of.stride[1]) / of.stride[1]));
            const int64_t end = std::min(size[1], (of.width - take + of.padding[1]) / of.stride[1] + 1);
            const uint8_t* from = of.data + line + x * of.stride[1] - of.padding[1];
            for (; x < end; x++, from += of.stride[1]) std::memcpy(out + x * of.row, from, take);
        };
        const bool last = part + 1 == of.channels * of.kernel[0];
        if (!outside && across == 1) {
            if (wide == 4 || (wide == 3 && !last)) at_once(std::integral_constant<int64_t, 4>());
            if (wide == 8 || (wide == 7 && !last)) at_once(std::integral_constant<int64_t, 8>());
            if (wide == 16) at_once(std::integral_constant<int64_t, 16>());
            at_once(wide);
        }
        one_by_one(size[1]);
    }
}

}  // namespace

// --- the kernels, for each instruction set -------------------------------------------------------------------------------

#ifdef ADALOG_PART
#define ADALOG_COMPILES(level) (ADALOG_PART == level)
#else
#define ADALOG_COMPILES(level) 1
#endif

#if ADALOG_COMPILES(0)
#define ADALOG_LEVEL 0
namespace scalar {
#include "native.cpp"
}
#undef ADALOG_LEVEL
#endif
#ifdef ADALOG_X86
#if ADALOG_COMPILES(1)
#define ADALOG_LEVEL 1
BEGIN_TARGET("avx2,fma")
namespace avx2 {
#include "native.cpp"
}
END_TARGET
#undef ADALOG_LEVEL
extern "C" const void* adalog_avx2() { return &avx2::kernels; }
#endif
#if ADALOG_COMPILES(2)
#define ADALOG_LEVEL 2
BEGIN_TARGET("avx2,fma,avxvnni")
namespace avxvnni {
#include "native.cpp"
}
END_TARGET
#undef ADALOG_LEVEL
extern "C" const void* adalog_avxvnni() { return &avxvnni::kernels; }
#endif
#if ADALOG_COMPILES(3)
#define ADALOG_LEVEL 3
BEGIN_TARGET("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni")
namespace avx512 {
#include "native.cpp"
}
END_TARGET
#undef ADALOG_LEVEL
extern "C" const void* adalog_avx512() { return &avx512::kernels; }
#endif
#if ADALOG_COMPILES(4)
#define ADALOG_LEVEL 4
BEGIN_TARGET("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,amx-tile,amx-int8")
namespace amx {
#include "native.cpp"
}
END_TARGET
#undef ADALOG_LEVEL
extern "C" const void* adalog_amx() { return &amx::kernels; }
#endif
#endif
#ifdef ADALOG_ARM
#if ADALOG_COMPILES(5)
#define ADALOG_LEVEL 5
BEGIN_TARGET("arch=armv8.2-a+dotprod")
namespace neon {
#include "native.cpp"
}
END_TARGET
#undef ADALOG_LEVEL
extern "C" const void* adalog_neon() { return &neon::kernels; }
#endif
#if ADALOG_COMPILES(6)
#define ADALOG_LEVEL 6
BEGIN_TARGET("arch=armv8.2-a+dotprod+i8mm")
namespace i8mm {
#include "native.cpp"
}
END_TARGET
#undef ADALOG_LEVEL
extern "C" const void* adalog_i8mm() { return &i8mm::kernels; }
#endif
#endif
#if defined(ADALOG_WASM_SIMD) && ADALOG_COMPILES(7)
#define ADALOG_LEVEL 7
namespace wasm {
#include "native.cpp"
}
#undef ADALOG_LEVEL
extern "C" const void* adalog_wasm() { return &wasm::kernels; }
#endif

#if ADALOG_COMPILES(0)

// The kernels of other instruction sets, which other files may compile.
extern "C" const void *adalog_avx2(), *adalog_avxvnni(), *adalog_avx512(), *adalog_amx(), *adalog_neon(), *adalog_i8mm(),
    *adalog_wasm();

namespace {

const Kernels* kernels_of(int level) {
    const void* all[WASM + 1] = {&scalar::kernels};
#ifdef ADALOG_X86
    all[AVX2] = adalog_avx2(), all[AVXVNNI] = adalog_avxvnni(), all[AVX512] = adalog_avx512(), all[AMX] = adalog_amx();
#endif
#ifdef ADALOG_ARM
    all[NEON] = adalog_neon(), all[I8MM] = adalog_i8mm();
#endif
#ifdef ADALOG_WASM_SIMD
    all[WASM] = adalog_wasm();
#endif
    return static_cast<const Kernels*>(all[level]);
}

}  // namespace

// --- the interface -------------------------------------------------------------------------------------------------------
// Operations return 0 if they ran, 1 if sizes do not fit together (nothing is read or written then), and 2 if there is not
// enough memory or more than `MOST_SCRATCH` would be needed.

// Returns a bit for each `Level` that both the processor and the operating system support, and bit 8 for AVX-512-bf16. AMX
// is supported only if Linux grants its registers.
API unsigned adalog_features(void) {
    unsigned found = 1u << SCALAR;
#ifdef ADALOG_X86
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return found;  // no XGETBV
    bool fused = c >> 12 & 1;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    if (!fused || (low & 0x6) != 0x6 || !(b >> 5 & 1)) return found;
    found |= 1u << AVX2;
    unsigned more, b2, c2, d2;
    if (!__get_cpuid_count(7, 1, &more, &b2, &c2, &d2)) more = 0;
    if (more >> 4 & 1) found |= 1u << AVXVNNI;
    bool wide = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);  // F, DQ, BW, VL
    if (!wide || !(c >> 11 & 1) || (low & 0xe6) != 0xe6) return found;
    found |= 1u << AVX512;
    bool tiles = (d >> 24 & 1) && (d >> 25 & 1) && (low & 0x60000) == 0x60000;
    tiles = tiles && (c >> 1 & 1) && (c >> 6 & 1);  // VBMI and VBMI2, which every processor with tiles has
    if (tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0) found |= 1u << AMX;
    if (more >> 5 & 1) found |= 1u << 8;
#endif
#if defined(ADALOG_ARM) && defined(__linux__)
    if (!(getauxval(AT_HWCAP) >> 20 & 1)) return found;  // dot products
    found |= 1u << NEON;
    if (getauxval(AT_HWCAP2) >> 13 & 1) found |= 1u << I8MM;
#elif defined(ADALOG_ARM) && defined(__APPLE__)
    found |= 1u << NEON;  // all of Apple's 64-bit processors for computers have it
    int has = 0;
    size_t size = sizeof has;
    if (!sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) && has) found |= 1u << I8MM;
#endif
#ifdef ADALOG_WASM_SIMD
    found |= 1u << WASM;  // a module with other instructions than the browser's does not load
#endif
    return found;
}

// Returns the version of this interface. library.py refuses a library of another version.
API int adalog_abi(void) { return 16; }

// Returns the name of a row of `FIELDS`, and writes its offset and size in bytes. Null after the last. library.py refuses a
// library whose structures differ.
API const char* adalog_layout(int64_t index, int64_t* offset, int64_t* size) {
    if (index < 0 || index >= int64_t(sizeof FIELDS / sizeof *FIELDS)) return nullptr;
    *offset = FIELDS[index].offset, *size = FIELDS[index].size;
    return FIELDS[index].name;
}

// Starts threads for the kernels of a level. Returns null if the level or that many threads are not available.
API Context* adalog_open(int threads, int level) {
    if (threads < 1 || threads > 1024 || level < SCALAR || level > WASM || !(adalog_features() >> level & 1)) return nullptr;
    const Kernels* found = kernels_of(level);
    if (!found) return nullptr;
    try {
        auto context = std::make_unique<Context>(threads, level);
        context->kernels = found;
        return context.release();
    } catch (...) {
        return nullptr;
    }
}
// Does nothing in a forked child, in which the threads do not exist.
API void adalog_close(Context* context) {
    if (context && !context->deserted()) delete context;
}

// codes: (columns, terms). zero: (columns). left_zero, left_top: the zero point and the largest byte of the left operand.
API Weights* adalog_weights(const uint8_t* codes, const int32_t* zero, int64_t columns, int64_t terms, int bits,
                            int left_zero, int left_top) {
    if (!codes || !zero || columns < 1 || terms < 1 || bits < 2 || bits > 8 || columns > LONGEST || terms > LONGEST)
        return nullptr;
    if (!is_byte(left_zero) || !is_byte(left_top) || !std::all_of(zero, zero + columns, is_byte)) return nullptr;
    try {
        auto made = std::make_unique<Weights>();
        Weights& w = *made;
        w.columns = columns, w.terms = terms, w.bits = bits, w.together = added_together(left_top, bits), w.halves = bits <= 4;
        w.lines = rounded_up(terms, STEP) / GROUP, w.panels = rounded_up(columns, PANEL) / PANEL;
        w.data.resize(w.panels * w.panel_bytes());
        w.middles.resize(w.panels * LINE);
        w.base.resize(w.panels * PANEL + QUAD * PANEL);
        w.moved.resize(w.panels * PANEL + QUAD * PANEL);
        for (int64_t p = 0; p < w.panels; p++) {
            for (int c = 0; c < PANEL; c++) {
                int64_t column = p * PANEL + c;
                if (column >= columns) break;
                int m = middle(bits, zero[column]), left_over = zero[column] - m;
                std::memset(w.middles.data + p * LINE + GROUP * c, m, GROUP);
                int64_t sum = -m * terms;
                const uint32_t middles = uint32_t(m) * 0x01010101u;
                uint8_t* at = w.data.data + p * w.panel_bytes() + GROUP * c;
                // Each turn stores a group of four terms. Padded terms must be zero after the middle is subtracted.
                for (int64_t line = 0, t = 0; line < w.lines; line++, t += GROUP) {
                    uint32_t four = middles;
                    const int64_t from = std::min(t, terms), there = std::min<int64_t>(terms - from, GROUP);
                    if (there == GROUP) std::memcpy(&four, codes + column * terms + from, GROUP);
                    else std::memcpy(&four, codes + column * terms + from, there);
                    const uint32_t pairs = (four & 0x00ff00ffu) + (four >> 8 & 0x00ff00ffu);
                    sum += (pairs * 0x00010001u) >> 16;
                    if (w.halves) {
                        const int64_t step = line / 16, half = line % 16;
                        uint8_t* to = at + (step * 8 + half % 8) * LINE;
                        uint32_t both;
                        std::memcpy(&both, to, GROUP);
                        both |= (four & 0x0f0f0f0fu) << (half >= 8 ? 4 : 0);
                        std::memcpy(to, &both, GROUP);
                    } else {  // bytes minus bytes, without a borrow from one byte to the next
                        const uint32_t highest = 0x80808080u;
                        four = ((four | highest) - (middles & ~highest)) ^ ((four ^ ~middles) & highest);
                        std::memcpy(at + line * LINE, &four, GROUP);
                    }
                }
                sum -= m * (w.lines * GROUP - terms);  // the padded terms are no part of it
                // sum (x - zx)(w - zw), with w = (w - m) + m
                w.base.data[column] = int32_t(uint32_t(-int64_t(left_zero) * sum + terms * left_zero * int64_t(left_over)));
                w.moved.data[column] = -left_over;
                w.moves |= left_over != 0;
            }
        }
        return made.release();
    } catch (...) {
        return nullptr;
    }
}
API void adalog_weights_free(Weights* weights) { delete weights; }
API int64_t adalog_weights_bytes(const Weights* weights) { return weights->data.bytes; }

API int adalog_linear(Context* context, const Linear* of) {
    const Weights* w = of->weights;
    if (!context || !w || !of->data || !fits(of->rows, of->row, w->terms, 1, of->bytes)) return 1;
    if (!good(of->out, w->columns, of->rows, w->columns)) return 1;
    int64_t parts = rounded_up(of->rows, rows_of(*of)) / rows_of(*of);
    int64_t quads = rounded_up(w->panels, QUAD) / QUAD;
    return context->run(context->kernels->linear, of, parts * quads, size_of<LinearScratch>(*of));
}

API int adalog_product(Context* context, const Matrices* of) {
    if (!context || !fits(of->left, of->batches, of->heads, of->rows, of->terms)) return 1;
    bool across = of->right.transposed;
    if (!fits(of->right, of->batches, of->heads, across ? of->columns : of->terms, across ? of->terms : of->columns))
        return 1;
    if (of->right.more || !is_length(of->terms) || !is_length(of->columns)) return 1;
    if (!good(of->out, of->heads * of->columns, of->batches, of->out_batch, of->heads, of->out_head, of->rows, of->columns))
        return 1;
    return context->run(context->kernels->product, of, of->batches * of->heads, size_of<ProductScratch>(*of));
}

API int adalog_attention(Context* context, const Attention* of) {
    const Matrices& scores = of->scores;
    if (!context || !of->factor || !good(of->steps) || !(of->code_scale >= 0)) return 1;
    if (!is_length(scores.columns) || !is_length(scores.terms) || !is_length(of->columns)) return 1;
    if (!fits(scores.left, scores.batches, scores.heads, scores.rows, scores.terms) || scores.left.more) return 1;
    if (!fits(scores.right, scores.batches, scores.heads, scores.columns, scores.terms) || scores.right.more) return 1;
    if (!scores.right.transposed || of->values.transposed || of->values.more || !is_byte(of->zero)) return 1;
    if (!fits(of->values, scores.batches, scores.heads, scores.columns, of->columns)) return 1;
    if (of->bias) {
        if (of->bias_tables < 1 || of->bias_tables > INT32_MAX || (of->bias_heads != 1 && of->bias_heads != scores.heads)) return 1;
        if (!of->bias_of || of->bias_batches < scores.batches) return 1;
        if (!std::all_of(of->bias_of, of->bias_of + scores.batches,
                         [&](int32_t table) { return table >= 0 && table < of->bias_tables; }))
            return 1;
        __int128 count = __int128(of->bias_tables) * of->bias_heads * scores.rows * scores.columns;
        if (count * 4 > of->bias_bytes) return 1;
    }
    if (!good(of->out, scores.heads * of->columns, scores.batches, of->out_batch, scores.heads, of->out_head, scores.rows,
              of->columns))
        return 1;
    return context->run(context->kernels->attention, of, scores.batches * scores.heads, size_of<AttentionScratch>(*of));
}

API int adalog_norm(Context* context, const Norm* of) {
    if (!context || !of->data || of->columns < 1 || !fits(of->rows, of->row, of->columns, 4, of->bytes)) return 1;
    if (!good(of->out, of->columns, of->rows, of->columns) || of->out.kind == SUMS) return 1;
    return context->run(context->kernels->norm, of, rounded_up(of->rows, NORM_ROWS) / NORM_ROWS, 0);
}

API int adalog_encode(Context* context, const Encode* of) {
    if (!context || !of->data || !fits(of->rows, of->row, of->columns, 4, of->bytes)) return 1;
    if (!good(of->out, of->columns, of->rows, of->columns) || of->out.kind == SUMS) return 1;
    if (of->out.place || of->out.added_to || (of->out.kind == CODES && of->out.activation)) return 1;
    return context->run(context->kernels->encode, of, rounded_up(of->rows, NORM_ROWS) / NORM_ROWS, 0);
}

API int adalog_depthwise(Context* context, const Depthwise* of) {
    int64_t size[2];
    if (!context || !of->data || !of->zero || !of->factors || !sizes_of(*of, size)) return 1;
    if (!is_length(of->channels) || of->pairs < 1 || of->pairs > MOST_PAIRS) return 1;
    if ((of->kernel[0] * of->kernel[1] + 1) / 2 != of->pairs) return 1;
    const int64_t rows = of->images * size[0];
    if (!good(of->out, of->channels, rows * size[1], of->channels) || of->out.place || of->out.added_to) return 1;
    return context->run(context->kernels->depthwise, of, rows, size_of<DepthwiseScratch>(*of));
}

API int adalog_patches(Context* context, const Patches* of) {
    int64_t size[2], images = of->images, channels = of->channels;
    if (!context || !of->data || !of->out || !sizes_of(*of, size)) return 1;
    __int128 columns = __int128(channels) * of->kernel[0] * of->kernel[1];
    if (columns > MOST) return 1;
    if (!fits(images * size[0] * size[1], of->row, int64_t(columns), 1, of->out_bytes)) return 1;
    return context->run(patches, of, images * size[0], 0);
}

#endif  // ADALOG_COMPILES(0)

#else  // ADALOG_LEVEL: the kernels ============================================================================================

namespace {

// --- vectors of W floats or integers: all of them, or only the first few -----------------------------------------------

#if ADALOG_WIDE

constexpr int W = 16;
using F = __m512;
using I = __m512i;
struct All {};
struct Some {
    __mmask16 mask;
    explicit Some(int count) : mask(__mmask16((1u << count) - 1)) {}
};
INLINE F load(const float* at, All) { return _mm512_loadu_ps(at); }
INLINE F load(const float* at, Some some) { return _mm512_maskz_loadu_ps(some.mask, at); }
INLINE I load(const int32_t* at, All) { return _mm512_loadu_si512(at); }
INLINE I load(const int32_t* at, Some some) { return _mm512_maskz_loadu_epi32(some.mask, at); }
INLINE void store(float* at, F x, All) { _mm512_storeu_ps(at, x); }
INLINE void store(float* at, F x, Some some) { _mm512_mask_storeu_ps(at, some.mask, x); }
INLINE void store(int32_t* at, I x, All) { _mm512_storeu_si512(at, x); }
INLINE void store(int32_t* at, I x, Some some) { _mm512_mask_storeu_epi32(at, some.mask, x); }
INLINE void store_bytes(uint8_t* at, I x, All) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(x)); }
INLINE void store_bytes(uint8_t* at, I x, Some some) { _mm512_mask_cvtepi32_storeu_epi8(at, some.mask, x); }
// Packs the lowest bytes of 64 integers.
INLINE I bytes_of(I a, I b, I c, I d) {
    const I low = _mm512_set1_epi32(255);
    a = _mm512_packus_epi32(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
    c = _mm512_packus_epi32(_mm512_and_si512(c, low), _mm512_and_si512(d, low));
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, c));
}
// Packs as many integers, clamped to 0 ... 255.
INLINE I small_bytes_of(I a, I b, I c, I d) {
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d)));
}
INLINE void store(uint8_t* at, I x) { _mm512_storeu_si512(at, x); }
INLINE I least_bytes(I a, I b) { return _mm512_min_epu8(a, b); }
INLINE I load(const uint8_t* at) { return _mm512_loadu_si512(at); }
INLINE F set(float x) { return _mm512_set1_ps(x); }
INLINE I set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F least(F a, F b) { return _mm512_min_ps(a, b); }  // returns b if a is NaN
INLINE F most(F a, F b) { return _mm512_max_ps(a, b); }
INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
INLINE I shift_left_8(I a) { return _mm512_slli_epi32(a, 8); }
INLINE I shift_right_8(I a) { return _mm512_srli_epi32(a, 8); }
INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I to_nearest(F a) { return _mm512_cvtps_epi32(a); }
INLINE I without_fraction(F a) { return _mm512_cvttps_epi32(a); }
INLINE F either(F a, F b, Some some) { return _mm512_mask_mov_ps(b, some.mask, a); }
INLINE float total(F a) { return _mm512_reduce_add_ps(a); }
INLINE float largest(F a) { return _mm512_reduce_max_ps(a); }
INLINE F whole_of(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F times_power(F y, F whole) { return _mm512_scalef_ps(y, whole); }

#elif ADALOG_YMM

constexpr int W = 8;
using F = __m256;
using I = __m256i;
struct All {};
struct Some {
    __m256i mask;
    int count;
    explicit Some(int n) : mask(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))), count(n) {}
};
INLINE F load(const float* at, All) { return _mm256_loadu_ps(at); }
INLINE F load(const float* at, Some some) { return _mm256_maskload_ps(at, some.mask); }
INLINE I load(const int32_t* at, All) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
INLINE I load(const int32_t* at, Some some) { return _mm256_maskload_epi32(at, some.mask); }
INLINE void store(float* at, F x, All) { _mm256_storeu_ps(at, x); }
INLINE void store(float* at, F x, Some some) { _mm256_maskstore_ps(at, some.mask, x); }
INLINE void store(int32_t* at, I x, All) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }
INLINE void store(int32_t* at, I x, Some some) { _mm256_maskstore_epi32(at, some.mask, x); }
// Packs the lowest bytes of 32 integers.
INLINE I small_bytes_of(I a, I b, I c, I d);
INLINE I bytes_of(I a, I b, I c, I d) {
    const I low = _mm256_set1_epi32(255);
    return small_bytes_of(_mm256_and_si256(a, low), _mm256_and_si256(b, low), _mm256_and_si256(c, low), _mm256_and_si256(d, low));
}
// Packs as many integers, clamped to 0 ... 255.
INLINE I small_bytes_of(I a, I b, I c, I d) {
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)), order);
}
INLINE void store(uint8_t* at, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }
INLINE I load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
INLINE I least_bytes(I a, I b) { return _mm256_min_epu8(a, b); }
INLINE int64_t bytes_of(I x) {  // the lowest byte of each integer
    const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i packed = _mm256_shuffle_epi8(x, low);
    uint64_t first = uint32_t(_mm256_extract_epi32(packed, 0)), second = uint32_t(_mm256_extract_epi32(packed, 4));
    return int64_t(first | second << 32);
}
INLINE void store_bytes(uint8_t* at, I x, All) {
    int64_t bytes = bytes_of(x);
    std::memcpy(at, &bytes, 8);
}
INLINE void store_bytes(uint8_t* at, I x, Some some) {
    int64_t bytes = bytes_of(x);
    std::memcpy(at, &bytes, some.count);
}
INLINE F set(float x) { return _mm256_set1_ps(x); }
INLINE I set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F least(F a, F b) { return _mm256_min_ps(a, b); }
INLINE F most(F a, F b) { return _mm256_max_ps(a, b); }
INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
INLINE I shift_left_8(I a) { return _mm256_slli_epi32(a, 8); }
INLINE I shift_right_8(I a) { return _mm256_srli_epi32(a, 8); }
INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
INLINE I to_nearest(F a) { return _mm256_cvtps_epi32(a); }
INLINE I without_fraction(F a) { return _mm256_cvttps_epi32(a); }
INLINE F either(F a, F b, Some some) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(some.mask)); }
INLINE float total(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE float largest(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
INLINE F whole_of(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F times_power(F y, F whole) {
    return mul(y, _mm256_castsi256_ps(_mm256_slli_epi32(add(_mm256_cvtps_epi32(whole), set(127)), 23)));
}

#elif ADALOG_NEON

constexpr int W = 4;
using F = float32x4_t;
using I = int32x4_t;
struct All {};
struct Some {
    int count;
    explicit Some(int n) : count(n) {}
};
INLINE F load(const float* at, All) { return vld1q_f32(at); }
INLINE I load(const int32_t* at, All) { return vld1q_s32(at); }
INLINE I load(const uint8_t* at) { return vreinterpretq_s32_u8(vld1q_u8(at)); }
template <class T>
INLINE auto load(const T* at, Some some) {
    T entries[W] = {};
    std::memcpy(entries, at, some.count * sizeof(T));
    return load(entries, All{});
}
INLINE void store(float* at, F x, All) { vst1q_f32(at, x); }
INLINE void store(int32_t* at, I x, All) { vst1q_s32(at, x); }
INLINE void store(uint8_t* at, I x) { vst1q_u8(at, vreinterpretq_u8_s32(x)); }
template <class T, class V>
INLINE void store(T* at, V x, Some some) {
    T entries[W];
    store(entries, x, All{});
    std::memcpy(at, entries, some.count * sizeof(T));
}
// Packs the lowest bytes of 16 integers.
INLINE I bytes_of(I a, I b, I c, I d) {
    const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_s32(a), vreinterpretq_u16_s32(b));
    const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_s32(c), vreinterpretq_u16_s32(d));
    return vreinterpretq_s32_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)));
}
// Packs as many integers, clamped to 0 ... 255.
INLINE I small_bytes_of(I a, I b, I c, I d) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b)), high = vcombine_s16(vqmovn_s32(c), vqmovn_s32(d));
    return vreinterpretq_s32_u8(vcombine_u8(vqmovun_s16(low), vqmovun_s16(high)));
}
template <class Which>
INLINE void store_bytes(uint8_t* at, I x, Which which) {
    uint8_t bytes[4 * W];
    store(bytes, bytes_of(x, x, x, x));
    if constexpr (std::is_same_v<Which, Some>) std::memcpy(at, bytes, which.count);
    else std::memcpy(at, bytes, W);
}
INLINE I least_bytes(I a, I b) {
    return vreinterpretq_s32_u8(vminq_u8(vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b)));
}
INLINE F set(float x) { return vdupq_n_f32(x); }
INLINE I set(int32_t x) { return vdupq_n_s32(x); }
INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
INLINE F add(F a, F b) { return vaddq_f32(a, b); }
INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
INLINE F div(F a, F b) { return vdivq_f32(a, b); }
INLINE F least(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE F most(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE I add(I a, I b) { return vaddq_s32(a, b); }
INLINE I mul(I a, I b) { return vmulq_s32(a, b); }
INLINE I shift_left_8(I a) { return vshlq_n_s32(a, 8); }
INLINE I shift_right_8(I a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 8)); }
INLINE F to_float(I a) { return vcvtq_f32_s32(a); }
INLINE I to_nearest(F a) { return vcvtnq_s32_f32(a); }
INLINE I without_fraction(F a) { return vcvtq_s32_f32(a); }
INLINE F either(F a, F b, Some some) {
    const I lanes = {0, 1, 2, 3};
    return vbslq_f32(vcltq_s32(lanes, set(some.count)), a, b);
}
INLINE float total(F a) { return vaddvq_f32(a); }
INLINE float largest(F a) { return vmaxnmvq_f32(a); }
INLINE F whole_of(F x) { return vrndnq_f32(x); }
INLINE F times_power(F y, F whole) {
    return mul(y, vreinterpretq_f32_s32(vshlq_n_s32(add(to_nearest(whole), set(127)), 23)));
}

#elif ADALOG_WASM

constexpr int W = 4;
typedef float F __attribute__((vector_size(16)));
using I = v128_t;
struct All {};
struct Some {
    int count;
    explicit Some(int n) : count(n) {}
};
INLINE F load(const float* at, All) { return F(wasm_v128_load(at)); }
INLINE I load(const int32_t* at, All) { return wasm_v128_load(at); }
INLINE I load(const uint8_t* at) { return wasm_v128_load(at); }
template <class T>
INLINE auto load(const T* at, Some some) {
    T entries[W] = {};
    std::memcpy(entries, at, some.count * sizeof(T));
    return load(entries, All{});
}
INLINE void store(float* at, F x, All) { wasm_v128_store(at, I(x)); }
INLINE void store(int32_t* at, I x, All) { wasm_v128_store(at, x); }
INLINE void store(uint8_t* at, I x) { wasm_v128_store(at, x); }
template <class T, class V>
INLINE void store(T* at, V x, Some some) {
    T entries[W];
    store(entries, x, All{});
    std::memcpy(at, entries, some.count * sizeof(T));
}
INLINE F set(float x) { return F(wasm_f32x4_splat(x)); }
INLINE I set(int32_t x) { return wasm_i32x4_splat(x); }
// Packs 16 integers, clamped to 0 ... 255.
INLINE I small_bytes_of(I a, I b, I c, I d) {
    return wasm_u8x16_narrow_i16x8(wasm_i16x8_narrow_i32x4(a, b), wasm_i16x8_narrow_i32x4(c, d));
}
// Packs the lowest bytes of as many integers.
INLINE I bytes_of(I a, I b, I c, I d) {
    const I low = set(255);
    return small_bytes_of(wasm_v128_and(a, low), wasm_v128_and(b, low), wasm_v128_and(c, low), wasm_v128_and(d, low));
}
template <class Which>
INLINE void store_bytes(uint8_t* at, I x, Which which) {
    const int32_t bytes = wasm_i32x4_extract_lane(bytes_of(x, x, x, x), 0);
    if constexpr (std::is_same_v<Which, Some>) std::memcpy(at, &bytes, which.count);
    else std::memcpy(at, &bytes, W);
}
INLINE I least_bytes(I a, I b) { return wasm_u8x16_min(a, b); }
INLINE F add(F a, F b) { return F(wasm_f32x4_add(I(a), I(b))); }
INLINE F sub(F a, F b) { return F(wasm_f32x4_sub(I(a), I(b))); }
INLINE F mul(F a, F b) { return F(wasm_f32x4_mul(I(a), I(b))); }
INLINE F div(F a, F b) { return F(wasm_f32x4_div(I(a), I(b))); }
INLINE F fma(F a, F b, F c) { return add(mul(a, b), c); }  // rounds twice: WebAssembly has no other way
INLINE F least(F a, F b) { return F(wasm_f32x4_pmin(I(b), I(a))); }  // returns b if a is NaN
INLINE F most(F a, F b) { return F(wasm_f32x4_pmax(I(b), I(a))); }
INLINE I add(I a, I b) { return wasm_i32x4_add(a, b); }
INLINE I mul(I a, I b) { return wasm_i32x4_mul(a, b); }
INLINE I shift_left_8(I a) { return wasm_i32x4_shl(a, 8); }
INLINE I shift_right_8(I a) { return wasm_u32x4_shr(a, 8); }
INLINE F to_float(I a) { return F(wasm_f32x4_convert_i32x4(a)); }
INLINE F whole_of(F x) { return F(wasm_f32x4_nearest(I(x))); }
INLINE I without_fraction(F a) { return wasm_i32x4_trunc_sat_f32x4(I(a)); }
INLINE I to_nearest(F a) { return without_fraction(whole_of(a)); }
INLINE F either(F a, F b, Some some) {
    return F(wasm_v128_bitselect(I(a), I(b), wasm_i32x4_lt(wasm_i32x4_const(0, 1, 2, 3), set(some.count))));
}
INLINE float total(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
INLINE float largest(F a) { return std::max(std::max(a[0], a[2]), std::max(a[1], a[3])); }
INLINE F times_power(F y, F whole) { return mul(y, F(wasm_i32x4_shl(add(without_fraction(whole), set(127)), 23))); }

#else

constexpr int W = 1;
using F = float;
using I = int32_t;
struct All {};
struct Some {
    explicit Some(int) {}
};
template <class Which>
INLINE F load(const float* at, Which) { return *at; }
template <class Which>
INLINE I load(const int32_t* at, Which) { return *at; }
template <class Which>
INLINE void store(float* at, F x, Which) { *at = x; }
template <class Which>
INLINE void store(int32_t* at, I x, Which) { *at = x; }
template <class Which>
INLINE void store_bytes(uint8_t* at, I x, Which) { *at = uint8_t(x); }
INLINE F set(float x) { return x; }
INLINE I set(int32_t x) { return x; }
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE F add(F a, F b) { return a + b; }
INLINE F sub(F a, F b) { return a - b; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F div(F a, F b) { return a / b; }
INLINE F least(F a, F b) { return a < b ? a : b; }
INLINE F most(F a, F b) { return a > b ? a : b; }
INLINE I add(I a, I b) { return I(uint32_t(a) + uint32_t(b)); }
INLINE I mul(I a, I b) { return I(uint32_t(a) * uint32_t(b)); }
INLINE I shift_left_8(I a) { return I(uint32_t(a) << 8); }
INLINE I shift_right_8(I a) { return I(uint32_t(a) >> 8); }
INLINE F to_float(I a) { return F(a); }
INLINE I to_nearest(F a) { return I(std::nearbyint(a)); }
INLINE F either(F a, F, Some) { return a; }
INLINE float total(F a) { return a; }
INLINE float largest(F a) { return a; }
INLINE F power_of_two(F x) { return std::exp2(x); }

#endif

#if ADALOG_LEVEL
// 2^x for x from -126 to about 0, with a relative error below 2e-7.
INLINE F power_of_two(F x) {
    const F whole = whole_of(x), rest = sub(x, whole);
    F y = set(0.0013276466634124517f);
    y = fma(y, rest, set(0.009675540961325169f));
    y = fma(y, rest, set(0.05550713464617729f));
    y = fma(y, rest, set(0.24022120237350464f));
    y = fma(y, rest, set(0.6931469440460205f));
    y = fma(y, rest, set(1.0000001192092896f));
    return times_power(y, whole);
}
#endif

// Calls body(i, which) for each vector of n entries.
template <class Body>
INLINE void over(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + W <= n; i += W) body(i, All{});
    if (W > 1 && i < n) body(i, Some(int(n - i)));
}

// --- functions of few values ---------------------------------------------------------------------------------------------

// Searches the heap for the value at one x.
INLINE int32_t value_at(const Steps& steps, float x) {
    int32_t at = 1;
    for (int l = 0; l < steps.depth; l++) at = 2 * at + (x < steps.heap[at]);
    return steps.values[at - (1 << steps.depth)];
}

#if ADALOG_LEVEL

// Reads W buckets, and splits them into their thresholds and their pairs of values. Buckets are loaded one by one: a gather
// is not faster, and it is slow on some processors. They meet in registers, because a vector that is loaded from several
// recent stores waits until all of them have reached the cache.
INLINE void unzip(const Bucket* buckets, const int32_t* numbers, F& thresholds, I& pairs) {
#if ADALOG_WASM
    auto two = [&](int i) INLINE_LAMBDA {
        return wasm_v128_load64_lane(buckets + numbers[i + 1], wasm_v128_load64_zero(buckets + numbers[i]), 1);
    };
    const I one = two(0), other = two(2);
    thresholds = F(wasm_i32x4_shuffle(one, other, 0, 2, 4, 6));
    pairs = wasm_i32x4_shuffle(one, other, 1, 3, 5, 7);
#elif ADALOG_NEON
    auto two = [&](int i) INLINE_LAMBDA {
        int64_t both;  // two numbers take one move to the registers of integers
        std::memcpy(&both, numbers + i, sizeof both);
        return vcombine_f32(vld1_f32(&buckets[int32_t(both)].threshold), vld1_f32(&buckets[both >> 32].threshold));
    };
    const float32x4_t one = two(0), other = two(2);
    thresholds = vuzp1q_f32(one, other), pairs = vreinterpretq_s32_f32(vuzp2q_f32(one, other));
#else
    auto two = [&](int i) INLINE_LAMBDA {
        const __m128i one = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(buckets + numbers[i]));
        return _mm_loadh_pi(_mm_castsi128_ps(one), reinterpret_cast<const __m64*>(buckets + numbers[i + 1]));
    };
    // Each half of the vectors gets its four thresholds and its four pairs; `unpack` would leave them in another order.
    auto four = [&](int i, __m128& first, __m128& second) INLINE_LAMBDA {
        const __m128 one = two(i), other = two(i + 2);
        first = _mm_shuffle_ps(one, other, 0x88), second = _mm_shuffle_ps(one, other, 0xdd);
    };
    __m128 first[W / 4], second[W / 4];
#pragma GCC unroll 4
    for (int i = 0; i < W / 4; i++) four(4 * i, first[i], second[i]);
#if ADALOG_WIDE
    auto joined = [&](const __m128 (&parts)[4]) INLINE_LAMBDA {
        const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(parts[0]), parts[1], 1);
        const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(parts[2]), parts[3], 1);
        return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1));
    };
    thresholds = joined(first), pairs = _mm512_castps_si512(joined(second));
#else
    thresholds = _mm256_insertf128_ps(_mm256_castps128_ps256(first[0]), first[1], 1);
    pairs = _mm256_castps_si256(_mm256_insertf128_ps(_mm256_castps128_ps256(second[0]), second[1], 1));
#endif
#endif
}
// Returns the bucket numbers for buckets that grow with the distance from a centre. half: the buckets on either side.
INLINE I by_distance(F x, const Steps& steps, int32_t half) {
    const F away = sub(x, set(steps.center));
#if ADALOG_WIDE
    const I bits = _mm512_castps_si512(away);
    I size = _mm512_srl_epi32(_mm512_and_si512(bits, set(0x7fffffff)), _mm_cvtsi32_si128(steps.shift));
    size = _mm512_min_epi32(_mm512_max_epi32(_mm512_sub_epi32(size, set(steps.least)), set(0)), set(half - 1));
    const I below = _mm512_srai_epi32(bits, 31);  // ~size is -1 - size
    return add(_mm512_xor_si512(size, below), set(half));
#elif ADALOG_NEON
    const I bits = vreinterpretq_s32_f32(away);
    I size = vshlq_s32(vandq_s32(bits, vdupq_n_s32(0x7fffffff)), vdupq_n_s32(-steps.shift));
    size = vminq_s32(vmaxq_s32(vsubq_s32(size, vdupq_n_s32(steps.least)), vdupq_n_s32(0)), vdupq_n_s32(half - 1));
    return vaddq_s32(veorq_s32(size, vshrq_n_s32(bits, 31)), vdupq_n_s32(half));
#elif ADALOG_WASM
    const I bits = I(away), size = wasm_u32x4_shr(wasm_v128_and(bits, set(0x7fffffff)), steps.shift);
    const I near = wasm_i32x4_min(wasm_i32x4_max(wasm_i32x4_sub(size, set(steps.least)), set(0)), set(half - 1));
    return add(wasm_v128_xor(near, wasm_i32x4_shr(bits, 31)), set(half));
#else
    const I bits = _mm256_castps_si256(away);
    I size = _mm256_srl_epi32(_mm256_and_si256(bits, set(0x7fffffff)), _mm_cvtsi32_si128(steps.shift));
    size = _mm256_min_epi32(_mm256_max_epi32(_mm256_sub_epi32(size, set(steps.least)), set(0)), set(half - 1));
    return add(_mm256_xor_si256(size, _mm256_srai_epi32(bits, 31)), set(half));
#endif
}
// Returns whether some threshold is NaN.
INLINE bool some_nan(const F (&x)[4]) {
#if ADALOG_WIDE
    return (_mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q)) != 0;
#elif ADALOG_NEON
    const uint32x4_t low = vandq_u32(vceqq_f32(x[0], x[0]), vceqq_f32(x[1], x[1]));
    return vminvq_u32(vandq_u32(low, vandq_u32(vceqq_f32(x[2], x[2]), vceqq_f32(x[3], x[3])))) == 0;
#elif ADALOG_WASM
    const I low = wasm_v128_and(wasm_f32x4_eq(I(x[0]), I(x[0])), wasm_f32x4_eq(I(x[1]), I(x[1])));
    const I high = wasm_v128_and(wasm_f32x4_eq(I(x[2]), I(x[2])), wasm_f32x4_eq(I(x[3]), I(x[3])));
    return !wasm_i32x4_all_true(wasm_v128_and(low, high));
#else
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q), _mm256_cmp_ps(x[2], x[3], _CMP_UNORD_Q))) != 0;
#endif
}
// Selects the second of each pair of values if x is not below the threshold, or else the first.
INLINE I chosen(I pairs, F x, F thresholds) {
#if ADALOG_WIDE
    const __mmask16 above = _mm512_cmp_ps_mask(x, thresholds, _CMP_GE_OQ);
    return _mm512_and_si512(_mm512_mask_srli_epi32(pairs, above, pairs, 16), set(65535));
#elif ADALOG_NEON
    const uint32x4_t both = vreinterpretq_u32_s32(pairs);
    const uint32x4_t value = vbslq_u32(vcgeq_f32(x, thresholds), vshrq_n_u32(both, 16), vandq_u32(both, vdupq_n_u32(65535)));
    return vreinterpretq_s32_u32(value);
#elif ADALOG_WASM
    return wasm_v128_bitselect(wasm_u32x4_shr(pairs, 16), wasm_v128_and(pairs, set(65535)), wasm_f32x4_ge(I(x), I(thresholds)));
#else
    const I above = _mm256_castps_si256(_mm256_cmp_ps(x, thresholds, _CMP_GE_OQ));
    return _mm256_blendv_epi8(_mm256_and_si256(pairs, set(65535)), _mm256_srli_epi32(pairs, 16), above);
#endif
}

#endif

// MOST: 1 or 3, the limit of thresholds per bucket if registers hold all 32 buckets; 0 works for any function.
template <int MOST>
struct Search {
    const Steps& steps;
#if ADALOG_WIDE
    F thresholds[MOST + 1][2], slope, origin;
    I above[2];   // thresholds above the lower end of each bucket
    I low, high;  // the values as bytes, low and high, by the number of thresholds above
    INLINE explicit Search(const Steps& s) : steps(s) {
        if (!MOST) return;
        slope = set(s.near_slope), origin = set(s.near_origin);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
#pragma GCC unroll 3
            for (int j = 0; j < MOST; j++) thresholds[j][h] = _mm512_loadu_ps(s.near + 32 * j + W * h);
            above[h] = _mm512_loadu_si512(s.near + 96 + W * h);
        }
        const I one = _mm512_loadu_si512(s.values), two = _mm512_loadu_si512(s.values + 16);
        low = bytes_of(one, two, one, two), high = bytes_of(shift_right_8(one), shift_right_8(two), shift_right_8(one), shift_right_8(two));
    }
    // Returns the number of thresholds above x.
    INLINE I place(F x) const {
        const F y = most(least(fma(x, slope, origin), set(31.0f)), set(0.0f));
        const I bucket = without_fraction(y);
        I at = _mm512_permutex2var_epi32(above[0], bucket, above[1]);
#pragma GCC unroll 3
        for (int j = 0; j < MOST; j++) {
            const F threshold = _mm512_permutex2var_ps(thresholds[j][0], bucket, thresholds[j][1]);
            at = _mm512_mask_sub_epi32(at, _mm512_cmp_ps_mask(x, threshold, _CMP_GE_OQ), at, set(1));
        }
        return at;
    }
    // Returns the bytes of 64 places in one plane. more: selects the high plane.
    INLINE I bytes(I places, bool more) const {
#if ADALOG_LEVEL == 4
        return _mm512_permutexvar_epi8(places, more ? high : low);
#else
        // A shuffle looks up 16 entries, so it runs for either half of the 32 entries.
        const I from = more ? high : low;
        const I fifteen = _mm512_and_si512(places, _mm512_set1_epi8(15));
        const I first_half = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(from, from, 0x00), fifteen);
        const I second_half = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(from, from, 0x55), fifteen);
        return _mm512_mask_mov_epi8(first_half, _mm512_test_epi8_mask(places, _mm512_set1_epi8(16)), second_half);
#endif
    }
#else
    INLINE explicit Search(const Steps& s) : steps(s) {}
#endif
#if ADALOG_LEVEL
    // Finds the values for the first `vectors` of four vectors by buckets. The other values become 0.
    INLINE void in_buckets(const F (&x)[4], int vectors, I (&values)[4]) const {
        alignas(64) int32_t numbers[4 * W];
        const F slope = set(steps.slope), origin = set(steps.origin), last = set(float(steps.count - 1));
        const int32_t half = int32_t(steps.count / 2);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (j >= vectors) break;
            const F y = most(least(fma(x[j], slope, origin), last), set(0.0f));
            store(numbers + j * W, steps.shift ? by_distance(x[j], steps, half) : without_fraction(y), All{});
        }
#if ADALOG_WIDE
        asm("" : "+m"(numbers));  // GCC would take the numbers out of registers one by one, which is slower than loads
#endif
        F thresholds[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            thresholds[j] = set(0.0f), values[j] = set(0);
            if (j >= vectors) continue;
            I pairs;
            unzip(steps.buckets, numbers + j * W, thresholds[j], pairs);
            values[j] = chosen(pairs, x[j], thresholds[j]);
        }
        if (__builtin_expect(some_nan(thresholds), 0)) search(x, thresholds, values);
    }
    NOT_INLINE void search(const F (&x)[4], const F (&thresholds)[4], I (&values)[4]) const {
        float entries[W], limits[W];
        int32_t known[W];
        for (int j = 0; j < 4; j++) {
            store(entries, x[j], All{}), store(limits, thresholds[j], All{}), store(known, values[j], All{});
            for (int i = 0; i < W; i++)
                if (std::isnan(limits[i])) known[i] = value_at(steps, entries[i]);
            values[j] = load(known, All{});
        }
    }
    // Finds the bytes of the values for 4 W inputs: the low plane, and the high plane if there are two. vectors: the number
    // of vectors that are searched; the bytes of the others mean nothing.
    INLINE void operator()(const F (&x)[4], I& low_bytes, I& high_bytes, int vectors = 4) const {
#if ADALOG_WIDE
        if (MOST) {
            I at[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) at[j] = j < vectors ? place(x[j]) : set(0);
            const I places = small_bytes_of(at[0], at[1], at[2], at[3]);
            low_bytes = bytes(places, false);
            if (steps.planes > 1) high_bytes = bytes(places, true);
            return;
        }
#endif
        I values[4];
        in_buckets(x, vectors, values);
        low_bytes = bytes_of(values[0], values[1], values[2], values[3]);
        if (steps.planes > 1)
            high_bytes = bytes_of(shift_right_8(values[0]), shift_right_8(values[1]), shift_right_8(values[2]), shift_right_8(values[3]));
    }
#endif
};

// --- activations ---------------------------------------------------------------------------------------------------------

// e^-x = 2^-(x log2(e)) for x from 0 on, but at least 2^-100. Smaller values make no difference, and their products would
// be subnormal and slow.
INLINE F decay(F x) { return power_of_two(most(mul(x, set(-1.44269504f)), set(-100.0f))); }

// Every activation except hardswish and sigmoid is max(x, 0) - |x| tail(|x|). The tail is the part of a sigmoid, or of the
// normal distribution, beyond |x|. NaN stays NaN, and a tail beyond 60 is zero.
template <class Function>
INLINE void with_tail(float* values, int64_t count, Function tail) {
    over(count, [&](int64_t i, auto which) INLINE_LAMBDA {
        const F x = load(values + i, which), size = least(most(x, sub(set(0.0f), x)), set(60.0f));
        store(values + i, sub(most(set(0.0f), x), mul(size, tail(size))), which);
    });
}
// Applies an activation in place. The error of a result is at most 4e-7 times the larger of its magnitude and 1.
NOT_INLINE void activate(float* values, int64_t count, int32_t activation) {
    // All lambdas capture by [&]. For a lambda with [] GCC also makes a plain function, without the level's instructions.
    auto sigmoid = [&](F size) INLINE_LAMBDA {
        const F s = decay(size);
        return div(s, add(set(1.0f), s));
    };
    switch (activation) {
    case RELU: return with_tail(values, count, [&](F) INLINE_LAMBDA { return set(0.0f); });
    case SILU: return with_tail(values, count, sigmoid);
    case GELU_TANH:
        return with_tail(values, count, [&](F x) INLINE_LAMBDA {
            return sigmoid(mul(mul(x, set(1.5957691216f)), fma(mul(x, x), set(0.044715f), set(1.0f))));
        });
    case GELU:  // half of erfc(x / sqrt(2)), by formula 7.1.26 of Abramowitz and Stegun
        return with_tail(values, count, [&](F x) INLINE_LAMBDA {
            const F z = mul(x, set(0.70710678f)), t = div(set(1.0f), fma(z, set(0.3275911f), set(1.0f)));
            F y = fma(set(0.5307027145f), t, set(-0.7265760135f));
            y = fma(y, t, set(0.7107068705f));
            y = fma(y, t, set(-0.142248368f));
            y = fma(y, t, set(0.127414796f));
            return mul(mul(y, t), decay(mul(z, z)));
        });
    case SIGMOID:  // 1 / (1 + e^-x), where the order of the operands keeps NaN
        return over(count, [&](int64_t i, auto which) INLINE_LAMBDA {
            const F x = mul(load(values + i, which), set(-1.44269504f));
            const F power = power_of_two(most(set(-100.0f), least(set(100.0f), x)));
            store(values + i, div(set(1.0f), add(set(1.0f), power)), which);
        });
    default:
        over(count, [&](int64_t i, auto which) INLINE_LAMBDA {
            const F x = load(values + i, which), high = least(add(x, set(3.0f)), set(6.0f));
            store(values + i, mul(x, mul(most(set(0.0f), high), set(1.0f / 6))), which);
        });
    }
}

// --- outputs -------------------------------------------------------------------------------------------------------------

// Stores rows of values as an output describes. One finisher serves many rows. MOST: as in `Search`.
template <int KIND, int MOST>
struct Finisher {
    const Output& out;
    const Search<MOST> search;
    const bool moved;
    INLINE explicit Finisher(const Output& output)
        : out(output), search(KIND == STEPS ? output.steps : none()), moved(output.place || output.added_to) {}
    static const Steps& none() {
        static const float heap[32] = {};
        static const int32_t values[32] = {};
        static const Steps steps{heap, values, 32, 4, 1, nullptr, 0, 0.0f, 0.0f, 0.0f, 0, 0, 0, 0, nullptr, 0, 0.0f, 0.0f};
        return steps;
    }

    // Stores one row. at: the place of the row in the output. from: its place in the residual. first: the first of its
    // parameters. source(i, which): returns the entries of the row from i on.
    template <class Source>
    INLINE void row(int64_t at, int64_t from, int64_t first, int64_t columns, Source source) const {
        const float *scale = out.scale + first, *bias = out.bias + first;
        auto real = [&](int64_t i, auto which) INLINE_LAMBDA {
            return fma(source(i, which), load(scale + i, which), load(bias + i, which));
        };
        uint8_t *bytes = static_cast<uint8_t*>(out.data) + at, *more = static_cast<uint8_t*>(out.more) + at;
        int64_t start = 0;
        if constexpr (KIND == ACTIVE) {
            alignas(64) float values[256];
            for (; start < columns; start += 256) {
                const int64_t count = std::min<int64_t>(256, columns - start);
                over(count, [&](int64_t i, auto which) INLINE_LAMBDA {
                    F y = real(start + i, which);
                    if (out.residual) y = add(y, load(out.residual + from + start + i, which));
                    store(values + i, y, which);
                });
                activate(values, count, out.activation);
                over(count, [&](int64_t i, auto which) INLINE_LAMBDA {
                    const int64_t j = start + i;
                    F y = load(values + i, which);
                    if (out.kind == FLOATS) return store(static_cast<float*>(out.data) + at + j, y, which);
                    y = fma(y, load(out.code_scale + first + j, which), load(out.code_zero + first + j, which));
                    y = most(least(y, load(out.high + first + j, which)), set(0.0f));
                    store_bytes(bytes + j, to_nearest(y), which);
                });
            }
            return;
        }
#if ADALOG_LEVEL
        // Packing clamps to 0 ... 255, so only the upper end is left, which is applied to a whole vector of bytes. Packing
        // passes through signed 16 bits, so no value may be larger than 32767.
        auto whole = [&](int64_t i) INLINE_LAMBDA { return to_nearest(least(real(i, All{}), set(32767.0f))); };
        for (; KIND == CODES && start + 4 * W <= columns; start += 4 * W) {
            I codes = small_bytes_of(whole(start), whole(start + W), whole(start + 2 * W), whole(start + 3 * W));
            store(bytes + start, least_bytes(codes, load(out.top + first + start)));
        }
        for (; KIND == STEPS && start < columns; start += 4 * W) {
            F x[4];
            I low = set(0), high = set(0);
            if (start + 4 * W <= columns) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) x[j] = real(start + j * W, All{});
                search(x, low, high);
                store(bytes + start, low);
                if (out.steps.planes > 1) store(more + start, high);
                continue;
            }
            const int rest = int(columns - start);
            for (int j = 0; j < 4; j++) x[j] = real(start + j * W, Some(std::clamp(rest - j * W, 0, W)));
            search(x, low, high, (rest + W - 1) / W);
            uint8_t some[4 * W];
            store(some, low), std::memcpy(bytes + start, some, rest);
            if (out.steps.planes > 1) store(some, high), std::memcpy(more + start, some, rest);
        }
        if (KIND == STEPS) return;
#endif
        over(columns - start, [&](int64_t j, auto which) INLINE_LAMBDA {
            const int64_t i = start + j;
            if (KIND == FLOATS) {
                F y = real(i, which);
                if (out.residual) y = add(y, load(out.residual + from + i, which));
                store(static_cast<float*>(out.data) + at + i, y, which);
            } else if (KIND == CODES) {
                F y = most(least(real(i, which), load(out.high + first + i, which)), set(0.0f));
                store_bytes(bytes + i, to_nearest(y), which);
            } else if (KIND == STEPS) {
#if ADALOG_LEVEL == 0
                const int32_t value = value_at(out.steps, real(i, which));
                bytes[i] = uint8_t(value);
                if (out.steps.planes > 1) more[i] = uint8_t(value >> 8);
#endif
            }
        });
    }
    // Prefetches the residual and the output of some rows. Rows are too far apart for the processor to predict them.
    INLINE void fetch(int64_t start, int64_t number, int64_t rows, int64_t columns) const {
        if (moved) return;
        const int64_t size = KIND == FLOATS || KIND == SUMS || (KIND == ACTIVE && out.kind == FLOATS) ? 4 : 1;
        for (int64_t r = number; r < number + rows; r++) {
            const int64_t at = start + r * out.row;
            const char* stored = static_cast<const char*>(out.data) + at * size;
            for (int64_t i = 0; i < columns * size; i += LINE) __builtin_prefetch(stored + i, 1, 3);
            if (!out.residual) continue;
            for (int64_t i = 0; i < columns; i += LINE / 4) __builtin_prefetch(out.residual + at + i, 0, 3);
        }
    }
    // Stores some rows of accumulators. The first is row `number` of an output that starts at `start`. width: the distance
    // from one row of sums to the next.
    INLINE void rows_within(int64_t start, int64_t number, int64_t first, int64_t rows, int64_t columns,
                            const int32_t* sums, int64_t width) const {
        int64_t next = start + number * out.row;
        for (int64_t r = number; r < number + rows; r++, sums += width, next += out.row) {
            int64_t to = next, from = next;
            if (moved) {
                to = start + placed(out.place, r) * out.row, from = start + placed(out.added_to, r) * out.row;
                if (to < 0) continue;  // a dropped row: `start` is less than `out.row`
            }
            if (KIND == SUMS) {
                std::memcpy(static_cast<int32_t*>(out.data) + to, sums, columns * 4);
                continue;
            }
            row(to, from, first, columns,
                [=](int64_t i, auto which) INLINE_LAMBDA { return to_float(load(sums + i, which)); });
        }
    }
    // Does the same in code that all kernels share, which keeps programs small. The copy stays in registers; stored bytes
    // could change what a pointer leads to.
    NOT_INLINE void rows(int64_t start, int64_t number, int64_t first, int64_t rows, int64_t columns, const int32_t* sums,
                         int64_t width) const {
        const Finisher copy = *this;
        copy.rows_within(start, number, first, rows, columns, sums, width);
    }
};
// Calls body with the finisher of this output.
template <class Body>
INLINE void finishing(const Output& out, Body body) {
    if (out.kind == SUMS) return body(Finisher<SUMS, 0>(out));
    if (out.activation) return body(Finisher<ACTIVE, 0>(out));
    if (out.kind == FLOATS) return body(Finisher<FLOATS, 0>(out));
    if (out.kind == CODES) return body(Finisher<CODES, 0>(out));
#if ADALOG_WIDE
    if (out.steps.most == 1) return body(Finisher<STEPS, 1>(out));
    if (out.steps.most) return body(Finisher<STEPS, 3>(out));
#endif
    body(Finisher<STEPS, 0>(out));
}

// --- products ------------------------------------------------------------------------------------------------------------

struct Nothing {
    void operator()(int64_t, int64_t) const {}
};

// sums (rows, 16 panels) = left (rows, terms) times right, plus base, or plus the old sums if base is null. The rows of
// the left operand are `row` bytes apart, and each can be read up to the padded terms of the right operand. AMX reads and
// writes multiples of 16 rows. meanwhile(i, n) does part i of n of other work between the products.
#if ADALOG_LEVEL == 4

template <int PANELS, class Meanwhile>
INLINE void multiply_tiles(const uint8_t* left, int64_t row, int64_t rows, const int8_t* right, int64_t panel,
                           int64_t steps, const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    // One left tile is multiplied by up to four right tiles. Tiles 0-3 hold sums, 4 the left tile, and 5-7 right tiles.
    asm volatile("" : : : "memory");  // the intrinsics do not tell the compiler which memory they read
    for (int64_t r = 0; r < rows; r += PANEL, left += PANEL * row, sums += PANEL * width) {
        const void* start = base ? static_cast<const void*>(base) : sums;
        const int64_t stride = base ? 0 : width * 4;
        const int32_t* from = static_cast<const int32_t*>(start);
        _tile_loadd(0, from, stride);
        if (PANELS > 1) _tile_loadd(1, from + 16, stride);
        if (PANELS > 2) _tile_loadd(2, from + 32, stride);
        if (PANELS > 3) _tile_loadd(3, from + 48, stride);
        for (int64_t s = 0; s < steps; s++) {
            const int8_t* at = right + s * 16 * LINE;
            _tile_loadd(4, left + s * STEP, row);
            _tile_loadd(5, at, LINE);
            _tile_dpbusd(0, 4, 5);
            if (PANELS > 1) {
                _tile_loadd(6, at + panel, LINE);
                _tile_dpbusd(1, 4, 6);
            }
            if (PANELS > 2) {
                _tile_loadd(7, at + 2 * panel, LINE);
                _tile_dpbusd(2, 4, 7);
            }
            if (PANELS > 3) {
                _tile_loadd(5, at + 3 * panel, LINE);
                _tile_dpbusd(3, 4, 5);
            }
            if (r == 0) meanwhile(s, steps);
        }
        _tile_stored(0, sums, width * 4);
        if (PANELS > 1) _tile_stored(1, sums + 16, width * 4);
        if (PANELS > 2) _tile_stored(2, sums + 32, width * 4);
        if (PANELS > 3) _tile_stored(3, sums + 48, width * 4);
    }
}
template <int PANELS>
NOT_INLINE void multiply_panels(const uint8_t* left, int64_t row, int64_t rows, const Right& right, const int32_t* base,
                            int32_t* sums, int64_t width) {
    multiply_tiles<PANELS>(left, row, rows, right.data, right.panel, right.lines / 16, base, sums, width, Nothing{});
}
template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, const Right& right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    const int64_t steps = right.lines / 16;
    if (panels == 4)
        return multiply_tiles<4>(left, row, rows, right.data, right.panel, steps, base, sums, width, meanwhile);
    // Only the last columns have fewer panels, so nothing is interleaved there: that code would be large.
    meanwhile(0, 1);
    if (panels == 3) multiply_panels<3>(left, row, rows, right, base, sums, width);
    if (panels == 2) multiply_panels<2>(left, row, rows, right, base, sums, width);
    if (panels == 1) multiply_panels<1>(left, row, rows, right, base, sums, width);
}

#elif ADALOG_LEVEL == 3

template <int N, int PANELS>
INLINE void multiply_rows(const uint8_t* left, int64_t row, const Right& right, const int32_t* base, int32_t* sums,
                          int64_t width) {
    I sum[N][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            sum[r][p] = _mm512_loadu_si512(base ? base + PANEL * p : sums + r * width + PANEL * p);
    const int8_t* at = right.data;
    for (int64_t g = 0; g < right.lines; g++, at += LINE, left += GROUP) {
        I bytes[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) bytes[p] = _mm512_loadu_si512(at + p * right.panel);
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
            int32_t four;
            std::memcpy(&four, left + r * row, 4);
            I x = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], x, bytes[p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) _mm512_storeu_si512(sums + r * width + PANEL * p, sum[r][p]);
}
template <int PANELS>
NOT_INLINE void multiply_panels(const uint8_t* left, int64_t row, int64_t rows, const Right& right, const int32_t* base,
                            int32_t* sums, int64_t width) {
    for (; rows >= 6; rows -= 6, left += 6 * row, sums += 6 * width)
        multiply_rows<6, PANELS>(left, row, right, base, sums, width);
    for (; rows >= 2; rows -= 2, left += 2 * row, sums += 2 * width)
        multiply_rows<2, PANELS>(left, row, right, base, sums, width);
    if (rows) multiply_rows<1, PANELS>(left, row, right, base, sums, width);
}
template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, const Right& right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    meanwhile(0, 1);
    if (panels == 4) multiply_panels<4>(left, row, rows, right, base, sums, width);
    if (panels == 3) multiply_panels<3>(left, row, rows, right, base, sums, width);
    if (panels == 2) multiply_panels<2>(left, row, rows, right, base, sums, width);
    if (panels == 1) multiply_panels<1>(left, row, rows, right, base, sums, width);
}

#elif ADALOG_LEVEL == 2

// Registers hold the sums of six rows and one panel.
template <int N>
NOT_INLINE void multiply_rows(const uint8_t* left, int64_t row, const Right& right, const int32_t* base, int32_t* sums,
                              int64_t width) {
    I sum[N][2];
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) sum[r][h] = load((base ? base : sums + r * width) + W * h, All{});
    const uint8_t* at = reinterpret_cast<const uint8_t*>(right.data);
    for (int64_t g = 0; g < right.lines; g++, at += LINE, left += GROUP) {
        const I one = load(at), two = load(at + 32);
#pragma GCC unroll 6
        for (int r = 0; r < N; r++) {
            int32_t four;
            std::memcpy(&four, left + r * row, 4);
            const I x = _mm256_set1_epi32(four);
            sum[r][0] = _mm256_dpbusd_avx_epi32(sum[r][0], x, one);
            sum[r][1] = _mm256_dpbusd_avx_epi32(sum[r][1], x, two);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) store(sums + r * width + W * h, sum[r][h], All{});
}
template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, Right right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    meanwhile(0, 1);
    for (; panels; panels--, right.data += right.panel, sums += PANEL, base = base ? base + PANEL : base) {
        int64_t r = 0;
        for (; r + 6 <= rows; r += 6) multiply_rows<6>(left + r * row, row, right, base, sums + r * width, width);
        for (; r + 2 <= rows; r += 2) multiply_rows<2>(left + r * row, row, right, base, sums + r * width, width);
        if (r < rows) multiply_rows<1>(left + r * row, row, right, base, sums + r * width, width);
    }
}

#elif ADALOG_LEVEL == 1

// One instruction adds two products of unsigned and signed bytes in 16 bits. `together` lines cannot saturate there, so
// they are summed before they are widened.
template <int N>
NOT_INLINE void multiply_narrow(const uint8_t* left, int64_t row, const Right& right, const int32_t* base, int32_t* sums,
                            int64_t width) {
    const I ones = _mm256_set1_epi16(1);
    for (int64_t g = 0; g < right.lines;) {
        const int64_t end = std::min<int64_t>(right.lines, g + right.together);
        I part[N][2];
#pragma GCC unroll 6
        for (int r = 0; r < N; r++) part[r][0] = part[r][1] = _mm256_setzero_si256();
        const bool first = g == 0;
        for (; g < end; g++) {
            const I one = load(reinterpret_cast<const uint8_t*>(right.data) + g * LINE);
            const I two = load(reinterpret_cast<const uint8_t*>(right.data) + g * LINE + 32);
#pragma GCC unroll 6
            for (int r = 0; r < N; r++) {
                int32_t four;
                std::memcpy(&four, left + r * row + g * GROUP, 4);
                const I x = _mm256_set1_epi32(four);
                part[r][0] = _mm256_add_epi16(part[r][0], _mm256_maddubs_epi16(x, one));
                part[r][1] = _mm256_add_epi16(part[r][1], _mm256_maddubs_epi16(x, two));
                // Forces one row after the other: otherwise the compiler starts all of them and runs out of registers.
                asm volatile("" : "+x"(part[r][0]), "+x"(part[r][1]));
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; r++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                int32_t* at = sums + r * width + W * h;
                store(at, add(load(first && base ? base + W * h : at, All{}), _mm256_madd_epi16(part[r][h], ones)), All{});
            }
    }
}
// If only one or two lines cannot saturate, each product is widened at once (NARROW). If one line may saturate, bytes are
// widened before they are multiplied.
template <int N, bool NARROW>
NOT_INLINE void multiply_rows(const uint8_t* left, int64_t row, const Right& right, const int32_t* base, int32_t* sums,
                              int64_t width) {
    I sum[N][2];
    const I low_bytes = _mm256_set1_epi16(255), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) sum[r][h] = load((base ? base : sums + r * width) + W * h, All{});
    for (int64_t g = 0; g < right.lines; g++, left += GROUP) {
        I even[2], odd[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            I bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right.data + g * LINE + 32 * h));
            even[h] = NARROW ? bytes : _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
            odd[h] = NARROW ? bytes : _mm256_srai_epi16(bytes, 8);
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            int32_t four;
            std::memcpy(&four, left + r * row, 4);
            I x = _mm256_set1_epi32(four), low = _mm256_and_si256(x, low_bytes), high = _mm256_srli_epi16(x, 8);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                if (NARROW) {
                    sum[r][h] = add(sum[r][h], _mm256_madd_epi16(_mm256_maddubs_epi16(x, even[h]), ones));
                    continue;
                }
                sum[r][h] = add(sum[r][h], _mm256_madd_epi16(low, even[h]));
                sum[r][h] = add(sum[r][h], _mm256_madd_epi16(high, odd[h]));
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) store(sums + r * width + W * h, sum[r][h], All{});
}
template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, Right right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    meanwhile(0, 1);
    for (; panels; panels--, right.data += right.panel, sums += PANEL, base = base ? base + PANEL : base) {
        int64_t r = 0;
        auto rows_by = [&](auto multiply_some, int some) {
            for (; r + some <= rows; r += some)
                multiply_some(left + r * row, row, right, base, sums + r * width, width);
        };
        if (right.together > 2) rows_by(multiply_narrow<6>, 6), rows_by(multiply_narrow<2>, 2);
        if (right.together) rows_by(multiply_rows<4, true>, 4), rows_by(multiply_rows<1, true>, 1);
        rows_by(multiply_rows<4, false>, 4), rows_by(multiply_rows<1, false>, 1);
    }
}

#elif ADALOG_NEON

// Multiplies N rows by a panel. A dot product takes its four left bytes from one lane, so that one load serves four lines.
// Without i8mm both operands are signed: 128 is subtracted from the left one if `flips`, and `column` holds 128 times the sum
// of each column to correct for it.
template <int N>
NOT_INLINE void multiply_rows(const uint8_t* left, int64_t row, const int8_t* right, int64_t lines, const int32_t* base,
                              int32_t* sums, int64_t width, bool flips, const I* column) {
    I sum[N][4];
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) sum[r][q] = add(load((base ? base : sums + r * width) + W * q, All{}), column[q]);
    const uint8x16_t sign = vdupq_n_u8(flips ? 128 : 0);
    auto add_line = [&](const uint8x16_t* x, auto lane) INLINE_LAMBDA {
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const int8x16_t bytes = vld1q_s8(right + 16 * q);
#pragma GCC unroll 4
            for (int r = 0; r < N; r++)
#if ADALOG_LEVEL == 6
                sum[r][q] = vsudotq_laneq_s32(sum[r][q], bytes, x[r], lane());
#else
                sum[r][q] = vdotq_laneq_s32(sum[r][q], bytes, vreinterpretq_s8_u8(x[r]), lane());
#endif
        }
        right += LINE;
        asm volatile("" : "+r"(right));  // registers would not suffice if the next line were loaded earlier
    };
    uint8x16_t x[N];
    int64_t g = 0;
    for (; g + 4 <= lines; g += 4, left += 4 * GROUP) {
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            x[r] = vld1q_u8(left + r * row);
            if (ADALOG_LEVEL == NEON) x[r] = veorq_u8(x[r], sign);
        }
        add_line(x, std::integral_constant<int, 0>()), add_line(x, std::integral_constant<int, 1>());
        add_line(x, std::integral_constant<int, 2>()), add_line(x, std::integral_constant<int, 3>());
    }
    for (; g < lines; g++, left += GROUP) {
        for (int r = 0; r < N; r++) {
            int32_t four;
            std::memcpy(&four, left + r * row, GROUP);
            x[r] = vreinterpretq_u8_s32(set(four));
            if (ADALOG_LEVEL == NEON) x[r] = veorq_u8(x[r], sign);
        }
        add_line(x, std::integral_constant<int, 0>());
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) store(sums + r * width + W * q, sum[r][q], All{});
}
// Returns whether some byte is 128 or more. Rows can be read up to a multiple of 64 terms.
INLINE bool has_large(const uint8_t* left, int64_t row, int64_t rows, int64_t terms) {
    uint8x16_t bits = vdupq_n_u8(0);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < terms; t += 16) bits = vorrq_u8(bits, vld1q_u8(left + r * row + t));
    return vmaxvq_u8(bits) > 127;
}
template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, Right right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    meanwhile(0, 1);
    const bool flips = ADALOG_LEVEL == NEON && has_large(left, row, rows, right.lines * GROUP);
    for (; panels; panels--, right.data += right.panel, sums += PANEL, base = base ? base + PANEL : base) {
        I column[4] = {set(0), set(0), set(0), set(0)};
        for (int64_t i = 0; flips && i < right.lines * LINE; i += LINE)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) column[q] = vdotq_s32(column[q], vld1q_s8(right.data + i + 16 * q), vdupq_n_s8(1));
        for (int q = 0; q < 4; q++) column[q] = vshlq_n_s32(column[q], 7);
        auto rows_by = [&](auto* multiply, int64_t r) INLINE_LAMBDA {
            multiply(left + r * row, row, right.data, right.lines, base, sums + r * width, width, flips, column);
        };
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) rows_by(multiply_rows<4>, r);
        for (; r < rows; r++) rows_by(multiply_rows<1>, r);
    }
}

#elif ADALOG_WASM

// One instruction adds two products of 16 bits. If left bytes are below 16, two rows x and y share its operand as
// x + 4096 (y - 8). The low 12 bits of the sums of products are then the sum for x, until `Pairs::lines` lines are summed.

// Fills in `pairs` for some panels. Returns false if some byte of the right operand has a magnitude above 15.
bool find_pairs(const Right& right, int64_t panels, Pairs& pairs) {
    int32_t most = 0;
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t* at = reinterpret_cast<const uint8_t*>(right.data) + p * right.panel;
        I size = set(0), sum[4] = {size, size, size, size};
        for (int64_t g = 0; g < right.lines; g++, at += LINE)
            for (int q = 0; q < 4; q++) {
                const I bytes = load(at + 4 * W * q);
                size = wasm_u8x16_max(size, wasm_i8x16_abs(bytes));
                sum[q] = add(sum[q], wasm_i32x4_extadd_pairwise_i16x8(wasm_i16x8_extadd_pairwise_i8x16(bytes)));
            }
        for (int q = 0; q < 4; q++) store(pairs.columns + p * PANEL + W * q, wasm_i32x4_shl(sum[q], 3), All{});
        uint8_t sizes[4 * W];
        store(sizes, size);
        const int32_t largest = std::max<int32_t>(1, *std::max_element(sizes, sizes + 4 * W));
        pairs.lines[p] = 2047 / (2 * 15 * largest);
        most = std::max(most, largest);
    }
    return most < 16;
}

// Adds neighbouring sums: those of terms 0 and 1 of a line, and of terms 2 and 3.
INLINE I neighbours(I one, I two) {
    return add(wasm_i32x4_shuffle(one, two, 0, 2, 4, 6), wasm_i32x4_shuffle(one, two, 1, 3, 5, 7));
}
constexpr int64_t PART = 64;  // lines of the left operand that are widened at once: low sums of so many fit in 16 bits
// Multiplies up to two rows, or two pairs of rows, by a panel. Registers hold the sums of eight columns. wide: lines of four
// terms of both rows or pairs. together: lines after which the low sums are counted.
template <bool PAIRED>
NOT_INLINE void multiply_rows(const int16_t* wide, const int8_t* right, int32_t lines, int32_t together, const int32_t* columns,
                              const int32_t* base, int32_t* sums, int64_t width, int64_t rows) {
    for (int h = 0; h < PANEL; h += PANEL / 2) {
        I sum[2][4];
        int32_t lows[2][2][W] = {};  // sums for the first rows of pairs, in 16 bits each
        for (int r = 0; r < 2; r++)
            for (int q = 0; q < 4; q++) sum[r][q] = set(0);
        const int16_t* x = wide;
        const int8_t* at = right + GROUP * h;
        for (int32_t start = 0; start < lines; start += together) {
            const int16_t* end = x + 2 * GROUP * std::min(together, lines - start);
            do {
                I bytes[4];
                for (int q = 0; q < 4; q++) bytes[q] = wasm_i16x8_load8x8(at + 8 * q);
                for (int r = 0; r < 2; r++) {
                    const I four = wasm_v128_load64_splat(x + r * GROUP);
                    for (int q = 0; q < 4; q++) sum[r][q] = add(sum[r][q], wasm_i32x4_dot_i16x8(four, bytes[q]));
                }
                at += LINE, x += 2 * GROUP;
            } while (x != end);
            if (!PAIRED) continue;
            // The low 12 bits of a sum and of its counted low sum differ by what is not counted yet.
            for (int r = 0; r < 2; r++)
                for (int p = 0; p < 2; p++) {
                    const I old = load(lows[r][p], All{}), two = wasm_i32x4_shl(sum[r][2 * p + 1], 16);
                    const I now = wasm_i16x8_sub(wasm_i16x8_shuffle(sum[r][2 * p], two, 0, 9, 2, 11, 4, 13, 6, 15), old);
                    store(lows[r][p], wasm_i16x8_add(old, wasm_i16x8_shr(wasm_i16x8_shl(now, 4), 4)), All{});
                }
        }
        auto put = [&](int64_t r, int c, I total) INLINE_LAMBDA {
            if (r >= rows) return;
            int32_t* to = sums + r * width + h + c;
            store(to, add(load(base ? base + h + c : to, All{}), total), All{});
        };
        for (int r = 0; r < 2; r++)
            for (int p = 0; p < 2; p++) {
                const I one = sum[r][2 * p], two = sum[r][2 * p + 1];
                if (PAIRED) {
                    const I both = load(lows[r][p], All{});
                    const I low = wasm_i32x4_shr(wasm_i32x4_shl(both, 16), 16), more_low = wasm_i32x4_shr(both, 16);
                    const I high = neighbours(wasm_i32x4_sub(one, low), wasm_i32x4_sub(two, more_low));
                    put(2 * r, W * p, neighbours(low, more_low));
                    put(2 * r + 1, W * p, add(wasm_i32x4_shr(high, 12), load(columns + h + W * p, All{})));
                } else {
                    put(r, W * p, neighbours(one, two));
                }
            }
    }
}
template <bool PAIRED>
INLINE void multiply_parts(const uint8_t* left, int64_t row, int64_t rows, const Right& right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width) {
    constexpr int64_t each = PAIRED ? 2 : 1, step = 2 * GROUP * PART;
    alignas(16) int16_t wide[ROWS / each * PART * GROUP];
    const int32_t none[PANEL] = {};
    for (int64_t first = 0; first < right.lines; first += PART) {
        const int64_t lines = std::min(PART, right.lines - first);
        for (int64_t r = 0; r < rows; r += each)
            for (int64_t g = 0; g < lines; g += 2) {
                const uint8_t* from = left + r * row + (first + g) * GROUP;
                I two = wasm_u16x8_load8x8(from);
                if (PAIRED) {  // a last row without another is paired with itself
                    const I other = wasm_i16x8_sub(wasm_u16x8_load8x8(r + 1 < rows ? from + row : from), wasm_i16x8_splat(8));
                    two = wasm_i16x8_add(two, wasm_i16x8_shl(other, 12));
                }
                int16_t* to = wide + r / each / 2 * step + (2 * g + r / each % 2) * GROUP;
                wasm_v128_store64_lane(to, two, 0);
                wasm_v128_store64_lane(to + 2 * GROUP, two, 1);
            }
        for (int64_t p = 0; p < panels; p++)
            for (int64_t r = 0; r < rows; r += 2 * each)
                multiply_rows<PAIRED>(wide + r / each / 2 * step, right.data + p * right.panel + first * LINE, int32_t(lines),
                                      PAIRED ? right.pairs->lines[p] : int32_t(lines),
                                      PAIRED && !first ? right.pairs->columns + p * PANEL : none,
                                      base && !first ? base + p * PANEL : nullptr, sums + r * width + p * PANEL, width, rows - r);
    }
}
NOT_INLINE void multiply_some(const uint8_t* left, int64_t row, int64_t rows, const Right& right, int64_t panels,
                              const int32_t* base, int32_t* sums, int64_t width) {
    bool paired = right.pairs && rows > 2;
    I bits = set(0);
    for (int64_t r = 0; paired && r < rows; r++)
        for (int64_t g = 0; g < right.lines; g += 4) bits = wasm_v128_or(bits, load(left + r * row + g * GROUP));
    paired = paired && !wasm_v128_any_true(wasm_v128_and(bits, wasm_i8x16_splat(-16)));
    if (paired) multiply_parts<true>(left, row, rows, right, panels, base, sums, width);
    else multiply_parts<false>(left, row, rows, right, panels, base, sums, width);
}
template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, const Right& right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    meanwhile(0, 1);
    multiply_some(left, row, rows, right, panels, base, sums, width);
}

#else

template <class Meanwhile>
INLINE void multiply_bytes(const uint8_t* left, int64_t row, int64_t rows, const Right& right, int64_t panels,
                           const int32_t* base, int32_t* sums, int64_t width, Meanwhile meanwhile) {
    meanwhile(0, 1);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t p = 0; p < panels; p++)
            for (int c = 0; c < PANEL; c++) {
                uint32_t sum = uint32_t(base ? base[p * PANEL + c] : sums[r * width + p * PANEL + c]);
                for (int64_t t = 0; t < right.lines * GROUP; t++)
                    sum += uint32_t(left[r * row + t] * right.data[p * right.panel + t / GROUP * LINE + c * GROUP + t % GROUP]);
                sums[r * width + p * PANEL + c] = int32_t(sum);
            }
}

#endif

struct Left {  // rows of bytes that can be read up to a multiple of 64 terms and of 16 rows
    const uint8_t *data, *more;
    int64_t row;
};

INLINE int32_t sum_of(const uint8_t* bytes, int64_t count) {
    int64_t i = 0;
    int32_t sum = 0;
#if ADALOG_WIDE
    I sums = _mm512_setzero_si512();
    for (; i + 64 <= count; i += 64) sums = add(sums, _mm512_sad_epu8(load(bytes + i), _mm512_setzero_si512()));
    const I rest = _mm512_maskz_loadu_epi8((uint64_t(1) << (count - i)) - 1, bytes + i);
    return _mm512_reduce_add_epi32(add(sums, _mm512_sad_epu8(rest, _mm512_setzero_si512())));
#elif ADALOG_YMM
    I sums = _mm256_setzero_si256();
    for (; i + 32 <= count; i += 32) sums = add(sums, _mm256_sad_epu8(load(bytes + i), _mm256_setzero_si256()));
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2);
#elif ADALOG_NEON
    for (; i + 16 <= count; i += 16) sum += vaddlvq_u8(vld1q_u8(bytes + i));
#elif ADALOG_WASM
    I sums = set(0);
    for (; i + 16 <= count; i += 16)
        sums = add(sums, wasm_u32x4_extadd_pairwise_u16x8(wasm_u16x8_extadd_pairwise_u8x16(load(bytes + i))));
    for (int j = 0; j < W; j++) sum += sums[j];
#endif
    for (; i < count; i++) sum += bytes[i];
    return sum;
}

// Sums rows of the left operand. A right operand needs the sums if its middle is not its zero point.
INLINE void sum_rows(const Left& left, int64_t rows, int64_t terms, int32_t* row_sums) {
    for (int64_t r = 0; r < rows; r++) {
        row_sums[r] = sum_of(left.data + r * left.row, terms);
        if (left.more) row_sums[r] += 256 * sum_of(left.more + r * left.row, terms);
    }
}

// Computes the accumulators of some rows and up to four panels of the right operand, starting at `panel`. row_sums: the
// sums of these rows, if the right operand needs them.
template <class Meanwhile = Nothing>
INLINE void multiply(const Left& left, int64_t rows, int64_t terms, Right right, int64_t panel, int64_t panels,
                     int32_t* sums, int64_t width, const int32_t* row_sums, Meanwhile meanwhile = {}) {
    right.data += panel * right.panel;
    if (ADALOG_LEVEL != AMX) right.lines = rounded_up(terms, GROUP) / GROUP;  // only tiles need the padding
    const int32_t *base = right.base + panel * PANEL, *moved = right.moved ? right.moved + panel * PANEL : nullptr;
    if (left.more) {
        const int32_t none[QUAD * PANEL] = {};
        multiply_bytes(left.more, left.row, rows, right, panels, none, sums, width, Nothing{});
    }
    if (left.more || moved) {
        for (int64_t r = 0; r < rows; r++)
            over(panels * PANEL, [&](int64_t i, auto which) INLINE_LAMBDA {
                I start = load(base + i, which);
                if (left.more) start = add(start, shift_left_8(load(sums + r * width + i, which)));
                if (moved) start = add(start, mul(set(row_sums[r]), load(moved + i, which)));
                store(sums + r * width + i, start, which);
            });
        base = nullptr;
    }
    multiply_bytes(left.data, left.row, rows, right, panels, base, sums, width, meanwhile);
}

// Returns rows of the left operand that a product can read beyond their end. These are the rows themselves if there is
// enough memory behind them: the extra terms meet zeros, and extra rows are not used. Otherwise it is a padded copy.
// width: the padded terms. bytes: the memory from `data` on.
INLINE const uint8_t* readable(const uint8_t* data, int64_t row, int64_t rows, int64_t terms, int64_t width, int64_t bytes,
                               uint8_t* copy, int64_t* step) {
    if (((ADALOG_LEVEL == AMX ? rounded_up(rows, PANEL) : rows) - 1) * row + width <= bytes) {
        *step = row;
        return data;
    }
    *step = width;
    for (int64_t r = 0; r < rows; r++) {
        std::memcpy(copy + r * width, data + r * row, terms);
        std::memset(copy + r * width + terms, 0, width - terms);
    }
    return copy;
}

// --- linear --------------------------------------------------------------------------------------------------------------

// Unpacks a panel with two codes per byte to signed bytes, minus their middles.
INLINE void unpack(const uint8_t* halves, const uint8_t* middles, int64_t lines, int8_t* out) {
#if ADALOG_WIDE
    const I mask = _mm512_set1_epi8(15), middle = _mm512_loadu_si512(middles);
    for (int64_t s = 0; s < lines; s += 16)
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++, halves += LINE) {
            I two = _mm512_loadu_si512(halves);
            I low = _mm512_and_si512(two, mask), high = _mm512_and_si512(_mm512_srli_epi16(two, 4), mask);
            _mm512_storeu_si512(out + (s + g) * LINE, _mm512_sub_epi8(low, middle));
            _mm512_storeu_si512(out + (s + g + 8) * LINE, _mm512_sub_epi8(high, middle));
        }
#elif ADALOG_YMM
    const I mask = _mm256_set1_epi8(15);
    for (int64_t s = 0; s < lines; s += 16)
        for (int g = 0; g < 8; g++)
            for (int h = 0; h < LINE; h += 32, halves += 32) {
                const I two = load(halves), middle = load(middles + h);
                const I low = _mm256_and_si256(two, mask), high = _mm256_and_si256(_mm256_srli_epi16(two, 4), mask);
                uint8_t* to = reinterpret_cast<uint8_t*>(out) + (s + g) * LINE + h;
                store(to, _mm256_sub_epi8(low, middle)), store(to + 8 * LINE, _mm256_sub_epi8(high, middle));
            }
#elif ADALOG_NEON
    for (int64_t s = 0; s < lines; s += 16)
        for (int g = 0; g < 8; g++)
            for (int h = 0; h < LINE; h += 16, halves += 16) {
                const uint8x16_t two = vld1q_u8(halves), middle = vld1q_u8(middles + h);
                uint8_t* to = reinterpret_cast<uint8_t*>(out) + (s + g) * LINE + h;
                vst1q_u8(to, vsubq_u8(vandq_u8(two, vdupq_n_u8(15)), middle));
                vst1q_u8(to + 8 * LINE, vsubq_u8(vshrq_n_u8(two, 4), middle));
            }
#else
    for (int64_t s = 0; s < lines; s += 16)
        for (int g = 0; g < 8; g++, halves += LINE)
            for (int i = 0; i < LINE; i++) {
                out[(s + g) * LINE + i] = int8_t((halves[i] & 15) - middles[i]);
                out[(s + g + 8) * LINE + i] = int8_t((halves[i] >> 4) - middles[i]);
            }
#endif
}

constexpr int64_t AT_ONCE = ADALOG_LEVEL == AMX ? ROWS : 12;  // rows at once; outside AMX registers hold the sums of six rows

void linear(const void* arguments, int64_t number, uint8_t* scratch) {
    const Linear& of = *static_cast<const Linear*>(arguments);
    const Weights& weights = *of.weights;
    Carver carver{reinterpret_cast<uintptr_t>(scratch)};
    const LinearScratch memory(carver, of);
    const int64_t quads = rounded_up(weights.panels, QUAD) / QUAD, panel = number % quads * QUAD;
    const int64_t panels = std::min<int64_t>(QUAD, weights.panels - panel), width = weights.lines * GROUP;
    const int64_t first = panel * PANEL, columns = std::min<int64_t>(panels * PANEL, weights.columns - first);
    const uint8_t* packed = weights.data.data + panel * weights.panel_bytes();
    if (weights.halves)
        for (int64_t p = 0; p < panels; p++)
            unpack(packed + p * weights.panel_bytes(), weights.middles.data + (panel + p) * LINE, weights.lines,
                   memory.right + p * weights.lines * LINE);
    Right right{weights.halves ? memory.right : reinterpret_cast<const int8_t*>(packed), weights.lines * LINE,
                weights.lines, weights.base.data + first, weights.moves ? weights.moved.data + first : nullptr,
                weights.together};
#if ADALOG_WASM
    Pairs pairs;
    if (weights.halves && find_pairs(right, panels, pairs)) right.pairs = &pairs;
#endif
    const int64_t begin = number / quads * rows_of(of), end = std::min(of.rows, begin + rows_of(of));
    if (weights.moves && *memory.summed != number / quads) {  // the tasks for the same rows are consecutive
        const Left all{of.data + begin * of.row, of.more ? of.more + begin * of.row : nullptr, of.row};
        sum_rows(all, end - begin, weights.terms, memory.row_sums);
        *memory.summed = number / quads;
    }
    // The weights of the next task are far away, so they are prefetched meanwhile.
    const int64_t bytes = panels * weights.panel_bytes(), tiles = (end - begin + AT_ONCE - 1) / AT_ONCE;
    const uint8_t* next = packed + bytes;
    const int64_t ahead = std::min(bytes, int64_t(weights.data.bytes) - (next - weights.data.data));
    // The sums of some rows are stored while the sums of the next rows are computed.
    finishing(of.out, [&](const auto& finisher) INLINE_LAMBDA {
        int32_t *sums = memory.sums, *done = memory.sums + ROWS * QUAD * PANEL;
        int64_t done_row = begin, done_rows = 0;
        auto finish_part = [&](int64_t part, int64_t parts) INLINE_LAMBDA {
            const uint32_t each = uint32_t(done_rows), from = each * uint32_t(part) / uint32_t(parts);
            const uint32_t to = each * uint32_t(part + 1) / uint32_t(parts);
            const int32_t* at = done + from * QUAD * PANEL;
            finisher.rows_within(first, done_row + from, first, to - from, columns, at, QUAD * PANEL);
        };
        for (int64_t row = begin; row < end; row += AT_ONCE) {
            const int64_t rows = std::min<int64_t>(AT_ONCE, end - row);
            Left left{nullptr, nullptr, 0};
            const int64_t start = row * of.row, rest = of.bytes - start;
            left.data = readable(of.data + start, of.row, rows, weights.terms, width, rest, memory.left, &left.row);
            if (of.more)
                left.more = readable(of.more + start, of.row, rows, weights.terms, width, rest, memory.more, &left.row);
            const int64_t tile = (row - begin) / AT_ONCE;
            for (int64_t i = ahead * tile / tiles; i < ahead * (tile + 1) / tiles; i += LINE) __builtin_prefetch(next + i, 0, 2);
            finisher.fetch(first, row, rows, columns);
            multiply(left, rows, weights.terms, right, 0, panels, sums, QUAD * PANEL, memory.row_sums + row - begin, finish_part);
            std::swap(sums, done), done_row = row, done_rows = rows;
        }
        finisher.rows(first, done_row, first, done_rows, columns, done, QUAD * PANEL);
    });
}

// --- products of two computed operands -------------------------------------------------------------------------------------

// Packs the right operand of one batch and head, minus its middle, into panels, and computes its constants.
Right pack(const Side& side, int64_t batch, int64_t head, int64_t terms, int64_t columns, int left_zero, int left_top,
           const PackedScratch& memory) {
    const uint8_t* data = side.data + batch * side.batch + head * side.head;
    const int zero = side.zero[head], m = middle(side.bits, zero), left_over = zero - m;
    const int64_t panel = memory.lines * LINE;
    std::memset(memory.data, 0, memory.panels * panel);
    if (side.transposed) {
        int64_t whole = 0, packed = 0;  // columns and their terms that are packed
#if ADALOG_WIDE || ADALOG_YMM
        // Packs 16 terms of four columns at once. Groups of four terms move together.
        whole = columns / 4 * 4, packed = terms / 16 * 16;
        const __m128i middles = _mm_set1_epi8(char(m));
        for (int64_t c = 0; c < whole; c += 4)
            for (int64_t t = 0; t < packed; t += 16) {
                __m128i column[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + (c + i) * side.row + t));
                    column[i] = _mm_sub_epi8(codes, middles);
                }
                const __m128i low = _mm_unpacklo_epi32(column[0], column[1]), high = _mm_unpackhi_epi32(column[0], column[1]);
                const __m128i more_low = _mm_unpacklo_epi32(column[2], column[3]);
                const __m128i more_high = _mm_unpackhi_epi32(column[2], column[3]);
                int8_t* to = memory.data + c / PANEL * panel + c % PANEL * GROUP + t / GROUP * LINE;
                auto store_line = [&](int line, __m128i x) INLINE_LAMBDA {
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + line * LINE), x);
                };
                store_line(0, _mm_unpacklo_epi64(low, more_low)), store_line(1, _mm_unpackhi_epi64(low, more_low));
                store_line(2, _mm_unpacklo_epi64(high, more_high)), store_line(3, _mm_unpackhi_epi64(high, more_high));
            }
#endif
        for (int64_t c = 0; c < columns; c++) {
            const uint8_t* from = data + c * side.row;
            int8_t* to = memory.data + c / PANEL * panel + c % PANEL * GROUP;
            for (int64_t t = c < whole ? packed : 0; t < terms; t++) to[t / GROUP * LINE + t % GROUP] = int8_t(from[t] - m);
        }
    } else {
        int64_t done = 0;
        // Packs four terms of 16 columns at once: rows of bytes become columns.
#if ADALOG_NEON
        for (; done + PANEL <= columns; done += PANEL)
            for (int64_t t = 0; t < terms; t += GROUP) {
                uint8x16x4_t row;
                for (int i = 0; i < GROUP; i++) {
                    row.val[i] = vdupq_n_u8(0);
                    if (t + i < terms) row.val[i] = vsubq_u8(vld1q_u8(data + (t + i) * side.row + done), vdupq_n_u8(uint8_t(m)));
                }
                vst4q_u8(reinterpret_cast<uint8_t*>(memory.data + done / PANEL * panel + t / GROUP * LINE), row);
            }
#elif ADALOG_WASM
        const I middles = wasm_i8x16_splat(int8_t(m));
        for (; done + PANEL <= columns; done += PANEL)
            for (int64_t t = 0; t < terms; t += GROUP) {
                I row[GROUP];
                for (int i = 0; i < GROUP; i++)
                    row[i] = wasm_i8x16_sub(t + i < terms ? load(data + (t + i) * side.row + done) : middles, middles);
                I pairs[4];  // of terms: the first eight columns of terms 0 and 1, their other columns, then terms 2 and 3
                for (int i = 0; i < 4; i += 2) {
                    pairs[i] = wasm_i8x16_shuffle(row[i], row[i + 1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                    pairs[i + 1] =
                        wasm_i8x16_shuffle(row[i], row[i + 1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
                }
                uint8_t* to = reinterpret_cast<uint8_t*>(memory.data + done / PANEL * panel + t / GROUP * LINE);
                for (int h = 0; h < 2; h++, to += LINE / 2) {
                    store(to, wasm_i16x8_shuffle(pairs[h], pairs[h + 2], 0, 8, 1, 9, 2, 10, 3, 11));
                    store(to + LINE / 4, wasm_i16x8_shuffle(pairs[h], pairs[h + 2], 4, 12, 5, 13, 6, 14, 7, 15));
                }
            }
#elif ADALOG_LEVEL
        const __m128i middles = _mm_set1_epi8(char(m));
        for (; done + PANEL <= columns; done += PANEL)
            for (int64_t t = 0; t < terms; t += GROUP) {
                __m128i row[GROUP];
                for (int i = 0; i < GROUP; i++) {
                    row[i] = middles;
                    if (t + i < terms)
                        row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + (t + i) * side.row + done));
                    row[i] = _mm_sub_epi8(row[i], middles);
                }
                const __m128i low = _mm_unpacklo_epi8(row[0], row[1]), high = _mm_unpackhi_epi8(row[0], row[1]);
                const __m128i more_low = _mm_unpacklo_epi8(row[2], row[3]), more_high = _mm_unpackhi_epi8(row[2], row[3]);
                __m128i* to = reinterpret_cast<__m128i*>(memory.data + done / PANEL * panel + t / GROUP * LINE);
                _mm_storeu_si128(to, _mm_unpacklo_epi16(low, more_low));
                _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(low, more_low));
                _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(high, more_high));
                _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(high, more_high));
            }
#endif
        for (int64_t t = 0; t < terms; t++) {
            const uint8_t* from = data + t * side.row;
            int8_t* to = memory.data + t / GROUP * LINE + t % GROUP;
            for (int64_t c = done; c < columns; c++) to[c / PANEL * panel + c % PANEL * GROUP] = int8_t(from[c] - m);
        }
    }
    Right right{memory.data, panel, memory.lines, memory.base, nullptr, added_together(left_top, side.bits)};
    std::memset(memory.base, 0, memory.panels * PANEL * sizeof(int32_t));
    if (left_zero) {  // the sums of columns are a row of ones times the operand
        std::memset(memory.ones, 1, PANEL * memory.lines * GROUP);
        const int32_t none[QUAD * PANEL] = {};
        int32_t sums[PANEL * QUAD * PANEL];
        for (int64_t p = 0; p < memory.panels; p += QUAD) {
            Right part{memory.data + p * panel, panel, memory.lines, none, nullptr, added_together(1, side.bits)};
            multiply_bytes(memory.ones, memory.lines * GROUP, ADALOG_LEVEL == AMX ? PANEL : 1, part, QUAD, none, sums, QUAD * PANEL,
                           Nothing{});
            for (int c = 0; c < QUAD * PANEL; c++)
                memory.base[p * PANEL + c] = int32_t(uint32_t(-int64_t(left_zero) * sums[c] + terms * left_zero * left_over));
        }
    }
    if (left_over) {
        std::fill(memory.moved, memory.moved + memory.panels * PANEL, -left_over);
        right.moved = memory.moved;
    }
    return right;
}

// Computes the accumulators of at most 16 rows of a left operand for all columns: (rows, 16 panels). Inlined, it would be
// compiled once for each kind of output.
NOT_INLINE void multiply_all(const Side& side, int64_t batch, int64_t head, int64_t row, int64_t rows, int64_t terms,
                             const Right& right, int64_t columns, int64_t panels, uint8_t* copy, uint8_t* copy_more,
                             int32_t* sums, int32_t* row_sums) {
    const int64_t start = batch * side.batch + head * side.head + row * side.row, width = right.lines * GROUP;
    const int64_t rest = side.bytes - start;
    Left left{nullptr, nullptr, 0};
    left.data = readable(side.data + start, side.row, rows, terms, width, rest, copy, &left.row);
    if (side.more) left.more = readable(side.more + start, side.row, rows, terms, width, rest, copy_more, &left.row);
    const int64_t used = rounded_up(columns, PANEL) / PANEL;
    if (right.moved) sum_rows(left, rows, terms, row_sums);
    for (int64_t p = 0; p < used; p += QUAD)
        multiply(left, rows, terms, right, p, std::min<int64_t>(QUAD, used - p), sums + p * PANEL, panels * PANEL, row_sums);
}

void product(const void* arguments, int64_t number, uint8_t* scratch) {
    const Matrices& of = *static_cast<const Matrices*>(arguments);
    Carver carver{reinterpret_cast<uintptr_t>(scratch)};
    const ProductScratch memory(carver, of);
    const int64_t batch = number / of.heads, head = number % of.heads, panels = memory.right.panels;
    const Right right = pack(of.right, batch, head, of.terms, of.columns, of.left.zero[head], of.left.top, memory.right);
    finishing(of.out, [&](const auto& finisher) INLINE_LAMBDA {
        for (int64_t row = 0; row < of.rows; row += PANEL) {
            const int64_t rows = std::min<int64_t>(PANEL, of.rows - row);
            multiply_all(of.left, batch, head, row, rows, of.terms, right, of.columns, panels, memory.left, memory.more,
                         memory.sums, memory.row_sums);
            finisher.rows(batch * of.out_batch + head * of.out_head, row, head * of.columns, rows, of.columns,
                          memory.sums, panels * PANEL);
        }
    });
}

// --- attention -----------------------------------------------------------------------------------------------------------

// log2 of a positive float, with an error below 2e-7.
INLINE float log2_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    const int32_t whole = (bits - 0x3f3504f3) >> 23;  // the rest is from sqrt(1/2) to sqrt(2)
    bits -= whole * (1 << 23);
    float rest;
    std::memcpy(&rest, &bits, 4);
    const float s = (rest - 1.0f) / (rest + 1.0f), square = s * s;
    const float sum = 2.885390082f + square * (0.961796694f + square * (0.577078016f + square * (0.412198583f + square * 0.320598898f)));
    return float(whole) + s * sum;
}

// Converts rows of scores into bytes of probabilities. A probability is 2^u with u = score - log2(sum of 2^score), so its
// byte is a function of u and needs no division. Codes of a uniform quantizer are rounded directly, which is faster than a
// search. width, step: the distance from one row of sums, and of bytes, to the next, multiples of 64.
template <int MOST>
INLINE void softmax(const Attention& of, const Search<MOST>& search, int32_t* sums, int64_t width, int64_t rows,
                    int64_t columns, float factor, const float* bias, uint8_t* out, uint8_t* more, int64_t step) {
    float* scores = reinterpret_cast<float*>(sums);
    const bool rounds = of.code_scale != 0;
    float tops[PANEL] = {}, totals[PANEL], shifts[PANEL];
    std::fill(totals, totals + PANEL, 1.0f);
    for (int64_t r = 0; r < rows; r++) {
        float* row = scores + r * width;
        F top = set(-INFINITY);
        over(columns, [&](int64_t i, auto which) INLINE_LAMBDA {
            F score = mul(to_float(load(sums + r * width + i, which)), set(factor));
            if (bias) score = add(score, load(bias + r * columns + i, which));
            store(row + i, score, which);
            if constexpr (std::is_same_v<decltype(which), Some>) score = either(score, set(-INFINITY), which);
            top = most(score, top);
        });
        tops[r] = largest(top);
    }
    // In a loop of its own: the processor overlaps rows, as long as none waits for its own largest score.
    for (int64_t r = 0; r < rows; r++) {
        float* row = scores + r * width;
        F powers = set(0.0f);
        over(columns, [&](int64_t i, auto which) INLINE_LAMBDA {
            // Powers below 2^-126 make no difference to the sum, because the largest is 1, and are slow to add.
            F power = power_of_two(most(sub(load(row + i, which), set(tops[r])), set(-126.0f)));
            if (rounds) store(row + i, power, which);
            if constexpr (std::is_same_v<decltype(which), Some>) power = either(power, set(0.0f), which);
            powers = add(powers, power);
        });
        totals[r] = total(powers);
    }
    for (int r = 0; r < PANEL; r++) shifts[r] = tops[r] + log2_of(totals[r]);
    for (int64_t r = 0; r < rows; r++) {
        const float* row = scores + r * width;
        const F shift = set(shifts[r]), scale = set(of.code_scale / totals[r]), zero = set(float(of.zero));
        uint8_t *bytes = out + r * step, *more_bytes = more + r * step;
        // Packing passes through signed 16 bits, so codes are limited to 32767 here, and to the last code afterwards.
        auto code = [&](int64_t i, auto which) INLINE_LAMBDA {
            return to_nearest(least(fma(load(row + i, which), scale, zero), set(32767.0f)));
        };
#if ADALOG_LEVEL
        // Rows of scores and of bytes continue to a multiple of 64. The scores there do not matter; the bytes become 0.
        int64_t start = 0;
        const I last = set(int32_t(of.steps.top * 0x01010101u));
        for (; rounds && start < columns; start += 4 * W) {
            const I codes = small_bytes_of(code(start, All{}), code(start + W, All{}), code(start + 2 * W, All{}),
                                           code(start + 3 * W, All{}));
            store(bytes + start, least_bytes(codes, last));
        }
        auto find = [&](int vectors) INLINE_LAMBDA {
            F x[4];
            I low = set(0), high = set(0);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) x[j] = sub(load(row + start + j * W, All{}), shift);
            search(x, low, high, vectors);
            store(bytes + start, low);
            if (more) store(more_bytes + start, high);
            start += 4 * W;
        };
        while (start + 4 * W <= columns) find(4);  // without branches for vectors that are left out
        if (start < columns) find(int((columns - start + W - 1) / W));
        std::memset(bytes + columns, 0, start - columns);
        if (more) std::memset(more_bytes + columns, 0, start - columns);
#else
        for (int64_t i = 0; i < columns; i++) {
            const int32_t value = rounds ? std::min(code(i, All{}), of.steps.top) : value_at(search.steps, row[i] - shift);
            bytes[i] = uint8_t(value);
            if (more) more_bytes[i] = uint8_t(value >> 8);
        }
#endif
    }
}

// Computes the accumulators of some rows of one head. Inlined, it would be compiled once for each kind of output.
template <int MOST>
NOT_INLINE void attend_rows(const Attention& of, const Search<MOST>& search, int64_t batch, int64_t head, int64_t row,
                            int64_t rows, const Right& right, const Right& values, const float* bias,
                            const AttentionScratch& memory) {
    const Matrices& scores = of.scores;
    const int64_t keys = scores.columns, panels = memory.scores.right.panels, width = memory.values.lines * GROUP;
    int32_t* sums = memory.scores.sums;
    // The bias of all heads is too large for the second-level cache.
    for (int64_t i = 0; bias && i < rows * keys; i += LINE / 4) __builtin_prefetch(bias + row * keys + i, 0, 2);
    multiply_all(scores.left, batch, head, row, rows, scores.terms, right, keys, panels, memory.scores.left,
                 memory.scores.more, sums, memory.scores.row_sums);
    const bool two = of.steps.planes > 1;
    softmax(of, search, sums, panels * PANEL, rows, keys, of.factor[head], bias ? bias + row * keys : nullptr, memory.left,
            two ? memory.more : nullptr, width);
    const Left left{memory.left, two ? memory.more : nullptr, width};
    if (values.moved) sum_rows(left, rows, keys, memory.row_sums);
    for (int64_t p = 0; p * PANEL < of.columns; p += QUAD)
        multiply(left, rows, keys, values, p, std::min<int64_t>(QUAD, rounded_up(of.columns, PANEL) / PANEL - p),
                 memory.sums + p * PANEL, memory.values.panels * PANEL, memory.row_sums);
}

template <int MOST>
void attend(const Attention& of, int64_t batch, int64_t head, const AttentionScratch& memory) {
    const Matrices& scores = of.scores;
    const int64_t keys = scores.columns, width = memory.values.lines * GROUP;
    const Right right = pack(scores.right, batch, head, scores.terms, keys, scores.left.zero[head], scores.left.top, memory.scores.right);
    const Right values = pack(of.values, batch, head, keys, of.columns, of.zero, of.steps.top, memory.values);
    const Search<MOST> search(of.steps);
    std::memset(memory.left, 0, PANEL * width);
    if (of.steps.planes > 1) std::memset(memory.more, 0, PANEL * width);
    const float* bias = nullptr;
    if (of.bias)
        bias = of.bias + (of.bias_of[batch] * of.bias_heads + head % of.bias_heads) * scores.rows * keys;
    finishing(of.out, [&](const auto& finisher) INLINE_LAMBDA {
        for (int64_t row = 0; row < scores.rows; row += AT_ONCE) {
            const int64_t rows = std::min<int64_t>(AT_ONCE, scores.rows - row);
            attend_rows(of, search, batch, head, row, rows, right, values, bias, memory);
            finisher.rows(batch * of.out_batch + head * of.out_head, row, head * of.columns, rows, of.columns, memory.sums,
                          memory.values.panels * PANEL);
        }
    });
}

void attention(const void* arguments, int64_t number, uint8_t* scratch) {
    const Attention& of = *static_cast<const Attention*>(arguments);
    Carver carver{reinterpret_cast<uintptr_t>(scratch)};
    const AttentionScratch memory(carver, of);
    const int64_t batch = number / of.scores.heads, head = number % of.scores.heads;
#if ADALOG_WIDE
    if (of.steps.most == 1) return attend<1>(of, batch, head, memory);
    if (of.steps.most) return attend<3>(of, batch, head, memory);
#endif
    attend<0>(of, batch, head, memory);
}

// --- norms and encoders ----------------------------------------------------------------------------------------------------

void norm(const void* arguments, int64_t number, uint8_t*) {
    const Norm& of = *static_cast<const Norm*>(arguments);
    const int64_t begin = number * NORM_ROWS, end = std::min(of.rows, begin + NORM_ROWS), quick = of.columns / (4 * W) * (4 * W);
    finishing(of.out, [&](const auto& finisher) INLINE_LAMBDA {
        for (int64_t row = begin; row < end; row++) {
            const int64_t to = placed(of.out.place, row) * of.out.row, from = placed(of.out.added_to, row) * of.out.row;
            if (to < 0) continue;
            const float* x = of.data + row * of.row;
            F sum[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)}, squares[4] = {sum[0], sum[0], sum[0], sum[0]};
            for (int64_t i = 0; i < quick; i += 4 * W)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sum[j] = add(sum[j], load(x + i + j * W, All{}));
            over(of.columns - quick, [&](int64_t i, auto which) INLINE_LAMBDA { sum[0] = add(sum[0], load(x + quick + i, which)); });
            const F mean = set(of.about_zero ? 0.0f : total(add(add(sum[0], sum[1]), add(sum[2], sum[3]))) / float(of.columns));
            for (int64_t i = 0; i < quick; i += 4 * W)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    F off = sub(load(x + i + j * W, All{}), mean);
                    squares[j] = fma(off, off, squares[j]);
                }
            over(of.columns - quick, [&](int64_t i, auto which) INLINE_LAMBDA {
                F off = sub(load(x + quick + i, which), mean);
                if constexpr (std::is_same_v<decltype(which), Some>) off = either(off, set(0.0f), which);
                squares[0] = fma(off, off, squares[0]);
            });
            const float variance = total(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / float(of.columns);
            const F factor = set(1.0f / std::sqrt(variance + of.epsilon));
            finisher.row(to, from, 0, of.columns, [&](int64_t i, auto which) INLINE_LAMBDA {
                return mul(sub(load(x + i, which), mean), factor);
            });
        }
    });
}

void encode(const void* arguments, int64_t number, uint8_t*) {
    const Encode& of = *static_cast<const Encode*>(arguments);
    const int64_t begin = number * NORM_ROWS, end = std::min(of.rows, begin + NORM_ROWS);
    if (of.out.kind != CODES) {
        finishing(of.out, [&](const auto& finisher) INLINE_LAMBDA {
            for (int64_t row = begin; row < end; row++)
                finisher.row(row * of.out.row, row * of.out.row, 0, of.columns, [&](int64_t i, auto which) INLINE_LAMBDA {
                    return load(of.data + row * of.row + i, which);
                });
        });
        return;
    }
    for (int64_t row = begin; row < end; row++)
        over(of.columns, [&](int64_t i, auto which) INLINE_LAMBDA {
            F y = div(load(of.data + row * of.row + i, which), load(of.out.scale + i, which));
            const F zero = load(of.out.bias + i, which);
            y = most(least(y, sub(load(of.out.high + i, which), zero)), sub(set(0.0f), zero));
            I code = add(to_nearest(y), to_nearest(zero));
            store_bytes(static_cast<uint8_t*>(of.out.data) + row * of.out.row + i, code, which);
        });
}

// --- convolutions of each channel alone ------------------------------------------------------------------------------------

#if ADALOG_WIDE || ADALOG_YMM
// Loads the codes of 4 W channels in an order in which unpacking, which stays within 16 bytes, puts channels in sequence.
INLINE I load_for_unpacking(const uint8_t* from) {
#if ADALOG_WIDE
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), load(from));
#else
    return _mm256_permutevar8x32_epi32(load(from), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
#endif
}
#if ADALOG_WIDE
INLINE I unpack_low(I a, I b) { return _mm512_unpacklo_epi8(a, b); }
INLINE I unpack_high(I a, I b) { return _mm512_unpackhi_epi8(a, b); }
INLINE I add_pairs(I sum, I a, I b) { return _mm512_dpwssd_epi32(sum, a, b); }  // products of 16 bits, two in a lane
#else
INLINE I unpack_low(I a, I b) { return _mm256_unpacklo_epi8(a, b); }
INLINE I unpack_high(I a, I b) { return _mm256_unpackhi_epi8(a, b); }
#if ADALOG_LEVEL == 2
INLINE I add_pairs(I sum, I a, I b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#else
INLINE I add_pairs(I sum, I a, I b) { return add(sum, _mm256_madd_epi16(a, b)); }
#endif
#endif

// Computes the sums of the first channels, each from its start, and returns the number of these channels.
INLINE int64_t add_products(const Depthwise& of, const uint8_t* const* seen, const int32_t* start, int32_t* sums) {
    const int64_t channels = of.channels;
    const I zero = set(0);
    int64_t done = 0;
    // A lane holds the two taps of a pair in 16 bits each. The last channels may overlap with those before.
    while (done < channels && channels >= 4 * W) {
        done = std::min(done, channels - 4 * W);
        I sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[i] = load(start + done + i * W, All{});
        const int16_t* factors = of.factors + 2 * done;
        for (int64_t p = 0; p < of.pairs; p++, factors += 2 * channels) {
            const I one = load_for_unpacking(seen[2 * p] + done), two = load_for_unpacking(seen[2 * p + 1] + done);
            const I low = unpack_low(one, two), high = unpack_high(one, two);
            const I pairs[] = {unpack_low(low, zero), unpack_high(low, zero), unpack_low(high, zero), unpack_high(high, zero)};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                sum[i] = add_pairs(sum[i], pairs[i], load(reinterpret_cast<const int32_t*>(factors + 2 * i * W), All{}));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) store(sums + done + i * W, sum[i], All{});
        done += 4 * W;
    }
    auto wide = [&](const uint8_t* from) INLINE_LAMBDA {
#if ADALOG_WIDE
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
    };
    for (; done + W <= channels; done += W) {
        const int16_t* factors = of.factors + 2 * done;
        I sum = load(start + done, All{});
        for (int64_t p = 0; p < of.pairs; p++, factors += 2 * channels) {
            const I one = wide(seen[2 * p] + done), two = shift_left_8(shift_left_8(wide(seen[2 * p + 1] + done)));
            sum = add_pairs(sum, add(one, two), load(reinterpret_cast<const int32_t*>(factors), All{}));
        }
        store(sums + done, sum, All{});
    }
    return done;
}
#endif

// Computes the sums of all channels over the kernel. seen: the pixel under each tap, or the zero points beyond the edge.
// start: minus the products of the zero points, for the channels that `add_products` computes.
NOT_INLINE void sums_of(const Depthwise& of, const uint8_t* const* seen, const int32_t* start, int32_t* sums) {
    const int64_t channels = of.channels;
    int64_t done = 0;
#if ADALOG_WIDE || ADALOG_YMM
    done = add_products(of, seen, start, sums);
#endif
    if (done == channels) return;
    std::fill(sums + done, sums + channels, 0);
    for (int64_t p = 0; p < of.pairs; p++) {
        const uint8_t *one = seen[2 * p], *two = seen[2 * p + 1];
        const int16_t* factors = of.factors + 2 * p * channels;
        for (int64_t c = done; c < channels; c++) {
            const int32_t zero = of.zero[c];
            sums[c] += (one[c] - zero) * factors[2 * c] + (two[c] - zero) * factors[2 * c + 1];
        }
    }
}

// Computes one row of one image's output.
void depthwise(const void* arguments, int64_t number, uint8_t* scratch) {
    const Depthwise& of = *static_cast<const Depthwise*>(arguments);
    Carver carver{reinterpret_cast<uintptr_t>(scratch)};
    const DepthwiseScratch memory(carver, of);
    int64_t size[2];
    sizes_of(of, size);
    const int64_t image = number / size[0], top = number % size[0] * of.stride[0] - of.padding[0];
    const int64_t last = (of.kernel[1] - 1) * of.dilation[1], taps = 2 * of.pairs;
    std::fill(memory.seen, memory.seen + taps, of.zero);
    std::fill(memory.steps, memory.steps + taps, 0);
#if ADALOG_WIDE || ADALOG_YMM
    std::fill(memory.sums, memory.sums + of.channels, 0);
    const int64_t summed = add_products(of, memory.seen, memory.sums, memory.start);
    for (int64_t c = 0; c < summed; c++) memory.start[c] = -memory.start[c];
#endif
    finishing(of.out, [&](const auto& finisher) INLINE_LAMBDA {
        bool was_inside = false;
        for (int64_t x = 0; x < size[1]; x++) {
            const int64_t left = x * of.stride[1] - of.padding[1];
            const bool is_inside = left >= 0 && left + last < of.width;
            if (is_inside && was_inside) {
                for (int64_t tap = 0; tap < taps; tap++) memory.seen[tap] += memory.steps[tap];
            } else {
                int64_t tap = 0;
                for (int64_t i = 0; i < of.kernel[0]; i++) {
                    const int64_t down = top + i * of.dilation[0];
                    const bool there = down >= 0 && down < of.height;
                    const uint8_t* line = of.data + (image * of.height + (there ? down : 0)) * of.width * of.channels;
                    for (int64_t j = 0; j < of.kernel[1]; j++, tap++) {
                        const int64_t across = left + j * of.dilation[1];
                        const bool is_seen = there && across >= 0 && across < of.width;
                        memory.seen[tap] = is_seen ? line + across * of.channels : of.zero;
                        memory.steps[tap] = is_seen ? of.stride[1] * of.channels : 0;
                    }
                }
            }
            was_inside = is_inside;
            sums_of(of, memory.seen, memory.start, memory.sums);
            finisher.rows(0, number * size[1] + x, 0, 1, of.channels, memory.sums, of.channels);
        }
    });
}

#if ADALOG_LEVEL == 4
void begin() {
    struct alignas(64) Tiles {  // eight tiles of 16 rows of 64 bytes
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Tiles tiles;
    asm volatile("" : : "r"(&tiles) : "memory");  // the intrinsics do not tell the compiler which memory they read
    _tile_loadconfig(&tiles);
}
void end() { _tile_release(); }
#else
void begin() {}
void end() {}
#endif

}  // namespace

const Kernels kernels{linear, product, attention, norm, encode, depthwise, begin, end};

#endif
