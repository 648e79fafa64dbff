// sources: llmc/text/bpe_train.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/content.cpp llmc/base/json.cpp
// llmc/base/print.cpp llmc/text/tokenizer*.cpp llmc/text/unicode.cpp
//
// fuzz_bpe.cpp: runs the tokenizer on any bytes as text. The pieces must cover the text. Decoding must restore the
// text, with a vocabulary trained on it and with a fixed one. Text split at last_safe_cut must have the same tokens.
// Text for a terminal, and of a message, must be valid UTF-8 without characters that control a terminal.
#include <algorithm>

#include "base/print.h"
#include "fuzz.h"
#include "text/tokenizer.h"

static void check(const Tokenizer& tokenizer, std::string_view text) {
    Encoder encoder(tokenizer, 3);
    std::vector<int> tokens, cached, parts;
    encode(encoder, text, tokens);
    require(decode(tokenizer, tokens.data(), int64_t(tokens.size())) == text);
    require(std::count(tokens.begin(), tokens.end(), tokenizer.end_of_text) == 0);
    encode(encoder, text, cached);
    require(cached == tokens);
    const size_t cut = last_safe_cut(text);
    encode(encoder, text.substr(0, cut), parts);
    encode(encoder, text.substr(cut), parts);
    require(parts == tokens);
}

// Neither text nor a message may control a terminal.
static void check_terminal(const std::string& text) {
    for (const std::string& safe : {terminal_text(text), message_text(text)})
        for (size_t i = 0; i < safe.size(); i++) {
            const uint8_t c = uint8_t(safe[i]);
            require(c >= 0x20 ? c != 0x7f : c == '\n' || c == '\t');
            require(c != 0xc2 || (i + 1 < safe.size() && uint8_t(safe[i + 1]) >= 0xa0) || uint8_t(safe[i + 1]) < 0x80);
        }
    require(message_text(text).find_first_of("\n\t") == std::string::npos);
}

void fuzz(std::string_view text) {
    static const Tokenizer fixed = tokenizer_from_merges({{64, 64}, {256, 256}, {65, 64}, {258, 64}, {220, 64}});
    for (const char *p = text.data(), *end = p + text.size(), *next; p < end; p = next) {
        next = piece_end(p, end);
        require(next > p && next <= end);
    }
    check(fixed, text);
    check_terminal(std::string(text));
    PieceCounts counts;
    counts.add_text(text);
    check(train_bpe(counts, 257 + int(text.size() % 64)), text);
}
