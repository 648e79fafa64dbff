// optimizer.h: AdamW (Loshchilov and Hutter 2019; ops::adamw): its state, gradient clipping, GPT-2's initial weights.
//
// With ZeRO (Rajbhandari et al. 2020) each rank updates one shard of every bucket; the model reads gathered weights.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "checkpoint/hf.h"
#include "model/gpt2.h"
#include "model/params.h"
#include "train/gradients.h"
#include "train/muon.h"

struct OptimizerConfig {
    AdamWConfig adamw = {};
    bool skip_nan = false;  // a step that is not finite does not keep the later ones from changing the weights
};

// Memory of a moment: of `count` elements, a multiple of FLAT_ALIGN. Zeros at first. The exponents of blocks are always
// on the device: a warp has few of them, and each transfer over the bus takes 32 bytes or more.
struct MomentBuffer {
    MomentDtype dtype;
    DeviceBuffer<uint8_t> elements, exponents;

    MomentBuffer(int64_t count, MomentDtype dtype, bool on_host = false)
        : dtype(dtype),
          elements(element_bytes(count, dtype), "the optimizer's moments (--moments, --zero)", on_host),
          exponents(exponent_bytes(count, dtype), "exponents of the optimizer's moments") {}
    static int64_t element_bytes(int64_t count, MomentDtype dtype) {
        constexpr int64_t of_element[] = {4, 2, 1};
        return count * of_element[int(dtype)];
    }
    static int64_t exponent_bytes(int64_t count, MomentDtype dtype) {
        return dtype == MomentDtype::block8 ? count / FLAT_ALIGN : 0;
    }
    static int64_t bytes(int64_t count, MomentDtype dtype) {
        return element_bytes(count, dtype) + exponent_bytes(count, dtype);
    }
    // The elements from i on.
    Moment from(int64_t i) const { return Moment(elements.data, exponents.data, dtype).from(i); }
};

// Where the elements of a slot are in a rank's memory: its shards of all buckets. Muon has a second moment only where
// AdamW updates: from a layer's bucket the part behind the matrices, or as much of it as a shard may have.
struct SlotLayout {
    const ParamLayout& layout;
    int shards, shard_index;
    bool without_matrices;

    BucketShard shard(int b) const { return shard_of(layout, b, shards, shard_index); }
    int64_t count(int b) const {
        const Bucket bucket = layout.bucket(b);
        return without_matrices && b > 0 ? std::min(shard(b).count, bucket.end - bucket.decayed_end) : shard(b).count;
    }
    int64_t total() const { return count(0) + layout.config.L * count(1); }
    // That of element i of the flat buffer, in this rank's shard of bucket b.
    int64_t at(int b, int64_t i) const {
        const int64_t begin = shard(b).begin, first = without_matrices && b > 0 ? layout.bucket(b).decayed_end : 0;
        return (b > 0 ? count(0) + (b - 1) * count(1) : 0) + i - std::max(begin, first);
    }
    int64_t at(Param p, int l) const { return at(layout.bucket_of(p, l), layout.offset(p, l)); }
};

const Groups& single_rank_groups();

// Completes the model's weights from the ranks' shards, bucket by bucket.
//
// An update changes each rank's shard of every bucket. With ZeRO-1 and ZeRO-2 each bucket is then gathered once. With
// ZeRO-3 a rank keeps its shard, and memory for two layers: a layer's bucket is gathered before its forward and again
// before its backward, while the layer before it computes. Bucket 0 stays in memory until the next update, because both
// the embeddings and the head read it.
template <class floatX>
struct ParamGather {
    GPT2<floatX>& model;
    Comm& comm;
    int shards, shard_index;     // shards per bucket; this rank's shard
    DeviceBuffer<floatX> shard;  // (layout.total / shards) with ZeRO-3: this rank's shard of every bucket

    // options: shards and shard_weights, which are those of the model.
    ParamGather(GPT2<floatX>& model, Comm& comm, const MemoryOptions& options);

    bool sharded() const { return shard.data; }
    BucketShard own_shard(int b) const { return shard_of(model.layout, b, shards, shard_index); }
    floatX* local_shard(int b) const;  // the weights of own_shard(b), which the update writes
    // Called for all buckets in order, after local_shard(b) was written.
    void shard_updated(int b) {
        if (!sharded() || b <= model.weights.layer_slots) gather(b);
    }
    // Work queued after this call may read the weights of bucket b and its packed matrices. With ZeRO-3 this ends when
    // another layer's bucket is waited for, and all ranks must wait for the same buckets in the same order.
    void wait(int b);
    bool pending() const {
        return std::ranges::any_of(tickets, [](Comm::Ticket t) { return t != COMPLETE; });
    }
    void finish() {  // waits for all gathers
        for (Comm::Ticket ticket : tickets)
            if (ticket != COMPLETE) comm.wait(ticket, model.stream);
    }

