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

// Returns the text with 0.0 and spaces in place of values that are no finite numbers.
static std::string with_finite_numbers(std::string text) {
    for (size_t i = 0, end; i < text.size(); i = end) {
        end = text[i] == '"' ? json_string_end(text, i) + 1 : text.find_first_of("\" \t\r\n:,[]{}", i);
        end = std::min(std::max(end, i + 1), text.size());
        const std::string word = text.substr(i, end - i);
        const bool too_large =
            word.find_first_not_of("+-.0123456789eE") == word.npos && std::isinf(std::atof(word.c_str()));
        if (too_large || word == "NaN" || word == "Infinity" || word == "-Infinity")
            text.replace(i, word.size(), "0.0" + std::string(word.size() - 3, ' '));
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

JsonMembers json_members(std::string_view object) {
    constexpr const char* BLANK = " \t\r\n";
    JsonMembers members;
    std::string key;
    size_t begin = object.find('{') + 1;  // of a key or a value
    for (size_t i = begin, depth = 1; depth > 0; i++) {
        i = object.find_first_of("\",:{}[]", i);
        const char c = object[i];
        if (c == '"') i = json_string_end(object, i);
        depth += size_t(c == '{' || c == '[') - size_t(c == '}' || c == ']');
        if (depth > 1 || (c != ':' && c != ',' && depth > 0)) continue;
        const size_t first = object.find_first_not_of(BLANK, begin), end = object.find_last_not_of(BLANK, i - 1) + 1;
        const std::string text(object.substr(first, std::max(first, end) - first));
        begin = i + 1;
        if (c != ':' && !text.empty()) members.push_back({key, text});
        if (c != ':') continue;
        key = json::parse(text).get<std::string>();
        std::erase_if(members, [&](const auto& member) { return member.first == key; });
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
