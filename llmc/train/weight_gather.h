// weight_gather.h: completes the model's weights from the ranks' shards, bucket by bucket.
//
// An update changes each rank's shard of every bucket. With ZeRO-1 and ZeRO-2 each bucket is then gathered once.
//
// With ZeRO-3 (Rajbhandari et al. 2020) a rank keeps its shard, and memory for two layers: a layer's bucket is gathered
// before its forward and again before its backward, while the layer before it computes. Bucket 0 stays in memory until
// the next update, because both the embeddings and the head read it.
#pragma once
#include <vector>

#include "model/gpt2.h"
#include "parallel/comm.h"

template <class floatX>
struct ParamGather {
    GPT2<floatX>& model;
    Comm& comm;
    int shards, shard_index;     // shards per bucket; this rank's shard
    DeviceBuffer<floatX> shard;  // (layout.total / shards) with ZeRO-3: this rank's shard of every bucket

    // options: shards and shard_weights, which are those of the model.
    ParamGather(GPT2<floatX>& model, Comm& comm, const MemoryOptions& options);

    bool sharded() const { return shard.data; }
    // This rank's shard of bucket b. The update writes it.
    floatX* local_shard(int b) const;
    // Called for all buckets in order, after local_shard(b) was written.
    void shard_updated(int b);
    // Work queued after this call may read the weights of bucket b and its packed matrices. With ZeRO-3 this ends when
    // another layer's bucket is waited for, and all ranks must wait for the same buckets in the same order.
    void wait(int b);
    bool pending() const;  // whether wait(b) waits, for any b
    void finish();         // waits for all gathers

  private:
    void gather(int b);
    void gather_next(int b);
    std::vector<Comm::Ticket> tickets;  // one per bucket; COMPLETE if no gather is pending
    std::vector<int> resident_bucket;   // with ZeRO-3: the bucket in each slot of the model's weights
    int packed_layer = 0;               // with ZeRO-3: the layer's bucket whose packed matrices are in memory
    int last_layer = 0;                 // with ZeRO-3: the layer's bucket that was waited for last
};
