#include "base/json.h"

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

json parse_json_object(const std::string& text, const std::string& where) {
    json value = parse_json(text, where);
    if (!value.is_object()) fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}", where.c_str());
    return value;
}

json read_json_object(const std::string& path, int64_t max_bytes) {
    return parse_json_object(read_file(path, max_bytes), path);
}

std::string json_text(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string json_quoted(const std::string& text) { return json_text(json(text)); }
