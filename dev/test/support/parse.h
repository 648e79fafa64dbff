// parse.h: parses a command line in a test.
#pragma once
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "support/refusal.h"
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

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// "2 " and the message of the Error, which must be one line.
inline std::string refusal(const std::vector<const char*>& arguments) {
    const std::string refused = refusal([&] { parse(arguments); });
    CHECK((refused.starts_with("2 ") && !contains(refused, "\n")));
    return refused;
}
