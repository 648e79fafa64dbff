// small_tokenize.h: a run of `tokenize` on small files, for the tests of commands/tokenize.cpp.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/random.h"
#include "commands/commands.h"
#include "data/shard.h"
#include "support/temporary.h"
#include "text/tokenizer.h"

using Tokens = std::vector<int>;
using Texts = std::vector<std::string>;
using Files = std::vector<std::pair<std::string, std::string>>;  // names and bytes

// A vocabulary of the 256 bytes, 20 merges and <|endoftext|>.
inline const Tokenizer& tokenizer() {
    static const Tokenizer t = [] {
        PieceCounts counts;
        counts.add_text("the theme of these others is there in the thesis, in another thing");
        return train_bpe(counts, 257 + 20);
    }();
    return t;
}

// In memory, if possible: `tokenize` syncs each of its files, which takes long on a disk.
inline void use_memory() {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
}

inline int tokenize(const Options& options) { return run_tokenize(options, Launch()); }

// Tokenizes the files of a folder with the vocabulary of tokenizer(), into shards beside it.
struct TokenizeRun {
    TemporaryDirectory folder = (use_memory(), TemporaryDirectory());
    Options options;

    explicit TokenizeRun(const Files& files = {}) {
        save_tokenizer(tokenizer(), folder.path);
        std::filesystem::create_directory(folder / "in");
        options.tokenizer = folder / "tokenizer.json";
        options.output = folder / "out", options.inputs = {folder / "in"};
        options.val_fraction = 0.0, options.quiet = true;
        for (const auto& [name, bytes] : files) file(name, bytes);
    }
    void file(const std::string& name, const std::string& bytes) {
        const std::filesystem::path path = folder / ("in/" + name);
        std::filesystem::create_directories(path.parent_path());
        write_bytes(path, bytes);
    }
    std::string out(const std::string& name) const { return options.output + "/" + name; }

    // The tokens of all shards whose names begin with `set`, "train_" or "val_".
    Tokens tokens(const std::string& set) const {
        Tokens all;
        for (const std::string& name : list_directory(options.output)) {
            if (!name.starts_with(set)) continue;
            const Shard shard = open_shard(out(name));
            all.resize(all.size() + size_t(shard.tokens));
            read_tokens(shard, 0, shard.tokens, MAX_VOCAB_SIZE, all.data() + all.size() - shard.tokens);
        }
        return all;
    }
    // Tokenizes. Returns the tokens for training.
    Tokens train() {
        tokenize(options);
        return tokens("train_");
    }
};

// The tokens that shards of these documents must hold.
inline Tokens documents(const Texts& texts) {
    Tokens out;
    for (const std::string& text : texts) {
        out.push_back(tokenizer().end_of_text);
        const Tokens tokens = encode(tokenizer(), text);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

// Random words, ten to a line, of at least `bytes` bytes in all. Some of the white space takes several bytes.
inline std::string prose(size_t bytes, uint64_t seed = 1) {
    static const char* words[] = {"the", "theme", "others", "in", "it's", "there", "42", "\u3000", "caf\u00e9", "--"};
    const Philox random{seed, 0};
    std::string text;
    for (uint64_t i = 0; text.size() < bytes; i++) {
        text += words[random(i)[0] % std::size(words)];
        text += i % 10 == 9 ? "\n" : " ";
    }
    return text;
}
