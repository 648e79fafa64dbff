// sources: llmc/options/options.cpp llmc/options/version.cpp llmc/options/option_table.cpp llmc/options/arguments.cpp
// llmc/options/foreign_options.cpp llmc/model/params.cpp llmc/base/terminal.cpp llmc/base/unicode.cpp
// llmc/base/common.cpp
//
// fuzz_options.cpp: parses any command line. It must be accepted, or refused with exit code 2, and accepted options
// must be printable. The arguments are the parts of the input between zero bytes or newlines.
#include <cstdlib>

#include "options/options.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::vector<std::string> arguments = {"train_gpt2", ""};
    for (size_t i = 0; i < size; i++)
        if (data[i] == 0 || data[i] == '\n')
            arguments.emplace_back();
        else
            arguments.back() += char(data[i]);
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    try {
        Options options = parse_options(int(argv.size()), argv.data());
        settings(options);
        options_json(options);
        if (options.command == Command::train) resolve_steps(options, 1000);
    } catch (const Error& error) {
        if (error.exit_code != EXIT_USAGE) abort();
    }
    return 0;
}
