// sources: llmc/commands/saved_options.cpp llmc/options/options.cpp llmc/options/version.cpp
// llmc/options/option_table.cpp llmc/options/arguments.cpp llmc/options/foreign_options.cpp llmc/model/params.cpp
// llmc/base/terminal.cpp llmc/base/unicode.cpp llmc/base/files.cpp llmc/base/json.cpp llmc/base/common.cpp
//
// fuzz_run_json.cpp: reads any bytes as the run.json of a run that is resumed, or, if they do not start with a brace,
// as the members of its options. They must be refused with EXIT_BAD_DATA, or give options that can be printed and
// saved.
#include <cstdlib>

#include "commands/saved_options.h"

static void require(bool condition) {
    if (!condition) abort();
}

// Resumes as read_options in commands/process.cpp does. Returns 0 or the exit code of the refusal.
static int resume(std::vector<const char*> argv, const std::string& run_json) {
    Options options;
    std::string saved;
    try {
        options = parse_options(int(argv.size()), argv.data());
        require(options.needs_saved);
        saved = parse_run_json(run_json, "run.json", options);
        options = parse_options(int(argv.size()), argv.data(), saved);
    } catch (const Error& error) {
        return error.exit_code;
    }
    require(options.output == "out" && options.trace.empty());  // no file to write comes from run.json
    settings(options);
    in_present_form(options_json(options), options);
    in_present_form(saved, options);
    try {
        if (options.command == Command::train) resolve_steps(options, 1000);
    } catch (const Error& error) {
        require(error.exit_code == EXIT_USAGE);
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::string text(reinterpret_cast<const char*>(data), size);
    if (!text.starts_with("{")) text = "{\"options\": {" + text + "}}";
    for (const char* command : {"train", "plan"}) {
        const int code = resume({"train_gpt2", command, "--resume", "--output", "out"}, text);
        require(code == 0 || code == EXIT_BAD_DATA);
    }
    const int code = resume({"train_gpt2", "--resume", "--output", "out", "--model", "d24", "--lr", "0.1"}, text);
    require(code == 0 || code == EXIT_BAD_DATA || code == EXIT_USAGE);
    return 0;
}
