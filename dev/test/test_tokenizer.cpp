// test_tokenizer.cpp: pieces against lists made by hand, merging against BPE as it is defined, files against what they
// must refuse. tokenizer_identity.py compares the same code with Hugging Face's on real and random text.
//
// What needs GPT-2's vocabulary takes it from ../shared/data/gpt2-bpe and is skipped, with a line, where that is
// absent.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../../llmc/files.h"
#include "../../llmc/random.h"
#include "../../llmc/tokenizer.h"
#include "temporary.h"

using Strings = std::vector<std::string>;

static Strings pieces(const std::string& text) {
    Strings out;
    for (const char *p = text.data(), *end = p + text.size(), *next; p < end; p = next) {
        next = piece_end(p, end);
        REQUIRE(next > p);
        REQUIRE(next <= end);
        out.push_back({p, next});
    }
    return out;
}

// Random strings over characters at which rules change.
static std::string awkward_text(uint64_t seed, int length) {
    static const Strings alphabet = {"'",
                                     "s",
                                     "t",
                                     "re",
                                     "ll",
                                     "S",
                                     " ",
                                     " ",
                                     "\n",
                                     "\r\n",
                                     "\t",
                                     "a",
                                     "b",
                                     "the",
                                     "1",
                                     "-",
                                     "_",
                                     "\u00b2",
                                     "é",
                                     "\u0301",
                                     "漢",
                                     "\u00a0",
                                     "\u0085",
                                     "\u3000",
                                     "\u2028",
                                     "\u180e",
                                     "\ufeff",
                                     "\u2019",
                                     "😀",
                                     "\xff",
                                     "\xe3\x80",
                                     "\xc0",
                                     "\xed\xa0\x80",
                                     "\xf0\x9f",
                                     "\x80",
                                     "Ж",
                                     "\x1c",
                                     "\x7f",
                                     "\u200b",
                                     "<|endoftext|>",
                                     std::string(1, '\0')};
    const Philox random{seed, 0};
    std::string text;
    for (int i = 0; i < length; i++) text += alphabet[random(uint64_t(i))[0] % alphabet.size()];
    return text;
}

static std::string random_bytes(uint64_t seed, int length) {
    const Philox random{seed, 1};
    std::string bytes;
    for (int i = 0; i < length; i++) bytes += char(random(uint64_t(i))[0] & 0xff);
    return bytes;
}

static PieceCounts count_pieces(const Strings& texts) {
    PieceCounts counts;
    for (const std::string& text : texts) counts.add_text(text);
    return counts;
}

// English enough to have 300 merges, and the awkward characters.
static const Tokenizer& small_tokenizer() {
    static const Tokenizer tokenizer = [] {
        Strings texts = {
            "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
            "must be in want of a wife. However little known the feelings or views of such a man may be "
            "on his first entering a neighbourhood, this truth is so well fixed in the minds of the "
            "surrounding families, that he is considered the rightful property of some one or other of "
            "their daughters. aaaaaaaaaaaaaaaa abababababab"};
        for (uint64_t i = 0; i < 40; i++) texts.push_back(awkward_text(i, 60));
        return train_bpe(count_pieces(texts), 257 + 300);
    }();
    return tokenizer;
}

// Nullptr, and a line, where the files are not there.
static const Tokenizer* gpt2_tokenizer() {
    static const std::string folder = "../shared/data/gpt2-bpe";
    if (!path_exists(folder)) {
        MESSAGE("skipped: GPT-2's vocabulary is not in ", folder);
        return nullptr;
    }
    static const Tokenizer tokenizer = load_tokenizer(folder);
    return &tokenizer;
}

// ---- characters and pieces

TEST_CASE("classes are those of Unicode 16.0") {
    int count[4] = {};
    for (uint32_t code = 0; code < 0x110000; code++) {
        if (code >= 0xd800 && code < 0xe000) continue;
        std::string c;
        if (code < 0x80)
            c = {char(code)};
        else if (code < 0x800)
            c = {char(0xc0 | code >> 6), char(0x80 | (code & 63))};
        else if (code < 0x10000)
            c = {char(0xe0 | code >> 12), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
        else
            c = {char(0xf0 | code >> 18), char(0x80 | (code >> 12 & 63)), char(0x80 | (code >> 6 & 63)),
                 char(0x80 | (code & 63))};
        const Char found = char_at(c.data(), c.data() + c.size());
        REQUIRE(found.valid);
        REQUIRE(found.bytes == int(c.size()));
        count[found.type]++;
        const Char before = char_before(c.data(), c.data() + c.size());
        REQUIRE(before.bytes == found.bytes);
        REQUIRE(before.type == found.type);
    }
    CHECK(count[LETTER] == 141028);
    CHECK(count[NUMBER] == 1911);
    CHECK(count[WHITE] == 25);
}

TEST_CASE("every byte of invalid UTF-8 is a character of its own") {
    for (const char* text : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc3", "\xe0\x80\x80", "\xe0\x9f\xbf", "\xe2\x82",
                             "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x80\x80\x80", "\xf0\x9f\x98", "\xf4\x90\x80\x80",
                             "\xf5\x80\x80\x80", "\xfe", "\xff", "\xc3(", "\xe2\x28\xa1"}) {
        const Char c = char_at(text, text + strlen(text));
        CHECK_FALSE(c.valid);
        CHECK(c.bytes == 1);
        CHECK(c.type == OTHER);
    }
    CHECK(pieces("a\xe3\x80"
                 "b") == Strings{"a", "\xe3\x80", "b"});
}

