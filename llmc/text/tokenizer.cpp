// tokenizer.cpp: encodes text to tokens and decodes tokens to text.
//
// Encoding a piece costs three things: finding its end, hashing it, and reading one cache line of a direct-mapped
// table of pieces seen before, which is replaced on a miss. On English text nearly all pieces are hits. Other pieces
// are merged: pieces up to 64 bytes by a scan for the lowest rank in each round, longer ones with a heap, so that a
// piece of a million letters takes n log n time.
#include "text/tokenizer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <queue>

#include "base/common.h"
#include "base/files.h"

static_assert(sizeof(Encoder::CachedPiece) == 64);

static constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;  // 2^64 / the golden ratio: the high bits of a product are mixed

static uint64_t pair_key(int left, int right) { return uint64_t(left) << 20 | uint64_t(right); }

void PairRanks::build(const std::vector<Merge>& merges) {
    int bits = 4;
    while (size_t(1) << bits < 2 * merges.size()) bits++;
    slots.assign(size_t(1) << bits, ~uint64_t(0));
    shift = 64 - bits;
    for (size_t rank = 0; rank < merges.size(); rank++) {
        const uint64_t key = pair_key(merges[rank].left, merges[rank].right);
        size_t i = key * GOLDEN >> shift;
        while (slots[i] != ~uint64_t(0)) i = (i + 1) & (slots.size() - 1);
        slots[i] = key << 20 | rank;
    }
}

int PairRanks::rank(int left, int right) const {
    const uint64_t key = pair_key(left, right);
    for (size_t i = key * GOLDEN >> shift;; i = (i + 1) & (slots.size() - 1)) {
        if (slots[i] >> 20 == key) return int(slots[i] & 0xfffff);
        if (slots[i] == ~uint64_t(0)) return NONE;
    }
}

// Merges the tokens ids[0..n) in place; returns how many tokens remain. Takes time quadratic in n.
static int merge_short(const Tokenizer& tokenizer, int* ids, int n) {
    int ranks[64];
    for (int i = 0; i + 1 < n; i++) ranks[i] = tokenizer.ranks.rank(ids[i], ids[i + 1]);
    while (n > 1) {
        const int i = int(std::min_element(ranks, ranks + n - 1) - ranks);  // the leftmost pair of the lowest rank
        if (ranks[i] == PairRanks::NONE) break;
        ids[i] = tokenizer.merges[size_t(ranks[i])].token;
        n--;
        std::copy(ids + i + 2, ids + n + 1, ids + i + 1);
        if (i + 1 < n) {
            std::copy(ranks + i + 2, ranks + n, ranks + i + 1);
            ranks[i] = tokenizer.ranks.rank(ids[i], ids[i + 1]);
        }
        if (i > 0) ranks[i - 1] = tokenizer.ranks.rank(ids[i - 1], ids[i]);
    }
    return n;
}

// Merges ids like merge_short, in n log n time: with a heap of (rank, position) over a linked list of the tokens. A
// heap entry is stale if the pair at its position has another rank by now.
static void merge_long(const Tokenizer& tokenizer, std::vector<int>& ids) {
    const int n = int(ids.size());
    std::vector<int> next(ids.size()), previous(ids.size()), ranks(ids.size());
    std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue;
    const auto refresh = [&](int i) {
        ranks[i] = next[i] < n ? tokenizer.ranks.rank(ids[i], ids[next[i]]) : PairRanks::NONE;
        if (ranks[i] != PairRanks::NONE) queue.push(uint64_t(ranks[i]) << 32 | uint64_t(i));
    };
    for (int i = 0; i < n; i++) {
        next[i] = i + 1;
        previous[i] = i - 1;
        refresh(i);
    }
    while (!queue.empty()) {
        const int i = int(queue.top() & 0xffffffff), rank = int(queue.top() >> 32);
        queue.pop();
        if (ranks[i] != rank) continue;
        const int right = next[i];
        ids[i] = tokenizer.merges[size_t(rank)].token;
        ranks[right] = PairRanks::NONE;
        next[i] = next[right];
        if (next[i] < n) previous[next[i]] = i;
        refresh(i);
        if (previous[i] >= 0) refresh(previous[i]);
    }
    int kept = 0;
    for (int i = 0; i < n; i = next[i]) ids[kept++] = ids[i];
    ids.resize(size_t(kept));
}

Encoder::Encoder(const Tokenizer& tokenizer, int cache_bits)
    : tokenizer(tokenizer), cache(size_t(1) << cache_bits), cache_shift(64 - cache_bits) {}

// Packs the bytes of a piece of at most 24 bytes, padded with zeros.
static void load_key(uint64_t key[3], const char* p, size_t length, const char* end) {
    if (end - p < 24) {
        key[0] = key[1] = key[2] = 0;
        memcpy(key, p, length);
        return;
    }
    memcpy(key, p, 24);
    const auto low_bytes = [](uint64_t word, size_t bytes) { return word & (~uint64_t(0) >> (64 - 8 * bytes)); };
    if (length <= 8) {
        key[0] = low_bytes(key[0], length);
        key[1] = key[2] = 0;
    } else if (length <= 16) {
        key[1] = low_bytes(key[1], length - 8);
        key[2] = 0;
    } else {
        key[2] = low_bytes(key[2], length - 16);
    }
}

