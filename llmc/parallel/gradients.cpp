#include "parallel/gradients.h"

#include <algorithm>
#include <bit>

#include "ops/ops.h"

// Number of partial sums that a rank stores: one for each tree height below the height of its own whole tree.
static int count_subtree_sums(int own_virtual_ranks) { return std::bit_width(unsigned(own_virtual_ranks)) - 1; }

// Elements of GradientSum::step_stats. A virtual rank has a loss, a sum of squares for each bucket, and room for a
// RankStatus.
static int64_t count_step_stats(const ParamLayout& layout, int virtual_ranks) {
    return (1 + layout.num_buckets() + int64_t(sizeof(RankStatus) / sizeof(float))) * virtual_ranks;
}

int64_t gradient_sum_bytes(const ParamLayout& layout, int virtual_ranks, int world_size) {
    return int64_t(sizeof(float)) * (count_subtree_sums(virtual_ranks / world_size) * layout.total +
                                     count_step_stats(layout, virtual_ranks) + 2);
}

int64_t largest_bucket(const ParamLayout& layout) {
    int64_t largest = 0;
    for (int b = 0; b < layout.num_buckets(); b++)
        largest = std::max(largest, layout.bucket(b).end - layout.bucket(b).begin);
    return largest;
}

GradientSum::GradientSum(Comm& comm, const ParamLayout& layout, Division division, const BucketBuffer<float>& grads,
                         const float* loss, Stream* stream)
    : comm(comm),
      layout(layout),
      division(division),
      grads(grads),
      loss(loss),
      stream(stream),
      step_stats(count_step_stats(layout, division.virtual_ranks), "losses and norms"),
      sums(2, "loss and norm"),
      host_statuses(static_cast<RankStatus*>(host_allocate(2 * sizeof(RankStatus)))),
      tickets(layout.num_buckets()),
      shard(division.shard_gradients ? layout.total / division.shards : 0, "this rank's shard of the gradients"),
      reduced(size_t(layout.num_buckets())) {
    INVARIANT(division.virtual_ranks % comm.world_size == 0, "%d virtual ranks are not a multiple of %d ranks",
              division.virtual_ranks, comm.world_size);
    comm.reserve(division.grad_dtype, largest_bucket(layout));
    for (int h = 0; h < count_subtree_sums(own_virtual_ranks()); h++)
        subtree_sums.emplace_back(layout.total, "gradients of virtual ranks (--deterministic-ranks)");
}

GradientSum::~GradientSum() { host_free(host_statuses); }

void GradientSum::begin_step() {
    fill_zero(step_stats.data, step_stats.bytes(), *stream);
    // The ranks may have left the step before in the middle: its sums are not needed any more.
    for (int b = 0; b < layout.num_buckets(); b++) add_to_shard(b);
    if (division.shard_gradients) fill_zero(shard.data, shard.bytes(), *stream);
}

// Adds the virtual ranks as a balanced binary tree. subtree_sums[h] holds the sum of a subtree of height h until the
// sibling subtree is complete. As in a binary counter, virtual rank v completes one subtree for every trailing 1 bit of
// v.
void GradientSum::reduce_bucket(int b, int v) {
    const Bucket bucket = layout.bucket(b);
    const int64_t count = bucket.end - bucket.begin;
    float* own = grads.bucket(b);
    int h = 0;
    for (; v >> h & 1; h++) ops::accumulate_gradients(own, subtree_sums[h].data + bucket.begin, count, *stream);
    if (v + 1 < own_virtual_ranks())
        return copy_on_device(subtree_sums[h].data + bucket.begin, own, count * int64_t(sizeof(float)), *stream);
    comm.label_next("reduce bucket", b);
    tickets[b] = division.shards > 1 ? comm.reduce_scatter(own, count, division.grad_dtype, *stream)
                                     : comm.all_reduce(own, count, division.grad_dtype, *stream);
    reduced[size_t(b)] = division.shard_gradients;
}

