// tokenize.cpp: the command `tokenize`. One thread reads a batch of chunks, all threads encode them, and one thread
// writes the tokens in order. A batch has four chunks per thread, so a large input needs little memory. Reading and
// writing do not overlap with encoding, because they take little time in comparison.
#include "text/tokenize.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "base/common.h"
#include "base/files.h"
#include "base/output_lock.h"
#include "base/terminal.h"
#include "data/shard.h"
#include "text/text_reader.h"
#include "text/tokenizer.h"

// ---- progress

struct Progress {
    bool quiet, terminal;
    double start = seconds_now(), shown = start;
    bool line_open = false;

    // Prints the text, but at most ten times a second on a terminal, and every ten seconds elsewhere.
    void show(const std::string& text) {
        const double now = seconds_now();
        if (quiet || now - shown < (terminal ? 0.1 : 10.0)) return;
        shown = now;
        fprintf(stderr, terminal ? "\r%s\033[K" : "%s\n", text.c_str());
        line_open = terminal;
        fflush(stderr);
    }
    void end_line() {
        if (line_open) fprintf(stderr, "\r\033[K");
        line_open = false;
    }
    void restart() { end_line(), start = shown = seconds_now(); }
    double seconds() const { return std::max(1e-3, seconds_now() - start); }
};

static Progress make_progress(bool quiet) {
    const char* term = getenv("TERM");
    return {quiet, isatty(STDERR_FILENO) && term && strcmp(term, "dumb") != 0};
}

static std::string progress_text(const char* verb, int64_t bytes, int64_t all, const Progress& progress) {
    const double rate = double(bytes) / progress.seconds();
    const double left = double(all - bytes) / std::max(1.0, rate);
    return format("%s | %.1f of %.1f MB | %.1f MB/s | eta %dm%02ds", verb, double(bytes) / 1e6, double(all) / 1e6,
                  rate / 1e6, int(left) / 60, int(left) % 60);
}

// ---- batches of chunks, on all threads

struct Batches {
    CorpusReader reader;
    int threads;

    // Calls work(chunk, slot, thread) for each chunk of a batch, then finish(slots), until the input ends. If several
    // chunks fail, the error of the first failed chunk is thrown, so that the error does not depend on the threads.
    void run(const std::function<void(const Chunk&, int slot, int thread)>& work,
             const std::function<void(int slots)>& finish) {
        std::vector<Chunk> chunks(size_t(4 * threads));
        std::vector<std::exception_ptr> errors(chunks.size());
        for (;;) {
            int slots = 0;
            while (slots < int(chunks.size()) && reader.next(chunks[size_t(slots)])) slots++;
            if (slots == 0) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
            for (int slot = 0; slot < slots; slot++) {
                try {
                    work(chunks[size_t(slot)], slot, omp_get_thread_num());
                } catch (...) {
                    errors[size_t(slot)] = std::current_exception();
                }
            }
            for (const std::exception_ptr& error : errors)
                if (error) std::rethrow_exception(error);
            finish(slots);
        }
    }
};

// ---- shards

// The shards PREFIX_000001.bin, PREFIX_000002.bin ... The files have temporary names until finish(). The
// destructor removes the files unless `kept` is set.
struct ShardSet {
    std::string prefix;
    int first;
    int64_t shard_tokens;
    int vocab_size;
    int64_t tokens = 0;
    bool kept = false;
    std::vector<std::unique_ptr<ShardWriter>> shards;

    ShardSet(const TokenizeOptions& o, const char* name, int first, int vocab_size)
        : prefix(o.output + "/" + name), first(first), shard_tokens(o.shard_tokens), vocab_size(vocab_size) {}
    ShardSet(const ShardSet&) = delete;
    ~ShardSet() {
        for (const auto& shard : shards)
            if (shard->finished && !kept) unlink(shard->path.c_str());
    }

    void complete() {
        if (!shards.empty()) shards.back()->complete();
    }

    void finish() {
        for (const auto& shard : shards) shard->finish();
    }

    void append(const int* data, int64_t count) {
        while (count > 0) {
            if (shards.empty() || shards.back()->tokens == shard_tokens) {
                complete();
                const std::string path = prefix + format("_%06d.bin", first + int(shards.size()));
                shards.push_back(std::make_unique<ShardWriter>(path, vocab_size));
            }
            ShardWriter& writer = *shards.back();
            const int64_t part = std::min(count, shard_tokens - writer.tokens);
            writer.append(data, part);
            data += part;
            count -= part;
            tokens += part;
        }
    }
};

