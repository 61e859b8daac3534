// Runs packs with the kernels of native.cpp: the implementation of adalog.h. docs/reference/format.md describes packs.
//
//     g++ -O2 -std=c++17 -pthread -c model.cpp
//
// A pack chooses which kernels run on which memory. It is not trusted, so this file checks everything else:
//
// - Every pointer is a place in a region of memory that this file allocates, or in an input. All that a kernel reads or
//   writes there must lie in that region.
// - Results go only to the region "work".
// - Values that a kernel checks once and then trusts lie in the region "constants", which nothing writes.

// A product and a sum stay two roundings on processors that could merge them, because NumPy does not merge them.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "adalog.h"

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cfloat>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

#include "kernels.h"
#include "reader.h"
#include "structures.h"

namespace {

using adalog::check;
using adalog::demand;
using adalog::Document;
using adalog::Json;
using adalog::Refusal;
using adalog::Stored;
using adalog::Tensors;
using adalog::Value;
using Wide = __int128;

constexpr char KEY[] = "adalog-pack";
constexpr int64_t PACK_FORMAT = 1, TAPE_FORMAT = 1;  // as in export/pack.py and record.py
constexpr int64_t MAX_BATCH = 1 << 16, MAX_WORK = 1 << 30, MAX_TAPES = 16;  // the first as in export/pack.py
constexpr size_t MAX_NAME = 1024;      // of an output [bytes]
constexpr int64_t MAX_SIDE = 1 << 24;  // of a weight, as in native.cpp
constexpr int MAX_LAYOUTS = 16;
constexpr size_t ALIGNMENT = 64, MEMORY = size_t(1) << 31;
// By the bits of adalog_features.
const char* const LEVELS[] = {"scalar", "avx2", "avxvnni", "avx512vnni", "amx", "neon", "i8mm", "wasm"};

struct Kernel {
    const char *name, *structure;
    int (*run)(void*, const void*);
};
const Kernel KERNELS[] = {
    {"linear", "Linear", adalog_linear},          {"product", "Matrices", adalog_product},
    {"attention", "Attention", adalog_attention}, {"norm", "Norm", adalog_norm},
    {"encode", "Encode", adalog_encode},          {"patches", "Patches", adalog_patches},
    {"depthwise", "Depthwise", adalog_depthwise},
};

// --- memory --------------------------------------------------------------------------------------------------------------

// Counts the bytes that a model takes, and refuses more than its limit.
class Budget {
public:
    explicit Budget(size_t limit) : limit_(limit) {}
    void take(Wide bytes) {
        demand(bytes <= Wide(limit_ - used_), ADALOG_NO_MEMORY,
            "the model takes more than the limit of %zu bytes: at least %.0f", limit_, double(used_ + bytes));
        used_ += size_t(bytes);
    }
    size_t used() const { return used_; }

private:
    size_t limit_, used_ = 0;
};

// Zero bytes, aligned to a cache line.
class Region {
public:
    Region() = default;
    Region(size_t size, Budget& budget) : size_(size) {
        budget.take(size);
        void* memory = nullptr;
        if (posix_memalign(&memory, ALIGNMENT, std::max<size_t>(size, 1))) throw std::bad_alloc();
        std::memset(memory, 0, size);
        memory_.reset(static_cast<uint8_t*>(memory));
    }
    uint8_t* data() const { return memory_.get(); }
    size_t size() const { return size_; }

private:
    struct Free {
        void operator()(uint8_t* memory) const { std::free(memory); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    size_t size_ = 0;
};

struct Type {
    const char* name;
    adalog_type type;
    size_t size;
};
const Type TYPES[] = {{"float32", ADALOG_FLOAT32, 4}, {"float64", ADALOG_FLOAT64, 8}, {"uint8", ADALOG_UINT8, 1},
                      {"int32", ADALOG_INT32, 4},     {"int64", ADALOG_INT64, 8},     {"bool", ADALOG_BOOL, 1}};

// An array in memory. Strides are in bytes.
struct View {
    uint8_t* data = nullptr;
    const Type* type = TYPES;
    int rank = 0;
    int64_t shape[8] = {}, strides[8] = {};

