// run.h: the state of a training run apart from its model: options, data, log and progress.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "base/device.h"
#include "base/dtype.h"
#include "base/output_lock.h"
#include "checkpoint/checkpoint.h"
#include "data/dataloader.h"
#include "train/options.h"
#include "parallel/groups.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"
#include "train/schedule.h"

struct Run {
    Options options;  // with automatic values (--micro-batch, --steps, ...) resolved
    Comm& comm;       // of all ranks
    Groups groups;
    Dtype dtype;                       // dtype of weights and activations
    std::unique_ptr<OutputLock> lock;  // null: no --output, or not rank 0
    RunSource source;
    BatchPlan batch;
    OwnedStream stream;
    std::unique_ptr<DataLoader> loader, val_loader;  // val_loader is null without validation
    std::unique_ptr<Log> log;
    Schedule schedule;
    std::string info_options, data_fingerprint;  // in the form that checkpoints store

    TrainerState state;              // state after the last step that is known to be finite
    bool same_rounding = true;     // all ranks have the same CPU_ISA and build, so equal weights stay equal bit by bit
    bool stop = false;             // some rank was asked to stop or must stop; all ranks have the same value
    int64_t first_step = 0;  // at the start of the run; restarts by --max-restarts do not change it
    int64_t saved_step = -1;  // of the last complete checkpoint; of the first rank only

    Run(const Options& options, Comm& comm, Dtype dtype)
        : options(options),
          comm(comm),
          groups(make_groups(comm, options.tensor_parallel, options.tp_across_hosts, heads_of(options))),
          dtype(dtype) {}
    bool first_rank() const { return comm.rank == 0; }
    MemoryOptions memory_options() const;  // of this rank
};

// Called by all ranks. Opens everything that a run needs, refuses invalid options, and prints the table at the start of
// the log.
std::unique_ptr<Run> start_run(const Options& options, const Launch& launch, Comm& comm, Dtype dtype,
                               const std::string& command_line);
// Index of this rank's GPU among the GPUs of its host.
int device_of(const Options& options, const Launch& launch);
