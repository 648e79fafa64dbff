#include "json.h"

#include <nlohmann/json.hpp>

#include <set>
#include <vector>

#include "common.h"
#include "files.h"

using nlohmann::json;

json parse_json(const std::string& text, const std::string& where, const char* if_cut_short) {
    constexpr size_t max_depth = 32;
    std::vector<std::set<std::string>> keys;  // of the objects that are open; arrays have none
    const auto check = [&](int, json::parse_event_t event, json& parsed) {
        using Event = json::parse_event_t;
        if (event == Event::object_start || event == Event::array_start) keys.emplace_back();
        if (event == Event::object_end || event == Event::array_end) keys.pop_back();
        if (keys.size() > max_depth) fail(EXIT_BAD_DATA, "%s: nested deeper than %zu", where.c_str(), max_depth);
        if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second)
            fail(EXIT_BAD_DATA, "%s: the key \"%s\" occurs twice", where.c_str(),
                 printable(parsed.get<std::string>()).c_str());
        return true;
    };
    try {
        return json::parse(text, check);
    } catch (const json::parse_error& error) {
        if (text.empty()) fail(EXIT_BAD_DATA, "%s: is not valid JSON: it is empty", where.c_str());
        if (error.byte > text.size())
            fail(EXIT_BAD_DATA, "%s: is not valid JSON: it ends in the middle of a value, after %zu bytes%s",
                 where.c_str(), text.size(), if_cut_short);
        fail(EXIT_BAD_DATA, "%s: is not valid JSON at byte %zu of %zu", where.c_str(), error.byte, text.size());
    } catch (const json::out_of_range& error) {
        fail(EXIT_BAD_DATA, "%s: is not valid JSON: a number is out of range", where.c_str());
    }
}

json read_json_object(const std::string& path, int64_t max_bytes) {
    json value = parse_json(read_file(path, max_bytes), path);
    if (!value.is_object()) fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}", path.c_str());
    return value;
}
