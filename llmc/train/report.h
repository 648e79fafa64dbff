// report.h: what a run says of itself at the start: the table on the terminal, run.json, what ranks tell each other.
#pragma once
#include <string>
#include <vector>

#include "data/dataloader.h"
#include "options/options.h"
#include "parallel/comm.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"

// What the options give up for memory, with so many ranks.
MemoryOptions memory_options_of(const Options& options, int world_size);

// The rows that `train` and `plan` have in common. available: bytes that each rank's device has free; 0: not known.
std::vector<Row> plan_table(Dtype dtype, const Options& options, const RunSource& source, const BatchPlan& batch,
                            const DeviceInfo& device, int64_t available);
std::string describe_schedule(const Options& options);
std::string describe_data(const Corpus& corpus, int64_t samples_per_step);
// Bytes that a rank sends in a step.
std::string describe_traffic(Dtype dtype, const GPT2Config& config, const Options& options, const BatchPlan& batch);

RunInfo run_info(const Options& options, const RunSource& source, const BatchPlan& batch, const Corpus& corpus,
                 const DeviceInfo& device, const std::string& precision, const std::string& command_line);

// What a rank tells the others: a JSON object, in which all but those of its own (check_same) must be the same.
inline const std::vector<std::string> fields_of_one_rank = {"host",   "machine",      "device",   "gpu",
                                                            "--rank", "--local-rank", "--threads"};
// val_data: null where there are none. gpu: this rank's, of its host; -1 on the CPU.
std::string rank_info(const Options& options, const RunSource& source, const Corpus& train_data, const Corpus* val_data,
                      const std::string& precision, const std::string& device, int gpu);
// "4 ranks by MPI: 0-1 on h0 (..., 1 thread, amx), 2-3 on h1 (...)", and GPUs by their numbers.
std::string describe_ranks(const Comm& comm, const std::vector<std::string>& rank_infos);