    Wide count() const {
        Wide product = 1;
        for (int i = 0; i < rank; i++) product = std::min<Wide>(product * shape[i], INT64_MAX);
        return product;
    }
};

bool same_shape(const View& one, const View& other) {
    return one.rank == other.rank && std::equal(one.shape, one.shape + one.rank, other.shape);
}

// Returns a dense view of memory.
View dense(uint8_t* data, const Type* type, int rank, const int64_t* shape) {
    View view{data, type, rank, {}, {}};
    int64_t stride = int64_t(type->size);
    for (int i = rank - 1; i >= 0; i--) {
        view.shape[i] = shape[i], view.strides[i] = stride;
        stride = int64_t(std::min<Wide>(Wide(stride) * std::max<int64_t>(shape[i], 1), INT64_MAX));
    }
    return view;
}

// Returns the view with the strides of another shape, whose sizes of one it repeats.
View repeated(const View& view, const View& to) {
    check(view.rank <= to.rank, "an operand has more dimensions than its result");
    View wide = to;
    wide.data = view.data, wide.type = view.type;
    for (int i = 0; i < to.rank; i++) {
        const int from = i - (to.rank - view.rank);
        const int64_t size = from < 0 ? 1 : view.shape[from];
        check(size == to.shape[i] || size == 1, "an operand does not have the shape of its result");
        wide.strides[i] = size == 1 ? 0 : view.strides[from];
    }
    return wide;
}

// Calls run(pointers, steps, count) for each row of views of one shape: the entries along the last dimension.
template <size_t N, class Run>
void over_rows(const View* const (&views)[N], Run run) {
    const View& shape = *views[0];
    if (!shape.count()) return;
    const int last = shape.rank - 1;
    uint8_t* at[N];
    int64_t steps[N] = {}, index[8] = {};
    for (size_t k = 0; k < N; k++) at[k] = views[k]->data, steps[k] = last < 0 ? 0 : views[k]->strides[last];
    const int64_t count = last < 0 ? 1 : shape.shape[last];
    while (true) {
        run(at, steps, count);
        int axis = last - 1;
        for (; axis >= 0; axis--) {
            for (size_t k = 0; k < N; k++) at[k] += views[k]->strides[axis];
            if (++index[axis] < shape.shape[axis]) break;
            for (size_t k = 0; k < N; k++) at[k] -= views[k]->strides[axis] * shape.shape[axis];
            index[axis] = 0;
        }
        if (axis < 0) return;
    }
}

// --- float operations that have no kernel, with the bits of floats.py ----------------------------------------------------

void copy(const View& out, const View& x) {
    over_rows({&out, &x}, [&](uint8_t** at, const int64_t* steps, int64_t count) {
        const size_t size = out.type->size;
        if (steps[0] == int64_t(size) && steps[1] == int64_t(size)) {
            std::memmove(at[0], at[1], size_t(count) * size);
            return;
        }
        uint8_t *to = at[0], *from = at[1];
        for (int64_t i = 0; i < count; i++, to += steps[0], from += steps[1]) std::memcpy(to, from, size);
    });
}

template <class Function>
void pointwise(const View& out, const View& x, const View& y, Function function) {
    over_rows({&out, &x, &y}, [&](uint8_t** at, const int64_t* steps, int64_t count) {
        float* to = reinterpret_cast<float*>(at[0]);
        const float *one = reinterpret_cast<const float*>(at[1]), *two = reinterpret_cast<const float*>(at[2]);
        const int64_t a = steps[0] / 4, b = steps[1] / 4, c = steps[2] / 4;
        if (a == 1 && b == 1 && c == 1)
            for (int64_t i = 0; i < count; i++) to[i] = function(one[i], two[i]);
        else
            for (int64_t i = 0; i < count; i++) to[i * a] = function(one[i * b], two[i * c]);
    });
}

// Adds floats in float64, in NumPy's order for neighbours in memory: pairs of blocks of at most 128, eight sums in each.
double sum_of_neighbours(const uint8_t* data, int64_t count, int64_t stride) {
    auto at = [&](int64_t i) { return double(*reinterpret_cast<const float*>(data + i * stride)); };
    if (count < 8) {
        double sum = 0;
        for (int64_t i = 0; i < count; i++) sum += at(i);
        return sum;
    }
    if (count <= 128) {
        double sums[8];
        for (int j = 0; j < 8; j++) sums[j] = at(j);
        int64_t i = 8;
        for (; i < count - count % 8; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += at(i + j);
        double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        for (; i < count; i++) sum += at(i);
        return sum;
    }
    const int64_t half = count / 2 - count / 2 % 8;
    return sum_of_neighbours(data, half, stride) + sum_of_neighbours(data + half * stride, count - half, stride);
}

// Writes the mean over some dimensions, added up in float64. `out` has the other dimensions, in their order.
void mean(const View& out, const View& x, const bool (&reduced)[8]) {
    // NumPy goes through memory in the order of the strides. If neighbours belong to one sum, it adds them pairwise.
    int order[8], axes = 0;
    for (int i = 0; i < x.rank; i++)
        if (x.shape[i] != 1) order[axes++] = i;
    std::stable_sort(order, order + axes, [&](int a, int b) { return x.strides[a] > x.strides[b]; });
    View kept = out, sums = out;
    sums.rank = 0;
    int64_t terms = 1, neighbours = 1, step = 0;
    const bool paired = axes && reduced[order[axes - 1]];
    for (int i = axes - 1; i >= 0; i--) {
        const int axis = order[i];
        if (!reduced[axis]) continue;
        terms *= x.shape[axis];
        const bool follows = paired && sums.rank == 0 && (neighbours == 1 || x.strides[axis] == step * neighbours);
        if (follows && (i == axes - 1 || reduced[order[i + 1]])) {
            if (neighbours == 1) step = x.strides[axis];
            neighbours *= x.shape[axis];
        } else {  // the dimensions of the sums, the innermost last
            std::memmove(sums.shape + 1, sums.shape, sizeof(int64_t) * size_t(sums.rank));
            std::memmove(sums.strides + 1, sums.strides, sizeof(int64_t) * size_t(sums.rank));
            sums.shape[0] = x.shape[axis], sums.strides[0] = x.strides[axis], sums.rank++;
        }
    }
    kept.data = x.data;
    for (int i = 0, j = 0; i < x.rank; i++)
        if (!reduced[i]) kept.strides[j++] = x.strides[i];
    over_rows({&out, &kept}, [&](uint8_t** at, const int64_t* steps, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            double sum = 0;
            View part = sums;
            part.data = at[1] + i * steps[1];
            over_rows({&part}, [&](uint8_t** start, const int64_t* stride, int64_t rows) {
                for (int64_t j = 0; j < rows; j++) sum += sum_of_neighbours(start[0] + j * stride[0], neighbours, step);
            });
            *reinterpret_cast<float*>(at[0] + i * steps[0]) = float(sum / double(terms));
        }
    });
}

// A float operation. `run` computes `out` from the operands, whose shapes were checked.
enum class Operation { COPY, ADD, SUB, MUL, DIV, MAX, MIN, SQRT, CAT, MEAN, POOL };
const std::pair<const char*, Operation> OPERATIONS[] = {
    {"copy", Operation::COPY},         {"aten.add.Tensor", Operation::ADD},
    {"aten.sub.Tensor", Operation::SUB}, {"aten.mul.Tensor", Operation::MUL},
    {"aten.div.Tensor", Operation::DIV}, {"aten.maximum.default", Operation::MAX},
    {"aten.minimum.default", Operation::MIN}, {"aten.sqrt.default", Operation::SQRT},
    {"aten.cat.default", Operation::CAT},
    {"aten.mean.dim", Operation::MEAN},  {"aten.adaptive_avg_pool2d.default", Operation::POOL},
};

struct Floats {
    Operation operation;
    View out;
    std::vector<View> operands;
    std::unique_ptr<float[]> numbers;  // what operands that are numbers point to
    int axis = 0;                      // of CAT
    bool reduced[8] = {};              // of MEAN

