// tokenize.cpp: the command `tokenize`: converts text to token shards and writes the tokenizer beside them.
//
// One thread reads a batch of chunks, all threads encode them, and one thread writes the tokens in order. Reading and
// writing do not overlap with encoding, because they take little time in comparison. Neither the bytes of the files nor
// the memory depend on the number of threads: a batch has BATCH_CHUNKS chunks, or fewer long rows, and the threads
// share CACHE_BITS and COUNTED_PIECES.
#include <omp.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "base/files.h"
#include "base/host.h"
#include "base/print.h"
#include "commands/commands.h"
#include "data/shard.h"
#include "text/text_reader.h"
#include "text/tokenizer.h"

static constexpr int BATCH_CHUNKS = 64;
static constexpr size_t BATCH_BYTES = 8 << 20;             // a batch ends with the chunk that reaches them
static constexpr int CACHE_BITS = 19;                      // 32 MiB of cached pieces (Encoder), over all threads
static constexpr size_t COUNTED_PIECES = size_t(1) << 19;  // pieces that are counted by the threads apart

// ---- progress: a line each second

struct Progress {
    bool quiet;
    int64_t all_bytes;
    double start = seconds_now();
    ProgressLine line = {};

    void bytes(const char* verb, int64_t bytes, const std::string& more = "") {
        if (quiet || !line.due()) return;
        const double rate = std::max(1.0, double(bytes) / (seconds_now() - start));
        line.show(format("%s | %.1f of %.1f MB | %.1f MB/s | eta %s", verb, double(bytes) / 1e6,
                         double(all_bytes) / 1e6, rate / 1e6, duration_text(double(all_bytes - bytes) / rate).c_str()) +
                  more);
    }
};

// ---- batches of chunks, on all threads

struct Batches {
    CorpusReader reader;
    int threads;
    int64_t bad_rows = 0, bad_lines = 0;  // skipped rows, and their lines: a broken row may have many
    std::string first_bad = {};           // the error of the first skipped row

    // Calls work(chunk, slot, thread) for each chunk of a batch, then finish(slots), until the input ends. If several
    // chunks fail, the error of the first failed chunk is thrown, so that the error does not depend on the threads.
    void run(const std::function<void(Chunk&, int slot, int thread)>& work,
             const std::function<void(int slots)>& finish) {
        std::vector<Chunk> chunks(BATCH_CHUNKS);
        std::vector<std::exception_ptr> errors(chunks.size());
        for (int slots = 1; slots > 0;) {
            slots = 0;
            for (size_t bytes = 0; slots < BATCH_CHUNKS && bytes < BATCH_BYTES && reader.next(chunks[size_t(slots)]);)
                bytes += chunks[size_t(slots++)].bytes.size();
#pragma omp parallel for schedule(dynamic) num_threads(threads)
            for (int slot = 0; slot < slots; slot++) {
                try {
                    work(chunks[size_t(slot)], slot, omp_get_thread_num());
                } catch (...) {
                    errors[size_t(slot)] = std::current_exception();
                }
            }
            for (int slot = 0; slot < slots; slot++) {
                if (errors[size_t(slot)]) std::rethrow_exception(errors[size_t(slot)]);
                if (bad_rows == 0) first_bad = chunks[size_t(slot)].first_bad;
                bad_rows += chunks[size_t(slot)].bad_rows, bad_lines += chunks[size_t(slot)].bad_lines;
            }
            finish(slots);
        }
        if (100 * bad_lines > reader.documents)
            fail(EXIT_BAD_DATA, "%s in %s, more than the 1 %% that --skip-bad-lines skips; the first: %s",
                 counted(bad_lines, "bad line").c_str(), counted(reader.documents, "document").c_str(),
                 first_bad.c_str());
    }
};

// ---- shards

// The shards PREFIX_000001.bin, PREFIX_000002.bin ... The files have temporary names until finish().
struct ShardSet {
    std::string prefix;
    int first;
    int64_t shard_tokens;
    int vocab_size;
    int64_t tokens = 0;
    std::vector<std::unique_ptr<ShardWriter>> shards = {};

    void append(const int* data, int64_t count) {
        for (int64_t done = 0, part; done < count; done += part) {
            if (shards.empty() || shards.back()->tokens == shard_tokens) {
                if (!shards.empty()) shards.back()->complete();
                const std::string path = prefix + format("_%06d.bin", first + int(shards.size()));
                shards.push_back(std::make_unique<ShardWriter>(path, vocab_size));
            }
            ShardWriter& writer = *shards.back();
            part = std::min(count - done, shard_tokens - writer.tokens);
            writer.append(data + done, part);
        }
        tokens += count;
    }
};

static std::vector<std::string> find_shards(const std::string& output, const char* end) {
    std::vector<std::string> paths;
    for (const std::string& name : list_directory(output))
        if ((name.starts_with("train_") || name.starts_with("val_")) && name.ends_with(end))
            paths.push_back(output + "/" + name);
    return paths;
}

// ---- the two passes

