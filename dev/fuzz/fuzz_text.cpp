// sources: llmc/text/input.cpp llmc/text/text_reader.cpp llmc/text/tokenizer.cpp
// llmc/text/unicode.cpp llmc/base/common.cpp llmc/base/content.cpp llmc/base/files.cpp llmc/base/json.cpp
// llmc/base/print.cpp
//
// fuzz_text.cpp: reads any bytes as text or JSON; the first byte chooses the format and rules. The input must be
// refused, or give documents. A file that is one document must give all of its bytes.
#include "fuzz.h"
#include "text/text_reader.h"

void fuzz(std::string_view input) {
    if (input.empty()) return;
    const int choice = uint8_t(input[0]);
    std::string text(input.substr(1)), all;
    if (choice >> 4 == 1) {  // seldom, because it is slow: the end of a document of 64 KiB is held out
        const std::string once = text;
        while (!once.empty() && text.size() < 80 << 10) text += once;
    }
    CorpusRules rules;
    rules.split = choice % 4 == 1 ? SplitAt::blank_lines : choice % 4 == 2 ? SplitAt::end_of_text : SplitAt::none;
    rules.val_fraction = choice & 8 ? 0.25 : 0.0;
    std::vector<TextFile> files = find_text_files({memory_file(text)}, "text").texts;
    require(files.size() == 1 && files[0].size == int64_t(text.size()));
    if (!files[0].command.empty()) return;
    files[0].format = choice % 4 != 3 ? Format::text : choice & 32 ? Format::json : Format::json_lines;
    CorpusReader reader{files, rules};
    int64_t documents = 0;
    for (Chunk chunk; reader.next(chunk);)
        for_each_document(chunk, rules, [&](std::string_view part, bool starts, bool val) {
            require((!part.empty() || files[0].format != Format::text) && (!val || rules.val_fraction > 0.0));
            documents += starts;
            all += part;
        });
    require(reader.file_bytes_read() <= files[0].size);
    require(documents <= 2 * int64_t(text.size()) && all.size() <= text.size());
    const size_t mark = text.starts_with("\xef\xbb\xbf") ? 3 : 0;
    if (rules.split == SplitAt::none && files[0].format == Format::text) require(all == text.substr(mark));
}
