// sources: llmc/train/options.cpp llmc/train/version.cpp llmc/model/params.cpp llmc/base/print.cpp
// llmc/text/unicode.cpp llmc/base/files.cpp llmc/base/json.cpp llmc/base/common.cpp
//
// fuzz_options.cpp: parses any command line, and resumes with any run.toml, or any run.json of version 0.2.0. They must
// be accepted, or refused with the exit code of their error. Accepted options must come back through run.toml. An input
// that begins with # is a run.toml, one that begins with a brace a run.json; the arguments of a command line are the
// parts of other inputs between zero bytes or newlines.
#include "fuzz.h"
#include "train/options.h"

// Returns 0 or the exit code of the refusal.
static int parse(const std::vector<std::string>& arguments, Options& options) {
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    try {
        options = parse_options(int(argv.size()), argv.data());
    } catch (const Error& error) {
        return error.exit_code;
    }
    return 0;
}

static int resume(Options& options) {
    return parse({"train_gpt2", "plan", "--resume", "--output", memory_directory().path}, options);
}

static void check_stored(const Options& options, const std::string& run_toml) {
    const std::string stored = ::run_toml(options);
    write_bytes(run_toml, stored);
    Options back;
    require(resume(back) == 0);
    require(::run_toml(back) == stored);
    remove(run_toml.c_str());
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string text = as_text(data, size), run_toml = memory_directory() / "run.toml";
    Options options;
    if (text.starts_with("{") || text.starts_with("#")) {
        const std::string path = text.starts_with("#") ? run_toml : memory_directory() / "run.json";
        write_bytes(path, text);
        const int code = resume(options);
        remove(path.c_str());
        require(code == 0 || code == EXIT_BAD_DATA || code == EXIT_USAGE);
        if (code == 0) require(options.output == memory_directory().path && options.trace.empty());
        if (code == 0) check_stored(options, run_toml);
        return 0;
    }
    std::vector<std::string> arguments = {"train_gpt2", ""};
    for (const char c : text)
        if (c == 0 || c == '\n')
            arguments.emplace_back();
        else
            arguments.back() += c;
    const int code = parse(arguments, options);
    require(code == 0 || code == EXIT_USAGE || code == EXIT_NO_INPUT || code == EXIT_BAD_DATA || code == EXIT_IO);
    if (code != 0 || options.command == Command::help) return 0;
    changed_options(options);
    options_json(options);
    if (options.command == Command::train || options.command == Command::plan) check_stored(options, run_toml);
    return 0;
}