void GradientSum::virtual_rank_done(int v) {
    ops::accumulate_loss(step_stats.data + comm.rank * own_virtual_ranks() + v, loss, 1, 1.0f, *stream);
}

// This rank's shard of bucket b, in elements of the flat buffer.
Bucket GradientSum::shard_of(int b) const {
    const Bucket bucket = layout.bucket(b);
    const int64_t count = (bucket.end - bucket.begin) / division.shards;
    const int64_t begin = bucket.begin + (division.shards > 1 ? comm.shard_index : 0) * count;
    return {begin, begin, begin + count};
}

const float* GradientSum::summed(int b, int64_t begin) const {
    const int64_t bucket_begin = layout.bucket(b).begin;
    if (!division.shard_gradients) return grads.bucket(b) + begin - bucket_begin;
    return shard.data + bucket_begin / division.shards + begin - shard_of(b).begin;
}

void GradientSum::add_to_shard(int b) {
    if (!reduced[size_t(b)]) return;
    reduced[size_t(b)] = false;
    comm.wait(tickets[b], *stream, {"wait for gradients of bucket", b});
    const Bucket bucket = layout.bucket(b), own = shard_of(b);
    ops::accumulate_gradients(shard.data + bucket.begin / division.shards, grads.bucket(b) + own.begin - bucket.begin,
                              own.end - own.begin, *stream);
}

void GradientSum::begin_bucket(int b) {
    for (int other = 0; other < layout.num_buckets(); other++)
        if (grads.bucket(other) == grads.bucket(b)) add_to_shard(other);
}

// Every rank squares its own shard of each bucket, in one piece per virtual rank. All ranks add all pieces in the same
// order.
void GradientSum::sum_squares(float* squares_of) {
    // Without a reduction, one kernel launch handles all buckets.
    if (!needs_reduction()) return ops::sum_of_squares(squares_of, summed(0, 0), layout.total, *stream);
    const int virtual_ranks = division.virtual_ranks, own = own_virtual_ranks();
    for (int b = layout.num_buckets() - 1; b >= 0; b--) {  // in the order in which backward completes buckets
        if (!division.shard_gradients) comm.wait(tickets[b], *stream, {"wait for gradients of bucket", b});
        const Bucket bucket = layout.bucket(b);
        const int64_t piece = (bucket.end - bucket.begin) / virtual_ranks;
        for (int v = comm.shard_index * own; v < (comm.shard_index + 1) * own; v++)
            ops::sum_of_squares(squares_of + int64_t(b) * virtual_ranks + v, summed(b, bucket.begin + v * piece), piece,
                                *stream);
    }
}

void GradientSum::finish(RankStatus status) {
    const int virtual_ranks = division.virtual_ranks, buckets = layout.num_buckets();
    for (int b = buckets - 1; b >= 0; b--) add_to_shard(b);
    RankStatus& host = host_statuses[steps++ % 2];
    host = status;
    float *squares_of = step_stats.data + virtual_ranks, *statuses = squares_of + int64_t(buckets) * virtual_ranks;
    copy_to_device(statuses + int64_t(sizeof(RankStatus) / sizeof(float)) * comm.rank, &host, sizeof(RankStatus),
                   *stream);
    sum_squares(squares_of);
    // A NaN here makes the norm NaN on all ranks: clip_factor then gives NaN, and adamw leaves the weights unchanged.
    if (status.lost != 0.0f) copy_to_device(squares_of, &host.lost, sizeof(float), *stream);
    comm.label_next("reduce loss and norm");
    comm.wait(comm.all_reduce(step_stats.data, step_stats.size, GradDtype::fp32, *stream), *stream,
              {.name = "wait for loss and norm"});
    fill_zero(sums.data, sums.bytes(), *stream);
    ops::accumulate_loss(sums.data, step_stats.data, virtual_ranks, 1.0f, *stream);
    ops::accumulate_loss(sums.data + 1, squares_of, buckets * virtual_ranks, 1.0f, *stream);
}