TEST_CASE("pieces follow GPT-2's pattern") {
    CHECK(pieces("Hello world") == Strings{"Hello", " world"});
    CHECK(pieces("  x") == Strings{" ", " x"});
    CHECK(pieces("x  ") == Strings{"x", "  "});
    CHECK(pieces("x \n y") == Strings{"x", " \n", " y"});
    CHECK(pieces("x\n\ny") == Strings{"x", "\n", "\n", "y"});
    CHECK(pieces("x \ty") == Strings{"x", " ", "\t", "y"});
    CHECK(pieces(" ") == Strings{" "});
    CHECK(pieces("").empty());
    CHECK(pieces("abc123def") == Strings{"abc", "123", "def"});
    CHECK(pieces(" 12 -- x") == Strings{" 12", " --", " x"});
    CHECK(pieces("veryverylongword'sx") == Strings{"veryverylongword", "'s", "x"});
}

TEST_CASE("contractions: lower case, ASCII apostrophe, at the start of a piece only") {
    CHECK(pieces("I'll we've they're he's don't I'd I'm") ==
          Strings{"I", "'ll", " we", "'ve", " they", "'re", " he", "'s", " don", "'t", " I", "'d", " I", "'m"});
    CHECK(pieces("I'LL") == Strings{"I", "'", "LL"});
    CHECK(pieces("don’t") == Strings{"don", "’", "t"});
    CHECK(pieces("''s") == Strings{"''", "s"});
    CHECK(pieces(" 's") == Strings{" '", "s"});
    CHECK(pieces("a'") == Strings{"a", "'"});
    CHECK(pieces("a'r") == Strings{"a", "'", "r"});
    CHECK(pieces("a'sa'rea") == Strings{"a", "'s", "a", "'re", "a"});
}

TEST_CASE("white space is Unicode's, without U+180E, U+FEFF, U+200B and U+001C") {
    for (const char* white : {"\t", "\v", "\f", "\r", "\u0085", "\u00a0", "\u1680", "\u2000", "\u200a", "\u2028",
                              "\u2029", "\u202f", "\u205f", "\u3000"}) {
        CAPTURE(std::string(white));
        CHECK(pieces(std::string("a") + white + "b") == Strings{"a", white, "b"});
        CHECK(pieces(std::string("a ") + white + "b") == Strings{"a", " ", white, "b"});
        CHECK(pieces(std::string("a") + white + " b") == Strings{"a", white, " b"});
    }
    for (const char* other : {"\u180e", "\ufeff", "\u200b", "\u2060", "\x1c", "\x1f", "\u0301"}) {
        CAPTURE(std::string(other));
        CHECK(pieces(std::string("a ") + other + "b") == Strings{"a", std::string(" ") + other, "b"});
    }
}

TEST_CASE("combining marks end words, numbers are a class of their own") {
    CHECK(pieces("e\u0301e") == Strings{"e", "\u0301", "e"});
    CHECK(pieces("km² ½Ⅷ") == Strings{"km", "²", " ½Ⅷ"});
    CHECK(pieces("naïve Жук 漢字かな") == Strings{"naïve", " Жук", " 漢字かな"});
}

TEST_CASE("runs of letters end at the right byte, wherever they start") {
    for (const std::string end : {" ", "@", "[", "`", "{", "0", "_", "\x7f", "\u0301", "\xff"})
        for (size_t length = 1; length < 40; length++)
            for (size_t before = 0; before < 3; before++) {
                const std::string word(length, "azAZmM"[length % 6]);
                const std::string text = std::string(before, '-') + word + end + "zz";
                const size_t first = before;
                const char* const p = text.data() + first;
                REQUIRE(piece_end(p, text.data() + text.size()) == p + length);
                REQUIRE(piece_end(p, p + length) == p + length);
            }
}

