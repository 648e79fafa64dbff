// sources: llmc/text/tokenizer*.cpp llmc/text/unicode.cpp llmc/base/common.cpp llmc/base/files.cpp
// llmc/base/content.cpp llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_tokenizer.cpp: reads any bytes as one of a tokenizer's files, and as changes to valid files, because random
// files lack tokens for most bytes. A tokenizer that is accepted must encode any text and decode it again.
#include <algorithm>

#include "fuzz.h"
#include "text/tokenizer.h"

static Tokenizer parse(int choice, const std::string& input) {
    static const std::string vocab = [] {  // without the last brace
        save_tokenizer(tokenizer_from_merges({{64, 65}, {256, 66}}), memory_directory().path);  // a b, ab c
        const std::string text = read_bytes(memory_directory() / "vocab.json");
        return text.substr(0, text.rfind('}'));
    }();
    const auto json = [](const std::string& more, const std::string& merges) {
        const std::string cutter = R"({"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false})";
        const std::string model = R"(,"model":{"vocab":)" + vocab + R"(},"merges":[)" + merges + "]}}";
        return parse_tokenizer({{"tokenizer.json", cutter + more + model}}, "fuzz");
    };
    const auto pair = [](const std::string& vocab, const std::string& merges, const TokenizerFiles& more = {}) {
        TokenizerFiles files = {{"vocab.json", vocab}, {"merges.txt", merges}};
        files.insert(more.begin(), more.end());
        return parse_tokenizer(files, "fuzz");
    };
    if (choice == 0) return parse_tokenizer({{"tokenizer.json", input}}, "fuzz");
    if (choice == 1) return pair(input, "a b\n");
    if (choice == 2) return pair(vocab + "}", input);
    if (choice == 3) return pair(vocab + "," + input + "}", "a b\nab c\n");
    if (choice == 6) return pair(vocab + "}", "a b\n", {{"tokenizer_config.json", input}});
    if (choice == 7) return pair(vocab + "}", "a b\n", {{"added_tokens.json", input}, {"config.json", input}});
    return choice == 4 ? json("", input) : json("," + input, R"("a b",["ab","c"])");
}

void fuzz(std::string_view input) {
    if (input.empty()) return;
    const std::string bytes(input.substr(1)), text = "abc ab" + bytes + "abcabc";
    const Tokenizer tokenizer = parse(uint8_t(input[0]) % 8, bytes);
    const std::vector<int> tokens = encode(tokenizer, text);
    for (const int token : tokens)
        require(token >= 0 && token < tokenizer.vocab_size() && token != tokenizer.end_of_text);
    const bool changes = std::ranges::any_of(tokenizer.added, [&](const AddedToken& t) {
        return t.lstrip || t.rstrip || t.content != tokenizer.tokens[size_t(t.id)];
    });
    if (!changes) require(decode(tokenizer, tokens.data(), int64_t(tokens.size())) == text);
}
