// small_tokenizer.h: a small trained vocabulary, texts that are hard to split, and BPE by its definition.
#pragma once
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "base/random.h"
#include "text/tokenizer.h"

using Strings = std::vector<std::string>;

inline Strings pieces(const std::string& text) {
    Strings out;
    for (const char *p = text.data(), *end = p + text.size(), *next; p < end; p = next) {
        next = piece_end(p, end);
        REQUIRE(next > p);
        REQUIRE(next <= end);
        out.push_back({p, next});
    }
    return out;
}

// A random string of characters for which the rules of splitting differ.
inline std::string awkward_text(uint64_t seed, int length) {
    // clang-format off
    static const Strings alphabet = {
        "'", "s", "t", "re", "ll", "S", " ", " ", "\n", "\r\n", "\t", "a", "b", "the", "1", "-", "_", "\u00b2", "é",
        "\u0301", "漢", "\u00a0", "\u0085", "\u3000", "\u2028", "\u180e", "\ufeff", "\u2019", "😀", "\xff", "\xe3\x80",
        "\xc0", "\xed\xa0\x80", "\xf0\x9f", "\x80", "Ж", "\x1c", "\x7f", "\u200b", "<|endoftext|>",
        std::string(1, '\0')};
    // clang-format on
    const Philox random{seed, 0};
    std::string text;
    for (int i = 0; i < length; i++) text += alphabet[random(uint64_t(i))[0] % alphabet.size()];
    return text;
}

inline PieceCounts count_pieces(const Strings& texts) {
    PieceCounts counts;
    for (const std::string& text : texts) counts.add_text(text);
    return counts;
}

// A tokenizer trained on some English, for 300 merges, and on awkward characters.
inline const Tokenizer& small_tokenizer() {
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

// BPE by its definition: each round merges the leftmost occurrence of the pair with the lowest rank.
inline std::vector<int> merge_by_definition(const Tokenizer& tokenizer, const std::string& piece) {
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
