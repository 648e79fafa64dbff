// plan.h: computes before a run starts how it divides a batch, its memory, the bytes that ranks send, the time of a
// step, and the table at the start. `plan` prints the results, `train` uses them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/print.h"
#include "model/gpt2.h"
#include "parallel/comm.h"

struct CheckpointFormat;
struct Corpus;
struct Options;
enum class Command;
struct RunStart;

// Micro-batches of B sequences of T tokens on each of world_size data-parallel ranks, grad_accum_steps of them in a
// step. Tensor-parallel ranks count as one: they compute the same micro-batch.
struct BatchPlan {
    int B, T, world_size, grad_accum_steps;
    int64_t tokens_per_step;
};

// Divides the global batch into micro-steps; 0 is one micro-batch on each rank. Refuses a number that is not a
// multiple of the tokens of one micro-step on all ranks; the error shows the arithmetic, options that keep the number,
// and the nearest multiple. is_default: the user did not give the global batch, and the error says so.
BatchPlan plan_batch(int micro_batch, int seq_len, int64_t global_batch, int world_size, bool is_default = false);

// The memory of this machine's ranks: free bytes of each one's device (0: unknown), and those of the host, which they
// share. device: the bytes of --memory, or those that each rank finds free.
struct Room {
    int64_t device;
    int local_ranks = 1;
    int64_t host = 0;
};
Room find_room(const Options& options, int local_ranks = 1);

// Plans a step on world_size ranks, local_ranks of them on this host. Sets --micro-batch auto to the largest that fits
// the free memory of every rank in `groups`. Refuses options that do not fit the model or the number of ranks.
BatchPlan resolve_batch(Options& options, Dtype dtype, const GPT2Config& config, const Groups& groups, int world_size,
                        int local_ranks);
void check_tokens_at_once(int B, int T);
void check_tensor_parallel(const Options& options, const GPT2Config& config, int T, int world_size);

// ---- memory

// Returns the options that change memory use, for so many data-parallel ranks and this rank's shard of the layers.
MemoryOptions memory_options_of(const Options& options, int data_parallel, int tensor_index = 0);

int64_t largest_tensor(const GPT2Config& config);  // elements of it
// Returns the memory that training needs: all allocations on the device, and a host buffer for the largest
// tensor, which is loaded as a whole while the device's memory is already allocated.
std::vector<MemoryItem> training_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                                        MemoryOptions options);
// Returns the bytes of a rank's state that an update reads in the host's memory, and writes there (--offload), and the
// seconds that this takes over a bus like PCIe 4.0 x16.
int64_t offloaded_bytes(Dtype dtype, const GPT2Config& config, const MemoryOptions& options, int world_size);
inline double bus_seconds(int64_t bytes) { return double(bytes) / 25e9; }
// Adds up the items that must be in the device's memory; all items, if the device's memory is the host's.
int64_t device_bytes(const std::vector<MemoryItem>& items, bool own_memory = !device_memory_is_host());

// Returns the run's command with the options that make it fit, or with a smaller model: "try COMMAND --recompute
// layer". It adds none that the run has already. Returns "" if training fits already.
std::string advise_memory(Dtype dtype, const Options& options, const GPT2Config& config, const BatchPlan& batch,
                          const Room& room);

// Returns the largest micro-batch that divides the global batch (any size if that is 0) and needs at most `available`
// bytes of the device; 1 if not even one sequence fits. On the CPU a tenth of the memory is left to other programs, and
// the micro-batch is no larger than makes training faster.
int largest_micro_batch(Dtype dtype, const GPT2Config& config, int seq_len, int64_t global_batch, int world_size,
                        MemoryOptions options, int64_t available, bool own_memory = !device_memory_is_host());

// Returns what to try if a command's allocation for this purpose fails. Weights, gradients and moments do not depend on
// the batch.
std::string memory_advice(Command command, const std::string& purpose);

// ---- the cheapest options that fit (fits.cpp)

// Options that a run takes beside those that it has.
struct SavingSet {
    std::string text;       // " --logit-chunks 8 --recompute layer"
    MemoryOptions options;  // the run's, with them
    int64_t missing;        // bytes; 0: training fits
};

// Returns the cheapest set with which no bytes are missing, or else the cheapest of those that need the least. The
// options are, the cheapest first: --zero 1, --logit-chunks, --recompute gelu, --zero 2, --recompute layer and --zero
// 3, which take time or send more, --moments 8bit, --master-weights off and --grad-accum bf16, which round more, and
// --offload on a GPU, the slowest of all. A set is dearer than every set of options that are all cheaper than its
// dearest one.
SavingSet cheapest_savings(const MemoryOptions& options, int world_size,
                           const std::function<int64_t(const MemoryOptions&)>& missing);
// Returns that set for a run of one sequence in each of `ranks` micro-batches.
SavingSet cheapest_savings(Dtype dtype, const Options& options, const GPT2Config& config, int ranks, const Room& room);

// Returns the options of the largest model that fits: d36, d24 or d12 for a model with a name, or else one with fewer
// heads of the same size, and as many layers less. "": none fits, or the run continues from weights.
std::string smaller_model(const Options& options, const GPT2Config& config,
                          const std::function<SavingSet(const GPT2Config&)>& cheapest);

// Returns the tokens/s of a run, relative to one that recomputes nothing, by the FLOPs of both.
double relative_speed(const GPT2Config& config, int T, Recompute recompute);

// Reads the bytes of --memory: "16GiB", "512 MB".
int64_t parse_memory(const std::string& text);

// ---- time

// Returns random tokens below V, for a step whose result does not matter.
DeviceBuffer<int> random_tokens(int64_t count, int V, Stream stream);

struct MeasuredStep {
    int B;                      // sequences of the micro-batch
    double micro_step, update;  // seconds
    bool of_two_layers;         // computed from the times of models of one and two layers
};

// Times a micro-step and an update on one rank, for at most 60 s: with fewer than B sequences if B would take long or
// does not fit, and else with one or two layers. Returns nothing if these would take too long, estimated from the
// device's peak (FLOP/s; 0: unknown), or if too little memory is free.
std::optional<MeasuredStep> measure_step(Dtype dtype, const GPT2Config& config, int B, int T, MemoryOptions options,
                                         double peak_flops);

// ---- text

// Returns the table rows common to `train` and `plan`. data: the training data; null: unknown. The schedule is left out
// while --steps is 0.
std::vector<Row> plan_table(Dtype dtype, const Options& options, const RunStart& source, const BatchPlan& batch,
                            const DeviceInfo& device, Room room, const Corpus* data);

// ---- checkpoints

// Returns the bytes of the copy of weights and moments that a thread writes checkpoints from (saver.h); 0 if the run
// after `step` saves none before its last step. The copy is made if as many bytes stay free for the file cache.
int64_t saved_copy_bytes(const Options& options, const GPT2Config& config, int64_t step);
inline bool saved_copy_fits(int64_t bytes, int64_t free) { return bytes <= free / 2; }

CheckpointFormat checkpoint_format(const Options& options);
bool keeps_best(const Options& options);  // whether the checkpoint of the best validation is kept