static Tokenizer train_on(const Options& o, const std::vector<TextFile>& files, const CorpusRules& rules, int threads,
                          Progress& progress) {
    Batches batches{{files, rules}, threads};
    PieceCounts all;
    std::mutex mutex;  // guards all
    std::vector<PieceCounts> counts(static_cast<size_t>(threads));
    const auto count = [&](Chunk& chunk, int, int thread) {
        PieceCounts& own = counts[size_t(thread)];
        for_each_document(chunk, rules, [&](std::string_view text, bool, bool held_out) {
            if (!held_out) own.add_text(text);
        });
        if (own.counts.size() * counts.size() < COUNTED_PIECES) return;
        const std::lock_guard lock(mutex);
        all.add(own);
        own = {};
    };
    batches.run(count, [&](int) { progress.bytes("counting words", batches.reader.file_bytes_read()); });
    for (PieceCounts& own : counts) all.add(std::exchange(own, {}));
    return train_bpe(all, o.train_bpe, [&](int done, int total) {
        if (!o.quiet && progress.line.due())
            progress.line.show(format("training the vocabulary | %s of %s merges", with_commas(done).c_str(),
                                      with_commas(total).c_str()));
    });
}

struct Encoded {
    std::vector<int> train, val;
    int64_t bytes = 0, empty = 0;         // bytes of text; documents without any
    std::map<int, int64_t> special = {};  // how often the text of each special token was met
};

// The tokens of a chunk, with document_start() before each document.
static void encode_chunk(Encoder& encoder, Chunk& chunk, const CorpusRules& rules, bool special_tokens, Encoded& out) {
    const std::vector<int> start = document_start(encoder.tokenizer);
    out = {};
    out.train.reserve(chunk.bytes.size() / 3);  // growing would copy
    for_each_document(chunk, rules, [&](std::string_view text, bool starts, bool held_out) {
        out.bytes += int64_t(text.size());
        if (text.empty()) return void(out.empty++);
        std::vector<int>& tokens = held_out ? out.val : out.train;
        if (starts) tokens.insert(tokens.end(), start.begin(), start.end());
        count_special(encoder.tokenizer, text, out.special);
        encode(encoder, text, tokens, special_tokens);
    });
}

// Writes the shards. Returns the sums, without tokens.
static Encoded encode_all(const Options& o, Batches& batches, const Tokenizer& tokenizer, Progress& progress,
                          ShardSet& train, ShardSet& val) {
    const int cache_bits = std::clamp(CACHE_BITS - int(std::bit_width(unsigned(batches.threads - 1))), 8, 17);
    std::vector<Encoder> encoders;
    for (int thread = 0; thread < batches.threads; thread++) encoders.emplace_back(tokenizer, cache_bits);
    std::vector<Encoded> results(BATCH_CHUNKS);
    Encoded all;
    const auto work = [&](Chunk& chunk, int slot, int thread) {
        encode_chunk(encoders[size_t(thread)], chunk, batches.reader.rules, o.special_tokens, results[size_t(slot)]);
    };
    const auto write = [&](int slots) {
        for (int slot = 0; slot < slots; slot++) {
            const Encoded& part = results[size_t(slot)];
            const int64_t tokens = int64_t(part.train.size()),
                          held_out = std::clamp<int64_t>(o.val_tokens - val.tokens, 0, tokens);  // the first of all
            val.append(part.train.data(), held_out);
            train.append(part.train.data() + held_out, tokens - held_out);
            val.append(part.val.data(), int64_t(part.val.size()));
            all.bytes += part.bytes, all.empty += part.empty;
            for (const auto& [id, count] : part.special) all.special[id] += count;
        }
        progress.bytes("encoding", batches.reader.file_bytes_read(),
                       format(" | %s tokens", with_commas(train.tokens + val.tokens).c_str()));
    };
    batches.run(work, write);
    return all;
}

// Refuses inputs without any text, and warns of text that is not UTF-8. Returns the bytes of all files.
static int64_t check_files(const std::vector<TextFile>& files) {
    int64_t bytes = 0;
    for (const TextFile& file : files) warn_unless_utf8(file), bytes += file.size;
    if (bytes == 0)
        fail(EXIT_BAD_DATA, "%s: is empty%s", files[0].path.c_str(),
             files.size() == 1 ? "" : ", and so are the other inputs");
    return bytes;
}

// Names the first three of each kind.
static void print_left_out(const FoundFiles& found) {
    for (const auto& [why, files] : found.left_out) {
        if (files.empty()) continue;
        std::string text = format("left out: %s %s:", counted(int64_t(files.size()), "file").c_str(), why.c_str());
        for (size_t i = 0; i < files.size() && i < 3; i++) text += (i > 0 ? ", " : " ") + files[i];
        print_message(text + (files.size() > 3 ? " ..." : ""));
    }
}

