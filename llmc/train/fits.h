// fits.h: finds the cheapest set of options with which training fits into memory: for `plan --fits`, and for the advice
// where a run does not fit (plan.h).
#pragma once
#include <functional>
#include <string>

#include "model/memory.h"

// Options that a run takes beside those that it has.
struct SavingSet {
    std::string text;       // " --logit-chunks 8 --recompute layer"
    MemoryOptions options;  // the run's, with them
    int64_t bytes;
};

// Returns the cheapest set with which bytes(options) are at most `available`, or else the cheapest of those that need
// the least. The options are, the cheapest first: --logit-chunks, --recompute gelu and layer and --zero 3, which take
// time or send more, and --moments 8bit and --master-weights off, which round more. A set is dearer than every set of
// options that are all cheaper than its dearest one.
SavingSet cheapest_savings(const MemoryOptions& options, int world_size,
                           const std::function<int64_t(const MemoryOptions&)>& bytes, int64_t available);

// Returns the tokens/s of a run, relative to one that recomputes nothing, by the FLOPs of both.
double relative_speed(const GPT2Config& config, int T, Recompute recompute);

// Reads the bytes of --memory: "16GiB", "512 MB".
int64_t parse_memory(const std::string& text);
