// tokenizer.h: GPT-2's byte-level BPE tokenizer: Hugging Face's files, encoding, decoding and training.
//
// A text is split into pieces by GPT-2's pattern (unicode.h). A piece starts as its bytes. Then the pair of neighbours
// with the earliest merge is joined, until no pair has a merge. Any bytes can be encoded, and decoding the tokens gives
// the same bytes. Added words stand for themselves; special tokens such as "<|endoftext|>" are ordinary text, unless
// encode() is asked for them.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/unicode.h"

inline constexpr const char* END_OF_TEXT = "<|endoftext|>";
inline constexpr int MAX_VOCAB_SIZE = 1 << 20;
inline constexpr int MIN_VOCAB_SIZE = 257;  // the bytes and <|endoftext|>

struct Merge {
    int left, right;  // tokens
    int token;        // the token of the joined pair

    bool operator==(const Merge&) const = default;
};

// Hash table from a pair of tokens to its merge's rank. A slot holds left, right and rank, 20 bits each.
struct PairRanks {
    static constexpr int NONE = 1 << 20;  // above every rank
    std::vector<uint64_t> slots;
    int shift = 0;

    void build(const std::vector<Merge>& merges);
    int rank(int left, int right) const;  // NONE: not a merge
};

// A token that stands for its text as a whole, before the text is split into pieces (Hugging Face's AddedToken).
struct AddedToken {
    int id;
    std::string content = {};             // the text; the id's bytes, unless a byte or a merge is written so
    bool special = true;                  // a mark, not a word: left out of decoded text by Hugging Face
    bool lstrip = false, rstrip = false;  // takes the white space before it, after it
    bool normalized = false;              // searched after the others, in the text between them

    bool operator==(const AddedToken&) const = default;
};

using TokenizerFiles = std::map<std::string, std::string>;  // contents, by name

struct Tokenizer {
    std::vector<std::string> tokens;  // bytes of each id
    std::vector<Merge> merges;        // merges in the order of their ranks
    std::vector<AddedToken> added;    // added tokens in the order of ids, end_of_text included
    std::vector<int> added_by_text;   // places in `added`, in the order of the contents
    int end_of_text = 0;              // separates documents
    int bos = -1, pad = -1;           // -1: none
    int eos = -1;                     // ends a text by tokenizer_config.json; -1: none
    std::vector<int> prefix;          // put in front of every text, by the post_processor or add_bos_token
    std::string chat_template;        // template in Jinja; "": none
    int rows = MAX_VOCAB_SIZE;        // rows of the embedding: a text with an added token beyond them is refused
    TokenizerFiles files;             // files that it was read from, and that differ from those that it would write
    int byte_tokens[256] = {};
    PairRanks ranks;

    int vocab_size() const { return int(tokens.size()); }
    void index_added();  // after changes of `added`
};

// Loads tokenizer.json; or a pair of vocab.json (encoder.json) and merges.txt (vocab.bpe), either of which may be
// named; or a directory that holds one of these; with what transformers reads beside them. Refuses a tokenizer that is
// not byte-level BPE with GPT-2's pattern, and one with settings that would be ignored (EXIT_NO_INPUT, EXIT_BAD_DATA).
// docs/data.md ("Shards") says which token ends documents.
Tokenizer load_tokenizer(const std::string& path);
// The same from the contents of such files and of config.json; `where` is named in errors.
Tokenizer parse_tokenizer(TokenizerFiles files, const std::string& where);
// Tokens and merges ("left right") as they are written in the files, in GPT-2's alphabet.
std::vector<std::string> written_tokens(const Tokenizer& tokenizer);
std::vector<std::string> written_merges(const Tokenizer& tokenizer);
// Whether two tokenizers give every document the same tokens.
bool same_tokenizer(const Tokenizer& a, const Tokenizer& b);