TEST_CASE("both sides of a safe cut have the pieces of the whole") {
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
    CHECK(last_safe_cut("one two\n") == 7);
    CHECK(last_safe_cut("one two ") == 7);
    CHECK(last_safe_cut("one  \n") == 3);
    CHECK(last_safe_cut("word") == 0);
    CHECK(last_safe_cut(" word") == 0);
    CHECK(last_safe_cut("\u3000 x") == 0);
    CHECK(last_safe_cut("") == 0);
}

TEST_CASE("text for a terminal: whole characters, no control characters") {
    TerminalText text;
    CHECK(text.add("a\xe6\xbc") == "a");
    CHECK(text.add("\xa2 b\xf0") == "漢 b");
    CHECK(text.add("\x9f\x98") == "");
    CHECK(text.add("\x80") == "😀");
    CHECK(text.add("\x1b[31m\r\n\t\x7f") == "\\x1b[31m\\x0d\n\t\\x7f");
    CHECK(text.add("\xc2\x9b"
                   "31m") == "\\x9b31m");
    CHECK(text.add("\xff\xe6x") == "\ufffd\ufffdx");
    CHECK(text.add("\xed") == "");
    CHECK(text.add("\xa0") == "\ufffd\ufffd");
    CHECK(text.add("\xe2\x82") == "");
    CHECK(text.finish() == "\ufffd\ufffd");
    CHECK(text.finish() == "");
}

// ---- merging

// BPE as it is defined: in each round the lowest rank anywhere, its leftmost place.
static std::vector<int> merge_by_definition(const Tokenizer& tokenizer, const std::string& piece) {
    std::vector<int> ids;
    for (const char byte : piece) ids.push_back(tokenizer.byte_tokens[uint8_t(byte)]);
    for (;;) {
        size_t best = 0, rank = tokenizer.merges.size();
        for (size_t i = 0; i + 1 < ids.size(); i++)
            for (size_t r = 0; r < rank; r++)
                if (tokenizer.merges[r].left == ids[i] && tokenizer.merges[r].right == ids[i + 1]) best = i, rank = r;
        if (rank == tokenizer.merges.size()) return ids;
        ids[best] = tokenizer.merges[rank].token;
        ids.erase(ids.begin() + int64_t(best) + 1);
    }
}

TEST_CASE("merging is BPE as defined, for pieces of all lengths") {
    const Tokenizer& tokenizer = small_tokenizer();
    for (const char* letters : {"a", "ab", "the", "aabbtheandofing"})
        for (int length : {1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 26, 63, 64, 65, 66, 100, 257}) {
            const Philox random{uint64_t(length), 2};
            std::string piece;
            for (int i = 0; i < length; i++) piece += letters[random(uint64_t(i))[0] % strlen(letters)];
            REQUIRE(encode(tokenizer, piece) == merge_by_definition(tokenizer, piece));
        }
}

TEST_CASE("a cached piece gives the same tokens, also when its slot is taken by others") {
    const Tokenizer& tokenizer = small_tokenizer();
    std::string text;
    for (uint64_t seed = 0; seed < 200; seed++) text += awkward_text(seed, 30);
    std::vector<int> want;
    for (const std::string& piece : pieces(text))
        for (const int token : merge_by_definition(tokenizer, piece)) want.push_back(token);
    for (int cache_bits : {1, 4, 17}) {
        Encoder encoder(tokenizer, cache_bits);
        for (int pass = 0; pass < 2; pass++) {
            std::vector<int> got;
            encode(encoder, text, got);
            REQUIRE(got == want);
        }
    }
}

TEST_CASE("pieces of every length and number of tokens, from the cache and not") {
    const Tokenizer tokenizer = tokenizer_from_merges({});
    Encoder encoder(tokenizer, 2);
    for (int pass = 0; pass < 2; pass++)
        for (int length = 1; length < 40; length++)
            for (int repeat = 0; repeat < 3; repeat++) {
                std::string piece;
                for (int i = 0; i < length; i++) piece += char('a' + i % 26);
                std::vector<int> got;
                encode(encoder, piece, got);
                REQUIRE(decode(tokenizer, got.data(), int64_t(got.size())) == piece);
            }
}

TEST_CASE("pieces that differ in trailing zero bytes are told apart") {
    const Tokenizer& tokenizer = small_tokenizer();
    Encoder encoder(tokenizer);
    for (const std::string& piece :
         {std::string("-"), std::string("-\0", 2), std::string("-\0\0", 3), std::string("-")}) {
        std::vector<int> got;
        encode(encoder, piece, got);
        CHECK(decode(tokenizer, got.data(), int64_t(got.size())) == piece);
    }
}