    void run() const {
        switch (operation) {
            case Operation::COPY: return copy(out, operands[0]);
            case Operation::ADD: return pointwise(out, operands[0], operands[1], std::plus<float>());
            case Operation::SUB: return pointwise(out, operands[0], operands[1], std::minus<float>());
            case Operation::MUL: return pointwise(out, operands[0], operands[1], std::multiplies<float>());
            case Operation::DIV: return pointwise(out, operands[0], operands[1], std::divides<float>());
            // NaN stays NaN, and both zeros become positive.
            case Operation::MAX:
                return pointwise(out, operands[0], operands[1],
                    [](float x, float y) { return (x > y || x != x ? x : y) + 0.0f; });
            case Operation::MIN:
                return pointwise(out, operands[0], operands[1],
                    [](float x, float y) { return (x < y || x != x ? x : y) + 0.0f; });
            case Operation::SQRT:
                return pointwise(out, operands[0], operands[0], [](float x, float) { return std::sqrt(x); });
            case Operation::MEAN: return mean(out, operands[0], reduced);
            case Operation::CAT: {
                View part = out;
                for (const View& each : operands) {
                    part.shape[axis] = each.shape[axis];
                    copy(part, each);
                    part.data += part.strides[axis] * part.shape[axis];
                }
                return;
            }
            case Operation::POOL: return pool();
        }
    }

private:
    void pool() const {
        const View& x = operands[0];
        const int rank = out.rank, y_axis = rank - 2, x_axis = rank - 1;
        bool last_two[8] = {};
        last_two[y_axis] = last_two[x_axis] = true;
        View cell = out, window = x;
        cell.rank -= 2;
        for (int64_t i = 0; i < out.shape[y_axis]; i++)
            for (int64_t j = 0; j < out.shape[x_axis]; j++) {
                cell.data = out.data + i * out.strides[y_axis] + j * out.strides[x_axis];
                const int64_t at[2] = {i, j};
                window.data = x.data;
                for (int k = 0; k < 2; k++) {
                    const int64_t full = x.shape[rank - 2 + k], cells = out.shape[rank - 2 + k];
                    const int64_t begin = at[k] * full / cells, end = ((at[k] + 1) * full + cells - 1) / cells;
                    window.data += begin * x.strides[rank - 2 + k], window.shape[rank - 2 + k] = end - begin;
                }
                mean(cell, window, last_two);
            }
    }
};

// --- weights -------------------------------------------------------------------------------------------------------------

// A stored weight in the layout that kernels read, for one way of reading its left operand.
class Weight {
public:
    // shape: outputs, terms or channels, and taps, which is 1 unless the terms lie channel by channel.
    Weight(const Tensors& file, const std::string& name, const int64_t (&shape)[3], const int64_t (&choices)[3],
        Budget& budget) {
        const Stored &packed = file.at("codes/" + name), &zero = file.at("zero_point/" + name);
        const int64_t bits = choices[0];
        check(packed.bytes && packed.rank == 1 && zero.bytes, "weight %s is not stored as flat uint8", EXCERPT(name));
        check(zero.rank == 1 && zero.shape[0] == shape[0], "weight %s has other zero points", EXCERPT(name));
        const Wide count = Wide(shape[0]) * shape[1] * shape[2];
        check((count * bits + 7) / 8 == Wide(packed.size), "the codes of weight %s have another size", EXCERPT(name));
        const int unused = int(Wide(packed.size) * 8 - count * bits);
        check(!unused || !(packed.data[packed.size - 1] >> (8 - unused)),
            "the bits after the last code of weight %s are not zero", EXCERPT(name));
        // A panel of 16 columns with its terms padded to a multiple of 64, and 8 bytes per column and 64 panel columns.
        const Wide columns = (Wide(shape[0]) + 15) / 16 * 16, terms = (Wide(shape[1]) * shape[2] + 63) / 64 * 64;
        budget.take((bits <= 4 ? columns * terms / 2 : columns * terms) + columns * 16 + 1024);
        if (count > PTRDIFF_MAX) throw std::bad_alloc();
        std::unique_ptr<uint8_t[]> codes(new uint8_t[size_t(count)]);
        unpack(packed.data, packed.size, int(bits), size_t(count), codes.get());
        if (shape[2] > 1) codes = sort_by_pixel(codes.get(), shape);
        std::vector<int32_t> zeros(zero.data, zero.data + zero.size);
        weights_.reset(adalog_weights(codes.get(), zeros.data(), shape[0], shape[1] * shape[2], int(bits), int(choices[1]),
            int(choices[2])));
        if (!weights_) throw std::bad_alloc();
    }
    const void* get() const { return weights_.get(); }

private:
    struct Free {
        void operator()(void* weights) const { adalog_weights_free(weights); }
    };
    std::unique_ptr<void, Free> weights_;

    // Returns the codes with the channels of each tap together.
    static std::unique_ptr<uint8_t[]> sort_by_pixel(const uint8_t* codes, const int64_t (&shape)[3]) {
        const int64_t channels = shape[1], taps = shape[2], terms = channels * taps;
        std::unique_ptr<uint8_t[]> result(new uint8_t[size_t(shape[0] * terms)]);
        for (int64_t row = 0; row < shape[0] * terms; row += terms)
            for (int64_t c = 0; c < channels; c++)
                for (int64_t t = 0; t < taps; t++) result[row + t * channels + c] = codes[row + c * taps + t];
        return result;
    }

    static void unpack(const uint8_t* packed, size_t size, int bits, size_t count, uint8_t* codes) {
        if (bits == 8) {
            std::memcpy(codes, packed, count);
        } else if (bits == 4) {
            size_t i = 0;
            for (; i + 8 <= count; i += 8) {  // eight codes in 32 bits become eight bytes
                uint32_t eight;
                std::memcpy(&eight, packed + i / 2, 4);
                uint64_t bytes = eight;
                bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
                bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
                bytes = (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0fu;
                std::memcpy(codes + i, &bytes, 8);
            }
            for (; i < count; i++) codes[i] = packed[i / 2] >> (i % 2 * 4) & 15;
        } else {
            uint32_t held = 0;
            int bits_held = 0;
            size_t at = 0;
            for (size_t i = 0; i < count; i++, held >>= bits, bits_held -= bits) {
                if (bits_held < bits && at < size) held |= uint32_t(packed[at++]) << bits_held, bits_held += 8;
                codes[i] = uint8_t(held & ((1u << bits) - 1));
            }
        }
    }
};

// The weights of a pack. Equal entries share one weight.
class WeightStore {
public:
    WeightStore(const Tensors& file, Budget& budget) : file_(file), budget_(budget) {}
    const void* weight_of(Value entry) {
        const bool listed = entry.is(Json::LIST) && entry.size() == 5 && entry[0].is(Json::TEXT);
        check(listed, "a weight is not [name, shape, bits, ...]");
        const std::string name(entry[0].text());
        int64_t shape[8], choices[3];
        const int rank = int(entry[1].shape(shape));
        if (rank == 2) shape[2] = 1;
        bool good = rank == 2 || rank == 3;
        for (int i = 0; good && i < 3; i++) good = shape[i] > 0 && shape[i] <= MAX_SIDE;
        good = good && shape[1] * shape[2] <= MAX_SIDE;
        for (size_t i = 0; i < 3; i++) {
            good = good && entry[2 + i].is_whole(0, 255);
            choices[i] = entry[2 + i].whole();
        }
        check(good && choices[0] >= 2 && choices[0] <= 8, "weight %s has an invalid shape or invalid numbers",
            EXCERPT(name));
        auto& layouts = made_[name];
        const std::array<int64_t, 6> key{shape[0], shape[1], shape[2], choices[0], choices[1], choices[2]};
        auto there = layouts.find(key);
        if (there == layouts.end()) {
            check(layouts.size() < MAX_LAYOUTS, "weight %s is laid out in more than %d ways", EXCERPT(name),
                MAX_LAYOUTS);
            const int64_t sizes[3] = {shape[0], shape[1], shape[2]};
            there = layouts.emplace(key, std::make_unique<Weight>(file_, name, sizes, choices, budget_)).first;
        }
        return there->second->get();
    }
    using Made = std::map<std::string, std::map<std::array<int64_t, 6>, std::unique_ptr<Weight>>>;
    Made take() { return std::move(made_); }

private:
    const Tensors& file_;
    Budget& budget_;
    Made made_;
};

// --- tapes ---------------------------------------------------------------------------------------------------------------

struct Named {
    std::string name;
    View view;  // of an input, without memory; of an output, one batch of it
};

// The rows of `FIELDS` that describe one structure: the row of the structure, and those after it.
struct Layout {
    const Field* whole;
    const Field* find(std::string_view name) const {
        const size_t prefix = std::strlen(whole->name) + 1;
        for (const Field* field = whole + 1; is_field(field); field++)
            if (name == field->name + prefix) return field;
        return nullptr;
    }
    static bool is_field(const Field* field) { return field < std::end(FIELDS) && std::strchr(field->name, '.'); }
};
Layout layout_of(const char* structure) {
    for (const Field& field : FIELDS)
        if (!std::strcmp(field.name, structure)) return {&field};
    check(false, "there is no structure %s", structure);
    return {nullptr};
}

// A structure that is being filled in, and the structure around it.
struct Filled {
    Layout layout;
    uint8_t* data;
    const Filled* around;

