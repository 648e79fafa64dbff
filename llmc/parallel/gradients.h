// gradients.h: the gradients, loss and norm of a step, summed over micro-steps and ranks.
//
// The micro-batches of a step belong to virtual ranks, of which each rank has as many; usually one. Within a virtual
// rank backward adds to the gradients; virtual ranks are added as a balanced binary tree, ((0+1)+(2+3))+..., the lower
// part of it here, the upper by comm.h. With a fixed number of virtual ranks the sum has the same bits on 1, 2, 4, ...
// ranks (EasyScale, Li et al. 2023).
#pragma once
#include <vector>

#include "model/params.h"
#include "parallel/comm.h"

// What each rank says to all in every step, beside its gradients.
struct RankStatus {
    float stop;         // not 0: it was asked to stop, or cannot go on
    float own_ms;       // of the step before, without waiting for other ranks; its loader's time counts
    float lost = 0.0f;  // NaN: it has not computed its micro-batches, so that no rank may take this step
};

// How a step is divided among ranks.
struct Division {
    int virtual_ranks = 1;  // of all ranks: a multiple of world_size
    int shards = 1;         // world_size with ZeRO-1: each rank then gets its part of every bucket only
    ReduceDtype wire = ReduceDtype::fp32;
};

struct GradientSum {
    Comm& comm;
    const ParamLayout& layout;  // its parts: division.virtual_ranks
    Division division;
    float* grads;       // (layout.total), where backward leaves them
    const float* loss;  // (1), where it leaves the mean loss of its micro-steps, scaled for the whole step
    Stream* stream;     // of the model

    // grads, loss and stream are the model's. Memory: see gradient_sum_bytes.
    GradientSum(Comm& comm, const ParamLayout& layout, Division division, float* grads, const float* loss,
                Stream* stream);
    GradientSum(const GradientSum&) = delete;
    ~GradientSum();

    int own_virtual_ranks() const { return division.virtual_ranks / comm.world_size; }
    // Whether reduce_bucket has anything to do.
    bool needs_reduction() const { return comm.world_size > 1 || division.virtual_ranks > 1; }

    // During the last backward of the v-th virtual rank of this rank: the gradients of bucket b are complete.
    void reduce_bucket(int b, int v);
    void virtual_rank_done(int v);  // after all buckets
    // After the last: waits for all buckets, and leaves on the device the loss of the step and the sum of the squares
    // of its gradients.
    void finish(RankStatus status);

    const float* step_loss() const { return sums.data; }    // (1) on the device
    const float* squares() const { return sums.data + 1; }  // (1) on the device
    const float* rank_statuses() const {
        return partials.data + (1 + layout.num_buckets()) * division.virtual_ranks;
    }  // (world_size) of RankStatus, on the device

    std::vector<DeviceBuffer<float>> finished;  // [h]: a tree of 2^h virtual ranks that waits for its neighbour
    DeviceBuffer<float> partials;  // (4 + buckets, virtual ranks): losses, squares by bucket, what each rank said
    DeviceBuffer<float> sums;      // loss, squares
    RankStatus* host_statuses;     // of even and odd steps
    int64_t steps = 0;
    std::vector<Comm::Ticket> tickets;  // of each bucket
};

int64_t largest_bucket(const ParamLayout& layout);  // elements

// On the device, beside the gradients themselves.
int64_t gradient_sum_bytes(const ParamLayout& layout, int virtual_ranks, int world_size);
