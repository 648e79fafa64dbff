// sources: llmc/text/text_reader.cpp llmc/text/tokenizer.cpp llmc/text/unicode.cpp llmc/base/common.cpp
// llmc/base/files.cpp llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_text.cpp: reads any bytes as a text file or as JSONL; the first byte chooses the rules. The input must be
// refused with EXIT_BAD_DATA, or give documents. A file that is one document must give all of its bytes.
#include "base/common.h"
#include "fuzz.h"
#include "text/text_reader.h"

// The file's documents one after another; `documents` counts those that start.
static std::string read_all(const std::vector<TextFile>& files, const CorpusRules& rules, int64_t& documents) {
    CorpusReader reader(files, rules);
    std::string all;
    documents = 0;
    for (Chunk chunk; reader.next(chunk);)
        for_each_document(chunk, rules, [&](std::string_view text, bool starts, bool val) {
            require(!text.empty() && (!val || rules.val_fraction > 0.0));
            documents += starts;
            all += text;
        });
    require(reader.bytes_read <= files[0].size);
    return all;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const int choice = data[0];
    std::string text = as_text(data + 1, size - 1);
    if (choice >> 4 == 1) {  // seldom, because it is slow: the end of a document of 64 KiB is held out
        const std::string once = text;
        while (!once.empty() && text.size() < 80 << 10) text += once;
    }
    CorpusRules rules;
    rules.split = choice % 4 == 1 ? "blank-lines" : choice % 4 == 2 ? "end-of-text" : "none";
    rules.val_fraction = choice & 8 ? 0.25 : 0.0;
    try {
        std::vector<TextFile> files = find_text_files({memory_file(text)});
        require(files.size() == 1 && files[0].size == int64_t(text.size()));
        files[0].jsonl = choice % 4 == 3;
        int64_t documents = 0;
        const std::string all = read_all(files, rules, documents);
        require(documents <= 2 * int64_t(text.size()) && all.size() <= text.size());
        const size_t mark = text.starts_with("\xef\xbb\xbf") ? 3 : 0;
        if (rules.split == "none" && !files[0].jsonl) require(all == text.substr(mark));
    } catch (const Error& error) {
        require(error.exit_code == EXIT_BAD_DATA);
    }
    return 0;
}
