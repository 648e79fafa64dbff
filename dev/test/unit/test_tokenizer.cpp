// test_tokenizer.cpp: compares the splitting of text into pieces with lists made by hand, and merging with the
// definition of BPE. dev/test/test_hf.py compares the same code with Hugging Face's on real and random text.
//
// The case that needs GPT-2's vocabulary reads it from ../shared/data/gpt2-bpe, and is skipped if it is absent.
#include "text/tokenizer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "base/files.h"
#include "support/refusal.h"
#include "support/skip.h"
#include "support/small_tokenizer.h"
#include "support/temporary.h"

static std::string utf8(uint32_t code) {
    const auto tail = [&](int shift) { return char(0x80 | (code >> shift & 63)); };
    if (code < 0x80) return {char(code)};
    if (code < 0x800) return {char(0xc0 | code >> 6), tail(0)};
    if (code < 0x10000) return {char(0xe0 | code >> 12), tail(6), tail(0)};
    return {char(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
}

TEST_CASE("the classes of characters agree with Unicode 16.0") {
    int count[4] = {}, wrong = 0;
    for (uint32_t code = 0; code < 0x110000; code++) {
        if (code >= 0xd800 && code < 0xe000) continue;
        const std::string c = utf8(code);
        const Char found = char_at(c.data(), c.data() + c.size()), before = char_before(c.data(), c.data() + c.size());
        wrong += !found.valid || found.bytes != int(c.size());
        wrong += before.bytes != found.bytes || before.type != found.type;
        count[found.type]++;
    }
    CHECK(wrong == 0);
    CHECK(count[LETTER] == 141028);
    CHECK(count[NUMBER] == 1911);
    CHECK(count[WHITE] == 25);
}

TEST_CASE("every byte of invalid UTF-8 is a separate character") {
    for (const char* text : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc3", "\xe0\x80\x80", "\xe0\x9f\xbf", "\xe2\x82",
                             "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x80\x80\x80", "\xf0\x9f\x98", "\xf4\x90\x80\x80",
                             "\xf5\x80\x80\x80", "\xfe", "\xff", "\xc3(", "\xe2\x28\xa1"}) {
        const Char c = char_at(text, text + strlen(text));
        CHECK_FALSE(c.valid);
        CHECK(c.bytes == 1);
        CHECK(c.type == OTHER);
    }
}

TEST_CASE("pieces follow GPT-2's pattern") {
    const std::pair<const char*, Strings> cases[] = {
        {"Hello world", {"Hello", " world"}},
        {"  x", {" ", " x"}},
        {"x  ", {"x", "  "}},
        {"x \n y", {"x", " \n", " y"}},
        {"x\n\ny", {"x", "\n", "\n", "y"}},
        {"x \ty", {"x", " ", "\t", "y"}},
        {"", {}},
        {"abc123def -- x", {"abc", "123", "def", " --", " x"}},
        // Contractions are split in lower case, with an ASCII apostrophe, at the start of a piece.
        {"I'll we've they're he's don't I'd I'm",
         {"I", "'ll", " we", "'ve", " they", "'re", " he", "'s", " don", "'t", " I", "'d", " I", "'m"}},
        {"I'LL don’t", {"I", "'", "LL", " don", "’", "t"}},
        {" 's", {" '", "s"}},
        {"a'r a'", {"a", "'", "r", " a", "'"}},
        {"a'sa'rea", {"a", "'s", "a", "'re", "a"}},
        // Combining marks end words, and numbers are a separate class.
        {"e\u0301e", {"e", "\u0301", "e"}},
        {"km² ½Ⅷ", {"km", "²", " ½Ⅷ"}},
        {"naïve Жук 漢字かな", {"naïve", " Жук", " 漢字かな"}},
        // White space is as in Unicode, without U+180E, U+200B and U+001C. An invalid byte is a character.
        {"a\u00a0b a\u3000 \u2028b", {"a", "\u00a0", "b", " a", "\u3000 ", "\u2028", "b"}},
        {"a \u180eb \u200bc \x1c", {"a", " \u180e", "b", " \u200b", "c", " \x1c"}},
        {"a \xe3\x80z", {"a", " \xe3\x80", "z"}},
    };
    for (const auto& [text, want] : cases) CHECK(pieces(text) == want);
}

TEST_CASE("runs of letters end at the right byte, wherever they start") {
    for (const std::string end : {" ", "@", "[", "`", "{", "0", "_", "\x7f", "\u0301", "\xff"})
        for (size_t length = 1; length < 40; length++)
            for (size_t before = 0; before < 3; before++) {
                const std::string text =
                    std::string(before, '-') + std::string(length, "azAZmM"[length % 6]) + end + "zz";
                const char* const p = text.data() + before;
                REQUIRE(piece_end(p, text.data() + text.size()) == p + length);
                REQUIRE(piece_end(p, p + length) == p + length);
            }
}

TEST_CASE("text split at last_safe_cut has the pieces of the whole text") {
    int cuts = 0;
    for (uint64_t seed = 0; seed < 3000; seed++) {
        const std::string text = awkward_text(seed, 12);
        const size_t cut = last_safe_cut(text);
        if (cut == 0) continue;
        cuts++;
        Strings parts = pieces(text.substr(0, cut));
        for (const std::string& piece : pieces(text.substr(cut))) parts.push_back(piece);
        REQUIRE(parts == pieces(text));
    }
    CHECK(cuts > 1500);
    const std::pair<const char*, size_t> known[] = {{"one two\n", 7}, {"one two ", 7}, {"one  \n", 3}, {"word", 0},
                                                    {" word", 0},     {"\u3000 x", 0}, {"", 0}};
    for (const auto& [text, cut] : known) CHECK(last_safe_cut(text) == cut);
}

// ---- merging

TEST_CASE("merging follows the definition of BPE for pieces of all lengths") {
    const Tokenizer overlapping = tokenizer_from_merges({{65, 66}, {64, 65}, {64, 256}});  // b c, a b, a bc
    for (const Tokenizer* tokenizer : {&small_tokenizer(), &overlapping})
        for (const char* letters : {"a", "ab", "abc", "aabbtheandofing"})
            for (int length : {1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 26, 63, 64, 65, 66, 100, 257}) {
                const Philox random{uint64_t(length), 2};
                std::string piece;
                for (int i = 0; i < length; i++) piece += letters[random(uint64_t(i))[0] % strlen(letters)];
                REQUIRE(encode(*tokenizer, piece) == merge_by_definition(*tokenizer, piece));
            }
}

TEST_CASE("any bytes have the tokens of the definition, from the cache or not, and decode to the same bytes") {
    std::string all, text;
    for (int byte = 0; byte < 256; byte++) all += char(byte);
    Strings texts = {all, " -", std::string(" -\0", 3), std::string(" -\0\0", 4)};  // distinct in the cache
    for (size_t length = 1; length < 40; length++) texts.push_back(" " + all.substr('a', length));
    for (uint64_t seed = 0; seed < 200; seed++) texts.push_back(awkward_text(seed, int(seed)));
    for (const std::string& piece : texts) text += piece;
    const Tokenizer bytes_only = tokenizer_from_merges({});
    for (const Tokenizer* tokenizer : {&small_tokenizer(), &bytes_only}) {
        std::vector<int> want;
        for (const std::string& piece : pieces(text))
            for (const int token : merge_by_definition(*tokenizer, piece)) want.push_back(token);
        CHECK(std::count(want.begin(), want.end(), tokenizer->end_of_text) == 0);
        CHECK(decode(*tokenizer, want.data(), int64_t(want.size())) == text);
        for (int cache_bits : {1, 4, 17}) {  // pieces share a slot
            Encoder encoder(*tokenizer, cache_bits);
            for (int pass = 0; pass < 2; pass++) {
                std::vector<int> got;
                encode(encoder, text, got);
                CHECK(got == want);
            }
        }
    }
}

TEST_CASE("<|endoftext|> in a text is plain text, and its token decodes to that name") {
    const Tokenizer& tokenizer = small_tokenizer();
    const std::vector<int> tokens = encode(tokenizer, "a<|endoftext|>b");
    CHECK(std::count(tokens.begin(), tokens.end(), tokenizer.end_of_text) == 0);
    CHECK(decode(tokenizer, &tokenizer.end_of_text, 1) == "<|endoftext|>");
}

// As Hugging Face's tokenizers 0.22 encodes these texts.
TEST_CASE("added tokens stand for themselves in a prompt, the longest first, and take white space") {
    Tokenizer tokenizer = small_tokenizer();
    const int first = tokenizer.vocab_size(), A = first, AB = first + 1, L = first + 2, R = first + 3, N = first + 4,
              W = first + 5;
    for (const char* content : {"<a>", "<a><b>", "<l>", "<r>", "new", "\t\t"}) tokenizer.tokens.push_back(content);
    tokenizer.added.insert(tokenizer.added.end(), {{A, "<a>"},
                                                   {AB, "<a><b>"},
                                                   {L, "<l>", true, true},
                                                   {R, "<r>", true, false, true},
                                                   {N, "new", false, false, false, true},
                                                   {W, "\t\t", true, true, true}});
    tokenizer.index_added();
    const auto with_text = [&](std::vector<std::variant<int, const char*>> parts) {
        std::vector<int> tokens;
        for (const auto& part : parts)
            if (const int* token = std::get_if<int>(&part))
                tokens.push_back(*token);
            else
                for (const int id : encode(tokenizer, std::get<const char*>(part))) tokens.push_back(id);
        return tokens;
    };
    CHECK(encode(tokenizer, "", true) == std::vector<int>{});
    CHECK(encode(tokenizer, "the <a", true) == encode(tokenizer, "the <a"));
    CHECK(encode(tokenizer, "<|endoftext|>It", true) == with_text({tokenizer.end_of_text, "It"}));
    CHECK(encode(tokenizer, "x<a><b>y<a>", true) == with_text({"x", AB, "y", A}));
    CHECK(encode(tokenizer, "x \u00a0<l> y", true) == with_text({"x", L, " y"}));
    CHECK(encode(tokenizer, "x <r> \n y", true) == with_text({"x ", R, "y"}));
    CHECK(encode(tokenizer, "<r> <l> <l>", true) == with_text({R, L, L}));
    CHECK(encode(tokenizer, "x \t\t\t\t y", true) == with_text({"x", W, "y"}));  // the first takes the second
    CHECK(encode(tokenizer, "new<a> renewed", true) == with_text({N, A, " re", N, "ed"}));
    std::map<int, int64_t> counts;
    count_special(tokenizer, "new<a> renewed<a><b>", counts);
    CHECK(counts == std::map<int, int64_t>{{A, 1}, {AB, 1}});
    CHECK(encode(tokenizer, "new<a>") == with_text({N, "<a>"}));  // special ones stay text
    std::vector<int> whole = encode(tokenizer, "<a>");
    tokenizer.added.push_back({W + 1, "<a", false});
    tokenizer.tokens.push_back("<a");
    tokenizer.index_added();
    whole.push_back(W + 1);
    CHECK(encode(tokenizer, "<a><a") == whole);  // as a whole
    tokenizer.rows = N;
    CHECK(refusal([&] { encode(tokenizer, "a new"); }) ==
          format("65 the text has \"new\", token %d, but the model has only %d; train with --vocab-size %d", N, N,
                 N + 3));
}

TEST_CASE("of many added tokens that begin alike the longest is taken") {
    for (uint64_t seed = 0; seed < 300; seed++) {
        const auto word = [&](uint64_t i, uint64_t length) {
            std::string out;
            for (uint64_t k = 0; k < length; k++) out += "abc"[Philox{seed, i}(k)[0] % 3];
            return out;
        };
        Tokenizer tokenizer = small_tokenizer();
        std::map<std::string, int> ids;
        for (uint64_t i = 0; i < 30; i++) ids.emplace(word(i, 2 + i % 5), tokenizer.vocab_size() + int(ids.size()));
        for (const auto& [content, id] : ids) tokenizer.added.push_back({id, content, false});
        tokenizer.index_added();
        std::string text = word(99, 60);
        std::vector<int> want;
        for (size_t at = 0, plain = 0; at <= text.size();) {
            size_t length = 6;
            while (length > 0 && !ids.contains(text.substr(at, length))) length--;
            if (length > 0 || at == text.size())
                for (const int id : encode(small_tokenizer(), text.substr(plain, at - plain))) want.push_back(id);
            if (length > 0) want.push_back(ids.at(text.substr(at, length))), plain = at + length;
            at += std::max<size_t>(1, length);
        }
        REQUIRE(encode(tokenizer, text) == want);
    }
}

TEST_CASE("text split at the tokenizer's last_safe_cut has the tokens of the whole, wherever added tokens are") {
    Tokenizer tokenizer = small_tokenizer();
    const Strings contents = {"New York", "York City", " x ", "<r>", "<l>", "<nr>", "a b c", "b  "};
    for (size_t i = 0; i < contents.size(); i++) {
        const std::string& content = contents[i];
        tokenizer.added.push_back(
            {tokenizer.vocab_size(), content, i % 3 == 0, content == "<l>", content.ends_with("r>"), i % 2 == 0});
        tokenizer.tokens.push_back(content);
    }
    tokenizer.index_added();
    const Strings parts = {"New York", " City", "York", "New", " ", "  ", "\n", "x",
                           "<r>",      "<l>",   "<nr>", "a b", "b", "c",  "é"};
    int cuts = 0;
    for (uint64_t seed = 0; seed < 4000; seed++) {
        std::string text;
        for (uint64_t i = 0; i < 14; i++) text += parts[Philox{seed, 3}(i)[0] % parts.size()];
        const size_t cut = last_safe_cut(tokenizer, text);
        cuts += cut > 0;
        for (const std::string more : {"", "rk City", "x ", " <l>", "c"})
            for (const bool special : {false, true}) {
                const auto tokens = [&](const std::string& t) { return encode(tokenizer, t, special); };
                std::vector<int> both = tokens(text.substr(0, cut));
                for (const int token : tokens(text.substr(cut) + more)) both.push_back(token);
                REQUIRE(both == tokens(text + more));
            }
    }
    CHECK(cuts > 1000);
}

// A quadratic algorithm would take minutes.
TEST_CASE("a long piece is encoded in linear time") {
    for (const std::string unit : {"a", " ", "\n", "漢", "ab", "-", "7", "\xff", "the", " \u00a0"}) {
        std::string text;
        while (text.size() < 300000) text += unit;
        const std::vector<int> tokens = encode(small_tokenizer(), text);
        REQUIRE(decode(small_tokenizer(), tokens.data(), int64_t(tokens.size())) == text);
        PieceCounts counts;
        counts.add_text(text);
    }
}

// ---- GPT-2's vocabulary

TEST_CASE("GPT-2: known texts have their known tokens, and merges.txt is written as it was read") {
    const std::string files = "../shared/data/gpt2-bpe";
    if (!path_exists(files)) return skip_case("GPT-2's vocabulary is not in " + files);
    const Tokenizer tokenizer = load_tokenizer(files);
    CHECK(tokenizer.vocab_size() == 50257);
    CHECK(tokenizer.end_of_text == 50256);
    const std::pair<std::string, std::vector<int>> cases[] = {
        {"Hello, I'm a language model,", {15496, 11, 314, 1101, 257, 3303, 2746, 11}},
        {"\r\n\r\nfoo", {201, 198, 201, 198, 21943}},
        {" \u180ey", {28053, 254, 236, 88}},
        {"<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29}},
    };
    for (const auto& [line, want] : cases) {
        const std::string text = line;
        CAPTURE(text);
        CHECK(encode(tokenizer, text) == want);
    }
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path);
    CHECK(sha256_of(folder / "merges.txt") == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5");
}
