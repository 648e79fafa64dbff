// sources: llmc/train/options.cpp llmc/train/option_checks.cpp llmc/model/params.cpp
// llmc/text/unicode.cpp llmc/base/print.cpp llmc/base/files.cpp llmc/base/content.cpp llmc/base/json.cpp
// llmc/base/toml.cpp llmc/base/version.cpp llmc/base/common.cpp
//
// fuzz_options.cpp: parses any command line, and resumes with any run.toml. They must be accepted, or refused with the
// exit code of their error. Accepted options must come back through run.toml. An input that begins with # is a
// run.toml; the arguments of a command line are the parts of other inputs between zero bytes or newlines.
#include "base/json.h"
#include "fuzz.h"
#include "train/options.h"

// Returns 0 or the exit code of the refusal.
static int parse(const std::vector<std::string>& arguments, Options& options) {
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    return exit_code_of([&] { options = parse_options(int(argv.size()), argv.data()); });
}

static int resume(const std::string& text, Options& options) {
    write_bytes(memory_directory() / "run.toml", text);
    const int code = parse({"train_gpt2", "plan", "--resume", "--output", memory_directory().path}, options);
    remove((memory_directory() / "run.toml").c_str());
    return code;
}

static void check_stored(const Options& options) {
    Options back;
    require(resume(run_toml(options), back) == 0);
    require(run_toml(back) == run_toml(options));
}

void fuzz(std::string_view input) {
    Options options;
    if (input.starts_with("#")) {
        const int code = resume(std::string(input), options);
        require(code == 0 || code == EXIT_BAD_DATA || code == EXIT_USAGE);
        if (code == 0) require(options.output == memory_directory().path && options.trace.empty());
        if (code == 0) check_stored(options);
        return;
    }
    std::vector<std::string> arguments = {"train_gpt2", ""};
    for (const char c : input)
        if (c == 0 || c == '\n')
            arguments.emplace_back();
        else
            arguments.back() += c;
    const int code = parse(arguments, options);
    require(code == 0 || code == EXIT_USAGE || code == EXIT_NO_INPUT || code == EXIT_BAD_DATA || code == EXIT_IO);
    if (code != 0 || options.command == Command::help) return;
    require(changed_options(options, options_json(options)).empty());
    if (options.command == Command::train || options.command == Command::plan) check_stored(options);
}
