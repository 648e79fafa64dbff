// optimizer.h: AdamW (Loshchilov and Hutter 2019): its state, the clipping of gradients, and GPT-2's initial weights.
// The arithmetic is ops::adamw.
//
// With ZeRO-1, 2 and 3 (Rajbhandari et al. 2020) each rank keeps and updates one shard of every bucket. The new weights
// are gathered before the model reads them.
#pragma once
#include <string>
#include <vector>

#include "base/device.h"
#include "checkpoint/hf.h"
#include "model/gpt2.h"
#include "model/params.h"
#include "train/gradients.h"
#include "train/weight_gather.h"

struct OptimizerConfig {
    AdamWConfig adamw = {};
    bool skip_nan = false;  // a step that is not finite does not keep the later ones from changing the weights
};

// Names, in checkpoints, of the fp32 tensors that AdamW keeps for each weight; the slots after WEIGHTS.
inline const std::vector<std::string> STATE_NAMES = {"m", "v"};

const Groups& single_rank_groups();

template <class floatX>
struct Optimizer {
    GPT2<floatX>& model;
    ParamLayout full_layout;  // layout without tensor parallelism, which set_state and get_state use
    OptimizerConfig config;
    GradReducer gradients;
    ParamGather<floatX> weights;  // the model waits for it before it reads weights
    DeviceBuffer<float> master;   // (layout.total / shards); empty if there are no separate master weights
    DeviceBuffer<float> m, v;     // (layout.total / shards): means of the gradients and of their squares
    DeviceBuffer<float> stats;    // norm, factor

    // options: those of the model. groups: by default a single rank.
    Optimizer(GPT2<floatX>& model, OptimizerConfig config, MemoryOptions options = {},
              const Groups& groups = single_rank_groups(), GradDtype grad_dtype = GradDtype::fp32);

    // Copies a tensor from host floats in the layout full_layout; set_shard: in the layout of the model, so without the
    // shards of other tensor-parallel ranks. WEIGHTS sets the master weights and the model's weights, which are
    // complete after weights_loaded.
    void set_state(Slot slot, Param p, int l, const float* values);
    void set_shard(Slot slot, Param p, int l, const float* values);
    void weights_loaded();
    // Copies a tensor to host floats in the layout full_layout; WEIGHTS without master weights reads the model's
    // weights, converted to fp32. If reads_together, all ranks must call it, between steps, and only the rank of shard
    // 0, which is rank 0, gets the whole tensor; values may be null on the others. It overwrites the memory of the
    // gradients.
    void get_state(float* values, Slot slot, Param p, int l);
    bool reads_together() const { return weights.shards > 1 || model.layout.shard.count > 1; }

    // Computes the global norm of the gradients over all ranks, and the factor that scales it down to max_norm (0: no
    // clipping). A step that is not finite, or exceeds the limits, does not change the weights (ops.inc). Without
    // skip_nan, neither do the steps after one that is not finite.
    void clip(float max_norm, RankStatus status = {}, StepLimits limits = {});
    // step counts from 1.
    void step(float lr, int step);
    // Waits for collectives that a later step would have waited for. Call it before the memory is freed.
    void finish_collectives();

    const float* norm() const { return stats.data; }        // (1) on the device
    const float* factor() const { return stats.data + 1; }  // (1) on the device

  private:
    // A rank's shard of a bucket: elements begin .. begin + count of the model's buffers. In the optimizer's buffers
    // the shard starts at element `at`.
    struct Shard {
        int64_t begin, count, at;
    };
    Shard shard_of(int bucket, int shard_index) const;
    void update(int b, const Shard& shard, float lr, int step);
    const float* gather_state(const float* from, Param p, int l);
    void get_shard(float* values, Slot slot, Param p, int l);
    DeviceBuffer<float> chunk;  // piece of a tensor that a tensor-parallel rank sends to the others
    DeviceBuffer<float>& buffer(Slot slot) { return slot == WEIGHTS ? master : slot == 1 ? m : v; }
};

// Called by all ranks: each computes a part of GPT-2's initialization (init_param in params.h), in the memory of the
// gradients. The weights do not depend on the number of ranks.
template <class floatX>
void init_weights(Optimizer<floatX>& optimizer, uint64_t seed);

// Lists the memory that an Optimizer allocates.
template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, MemoryOptions options, int world_size);
