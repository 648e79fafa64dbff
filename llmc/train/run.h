// run.h: a training run without its model: options, data, log, and how far it has come.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "base/device.h"
#include "base/dtype.h"
#include "base/output_lock.h"
#include "checkpoint/checkpoint.h"
#include "data/dataloader.h"
#include "options/options.h"
#include "parallel/comm.h"
#include "parallel/straggler.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"
#include "train/schedule.h"

struct Run {
    Options options;  // with --micro-batch, --steps and the like worked out
    Comm& comm;
    Dtype dtype;                       // of weights and activations
    std::unique_ptr<OutputLock> lock;  // null: no --output, or not the first rank
    RunSource source;
    BatchPlan batch;
    OwnedStream stream;
    std::unique_ptr<DataLoader> loader, val_loader;  // the latter null: no validation
    std::unique_ptr<Log> log;
    Schedule schedule;
    std::string info_options, data_fingerprint;  // as checkpoints keep them

    TrainerState state;                              // after the last step that is known to be good
    double clock = 0.0;                              // seconds_now() when the step began whose time is measured
    double loader_waited = 0.0, comm_exposed = 0.0;  // seconds of the whole run, up to then
    Straggler straggler;
    bool stop = false;             // some rank was asked to stop or has to, and all know it
    std::optional<Error> failure;  // why this rank has to
    int failed_saves = 0;
    int64_t saved_step = -1;

    Run(const Options& options, Comm& comm, Dtype dtype) : options(options), comm(comm), dtype(dtype) {}
    bool first_rank() const { return comm.rank == 0; }
};

// Opens everything that a run needs, refuses what cannot be, and prints the table at the start of the log. All ranks.
std::unique_ptr<Run> start_run(const Options& options, const Launch& launch, Comm& comm, Dtype dtype,
                               const std::string& command_line);
// The GPU of this rank, counted among those of its host.
int device_of(const Options& options, const Launch& launch);

// Starts to measure the time of a step.
void start_clock(Run& run);
// All ranks, at the same point: ends the recording of the trace and writes it. A trace that cannot be written is a
// warning.
void end_trace(Run& run);
// After the loop. The exit code: 0, or of a run that was stopped that of the first rank that could not go on, or
// EXIT_PREEMPTED.
int end_run(Run& run);
