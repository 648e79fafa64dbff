// dataloader.h: token shards -> batches on the device, read one batch ahead by a thread.
//
// A sample is a window of T+1 tokens: inputs and, one further, targets. A shard of n tokens has (n-1)/T of them, window
// w starting at token w*T, so that every token but a shard's last few is a target once per epoch. Samples are numbered
// over the sorted shards; a run visits them in the order of sample_at, which no rank, batch size or restart changes.
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
    const int* targets;  // (B, T): the token that follows, -1 = ignored (the rows that fill up a last batch)
    int B, T;
    int64_t valid_tokens;  // targets that are not -1
};

// Sample at position g = 0, 1, 2, ... of a run: a bijection of 0 .. num_samples-1 for each epoch g / num_samples, drawn
// by (seed, epoch).
int64_t sample_at(int64_t g, int64_t num_samples, uint64_t seed);

// The files behind one pattern, and the samples in them.
struct Corpus {
    std::vector<Shard> shards;
    std::vector<int64_t> first_sample;  // of each shard; one more at the end
    int T;
    int64_t tokens;  // in all files
    int64_t num_samples;
    // Of names (without folders), sizes and samples of the content: tells whether another rank, or a run that is
    // resumed, has the same data.
    uint64_t fingerprint;
};

Corpus open_corpus(const std::string& pattern, const char* option, int T);
void read_sample(const Corpus& corpus, int64_t sample, int vocab_size, int* tokens);  // T+1 tokens

struct DataLoaderConfig {
    std::string pattern;  // files, as the shell writes them: data/x/train_*.bin
    const char* option;   // what the user gave the pattern to, for messages: "--train-data"
    int B, T, vocab_size;
    uint64_t seed = 0;
    int64_t samples_per_step = 0;  // over all ranks, a multiple of B * world_size; 0: B * world_size
    int rank = 0, world_size = 1;
    Stream stream = nullptr;  // where batches are used: copies are queued on it
    bool fixed_set = false;   // validation: samples 0, 1, 2, ... in order, then from the start again
    int64_t max_batches = 0;  // of the fixed set, of all ranks; 0: every sample, the last batch filled up
    Trace* trace = nullptr;
};

// Training: step s takes the positions s * samples_per_step .. of the run, rank r the r-th contiguous share of them,
// each micro-batch the next B of those. Refuses a corpus with fewer samples than one step takes (EXIT_BAD_DATA).
// Validation (fixed_set): a pass is num_batches calls of next() on every rank, and each pass has the same samples.
struct DataLoader {
    explicit DataLoader(const DataLoaderConfig& config);
    ~DataLoader();
    DataLoader(const DataLoader&) = delete;

    // The next micro-batch of this rank, valid until the next call. Throws what the reading thread met: a file that
    // became shorter, a token outside of the vocabulary.
    Batch next();
    // Goes on from there: position of a loader that stopped, whatever its batch was; 0 for the start.
    void seek(int64_t position);

    DataLoaderConfig config;
    Corpus corpus;
    int64_t num_batches = 0;    // of the fixed set, per rank
    int64_t num_samples = 0;    // of a pass of the fixed set, over all ranks, or of an epoch
    int64_t position = 0;       // of the first sample of the next step: all there is to save for a restart
    double wait_seconds = 0.0;  // that next() has waited for the files, in all

    // What follows belongs to next() and the thread.
    struct Slot {
        int* host;     // (2, B, T): tokens, targets
        Event copied;  // to the device
        int64_t valid_tokens;
    };
    Slot slots[2];
    DeviceBuffer<int> device;  // (2, B, T)
    std::thread thread;
    std::mutex mutex;  // guards what follows
    std::condition_variable changed;
    int64_t filled = 0;  // batches that the thread has read since seek()
    int64_t used = 0;    // batches whose slot it may fill again
    bool stopping = false;
    std::exception_ptr error;

    void start();
    void stop();
    void read_ahead();
    int64_t read_batch(int64_t batch, int* tokens, int* targets) const;
    int64_t taken = 0;   // batches handed out since seek()
    int64_t origin = 0;  // position at seek()
};
