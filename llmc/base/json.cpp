#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/content.h"
#include "base/files.h"

// ---- values

Json::Json(double value) {
    if (std::isfinite(value)) type = number, text = nlohmann::json(value).dump();
}

Json::Json(std::initializer_list<std::pair<std::string, Json>> list) : type(object), members(list) {}

const Json* Json::find(std::string_view key) const {
    const auto found = std::find_if(members.rbegin(), members.rend(), [&](const auto& m) { return m.first == key; });
    return found == members.rend() ? nullptr : &found->second;
}

const Json& Json::operator[](std::string_view key) const {
    static const Json none;
    const Json* found = find(key);
    return found ? *found : none;
}

const Json& Json::at(std::string_view key) const {
    if (const Json* found = find(key)) return *found;
    throw JsonError("has no key \"" + std::string(key) + "\"");
}

Json& Json::operator[](std::string_view key) {
    if (const Json* found = find(key)) return const_cast<Json&>(*found);
    type = object;
    return members.emplace_back(key, Json()).second;
}

void Json::erase(std::string_view key) {
    std::erase_if(members, [&](const auto& member) { return member.first == key; });
}

const char* Json::type_name() const {
    static constexpr const char* names[] = {"null", "boolean", "number", "string", "array", "object"};
    return names[type];
}

template <class T>
T Json::get() const {
    T value{};
    const char* const end = text.data() + text.size();
    bool is_one;
    if constexpr (std::is_same_v<T, std::string>)
        is_one = type == string, value = text;
    else if constexpr (std::is_same_v<T, bool>)
        is_one = type == boolean, value = text == "true";
    else if constexpr (std::is_floating_point_v<T>)
        is_one = type == number, value = T(std::strtod(text.c_str(), nullptr));
    else if (const auto [read, error] = std::from_chars(text.data(), end, value); true)
        is_one = type == number && read == end && error == std::errc();
    if (!is_one) throw JsonError("has a value of another type, " + std::string(type_name()));
    return value;
}

template std::string Json::get() const;
template bool Json::get() const;
template int Json::get() const;
template int64_t Json::get() const;
template uint64_t Json::get() const;
template float Json::get() const;
template double Json::get() const;

std::optional<int64_t> Json::integer() const try { return get<int64_t>(); } catch (const JsonError&) {
    return {};
}

bool Json::is_index(int64_t size) const {
    const std::optional<int64_t> i = integer();
    return i && *i >= 0 && *i < size;
}

// ---- parsing

static constexpr const char* ZERO = "0.0";

namespace {
// Builds a value from what the library's parser calls for each part of a text.
struct Builder {
    const std::string& where;
    const std::vector<std::string>& replaced;  // the numbers that stand in the text as ZERO, in its order
    size_t zeros = 0;
    Json root = {};
    Json* last = nullptr;          // the value that was added last
    std::vector<Json*> open = {};  // the lists and objects that have begun
    std::string name = {};         // name of the next member
    size_t fault_at = 0;
    std::string fault = {};

    bool add(Json value) {
        Json* const in = open.empty() ? nullptr : open.back();
        Json& place = !in                       ? root
                      : in->type == Json::array ? in->items.emplace_back()
                                                : in->members.emplace_back(std::move(name), Json()).second;
        place = std::move(value);
        last = &place;
        return true;
    }
    bool begin(Json::Type type) {
        constexpr size_t MAX_DEPTH = 100;  // functions recurse into values, and a deep list would use up the stack
        if (open.size() >= MAX_DEPTH)
            fail(EXIT_BAD_DATA, "%s: has more than %zu lists and objects inside each other", where.c_str(), MAX_DEPTH);
        add({});
        last->type = type;
        open.push_back(last);
        return true;
    }
    bool key(std::string& text) { return name = std::move(text), true; }
    bool null() { return add({}); }
    bool boolean(bool value) { return add(value); }
    bool number_integer(int64_t value) { return add(value); }
    bool number_unsigned(uint64_t value) { return add(value); }
    bool number_float(double, const std::string& text) {
        Json value = 0;
        value.text = text == ZERO && zeros < replaced.size() ? replaced[zeros++] : text;
        return add(std::move(value));
    }
    bool string(std::string& text) { return add(std::move(text)); }
    bool binary(nlohmann::json::binary_t&) { return false; }  // not in texts
    bool start_object(size_t) { return begin(Json::object); }
    bool start_array(size_t) { return begin(Json::array); }
    bool end_object() { return open.pop_back(), true; }
    bool end_array() { return end_object(); }
    bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) {
        fault_at = position, fault = error.what();
        return false;
    }
};
}  // namespace

// The library's reason if a string is bad: half of a surrogate pair, bytes that are not UTF-8, a control character.
static std::string string_fault(const std::string& what) {
    const size_t begin = what.find(" - invalid string: "), end = what.find("; last read");
    return begin < end ? ": " + what.substr(begin + 3, end - begin - 3) : "";
}

// replaced: the numbers in place of which the text has ZERO.
static Json parse(const std::string& text, const std::string& where, const char* if_cut_short,
                  const std::vector<std::string>& replaced) {
    Builder builder{where, replaced};
    if (nlohmann::json::sax_parse(text, &builder)) return std::move(builder.root);
    if (const ForeignContent* other = foreign_content(std::string_view(text).substr(0, 512)))
        fail(EXIT_BAD_DATA, "%s: is %s, not JSON; %s", where.c_str(), other->what, other->remedy);
    if (builder.fault.starts_with("[json.exception.out_of_range"))
        fail(EXIT_BAD_DATA, "%s: is not valid JSON: a number is out of range", where.c_str());
    if (builder.fault_at > text.size())
        fail(EXIT_BAD_DATA, "%s: is not valid JSON: it ends in the middle of a value, after %zu bytes%s", where.c_str(),
             text.size(), if_cut_short);
    fail(EXIT_BAD_DATA, "%s: is not valid JSON at byte %zu of %zu%s", where.c_str(), builder.fault_at, text.size(),
         string_fault(builder.fault).c_str());
}

