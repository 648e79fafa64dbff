// plan.h: computes what a run will need before it starts: batch arithmetic and memory by purpose. `plan` prints the
// results, `train` uses them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/gpt2.h"

// Micro-batches of B sequences of T tokens on each of world_size data-parallel ranks, grad_accum_steps of them in a
// step. Tensor-parallel ranks count as one: they compute the same micro-batch.
struct BatchPlan {
    int B, T, world_size, grad_accum_steps;
    int64_t tokens_per_step;
};

// global_batch_tokens 0: one micro-batch on each rank. Refuses a number that is not a multiple of the tokens of one
// micro-step on all ranks; the error shows the arithmetic, options that keep the number, and the nearest multiple.
// is_default: the user did not give the global batch, and the error says so.
BatchPlan plan_batch(int micro_batch, int seq_len, int64_t global_batch_tokens, int world_size,
                     bool is_default = false);

// The memory that training needs: all allocations on the device, and a host buffer for the largest tensor, which is
// loaded as a whole while the device's memory is already allocated. optimizer: the name of the update rule, as in
// --optimizer.
std::vector<MemoryItem> training_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                                        MemoryOptions options, const std::string& optimizer);
int64_t total_bytes(const std::vector<MemoryItem>& items);
// The bytes of the items that must be in the device's memory; all items, if the device's memory is the host's.
int64_t device_bytes(const std::vector<MemoryItem>& items, bool own_memory = !device_memory_is_host());

// The largest micro-batch that divides the global batch (any size if the global batch is 0) and needs at most
// `available` bytes of the device. Refuses if not even one sequence fits. On the CPU the micro-batch is also limited to
// the size beyond which training is not faster, and a tenth of the memory is left to other programs.
int largest_micro_batch(Dtype dtype, const GPT2Config& config, int seq_len, int64_t global_batch_tokens, int world_size,
                        MemoryOptions options, int64_t available, const std::string& optimizer,
                        bool own_memory = !device_memory_is_host());

// Options that would make training fit into `available` bytes of the device: "try --recompute layer ..."; "" if
// training fits already. It names no option that `options` have already.
std::string advise_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch, MemoryOptions options,
                          int64_t available, const std::string& optimizer);

// "weights 237 MiB, gradients 475 MiB, ..."; items of 0 bytes are left out.
std::string describe_memory(const std::vector<MemoryItem>& items);
std::string describe_model(const GPT2Config& config);
std::string describe_batch(const BatchPlan& batch, int tensor_parallel = 1);
