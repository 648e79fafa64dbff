// bench_tokenizer.cpp: times the tokenizer on one thread. Prints MB/s and seconds of the best of several runs, for
// splitting text into pieces ("scan"), training a vocabulary, encoding with an empty cache and again with a filled one,
// and decoding.
//
//   build/release/bench_tokenizer TEXT...                     trains 50,257 tokens on the files and encodes with them
//   build/release/bench_tokenizer --vocab-size 8192 TEXT...   trains 8,192 tokens
//   build/release/bench_tokenizer --tokenizer DIR TEXT...     encodes with the tokenizer of DIR
//   build/release/bench_tokenizer --cpu-time TEXT...          CPU time in place of elapsed time, for a busy machine
// dev/bench/tokenizers_baseline.py prints the same lines for Hugging Face's tokenizers.
#include <CLI/CLI.hpp>

#include <cstdio>
#include <ctime>
#include <functional>

#include "base/common.h"
#include "base/files.h"
#include "text/tokenizer.h"

static bool cpu_time = false;

static double seconds() {
    timespec t;
    clock_gettime(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

static double best_of(int runs, const std::function<void()>& f) {
    double best = 1e30;
    for (int run = 0; run < runs; run++) {
        const double start = seconds();
        f();
        best = std::min(best, seconds() - start);
    }
    return best;
}

static void print_row(const char* what, size_t bytes, double time, const std::string& detail) {
    printf("%-14s %8.1f MB/s  %8.3f s   %s\n", what, double(bytes) / 1e6 / time, time, detail.c_str());
}

static void time_scan(const std::string& text, int runs) {
    int64_t pieces = 0;
    const double scan = best_of(runs, [&] {
        pieces = 0;
        for (const char *p = text.data(), *end = p + text.size(); p < end; pieces++) p = piece_end(p, end);
    });
    print_row("scan", text.size(), scan, with_commas(pieces) + " pieces");
}

static Tokenizer time_training(const std::string& text, int vocab_size, int runs) {
    Tokenizer trained;
    const double train = best_of(runs, [&] {
        PieceCounts counts;
        counts.add_text(text);
        trained = train_bpe(counts, vocab_size);
    });
    print_row("train", text.size(), train, with_commas(int64_t(trained.merges.size())) + " merges");
    return trained;
}

static void time_coding(const Tokenizer& tokenizer, const std::string& text, int runs) {
    std::vector<int> tokens;
    const double cold = best_of(runs, [&] {
        Encoder encoder(tokenizer);
        tokens.clear();
        encode(encoder, text, tokens);
    });
    print_row("encode", text.size(), cold, with_commas(int64_t(tokens.size())) + " tokens, cache empty at first");
    Encoder encoder(tokenizer);
    encode(encoder, text, tokens);
    const double warm = best_of(runs, [&] {
        tokens.clear();
        encode(encoder, text, tokens);
    });
    print_row("encode again", text.size(), warm, "the cache has seen the text");
    const double decoding = best_of(runs, [&] {
        if (decode(tokenizer, tokens.data(), int64_t(tokens.size())) != text) fail(EXIT_INTERNAL, "decoding differs");
    });
    print_row("decode", text.size(), decoding, "");
}

int main(int argc, char** argv) try {
    std::vector<std::string> paths;
    std::string tokenizer_path;
    int vocab_size = 50257, runs = 3;
    CLI::App app("Times the tokenizer on one thread: MB/s and seconds of each part.");
    app.add_option("TEXT", paths, "text files")->required();
    app.add_option("--tokenizer", tokenizer_path, "directory of the tokenizer to encode with [the trained one]");
    app.add_option("--vocab-size", vocab_size, "tokens of the vocabulary to train [50257]");
    app.add_option("--runs", runs, "number of runs; the best one is printed [3]");
    app.add_flag("--cpu-time", cpu_time, "CPU time of the thread in place of elapsed time");
    CLI11_PARSE(app, argc, argv);
    std::string text;
    for (const std::string& path : paths) text += read_file(path, int64_t(1) << 32);

    time_scan(text, runs);
    const Tokenizer trained = time_training(text, vocab_size, runs);
    time_coding(tokenizer_path.empty() ? trained : load_tokenizer(tokenizer_path), text, runs);
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
