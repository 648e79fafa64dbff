// sources: llmc/text/bpe_train.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/json.cpp llmc/base/print.cpp
// llmc/text/tokenizer*.cpp llmc/text/unicode.cpp
//
// fuzz_bpe.cpp: runs the tokenizer on any bytes as text. The pieces must cover the text. Decoding must restore the
// text, with a vocabulary trained on it and with a fixed one. Text split at last_safe_cut must have the same tokens.
// Text for a terminal, and of a message, must be valid UTF-8 without characters that control a terminal. The parts in
// which the bytes of a text arrive must not matter.
#include <algorithm>

#include "base/common.h"
#include "base/print.h"
#include "fuzz.h"
#include "text/tokenizer.h"

static std::vector<int> encoded(Encoder& encoder, std::string_view text) {
    std::vector<int> tokens;
    encode(encoder, text, tokens);
    return tokens;
}

static void check(const Tokenizer& tokenizer, std::string_view text) {
    Encoder encoder(tokenizer, 3);
    const std::vector<int> tokens = encoded(encoder, text);
    require(decode(tokenizer, tokens.data(), int64_t(tokens.size())) == text);
    require(std::count(tokens.begin(), tokens.end(), tokenizer.end_of_text) == 0);
    require(encoded(encoder, text) == tokens);  // now from the cache
    const size_t cut = last_safe_cut(text);
    std::vector<int> parts = encoded(encoder, text.substr(0, cut));
    const std::vector<int> second = encoded(encoder, text.substr(cut));
    parts.insert(parts.end(), second.begin(), second.end());
    require(parts == tokens);
}

// Neither text nor a message may control a terminal.
static void check_terminal(std::string_view text) {
    const std::string bytes(text);
    for (const std::string& safe : {terminal_text(bytes), message_text(bytes)})
        for (size_t i = 0; i < safe.size(); i++) {
            const uint8_t c = uint8_t(safe[i]);
            require(c >= 0x20 ? c != 0x7f : c == '\n' || c == '\t');
            require(c != 0xc2 || (i + 1 < safe.size() && uint8_t(safe[i + 1]) >= 0xa0) || uint8_t(safe[i + 1]) < 0x80);
        }
    require(message_text(bytes).find_first_of("\n\t") == std::string::npos);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer fixed = tokenizer_from_merges({{64, 64}, {256, 256}, {65, 64}, {258, 64}, {220, 64}});
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const char* const end = text.data() + size;
    for (const char *p = text.data(), *next; p < end; p = next) {
        next = piece_end(p, end);
        require(next > p && next <= end);
    }
    check(fixed, text);
    check_terminal(text);
    PieceCounts counts;
    counts.add_text(text);
    try {
        check(train_bpe(counts, 257 + int(size % 64)), text);
    } catch (const Error& error) {
        require(error.exit_code == EXIT_BAD_DATA);
    }
    return 0;
}