TEST_CASE("decoding gives back every byte") {
    const Tokenizer& tokenizer = small_tokenizer();
    Encoder encoder(tokenizer, 10);
    const auto check = [&](const std::string& text) {
        std::vector<int> tokens;
        encode(encoder, text, tokens);
        REQUIRE(decode(tokenizer, tokens.data(), int64_t(tokens.size())) == text);
        for (const int token : tokens) REQUIRE(token != tokenizer.end_of_text);
    };
    std::string all;
    for (int byte = 0; byte < 256; byte++) {
        check(std::string(1, char(byte)));
        all += char(byte);
    }
    check(all);
    for (uint64_t seed = 0; seed < 500; seed++) {
        check(random_bytes(seed, int(seed)));
        check(awkward_text(seed, int(seed)));
    }
}

TEST_CASE("the text <|endoftext|> is text, the token decodes to it") {
    const Tokenizer& tokenizer = small_tokenizer();
    const std::vector<int> tokens = encode(tokenizer, "a<|endoftext|>b");
    CHECK(std::count(tokens.begin(), tokens.end(), tokenizer.end_of_text) == 0);
    CHECK(decode(tokenizer, &tokenizer.end_of_text, 1) == "<|endoftext|>");
    CHECK(tokenizer.end_of_text == tokenizer.vocab_size() - 1);
}

TEST_CASE("decoding refuses what is no token") {
    const Tokenizer& tokenizer = small_tokenizer();
    for (const int token : {-1, tokenizer.vocab_size()})
        CHECK_THROWS_WITH_AS(decode(tokenizer, &token, 1), doctest::Contains("outside of the vocabulary of"), Error);
}

// A quadratic step would take minutes here.
TEST_CASE("pieces of a megabyte") {
    const Tokenizer* gpt2 = gpt2_tokenizer();
    for (const Tokenizer* tokenizer : {&small_tokenizer(), gpt2 ? gpt2 : &small_tokenizer()})
        for (const std::string unit : {"a", " ", "\n", "漢", "ab", "-", "7", "\xff", "the", " \u00a0"}) {
            std::string text;
            while (text.size() < 1000000) text += unit;
            const std::vector<int> tokens = encode(*tokenizer, text);
            REQUIRE(decode(*tokenizer, tokens.data(), int64_t(tokens.size())) == text);
            PieceCounts counts;
            counts.add_text(text);
        }
}

// ---- GPT-2's vocabulary

