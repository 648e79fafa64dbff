// update_rule.h: how an optimizer changes the weights. A rule sees flat arrays of elements; ranks, files and
// initialization are handled by Optimizer (optimizer.h).
//
// A new rule is one source next to adamw.cpp, its declaration here, a row of the table in update_rule.cpp, and its
// name in --optimizer.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/device.h"
#include "ops/ops.h"

// The constants of all rules, from the options of the same names. Each rule uses those that it knows.
struct Hyperparameters {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    uint64_t seed = 0;  // seed of stochastic rounding
};

// Arguments of a rule: elements begin .. begin + count of the model's flat buffers.
template <class floatX>
struct UpdateArgs {
    floatX* weights;
    float* master;              // null: no separate master weights
    std::vector<float*> state;  // in the order of UpdateRule::state
    const float* grads;
    const float* factor;  // (1) on the device: scales the gradients; not finite: nothing changes
    int64_t begin, count;
    DecayPattern decay;
    Hyperparameters constants;
    float lr;
    int step;  // from 1
    Stream stream;
};

template <class floatX>
struct UpdateRule {
    std::string name;                // value of --optimizer
    std::string title;               // "AdamW", for people
    std::vector<std::string> state;  // names, in checkpoints, of the fp32 tensors that the rule keeps for each weight
    std::string state_title;         // "moments": what these tensors are, for people; empty without state
    void (*update)(const UpdateArgs<floatX>&);
};

// Finds the rule of this name. The error for a name that is not in the table lists the names that are.
template <class floatX>
const UpdateRule<floatX>& find_update_rule(const std::string& name);

template <class floatX>
void adamw_update(const UpdateArgs<floatX>& args);  // adamw.cpp
