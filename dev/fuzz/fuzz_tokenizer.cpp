// sources: llmc/text/tokenizer*.cpp llmc/text/unicode.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/json.cpp
// llmc/base/print.cpp
//
// fuzz_tokenizer.cpp: reads any bytes as tokenizer.json, vocab.json or merges.txt, and as changes to valid files,
// because random files lack tokens for most bytes. A tokenizer that is accepted must encode any text and decode it
// again.
#include "base/common.h"
#include "fuzz.h"
#include "text/tokenizer.h"

static void check(const Tokenizer& tokenizer, const std::string& text) {
    const std::vector<int> tokens = encode(tokenizer, text);
    for (const int token : tokens)
        require(token >= 0 && token < tokenizer.vocab_size() && token != tokenizer.end_of_text);
    require(decode(tokenizer, tokens.data(), int64_t(tokens.size())) == text);
}

static std::string quoted(const std::string& text) { return "\"" + text + "\""; }

// A valid vocab.json: the byte tokens as GPT-2 writes them, then "ab", "abc" and <|endoftext|>.
static std::string good_vocab() {
    std::string out;
    int id = 0;
    const auto add = [&](const std::string& token) {
        out += (id ? "," : "{") + quoted(token) + ":" + std::to_string(id);
        id++;
    };
    for (int code = 33; code < 0x144; code++) {
        if (code > 126 && (code < 161 || code == 173)) continue;
        const std::string one = {char(code)}, two = {char(0xc0 | code >> 6), char(0x80 | (code & 63))};
        add(code == '"' || code == '\\' ? "\\" + one : code < 128 ? one : two);
    }
    add("ab"), add("abc"), add(END_OF_TEXT);
    return out;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::string vocab = good_vocab();
    static const std::string cutter = R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false})";
    if (size == 0) return 0;
    const std::string input = as_text(data + 1, size - 1);
    try {
        const auto json = [&](const std::string& more, const std::string& merges) {
            return parse_tokenizer_json(
                "{" + cutter + more + R"(,"model":{"vocab":)" + vocab + R"(},"merges":[)" + merges + "]}}", "fuzz");
        };
        const int choice = data[0] % 6;
        const Tokenizer tokenizer = choice == 0   ? parse_tokenizer_json(input, "fuzz")
                                    : choice == 1 ? parse_vocab_and_merges(input, "a b\n", "fuzz")
                                    : choice == 2 ? parse_vocab_and_merges(vocab + "}", input, "fuzz")
                                    : choice == 3
                                        ? parse_vocab_and_merges(vocab + "," + input + "}", "a b\nab c\n", "fuzz")
                                    : choice == 4 ? json("", input)
                                                  : json("," + input, R"("a b",["ab","c"])");
        check(tokenizer, "abc ab" + input + "abcabc");
    } catch (const Error& error) {
        require(error.exit_code == EXIT_BAD_DATA);
    }
    return 0;
}
