// bpe_train.cpp: trains a BPE vocabulary: counts the pieces of a text and learns merges from the counts.
//
// A merge touches only the words that contain its pair. Each pair has its count and a list of the words in which it has
// occurred (a word that has lost the pair since is scanned without effect). A heap holds every pair with an upper
// bound of its count: a pair is pushed whenever its count has risen, and between pushes the count only falls. To find
// the best pair, the trainer takes the top of the heap. If the bound of this pair is higher than its count, the trainer
// pushes the pair back with its count; otherwise the pair is the best one.
//
// Hugging Face's BpeTrainer uses the same algorithm and tie-break, so the merges are equal, with three exceptions.
// BpeTrainer trains on pieces of any length (here: up to PieceCounts::MAX_PIECE). It counts in int32. If two merges
// make the same bytes (aa + a, a + aa), which is rare in text, a pair with the common token has two entries in
// BpeTrainer's queue, each for a part of the words, in undefined order; here the pair has one entry.
#include <algorithm>
#include <queue>

#include "base/common.h"
#include "text/tokenizer.h"

void PieceCounts::add(std::string_view piece, int64_t count) {
    if (piece.size() > size_t(MAX_PIECE)) {
        bytes_left_out += int64_t(piece.size()) * count;
    } else if (const auto found = counts.find(piece); found != counts.end()) {
        found->second += count;
    } else if (!piece.empty()) {
        counts.emplace(piece, count);
    }
}

void PieceCounts::add_text(std::string_view text) {
    const char* const end = text.data() + text.size();
    for (const char *p = text.data(), *next; p < end; p = next) {
        next = piece_end(p, end);
        add({p, size_t(next - p)}, 1);
    }
}

void PieceCounts::add(const PieceCounts& other) {
    for (const auto& [piece, count] : other.counts) add(piece, count);
    bytes_left_out += other.bytes_left_out;
}

// A distinct piece: its tokens, of which merges leave fewer, and how often it occurs.
struct Word {
    std::vector<int> tokens;
    int64_t count;
};

struct Pair {
    int left, right;
    int64_t count = 0;            // over all words
    std::vector<int> words = {};  // words in which the pair has occurred
    int token = -1;               // the token of its merge; -1: not merged yet
    int round = -1;               // the last round that raised its count
};

// An entry of the heap: bound of the count, -left, -right, number of the pair. The greatest has the smallest tokens.
using Candidate = std::tuple<int64_t, int, int, int>;

struct Trainer {
    std::vector<Word> words;
    std::vector<Pair> pairs;
    std::unordered_map<uint64_t, int> numbers;  // index of a pair by its tokens
    std::priority_queue<Candidate> queue;
    std::vector<int> raised;  // pairs whose counts this round has raised; pushed into the heap when the round ends
    int round = 0;

    Pair& pair(int number) { return pairs[size_t(number)]; }

    int find_or_add(int left, int right) {
        const auto [found, is_new] = numbers.emplace(uint64_t(left) << 32 | uint64_t(right), int(pairs.size()));
        if (is_new) pairs.push_back({left, right});
        return found->second;
    }

    void remove_occurrence(int left, int right, int64_t count) { pair(find_or_add(left, right)).count -= count; }

    void add_occurrence(int left, int right, int word) {
        const int number = find_or_add(left, right);
        Pair& p = pair(number);
        p.count += words[size_t(word)].count;
        if (p.words.empty() || p.words.back() != word) p.words.push_back(word);
        if (p.round != round) raised.push_back(number);
        p.round = round;
    }

    void push(int number) {
        const Pair& p = pair(number);
        if (p.count > 0) queue.push({p.count, -p.left, -p.right, number});
    }

    void push_raised() {
        for (const int number : raised) push(number);
        raised.clear();
        round++;
    }

