// plan.h: what a run will need, worked out before it starts: batch arithmetic, memory by purpose, FLOPs. `plan` prints
// it, `train` obeys it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/gpt2.h"

// Micro-batches of B sequences of T tokens on each of world_size ranks, grad_accum_steps of them in a step.
struct BatchPlan {
    int B, T, world_size, grad_accum_steps;
    int64_t tokens_per_step;
};

// global_batch_tokens 0: one micro-batch on each rank. Refuses a number that does not divide, with the arithmetic,
// what would keep it, and the nearest one that divides.
BatchPlan plan_batch(int micro_batch, int seq_len, int64_t global_batch_tokens, int world_size);

// The memory that training takes: what it allocates on the device, and on the host the largest tensor, which is loaded
// whole while all of that is there.
std::vector<MemoryItem> training_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                                        MemoryOptions options);
int64_t total_bytes(const std::vector<MemoryItem>& items);
// What of it the device must have; all of it, where the device's memory is the host's.
int64_t device_bytes(const std::vector<MemoryItem>& items, bool own_memory = !device_memory_is_host());

// The largest micro-batch that divides the global batch (any, where that is 0) and takes at most `available` bytes of
// the device. Refuses when not even one sequence fits. In memory that is the host's it is no larger than speed needs,
// and leaves a tenth of the memory to other programs.
int largest_micro_batch(Dtype dtype, const GPT2Config& config, int seq_len, int64_t global_batch_tokens, int world_size,
                        MemoryOptions options, int64_t available, bool own_memory = !device_memory_is_host());

// The options that would make training fit into so many bytes of the device: "" if it fits, "try --recompute layer ..."
std::string advise_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch, MemoryOptions options,
                          int64_t available);

// "weights 237 MiB, gradients 475 MiB, ..."; items of 0 bytes are left out.
std::string describe_memory(const std::vector<MemoryItem>& items);
std::string describe_model(const GPT2Config& config);
std::string describe_batch(const BatchPlan& batch);
