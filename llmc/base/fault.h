// fault.h: places in training at which a test makes something fail. Only the program train_gpt2_faults
// (dev/test/support/train_gpt2_faults.cpp) sets the hook; for all others a place costs a comparison with null.
#pragma once
#include <cstdint>

#include "base/dtype.h"

enum class FaultPoint {
    step,        // before a step; the points below then belong to this step
    gradients,   // the gradients of a bucket are complete on this rank; data: the bucket, of floats
    allreduce,   // just before the all-reduce of a bucket; data: the bucket, of floats
    update,      // the weights are updated; data: those of this rank
    save,        // a checkpoint is written next, maybe in a thread; step: its own
    part,        // a rank sends its part of a checkpoint next, maybe in a thread; step: that of the save
    validation,  // before a batch of a validation; step: its own
};

struct FaultSite {
    FaultPoint point;
    int rank = -1;      // given at `step`, `save`, `part` and `validation`
    int64_t step = -1;  // given at `step`, `save`, `part` and `validation`
    void* data = nullptr;
    int64_t bytes = 0;
    Stream stream = nullptr;
};

inline void (*fault_hook)(const FaultSite& site) = nullptr;
inline void fault_point(const FaultSite& site) {
    if (fault_hook) fault_hook(site);
}
