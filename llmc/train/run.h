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
#include "train/start.h"

struct RunData {
    Corpus train, val;        // val has no shards without validation
    std::vector<Task> tasks;  // tasks of --eval-task
};

struct Run {
    Options options;  // automatic values are resolved: --micro-batch auto, --steps 0
    Dtype dtype;      // dtype of weights and activations
    Groups groups;    // world, data-parallel and tensor-parallel ranks
    RunStart start;
    BatchPlan batch;  // B, T, micro-steps per step, tokens per step
    RunData data;
    std::unique_ptr<FileLock> lock;  // lock of --output; null on ranks other than 0
    std::string differing;           // ranks that round differently, so that their weights differ; "": none

    bool is_rank0() const { return groups.world.rank == 0; }
    float loss_scale() const { return 1.0f / float(batch.grad_accum_steps * batch.world_size); }
    float lr(int64_t step) const { return float(learning_rate(schedule_of(options), step)); }
    MemoryOptions memory_options() const;
    Options used_options() const;  // with what --precision auto and --ranks have become
    Json describe_data() const;    // fingerprints, for checkpoints
};

// Called by all ranks. Finds the checkpoint or the weights to start from, fills in automatic options, and refuses ranks
// that differ in options, data or program.
Run prepare_run(const Options& options, const Launch& launch, Comm& world, Dtype dtype);
// Called by all ranks. Opens the log, with its first line, the notes of the start and the table (first_lines.cpp).
std::unique_ptr<Log> open_log(const Run& run, const Launch& launch);
