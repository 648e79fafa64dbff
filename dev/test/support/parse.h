// parse.h: parses a command line in a test.
#pragma once
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "train/options.h"

inline Options parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "/usr/local/bin/train_gpt2");
    return parse_options(int(arguments.size()), arguments.data());
}

// Parses the arguments after --train-data, which training requires.
inline Options train(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), {"--train-data", "x.bin"});
    return parse(arguments);
}

// The message of the Error, which must be EXIT_USAGE.
inline std::string refusal(const std::vector<const char*>& arguments) {
    try {
        parse(arguments);
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_USAGE);
        CHECK(strchr(error.what(), '\n') == nullptr);
        return error.what();
    }
    return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