TEST_CASE("GPT-2: test vectors") {
    const Tokenizer* tokenizer = gpt2_tokenizer();
    if (!tokenizer) return;
    CHECK(tokenizer->vocab_size() == 50257);
    CHECK(tokenizer->end_of_text == 50256);
    const auto check = [&](const char* text, const std::vector<int>& want) {
        CAPTURE(std::string(text));
        CHECK(encode(*tokenizer, text) == want);
    };
    check("Hello world", {15496, 995});
    check(" Hello world", {18435, 995});
    check("Hello, I'm a language model,", {15496, 11, 314, 1101, 257, 3303, 2746, 11});
    check("I'Ll don't WE'RE we're", {40, 6, 43, 75, 836, 470, 12887, 6, 2200, 356, 821});
    check("  x", {220, 2124});
    check("x  ", {87, 220, 220});
    check("\r\n\r\nfoo", {201, 198, 201, 198, 21943});
    check(
        "a\u180e"
        "b",
        {64, 157, 254, 236, 65});
    check(" \u180ey", {28053, 254, 236, 88});
    check(
        "a\u00a0"
        "b",
        {64, 1849, 65});
    check("don’t", {9099, 447, 247, 83});
    check("<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29});
    check(
        " \ufeff"
        "ab",
        {27332, 119, 123, 397});
    check(
        "a \u0085"
        "b",
        {64, 220, 126, 227, 65});
}

static std::string sha256_of(const std::string& path) {
    std::string out;
    FILE* pipe = popen(("sha256sum '" + path + "'").c_str(), "r");
    REQUIRE(pipe);
    for (int c; (c = fgetc(pipe)) != EOF;) out += char(c);
    pclose(pipe);
    return out.substr(0, 64);
}

TEST_CASE("GPT-2: tinyshakespeare has its known tokens") {
    const Tokenizer* tokenizer = gpt2_tokenizer();
    const std::string path = "../shared/data/tinyshakespeare/input.txt";
    if (!path_exists(path)) MESSAGE("skipped: no ", path);
    if (!tokenizer || !path_exists(path)) return;
    const std::vector<int> tokens = encode(*tokenizer, read_file(path, 1 << 24));
    CHECK(tokens.size() == 338025);
    const std::vector<uint16_t> stream(tokens.begin(), tokens.end());
    TemporaryDirectory folder;
    write_bytes(folder / "tokens", {reinterpret_cast<const char*>(stream.data()), 2 * stream.size()});
    CHECK(sha256_of(folder / "tokens") == "25c01b32b32f41897a6359dd222ec114992dc30c357bcafbfe6c56672f76cd31");
}

TEST_CASE("GPT-2: merges.txt is written as it was read") {
    const Tokenizer* tokenizer = gpt2_tokenizer();
    if (!tokenizer) return;
    TemporaryDirectory folder;
    save_tokenizer(*tokenizer, folder.path, 1024);
    CHECK(sha256_of(folder / "merges.txt") == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5");
}

// ---- training

static Strings merged_tokens(const Tokenizer& tokenizer) {
    Strings out;
    for (const Merge& merge : tokenizer.merges) out.push_back(tokenizer.tokens[size_t(merge.token)]);
    return out;
}

// Counts: "hug" 10, "pug" 5, "pun" 12, "bun" 4, "hugs" 5. Pairs: ug 20, un 16, hu 15, pu 17. So u+g; then un 16 = u+n;
// then h+ug 15; then p+un 12; then hug+s 5 and p+ug 5: the tie goes to the smaller left id, p.
TEST_CASE("training: the most frequent pair, ties by the smaller ids") {
    PieceCounts counts;
    counts.add("hug", 10), counts.add("pug", 5), counts.add("pun", 12), counts.add("bun", 4), counts.add("hugs", 5);
    CHECK(merged_tokens(train_bpe(counts, 257 + 6)) == Strings{"ug", "un", "hug", "pun", "pug", "hugs"});
    CHECK_THROWS_WITH_AS(train_bpe(counts, 257 + 8),
                         doctest::Contains("too short for a vocabulary of 265 tokens: after 264"), Error);
}

// aaaa + a: pairs overlap, but a merge takes each byte once. "aaaaa" is (aa)(aa)a, then aa+aa (1 place), tied with aa+a
// (1 place); a < aa as ids, so the pair (aa, a) comes first.
TEST_CASE("training: runs of one letter") {
    PieceCounts counts;
    counts.add("aaaaa", 7);
    CHECK(merged_tokens(train_bpe(counts, 257 + 3)) == Strings{"aa", "aaa", "aaaaa"});
}

TEST_CASE("training: ids are the bytes in GPT-2's order, the merges, <|endoftext|>") {
    const Tokenizer& tokenizer = small_tokenizer();
    CHECK(tokenizer.vocab_size() == 557);
    CHECK(tokenizer.byte_tokens[uint8_t('!')] == 0);
    CHECK(tokenizer.byte_tokens[0] == 188);
    CHECK(tokenizer.byte_tokens[uint8_t('\n')] == 198);
    CHECK(tokenizer.byte_tokens[uint8_t(' ')] == 220);
    CHECK(tokenizer.byte_tokens[127] == 221);
    CHECK(tokenizer.byte_tokens[173] == 255);
    for (size_t i = 0; i < tokenizer.merges.size(); i++) CHECK(tokenizer.merges[i].token == int(256 + i));
    CHECK(tokenizer.tokens.back() == "<|endoftext|>");
}

// The definition, by counting every pair again in each round.
static Strings train_by_definition(const Strings& words, int merges) {
    const Tokenizer bytes = tokenizer_from_merges({});
    std::vector<std::vector<int>> all;
    for (const std::string& word : words) all.push_back(merge_by_definition(bytes, word));
    Strings tokens(bytes.tokens.begin(), bytes.tokens.end() - 1), out;
    for (int round = 0; round < merges; round++) {
        std::vector<std::pair<std::pair<int, int>, int>> counts;
        for (const auto& ids : all)
            for (size_t i = 0; i + 1 < ids.size(); i++) {
                const std::pair pair{ids[i], ids[i + 1]};
                const auto found = std::find_if(counts.begin(), counts.end(), [&](auto& c) { return c.first == pair; });
                found == counts.end() ? counts.push_back({pair, 1}) : void(found->second++);
            }
        const auto best = std::min_element(counts.begin(), counts.end(), [](auto& a, auto& b) {
            return a.second != b.second ? a.second > b.second : a.first < b.first;
        });
        const auto [left, right] = best->first;
        out.push_back(tokens[size_t(left)] + tokens[size_t(right)]);
        tokens.push_back(out.back());
        for (auto& ids : all)
            for (size_t i = 0; i + 1 < ids.size(); i++)
                if (ids[i] == left && ids[i + 1] == right)
                    ids[i] = int(tokens.size()) - 1, ids.erase(ids.begin() + int64_t(i) + 1);
    }
    return out;
}

TEST_CASE("training is what counting again in each round gives") {
    for (uint64_t seed = 0; seed < 20; seed++) {
        const std::string text = awkward_text(seed, 600);
        PieceCounts counts;
        counts.add_text(text);
        CHECK(merged_tokens(train_bpe(counts, 257 + 60)) == train_by_definition(pieces(text), 60));
    }
}

TEST_CASE("training does not depend on the order of texts, nor on how they were shared out") {
    Strings texts;
    for (uint64_t i = 0; i < 60; i++)
        texts.push_back(awkward_text(i, 200) + "a piece of more than sixteen: incomprehensibilities");
    const Strings want = merged_tokens(train_bpe(count_pieces(texts), 700));
    std::reverse(texts.begin(), texts.end());
    CHECK(merged_tokens(train_bpe(count_pieces(texts), 700)) == want);
    PieceCounts halves[2];
    for (size_t i = 0; i < texts.size(); i++) halves[i % 2].add_text(texts[i]);
    halves[0].add(halves[1]);
    CHECK(merged_tokens(train_bpe(halves[0], 700)) == want);
}

// b + aa and ba + a both make "baa". One id, two merges, and the vocabulary still has the size that was asked for.
TEST_CASE("training: two merges may make the same bytes") {
    const Tokenizer tokenizer =
        tokenizer_from_merges({{64, 64}, {65, 256}, {65, 64}, {258, 64}});  // a a, b aa, b a, ba a
    CHECK(tokenizer.merges[1].token == tokenizer.merges[3].token);
    CHECK(tokenizer.vocab_size() == 257 + 3);
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path, 64);
    CHECK(encode(load_tokenizer(folder.path), "xbaaaxba") == encode(tokenizer, "xbaaaxba"));
}

TEST_CASE("training counts in 64 bits, and leaves out pieces above 1024 bytes") {
    PieceCounts counts;
    counts.add("xy", int64_t(3) << 32), counts.add("xz", int64_t(2) << 32), counts.add("zz", (int64_t(1) << 32) + 5);
    CHECK(merged_tokens(train_bpe(counts, 257 + 3)) == Strings{"xy", "xz", "zz"});
    PieceCounts zeros;  // as keys, they differ in their lengths only
    zeros.add(std::string("x"), 1), zeros.add(std::string("x\0", 2), 5), zeros.add(std::string("x\0\0", 3), 4);
    CHECK(merged_tokens(train_bpe(zeros, 257 + 2)) == Strings{std::string("x\0", 2), std::string("x\0\0", 3)});
    CHECK(zeros.used == 3);
    PieceCounts longest, too_long;
    longest.add_text(std::string(1024, 'a')), too_long.add_text(std::string(1025, 'a'));
    CHECK(merged_tokens(train_bpe(longest, 258)) == Strings{"aa"});
    CHECK_THROWS_WITH_AS(train_bpe(too_long, 258), doctest::Contains("too short"), Error);
}

TEST_CASE("training refuses vocabularies that cannot be") {
    for (int size : {-1, 0, 256, MAX_VOCAB_SIZE + 1})
        CHECK_THROWS_WITH_AS(train_bpe({}, size), doctest::Contains("cannot be trained"), Error);
    CHECK(train_bpe({}, 257).vocab_size() == 257);
}

TEST_CASE("training tells how far it is") {
    std::vector<int> seen;
    PieceCounts counts;
    counts.add_text(awkward_text(1, 4000));
    train_bpe(counts, 257 + 100, [&](int done, int total) {
        CHECK(total == 100);
        seen.push_back(done);
    });
    CHECK(seen.front() == 1);
    CHECK(seen.back() == 100);
}

// ---- files

static void check_equal(const Tokenizer& got, const Tokenizer& want) {
    CHECK(got.tokens == want.tokens);
    CHECK(got.specials == want.specials);
    CHECK(got.end_of_text == want.end_of_text);
    CHECK(std::equal(got.byte_tokens, got.byte_tokens + 256, want.byte_tokens));
    REQUIRE(got.merges.size() == want.merges.size());
    for (size_t i = 0; i < want.merges.size(); i++) {
        CHECK(got.merges[i].left == want.merges[i].left);
        CHECK(got.merges[i].right == want.merges[i].right);
        CHECK(got.merges[i].token == want.merges[i].token);
    }
}

TEST_CASE("what is saved is loaded: directory, tokenizer.json, vocab.json, merges.txt, OpenAI's names") {
    const Tokenizer& tokenizer = small_tokenizer();
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path, 128);
    for (const std::string name : {"", "/tokenizer.json", "/vocab.json", "/merges.txt"})
        check_equal(load_tokenizer(folder.path + name), tokenizer);
    std::filesystem::create_directory(folder / "openai");
    std::filesystem::rename(folder / "vocab.json", folder / "openai/encoder.json");
    std::filesystem::rename(folder / "merges.txt", folder / "openai/vocab.bpe");
    for (const std::string name : {"", "/encoder.json", "/vocab.bpe"})
        check_equal(load_tokenizer((folder / "openai") + name), tokenizer);
    CHECK(read_bytes(folder / "tokenizer_config.json").find("\"model_max_length\": 128") != std::string::npos);
}

