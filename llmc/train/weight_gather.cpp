#include "train/weight_gather.h"

#include <algorithm>
#include <numeric>

constexpr Comm::Ticket COMPLETE = -1;

template <class floatX>
ParamGather<floatX>::ParamGather(GPT2<floatX>& model, Comm& comm, const MemoryOptions& options)
    : model(model),
      comm(comm),
      shards(options.shards),
      shard_index(options.shards > 1 ? comm.shard_index : 0),
      shard(options.shard_weights ? model.layout.total / options.shards : 0, "this rank's shard of the weights"),
      tickets(size_t(model.layout.num_buckets()), COMPLETE),
      resident_bucket(size_t(1 + model.weights.layer_slots)) {
    std::iota(resident_bucket.begin(), resident_bucket.end(), 0);
}

template <class floatX>
floatX* ParamGather<floatX>::local_shard(int b) const {
    const Bucket bucket = model.layout.bucket(b);
    if (sharded()) return shard.data + bucket.begin / shards;
    return model.weights.bucket(b) + shard_index * (bucket.end - bucket.begin) / shards;
}

// Queues the gather of bucket b. With ZeRO-3 its memory may hold another bucket, whose gather must have ended.
template <class floatX>
void ParamGather<floatX>::gather(int b) {
    const Bucket bucket = model.layout.bucket(b);
    const int64_t bytes = (bucket.end - bucket.begin) * int64_t(sizeof(floatX)), own_bytes = bytes / shards;
    floatX* whole = model.weights.bucket(b);
    if (sharded()) {
        int& holder = resident_bucket[size_t(model.weights.slot(b))];
        if (tickets[size_t(holder)] != COMPLETE) comm.wait(tickets[size_t(holder)], model.stream);
        tickets[size_t(holder)] = COMPLETE;
        holder = b;
        copy_on_device(whole + shard_index * (bucket.end - bucket.begin) / shards, local_shard(b), own_bytes,
                       model.stream);
    }
    tickets[size_t(b)] = comm.all_gather(whole, bytes, model.stream);
}

template <class floatX>
void ParamGather<floatX>::shard_updated(int b) {
    if (!sharded() || b <= model.weights.layer_slots) gather(b);
}

template <class floatX>
void ParamGather<floatX>::wait(int b) {
    if (sharded() && resident_bucket[size_t(model.weights.slot(b))] != b) gather(b);
    Comm::Ticket& ticket = tickets[size_t(b)];
    const bool was_packed = ticket == COMPLETE && (!sharded() || b == 0 || b == packed_layer);
    if (ticket != COMPLETE) comm.wait(ticket, model.stream);
    ticket = COMPLETE;
    if (!was_packed) model.pack_bucket(b);
    if (sharded() && b > 0) gather_next(b);
}

// Called when layer b - 1 is computed next. Queues the gather of the layer after it, into the memory of the layer
// before it. The layers run upwards in forward and downwards in backward.
template <class floatX>
void ParamGather<floatX>::gather_next(int b) {
    const int next = b == last_layer - 1 ? b - 1 : b + 1;
    packed_layer = last_layer = b;
    if (next >= 1 && next < model.layout.num_buckets() && resident_bucket[size_t(model.weights.slot(next))] != next)
        gather(next);
}

template <class floatX>
void ParamGather<floatX>::finish() {
    for (Comm::Ticket ticket : tickets)
        if (ticket != COMPLETE) comm.wait(ticket, model.stream);
}

template <class floatX>
bool ParamGather<floatX>::pending() const {
    return std::any_of(tickets.begin(), tickets.end(), [](Comm::Ticket ticket) { return ticket != COMPLETE; });
}

template struct ParamGather<float>;
template struct ParamGather<bf16>;
