// state_part.h: which elements of the weights and of the optimizer's state a rank has, with ZeRO and tensor
// parallelism.
#pragma once
#include <vector>

#include "model/params.h"

struct StatePart {
    ParamLayout layout;               // of the rank's model, with its shard of tensor parallelism
    int shards = 1, shard_index = 0;  // the rank's shard of every bucket (ZeRO)
    bool is_copy = false;             // another rank has the same part, and its part is saved

    int64_t floats() const { return is_copy ? 0 : layout.total / shards; }  // of the weights, and of each state tensor
};

// Elements part .. part + count of a part are elements whole .. whole + count of a flat buffer without shards.
struct PartRun {
    int64_t part, whole, count;
};
// All elements of the tensors, in the order of the part, without padded elements. whole: the layout without shards.
std::vector<PartRun> runs_of(const StatePart& part, const ParamLayout& whole);
// Copies elements begin .. begin + count of a part into the flat buffer `whole`.
void put_part(float* whole, const std::vector<PartRun>& runs, const float* part, int64_t begin, int64_t count);
