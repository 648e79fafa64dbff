// measure.h: how fast this machine trains a model of a given shape, from a step on random tokens.
#pragma once
#include <optional>
#include <string>

#include "model/gpt2.h"

// Random tokens below V, for a step whose result does not matter.
DeviceBuffer<int> random_tokens(int64_t count, int V, Stream stream);

// Trains a step of one small layer, so that the GPU's libraries and kernels allocate their memory before the free
// memory is measured. Does nothing on the CPU.
void load_libraries(Dtype dtype, const GPT2Config& config, const std::string& optimizer);

struct MeasuredStep {
    int B;                      // sequences of the micro-batch
    double micro_step, update;  // seconds
};

// Times a micro-step and an update of the named update rule on one rank, with fewer than B sequences if B would take
// long. Returns nothing if one sequence would take too long, estimated from the device's peak (FLOP/s), or if too
// little memory is free.
std::optional<MeasuredStep> measure_step(Dtype dtype, const GPT2Config& config, int B, int T, MemoryOptions options,
                                         double peak_flops, const std::string& optimizer);