static std::vector<std::string> find_shards(const std::string& output, const char* end) {
    std::vector<std::string> names;
    for (const std::string& name : list_directory(output))
        if ((name.starts_with("train_") || name.starts_with("val_")) && name.ends_with(end)) names.push_back(name);
    return names;
}

// Refuses a folder with the shards of an earlier call: training would read them together with the new ones, although
// they may be made with another tokenizer.
static void refuse_old_shards(const std::string& output) {
    for (const std::string& name : find_shards(output, ".bin"))
        fail(EXIT_CANNOT_CREATE,
             "%s: already has token shards (%s); delete them with --replace, or choose another --output",
             output.c_str(), name.c_str());
}

static void remove_old_shards(const std::string& output) {
    for (const std::string& name : find_shards(output, ".bin")) remove_tree(output + "/" + name);
}

static void remove_unfinished_shards(const TokenizeOptions& o) {
    for (const std::string& name : find_shards(o.output, ".bin.tmp")) {
        remove_tree(o.output + "/" + name);
        if (!o.quiet) print_message(o.output + "/" + name + ": removed, left behind by an interrupted tokenize");
    }
}

// ---- the two passes

static Tokenizer train_on(const TokenizeOptions& o, const std::vector<TextFile>& files, const CorpusRules& rules,
                          int threads, Progress& progress) {
    int64_t bytes = 0;
    for (const TextFile& file : files) bytes += file.size;
    Batches batches{{files, rules}, threads};
    std::vector<PieceCounts> counts(static_cast<size_t>(threads));
    const auto count = [&](const Chunk& chunk, int, int thread) {
        for_each_document(chunk, rules,
                          [&](std::string_view text, bool, bool) { counts[size_t(thread)].add_text(text); });
    };
    progress.restart();
    batches.run(count, [&](int) {
        progress.show(progress_text("counting words", batches.reader.bytes_read, bytes, progress));
    });
    for (int thread = 1; thread < threads; thread++) {
        counts[0].add(counts[size_t(thread)]);
        counts[size_t(thread)] = {};
    }
    return train_bpe(counts[0], o.train_bpe, [&](int done, int total) {
        progress.show(
            format("training the vocabulary | %s of %s merges", with_commas(done).c_str(), with_commas(total).c_str()));
    });
}

struct Encoded {
    std::vector<int> train, val;
};

struct Totals {
    int64_t documents = 0, bytes = 0;
};

// The tokens of a chunk, with an end of text before each document.
static void encode_chunk(Encoder& encoder, const Chunk& chunk, const CorpusRules& rules, int end_of_text,
                         Encoded& out) {
    out.train.clear();
    out.val.clear();
    for_each_document(chunk, rules, [&](std::string_view text, bool starts, bool held_out) {
        std::vector<int>& tokens = held_out ? out.val : out.train;
        if (starts) tokens.push_back(end_of_text);
        encode(encoder, text, tokens);
    });
}

// Appends the tokens of a chunk to the shards. The first val_tokens tokens of the whole input are held out (0: none).
static void write_encoded(const Encoded& encoded, int64_t val_tokens, ShardSet& train, ShardSet& val) {
    const int64_t count = int64_t(encoded.train.size());
    const int64_t first = std::clamp<int64_t>(val_tokens - val.tokens, 0, count);
    val.append(encoded.train.data(), first);
    train.append(encoded.train.data() + first, count - first);
    val.append(encoded.val.data(), int64_t(encoded.val.size()));
}

static Totals encode_all(const TokenizeOptions& o, const std::vector<TextFile>& files, const CorpusRules& rules,
                         const Tokenizer& tokenizer, int threads, Progress& progress, ShardSet& train, ShardSet& val) {
    int64_t bytes = 0;
    for (const TextFile& file : files) bytes += file.size;
    Batches batches{{files, rules}, threads};
    std::vector<Encoder> encoders;
    for (int thread = 0; thread < threads; thread++) encoders.emplace_back(tokenizer);
    std::vector<Encoded> results(size_t(4 * threads));
    const auto work = [&](const Chunk& chunk, int slot, int thread) {
        encode_chunk(encoders[size_t(thread)], chunk, rules, tokenizer.end_of_text, results[size_t(slot)]);
    };
    const auto write = [&](int slots) {
        for (int slot = 0; slot < slots; slot++) write_encoded(results[size_t(slot)], o.val_tokens, train, val);
        progress.show(progress_text("encoding", batches.reader.bytes_read, bytes, progress) +
                      format(" | %s tokens", with_commas(train.tokens + val.tokens).c_str()));
    };
    progress.restart();
    batches.run(work, write);
    return {batches.reader.documents, batches.reader.bytes_read};
}