static uint64_t hash_key(const uint64_t key[3]) {
    uint64_t h = (key[0] ^ key[1] * 0xff51afd7ed558ccd ^ key[2] * 0xc4ceb9fe1a85ec53) * GOLDEN;
    return (h ^ h >> 32) * GOLDEN;
}

// Encodes a piece into encoder.piece.
static void merge_piece(Encoder& encoder, std::string_view piece) {
    ENSURE(piece.size() <= size_t(std::numeric_limits<int>::max()),
           "the text has %zu bytes without white space; at most %d can be encoded", piece.size(),
           std::numeric_limits<int>::max());
    std::vector<int>& ids = encoder.piece;
    ids.resize(piece.size());
    for (size_t i = 0; i < piece.size(); i++) ids[i] = encoder.tokenizer.byte_tokens[uint8_t(piece[i])];
    if (ids.size() > 64)
        merge_long(encoder.tokenizer, ids);
    else
        ids.resize(size_t(merge_short(encoder.tokenizer, ids.data(), int(ids.size()))));
}

// Encodes a text without added tokens.
static void encode_plain(Encoder& encoder, std::string_view text, std::vector<int>& out) {
    using CachedPiece = Encoder::CachedPiece;
    constexpr size_t max_cached = sizeof(CachedPiece::key), max_tokens = std::size(CachedPiece().tokens);
    int block[1024];  // tokens that are appended to `out` together: cheaper than a push_back for each token
    size_t filled = 0;
    const auto flush = [&] {
        out.insert(out.end(), block, block + filled);
        filled = 0;
    };
    const char* const end = text.data() + text.size();
    for (const char *p = text.data(), *next; p < end; p = next) {
        next = piece_end(p, end);
        const size_t length = size_t(next - p);
        if (filled + max_tokens > std::size(block)) flush();
        if (length <= max_cached) {
            uint64_t key[3];
            load_key(key, p, length, end);
            CachedPiece& cached = encoder.cache[hash_key(key) >> encoder.cache_shift];
            if (cached.length == length && memcmp(cached.key, key, sizeof(key)) == 0) {
                memcpy(block + filled, cached.tokens, sizeof(cached.tokens));  // all slots: a constant size is faster
                filled += cached.count;
                continue;
            }
            merge_piece(encoder, {p, length});
            if (encoder.piece.size() <= max_tokens) {
                memcpy(cached.key, key, sizeof(key));
                cached.length = uint8_t(length);
                cached.count = uint8_t(encoder.piece.size());
                std::copy(encoder.piece.begin(), encoder.piece.end(), cached.tokens);
            }
        } else {
            merge_piece(encoder, {p, length});
        }
        flush();
        out.insert(out.end(), encoder.piece.begin(), encoder.piece.end());
    }
    flush();
}

// ---- added tokens

void Tokenizer::index_added() {
    added_by_text.resize(added.size());
    std::iota(added_by_text.begin(), added_by_text.end(), 0);
    std::ranges::sort(added_by_text, {}, [&](int i) { return added[size_t(i)].content; });
}

// Returns the longest of the wanted tokens that the text begins with; null: none. The last content in sorted order that
// is not above the text is the longest match. If it is none, all matches are in the begin that it shares with the text.
static const AddedToken* added_token_at(const Tokenizer& tokenizer, std::string_view text, const auto& wanted) {
    const std::vector<int>& order = tokenizer.added_by_text;
    const auto content = [&](int i) { return std::string_view(tokenizer.added[size_t(i)].content); };
    while (true) {
        const auto above = std::ranges::upper_bound(order, text, {}, content);
        if (above == order.begin()) return nullptr;
        const AddedToken& token = tokenizer.added[size_t(above[-1])];
        const bool matches = text.starts_with(token.content);
        if (matches && wanted(token)) return &token;
        const auto different = std::ranges::mismatch(text, token.content).in1;
        text = text.substr(0, size_t(different - text.begin()) - matches);
    }
}