    template <class T>
    T read(const Field* field) const {
        T value;
        std::memcpy(&value, data + field->offset, sizeof value);
        return value;
    }
    // Returns the number in a field of this structure, or of one around it.
    Wide count(const char* name) const {
        if (const Field* field = layout.find(name)) {
            if (field->type == FieldType::INT64) return read<int64_t>(field);
            if (field->type == FieldType::INT32) return read<int32_t>(field);
        }
        const std::string_view structure = layout.whole->name;
        if (structure == "Attention" && !std::strcmp(name, "heads")) {
            const Field* scores = layout.find("scores");
            return Filled{layout_of(scores->more), data + scores->offset, nullptr}.count(name);
        }
        const bool factors = structure == "Depthwise" && !std::strcmp(name, "factor_count");
        if (factors) {
            const Wide pairs = count("pairs"), channels = count("channels");
            check(std::min(pairs, channels) >= 0 && std::max(pairs, channels) <= INT32_MAX,
                "it has a negative or too large number of channels");
            return 2 * pairs * channels;
        }
        check(around, "there is no field %s", name);
        return around->count(name);
    }
};

class Tape {
public:
    int64_t batch = 0;
    std::vector<Named> inputs, outputs;

    Tape(Value tape, const Tensors& file, std::string_view digest, WeightStore& weights, Budget& budget) {
        check(tape.is(Json::OBJECT), "a tape is not a JSON object");
        check(tape.at("format").is_whole(TAPE_FORMAT, TAPE_FORMAT), "it has a tape of another format than %d",
            int(TAPE_FORMAT));
        const Value interface = tape.at("interface");
        check(interface.is_whole(1, INT32_MAX), "the kernel interface of a tape is out of range");
        check(interface.whole() == adalog_abi(),
            "it is for kernel interface %d, and this library has %d: both must be of the same version of adalog",
              int(interface.whole()), adalog_abi());
        tape.check_fields({"format", "version", "interface", "artifact", "batch", "inputs", "weights", "work", "fills",
                           "copies", "calls", "output"},
                          "a tape");
        check(tape.at("version").is(Json::TEXT), "the version of a tape is not text");
        check(tape.at("artifact").is(Json::TEXT) && tape.at("artifact").text() == digest,
            "its tapes belong to another artifact");
        for (const char* name : {"inputs", "weights", "fills", "copies", "calls"})
            check(tape.at(name).is(Json::LIST), "the field %s of a tape is not a list", name);
        check(tape.at("batch").is_whole(1, MAX_BATCH), "the batch of a tape is out of range");
        batch = tape.at("batch").whole();
        most_ = std::min<int64_t>(batch * MAX_WORK, PTRDIFF_MAX);  // addresses may have 32 bits
        check(tape.at("work").is_whole(0, most_), "the work of a tape is out of range");
        read_inputs(tape.at("inputs"));
        const Stored& constants = file.at("constants/" + std::to_string(batch));
        check(constants.bytes && constants.rank == 1, "its constants are not bytes");
        work_ = Region(size_t(tape.at("work").whole()), budget), constants_ = Region(constants.size, budget);
        if (constants.size) std::memcpy(constants_.data(), constants.data, constants.size);
        for (Value fill : tape.at("fills")) this->fill(fill);
        std::vector<const void*> laid_out;
        for (Value entry : tape.at("weights")) laid_out.push_back(weights.weight_of(entry));
        budget.take(Wide(tape.at("calls").size()) * 1024);
        for (Value call : tape.at("calls")) bind(call, laid_out);
        read_copies(tape.at("copies"));
        Wide total = 0;
        read_outputs(tape.at("output"), "", total, budget);
        check(total <= most_, "its outputs take more than %lld bytes", static_cast<long long>(most_));
    }

    // Runs one batch. Each input has `batch` images.
    void run(void* context, const uint8_t* const* given) const {
        for (const Pointer& pointer : pointers_) {
            const uint8_t* address = given[pointer.input] + pointer.offset;
            std::memcpy(pointer.field, &address, sizeof address);
        }
        for (const auto& each : copies_) {
            const View& input = inputs[each.first].view;
            copy(each.second, dense(const_cast<uint8_t*>(given[each.first]), input.type, input.rank, input.shape));
        }
        for (const Call& call : calls_) {
            if (call.kernel) {
                const int status = call.kernel(context, call.arguments.get());
                demand(status != 2, ADALOG_NO_MEMORY, "step %s does not have enough memory", EXCERPT(call.step));
                demand(!status, ADALOG_FAILED, "step %s fails: a kernel's sizes do not match", EXCERPT(call.step));
            } else {
                call.floats->run();
            }
        }
    }

private:
    struct Call {
        std::string step;
        int (*kernel)(void*, const void*) = nullptr;
        std::unique_ptr<uint64_t[]> arguments;  // of a kernel
        std::unique_ptr<Floats> floats;
    };
    struct Pointer {  // in the arguments of a kernel, to a place in an input
        uint8_t* field;
        size_t input, offset;
    };
    struct Place {
        int64_t input;  // -1: none
        const Region* region;
        size_t offset;
        Wide there;  // bytes from the place to the end of its region
    };
    int64_t most_ = 0;
    Region work_, constants_;
    std::vector<size_t> sizes_;  // bytes of each input
    std::vector<Call> calls_;
    std::vector<Pointer> pointers_;
    std::vector<std::pair<size_t, View>> copies_;

    void read_inputs(Value list) {
        check(list.size() > 0, "it has no inputs");
        for (Value each : list) {
            const bool named = each.is(Json::LIST) && each.size() == 2 && each[0].is(Json::TEXT);
            check(named, "an input is not [name, shape]");
            Named input{std::string(each[0].text()), {}};
            input.view.rank = each[1].shape(input.view.shape);
            check(input.view.rank > 0 && input.view.shape[0] == batch,
                "an input does not have a shape with %d images", int(batch));
            for (const Named& other : inputs) check(other.name != input.name, "two of its inputs have one name");
            const Wide size = input.view.count() * 4;
            check(size <= most_, "an input takes more than %lld bytes", static_cast<long long>(most_));
            sizes_.push_back(size_t(size));
            inputs.push_back(input);
        }
    }

    void fill(Value entry) {
        bool good = entry.is(Json::LIST) && entry.size() == 3;
        int64_t numbers[3] = {};
        for (size_t i = 0; good && i < 3; i++) {
            good = entry[i].is_whole(0, INT64_MAX / 2);
            numbers[i] = entry[i].whole();
        }
        good = good && uint64_t(numbers[0] + numbers[2]) <= work_.size() &&
            uint64_t(numbers[1] + numbers[2]) <= constants_.size();
        check(good, "it fills something that is not [offset, offset, bytes] within its memory");
        std::memcpy(work_.data() + numbers[0], constants_.data() + numbers[1], size_t(numbers[2]));
    }