  private:
    static constexpr Comm::Ticket COMPLETE = -1;
    void gather(int b);
    void gather_next(int b);
    void complete(int b) {
        if (tickets[b] != COMPLETE) comm.wait(std::exchange(tickets[b], COMPLETE), model.stream);
    }
    std::vector<Comm::Ticket> tickets;  // one per bucket; COMPLETE if no gather is pending
    std::vector<int> resident_bucket;   // bucket in each slot of the model's weights, with ZeRO-3
    int packed_layer = 0;               // the layer's bucket whose packed matrices are in memory, with ZeRO-3
    int last_layer = 0;                 // the layer's bucket that was waited for last, with ZeRO-3
};

template <class floatX>
struct Optimizer {
    GPT2<floatX>& model;
    ParamLayout full_layout;  // layout without tensor parallelism, which set_state and get_state use
    OptimizerConfig config;
    GradReducer gradients;
    ParamGather<floatX> weights;  // the model waits for it before it reads weights
    DeviceBuffer<float> master;   // (layout.total / shards); empty if there are no separate master weights
    MomentBuffer m, v;            // (slot_layout(slot).total()): means of the gradients and of their squares
    DeviceBuffer<float> stats = {2, "gradient norm"};  // norm, factor
    std::optional<Muon<floatX>> muon;                  // rule of the layers' matrices, with options.muon

    // options: those of the model. groups: by default a single rank.
    Optimizer(GPT2<floatX>& model, OptimizerConfig config, MemoryOptions options = {},
              const Groups& groups = single_rank_groups());

    // Copies a tensor from host floats in full_layout; set_shard: in the model's layout, without the shards of other
    // tensor-parallel ranks. WEIGHTS sets the master weights and the model's, which are complete after weights_loaded.
    void set_state(Slot slot, Param p, int l, const float* values);
    void set_shard(Slot slot, Param p, int l, const float* values);
    void weights_loaded();
    // Copies a tensor to host floats in full_layout; WEIGHTS without master weights reads the model's, converted to
    // fp32. If reads_together, all ranks must call it, between steps, and only the rank of shard 0, which is rank 0,
    // gets the whole tensor; values may be null on the others. It overwrites the memory of the gradients, as both
    // functions do with moments that are not fp32 and with state in host memory.
    void get_state(float* values, Slot slot, Param p, int l);
    bool reads_together() const { return weights.shards > 1 || model.layout.shard.count > 1; }

    SlotLayout slot_layout(Slot slot) const {
        return {model.layout, weights.shards, weights.shard_index, slot == SECOND_MOMENT && muon};
    }
    // Whether the slot has tensor p. Where it has not, set_state does nothing, and get_state must not be called.
    bool has(Slot slot, Param p) const { return !slot_layout(slot).without_matrices || !is_layer_matrix(p); }

    // Computes the global norm of the gradients over all ranks, and the factor that scales it down to max_norm (0: no
    // clipping). A step that is not finite, or exceeds the limits, does not change the weights (ops.inc). Without
    // skip_nan, neither do the steps after one that is not finite.
    void clip(float max_norm, RankStatus status = {}, StepLimits limits = {});
    // step counts from 1.
    void step(float lr, int step);
    // Waits for collectives that a later step would have waited for. Call it before the memory is freed.
    void finish_collectives() {
        for (int b = 0; b < model.layout.num_buckets(); b++) gradients.begin_bucket(b);
        weights.finish();
    }

    const float* norm() const { return stats.data; }        // (1) on the device
    const float* factor() const { return stats.data + 1; }  // (1) on the device

  private:
    void update(int b, int64_t begin, int64_t end, float lr, int step);
    float* momentum(int b, int step);
    Comm::Ticket begin_muon(int b, int end, int step);
    void finish_muon(int b, float lr, int step);
    const float* gather_state(Slot slot, const float* from, Param p, int l);
    void get_shard(float* values, Slot slot, Param p, int l);
    DeviceBuffer<float> chunk;  // piece of a tensor that a tensor-parallel rank sends to the others
    const MomentBuffer& moment(Slot slot) const { return slot == FIRST_MOMENT ? m : v; }
    // The state of a slot from element `at` on, as kernels convert it: also fp32 in host memory.
    Moment state(Slot slot, int64_t at) const {
        return slot == WEIGHTS ? Moment(master.data + at) : moment(slot).from(at);
    }
    static WhichMoment which(Slot slot) { return slot == FIRST_MOMENT ? WhichMoment::first : WhichMoment::second; }
    // The fp32 buffer of a slot on the device, or null.
    float* floats(Slot slot) const {
        if (slot == WEIGHTS) return master.on_host ? nullptr : master.data;
        const bool is_fp32 = m.dtype == MomentDtype::fp32 && !m.elements.on_host;
        return is_fp32 ? static_cast<float*>(moment(slot).from(0).data) : nullptr;
    }
    bool is_converted(Slot slot) const { return !floats(slot) && (slot != WEIGHTS || master.data); }
};

// Called by all ranks: each computes a part of GPT-2's initialization (init_param in params.h), in the memory of the
// gradients: four ranks that each drew all of 124M took 8.8 s to start on two cores, now 2.8. The weights do not depend
// on the number of ranks.
template <class floatX>
void init_weights(Optimizer<floatX>& optimizer, uint64_t seed);

// Lists the memory that an Optimizer allocates.
template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, MemoryOptions options, int world_size);
