#include "text/rows.h"

#include <algorithm>
#include <cstdlib>

#include "base/common.h"

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

static bool is_text(const std::string& quoted) try {
    return parse_json(quoted, "").type == Json::string;
} catch (const Error&) {
    return false;
}

// Returns the text with {} in place of values, and blanks in place of keys, that are no text to a parser.
static std::string with_valid_texts(std::string text) {
    for (size_t begin = text.find('"'), end; begin < text.size(); begin = text.find('"', end + 1)) {
        end = json_string_end(text, begin);
        if (end == text.npos) break;
        const size_t size = end - begin - 1, next = text.find_first_not_of(" \t\r\n", end + 1);
        if (text[end] == '\n' || is_text(text.substr(begin, size + 2))) continue;
        const bool is_key = next != text.npos && text[next] == ':';
        text.replace(begin, size + 2, is_key ? '"' + std::string(size, ' ') + '"' : "{}" + std::string(size, ' '));
    }
    return text;
}

Json parse_row(const std::string& text, const std::string& where) {
    try {
        return check_row(text, where);
    } catch (const Error&) {
        const std::string whole = with_valid_texts(text);
        if (whole == text) throw;
        return check_row(whole, where);
    }
}

Json check_row(const std::string& text, const std::string& where) {
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
