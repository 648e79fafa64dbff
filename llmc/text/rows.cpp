#include "text/rows.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/json.h"

// ---- JSON

size_t object_end(std::string_view text, size_t begin) {
    int64_t depth = 0;
    for (size_t i = begin;;) {
        i = text.find_first_of("\"{}", i);
        if (i == text.npos) return text.npos;
        if (text[i] == '"') {
            i = json_string_end(text, i);
            if (i == text.npos || text[i] == '\n') return i;
        } else {
            depth += text[i] == '{' ? 1 : -1;
        }
        i++;
        if (depth == 0) return i;
    }
}

// Whether a string, as JSON writes it, has half of a surrogate pair.
static bool has_half_pair(std::string_view text) {
    const auto half = [&](size_t at) {  // 0xd800: the first half, 0xdc00: the second
        const std::string code(text.substr(std::min(at, text.size()), 6));
        return code.starts_with("\\u") ? std::strtol(&code[2], nullptr, 16) & 0xfc00 : 0;
    };
    for (size_t i = text.find('\\'); i != text.npos; i = text.find('\\', i)) {
        const bool pair = half(i) == 0xd800 && half(i + 6) == 0xdc00;
        if (!pair && (half(i) & 0xf800) == 0xd800) return true;
        i += pair ? 12 : 2;
    }
    return false;
}

// Returns the text with null in place of values, and blanks in place of keys, that have half of a surrogate pair.
static std::string without_half_pairs(std::string text) {
    for (size_t i = text.find('"'); i < text.size(); i = text.find('"', i + 1)) {
        const size_t begin = i + 1;
        i = std::min(json_string_end(text, i), text.size());
        if (!has_half_pair(std::string_view(text).substr(begin, i - begin))) continue;
        const size_t next = std::min(text.find_first_not_of(" \t\r\n", i + 1), text.size());
        text.replace(begin, i - begin, i - begin, ' ');
        if (text[next] != ':') text.replace(begin - 1, i - begin + 2, "null" + std::string(i - begin - 2, ' '));
    }
    return text;
}

nlohmann::json parse_row(const std::string& text, const std::string& where) {
    try {
        return check_row(text, where);
    } catch (const Error&) {
        const std::string whole = without_half_pairs(text);
        if (whole == text) throw;
        return check_row(whole, where);
    }
}

nlohmann::json check_row(const std::string& text, const std::string& where) {
    return parse_python_json(text, where, "; each line of this file must be one whole object {...}");
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
