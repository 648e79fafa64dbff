// gradients.h: the gradients, loss and norm of a step, summed over micro-steps and ranks.
//
// Micro-batches are split evenly over virtual ranks; every rank hosts the same number of them, usually one. Within a
// virtual rank, backward accumulates gradients. Virtual ranks are summed as a balanced binary tree, ((0+1)+(2+3))+...:
// the lower levels here, the upper levels by the all-reduce or reduce-scatter of comm.h. With a fixed number of virtual
// ranks the sum is bitwise equal on 1, 2, 4, ... ranks (EasyScale, Li et al. 2023).
//
// With ZeRO-2 (Rajbhandari et al. 2020) the virtual ranks are summed in every micro-step, and each rank adds up its
// shard of these sums. The layers' buckets share memory, so a bucket is added to the shard before its memory is reused.
// With --grad-accum bf16 it is the same in every stage, and the shard, all of it without ZeRO, is bf16.
//
// With tensor parallelism a rank has the gradients of its shard of the divided tensors. The other tensors are the same
// on all tensor-parallel ranks, and so are their gradients, which count once in the norm. With sequence parallelism
// these gradients are sums over a rank's rows, and are summed over the tensor-parallel ranks first.
#pragma once
#include <vector>

#include "model/memory.h"
#include "model/params.h"
#include "parallel/comm.h"

// Status that each rank sends to all ranks in every step, with its gradients.
struct RankStatus {
    float stop;    // 1 if the rank was asked to stop, else 0
    float own_ms;  // time of the last finished step, with waits for the loader, without waits for other ranks
};
static_assert(sizeof(RankStatus) == 2 * sizeof(float), "an all-reduce of floats gathers the statuses");

// A rank's shard of a bucket: elements begin .. begin + count of a flat buffer, or at .. of the rank's shards alone.
struct BucketShard {
    int64_t begin, count, at;
};
BucketShard shard_of(const ParamLayout& layout, int bucket, int shards, int shard_index);

struct GradReducer {
    Comm& comm;                 // data-parallel group
    Comm &tensor_comm, &world;  // tensor-parallel group; all ranks
    const ParamLayout& layout;  // made with sharding.virtual_ranks, a multiple of world_size
    // How a step is divided among ranks. grad_dtype bf16 halves the bytes. It is for slow networks: CPU ranks of one
    // host, whose cores are the bottleneck, reach 0.82 to 0.85 of the tokens/s with it.
    MemoryOptions sharding;
    const BucketBuffer<float>& grads;  // output of backward
    const float* loss;                 // (1), output of backward: the sum over micro-steps, scaled for the whole step
    Stream* stream;                    // the model's stream
    uint64_t seed;                     // for stochastic rounding

    // grads, loss and stream belong to the model. Device memory used: gradient_sum_bytes.
    GradReducer(const Groups& groups, const ParamLayout& layout, const MemoryOptions& sharding,
                const BucketBuffer<float>& grads, const float* loss, Stream* stream, uint64_t seed);
    GradReducer(const GradReducer&) = delete;
    ~GradReducer() { host_free(host_statuses); }

    int local_virtual_ranks() const { return sharding.virtual_ranks / comm.world_size; }
    // Whether reduce_bucket has anything to do.
    bool needs_reduction() const { return world.world_size > 1 || sharding.virtual_ranks > 1; }

    void begin_step(int step);  // called before the first backward of a step; they count from 1
    // Called when bucket b is complete, in the last backward of this rank's v-th virtual rank; with sums_apart in each.
    void reduce_bucket(int b, int v);
    void virtual_rank_done(int v);  // called after reduce_bucket of all buckets of v
    // Work queued after this call may overwrite the memory of bucket b's gradients. Needed with sums_apart.
    void begin_bucket(int b);
    // Called after the last virtual rank. Waits for all buckets; computes the step's loss and its gradients' squares.
    void finish(RankStatus status);

    // The sums of elements begin .. end of the flat buffer, in bucket b. After finish this rank's shard is complete.
    // Sums in bf16 are widened into the bucket's memory of `grads`, which layers share.
    const float* reduced_grads(int b, int64_t begin, int64_t end) const;

    const float* step_loss() const { return sums.data; }              // (1) on the device
    const float* grad_norm_squared() const { return sums.data + 1; }  // (1) on the device
    const float* rank_statuses() const {
        return step_stats.data + (1 + layout.num_buckets()) * sharding.virtual_ranks;
    }  // (world.world_size) of RankStatus, on the device

    std::vector<DeviceBuffer<float>> subtree_sums;  // [h]: sum of 2^h virtual ranks, to be added to the next 2^h
    // (4 + buckets, virtual ranks) losses, sums of squares of each bucket, and room for the RankStatus of each rank. A
    // rank writes its own elements and leaves zeros in the others, so that an all-reduce gathers them.
    DeviceBuffer<float> step_stats;
    static constexpr int SUMS = 3;
    DeviceBuffer<float> sums = {SUMS, "loss and norm"};  // loss, squares, squares of a part of a bucket
    RankStatus* host_statuses = static_cast<RankStatus*>(host_allocate(2 * sizeof(RankStatus)));  // even and odd steps
    int step = 0;                       // that begin_step has begun
    std::vector<Comm::Ticket> tickets;  // one per bucket
    DeviceBuffer<float> over_rows;      // gradients to be summed over rows, with sequence parallelism
    DeviceBuffer<float> shard;          // (layout.total / shards) with ZeRO-2: this rank's shard of the sums
    DeviceBuffer<bf16> rounded_shard;   // takes the place of `shard` with --grad-accum bf16
    std::vector<bool> reduced;          // flags of buckets that are not yet added to the shard, with sums_apart
    std::vector<int> additions;         // to the shard of each bucket, in this step

  private:
    BucketShard own_shard(int b) const {
        return shard_of(layout, b, sharding.shards, sharding.shards > 1 ? comm.shard_index : 0);
    }
    void add_to_shard(int b);
    void sum_over_rows(int b);
    void square(float* sum, int b, int64_t begin, int64_t end);
    void sum_squares(float* squares);
};

int64_t largest_bucket(const ParamLayout& layout);  // elements
// Elements of GradReducer::step_stats, which the ranks all-reduce in every step.
int64_t count_step_stats(const ParamLayout& layout, int virtual_ranks, int world_size);
// Bytes that tensor-parallel ranks all-reduce in a step with sequence parallelism: gradients of LayerNorm and biases.
int64_t row_sums_bytes(const ParamLayout& layout);

int64_t count_sums(const ParamLayout& layout, const MemoryOptions& sharding);  // elements of a GradReducer's shard
// Device memory of a GradReducer, without the gradients and the shard.
int64_t gradient_sum_bytes(const ParamLayout& layout, const MemoryOptions& sharding, int data_parallel);
