#include "data/dataloader.h"

#include <xxhash.h>

#include <algorithm>
#include <cassert>

#include "base/common.h"
#include "base/random.h"
#include "base/print.h"

// A Feistel network is a bijection whatever its round function. This one works on 2 * half bits, the smallest power of
// four that holds num_windows. It is applied again until the result is below num_windows (fewer than four times on
// average), which makes it a bijection of 0 .. num_windows-1. Eight rounds shuffle even a handful of windows well.
int64_t window_at(int64_t g, int64_t num_windows, uint64_t seed) {
    assert(g >= 0 && num_windows > 0);
    const uint64_t n = uint64_t(num_windows), epoch = uint64_t(g) / n;
    int half = 1;
    while (uint64_t(1) << (2 * half) < n) half++;
    const uint64_t mask = (uint64_t(1) << half) - 1;
    const Philox random{seed, 0xda7a000000000000 + epoch};  // streams: base/random.h

    uint64_t x = uint64_t(g) % n;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 8; round++) {
            const uint64_t mixed = left ^ (random(round << 32 | right)[0] & mask);
            left = right, right = mixed;
        }
        x = left << half | right;
    } while (x >= n);
    return int64_t(x);
}

Corpus open_corpus(const std::string& pattern, const char* option, int T) {
    INVARIANT(T > 0, "the data cannot be divided into windows of %d tokens", T);
    Corpus corpus = {{}, {}, T};
    const std::vector<std::string> paths = glob_files(pattern, option);
    // Fewer places in each file if there are many files, which may be on slow network storage.
    const int places = std::clamp(512 / int(paths.size()), 2, 4);
    std::string names;
    for (const std::string& path : paths) {
        const Shard shard = open_shard(path, places);
        if (corpus.vocab_size == 0) corpus.vocab_size = shard.vocab_size;
        if (shard.vocab_size && shard.vocab_size != corpus.vocab_size)
            fail(EXIT_BAD_DATA,
                 "%s '%s': %s is for a vocabulary of %d tokens, the shards before it for one of %d; give "
                 "shards of one tokenizer",
                 option, pattern.c_str(), path.c_str(), shard.vocab_size, corpus.vocab_size);
        corpus.shards.push_back(shard);
        corpus.first_window.push_back(corpus.num_windows);
        corpus.num_windows += std::max<int64_t>(shard.tokens - 1, 0) / T;
        corpus.tokens += shard.tokens;
        names += format("%s %lld x %d, %016llx\n", path.substr(path.rfind('/') + 1).c_str(),
                        static_cast<long long>(shard.tokens), shard.bytes_per_token,
                        static_cast<unsigned long long>(shard.hash));
    }
    corpus.first_window.push_back(corpus.num_windows);
    corpus.fingerprint = XXH3_64bits(names.data(), names.size());
    return corpus;
}

void read_window(const Corpus& corpus, int64_t window, int vocab_size, int* tokens) {
    assert(window >= 0 && window < corpus.num_windows);
    const auto after = std::upper_bound(corpus.first_window.begin(), corpus.first_window.end(), window);
    // The last shard that starts at or before the window; it is never an empty shard.
    const int64_t shard = after - corpus.first_window.begin() - 1;
    const int64_t begin = (window - corpus.first_window[shard]) * corpus.T;
    read_tokens(corpus.shards[shard], begin, corpus.T + 1, vocab_size, tokens);
}

static std::string describe_windows(const Corpus& corpus, const DataLoaderConfig& config) {
    return format("%s '%s' has %s of --seq-len %d + 1 tokens (%s, %s)", config.option, config.pattern.c_str(),
                  counted(corpus.num_windows, "window").c_str(), corpus.T, counted(corpus.tokens, "token").c_str(),
                  corpus.shards.size() == 1 ? "one file" : format("%zu files", corpus.shards.size()).c_str());
}

DataLoader::DataLoader(const DataLoaderConfig& config)
    : DataLoader(config, open_corpus(config.pattern, config.option, config.T)) {}

DataLoader::DataLoader(const DataLoaderConfig& config_, Corpus corpus_) : config(config_), corpus(std::move(corpus_)) {
    const int64_t per_call = int64_t(config.B) * config.world_size;  // windows of one next() on all ranks
    num_windows = corpus.num_windows;
    int64_t& step = config.windows_per_step;
    if (step == 0 || config.in_order) step = per_call;
    INVARIANT(per_call > 0 && step > 0 && step % (per_call * config.parts) == 0,
              "%s windows per step are not a multiple of --micro-batch %d x %d ranks x %d parts",
              with_commas(step).c_str(), config.B, config.world_size, config.parts);
    if (config.in_order) {
        if (corpus.num_windows == 0)
            fail(EXIT_BAD_DATA, "%s, but at least one is needed; give more text or lower --seq-len",
                 describe_windows(corpus, config).c_str());
        if (config.max_windows > 0) num_windows = std::min(num_windows, config.max_windows);
        num_batches = ceil_div(num_windows, per_call);
    } else if (corpus.num_windows < step) {
        fail(EXIT_BAD_DATA,
             "%s, but one step needs %s = --global-batch %s / %d; give more text, or lower --global-batch or --seq-len",
             describe_windows(corpus, config).c_str(), with_commas(step).c_str(), with_commas(step * config.T).c_str(),
             config.T);
    }

    device = DeviceBuffer<int>(2 * int64_t(config.B) * config.T, "the batch");
    for (Slot& slot : slots) slot = {static_cast<int*>(host_allocate(device.bytes())), create_event(), 0};
    start();
}

