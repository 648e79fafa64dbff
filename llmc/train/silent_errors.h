// silent_errors.h: finds memory and arithmetic that are wrong without an error: weights that differ between ranks that
// must have the same ones (--hash-check), and gradients that differ when they are computed twice (--recompute-check).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/device.h"
#include "parallel/groups.h"

// XXH3 of device memory, in the order of the stream. Copies it to the host piece by piece.
uint64_t hash_of_device(const void* data, int64_t bytes, Stream stream);

// Compares the hashes of the weights of all ranks, "HASH HOST" for each; the ranks r, r + tensor_parallel, ... must
// have the same. Refuses (EXIT_WEIGHTS_DIFFER), and names the ranks that differ from the majority.
void check_weight_hashes(const std::vector<std::string>& of_ranks, int tensor_parallel, int64_t step);
// Called by all ranks when the weights of `step` are complete.
void compare_weights(const Groups& groups, const void* weights, int64_t bytes, int64_t step, Stream stream);

// The gradients of a micro-batch that backward computes twice.
struct RecomputeCheck {
    enum { off, first, second } pass = off;
    std::vector<uint64_t> hashes;  // of each bucket in the first pass, in the order of backward
    size_t compared = 0;
    int64_t step = 0;

    void begin_first(int64_t of_step) { pass = first, step = of_step, hashes.clear(); }
    void begin_second() { pass = second, compared = 0; }
    void end() { pass = off; }
    // Called when the gradients of a bucket are complete, before they are summed with others. Refuses (EXIT_RECOMPUTED)
    // a second result with other bits.
    void bucket_complete(int bucket, const void* gradients, int64_t bytes, Stream stream);
};
