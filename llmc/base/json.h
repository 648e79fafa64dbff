// json.h: parses JSON from untrusted files. This header includes only the forward declarations; include json.hpp in
// .cpp files.
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