DataLoader::~DataLoader() {
    stop();
    for (Slot& slot : slots) {
        wait_ignoring_errors(slot.copied);
        destroy_event(slot.copied);
        host_free(slot.host);
    }
}

void DataLoader::start() {
    filled = used = taken = 0;
    origin = position;
    stopping = false;
    error = nullptr;
    thread = std::thread([this] { read_ahead(); });
}

void DataLoader::stop() {
    {
        const std::lock_guard lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    thread.join();
}

void DataLoader::seek(int64_t to) {
    INVARIANT(to >= 0, "data position %lld is negative", static_cast<long long>(to));
    stop();
    for (Slot& slot : slots) wait_for_event(slot.copied);
    position = to;
    start();
}

// Reads micro-batch `batch`, counted from origin. Returns the number of targets that are not ignored.
int64_t DataLoader::read_batch(int64_t batch, int* tokens, int* targets) const {
    const int B = config.B, T = config.T;
    const int64_t share = config.windows_per_step / config.world_size, micro_batches = share / B;
    const int64_t step = batch / micro_batches, turn = batch % micro_batches;
    const int64_t micro_batch = turn % config.parts * (micro_batches / config.parts) + turn / config.parts;
    const int64_t first = origin + step * config.windows_per_step + config.rank * share + micro_batch * B;
    const int64_t pass_positions = num_batches * config.windows_per_step;
    std::vector<int> window_tokens(T + 1);
    int64_t valid = 0;
    for (int b = 0; b < B; b++, tokens += T, targets += T) {
        const int64_t window =
            config.in_order ? (first + b) % pass_positions : window_at(first + b, corpus.num_windows, config.seed);
        if (window >= num_windows) {  // padding of the last batch of the pass
            std::fill_n(tokens, T, 0);
            std::fill_n(targets, T, -1);
            continue;
        }
        read_window(corpus, window, config.vocab_size, window_tokens.data());
        std::copy_n(window_tokens.data(), T, tokens);
        std::copy_n(window_tokens.data() + 1, T, targets);
        valid += T;
    }
    return valid;
}

// The reading thread: fills slots until stop() or an error, which next() then throws.
void DataLoader::read_ahead() {
    for (int64_t batch = 0;; batch++) {
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return stopping || batch < used + 2; });
            if (stopping) return;
        }
        Slot& slot = slots[batch % 2];
        std::exception_ptr caught;
        try {
            const ProfileRange range("read batch", batch);
            slot.valid_tokens = read_batch(batch, slot.host, slot.host + device.size / 2);
        } catch (const Error& e) {
            caught = std::make_exception_ptr(Error(
                e.exit_code, format("%s; mend or replace this file, or leave it out of %s, before a new start or a "
                                    "--resume, which would read it again",
                                    e.what(), config.option)));
        } catch (...) {
            caught = std::current_exception();
        }
        const std::lock_guard lock(mutex);
        error = caught;
        filled += !caught;
        changed.notify_all();
        if (caught) return;
    }
}

// One device buffer is enough: the stream runs a copy into it after all work that reads the previous batch. next()
// waits for the previous batch's copy, so the host is at most one micro-batch ahead of the device, which never runs
// out of work.
Batch DataLoader::next() {
    if (taken > 0) wait_for_event(slots[(taken - 1) % 2].copied);
    {
        std::unique_lock lock(mutex);
        used = taken;
        changed.notify_all();
        const auto there = [&] { return filled > taken || error; };
        if (!there()) {
            const ProfileRange range("wait for data");
            const double start = seconds_now();
            changed.wait(lock, there);
            wait_seconds += seconds_now() - start;
        }
        if (filled <= taken) std::rethrow_exception(error);
    }
    Slot& slot = slots[taken % 2];
    copy_to_device(device.data, slot.host, device.bytes(), config.stream);
    record_event(slot.copied, config.stream);
    const int64_t batches_per_step = config.windows_per_step / config.world_size / config.B;
    taken++;
    position = origin + taken / batches_per_step * config.windows_per_step;
    return {device.data, device.data + device.size / 2, config.B, config.T, slot.valid_tokens};
}
