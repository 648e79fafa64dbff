// load_model.h: loads the weights of --init into a model for evaluation or generation.
#pragma once
#include "checkpoint/hf_weights.h"
#include "model/gpt2.h"
#include "train/run_source.h"

template <class floatX>
void load_model(GPT2<floatX>& model, const RunSource& source) {
    load_weights(source.weights, model.layout,
                 [&](const float* host, Slot, Param p, int l) { model.set_param(p, l, host); });
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
}
