#include "base/json.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/content.h"
#include "base/files.h"

using nlohmann::json;

// The library's reason if a string is bad: half of a surrogate pair, bytes that are not UTF-8, a control character.
static std::string string_fault(const std::string& what) {
    const size_t begin = what.find(" - invalid string: "), end = what.find("; last read");
    return begin < end ? ": " + what.substr(begin + 3, end - begin - 3) : "";
}

json parse_json(const std::string& text, const std::string& where, const char* if_cut_short) {
    // Functions of the library recurse into values, and a list that is deep enough would use up the stack.
    const auto check_depth = [&](int depth, json::parse_event_t event, const json&) {
        constexpr int MAX_DEPTH = 100;
        const bool begins = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
        if (begins && depth >= MAX_DEPTH)
            fail(EXIT_BAD_DATA, "%s: has more than %d lists and objects inside each other", where.c_str(), MAX_DEPTH);
        return true;
    };
    try {
        return json::parse(text, check_depth);
    } catch (const json::parse_error& error) {
        if (const ForeignContent* other = foreign_content(std::string_view(text).substr(0, 512)))
            fail(EXIT_BAD_DATA, "%s: is %s, not JSON; %s", where.c_str(), other->what, other->remedy);
        if (error.byte > text.size())
            fail(EXIT_BAD_DATA, "%s: is not valid JSON: it ends in the middle of a value, after %zu bytes%s",
                 where.c_str(), text.size(), if_cut_short);
        fail(EXIT_BAD_DATA, "%s: is not valid JSON at byte %zu of %zu%s", where.c_str(), error.byte, text.size(),
             string_fault(error.what()).c_str());
    } catch (const json::out_of_range&) {
        fail(EXIT_BAD_DATA, "%s: is not valid JSON: a number is out of range", where.c_str());
    }
}

// The length of a value that is no finite number: NaN, Infinity, or more digits than a double has range. 0: another.
static size_t non_finite_at(const std::string& text, size_t at) {
    const std::string_view value = std::string_view(text).substr(at);
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"})
        if (value.starts_with(word)) return word.size();
    return std::isinf(strtod(&text[at], nullptr)) ? value.find_first_not_of("+-.0123456789eE") : 0;
}

// Returns the text with 0.0 and spaces in place of values that are no finite numbers.
static std::string with_finite_numbers(std::string text) {
    constexpr std::string_view before = " \t\r\n:,[", starts = "NI-0123456789";
    for (size_t i = 1; i < text.size(); i++) {
        if (text[i] == '"') {
            i = std::min(json_string_end(text, i), text.size());
        } else if (before.find(text[i - 1]) != before.npos && starts.find(text[i]) != starts.npos) {
            const size_t length = std::min(non_finite_at(text, i), text.size() - i);
            if (length == 0) continue;
            text.replace(i, length, length, ' ');
            text.replace(i, 3, "0.0");
        }
    }
    return text;
}

json parse_python_json(const std::string& text, const std::string& where, const char* if_cut_short) {
    try {
        return parse_json(text, where, if_cut_short);
    } catch (const Error&) {
        const std::string finite = with_finite_numbers(text);
        if (finite == text) throw;
        return parse_json(finite, where, if_cut_short);
    }
}

static json checked_object(json value, const std::string& where) {
    if (!value.is_object()) fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}", where.c_str());
    return value;
}

json parse_json_object(const std::string& text, const std::string& where) {
    return checked_object(parse_json(text, where), where);
}

json parse_python_object(const std::string& text, const std::string& where) {
    return checked_object(parse_python_json(text, where), where);
}

json read_json_object(const std::string& path, int64_t max_bytes) {
    return parse_json_object(read_file(path, max_bytes), path);
}

// ---- text of objects

static constexpr const char* BLANK = " \t\r\n";

// The end of the value that starts at `begin`: before a comma or the end of the object, and the blanks before these.
static size_t value_end(std::string_view text, size_t begin) {
    int depth = 0;
    for (size_t i = begin;; i++) {
        i = text.find_first_of("\",{}[]", i);
        if (text[i] == '"') i = json_string_end(text, i);
        if (text[i] == '{' || text[i] == '[') depth++;
        if (depth == 0 && (text[i] == ',' || text[i] == '}')) return text.find_last_not_of(BLANK, i - 1) + 1;
        if (text[i] == '}' || text[i] == ']') depth--;
    }
}

JsonMembers json_members(std::string_view object) {
    JsonMembers members;
    for (size_t i = object.find('{'); object[i] != '}';) {
        const size_t key = object.find_first_of("\"}", i);
        if (object[key] == '}') break;
        const size_t key_end = json_string_end(object, key) + 1;
        const size_t begin = object.find_first_not_of(BLANK, object.find(':', key_end) + 1);
        const size_t end = value_end(object, begin);
        const std::string name = json::parse(object.substr(key, key_end - key)).get<std::string>();
        std::erase_if(members, [&](const auto& member) { return member.first == name; });
        members.push_back({name, std::string(object.substr(begin, end - begin))});
        i = object.find_first_of(",}", end);
    }
    return members;
}

std::string with_members(const std::string& object, const JsonMembers& changes) {
    JsonMembers members = json_members(object);
    const JsonMembers before = members;
    for (const auto& [key, value] : changes) {
        const auto known = std::ranges::find(members, key, &JsonMembers::value_type::first);
        known == members.end() ? members.push_back({key, value}) : void(known->second = value);
    }
    std::erase_if(members, [](const auto& member) { return member.second.empty(); });
    if (members == before) return object;
    std::string out;
    for (const auto& [key, value] : members) out += (out.empty() ? "{\n  " : ",\n  ") + json_quoted(key) + ": " + value;
    return out.empty() ? "{}\n" : out + "\n}\n";
}

std::string json_text(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string json_quoted(const std::string& text) { return json_text(json(text)); }