static void check_options(const TokenizeOptions& o) {
    ENSURE(!o.inputs.empty(), "tokenize needs text: name files or folders");
    ENSURE(!o.output.empty(), "tokenize needs --output DIR for its shards");
    ENSURE(o.tokenizer.empty() != (o.train_bpe == 0),
           "tokenize needs either --train-bpe VOCAB_SIZE, to train a tokenizer on the text, or --tokenizer DIR|FILE");
    ENSURE(o.train_bpe == 0 || (o.train_bpe >= MIN_VOCAB_SIZE && o.train_bpe <= MAX_VOCAB_SIZE),
           "--train-bpe %d must be %d (the 256 bytes and %s) to %d", o.train_bpe, MIN_VOCAB_SIZE, END_OF_TEXT,
           MAX_VOCAB_SIZE);
    ENSURE(o.shard_tokens > 0 && o.shard_tokens <= std::numeric_limits<int32_t>::max(),
           "--shard-tokens %lld must be 1 to %d", static_cast<long long>(o.shard_tokens),
           std::numeric_limits<int32_t>::max());
    ENSURE(o.val_tokens >= 0, "--val-tokens %lld is negative", static_cast<long long>(o.val_tokens));
    ENSURE(o.threads >= 0 && o.threads <= 1024, "--threads %d must be 0 (one per core) to 1024", o.threads);
}

// A warning about a file that is probably not what the user meant to give; "" for most files.
static std::string file_warning(const TextFile& file) {
    if (file.binary) return "contains zero bytes, so it is probably not text; its bytes are tokenized as they are";
    if (file.invalid_utf8 >= 0)
        return format("is not UTF-8 (byte %s); convert it; if it is Latin-1, use iconv -f ISO-8859-1 -t UTF-8",
                      with_commas(file.invalid_utf8 + 1).c_str());
    if (file.path.ends_with(".json"))
        return "is JSON, but is read as plain text; to read the texts in it, convert it to .jsonl: one object {...} "
               "per line";
    return "";
}

// "5 files left out: 2 .csv, 1 .html, ..."
static std::string left_out_line(const std::set<std::string>& paths) {
    constexpr size_t most_kinds = 6;
    std::map<std::string, int> counts;
    for (const std::string& path : paths) counts[std::filesystem::path(path).extension().string()]++;
    std::vector<std::pair<int, std::string>> kinds;  // the most frequent one first
    for (const auto& [extension, count] : counts)
        kinds.push_back({-count, extension.empty() ? "without an extension" : printable(extension)});
    std::sort(kinds.begin(), kinds.end());
    std::string text = format("%zu %s left out: ", paths.size(), paths.size() == 1 ? "file" : "files");
    for (size_t i = 0; i < std::min(kinds.size(), most_kinds); i++)
        text += format("%s%d %s", i == 0 ? "" : ", ", -kinds[i].first, kinds[i].second.c_str());
    return text + (kinds.size() > most_kinds ? ", ..." : "");
}

static void warn_of_links(const std::set<std::string>& links) {
    constexpr int most_names = 3;
    std::string names;
    int count = 0;
    for (const std::string& link : links)
        if (count++ < most_names) names += (names.empty() ? "" : ", ") + link;
    print_message(
        format("warning: skipped %d link%s to a folder or a missing file: %s%s; to read a linked folder, name it",
               count, count == 1 ? "" : "s", names.c_str(), count > most_names ? ", ..." : ""));
}

static void report_choice(const FoundFiles& found, bool quiet) {
    if (!found.repeated.empty()) {
        const auto& [path, first] = found.repeated[0];
        const size_t more = found.repeated.size() - 1;
        print_message(format("warning: %s: is given more than once%s; it is read once%s", path.c_str(),
                             path == first ? "" : format(" (as %s)", first.c_str()).c_str(),
                             more == 0 ? "" : format(", and so are %zu more", more).c_str()));
    }
    if (!found.unfollowed.empty()) warn_of_links(found.unfollowed);
    if (!quiet && !found.left_out.empty()) print_message(left_out_line(found.left_out));
}

static void check_files(const std::vector<TextFile>& files) {
    constexpr int most_warnings = 10;
    int64_t bytes = 0;
    int odd = 0;
    for (const TextFile& file : files) {
        bytes += file.size;
        const std::string text = file_warning(file);
        if (!text.empty() && odd++ < most_warnings) print_message("warning: " + file.path + ": " + text);
    }
    if (odd > most_warnings) fprintf(stderr, "warning: %d more files have such a problem\n", odd - most_warnings);
    if (bytes == 0)
        fail(EXIT_BAD_DATA, "%s: is empty%s", files[0].path.c_str(),
             files.size() == 1 ? "" : ", and so are the other inputs");
}

