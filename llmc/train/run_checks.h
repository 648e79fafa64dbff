// run_checks.h: checks, automatic values and warnings before the first step of a run.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "base/dtype.h"
#include "base/output_lock.h"
#include "data/dataloader.h"
#include "train/options.h"
#include "parallel/groups.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"

// Sets --micro-batch auto to the largest that fits the free memory of every rank. local_ranks: ranks on this host.
void resolve_micro_batch(Dtype dtype, Options& options, const RunSource& source, int T, const Groups& groups,
                         int data_parallel, int local_ranks);
void check_tokens_at_once(int B, int T);
// Refuses a --tensor-parallel that does not divide the heads. The advice fits this many ranks, too.
void check_heads(int tensor_parallel, const GPT2Config& config, int world_size);
// Refuses heads or, with --sequence-parallel, T that --tensor-parallel does not divide. The run has world_size ranks.
void check_tensor_parallel(const Options& options, const GPT2Config& config, int T, int world_size);
// With --deterministic-ranks: refuses a number of ranks that is not a power of two. Refuses a --deterministic-ranks
// that is not a power of two, is less than the number of ranks, or does not divide --global-batch into micro-batches.
void check_virtual_ranks(const Options& options, const BatchPlan& batch);
// Refuses a --sample-prompt that is too long, before the run rather than at its first generated text.
void check_sample_prompt(const Options& options, const RunSource& source, int T);
// The data type of gradients in collectives.
GradDtype grad_dtype(const Options& options);

// Warns of data problems that make the losses misleading. val: null without validation data.
void warn_of_data(Log& log, const Options& options, const RunSource& source, const Corpus& train, const Corpus* val);

// Warns of a warmup that leaves no step for the rest of the schedule.
void warn_of_warmup(Log& log, const Options& options);

// Notes the checkpoints that --keep-every and --keep-best pass over, because no save, or no validation, is at their
// step.
void note_keep_rules(Log& log, const Options& options);

// Locks --output for the lifetime of the result; null without --output. Refuses a new run in a directory that holds the
// checkpoints of another run.
std::unique_ptr<OutputLock> lock_output(const Options& options);
int64_t bytes_of_save(const Options& options, const RunSource& source);
// If the next checkpoint does not fit, deletes older checkpoints that --keep gives up, which also makes room for the
// log. A failure becomes a note: training may still continue without that room.
void make_room_to_resume(const Options& options, const RunSource& source, int64_t step,
                         std::vector<std::string>& notes);

// ---- comparison of ranks

// Content of the first line of log.jsonl.
nlohmann::ordered_json run_info(const Options& options, const RunSource& source, const BatchPlan& batch,
                                const Corpus& corpus, const DeviceInfo& device, Dtype dtype, int world_size,
                                const std::string& command_line);
// Returns the JSON object that ranks exchange. All its fields must be equal on all ranks (check_same), except
// fields_of_one_rank. val_data: null without validation data. gpu: index of this rank's GPU on its host; -1 on the CPU.
std::string rank_info(const Options& options, const RunSource& source, const Corpus& train_data, const Corpus* val_data,
                      const std::string& precision, const DeviceInfo& device, int gpu);
std::vector<std::string> fields_of_one_rank();
// Names the first rank whose CPU_ISA or build is not that of rank 0, so that it may round differently; "" if none is.
std::string differing_rounding(const std::vector<std::string>& rank_infos);
// Refuses ranks of generate and eval that differ in options, weights or data. data: null without data.
void compare_ranks(Comm& comm, const Options& options, const RunSource& source, const Corpus* data);
// "4 ranks by MPI: 0-1 on h0 (..., 1 thread, amx), 2-3 on h1 (...)", and GPUs by their numbers.
std::string describe_ranks(const Comm& comm, const std::vector<std::string>& rank_infos);