    Place place(Value given) const {
        const bool two = given.is(Json::LIST) && given.size() == 2 && given[1].is_whole(0, INT64_MAX);
        check(two, "there is something that is not a place in memory");
        const Value region = given[0];
        Place place{-1, nullptr, 0, 0};
        Wide size = 0;
        if (region.is_whole(0, int64_t(sizes_.size()) - 1)) {
            place.input = region.whole(), size = sizes_[size_t(place.input)];
        } else {
            const std::string_view name = region.is(Json::TEXT) ? region.text() : "";
            check(name == "work" || name == "constants", "there is a place in an unknown region of memory");
            place.region = name == "work" ? &work_ : &constants_, size = place.region->size();
        }
        check(given[1].whole() <= size, "a place lies beyond its region");
        place.offset = size_t(given[1].whole()), place.there = size - Wide(place.offset);
        return place;
    }

    View view(Value given, bool written) const {
        given.check_fields({"at", "shape", "strides", "type"}, "a view");
        const Place place = this->place(given.at("at"));
        check(place.region && (place.region == &work_ || !written), "a view lies in a region that it may not use");
        View view;
        view.rank = given.at("shape").shape(view.shape);
        const int strides = given.at("strides").shape(view.strides);
        view.type = nullptr;
        for (const Type& type : TYPES)
            if (given.at("type").is(Json::TEXT) && given.at("type").text() == type.name) view.type = &type;
        check(view.rank >= 0 && strides == view.rank && view.type,
            "a view has a shape, strides or a type that are not valid");
        const int64_t size = int64_t(view.type->size);
        Wide last = 0;
        bool aligned = int64_t(place.offset) % size == 0;
        for (int i = 0; i < view.rank; i++)
            last += Wide(view.shape[i] - 1) * view.strides[i], aligned = aligned && view.strides[i] % size == 0;
        check(aligned, "a view is not aligned to the size of its numbers");
        const Wide count = view.count();
        check(!count || last + size <= place.there, "a view takes more bytes than are there");
        check(count <= most_ / size, "a view shows more than %lld bytes", static_cast<long long>(most_));
        view.data = place.region->data() + place.offset;
        return view;
    }

    void bind(Value call, const std::vector<const void*>& weights) {
        const bool three = call.is(Json::LIST) && call.size() == 3 && call[0].is(Json::TEXT) && call[1].is(Json::TEXT);
        check(three, "a call is not [step, operation, arguments]");
        Call bound;
        bound.step = std::string(call[0].text());
        const std::string_view operation = call[1].text();
        for (const Kernel& kernel : KERNELS)
            if (operation == kernel.name) {
                const Layout layout = layout_of(kernel.structure);
                bound.arguments.reset(new uint64_t[size_t(layout.whole->size) / 8 + 1]());
                const Filled filled{layout, reinterpret_cast<uint8_t*>(bound.arguments.get()), nullptr};
                set_numbers(filled, call[2]);
                set_pointers(filled, call[2], weights);
                bound.kernel = kernel.run;
                calls_.push_back(std::move(bound));
                return;
            }
        for (const auto& known : OPERATIONS)
            if (operation == known.first) {
                bound.floats = std::make_unique<Floats>();
                bound.floats->operation = known.second;
                set_floats(*bound.floats, call[2]);
                calls_.push_back(std::move(bound));
                return;
            }
        check(false, "step %s calls %s, which this library does not run", EXCERPT(bound.step), EXCERPT(operation));
    }

    // Sets the numbers of a structure and of the structures in it.
    void set_numbers(const Filled& to, Value given) {
        check(given.is(Json::OBJECT), "the arguments of a kernel are not a JSON object");
        for (Value each : given) {
            const Field* field = to.layout.find(each.key());
            check(field, "a call has the field %s, which its kernel does not take", EXCERPT(each.key()));
            uint8_t* at = to.data + field->offset;
            bool good = true;
            if (field->type == FieldType::STRUCTURE) {
                set_numbers({layout_of(field->more), at, &to}, each);
            } else if (field->type == FieldType::PAIR) {
                good = each.is(Json::LIST) && each.size() == 2;
                for (size_t i = 0; good && i < 2; i++) {
                    good = each[i].is_whole(0, INT64_MAX);
                    store(at + 8 * i, each[i].whole());
                }
            } else if (field->type == FieldType::FLOAT) {
                good = each.is_number() && std::fabs(each.number()) <= FLT_MAX;
                store(at, good ? float(each.number()) : 0.0f);
            } else if (field->type == FieldType::INT64) {
                good = each.is_whole(INT64_MIN, INT64_MAX);
                store(at, each.whole());
            } else if (field->type == FieldType::INT32) {
                good = each.is_whole(INT32_MIN, INT32_MAX);
                store(at, int32_t(good ? each.whole() : 0));
            }
            check(good, "a call has a value of %s that the field cannot hold", field->name);
        }
    }
    template <class T>
    static void store(uint8_t* at, T value) {
        std::memcpy(at, &value, sizeof value);
    }

    // Sets the pointers of a structure, whose numbers are set already.
    void set_pointers(const Filled& to, Value given, const std::vector<const void*>& weights) {
        for (Value each : given) {
            const Field* field = to.layout.find(each.key());
            uint8_t* at = to.data + field->offset;
            if (field->type == FieldType::STRUCTURE) {
                set_pointers({layout_of(field->more), at, &to}, each, weights);
            } else if (!std::strcmp(field->name, "Linear.weights")) {
                check(each.is_whole(0, int64_t(weights.size()) - 1), "a call has a weight that the tape does not list");
                store(at, weights[size_t(each.whole())]);
            } else if (field->type == FieldType::POINTER) {
                point(to, field, each);
            }
        }
    }

    void point(const Filled& to, const Field* field, Value given) {
        const std::string_view name = std::strchr(field->name, '.') + 1, count = field->more;
        const bool in_bytes = count.size() >= 5 && count.substr(count.size() - 5) == "bytes";
        const Wide entries = to.count(field->more), bytes = in_bytes ? entries : entries * field->entry;
        const Place place = this->place(given);
        if (!field->constant) check(place.region == &work_, "%s is not in work", field->name);
        else if (name != "data" && name != "more" && name != "residual")
            check(place.region == &constants_, "%s is not in constants", field->name);
        check(bytes >= 0 && bytes <= place.there, "%s does not have as many bytes as the other fields require",
            field->name);
        int64_t alignment = std::min<int64_t>(field->entry, 4);
        if (!std::strcmp(field->name, "Output.data")) {
            const int32_t kind = to.read<int32_t>(to.layout.find("kind"));
            if (kind == SUMS || kind == FLOATS) alignment = 4;
        }
        check(int64_t(place.offset) % alignment == 0, "%s is not aligned to the size of its numbers", field->name);
        uint8_t* at = to.data + field->offset;
        if (place.region) {
            store(at, place.region->data() + place.offset);
        } else {
            check(name == "data", "only data may lie in an input, and %s does", field->name);
            pointers_.push_back({at, size_t(place.input), place.offset});
        }
    }

