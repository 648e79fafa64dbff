// toml.h: lines name = value, the part of TOML that run.toml and the files of --config have.
#pragma once
#include <string>
#include <utility>
#include <vector>

// Returns names and values, texts without their quotes. Refuses (EXIT_BAD_DATA, with path and line) other content.
std::vector<std::pair<std::string, std::string>> parse_toml(const std::string& text, const std::string& path);
std::string toml_quoted(const std::string& text);
