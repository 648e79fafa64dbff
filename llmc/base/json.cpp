#include "base/json.h"

#include <nlohmann/json.hpp>

#include <utility>
#include <vector>

#include "base/common.h"
#include "base/files.h"

using nlohmann::json;

// Builds the value and makes the checks that json::parse lacks. json::parse with a callback could make these checks
// too. But at the end of each object in a list it searches the whole list, so a long list would take quadratic time.
struct CheckedValue : nlohmann::json_sax<json> {
    static constexpr size_t MAX_DEPTH = 32;
    static constexpr int OUT_OF_RANGE = 406;  // the id of json::out_of_range for a number
    const std::string& where;
    json root;
    // Lists and objects that are not closed yet, outermost first. A list or object does not move in memory while
    // another one inside it is open.
    std::vector<json*> open;
    json* member = nullptr;  // the value, not read yet, of the last key of the innermost object
    size_t too_deep = 0;     // lists and objects that are not closed yet, beyond MAX_DEPTH
    size_t error_byte = 0;
    int error_id = 0;

    explicit CheckedValue(const std::string& where) : where(where) {}

    json* place(json value) {
        if (open.empty()) return &(root = std::move(value));
        if (open.back()->is_array()) return &open.back()->emplace_back(std::move(value));
        return &(*member = std::move(value));
    }
    bool add(json value) {
        if (too_deep == 0) place(std::move(value));
        return true;
    }
    bool begin(json empty) {
        if (open.size() < MAX_DEPTH) {
            open.push_back(place(std::move(empty)));
        } else {
            add(nullptr);
            too_deep++;
        }
        return true;
    }
    bool end() {
        if (too_deep > 0) {
            too_deep--;
        } else {
            open.pop_back();
        }
        return true;
    }
    bool key(std::string& name) override {
        if (too_deep > 0) return true;
        const auto [found, is_new] = open.back()->emplace(name, nullptr);
        if (!is_new) fail(EXIT_BAD_DATA, "%s: the key \"%s\" occurs twice", where.c_str(), printable(name).c_str());
        member = &*found;
        return true;
    }
    bool start_object(size_t) override { return begin(json::object()); }
    bool end_object() override { return end(); }
    bool start_array(size_t) override { return begin(json::array()); }
    bool end_array() override { return end(); }
    bool null() override { return add(nullptr); }
    bool boolean(bool value) override { return add(value); }
    bool number_integer(int64_t value) override { return add(value); }
    bool number_unsigned(uint64_t value) override { return add(value); }
    bool number_float(double value, const std::string&) override { return add(value); }
    bool string(std::string& value) override { return add(std::move(value)); }
    bool binary(json::binary_t&) override { return false; }  // text cannot contain binary values
    bool parse_error(size_t byte, const std::string&, const json::exception& error) override {
        error_byte = byte;
        error_id = error.id;
        return false;
    }
};

json parse_json(const std::string& text, const std::string& where, const char* if_cut_short) {
    CheckedValue value(where);
    if (json::sax_parse(text, &value)) return std::move(value.root);
    if (value.error_id == CheckedValue::OUT_OF_RANGE)
        fail(EXIT_BAD_DATA, "%s: is not valid JSON: a number is out of range", where.c_str());
    if (text.empty()) fail(EXIT_BAD_DATA, "%s: is not valid JSON: it is empty", where.c_str());
    if (value.error_byte > text.size())
        fail(EXIT_BAD_DATA, "%s: is not valid JSON: it ends in the middle of a value, after %zu bytes%s", where.c_str(),
             text.size(), if_cut_short);
    fail(EXIT_BAD_DATA, "%s: is not valid JSON at byte %zu of %zu", where.c_str(), value.error_byte, text.size());
}

json parse_json_object(const std::string& text, const std::string& where) {
    json value = parse_json(text, where);
    if (!value.is_object()) fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}", where.c_str());
    return value;
}

json read_json_object(const std::string& path, int64_t max_bytes) {
    return parse_json_object(read_file(path, max_bytes), path);
}