Json parse_json(const std::string& text, const std::string& where, const char* if_cut_short) {
    return parse(text, where, if_cut_short, {});
}

size_t json_string_end(std::string_view text, size_t begin) {
    for (size_t i = begin + 1;; i += 2) {  // a backslash and the byte after it
        i = text.find_first_of("\"\\\n", i);
        if (i == text.npos || text[i] != '\\') return i;
    }
}

size_t json_object_end(std::string_view text, size_t begin) {
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

// Whether a string is one to Python alone: with half of a surrogate pair, and right without it.
static bool has_odd_surrogates(const std::string& quoted) {
    std::string without = quoted;
    for (size_t i = 0; (i = without.find('\\', i)) != without.npos; i += 2)  // a backslash and the byte after it
        if (without.compare(i, 3, "\\ud") == 0 || without.compare(i, 3, "\\uD") == 0) without[i + 2] = '0';
    return without != quoted && is_text(without) && !is_text(quoted);
}

// Whether a number is one to Python, but not to a parser.
static bool is_odd_number(const std::string& word) {
    double value = 0.0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    const bool too_large = error == std::errc::result_out_of_range && *end == '\0';
    return too_large || word == "NaN" || word == "Infinity" || word == "-Infinity" || word == ZERO;
}

// Returns the text with ZERO and spaces in place of values that a parser refuses, and blanks in such keys. `words`
// gets what stands in place of each ZERO.
static std::string with_standard_values(std::string text, bool any_text, std::vector<std::string>& words) {
    for (size_t i = 0, end; i < text.size(); i = end) {
        const bool quoted = text[i] == '"';
        end = quoted ? json_string_end(text, i) + 1 : text.find_first_of("\" \t\r\n:,[]{}", i);
        end = std::min(std::max(end, i + 1), text.size());
        const std::string word = text.substr(i, end - i);
        const size_t size = word.size(), next = text.find_first_not_of(" \t\r\n", end);
        if (quoted ? !any_text || !has_odd_surrogates(word) : !is_odd_number(word)) continue;
        const bool is_key = quoted && next != text.npos && text[next] == ':';
        if (!is_key) words.push_back(word);
        text.replace(i, size, is_key ? '"' + std::string(size - 2, ' ') + '"' : ZERO + std::string(size - 3, ' '));
    }
    return text;
}

Json parse_python_json(const std::string& text, const std::string& where, const char* if_cut_short, bool any_text) try {
    return parse_json(text, where, if_cut_short);
} catch (const Error&) {
    std::vector<std::string> words;
    const std::string standard = with_standard_values(text, any_text, words);
    if (standard == text) throw;
    return parse(standard, where, if_cut_short, words);
}

static Json checked_object(Json value, const std::string& where) {
    if (value.type != Json::object) fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}", where.c_str());
    return value;
}

Json parse_json_object(const std::string& text, const std::string& where) {
    return checked_object(parse_json(text, where), where);
}

Json parse_python_object(const std::string& text, const std::string& where) {
    return checked_object(parse_python_json(text, where), where);
}

Json read_json_object(const std::string& path, int64_t max_bytes) {
    return parse_json_object(read_file(path, max_bytes), path);
}

// ---- writing

// Appends a value: in lines that are indented from `indent` on; below 0: in one line, with the keys sorted.
static void append(std::string& out, const Json& value, int indent) {
    const bool in_lines = indent >= 0, is_object = value.type == Json::object;
    if (!is_object && value.type != Json::array) {
        out += value.type == Json::string ? json_quoted(value.text) : value.type == Json::null ? "null" : value.text;
        return;
    }
    std::vector<std::pair<std::string_view, const Json*>> parts;
    for (const Json& item : value.items) parts.push_back({"", &item});
    for (const auto& [key, member] : value.members) parts.push_back({key, &member});
    if (!in_lines) std::ranges::stable_sort(parts, {}, &decltype(parts)::value_type::first);
    const std::string line = in_lines ? "\n" + std::string(size_t(indent), ' ') : "";
    out += is_object ? '{' : '[';
    for (const auto& [key, part] : parts) {
        out += (part == parts[0].second ? "" : ",") + line + (in_lines ? "  " : "");
        if (is_object) out += json_quoted(std::string(key)) + (in_lines ? ": " : ":");
        append(out, *part, in_lines ? indent + 2 : indent);
    }
    if (!parts.empty()) out += line;
    out += is_object ? '}' : ']';
}

std::string json_text(const Json& value) {
    std::string out;
    append(out, value, -1);
    return out;
}

std::string json_file(const Json& value) {
    std::string out;
    append(out, value, 0);
    return out + "\n";
}

std::string json_quoted(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string with_members(const std::string& object, const Json& changes, const std::vector<const char*>& removed) {
    const Json before = parse_python_object(object, "an object");
    Json after = before;
    for (const auto& [key, value] : changes.members) after[key] = value;
    for (const char* key : removed) after.erase(key);
    return after == before ? object : json_file(after);
}