// Calls f(part, token) for the parts of the text, in order: text without added tokens (null), and each of them;
// special: special ones, too. As Hugging Face does, it continues the search behind the token, also behind a special one
// that stays text, not behind the white space that the token takes. A token with lstrip is not there if the one before
// it has taken all of it.
template <class F>
static void for_each_part(const Tokenizer& tokenizer, std::string_view text, bool special, const F& f,
                          bool normalized = false) {
    if (!special && std::ranges::all_of(tokenizer.added, &AddedToken::special)) return f(text, nullptr);  // only text
    const auto wanted = [=](const AddedToken& token) { return token.normalized == normalized; };
    std::string first_bytes;
    for (const int i : tokenizer.added_by_text)
        if (const AddedToken& token = tokenizer.added[size_t(i)];
            wanted(token) && !first_bytes.ends_with(token.content[0]))
            first_bytes += token.content[0];
    const auto between = [&](size_t begin, size_t end) {
        if (begin >= end) return;
        const std::string_view part = text.substr(begin, end - begin);
        normalized ? f(part, nullptr) : for_each_part(tokenizer, part, special, f, true);
    };
    const char* const text_end = text.data() + text.size();
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
        // find() of one byte is many times faster than find_first_of().
        at = first_bytes.size() == 1 ? text.find(first_bytes[0], at) : text.find_first_of(first_bytes, at);
        if (at == text.npos) break;
        const AddedToken* token = added_token_at(tokenizer, text.substr(at), wanted);
        size_t begin = at, end = at + (token ? token->content.size() : 1);
        at = end;
        if (!token || (token->special && !special)) continue;
        for (; token->lstrip && begin > done; begin -= size_t(char_before(text.data(), text.data() + begin).bytes))
            if (char_before(text.data(), text.data() + begin).type != WHITE) break;
        if (token->rstrip) end = std::max(end, done);  // the token before has taken white space up to there
        for (; token->rstrip && end < text.size(); end += size_t(char_at(text.data() + end, text_end).bytes))
            if (char_at(text.data() + end, text_end).type != WHITE) break;
        if (token->lstrip) begin = std::max(begin, done);
        between(done, begin);
        if (begin < end) f(text.substr(begin, end - begin), token);
        done = end;
    }
    between(done, text.size());
}

void encode(Encoder& encoder, std::string_view text, std::vector<int>& out, bool special) {
    const Tokenizer& tokenizer = encoder.tokenizer;
    for_each_part(tokenizer, text, special, [&](std::string_view part, const AddedToken* token) {
        if (!token) return encode_plain(encoder, part, out);
        if (token->id >= tokenizer.rows)
            fail(EXIT_BAD_DATA, "the text has \"%s\", token %d, but the model has only %d; train with --vocab-size %d",
                 printable(token->content).c_str(), token->id, tokenizer.rows, tokenizer.vocab_size());
        out.push_back(token->id);
    });
}

std::vector<int> encode(const Tokenizer& tokenizer, std::string_view text, bool special) {
    Encoder encoder(tokenizer, 8);
    std::vector<int> out;
    encode(encoder, text, out, special);
    return out;
}

std::vector<int> document_start(const Tokenizer& tokenizer) {
    std::vector<int> out = tokenizer.prefix;
    if (out.empty() || out[0] != tokenizer.end_of_text) out.insert(out.begin(), tokenizer.end_of_text);
    return out;
}

std::vector<int> text_start(const Tokenizer& tokenizer) {
    if (!tokenizer.prefix.empty()) return tokenizer.prefix;
    return {tokenizer.bos >= 0 ? tokenizer.bos : tokenizer.eos >= 0 ? tokenizer.eos : tokenizer.end_of_text};
}

std::vector<int> encode_prompt(const Tokenizer& tokenizer, std::string_view text) {
    std::vector<int> out = encode(tokenizer, text, true);
    out.insert(out.begin(), tokenizer.prefix.begin(), tokenizer.prefix.end());
    return out.empty() ? std::vector{tokenizer.end_of_text} : out;
}

void count_special(const Tokenizer& tokenizer, std::string_view text, std::map<int, int64_t>& counts) {
    for_each_part(tokenizer, text, true, [&](std::string_view, const AddedToken* token) {
        if (token && token->special) counts[token->id]++;
    });
}

// A match, with the white space that it takes, must not go over the cut, and no token may begin before the cut and end
// in text that follows.
size_t last_safe_cut(const Tokenizer& tokenizer, std::string_view text) {
    size_t cut = last_safe_cut(text), longest = 0;
    bool may_go_over = false;  // no token without white space does
    for (const AddedToken& token : tokenizer.added) {
        longest = std::max(longest, token.content.size());
        may_go_over |= token.rstrip || token.content.find_first_of(" \t\n\v\f\r") != token.content.npos;
    }
    if (!may_go_over) return cut;
    std::vector<bool> inside(text.size());
    for (const bool special : {false, true})
        for_each_part(tokenizer, text, special, [&](std::string_view part, const AddedToken* token) {
            const auto begin = inside.begin() + (part.data() - text.data());
            if (token) std::fill(begin + 1, begin + int64_t(part.size()), true);
        });
    while (cut > 0 && (cut + longest > text.size() || inside[cut])) cut = last_safe_cut(text.substr(0, cut));
    return cut;
}

bool same_tokenizer(const Tokenizer& a, const Tokenizer& b) {
    return a.tokens == b.tokens && a.merges == b.merges && a.added == b.added && a.end_of_text == b.end_of_text &&
           a.prefix == b.prefix;
}

std::string decode(const Tokenizer& tokenizer, const int* tokens, int64_t count) {
    std::string out;
    for (int64_t i = 0; i < count; i++) out += tokenizer.tokens[size_t(tokens[i])];
    return out;
}
