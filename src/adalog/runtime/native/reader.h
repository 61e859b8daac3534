// Reads safetensors files and their JSON for model.cpp, with strict limits: every byte may be hostile.
#ifndef ADALOG_READER_H
#define ADALOG_READER_H

#include <algorithm>
#include <charconv>
#include <clocale>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "adalog.h"

namespace adalog {

constexpr size_t MAX_JSON = size_t(1) << 23;    // bytes of the JSON of a pack, as in stored.py
constexpr size_t MAX_TABLE = size_t(1) << 24;   // bytes of the table of a safetensors file, which quotes that JSON
constexpr uint32_t MAX_VALUES = 1 << 20;        // values in one JSON text; a model of 40 blocks has far fewer
constexpr int MAX_DEPTH = 64;

// Ends an operation. It never leaves the library: the functions of adalog.h catch it.
struct Refusal {
    adalog_status status;
    char message[sizeof(adalog_error::message)];
};

__attribute__((format(printf, 2, 0))) inline void refuse(adalog_status status, const char* format, va_list arguments) {
    Refusal refusal{status, {}};
    std::vsnprintf(refusal.message, sizeof refusal.message, format, arguments);
    throw refusal;
}
// Refuses the file unless the condition holds.
__attribute__((format(printf, 2, 3))) inline void check(bool holds, const char* format, ...) {
    if (holds) return;
    va_list arguments;
    va_start(arguments, format);
    refuse(ADALOG_BAD_FILE, format, arguments);
}
// Refuses the call with this status unless the condition holds.
__attribute__((format(printf, 3, 4))) inline void demand(bool holds, adalog_status status, const char* format, ...) {
    if (holds) return;
    va_list arguments;
    va_start(arguments, format);
    refuse(status, format, arguments);
}

// A text for an error message: at most 60 bytes of it.
struct Excerpt {
    char text[64];
    explicit Excerpt(std::string_view from) {
        size_t length = std::min<size_t>(from.size(), 60);
        while (length && length < from.size() && (uint8_t(from[length]) & 0xC0) == 0x80) length--;  // whole characters
        std::memcpy(text, from.data(), length);
        text[length] = 0;
        // A table is not checked for characters that do not print.
        for (size_t i = 0; i < length; i++)
            if (uint8_t(text[i]) < 32 || text[i] == 127) text[i] = '?';
    }
};
#define EXCERPT(from) (::adalog::Excerpt(from).text)

// --- JSON ----------------------------------------------------------------------------------------------------------------

enum class Json : uint8_t { NOTHING, BOOLEAN, WHOLE, REAL, TEXT, LIST, OBJECT };

struct Node {
    Json kind = Json::NOTHING;
    uint32_t next = 0;   // the next item of the same list or object; 0 after the last
    uint32_t first = 0;  // the first item of a list or object
    uint32_t count = 0;  // items
    union {
        int64_t whole = 0;  // a whole number; 0 or 1 for a boolean
        double real;
    };
    std::string_view key, text;
};

// Parses a whole text. Refuses what is not JSON, a key that an object has twice, and numbers that are not finite or whole
// numbers beyond 64 bits. Texts are in UTF-8.
class Document {
public:
    explicit Document(std::string_view from) : at_(from.data()), end_(from.data() + from.size()) {
        texts_.resize(from.size());  // decoded texts are never longer than their JSON
        nodes_.reserve(std::min<size_t>(MAX_VALUES, from.size() / 4 + 1));
        skip();
        parse(add(), 0);
        skip();
        check(at_ == end_, "its JSON goes on after its end");
    }
    Document(const Document&) = delete;
    const Node& root() const { return nodes_[0]; }
    const Node& operator[](uint32_t index) const { return nodes_[index]; }

    // Refuses texts with characters that a terminal would obey, or that do not print.
    void check_text() const {
        for (const Node& node : nodes_)
            for (std::string_view text : {node.key, node.text}) check(prints(text),
                "a text has characters that do not print");
    }

private:
    const char *at_, *end_;
    std::vector<char> texts_;
    size_t used_ = 0;
    std::vector<Node> nodes_;

