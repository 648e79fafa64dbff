// run.h: the state of a training run apart from its model: options, data, log and progress.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "base/device.h"
#include "base/dtype.h"
#include "base/gpu_monitor.h"
#include "base/output_lock.h"
#include "checkpoint/checkpoint.h"
#include "data/dataloader.h"
#include "train/options.h"
#include "parallel/groups.h"
#include "parallel/straggler.h"
#include "parallel/watchdog.h"
#include "train/background_save.h"
#include "train/gpu_health.h"
#include "train/health.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"
#include "train/schedule.h"
#include "train/state_collector.h"

struct Run {
    Options options;  // with automatic values (--micro-batch, --steps, ...) resolved
    Comm& comm;       // of all ranks
    Watchdog& watchdog;
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

    TrainerState state;                              // state after the last step that is known to be finite
    double clock = 0.0;                              // seconds_now() at the start of the step that is being timed
    double loader_waited = 0.0, comm_exposed = 0.0;  // seconds of the whole run, up to `clock`
    GpuMonitor gpu{device_bus_id()};
    std::vector<std::string> hosts;  // of all ranks
    SlowdownWarnings slowdowns;
    Straggler straggler;
    Health health;
    bool same_rounding = true;     // all ranks have the same CPU_ISA and build, so equal weights stay equal bit by bit
    bool stop = false;             // some rank was asked to stop or must stop; all ranks have the same value
    std::optional<Error> failure;  // why this rank must stop
    int failed_saves = 0;
    int64_t first_step = 0;                      // at the start of the run; restarts by --max-restarts do not change it
    double longest_save = 0.0;                   // seconds, of this start
    int64_t saved_step = -1;  // of the last complete checkpoint; with saves in the background, of the first rank only
    bool saves_in_background = false;           // the same on all ranks
    std::unique_ptr<StateCollector> collector;  // with saves_in_background, if each rank has a part of the state
    // On the first rank, with saves_in_background. It is destroyed first, because its thread reads the run.
    std::unique_ptr<BackgroundSave> background_save;

    Run(const Options& options, Comm& comm, Dtype dtype)
        : options(options),
          comm(comm),
          watchdog(*comm.watchdog),
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
Timeouts timeouts_of(const Options& options);

// Starts the timer of a step.
void start_clock(Run& run);
// Called by all ranks at the same point: ends the recording of the trace and writes it. A write error is a warning.
void end_trace(Run& run);
// Warns if NVML has failed on this rank, once for each of its functions.
void report_gpu_error(Run& run);
// Called after the loop. Returns the exit code: 0 if the run is complete. If the run was stopped: the exit code of
// the first rank that could not continue, else EXIT_PREEMPTED. A rank that could not continue throws its error instead.
int end_run(Run& run);
