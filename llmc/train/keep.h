// keep.h: which checkpoints a run keeps, by its options, and the disk space that they take.
#pragma once
#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"
#include "train/options.h"

KeepRules keep_rules(const Options& options);
// The most checkpoints of a whole run that are on the disk at the same time, with the one that is being saved. The run
// saves only every --checkpoint-every steps and at its end. Options::steps must not be 0.
int64_t most_checkpoints(const Options& options);
// The row `disk` of a plan. checkpoint_bytes: the size of one checkpoint.
std::string describe_disk(const Options& options, int64_t checkpoint_bytes);
