// rows.h: one row of JSON or CSV: where it ends in a text, and its values.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

// The end of the JSON object that starts at `begin`: after its last brace, or at a line end inside a string, where
// every reader of JSON stops. npos: the text ends before that.
size_t object_end(std::string_view text, size_t begin);

// Parses a row, a JSON value, as parse_python_json does. An invalid text, as with half of a surrogate pair, is {}.
Json parse_row(const std::string& text, const std::string& where);
// The same, but refuses such a text: whoever needs it says so with this.
Json check_row(const std::string& text, const std::string& where);

// The end of the CSV record that starts at `begin`: after its line end; npos: the text ends before that. A field in
// quotes may have delimiters, line ends and doubled quotes (RFC 4180).
size_t record_end(std::string_view text, size_t begin, char delimiter);
// The fields of a whole record. Refuses one that ends inside quotes (EXIT_BAD_DATA, with `where`).
std::vector<std::string> fields_of(std::string_view record, char delimiter, const std::string& where);
