// optimizer.h: AdamW over the flat buffers, with the clip factor on the device. With ZeRO-1 (Rajbhandari et al. 2020) a
// rank keeps and updates its part of every bucket, and the new weights come together before a layer needs them.
#pragma once
#include "hf_weights.h"
#include "device.h"
#include "gpt2.h"
#include "gradients.h"
#include "params.h"

template <class floatX>
struct AdamW {
    GPT2<floatX>& model;
    AdamWConfig config;
    GradientSum gradients;
    int shards, part;                  // of how many parts of a bucket this rank has which
    DeviceBuffer<float> master, m, v;  // (layout.total / shards); master is empty where the weights are their own
    DeviceBuffer<float> stats;         // norm, factor

    // Of saving only master_weights, parts and shards matter here, which are those of the model.
    AdamW(GPT2<floatX>& model, AdamWConfig config, Saving saving = {});
    AdamW(GPT2<floatX>& model, AdamWConfig config, Saving saving, Comm& comm, WireType wire);

    // A tensor from host floats in memory layout: its master, and rounded into the model's weights, which pack_bucket
    // must follow; or its moments.
    void set_state(StateKind kind, Param p, int l, const float* values);
    // The same tensor back: its master, or the weights as they are; or its moments. With shards all ranks must call it,
    // between steps; it uses the memory of the gradients.
    void get_state(float* values, StateKind kind, Param p, int l);
    // Sets all weights to GPT-2's initialization. Every rank draws its part, in the memory of the gradients.
    void draw_weights(uint64_t seed);

    // Global norm of the gradients, over all ranks; the factor that brings it to max_norm (0: never). NaN or infinite:
    // see ops.inc.
    void clip(float max_norm, Said said = {});
    // step counts from 1. Weights are complete only after need_weights; without shards at once.
    void step(float lr, int step);
    // What is queued from now on may read the weights of the bucket, and its packed matrices.
    void need_weights(int bucket);
    bool weights_pending() const;

    const float* norm() const { return stats.data; }        // (1) on the device
    const float* factor() const { return stats.data + 1; }  // (1) on the device

  private:
    // This rank's part of a bucket: elements begin .. begin + count of the model's buffers, from `at` on in its own.
    struct Piece {
        int64_t begin, count, at;
    };
    Piece piece_of(int bucket, int part) const;
    Comm::Ticket draw_bucket(int bucket, uint64_t seed);
    const float* gather_state(const float* from, Param p, int l);
    DeviceBuffer<float>& state(StateKind kind) {
        return kind == StateKind::weights ? master : kind == StateKind::m ? m : v;
    }
    std::vector<Comm::Ticket> gathering;  // of each bucket's weights; -1: they are here
};

// What AdamW(...) will allocate.
template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, Saving saving = {}, int world_size = 1);
