// update_rule.h: how an optimizer changes the weights. A rule sees flat arrays of elements; ranks, files and
// initialization are handled by Optimizer (optimizer.h).
//
// A new rule is one source beside adamw.cpp, its declaration here, and a row of the table in update_rule.cpp.
#pragma once
#include <string>
#include <vector>

#include "base/device.h"
#include "ops/ops.h"

// Arguments of a rule: elements begin .. begin + count of the model's flat buffers.
template <class floatX>
struct UpdateArgs {
    floatX* weights;
    float* master;              // null: no separate master weights
    std::vector<float*> state;  // in the order of UpdateRule::state
    const float* grads;
    const float* factor;  // (1) on the device: scales the gradients; NaN: nothing changes
    int64_t begin, count;
    DecayPattern decay;
    AdamWConfig config;
    float lr;
    int step;  // from 1
    Stream stream;
};

template <class floatX>
struct UpdateRule {
    std::string name;                // value of --optimizer
    std::vector<std::string> state;  // names, in checkpoints, of the fp32 tensors that the rule keeps for each weight
    void (*update)(const UpdateArgs<floatX>&);
};

// Refuses a name that is not in the table, and lists those that are.
template <class floatX>
const UpdateRule<floatX>& find_update_rule(const std::string& name);

template <class floatX>
void adamw_update(const UpdateArgs<floatX>& args);  // adamw.cpp