    void add_words(const PieceCounts& pieces, const int* byte_tokens) {
        for (const auto& [piece, count] : pieces.counts) {
            const int number = int(words.size());
            std::vector<int>& ids = words.emplace_back(Word{{}, count}).tokens;
            for (const char byte : piece) ids.push_back(byte_tokens[uint8_t(byte)]);
            for (size_t i = 0; i + 1 < ids.size(); i++) add_occurrence(ids[i], ids[i + 1], number);
        }
        push_raised();
    }

    // Returns the pair with the highest count; -1: no pair is left.
    int take_best() {
        while (!queue.empty()) {
            const auto [bound, left, right, number] = queue.top();
            queue.pop();
            if (bound == pair(number).count) return number;
            push(number);
        }
        return -1;
    }

    // Merges the pair in a word, from left to right, and updates the counts of the neighbouring pairs.
    void merge_word(int word, int left, int right, int token) {
        auto& [ids, count] = words[size_t(word)];
        size_t kept = 0;
        for (size_t i = 0; i < ids.size(); i++) {
            if (i + 1 == ids.size() || ids[i] != left || ids[i + 1] != right) {
                ids[kept++] = ids[i];
                continue;
            }
            i++;  // now at the right token of the pair
            if (kept > 0) {
                remove_occurrence(ids[kept - 1], left, count);
                add_occurrence(ids[kept - 1], token, word);
            }
            if (i + 1 < ids.size()) {
                remove_occurrence(right, ids[i + 1], count);
                add_occurrence(token, ids[i + 1], word);
            }
            ids[kept++] = token;
        }
        ids.resize(kept);
    }

    void merge(int number, int token) {
        const int left = pair(number).left, right = pair(number).right;
        // The list is moved out of the pair, because new pairs may move the pair in memory.
        const std::vector<int> affected_words = std::move(pair(number).words);
        for (const int word : affected_words) merge_word(word, left, right, token);
        pair(number).count = 0;
        pair(number).token = token;
        push_raised();
    }
};

Tokenizer train_bpe(const PieceCounts& counts, int vocab_size,
                    const std::function<void(int done, int total)>& progress) {
    const Tokenizer bytes = tokenizer_from_merges({});
    std::vector<std::string> tokens(bytes.tokens.begin(), bytes.tokens.end() - 1);  // without <|endoftext|>
    std::unordered_map<std::string, int> ids;
    for (size_t id = 0; id < tokens.size(); id++) ids.emplace(tokens[id], int(id));

    Trainer trainer;
    trainer.add_words(counts, bytes.byte_tokens);
    std::vector<std::pair<int, int>> merges;
    const int total = vocab_size - MIN_VOCAB_SIZE;
    for (int done = 0; done < total; done = int(tokens.size()) - (MIN_VOCAB_SIZE - 1)) {
        const int best = trainer.take_best();
        if (best < 0)
            fail(EXIT_BAD_DATA,
                 "the text is too short for a vocabulary of %d tokens: with %d tokens every word is a single token, so "
                 "no pair is left to merge; give more text, or --train-bpe %d (%s bytes are in words of more than %d "
                 "bytes, which are ignored)",
                 vocab_size, done + MIN_VOCAB_SIZE, done + MIN_VOCAB_SIZE, with_commas(counts.bytes_left_out).c_str(),
                 PieceCounts::MAX_PIECE);
        const Pair& pair = trainer.pair(best);
        int token = pair.token;  // not -1: the pair was merged before, and another merge has made its tokens again
        if (token < 0) {
            const std::string joined = tokens[size_t(pair.left)] + tokens[size_t(pair.right)];
            const auto [place, is_new] = ids.emplace(joined, int(tokens.size()));
            if (is_new) tokens.push_back(joined);
            token = place->second;
            merges.push_back({pair.left, pair.right});
        }
        trainer.merge(best, token);
        if (progress && (done % 256 == 0 || done + 1 == total)) progress(done + 1, total);
    }
    return tokenizer_from_merges(merges);
}