// Writes the files that transformers reads into an existing directory; replaces or removes all files of a tokenizer
// there. A file that the tokenizer was read from is written as it was.
void save_tokenizer(const Tokenizer& tokenizer, const std::string& directory);
void set_model_max_length(Tokenizer& tokenizer, int length);

// A tokenizer's encoding state, one per thread. Keep an Encoder between calls: it caches the pieces seen before.
struct Encoder {
    // A piece of up to 24 bytes and its tokens, in one cache line.
    struct alignas(64) CachedPiece {
        uint64_t key[3];        // the piece's bytes, then zeros
        uint8_t length, count;  // number of bytes; number of tokens
        int tokens[9];
    };
    // The cache has 2^cache_bits entries of 64 bytes. The default suits long texts; use about 8 for a prompt.
    explicit Encoder(const Tokenizer& tokenizer, int cache_bits = 17);

    const Tokenizer& tokenizer;
    std::vector<CachedPiece> cache;
    int cache_shift;
    std::vector<int> piece;  // scratch
};
// Appends the tokens of the text to out. Of added words that match at the same place the longest counts. special:
// special tokens such as <|endoftext|> stand for themselves, too. These are the ids of Hugging Face's encode() with
// add_special_tokens=False.
void encode(Encoder& encoder, std::string_view text, std::vector<int>& out, bool special = false);
std::vector<int> encode(const Tokenizer& tokenizer, std::string_view text, bool special = false);
// The ids of Hugging Face's encode(): the prefix in front. An empty text without a prefix: end_of_text.
std::vector<int> encode_prompt(const Tokenizer& tokenizer, std::string_view text);
// The tokens before the text of a document: the end of the one before, and the prefix, if it begins with another token.
std::vector<int> document_start(const Tokenizer& tokenizer);
// The tokens that stand for nothing before a text: the prefix, or else bos, or else eos, or else end_of_text.
std::vector<int> text_start(const Tokenizer& tokenizer);
// Adds the special tokens in the text to counts, by id.
void count_special(const Tokenizer& tokenizer, std::string_view text, std::map<int, int64_t>& counts);

// As last_safe_cut: the two parts have the tokens of the whole, with special tokens and without, whatever follows.
size_t last_safe_cut(const Tokenizer& tokenizer, std::string_view text);

// The bytes of tokens of the vocabulary.
std::string decode(const Tokenizer& tokenizer, const int* tokens, int64_t count);

// Counts how often each piece occurs in texts. Use one PieceCounts per thread and add them up at the end.
struct PieceCounts {
    // Longer pieces are not counted: runs of one character and encoded data would make training quadratic.
    static constexpr int MAX_PIECE = 1024;

    struct Hash {
        using is_transparent = void;  // the map is searched without a copy of the piece
        size_t operator()(std::string_view piece) const { return std::hash<std::string_view>()(piece); }
    };
    std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> counts;
    int64_t bytes_left_out = 0;  // bytes in pieces longer than MAX_PIECE

    void add_text(std::string_view text);
    void add(std::string_view piece, int64_t count);
    void add(const PieceCounts& other);
};

// Learns vocab_size - 257 merges. Each round merges the most frequent pair of neighbours; of equally frequent pairs,
// the one with the smallest (left, right) ids, as Hugging Face's BpeTrainer does with an initial_alphabet of all bytes.
// Ids 0-255 are the bytes in GPT-2's order, then come the merges, and the last id is <|endoftext|>. progress is called
// every 256 merges and at the end. Refuses counts with fewer pairs than needed (EXIT_BAD_DATA).
Tokenizer train_bpe(const PieceCounts& counts, int vocab_size,
                    const std::function<void(int done, int total)>& progress = {});

// Builds a tokenizer from the bytes and `merges`, with <|endoftext|> as the last id: ids and order as train_bpe gives
// them. A merge makes the existing token with the same bytes, or else a new one.
Tokenizer tokenizer_from_merges(const std::vector<std::pair<int, int>>& merges);
