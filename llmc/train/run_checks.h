// run_checks.h: what is refused, worked out or warned of before the first step of a run.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/output_lock.h"
#include "data/dataloader.h"
#include "options/options.h"
#include "parallel/comm.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"

// --micro-batch auto becomes the largest that fits the free memory of every rank. local_ranks: of this host.
void resolve_micro_batch(Dtype dtype, Options& options, const RunSource& source, int T, Comm& comm, int world_size,
                         int local_ranks);
void check_tokens_at_once(int B, int T);
// Refuses a --trace that names a file of the run itself.
void check_trace(const Options& options);
// Refuses numbers of virtual ranks that do not divide as a tree of sums must.
void check_virtual_ranks(const Options& options, const BatchPlan& batch);
// Refuses a --sample-prompt that is too long, before the run rather than at its first sample.
void check_sample_prompt(const Options& options, const RunSource& source, int T);
// The gradients' type in collectives.
ReduceDtype reduce_dtype(const Options& options);

// Warns of what makes the losses mean less than they seem to. val: null where there are no validation data.
void warn_of_data(Log& log, const Options& options, const RunSource& source, const Corpus& train, const Corpus* val);

// Warns of a warmup that leaves no step for the rest of the schedule.
void warn_of_warmup(Log& log, const Options& options);

// Locks --output for as long as the result lives; null without --output. Refuses a new run among the checkpoints of
// another.
std::unique_ptr<OutputLock> lock_output(const Options& options);
// Makes room for the next checkpoint, and so for the log, if --keep gives up others. What cannot be done is a note:
// without that room training may still go on.
void make_room_to_resume(const Options& options, const RunSource& source, int64_t step,
                         std::vector<std::string>& notes);
