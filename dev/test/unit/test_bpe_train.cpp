// test_bpe_train.cpp: compares BPE training with its definition, which counts all pairs again for each merge.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "base/common.h"
#include "support/small_tokenizer.h"
#include "support/temporary.h"
#include "text/tokenizer.h"

static Strings merged_tokens(const Tokenizer& tokenizer) {
    Strings out;
    for (const Merge& merge : tokenizer.merges) out.push_back(tokenizer.tokens[size_t(merge.token)]);
    return out;
}

// The words are "hug" 10 times, "pug" 5, "pun" 12, "bun" 4 and "hugs" 5. Pairs at the start: ug 20, pu 17, un 16,
// hu 15. The merges are u+g (20), u+n (16), h+ug (15), p+un (12), then p+ug and hug+s (5 each): the tie goes to the
// smaller left id, which is p.
TEST_CASE("training merges the most frequent pair first, and of equal pairs the one with smaller ids") {
    PieceCounts counts;
    counts.add("hug", 10), counts.add("pug", 5), counts.add("pun", 12), counts.add("bun", 4), counts.add("hugs", 5);
    CHECK(merged_tokens(train_bpe(counts, 257 + 6)) == Strings{"ug", "un", "hug", "pun", "pug", "hugs"});
    CHECK_THROWS_WITH_AS(train_bpe(counts, 257 + 8),
                         doctest::Contains("too short for a vocabulary of 265 tokens: with 264 tokens"), Error);
}

TEST_CASE("token ids are the bytes in GPT-2's order, then the merges, then <|endoftext|>") {
    const Tokenizer& tokenizer = small_tokenizer();
    for (const auto& [byte, id] :
         {std::pair{'!', 0}, {'\0', 188}, {'\n', 198}, {' ', 220}, {'\x7f', 221}, {'\xad', 255}})
        CHECK(tokenizer.byte_tokens[uint8_t(byte)] == id);
    for (size_t i = 0; i < tokenizer.merges.size(); i++) CHECK(tokenizer.merges[i].token == int(256 + i));
    CHECK(tokenizer.end_of_text == 556);
}

// The merges by the definition of BPE training, which counts every pair again for each merge.
static Strings train_by_definition(const Strings& words, int merges) {
    const Tokenizer bytes = tokenizer_from_merges({});
    std::vector<std::vector<int>> all;
    for (const std::string& word : words) all.push_back(merge_by_definition(bytes, word));
    Strings tokens(bytes.tokens.begin(), bytes.tokens.end() - 1), out;
    for (int round = 0; round < merges; round++) {
        std::map<std::pair<int, int>, int> counts;
        for (const auto& ids : all)
            for (size_t i = 0; i + 1 < ids.size(); i++) counts[{ids[i], ids[i + 1]}]++;
        const auto best = std::max_element(counts.begin(), counts.end(), [](auto& a, auto& b) {
            return a.second < b.second;  // the first of equal ones
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

TEST_CASE("training gives the merges of its definition, which counts all pairs again for each merge") {
    for (uint64_t seed = 0; seed < 20; seed++) {
        std::string text = awkward_text(seed, 500);
        for (const char byte : awkward_text(seed + 100, 100)) text += byte & 1 ? "a" : "ab";  // pairs that overlap
        PieceCounts counts;
        counts.add_text(text);
        CHECK(merged_tokens(train_bpe(counts, 257 + 60)) == train_by_definition(pieces(text), 60));
    }
}

// b + aa and ba + a both make "baa": two merges with one token id, so the 4 merges make 3 tokens.
TEST_CASE("two merges that make the same bytes share a token") {
    const Tokenizer tokenizer = tokenizer_from_merges({{64, 64}, {65, 256}, {65, 64}, {258, 64}});
    CHECK(tokenizer.merges[1].token == tokenizer.merges[3].token);
    CHECK(tokenizer.vocab_size() == 257 + 3);
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path);
    CHECK(encode(load_tokenizer(folder.path), "xbaaaxba") == encode(tokenizer, "xbaaaxba"));
}

TEST_CASE("training counts in 64 bits, and leaves out words longer than 1024 bytes") {
    PieceCounts counts;
    counts.add("xy", int64_t(3) << 32), counts.add("xz", int64_t(2) << 32), counts.add("zz", (int64_t(1) << 32) + 5);
    CHECK(merged_tokens(train_bpe(counts, 257 + 3)) == Strings{"xy", "xz", "zz"});
    PieceCounts zeros;  // pieces that differ only in the number of zero bytes at their ends
    zeros.add(std::string("x"), 1), zeros.add(std::string("x\0", 2), 5), zeros.add(std::string("x\0\0", 3), 4);
    CHECK(merged_tokens(train_bpe(zeros, 257 + 2)) == Strings{std::string("x\0", 2), std::string("x\0\0", 3)});
    CHECK(zeros.counts.size() == 3);
    PieceCounts longest, too_long;
    longest.add_text(std::string(1024, 'a')), too_long.add_text(std::string(1025, 'a'));
    CHECK(merged_tokens(train_bpe(longest, 258)) == Strings{"aa"});
    CHECK_THROWS_WITH_AS(train_bpe(too_long, 258), doctest::Contains("are in words of more than 1024 bytes"), Error);
}

TEST_CASE("training may learn no merge, and reports its progress until the end") {
    CHECK(train_bpe({}, 257).vocab_size() == 257);
    int last = 0;
    train_bpe(count_pieces({awkward_text(1, 4000)}), 257 + 100, [&](int done, int) { last = done; });
    CHECK(last == 100);
}