TEST_CASE("merges.txt: without a last newline, with Windows line ends, without its first line") {
    const Tokenizer& tokenizer = small_tokenizer();
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path, 128);
    const std::string vocab = read_bytes(folder / "vocab.json"), merges = read_bytes(folder / "merges.txt");
    check_equal(parse_vocab_and_merges(vocab, merges.substr(0, merges.size() - 1), "test"), tokenizer);
    check_equal(parse_vocab_and_merges(vocab, merges.substr(merges.find('\n') + 1), "test"), tokenizer);
    std::string windows;
    for (const char c : merges) windows += c == '\n' ? "\r\n" : std::string(1, c);
    check_equal(parse_vocab_and_merges(vocab, windows, "test"), tokenizer);
}

static std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

static std::string small_json() {
    TemporaryDirectory folder;
    save_tokenizer(tokenizer_from_merges({{64, 65}, {256, 66}}), folder.path, 128);  // a b, ab c
    return read_bytes(folder / "tokenizer.json");
}

TEST_CASE("tokenizer.json: merges as pairs, and fields that are absent") {
    const std::string text = small_json();
    const Tokenizer want = parse_tokenizer_json(text, "test");
    CHECK(encode(want, "abcab") == std::vector<int>{257, 256});
    std::string pairs = replaced(text, "\"a b\"", "[\"a\", \"b\"]");
    check_equal(parse_tokenizer_json(replaced(pairs, "\"ab c\"", "[\"ab\", \"c\"]"), "test"), want);
    for (const char* field :
         {"    \"continuing_subword_prefix\": \"\",\n", "    \"ignore_merges\": false,\n",
          "    \"byte_fallback\": false,\n", "    \"type\": \"BPE\",\n", "  \"normalizer\": null,\n"})
        check_equal(parse_tokenizer_json(replaced(text, field, ""), "test"), want);
}

