// json.h: parses JSON from untrusted files, and writes JSON. This header includes only the forward declarations;
// include json.hpp in .cpp files. The library's parser and serializer are slow to compile: only json.cpp uses them.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Parses a text that is exactly one JSON value. Refuses (EXIT_BAD_DATA, naming `where`) bad syntax, invalid UTF-8 and
// values that are nested too deep. if_cut_short is appended to the message if the text ends in the middle of a value.
nlohmann::json parse_json(const std::string& text, const std::string& where, const char* if_cut_short = "");

// Parses a text that is exactly one JSON object.
nlohmann::json parse_json_object(const std::string& text, const std::string& where);
// Reads a file of at most max_bytes that holds one JSON object.
nlohmann::json read_json_object(const std::string& path, int64_t max_bytes);

// The same for what Python's json writes, too: NaN, Infinity and numbers above the range of a double are read as 0.0.
nlohmann::json parse_python_json(const std::string& text, const std::string& where, const char* if_cut_short = "");
nlohmann::json parse_python_object(const std::string& text, const std::string& where);

// The keys of an object and the texts of their values, from the text of a valid object; of equal keys the last.
using JsonMembers = std::vector<std::pair<std::string, std::string>>;
JsonMembers json_members(std::string_view object);
// Changes an object in its text: sets keys, or removes those whose value is "". All else stays as it is written, such
// as numbers that no type here holds.
std::string with_members(const std::string& object, const JsonMembers& changes);

// The position of the last quote of the string that starts at `begin`, or of a line end before it.
inline size_t json_string_end(std::string_view text, size_t begin) {
    for (size_t i = begin + 1;; i += 2) {  // a backslash and the byte after it
        i = text.find_first_of("\"\\\n", i);
        if (i == text.npos || text[i] != '\\') return i;
    }
}

// Writes a value in one line. Bytes that are not UTF-8, as a file name may have them, are replaced.
std::string json_text(const nlohmann::json& value);
std::string json_quoted(const std::string& text);  // a string, with its quotes
