// json.h: parses JSON from untrusted files, and writes JSON. This header includes only the forward declarations;
// include json.hpp in .cpp files. The library's parser and serializer are slow to compile: only json.cpp uses them.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include <string>

// Parses a text that is exactly one JSON value. Refuses (EXIT_BAD_DATA, naming `where`) bad syntax, invalid UTF-8 and
// values that are nested too deep. if_cut_short is appended to the message if the text ends in the middle of a value.
nlohmann::json parse_json(const std::string& text, const std::string& where, const char* if_cut_short = "");

// Parses a text that is exactly one JSON object.
nlohmann::json parse_json_object(const std::string& text, const std::string& where);
// Reads a file of at most max_bytes that holds one JSON object.
nlohmann::json read_json_object(const std::string& path, int64_t max_bytes);

// Writes a value in one line. Bytes that are not UTF-8, as a file name may have them, are replaced.
std::string json_text(const nlohmann::json& value);
std::string json_quoted(const std::string& text);  // a string, with its quotes