    uint32_t add() {
        check(nodes_.size() < MAX_VALUES, "its JSON has more than %u values", MAX_VALUES);
        nodes_.emplace_back();
        return uint32_t(nodes_.size() - 1);
    }
    void skip() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) at_++;
    }
    bool take(char expected) {
        if (at_ == end_ || *at_ != expected) return false;
        at_++;
        return true;
    }
    bool take(std::string_view word) {
        if (size_t(end_ - at_) < word.size() || std::string_view(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }

    void parse(uint32_t index, int depth) {
        check(depth <= MAX_DEPTH, "its JSON is nested more than %d deep", MAX_DEPTH);
        Node node;
        if (take('"')) {
            node.kind = Json::TEXT, node.text = text();
        } else if (take('[')) {
            node.kind = Json::LIST;
            items(node, ']', depth);
        } else if (take('{')) {
            node.kind = Json::OBJECT;
            items(node, '}', depth);
        } else if (take("true")) {
            node.kind = Json::BOOLEAN, node.whole = 1;
        } else if (take("false")) {
            node.kind = Json::BOOLEAN;
        } else if (!take("null")) {
            number(node);
        }
        node.key = nodes_[index].key, node.next = nodes_[index].next;
        nodes_[index] = node;
    }

    void items(Node& node, char close, int depth) {
        std::vector<std::string_view> keys;
        uint32_t last = 0;
        for (skip(); !take(close); skip()) {
            if (node.count) {
                check(take(','), "its JSON lacks a comma");
                skip();
            }
            const uint32_t index = add();
            if (close == '}') {
                check(take('"'), "its JSON lacks a key");
                nodes_[index].key = text();
                keys.push_back(nodes_[index].key);
                skip();
                check(take(':'), "its JSON lacks a colon");
                skip();
            }
            (last ? nodes_[last].next : node.first) = index;
            last = index, node.count++;
            parse(index, depth + 1);
        }
        std::sort(keys.begin(), keys.end());
        const bool twice = std::adjacent_find(keys.begin(), keys.end()) != keys.end();
        check(!twice, "a JSON object has a key twice");
    }

    void number(Node& node) {
        const char* start = at_;
        bool whole = true;
        auto digits = [&] {
            const char* first = at_;
            while (at_ < end_ && *at_ >= '0' && *at_ <= '9') at_++;
            check(at_ > first, "its JSON has a value that is not valid");
        };
        take('-');
        if (!take('0')) digits();
        if (take('.')) whole = false, digits();
        if (take('e') || take('E')) {
            whole = false;
            if (!take('+')) take('-');
            digits();
        }
        if (whole) {
            node.kind = Json::WHOLE;
            const auto done = std::from_chars(start, at_, node.whole);
            check(done.ec == std::errc(), "its JSON has a whole number that does not fit in 64 bits");
            return;
        }
        node.kind = Json::REAL;
        // std::from_chars of reals would make programs larger. strtod needs an end, and the decimal point of the locale.
        std::string copy(start, at_);
        const size_t point = copy.find('.');
        if (point != std::string::npos) copy.replace(point, 1, std::localeconv()->decimal_point);
        char* end = nullptr;
        node.real = std::strtod(copy.c_str(), &end);
        const bool good = end == copy.c_str() + copy.size();
        check(good && std::isfinite(node.real), "its JSON has a number that is out of range");
    }

    unsigned hex() {
        unsigned value = 0;
        for (int i = 0; i < 4; i++) {
            check(at_ < end_, "its JSON ends within a text");
            const char c = *at_++;
            const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' &&
                c <= 'F' ? c - 'A' + 10 : -1;
            check(digit >= 0, "its JSON has an escape that is not valid");
            value = value * 16 + unsigned(digit);
        }
        return value;
    }
    void put(unsigned point) {
        auto byte = [&](unsigned value) { texts_[used_++] = char(value); };
        if (point < 0x80) return byte(point);
        if (point < 0x800) return byte(0xC0 | point >> 6), byte(0x80 | (point & 63));
        if (point < 0x10000) byte(0xE0 | point >> 12);
        else byte(0xF0 | point >> 18), byte(0x80 | (point >> 12 & 63));
        byte(0x80 | (point >> 6 & 63)), byte(0x80 | (point & 63));
    }
    // Decodes a text after its opening quote.
    std::string_view text() {
        const size_t start = used_;
        while (true) {
            check(at_ < end_, "its JSON ends within a text");
            const uint8_t c = uint8_t(*at_++);
            if (c == '"') break;
            check(c >= 32, "its JSON has a control character within a text");
            if (c != '\\') {
                texts_[used_++] = char(c);
                continue;
            }
            check(at_ < end_, "its JSON ends within a text");
            const char escape = *at_++;
            static constexpr char FROM[] = "\"\\/bfnrt", TO[] = "\"\\/\b\f\n\r\t";
            const char* known = std::strchr(FROM, escape);
            if (escape && known) {
                texts_[used_++] = TO[known - FROM];
                continue;
            }
            check(escape == 'u', "its JSON has an escape that is not valid");
            unsigned point = hex();
            if (point >= 0xD800 && point < 0xDC00) {
                check(take("\\u"), "its JSON has half of a character");
                const unsigned low = hex();
                check(low >= 0xDC00 && low < 0xE000, "its JSON has half of a character");
                point = 0x10000 + (point - 0xD800) * 0x400 + (low - 0xDC00);
            }
            check(point < 0xDC00 || point >= 0xE000, "its JSON has half of a character");
            put(point);
        }
        const std::string_view decoded(texts_.data() + start, used_ - start);
        check(is_utf8(decoded), "its JSON has a text that is not UTF-8");
        return decoded;
    }

    // Returns the next character of a text and moves on, or -1 if the bytes are not UTF-8.
    static int next(std::string_view text, size_t& at) {
        const uint8_t lead = uint8_t(text[at++]);
        if (lead < 0x80) return lead;
        const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
        if (lead < 0xC2 || lead > 0xF4 || text.size() - at < size_t(more)) return -1;
        int point = lead & (0x3F >> more);
        for (int i = 0; i < more; i++) {
            const uint8_t byte = uint8_t(text[at++]);
            if ((byte & 0xC0) != 0x80) return -1;
            point = point << 6 | (byte & 63);
        }
        const bool short_enough = point >= (more == 1 ? 0x80 : more == 2 ? 0x800 : 0x10000);
        return short_enough && point <= 0x10FFFF && !(point >= 0xD800 && point < 0xE000) ? point : -1;
    }
    static bool is_utf8(std::string_view text) {
        for (size_t at = 0; at < text.size();)
            if (next(text, at) < 0) return false;
        return true;
    }
    static bool prints(std::string_view text) {
        for (size_t at = 0; at < text.size();) {
            const int point = next(text, at);
            if (point < 32 || (point >= 127 && point < 0xA0) || point == 0xAD || point == 0xFEFF) return false;
            // Marks without width, marks that change the direction of a text, and ends of lines and paragraphs.
            if ((point >= 0x200B && point <= 0x200F) || (point >= 0x2028 && point <= 0x202E)) return false;
            if ((point >= 0x2060 && point <= 0x206F) || (point >= 0xFFF0 && point <= 0xFFFB)) return false;
            if (point == 0x61C || point == 0x180E || (point >= 0xE0000 && point <= 0xE0FFF)) return false;
        }
        return true;
    }
};

// A value in a document, for loops and look-ups.
class Value {
public:
    Value(const Document& document, const Node& node) : document_(&document), node_(&node) {}

    bool is(Json kind) const { return node_->kind == kind; }
    bool is_number() const { return is(Json::WHOLE) || is(Json::REAL); }
    bool is_whole(int64_t low, int64_t high) const { return is(Json::WHOLE) && node_->whole >= low &&
        node_->whole <= high; }
    bool is_true() const { return is(Json::BOOLEAN) && node_->whole; }
    int64_t whole() const { return node_->whole; }
    double number() const { return is(Json::WHOLE) ? double(node_->whole) : node_->real; }
    std::string_view text() const { return node_->text; }
    std::string_view key() const { return node_->key; }
    size_t size() const { return node_->count; }

    struct Iterator {
        const Document* document;
        uint32_t index;
        Value operator*() const { return {*document, (*document)[index]}; }
        Iterator& operator++() { return index = (*document)[index].next, *this; }
        bool operator!=(const Iterator& other) const { return index != other.index; }
    };
    Iterator begin() const { return {document_, node_->first}; }
    Iterator end() const { return {document_, 0}; }

    // Returns an item of a list. Refuses a list that has fewer.
    Value operator[](size_t number) const {
        uint32_t index = is(Json::LIST) ? node_->first : 0;
        for (; index && number; number--) index = (*document_)[index].next;
        check(index, "a list is too short");
        return {*document_, (*document_)[index]};
    }
    Value at(const char* name) const {
        check(is(Json::OBJECT), "there is no object with the field %s", name);
        for (Value each : *this)
            if (each.key() == name) return each;
        check(false, "the field %s is missing", name);
        return *this;
    }
    // Refuses another value than an object with exactly these fields.
    void check_fields(std::initializer_list<const char*> names, const char* what) const {
        check(is(Json::OBJECT), "%s is not a JSON object", what);
        for (const char* name : names) {
            bool there = false;
            for (Value each : *this) there = there || each.key() == name;
            check(there, "the field %s of %s is missing", name, what);
        }
        for (Value each : *this) {
            const bool known = std::any_of(names.begin(), names.end(),
                [&](const char* name) { return each.key() == name; });
            check(known, "the field %s of %s is unknown", EXCERPT(each.key()), what);
        }
    }
    // Writes whole numbers in [0, 2^31] to `sizes`, and returns how many, or -1 if this is not a list of at most eight.
    int shape(int64_t sizes[8]) const {
        if (!is(Json::LIST) || size() > 8) return -1;
        int rank = 0;
        for (Value each : *this) {
            if (!each.is_whole(0, int64_t(1) << 31)) return -1;
            sizes[rank++] = each.whole();
        }
        return rank;
    }

private:
    const Document* document_;
    const Node* node_;
};

// --- safetensors ---------------------------------------------------------------------------------------------------------

// The bytes of a tensor in the file.
struct Stored {
    bool bytes = false;  // its type is uint8
    int rank = 0;
    int64_t shape[8] = {};
    const uint8_t* data = nullptr;
    size_t size = 0;
};

// The tensors of a safetensors file by name, and its metadata. The file must outlive this.
class Tensors {
public:
    Tensors(const uint8_t* file, size_t count, std::string_view key) {
        check(count >= 8, "it is too short");
        uint64_t length = 0;
        for (int i = 7; i >= 0; i--) length = length << 8 | file[i];
        check(length <= count - 8, "it claims to start with more bytes of JSON than it has");
        check(length <= MAX_TABLE, "its table takes more than %zu bytes", MAX_TABLE);
        const Document table({reinterpret_cast<const char*>(file) + 8, size_t(length)});
        check(table.root().kind == Json::OBJECT, "its table is not a JSON object");
        const uint8_t* data = file + 8 + length;
        const uint64_t size = count - 8 - length;
        std::vector<std::pair<uint64_t, uint64_t>> places;
        for (Value each : Value(table, table.root())) {
            if (each.key() == "__metadata__") {
                check(each.is(Json::OBJECT) && each.size() == 1, "it is not a pack");
                const Value only = *each.begin();
                check(only.key() == key && only.is(Json::TEXT), "it is not a pack");
                metadata_ = only.text();
                continue;
            }
            const std::string name(each.key());
            each.check_fields({"dtype", "shape", "data_offsets"}, "a tensor");
            Stored tensor;
            const int width = bytes_of(each.at("dtype").text());
            tensor.rank = each.at("shape").shape(tensor.shape);
            check(width && tensor.rank >= 0, "tensor %s has an invalid type or shape", EXCERPT(name));
            tensor.bytes = each.at("dtype").text() == "U8";
            const Value offsets = each.at("data_offsets");
            const bool two = offsets.is(Json::LIST) && offsets.size() == 2;
            check(two && offsets[0].is_whole(0, INT64_MAX) && offsets[1].is_whole(0, INT64_MAX),
                  "tensor %s has invalid offsets", EXCERPT(name));
            const uint64_t begin = uint64_t(offsets[0].whole()), end = uint64_t(offsets[1].whole());
            unsigned __int128 bytes = unsigned(width);
            for (int i = 0; i < tensor.rank; i++) bytes = std::min<unsigned __int128>(bytes * uint64_t(tensor.shape[i]), UINT64_MAX);
            check(begin <= end && end <= size && bytes == end - begin, "tensor %s does not fit in its offsets",
                EXCERPT(name));
            places.emplace_back(begin, end);
            tensor.data = data + begin, tensor.size = size_t(end - begin);
            tensors_.emplace(name, tensor);
        }
        check(!metadata_.empty(), "it is not a pack");
        std::sort(places.begin(), places.end());
        uint64_t end = 0;
        for (const auto& place : places) {
            check(place.first == end, "its tensors overlap or leave gaps");
            end = place.second;
        }
        check(end == size, "it has bytes after its tensors");
    }
    const std::string& metadata() const { return metadata_; }
    const Stored& at(const std::string& name) const {
        const auto found = tensors_.find(name);
        check(found != tensors_.end(), "there is no tensor %s", EXCERPT(name));
        return found->second;
    }

private:
    std::string metadata_;
    std::map<std::string, Stored> tensors_;

    static int bytes_of(std::string_view type) {
        for (const char* each : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"})
            if (type == each) return 1;
        for (const char* each : {"U16", "I16", "F16", "BF16"})
            if (type == each) return 2;
        for (const char* each : {"U32", "I32", "F32"})
            if (type == each) return 4;
        for (const char* each : {"U64", "I64", "F64"})
            if (type == each) return 8;
        return 0;
    }
};

}  // namespace adalog

#endif
