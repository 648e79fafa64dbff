// dataloader.h: turns token shards into batches in device memory. A thread reads one batch ahead.
//
// A sample is a window of T+1 tokens: T inputs and, shifted by one, T targets. A shard of n tokens has (n-1)/T samples.
// Sample w starts at token w*T, so every token but a shard's last few is a target once per epoch. Samples are numbered
// over the sorted shards. A run visits them in the order of sample_at, which does not depend on the number of ranks,
// the batch size or restarts.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/device.h"
#include "base/trace.h"
#include "data/shard.h"

struct Batch {
    const int* tokens;   // (B, T), device memory
    const int* targets;  // (B, T): the next token, or -1 = ignored (rows that pad the last batch)
    int B, T;
    int64_t valid_tokens;  // targets that are not -1
};

// The sample at position g = 0, 1, 2, ... of a run. Within an epoch, which has number g / num_samples, it
// maps g mod num_samples one-to-one to the samples, keyed by (seed, epoch).
int64_t sample_at(int64_t g, int64_t num_samples, uint64_t seed);

// The shards that match one pattern, and the samples in them.
struct Corpus {
    std::vector<Shard> shards;
    std::vector<int64_t> first_sample;  // of each shard; the last entry is num_samples
    int T;
    int64_t tokens;  // in all files
    int64_t num_samples;
    // Hash of the files' names (without folders) and sizes, and of a few pieces of their content. Shows whether another
    // rank, or a resumed run, has the same data.
    uint64_t fingerprint;
};

Corpus open_corpus(const std::string& pattern, const char* option, int T);
void read_sample(const Corpus& corpus, int64_t sample, int vocab_size, int* tokens);  // T+1 tokens

struct DataLoaderConfig {
    std::string pattern;  // a shell pattern: data/x/train_*.bin
    const char* option;   // the option that set the pattern, for messages: "--train-data"
    int B, T, vocab_size;
    uint64_t seed = 0;
    int64_t samples_per_step = 0;  // over all ranks, a multiple of B * world_size; 0: B * world_size
    int rank = 0, world_size = 1;
    Stream stream = nullptr;  // copies to the device are queued on it
    bool in_order = false;    // validation: samples 0, 1, 2, ... in order, repeated
    int64_t max_batches = 0;  // of a pass in order, over all ranks; 0: every sample, with a padded last batch
    Trace* trace = nullptr;
};

// Training: step s takes samples_per_step positions of the run from s * samples_per_step on. Rank r takes the r-th
// contiguous share of them, and each micro-batch the next B positions of the share. Refuses a corpus with fewer samples
// than one step takes (EXIT_BAD_DATA). Validation (in_order): a pass is num_batches calls of next() on every rank, and
// each pass has the same samples.
struct DataLoader {
    explicit DataLoader(const DataLoaderConfig& config);
    ~DataLoader();
    DataLoader(const DataLoader&) = delete;

    // The next micro-batch of this rank, valid until the next call. Throws the error of the reading thread: a file
    // became shorter, or a token is outside of the vocabulary.
    Batch next();
    // Continues at this position: the position of an earlier loader of any batch size, or 0 for the start.
    void seek(int64_t position);

    DataLoaderConfig config;
    Corpus corpus;
    int64_t num_batches = 0;    // in a pass in order, per rank
    int64_t num_samples = 0;    // in a pass in order over all ranks, or in an epoch
    int64_t position = 0;       // of the first sample of the next step; the only state that a restart needs
    double wait_seconds = 0.0;  // total time that next() waited for the reading thread

    // Shared by next() and the reading thread.
    struct Slot {
        int* host;     // (2, B, T): tokens, targets
        Event copied;  // the copy to the device is complete
        int64_t valid_tokens;
    };
    Slot slots[2];
    DeviceBuffer<int> device;  // (2, B, T)
    std::thread thread;
    std::mutex mutex;  // guards filled, used, stopping and error
    std::condition_variable changed;
    int64_t filled = 0;  // batches read since seek()
    int64_t used = 0;    // batches whose slots may be overwritten
    bool stopping = false;
    std::exception_ptr error;

    void start();
    void stop();
    void read_ahead();
    int64_t read_batch(int64_t batch, int* tokens, int* targets) const;
    int64_t taken = 0;   // batches that next() returned since seek()
    int64_t origin = 0;  // position at seek()
};
