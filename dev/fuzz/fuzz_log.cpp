// sources: llmc/train/log.cpp llmc/infer/tasks.cpp llmc/text/input.cpp llmc/text/text_reader.cpp
// llmc/text/tokenizer.cpp llmc/text/unicode.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/content.cpp
// llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_log.cpp: reads any bytes as the log.jsonl of a run that is resumed. The kept lines must be lines of the file in
// their order, and reading them again must keep all of them. Nothing is refused.
#include "fuzz.h"
#include "train/log.h"

// The content of log.jsonl after a resume at step 3.
static std::string resumed(const std::string& directory) {
    LogOptions options;
    options.output = directory, options.silent = true, options.resume_step = 3;
    require(exit_code_of([&] { Log(options).open(); }) == 0);
    return read_bytes(directory + "/log.jsonl");
}

static bool are_lines_of(const std::string& kept, std::string_view text) {
    size_t at = 0;
    for (size_t begin = 0, end; begin < kept.size(); begin = end) {
        end = kept.find('\n', begin) + 1;
        const std::string line = kept.substr(begin, end - begin);
        while (at < text.size() && text.compare(at, line.size(), line) != 0) at = text.find('\n', at) + 1;
        if (end == 0 || at >= text.size()) return false;
        at += line.size();
    }
    return true;
}

void fuzz(std::string_view input) {
    const std::string& directory = memory_directory().path;
    write_bytes(directory + "/log.jsonl", std::string(input));
    const std::string kept = resumed(directory);
    require(are_lines_of(kept, input) && resumed(directory) == kept);
}
