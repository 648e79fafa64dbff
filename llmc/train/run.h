// run.h: what is fixed before the first step: where the run starts, options with automatic values, ranks and data.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/files.h"
#include "data/dataloader.h"
#include "infer/tasks.h"
#include "parallel/comm.h"
#include "train/log.h"
#include "train/options.h"
#include "train/plan.h"
#include "train/schedule.h"

struct RunData {
    Corpus train, val;        // val has no shards without validation
    std::vector<Task> tasks;  // tasks of --eval-task
};

inline GradDtype grad_dtype(const Options& o) { return o.grad_dtype == "bf16" ? GradDtype::bf16 : GradDtype::fp32; }

struct Run {
    Options options;  // automatic values are resolved: --micro-batch auto, --steps 0
    Dtype dtype;      // dtype of weights and activations
    Groups groups;    // world, data-parallel and tensor-parallel ranks
    RunStart start;
    BatchPlan batch;  // B, T, micro-steps per step, tokens per step
    RunData data;
    Schedule schedule;
    std::unique_ptr<FileLock> lock;  // lock of --output; null on ranks other than 0
    std::string command_line;

    bool is_rank0() const { return groups.world.rank == 0; }
    float loss_scale() const { return 1.0f / float(batch.grad_accum_steps * batch.world_size); }
    MemoryOptions memory_options() const;
    std::string describe_data() const;  // fingerprints as JSON, for checkpoints
};

// Called by all ranks. Finds the checkpoint or the weights to start from, fills in automatic options, refuses ranks
// that differ in options, data or program, and opens the log with the table at its start.
Run prepare_run(const Options& options, const Launch& launch, Comm& world, Dtype dtype, const std::string& command_line,
                std::unique_ptr<Log>& log);

// Called by all ranks, before any other collective.
void check_same_command(Comm& comm, Command command);

// Finds where train and plan start: --resume, else --init, else the options' shape. The tokenizer is --tokenizer, or
// that of the weights, or the one beside the data. Refuses data of another, without --allow-other-tokenizer.
RunStart find_training_start(const Options& options, const Comm& comm);
// Finds the model of generate and eval: --init is a Hugging Face directory, a checkpoint, or a run's output directory,
// of which the newest checkpoint is used; rank 0 warns of damaged ones. need_tokenizer: refuses a model without one.
RunStart find_trained_model(const Options& options, bool need_tokenizer, const Comm& comm);

// Refuses shards of another vocabulary size than that of the tokenizer. option: where the data come from.
void check_vocabulary(const Corpus& data, const char* option, const RunStart& start, const Options& options);

// Plans a step on world_size ranks, local_ranks of them on this host. Sets --micro-batch auto to the largest that fits
// the free memory of every rank in `groups`. Refuses options that do not fit the model or the number of ranks.
BatchPlan resolve_batch(Options& options, Dtype dtype, const GPT2Config& config, const Groups& groups, int world_size,
                        int local_ranks);
void check_tokens_at_once(int B, int T);
void check_tensor_parallel(const Options& options, const GPT2Config& config, int T, int world_size);

// Refuses ranks of generate and eval that differ in options, weights or data (null without data).
void compare_ranks(Comm& comm, const Options& options, const RunStart& start, const Corpus* data);
// Compares the rank_infos, one JSON object per rank. Of those fields that all ranks must have in common, the error
// (EXIT_USAGE) names the first that differs, and the first rank that differs from rank 0. Returns the objects.
struct Json;
std::vector<Json> check_same(const std::vector<std::string>& rank_infos);