static void print_summary(const Options& o, const Batches& batches, const Tokenizer& tokenizer, const Encoded& counts,
                          const ShardSet& train, const ShardSet& val, double seconds) {
    if (o.quiet) return;
    std::string text;
    for (const ShardSet* set : {&train, &val})
        for (const auto& shard : set->shards)
            text += format("%s  %s\n", message_text(shard->path).c_str(), counted(shard->tokens, "token").c_str());
    if (val.tokens == 0 && (o.val_fraction > 0 || o.val_tokens > 0))
        text +=
            "no validation shard: no document is long enough to hold out its end, from a space or line end on; give "
            "more text, or a larger --val-fraction\n";
    for (const auto& [id, count] : counts.special)
        text += format("the text of the special token %s occurs %s: taken as %s\n",
                       message_text(written_tokens(tokenizer)[size_t(id)]).c_str(), counted(count, "time").c_str(),
                       o.special_tokens ? "that token" : "text; --special-tokens takes it as that token");
    if (batches.bad_lines > 0)
        text += format("skipped %s; the first: %s\n", counted(batches.bad_lines, "bad line").c_str(),
                       message_text(batches.first_bad).c_str());
    const int64_t tokens = train.tokens + val.tokens;
    text += format("%s, %s, %s, %.2f bytes per token, %s/s, %s and the tokenizer in %s\n",
                   counted(batches.reader.documents - batches.bad_rows - counts.empty, "document").c_str(),
                   human_bytes(counts.bytes).c_str(), counted(tokens, "token").c_str(),
                   double(counts.bytes) / double(tokens), human_bytes(int64_t(double(counts.bytes) / seconds)).c_str(),
                   counted(int64_t(train.shards.size() + val.shards.size()), "shard").c_str(),
                   message_text(o.output).c_str());
    print_stdout(text);
}

static void check_any_text(const Batches& batches, const Encoded& counts, const ShardSet& train, const ShardSet& val) {
    if (train.tokens > 0) return;
    const std::string input = "the input (" + counted(int64_t(batches.reader.files.size()), "file") + ")";
    if (val.tokens > 0)
        fail(EXIT_BAD_DATA, "all %s bytes of %s were held out; lower --val-tokens or --val-fraction",
             with_commas(counts.bytes).c_str(), input.c_str());
    if (counts.empty == 0)
        fail(EXIT_BAD_DATA, "%s has no documents: it has no rows, or blank lines only", input.c_str());
    fail(EXIT_BAD_DATA, "%s has no text: %s without any", input.c_str(), counted(counts.empty, "document").c_str());
}

int run_tokenize(const Options& o, const Launch& launch) {
    check_one_process(o, launch);
    CorpusRules rules{o.split, o.text_key, o.skip_bad_lines, true, o.val_fraction};
    const int threads = choose_threads().threads;
    check_threads(threads);
    FoundFiles found = find_text_files(o.inputs, o.text_key);
    if (!o.quiet) print_left_out(found);
    Progress progress{o.quiet, check_files(found.texts)};
    int64_t before = 0;
    for (TextFile& file : found.texts) {
        measure_text(file, rules, [&](int64_t read) { progress.bytes("unpacking", before + read); });
        before += file.size;
    }
    make_directories(o.output);
    const FileLock lock(o.output + "/run.lock");
    // Training would read old shards together with the new ones, although another tokenizer may have made them.
    const std::vector<std::string> old_shards = find_shards(o.output, ".bin");
    if (!o.replace && !old_shards.empty())
        fail(EXIT_CANNOT_CREATE, "%s already exists; delete the shards with --replace, or choose another --output",
             old_shards[0].c_str());
    for (const std::string& path : find_shards(o.output, ".bin.tmp")) remove_tree(path);  // a killed call left it
    progress.start = seconds_now();
    const Tokenizer tokenizer =
        o.train_bpe > 0 ? train_on(o, found.texts, rules, threads, progress) : load_tokenizer(o.tokenizer);
    ShardSet train{o.output + "/train", 1, o.shard_tokens, tokenizer.vocab_size()};
    ShardSet val{o.output + "/val", 0, o.shard_tokens, tokenizer.vocab_size()};
    progress.start = seconds_now();
    rules.cut = [&](std::string_view text) { return last_safe_cut(tokenizer, text); };
    Batches batches{{found.texts, rules}, threads};
    const Encoded counts = encode_all(o, batches, tokenizer, progress, train, val);
    const double seconds = std::max(1e-3, seconds_now() - progress.start);
    progress.line.clear();
    check_any_text(batches, counts, train, val);
    for (const ShardSet* set : {&train, &val})
        if (!set->shards.empty()) set->shards.back()->complete();
    // The old shards are removed only now, when the new ones are on disk: an error before this loses nothing.
    for (const std::string& path : old_shards) remove_tree(path);
    save_tokenizer(tokenizer, o.output);
    // All shards are renamed at the very end: a part of the shards, or shards without a tokenizer, would look complete.
    // A kill between two renames leaves an unfinished shard beside them, which glob_files() refuses.
    for (const ShardSet* set : {&val, &train})
        for (const auto& shard : set->shards) shard->finish();
    sync_path(o.output);
    print_summary(o, batches, tokenizer, counts, train, val, seconds);
    return 0;
}
