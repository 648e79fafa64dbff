// dataloader.h: turns token shards into batches in device memory. A thread reads one batch ahead.
//
// A window is T+1 consecutive tokens of a shard: T inputs and, shifted by one, T targets. A shard of n tokens has
// (n-1)/T windows. Window w starts at token w*T, so every token but a shard's last few is a target once per epoch.
// Windows are numbered over the sorted shards. A run visits them in the order of window_at, which does not depend on
// the number of ranks, the batch size or restarts.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/device.h"
#include "data/shard.h"

struct Batch {
    const int* tokens;   // (B, T), device memory
    const int* targets;  // (B, T): the next token, or -1 = ignored (rows that pad the last batch)
    int B, T;
    int64_t valid_tokens;  // targets that are not -1
};

// The number of the window at position g = 0, 1, 2, ... of a run. Position g is in epoch g / num_windows. Each epoch
// has every window once, in an order that depends on the seed and the epoch.
int64_t window_at(int64_t g, int64_t num_windows, uint64_t seed);

// The shards that match one pattern, and the windows in them.
struct Corpus {
    std::vector<Shard> shards;
    std::vector<int64_t> first_window;  // first window of each shard; the last entry is num_windows
    int T;
    int64_t tokens = 0;  // tokens in all files
    int64_t num_windows = 0;
    int vocab_size = 0;  // size that the shards of version 2 state; 0: there are none
    // Hash of the files' names (without folders) and sizes, and of a few pieces of their content. Comparing it shows
    // whether another rank, or a resumed run, has the same data.
    uint64_t fingerprint = 0;
};

// Refuses shards that were made for vocabularies of different sizes (EXIT_BAD_DATA).
Corpus open_corpus(const std::string& pattern, const char* option, int T);
void read_window(const Corpus& corpus, int64_t window, int vocab_size, int* tokens);  // T+1 tokens

struct DataLoaderConfig {
    std::string pattern;  // a shell pattern: data/x/train_*.bin
    const char* option;   // the option that set the pattern, for messages: "--train-data"
    int B, T, vocab_size;
    uint64_t seed = 0;
    int64_t windows_per_step = 0;  // over all ranks, a multiple of B * world_size; 0: B * world_size
    int rank = 0, world_size = 1;
    // The rank's share of a step is cut into this many equal parts, from which micro-batches are taken in turns.
    int parts = 1;
    Stream stream = nullptr;  // the stream on which copies to the device are queued
    bool in_order = false;    // validation: windows 0, 1, 2, ... in order, repeated
    int64_t max_windows = 0;  // limit of a pass in order, over all ranks; 0: every window
};

// Training: step s takes windows_per_step positions of the run from s * windows_per_step on. Rank r takes the r-th
// contiguous share of these positions, and each micro-batch the next B positions of the share. Refuses a corpus with
// fewer windows than one step takes (EXIT_BAD_DATA). Validation (in_order): a pass is num_batches calls of next() on
// every rank, and each pass has the same windows.
struct DataLoader {
    explicit DataLoader(const DataLoaderConfig& config);
    DataLoader(const DataLoaderConfig& config, Corpus corpus);  // corpus: of config.pattern
    ~DataLoader();
    DataLoader(const DataLoader&) = delete;

    // Returns the next micro-batch of this rank, valid until the next call. Throws the error of the reading thread: a
    // file is missing or became shorter, or a token is outside of the vocabulary.
    Batch next();
    // Continues at this position: the position of an earlier loader of any batch size, or 0 for the start.
    void seek(int64_t position);

    DataLoaderConfig config;
    Corpus corpus;
    int64_t num_batches = 0;    // batches of a pass in order, per rank
    int64_t num_windows = 0;    // windows of a pass in order over all ranks, or of an epoch
    int64_t position = 0;       // position of the first window of the next step; all the state that a restart needs
    double wait_seconds = 0.0;  // total time that next() waited for the reading thread

    // Shared by next() and the reading thread.
    struct Slot {
        int* host;     // (2, B, T): tokens, targets
        Event copied;  // completes when the slot has been copied to the device
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
