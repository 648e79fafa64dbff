#include "text/rows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/json.h"

// ---- JSON

// The position of the last quote of the string that starts at `begin`, or of a line end before it.
static size_t string_end(std::string_view text, size_t begin) {
    for (size_t i = begin + 1;; i += 2) {  // a backslash and the byte after it
        i = text.find_first_of("\"\\\n", i);
        if (i == text.npos || text[i] != '\\') return i;
    }
}

size_t object_end(std::string_view text, size_t begin) {
    int64_t depth = 0;
    for (size_t i = begin;;) {
        i = text.find_first_of("\"{}", i);
        if (i == text.npos) return text.npos;
        if (text[i] == '"') {
            i = string_end(text, i);
            if (i == text.npos || text[i] == '\n') return i;
        } else {
            depth += text[i] == '{' ? 1 : -1;
        }
        i++;
        if (depth == 0) return i;
    }
}

// The length of a value that is no finite number: NaN, Infinity, or more digits than a double has range. 0: another.
static size_t non_finite_at(const std::string& text, size_t at) {
    const std::string_view value = std::string_view(text).substr(at);
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"})
        if (value.starts_with(word)) return word.size();
    return std::isinf(strtod(&text[at], nullptr)) ? value.find_first_not_of("+-.0123456789eE") : 0;
}

// Returns the text with a 0 and spaces in place of values that are no finite numbers.
static std::string with_finite_numbers(std::string text) {
    constexpr std::string_view before = " \t\r\n:,[", starts = "NI-0123456789";
    for (size_t i = 1; i < text.size(); i++) {
        if (text[i] == '"') {
            i = std::min(string_end(text, i), text.size());
        } else if (before.find(text[i - 1]) != before.npos && starts.find(text[i]) != starts.npos) {
            const size_t length = std::min(non_finite_at(text, i), text.size() - i);
            if (length == 0) continue;
            text.replace(i, length, length, ' ');
            text[i] = '0';
        }
    }
    return text;
}

nlohmann::json parse_row(const std::string& text, const std::string& where) {
    static constexpr const char* CUT_SHORT = "; each line of this file must be one whole object {...}";
    try {
        return parse_json(text, where, CUT_SHORT);
    } catch (const Error&) {
        const std::string finite = with_finite_numbers(text);
        if (finite == text) throw;
        return parse_json(finite, where, CUT_SHORT);
    }
}

// ---- CSV

namespace {
enum class In { start, plain, quotes, behind_quote };  // where in a field; behind_quote: at its end, or a doubled quote
}  // namespace

// Reads a record, and adds its fields to `fields`, unless that is null. Returns its end, as record_end does, and sets
// `in` to where it ended.
static size_t read_record(std::string_view text, size_t begin, char delimiter, std::vector<std::string>* fields,
                          In& in) {
    in = In::start;
    if (fields) fields->assign(1, "");
    for (size_t i = begin; i < text.size(); i++) {
        const char c = text[i];
        const bool free = in != In::quotes, quotes = c == '"' && in != In::plain;
        if (free && c == '\n') return i + 1;
        if (free && c == delimiter) {
            in = In::start;
            if (fields) fields->emplace_back();
            continue;
        }
        const bool kept = !quotes || in == In::behind_quote;  // of doubled quotes, the second one
        if (quotes)
            in = in == In::quotes ? In::behind_quote : In::quotes;
        else if (free)
            in = In::plain;
        if (fields && kept && !(free && c == '\r' && text.substr(i + 1) == "\n")) fields->back() += c;
    }
    return text.npos;
}

size_t record_end(std::string_view text, size_t begin, char delimiter) {
    In in;
    return read_record(text, begin, delimiter, nullptr, in);
}

std::vector<std::string> fields_of(std::string_view record, char delimiter, const std::string& where) {
    std::vector<std::string> fields;
    In in;
    read_record(record, 0, delimiter, &fields, in);
    if (in == In::quotes) fail(EXIT_BAD_DATA, "%s: the quotes of a field have no end", where.c_str());
    return fields;
}