// Refuses a number of tokens per shard that makes far more files than anybody wants; the training data are read from
// all of them. Shards of a million tokens may be any number.
static void check_shard_count(const TokenizeOptions& o, const std::vector<TextFile>& files) {
    constexpr int64_t most_small_shards = 10000, small_shard = 1000000, bytes_per_token = 4;  // 4: English text
    int64_t bytes = 0;
    for (const TextFile& file : files) bytes += file.size;
    const int64_t tokens = bytes / bytes_per_token, shards = ceil_div(tokens, o.shard_tokens);
    ENSURE(o.shard_tokens >= small_shard || shards <= most_small_shards,
           "--shard-tokens %lld would make about %s shards of these %s bytes of text, and at most %s of fewer than %s "
           "tokens are made; give --shard-tokens %lld or more",
           static_cast<long long>(o.shard_tokens), with_commas(shards).c_str(), with_commas(bytes).c_str(),
           with_commas(most_small_shards).c_str(), with_commas(small_shard).c_str(),
           static_cast<long long>(std::min(small_shard, ceil_div(tokens, most_small_shards))));
}

static std::string size_text(double bytes) {
    return bytes < 1e6 ? format("%.1f kB", bytes / 1e3) : format("%.1f MB", bytes / 1e6);
}

static void print_summary(const TokenizeOptions& o, const Totals& totals, const ShardSet& train, const ShardSet& val,
                          double seconds) {
    if (o.quiet) return;
    std::string text;
    for (const ShardSet* set : {&train, &val})
        for (const auto& shard : set->shards)
            text += format("%s  %s\n", message_text(shard->path).c_str(), counted(shard->tokens, "token").c_str());
    if (val.tokens == 0 && (o.val_fraction > 0 || o.val_tokens > 0))
        text +=
            "no validation shard: no document is long enough to hold out its end; give more text, or a larger "
            "--val-fraction\n";
    const int64_t tokens = train.tokens + val.tokens;
    const size_t shards = train.shards.size() + val.shards.size();
    text += format("%s, %s, %s, %.2f bytes per token, %s/s, %s and the tokenizer in %s\n",
                   counted(totals.documents, "document").c_str(), size_text(double(totals.bytes)).c_str(),
                   counted(tokens, "token").c_str(), double(totals.bytes) / double(tokens),
                   size_text(double(totals.bytes) / seconds).c_str(), counted(int64_t(shards), "shard").c_str(),
                   message_text(o.output).c_str());
    print_stdout(text);
}

int tokenize(const TokenizeOptions& o) {
    check_options(o);
    const CorpusRules rules{o.split, o.text_key, o.val_tokens > 0 ? 0.0 : o.val_fraction};
    const int threads = o.threads > 0 ? o.threads : omp_get_num_procs();
    const FoundFiles found = find_text_files(o.inputs, o.output);
    const std::vector<TextFile>& files = found.files;
    report_choice(found, o.quiet);
    check_files(files);
    check_shard_count(o, files);
    const OutputLock lock(o.output);
    if (!o.replace) refuse_old_shards(o.output);
    remove_unfinished_shards(o);
    Progress progress = make_progress(o.quiet);
    const Tokenizer tokenizer =
        o.train_bpe > 0 ? train_on(o, files, rules, threads, progress) : load_tokenizer(o.tokenizer);
    check_tokenizer_size(tokenizer);
    ShardSet train(o, "train", 1, tokenizer.vocab_size()), val(o, "val", 0, tokenizer.vocab_size());
    const Totals totals = encode_all(o, files, rules, tokenizer, threads, progress, train, val);
    const double seconds = progress.seconds();
    progress.end_line();
    if (train.tokens == 0)
        fail(EXIT_BAD_DATA,
             val.tokens == 0 ? "the %zu input files hold no text (%s bytes)"
                             : "all of the text of the %zu input files (%s bytes) was held out; lower "
                               "--val-tokens or --val-fraction",
             files.size(), with_commas(totals.bytes).c_str());
    train.complete();
    val.complete();
    remove_old_shards(o.output);  // only now, because the new ones are on disk; an error before this loses nothing
    save_tokenizer(tokenizer, o.output, 1024);
    // Rename all shards at the very end: a part of the shards, or shards without a tokenizer, would look complete. A
    // kill between two renames leaves an unfinished shard beside them, which glob_files() refuses.
    val.finish();
    train.finish();
    sync_directory(o.output);
    train.kept = val.kept = true;
    print_summary(o, totals, train, val, seconds);
    return 0;
}
