// report.h: descriptions of a run at its start: the table on the terminal, run.json, and the rank_info that ranks
// exchange.
#pragma once
#include <string>
#include <vector>

#include "data/dataloader.h"
#include "train/options.h"
#include "parallel/comm.h"
#include "train/log.h"
#include "train/plan.h"
#include "train/run_source.h"
#include "train/traffic.h"

// The options that change memory use, for this number of data-parallel ranks and this rank's shard of the layers.
MemoryOptions memory_options_of(const Options& options, int data_parallel, int tensor_index = 0);

// The table rows common to `train` and `plan`. available: free bytes of each rank's device; 0: unknown.
std::vector<Row> plan_table(Dtype dtype, const Options& options, const RunSource& source, const BatchPlan& batch,
                            const DeviceInfo& device, int64_t available);
std::string describe_schedule(const Options& options);
std::string describe_data(const Corpus& corpus, int64_t windows_per_step);
// What `traffic_of` needs from the options.
TrafficOptions traffic_options_of(Dtype dtype, const Options& options, const BatchPlan& batch);
// The hosts of the ranks: --nnodes; else world_size / local_ranks; else, with local_ranks 0, one for each CPU rank, or
// as few as at most 8 GPUs per host permit. Refuses an --nnodes that does not divide world_size.
RankPlaces rank_places_of(const Options& options, int world_size, int local_ranks);
std::string describe_traffic(Dtype dtype, const GPT2Config& config, const Options& options, const BatchPlan& batch,
                             const RankPlaces& places);

RunInfo run_info(const Options& options, const RunSource& source, const BatchPlan& batch, const Corpus& corpus,
                 const DeviceInfo& device, const std::string& precision, const std::string& command_line);

// rank_info returns the JSON object that ranks exchange. All its fields must be equal on all ranks (check_same), except
// fields_of_one_rank.
std::vector<std::string> fields_of_one_rank(const Options& options);
// val_data: null without validation data. gpu: index of this rank's GPU on its host; -1 on the CPU.
std::string rank_info(const Options& options, const RunSource& source, const Corpus& train_data, const Corpus* val_data,
                      const std::string& precision, const DeviceInfo& device, int gpu);
// Says why the ranks may round differently: the first rank whose CPU_ISA or build is not that of rank 0. "" if none is.
std::string differing_rounding(const std::vector<std::string>& rank_infos);
// The files of a corpus as a JSON object: {"train_000001.bin": {"bytes": 1224, "places": 4, "hash": "..."}, ...},
// without folders. corpus: null for no files.
std::string files_json(const Corpus* corpus);
// Says which files of `here` differ from those of `there`, another place or time: "a.bin has 1,224 bytes here, 1,424 on
// rank 0". At most three; "" if none differs.
std::string differing_files(const std::string& here, const std::string& there, const std::string& here_name,
                            const std::string& there_name);
// Called by all ranks. Refuses ranks whose `field` of the rank_infos, the fingerprint of their corpus, differs from
// that of rank 0. The error names the files.
void check_same_files(Comm& comm, const std::vector<std::string>& rank_infos, const char* field, const Corpus* corpus);
// Refuses ranks of generate and eval that differ in options, weights or data. data: null without data.
void compare_ranks(Comm& comm, const Options& options, const RunSource& source, const Corpus* data);
// "4 ranks by MPI: 0-1 on h0 (..., 1 thread, amx), 2-3 on h1 (...)", and GPUs by their numbers.
std::string describe_ranks(const Comm& comm, const std::vector<std::string>& rank_infos);
// The host of each rank.
std::vector<std::string> hosts_of(const std::vector<std::string>& rank_infos);