    void set_floats(Floats& to, Value given) {
        const bool list = given.is(Json::LIST) && given.size() > 1;
        check(list, "a float operation needs a list with a result and arguments");
        to.out = view(given[0], true);
        const bool copies = to.operation == Operation::COPY, joins = to.operation == Operation::CAT;
        const bool averages = to.operation == Operation::MEAN || to.operation == Operation::POOL;
        const size_t operands = joins ? 0 : copies || averages || to.operation == Operation::SQRT ? 1 : 2;
        check(copies || joins || to.out.type == TYPES, "a float operation has a result that is not float32");
        check(given.size() > operands, "a float operation has too few arguments");
        to.numbers.reset(new float[operands + 1]());
        auto operand = [&](Value value) {
            const View read = view(value, false);
            check(read.type == to.out.type, "a float operation has operands of another type than its result");
            return read;
        };
        for (size_t i = 0; i < operands; i++) {
            const Value value = given[1 + i];
            if (value.is_number() && operands == 2) {
                check(std::fabs(value.number()) <= FLT_MAX, "a float operation has a number that float32 cannot hold");
                to.numbers[i] = float(value.number());
                View number;
                number.data = reinterpret_cast<uint8_t*>(&to.numbers[i]);
                to.operands.push_back(repeated(number, to.out));
            } else {
                const View read = operand(value);
                to.operands.push_back(averages ? read : repeated(read, to.out));
            }
        }
        if (joins) set_join(to, given, operand);
        if (to.operation == Operation::MEAN) set_mean(to, given);
        if (to.operation == Operation::POOL) check_pool(to, given.size());
        check(joins || averages || given.size() == operands + 1, "a float operation has too many arguments");
    }

    // Returns an axis of this rank, which may count from the end.
    static int axis_of(Value given, int rank) {
        check(given.is_whole(-rank, rank - 1), "a float operation has a dimension that is out of range");
        return int(given.whole() < 0 ? given.whole() + rank : given.whole());
    }

    template <class Operand>
    static void set_join(Floats& to, Value given, Operand operand) {
        check(given[1].is(Json::LIST) && given[1].size() > 0 && given.size() <= 3,
            "it joins something that is not a list");
        int64_t joined = 0;
        for (Value each : given[1]) to.operands.push_back(operand(each));
        const int rank = to.out.rank;
        check(rank > 0, "it joins values without dimensions");
        to.axis = given.size() > 2 ? axis_of(given[2], rank) : 0;
        for (const View& each : to.operands) {
            check(each.rank == rank, "it joins values of different shapes");
            for (int i = 0; i < rank; i++)
                check(i == to.axis || each.shape[i] == to.out.shape[i], "it joins values of different shapes");
            joined += each.shape[to.axis];
        }
        check(joined == to.out.shape[to.axis], "it joins values to a result of another shape");
    }

    static void set_mean(Floats& to, Value given) {
        const View& x = to.operands[0];
        const bool good = given.size() >= 3 && given.size() <= 4 && given[2].is(Json::LIST) && given[2].size() > 0;
        check(good && (given.size() == 3 || given[3].is(Json::BOOLEAN)), "a mean does not list its dimensions");
        for (Value each : given[2]) {
            const int axis = axis_of(each, x.rank);
            check(!to.reduced[axis], "a mean lists a dimension twice");
            to.reduced[axis] = true;
        }
        const bool keeps = given.size() == 4 && given[3].is_true();
        // The result without the dimensions of size one that a mean may keep.
        View kept = to.out;
        kept.rank = 0;
        int at = 0;
        for (int i = 0; i < x.rank; i++) {
            const int64_t size = to.reduced[i] ? 1 : x.shape[i];
            check(x.shape[i] > 0, "a mean is over no values");
            if (to.reduced[i] && !keeps) continue;
            check(at < to.out.rank && to.out.shape[at] == size, "a mean has a result of another shape");
            if (!to.reduced[i]) kept.shape[kept.rank] = size, kept.strides[kept.rank++] = to.out.strides[at];
            at++;
        }
        check(at == to.out.rank, "a mean has a result of another shape");
        to.out = kept;
    }

    static void check_pool(const Floats& to, size_t arguments) {
        const View& x = to.operands[0];
        bool good = arguments == 3 && x.rank >= 2 && x.rank == to.out.rank;
        for (int i = 0; good && i < x.rank; i++) good = x.shape[i] > 0 && (i >= x.rank - 2 ||
            x.shape[i] == to.out.shape[i]);
        check(good, "a pooling has a result of another shape");
    }

    void read_copies(Value list) {
        check(list.size() == inputs.size(), "it does not copy as many inputs as it has");
        size_t number = 0;
        for (Value each : list) {
            if (!each.is(Json::NOTHING)) {
                const View to = view(each, true);
                check(to.type == TYPES && same_shape(to, inputs[number].view),
                    "it copies an input to a view of another shape or type");
                copies_.emplace_back(number, to);
            }
            number++;
        }
    }

    void read_outputs(Value given, const std::string& path, Wide& total, Budget& budget) {
        check(path.size() <= MAX_NAME, "the name of an output has more than %d bytes", int(MAX_NAME));
        if (given.is(Json::OBJECT) && given.size() == 1) {
            const Value items = *given.begin();
            const std::string_view kind = items.key();
            check((kind == "tuple" || kind == "list" || kind == "dict") && items.is(Json::LIST),
                "its outputs have an unknown structure");
            size_t number = 0;
            for (Value item : items) {
                std::string name = std::to_string(number++);
                if (kind == "dict") {
                    check(item.is(Json::LIST) && item.size() == 2 && item[0].is(Json::TEXT),
                        "an output is not [key, value]");
                    name = std::string(item[0].text());
                }
                read_outputs(kind == "dict" ? item[1] : item, path.empty() ? name : path + "." + name, total, budget);
            }
            return;
        }
        budget.take(Wide(sizeof(Named) + path.size()));
        Named output{path.empty() ? "output" : path, view(given, false)};
        check(output.view.rank > 0 && output.view.shape[0] == batch, "an output does not have %d images", int(batch));
        total += output.view.count() * Wide(output.view.type->size);
        outputs.push_back(output);
    }
};

struct CloseContext {
    void operator()(void* context) const { adalog_close(context); }
};

}  // namespace

// --- the model -----------------------------------------------------------------------------------------------------------

struct adalog_model {
    adalog_model(const uint8_t* bytes, size_t count, const adalog_options& options)
        : budget_(options.memory ? options.memory : MEMORY) {
        open_context(options);
        const Tensors file(bytes, count, KEY);
        check(file.metadata().size() <= adalog::MAX_JSON, "its JSON takes more than %zu bytes", adalog::MAX_JSON);
        const Document document(file.metadata());
        document.check_text();
        const Value pack(document, document.root());
        check(pack.is(Json::OBJECT), "its JSON is not an object");
        check(pack.at("format").is_whole(PACK_FORMAT, PACK_FORMAT),
            "it has another format than %d, which this library reads", int(PACK_FORMAT));
        pack.check_fields({"format", "version", "digest", "bits", "inputs", "outputs", "preprocessing", "classes",
                           "artifact", "tapes"},
                          "the pack");
        for (const char* name : {"version", "digest", "bits"})
            check(pack.at(name).is(Json::TEXT), "its field %s is not text", name);
        check(pack.at("artifact").is(Json::OBJECT), "its field artifact is not a JSON object");
        const Value tapes = pack.at("tapes");
        check(tapes.is(Json::LIST) && tapes.size() >= 1 && tapes.size() <= MAX_TAPES,
            "it does not have 1 to %d tapes", int(MAX_TAPES));
        WeightStore weights(file, budget_);
        for (Value each : tapes) {
            tapes_.push_back(std::make_unique<Tape>(each, file, pack.at("digest").text(), weights, budget_));
            batches_.push_back(tapes_.back()->batch);
        }
        check(std::adjacent_find(batches_.begin(), batches_.end(), std::greater_equal<>()) == batches_.end(),
            "the batches of its tapes do not increase");
        weights_ = weights.take();
        bits_ = std::string(pack.at("bits").text());
        for (const auto& tape : tapes_) {
            check_description(pack.at("inputs"), tape->inputs);
            check_description(pack.at("outputs"), tape->outputs);
        }
        read_preprocessing(pack.at("preprocessing"));
        describe();
        read_classes(pack.at("classes"));
        if (batches_[0] > 1)
            for (const Named& input : tapes_[0]->inputs) padded_.emplace_back(size_t(input.view.count()) * 4, budget_);
        description_.memory = budget_.used();
    }
    adalog_model(const adalog_model&) = delete;

