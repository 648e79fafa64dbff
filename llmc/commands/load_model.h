// load_model.h: a model with the weights of --init, for evaluation or generation.
#pragma once
#include "base/print.h"
#include "checkpoint/hf.h"
#include "model/gpt2.h"
#include "parallel/groups.h"
#include "train/run.h"

// This rank's shard of the layers.
inline MemoryOptions shard_of(Comm& tensor_ranks) {
    MemoryOptions options;
    options.tensor = {tensor_ranks.shard_index, tensor_ranks.world_size};
    return options;
}

// Called by all ranks of `comm`.
template <class floatX>
void load_model(GPT2<floatX>& model, const RunStart& source, Comm& comm, Comm& tensor_ranks) {
    if (tensor_ranks.world_size > 1) model.tensor_ranks = &tensor_ranks;
    std::vector<float> own;
    load_weights(source.weights, ParamLayout(model.config), [&](const float* host, Slot, Param p, int l) {
        comm.reached("loading of a tensor");
        own.resize(size_t(model.layout.size(p)));
        take_shard(own.data(), host, model.layout, p);
        model.set_param(p, l, own.data());
    });
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
}
