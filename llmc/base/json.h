// json.h: values of JSON: parsed from untrusted files, and written. The library that parses is slow to compile: only
// json.cpp includes it.
#pragma once
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct JsonError : std::out_of_range {  // a value is missing, or of another type
    using std::out_of_range::out_of_range;
};

struct Json {
    enum Type { null, boolean, number, string, array, object };

    Type type = null;
    std::string text;         // bytes of a string; a number as it is written; "true" or "false"
    std::vector<Json> items;  // items of an array
    std::vector<std::pair<std::string, Json>> members;  // members of an object, in the order of the text

    Json(std::nullptr_t = nullptr) {}
    Json(std::string value) : type(string), text(std::move(value)) {}
    Json(const char* value) : Json(std::string(value)) {}
    Json(double value);  // null if it is not finite
    template <std::integral T>
    Json(T value) : type(number), text(std::to_string(value)) {}
    Json(bool value) : type(boolean), text(value ? "true" : "false") {}
    template <class T>
    Json(const std::vector<T>& list) : type(array), items(list.begin(), list.end()) {}
    Json(std::initializer_list<std::pair<std::string, Json>> list);

    const Json* find(std::string_view key) const;  // value of the last equal key; null: there is none
    bool contains(std::string_view key) const { return find(key); }
    const Json& operator[](std::string_view key) const;  // null if there is none
    const Json& at(std::string_view key) const;          // throws JsonError if there is none
    Json& operator[](std::string_view key);              // adds the member, if there is none; null becomes an object
    void erase(std::string_view key);

    template <class T>
    T get() const;  // std::string, bool, an integer, float or double; throws JsonError if the value is none
    std::optional<int64_t> integer() const;
    bool is_index(int64_t size) const;  // an integer from 0 to size - 1
    template <class T>
    T value(std::string_view key, const T& otherwise) const {
        const Json* found = find(key);
        return found ? found->get<T>() : otherwise;
    }
    template <class T>
    std::vector<T> list() const {
        if (type != array) throw JsonError("is not a list");
        std::vector<T> out;
        for (const Json& item : items) out.push_back(item.get<T>());
        return out;
    }
    const char* type_name() const;
    bool operator==(const Json& other) const = default;
};

// Parses a text that is exactly one JSON value. Refuses (EXIT_BAD_DATA, naming `where`) bad syntax, invalid UTF-8 and
// values that are nested too deep. if_cut_short is appended to the message if the text ends in the middle of a value.
Json parse_json(const std::string& text, const std::string& where, const char* if_cut_short = "");

// Parses a text that is exactly one JSON object.
Json parse_json_object(const std::string& text, const std::string& where);
// Reads a file of at most max_bytes that holds one JSON object.
Json read_json_object(const std::string& path, int64_t max_bytes);

// The same for what Python's json writes, too: NaN, Infinity and numbers above the range of a double are numbers. With
// any_text also strings that are no text, as with half of a surrogate pair: keys are blank then, and values no strings.
Json parse_python_json(const std::string& text, const std::string& where, const char* if_cut_short = "",
                       bool any_text = false);
Json parse_python_object(const std::string& text, const std::string& where);

// The position of the last quote of the string that starts at `begin`, or of a line end before it; npos: neither.
size_t json_string_end(std::string_view text, size_t begin);
// The end of the object that starts at `begin`: after its last brace, or at a line end inside a string, where every
// reader of JSON stops. npos: the text ends before that.
size_t json_object_end(std::string_view text, size_t begin);

// Writes a value in one line, with the keys in alphabetical order. Bytes that are not UTF-8, as a file name may have
// them, are replaced.
std::string json_text(const Json& value);
std::string json_quoted(const std::string& text);  // a string, with its quotes
std::string json_file(const Json& value);          // in lines, as Python's json.dump(indent=2), with the keys in order
// Changes the text of an object, whose numbers stay as they are written.
std::string with_members(const std::string& object, const Json& changes, const std::vector<const char*>& removed = {});