    const adalog_description& description() const { return description_; }

    void run(int64_t images, const adalog_buffer* inputs, size_t input_count, const adalog_buffer* outputs,
        size_t output_count) {
        demand(images >= 0 && images <= INT32_MAX, ADALOG_BAD_ARGUMENT, "images = %lld is not a number from 0 to %d",
            static_cast<long long>(images), INT32_MAX);
        demand(input_count == description_.input_count && output_count == description_.output_count, ADALOG_BAD_ARGUMENT,
               "the model has %zu inputs and %zu outputs, not %zu and %zu", description_.input_count,
               description_.output_count, input_count, output_count);
        demand(inputs && (outputs || !output_count), ADALOG_BAD_ARGUMENT, "the inputs or the outputs are NULL");
        for (size_t i = 0; i < input_count; i++) {
            check_buffer(inputs, i, description_.inputs[i], images, 4);
            const float* values = static_cast<const float*>(inputs[i].data);
            const bool numbers = std::none_of(values, values + inputs[i].bytes / 4,
                [](float value) { return value != value; });
            demand(numbers, ADALOG_BAD_ARGUMENT, "the inputs contain NaN, which cannot be quantized");
        }
        for (size_t i = 0; i < output_count; i++) check_buffer(outputs, i, description_.outputs[i], images, 1);
        std::lock_guard<std::mutex> one_at_a_time(lock_);
        std::vector<const uint8_t*> pieces(input_count);
        for (int64_t start = 0; start < images;) {
            // The largest batch that the rest fills, or else the smallest, with zeros for the images that are missing.
            const Tape* tape = tapes_[0].get();
            for (const auto& each : tapes_)
                if (each->batch <= images - start) tape = each.get();
            const int64_t count = std::min(tape->batch, images - start);
            for (size_t i = 0; i < input_count; i++) {
                const size_t each = description_.inputs[i].bytes;
                pieces[i] = static_cast<const uint8_t*>(inputs[i].data) + size_t(start) * each;
                if (count < tape->batch && each) {
                    std::memcpy(padded_[i].data(), pieces[i], size_t(count) * each);
                    std::memset(padded_[i].data() + size_t(count) * each, 0, padded_[i].size() - size_t(count) * each);
                    pieces[i] = padded_[i].data();
                }
            }
            tape->run(context_.get(), pieces.data());
            for (size_t i = 0; i < output_count; i++) {
                View from = tape->outputs[i].view;
                from.shape[0] = count;
                uint8_t* to = static_cast<uint8_t*>(outputs[i].data) + size_t(start) * description_.outputs[i].bytes;
                copy(dense(to, from.type, from.rank, from.shape), from);
            }
            start += count;
        }
    }

private:
    Budget budget_;
    std::unique_ptr<void, CloseContext> context_;
    WeightStore::Made weights_;
    std::vector<std::unique_ptr<Tape>> tapes_;
    std::vector<int64_t> batches_;
    std::vector<Region> padded_;
    std::vector<adalog_value> inputs_, outputs_;
    std::string bits_;
    std::vector<std::string> classes_;
    std::vector<const char*> class_names_;
    adalog_preprocessing preprocessing_{};
    adalog_description description_{};
    std::mutex lock_;

    void open_context(const adalog_options& options) {
        const int threads = options.threads ? options.threads : 1;
        demand(threads >= 1 && threads <= 1024, ADALOG_BAD_ARGUMENT, "threads = %d is not a number from 1 to 1024",
            threads);
        const unsigned features = adalog_features();
        int level = -1;
        std::string names;
        for (int i = 0; i < int(std::size(LEVELS)); i++) {
            if (!(features >> i & 1)) continue;
            names += (names.empty() ? "" : ", ") + std::string(LEVELS[i]);
            if (!options.level || !std::strcmp(options.level, LEVELS[i])) level = i;
        }
        demand(level >= 0, ADALOG_BAD_ARGUMENT, "the level %s does not run on this machine: choose one of %s",
            options.level ? EXCERPT(options.level) : "", names.c_str());
        context_.reset(adalog_open(threads, level));
        if (!context_ && threads == 1) throw std::bad_alloc();
        demand(bool(context_), ADALOG_NO_MEMORY, "threads = %d is more than this machine can start", threads);
        description_.level = LEVELS[level], description_.threads = threads;
    }

    // Refuses a description of inputs or outputs that is not that of a tape.
    static void check_description(Value list, const std::vector<Named>& values) {
        bool same = list.is(Json::LIST) && list.size() == values.size();
        size_t number = 0;
        for (Value each : list) {
            if (!same) break;
            const Named& value = values[number++];
            each.check_fields({"name", "type", "shape"}, "a description");
            int64_t shape[8];
            const int rank = each.at("shape").shape(shape);
            same = each.at("name").is(Json::TEXT) && each.at("name").text() == value.name &&
                each.at("type").is(Json::TEXT) &&
                   each.at("type").text() == value.view.type->name && rank == value.view.rank - 1 &&
                   std::equal(shape, shape + std::max(rank, 0), value.view.shape + 1);
        }
        check(same, "its description of inputs and outputs is not that of its tapes");
    }

    void describe() {
        auto add = [](std::vector<adalog_value>& to, const Named& value) {
            View one = value.view;
            one.shape[0] = 1;
            const size_t bytes = size_t(one.count()) * value.view.type->size;
            to.push_back({value.name.c_str(), value.view.type->type, value.view.rank - 1, value.view.shape + 1, bytes});
        };
        for (const Named& value : tapes_[0]->inputs) add(inputs_, value);
        for (const Named& value : tapes_[0]->outputs) add(outputs_, value);
        description_.inputs = inputs_.data(), description_.input_count = inputs_.size();
        description_.outputs = outputs_.data(), description_.output_count = outputs_.size();
        description_.batches = batches_.data(), description_.batch_count = batches_.size();
        description_.bits = bits_.c_str();
    }

