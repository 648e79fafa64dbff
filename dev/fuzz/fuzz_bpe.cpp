// sources: llmc/text/bpe_train.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/json.cpp llmc/base/terminal.cpp
// llmc/text/tokenizer*.cpp llmc/base/unicode.cpp
//
// fuzz_bpe.cpp: runs the tokenizer on any bytes as text. The pieces must cover the text. Decoding must restore the
// text, with a vocabulary trained on it and with a fixed one. Text split at last_safe_cut must have the same tokens.
// Text for a terminal, and of a message, must be valid UTF-8 without characters that control a terminal. The parts in
// which the bytes of a text arrive must not matter.
#include <algorithm>
#include <cstdlib>

#include "base/common.h"
#include "base/terminal.h"
#include "text/tokenizer.h"

static void require(bool condition) {
    if (!condition) abort();
}

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

// The length of the character at p, which must not control a terminal.
static int harmless_char(const char* p, const char* end) {
    const Char c = char_at(p, end);
    require(c.valid && uint8_t(*p) >= 0x20 && *p != 0x7f);
    const std::string_view bytes(p, size_t(c.bytes));  // UTF-8 has the order of the code points
    require(bytes < "\u0080" || bytes > "\u009f");
    require(bytes < "\u202a" || bytes > "\u202e");  // these override the direction of text, as do the next
    require(bytes < "\u2066" || bytes > "\u2069");
    return c.bytes;
}

static void check_terminal(std::string_view text) {
    TerminalText whole, bytewise;
    std::string at_once = whole.add(text), one_by_one;
    at_once += whole.finish();
    for (const char byte : text) one_by_one += bytewise.add({&byte, 1});
    one_by_one += bytewise.finish();
    require(at_once == one_by_one);
    for (const char *p = at_once.data(), *end = p + at_once.size(); p < end;)
        p += *p == '\n' || *p == '\t' ? 1 : harmless_char(p, end);
    const std::string message = message_text(std::string(text));
    for (const char *p = message.data(), *end = p + message.size(); p < end;)
        p += std::string_view(p, size_t(end - p)).starts_with("\n  ") ? 1 : harmless_char(p, end);
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
    counts.slots.resize(4);  // so that it grows
    counts.add_text(text);
    try {
        check(train_bpe(counts, 257 + int(size % 64)), text);
    } catch (const Error& error) {
        require(error.exit_code == EXIT_BAD_DATA);
    }
    return 0;
}
