// optimizer.h: AdamW over the flat buffers, with the clip factor on the device.
#pragma once
#include "device.h"
#include "gpt2.h"
#include "params.h"

template <class floatX>
struct AdamW {
    GPT2<floatX>& model;
    AdamWConfig config;
    DeviceBuffer<float> master, m, v;  // (layout.total); master is empty where the weights are their own
    DeviceBuffer<float> stats;         // squares, norm, factor

    // Of saving only master_weights matters here.
    AdamW(GPT2<floatX>& model, AdamWConfig config, Saving saving = {});

    // A tensor from host floats in memory layout: its master, and rounded into the model's weights, which pack_bucket
    // must follow.
    void set_param(Param p, int l, const float* values);
    // The same tensor back: its master, or the weights as they are.
    void get_param(float* values, Param p, int l);

    // Global norm of the gradients; the factor that brings it to max_norm (0: never). NaN or infinite: see ops.inc.
    void clip(float max_norm);
    // step counts from 1. Packs the weights it has changed.
    void step(float lr, int step);

    const float* norm() const { return stats.data + 1; }    // (1) on the device
    const float* factor() const { return stats.data + 2; }  // (1) on the device
};

// What AdamW(...) will allocate.
template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, Saving saving = {});