    void read_preprocessing(Value given) {
        if (given.is(Json::NOTHING)) return;
        given.check_fields({"size", "resize", "mean", "std", "interpolation", "rescale", "fit", "position", "fill", "channels"},
            "the preprocessing");
        bool good = true;
        auto side = [&](Value value) {
            good = good && value.is_whole(1, INT32_MAX);
            return int(good ? value.whole() : 0);
        };
        auto sides = [&](Value value, int& height, int& width) {
            good = good && value.is(Json::LIST) && value.size() == 2;
            if (good) height = side(value[0]), width = side(value[1]);
        };
        auto colours = [&](Value value, double (&numbers)[3]) {
            good = good && value.is(Json::LIST) && value.size() == 3;
            for (size_t i = 0; good && i < 3; i++) {
                good = value[i].is_number();
                numbers[i] = good ? value[i].number() : 0;
            }
        };
        adalog_preprocessing& to = preprocessing_;
        sides(given.at("size"), to.height, to.width);
        const Value resize = given.at("resize");
        if (resize.is(Json::WHOLE)) to.resize_height = to.resize_width = to.resize_shorter = side(resize);
        else sides(resize, to.resize_height, to.resize_width);
        colours(given.at("mean"), to.mean);
        colours(given.at("std"), to.std);
        good = good && *std::min_element(to.std, to.std + 3) > 0 && given.at("rescale").is_number();
        to.rescale = good ? given.at("rescale").number() : 0;
        to.pads = !given.at("fill").is(Json::NOTHING);
        if (to.pads) colours(given.at("fill"), to.fill);
        auto word = [&](const char* field, std::initializer_list<const char*> words) -> const char* {
            const Value value = given.at(field);
            for (const char* name : words)
                if (value.is(Json::TEXT) && value.text() == name) return name;
            good = false;
            return "";
        };
        to.interpolation = word("interpolation", {"bilinear", "bicubic", "lanczos", "nearest"});
        to.fit = word("fit", {"stretch", "cover", "contain"});
        to.position = word("position", {"center", "center-floor", "top-left"});
        to.channels = word("channels", {"rgb", "bgr"});
        check(good, "its preprocessing is not valid");
        description_.preprocessing = &preprocessing_;
    }

    void read_classes(Value given) {
        if (given.is(Json::NOTHING)) return;
        const bool one = outputs_.size() == 1 && outputs_[0].rank == 1;
        const bool fits = one && given.is(Json::LIST) && int64_t(given.size()) == outputs_[0].shape[0];
        check(fits, "it does not name as many classes as it outputs");
        for (Value name : given) {
            check(name.is(Json::TEXT) && !name.text().empty(), "a name of a class is not text");
            check(name.text().find('\0') == std::string_view::npos, "a name of a class is not text");
            classes_.emplace_back(name.text());
        }
        for (const std::string& name : classes_) class_names_.push_back(name.c_str());
        description_.classes = class_names_.data(), description_.class_count = class_names_.size();
    }

    static void check_buffer(const adalog_buffer* buffers, size_t number, const adalog_value& value, int64_t images,
        size_t alignment) {
        const Wide bytes = Wide(value.bytes) * images;
        const adalog_buffer buffer = buffers[number];
        demand(bytes == Wide(buffer.bytes), ADALOG_BAD_ARGUMENT,
            "the buffer of %s has %zu bytes, not %lld images of %zu",
               EXCERPT(value.name), buffer.bytes, static_cast<long long>(images), value.bytes);
        demand(buffer.data || !bytes, ADALOG_BAD_ARGUMENT, "the buffer of %s is NULL", EXCERPT(value.name));
        demand(reinterpret_cast<uintptr_t>(buffer.data) % alignment == 0, ADALOG_BAD_ARGUMENT,
            "the buffer of %s is not aligned to %zu bytes", EXCERPT(value.name), alignment);
    }
};

namespace {

// Runs a function, and returns what became of it: nothing leaves the library as an exception.
template <class Function>
adalog_status guarded(adalog_error* error, Function function) noexcept {
    adalog_error result{ADALOG_OK, {}};
    try {
        function();
    } catch (const Refusal& refusal) {
        result.status = refusal.status;
        std::memcpy(result.message, refusal.message, sizeof result.message);
    } catch (const std::bad_alloc&) {
        result.status = ADALOG_NO_MEMORY;
        std::snprintf(result.message, sizeof result.message, "there is not enough memory");
    } catch (...) {  // such as a mutex that the machine cannot lock
        result.status = ADALOG_FAILED;
        std::snprintf(result.message, sizeof result.message, "the machine refuses an operation");
    }
    if (error) *error = result;
    return result.status;
}

void open_bytes(const uint8_t* bytes, size_t count, const adalog_options* options, adalog_model** model) {
    *model = new adalog_model(bytes, count, options ? *options : adalog_options{});
}

}  // namespace

adalog_status adalog_model_open_memory(const void* bytes, size_t count, const adalog_options* options,
    adalog_model** model,
                                       adalog_error* error) {
    if (model) *model = nullptr;
    return guarded(error, [&] {
        demand(bytes && model, ADALOG_BAD_ARGUMENT, "the bytes or the model are NULL");
        open_bytes(static_cast<const uint8_t*>(bytes), count, options, model);
    });
}

adalog_status adalog_model_open(const char* path, const adalog_options* options, adalog_model** model,
    adalog_error* error) {
    if (model) *model = nullptr;
    return guarded(error, [&] {
        demand(path && model, ADALOG_BAD_ARGUMENT, "the path or the model are NULL");
        struct stat about {};
        const bool there = !stat(path, &about);
        check(there, "it cannot be read: %s", std::strerror(errno));
        check(S_ISREG(about.st_mode), "it cannot be read: it is not a regular file");
        const size_t limit = options && options->memory ? options->memory : MEMORY, size = size_t(about.st_size);
        demand(size <= limit, ADALOG_NO_MEMORY, "the file takes more than the limit of %zu bytes", limit);
        const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"), std::fclose);
        check(bool(file), "it cannot be read: %s", std::strerror(errno));
        const std::unique_ptr<uint8_t[]> bytes(new uint8_t[size + 1]);
        check(std::fread(bytes.get(), 1, size, file.get()) == size, "it cannot be read to its end");
        open_bytes(bytes.get(), size, options, model);
    });
}

const adalog_description* adalog_model_describe(const adalog_model* model) { return model ? &model->description() : nullptr; }

adalog_status adalog_model_run(adalog_model* model, int64_t images, const adalog_buffer* inputs, size_t input_count,
                               const adalog_buffer* outputs, size_t output_count, adalog_error* error) {
    return guarded(error, [&] {
        demand(model, ADALOG_BAD_ARGUMENT, "the model is NULL");
        model->run(images, inputs, input_count, outputs, output_count);
    });
}

void adalog_model_close(adalog_model* model) { delete model; }
