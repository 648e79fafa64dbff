// json.h: JSON from files that cannot be trusted. Includes only the forward declaration; json.hpp belongs in .cpp
// files.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include <string>

// Parses one value that fills the text. Refuses with EXIT_BAD_DATA, naming `where`: bad syntax, invalid UTF-8, a key
// that occurs twice in an object, nesting deeper than 32. if_cut_short is added to the message about a text that ends
// in the middle of a value.
nlohmann::json parse_json(const std::string& text, const std::string& where, const char* if_cut_short = "");

// The JSON object in a file of at most max_bytes.
nlohmann::json read_json_object(const std::string& path, int64_t max_bytes);
