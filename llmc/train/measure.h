// measure.h: how fast this machine trains a model of a given shape, from a step on random tokens.
#pragma once
#include <optional>

#include "model/gpt2.h"

struct MeasuredStep {
    int B;                      // sequences of the micro-batch
    double micro_step, update;  // seconds
};

// A micro-step and an update on one rank, with fewer than B sequences where those take long. Nothing, if even one
// sequence takes too long by the device's peak (FLOP/s), or if the memory is not free.
std::optional<MeasuredStep> measure_step(Dtype dtype, const GPT2Config& config, int B, int T, MemoryOptions options,
                                         double peak_flops);