TEST_CASE("tokenizer.json: other added tokens are kept and never encoded") {
    std::string text = replaced(small_json(), "\"<|endoftext|>\": 258", "\"<|endoftext|>\": 258,\n\"Ġ <pad>\": 259");
    const std::string pad = R"({"id": 259, "content": "Ġ <pad>", "special": true},)";
    text = replaced(text, "\"added_tokens\": [", "\"added_tokens\": [" + pad + R"({"id": 260, "content": "new"},)");
    const Tokenizer tokenizer = parse_tokenizer_json(text, "test");
    CHECK(tokenizer.specials == std::vector<int>{258, 259, 260});
    CHECK(tokenizer.tokens[259] == "Ġ <pad>");
    CHECK(tokenizer.tokens[260] == "new");
    CHECK(encode(tokenizer, "new").size() == 3);
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path, 128);
    check_equal(load_tokenizer(folder.path), tokenizer);
}

TEST_CASE("tokenizer.json: what is refused, and how") {
    const std::string text = small_json();
    struct Broken {
        const char *from, *to, *message;
    };
    const Broken cases[] = {
        {"\"version\"", "version", "test: is not valid JSON"},
        {"\"model\"", "\"madel\"", "is no tokenizer.json"},
        {"\"merges\": [", "\"merges\": 7, \"x\": [", "is no tokenizer.json"},
        {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", "normalizer is {\"type\":\"NFC\"}; only null"},
        {"\"type\": \"ByteLevel\"", "\"type\": \"Metaspace\"", "only GPT-2's is supported"},
        {"\"add_prefix_space\": false", "\"add_prefix_space\": true", "only GPT-2's is supported"},
        {"\"use_regex\": true", "\"use_regex\": false", "only GPT-2's is supported"},
        {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", "type is \"Unigram\"; only \"BPE\""},
        {"\"dropout\": null", "\"dropout\": 0.1", "dropout is 0.1"},
        {"\"end_of_word_suffix\": \"\"", "\"end_of_word_suffix\": \"</w>\"", "end_of_word_suffix is \"</w>\""},
        {"\"ignore_merges\": false", "\"ignore_merges\": true", "ignore_merges is true"},
        {"\"byte_fallback\": false", "\"byte_fallback\": true", "byte_fallback is true"},
        {"\"!\": 0", "\"!\": -1", "token \"!\" has the id -1"},
        {"\"!\": 0", "\"!\": 0.5", "token \"!\" has the id 0.5"},
        {"\"!\": 0", "\"!\": 1e300", "has the id 1e+300"},
        {"\"!\": 0", "\"!\": 1048576", "has the id 1048576"},
        {"\"!\": 0", "\"!\": \"0\"", "has the id \"0\""},
        {"\"!\": 0", "\"!\": 1", "two tokens have the id 1"},
        {"\"!\": 0", "\"!\": 300", "\"!\" has the id 300: ids must be 0 to 258 without a gap"},
        {"\"!\": 0", "\"!!\": 0", "there is no token for the byte 33"},
        {"\"!\": 0", "\"! \": 0", "token 0, \"! \", has a character that stands for no byte"},
        {"\"!\": 0", "\"漢\": 0", "has a character that stands for no byte"},
        {"\"!\": 0", "\"!\": 0, \"!\": 0", "the key \"!\" occurs twice"},
        {"\"<|endoftext|>\": 258", "\"<|eot|>\": 258", "two tokens have the id 258"},
        {"\"content\": \"<|endoftext|>\"", "\"content\": 7", "an added token has no content"},
        {"\"id\": 258", "\"id\": 257", "has the id 257, in the vocabulary it has 258"},
        {"\"id\": 258", "\"id\": -258", "an added token has no content or no id"},
        {"\"added_tokens\": [", "\"added_tokens\": [7,", "an added token has no content"},
        {"\"added_tokens\": [", "\"added_tokens\": 7, \"x\": [", "added_tokens is no list"},
        {"\"added_tokens\": [", "\"added_tokens\": [{\"id\": 0, \"content\": \"!\"},",
         "there is no token for the byte 33"},
        {"\"a b\"", "\"a  b\"", "merge 1 is \"a  b\", not two tokens and a space"},
        {"\"a b\"", "\"ab\"", "merge 1 is \"ab\", not two tokens and a space"},
        {"\"a b\"", "\" b\"", "not two tokens and a space"},
        {"\"a b\"", "\"a q\"", "merge 1 needs the token \"aq\", which is not in the vocabulary"},
        {"\"a b\"", "\"xx b\"", "merge 1 needs the token \"xx\""},
        {"\"a b\"", "[\"a\"]", "merge 1 is [\"a\"], not a pair of tokens"},
        {"\"a b\"", "[\"a\", 7]", "not a pair of tokens"},
        {"\"a b\"", "7", "merge 1 is 7, not a pair of tokens"},
        {"\"a b\"", "\"a b\", \"a b\"", "merge 2 is there twice"},
        {"\"ab c\"", "\"<|endoftex t|>\"", "merge 2 needs the token \"<|endoftex\""},
        {"\"ab c\"", "[\"<|endoftext|>\", \"\"]", "merge 2 needs the token \"\""},
    };
    for (const Broken& broken : cases) {
        CAPTURE(std::string(broken.to));
        const std::string wrong = replaced(text, broken.from, broken.to);
        CHECK_THROWS_WITH_AS(parse_tokenizer_json(wrong, "test"), doctest::Contains(broken.message), Error);
        try {
            parse_tokenizer_json(wrong, "test");
        } catch (const Error& error) {
            CHECK(error.exit_code == EXIT_BAD_DATA);
            CHECK(std::string(error.what()).starts_with("test: "));
        }
    }
}

TEST_CASE("tokenizer.json: a token of 64 KiB is taken, a longer one refused") {
    const std::string text = small_json();
    for (const size_t length : {65536, 65537}) {
        const std::string token = "\"abc\": 257, \"" + std::string(length, 'x') + "\": 259";
        const std::string wrong = replaced(text, "\"abc\": 257", token);
        if (length == 65536)
            CHECK(parse_tokenizer_json(wrong, "test").tokens[259].size() == length);
        else
            CHECK_THROWS_WITH_AS(parse_tokenizer_json(wrong, "test"),
                                 "test: token 259 has 65537 bytes; at most 65536 are "
                                 "supported",
                                 Error);
    }
}

TEST_CASE("tokenizer.json: cut off anywhere, it is refused") {
    const std::string text = small_json();
    for (size_t length = 0; length + 2 < text.size(); length += 7)
        CHECK_THROWS_AS(parse_tokenizer_json(text.substr(0, length), "test"), Error);
}

TEST_CASE("a tokenizer that is not there") {
    TemporaryDirectory folder;
    const auto code_of = [](const std::string& path) {
        try {
            load_tokenizer(path);
        } catch (const Error& error) {
            return error.exit_code;
        }
        return 0;
    };
    CHECK(code_of(folder / "missing") == EXIT_NO_INPUT);
    CHECK(code_of(folder / "tokenizer.json") == EXIT_NO_INPUT);
    CHECK_THROWS_WITH_AS(load_tokenizer(folder.path), doctest::Contains("neither tokenizer.json, nor vocab.json"),
                         Error);
    write_bytes(folder / "vocab.json", "{}");
    CHECK_THROWS_WITH_AS(load_tokenizer(folder.path), doctest::Contains("merges.txt: is missing"), Error);
    write_bytes(folder / "merges.txt", "");
    CHECK_THROWS_WITH_AS(load_tokenizer(folder.path), doctest::Contains("there is no token <|endoftext|>"), Error);
    CHECK(code_of(folder.path) == EXIT_BAD_DATA);
}
