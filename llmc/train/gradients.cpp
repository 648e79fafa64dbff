#include "train/gradients.h"

#include <algorithm>
#include <bit>

#include "ops/ops.h"

constexpr int64_t STATUS = sizeof(RankStatus) / sizeof(float);  // floats

// Number of partial sums that a rank stores: one for each tree height below the height of its own whole tree.
static int count_subtree_sums(int local_virtual_ranks) { return std::bit_width(unsigned(local_virtual_ranks)) - 1; }

// A multiple of the number of ranks, as an all-reduce needs. A virtual rank has a loss and a sum of squares for each
// bucket. There is room for a RankStatus for each rank, and for each virtual rank.
int64_t count_step_stats(const ParamLayout& layout, int virtual_ranks, int world_size) {
    const int64_t statuses = STATUS * std::max(virtual_ranks, world_size);
    return round_up<int64_t>((1 + layout.num_buckets()) * int64_t(virtual_ranks) + statuses, world_size);
}

BucketShard shard_of(const ParamLayout& layout, int b, int shards, int shard_index) {
    const Bucket bucket = layout.bucket(b);
    const int64_t count = bucket.size() / shards;
    return {bucket.begin + shard_index * count, count, bucket.begin / shards};
}

// Calls f(begin, end) for each run of adjacent elements of bucket b whose tensors are divided, or are not.
template <class F>
static void for_each_part(const ParamLayout& layout, int b, bool divided, F f) {
    struct Tensor {
        int64_t begin, end;
        bool divided;
    };
    std::vector<Tensor> tensors;
    for (const ParamSpec& spec : param_table) {
        const int l = std::max(0, b - 1);
        if (layout.bucket_of(spec.id, l) != b) continue;
        const int64_t begin = layout.offset(spec.id, l);
        tensors.push_back({begin, begin + round_up(layout.size(spec.id), FLAT_ALIGN), spec.split != Split::none});
    }
    std::sort(tensors.begin(), tensors.end(), [](const Tensor& x, const Tensor& y) { return x.begin < y.begin; });
    for (size_t i = 0; i < tensors.size();) {
        const Tensor& first = tensors[i];
        int64_t end = first.end;
        while (++i < tensors.size() && tensors[i].divided == first.divided) end = tensors[i].end;
        if (first.divided == divided) f(first.begin, end);
    }
}

// Elements of bucket b that sequence parallelism leaves as sums over a rank's rows: the gradients of LayerNorm and of
// the biases that are not divided. wpe's gradient is whole: the embeddings' backward reads all rows.
template <class F>
static void for_each_part_over_rows(const ParamLayout& layout, int b, F f) {
    for_each_part(layout, b, false, [&](int64_t begin, int64_t end) {
        begin = std::max(begin, layout.bucket(b).decayed_end);
        if (begin < end) f(begin, end);
    });
}

static int64_t count_over_rows(const ParamLayout& layout) {
    int64_t largest = 0;
    for (int b : {0, 1}) {
        int64_t count = 0;
        for_each_part_over_rows(layout, b, [&](int64_t begin, int64_t end) { count += end - begin; });
        largest = std::max(largest, round_up<int64_t>(count, layout.shard.count));
    }
    return largest;
}

int64_t row_sums_bytes(const ParamLayout& layout) {
    return layout.num_buckets() * count_over_rows(layout) * int64_t(sizeof(float));
}

int64_t count_sums(const ParamLayout& layout, const MemoryOptions& o) {
    return o.sums_apart() ? layout.total / o.shards : 0;
}

int64_t gradient_sum_bytes(const ParamLayout& layout, const MemoryOptions& o, int data_parallel) {
    return int64_t(sizeof(float)) * (count_subtree_sums(o.virtual_ranks / data_parallel) * layout.total +
                                     count_step_stats(layout, o.virtual_ranks, data_parallel * layout.shard.count) +
                                     (o.sequence_parallel ? count_over_rows(layout) : 0) + GradReducer::SUMS);
}

int64_t largest_bucket(const ParamLayout& layout) {
    int64_t largest = 0;
    for (int b = 0; b < layout.num_buckets(); b++) largest = std::max(largest, layout.bucket(b).size());
    return largest;
}

GradReducer::GradReducer(const Groups& groups, const ParamLayout& layout, const MemoryOptions& sharding,
                         const BucketBuffer<float>& grads, const float* loss, Stream* stream, uint64_t seed)
    : comm(groups.dp),
      tensor_comm(groups.tp),
      world(groups.world),
      layout(layout),
      sharding(sharding),
      grads(grads),
      loss(loss),
      stream(stream),
      seed(seed),
      step_stats(count_step_stats(layout, sharding.virtual_ranks, groups.world.world_size), "losses and norms"),
      tickets(layout.num_buckets()),
      over_rows(sharding.sequence_parallel ? count_over_rows(layout) : 0, "gradients of LayerNorm and biases"),
      shard(sharding.grad_accum == Dtype::fp32 ? count_sums(layout, sharding) : 0, "sums of gradients"),
      rounded_shard(sharding.grad_accum == Dtype::bf16 ? count_sums(layout, sharding) : 0, "sums of gradients"),
      reduced(size_t(layout.num_buckets())),
      additions(size_t(layout.num_buckets())) {
    INVARIANT(sharding.virtual_ranks % comm.world_size == 0, "%d virtual ranks are not a multiple of %d ranks",
              sharding.virtual_ranks, comm.world_size);
    comm.reserve(sharding.grad_dtype, largest_bucket(layout));
    for (int h = 0; h < count_subtree_sums(local_virtual_ranks()); h++)
        subtree_sums.emplace_back(layout.total, "gradients of virtual ranks (--deterministic-ranks)");
}

void GradReducer::begin_step(int number) {
    step = number;
    fill_zero(step_stats.data, step_stats.bytes(), *stream);
    // The ranks may have left the step before in the middle: its sums are not needed any more.
    for (int b = 0; b < layout.num_buckets(); b++) add_to_shard(b);
    if (shard.data) fill_zero(shard.data, shard.bytes(), *stream);
    if (rounded_shard.data) fill_zero(rounded_shard.data, rounded_shard.bytes(), *stream);
    std::ranges::fill(additions, 0);
}

// Sums these gradients over the tensor-parallel ranks: all of the bucket's in one collective.
void GradReducer::sum_over_rows(int b) {
    float* const own = grads.bucket(b) - layout.bucket(b).begin;
    int64_t count = 0;
    for_each_part_over_rows(layout, b, [&](int64_t begin, int64_t end) {
        copy_on_device(over_rows.data + count, own + begin, (end - begin) * int64_t(sizeof(float)), *stream);
        count += end - begin;
    });
    tensor_comm.wait(tensor_comm.all_reduce(over_rows.data, over_rows.size, *stream), *stream);
    count = 0;
    for_each_part_over_rows(layout, b, [&](int64_t begin, int64_t end) {
        copy_on_device(own + begin, over_rows.data + count, (end - begin) * int64_t(sizeof(float)), *stream);
        count += end - begin;
    });
}

// Adds the virtual ranks as a balanced binary tree. subtree_sums[h] holds the sum of a subtree of height h until its
// sibling is complete. As in a binary counter, virtual rank v completes a subtree for each trailing 1 bit of v.
void GradReducer::reduce_bucket(int b, int v) {
    const Bucket bucket = layout.bucket(b);
    const int64_t count = bucket.size();
    float* own = grads.bucket(b);
    if (sharding.sequence_parallel) sum_over_rows(b);
    int h = 0;
    for (; v >> h & 1; h++) ops::accumulate_gradients(own, subtree_sums[h].data + bucket.begin, count, *stream);
    if (v + 1 < local_virtual_ranks())
        return copy_on_device(subtree_sums[h].data + bucket.begin, own, count * int64_t(sizeof(float)), *stream);
    tickets[b] = sharding.shards > 1 ? comm.reduce_scatter(own, count, sharding.grad_dtype, *stream)
                                     : comm.all_reduce(own, count, sharding.grad_dtype, *stream);
    reduced[size_t(b)] = sharding.sums_apart();
}

void GradReducer::virtual_rank_done(int v) {
    if (tensor_comm.rank > 0) return;  // all tensor-parallel ranks have the same loss
    ops::accumulate_loss(step_stats.data + comm.rank * local_virtual_ranks() + v, loss, 1, 1.0f, *stream);
}

const float* GradReducer::reduced_grads(int b, int64_t begin, int64_t end) const {
    float* const in_bucket = grads.bucket(b) + begin - layout.bucket(b).begin;
    const BucketShard own = own_shard(b);
    const int64_t at = own.at + begin - own.begin;
    if (shard.data) return shard.data + at;
    if (rounded_shard.data) ops::widen_gradients(in_bucket, rounded_shard.data + at, end - begin, *stream);
    return in_bucket;
}

void GradReducer::add_to_shard(int b) {
    if (!reduced[size_t(b)]) return;
    reduced[size_t(b)] = false;
    comm.wait(tickets[b], *stream);
    const BucketShard own = own_shard(b);
    const float* sum = grads.bucket(b) + own.begin - layout.bucket(b).begin;
    const int addition = additions[size_t(b)]++;
    if (shard.data) return ops::accumulate_gradients(shard.data + own.at, sum, own.count, *stream);
    ops::accumulate_rounded(rounded_shard.data + own.at, sum, own.begin, own.count, seed, step, addition, *stream);
}

void GradReducer::begin_bucket(int b) {
    for (int other = 0; other < layout.num_buckets(); other++)
        if (grads.bucket(other) == grads.bucket(b)) add_to_shard(other);
}

// sum = the squares of elements begin .. end of bucket b. Undivided tensors count on the first tensor-parallel rank.
void GradReducer::square(float* sum, int b, int64_t begin, int64_t end) {
    if (tensor_comm.rank == 0) return ops::sum_of_squares(sum, reduced_grads(b, begin, end), end - begin, *stream);
    for_each_part(layout, b, true, [&](int64_t part_begin, int64_t part_end) {
        const int64_t from = std::max(begin, part_begin), to = std::min(end, part_end);
        if (from >= to) return;
        float* part = sums.data + 2;
        ops::sum_of_squares(part, reduced_grads(b, from, to), to - from, *stream);
        ops::accumulate_loss(sum, part, 1, 1.0f, *stream);
    });
}

// Every rank squares its shard of each bucket, a piece per virtual rank. All ranks add all pieces in the same order.
void GradReducer::sum_squares(float* squares) {
    // Without a reduction, one kernel launch handles all buckets.
    if (!needs_reduction() && !rounded_shard.data)
        return ops::sum_of_squares(squares, reduced_grads(0, 0, layout.total), layout.total, *stream);
    const int virtual_ranks = sharding.virtual_ranks, own = local_virtual_ranks();
    for (int b = layout.num_buckets() - 1; b >= 0; b--) {  // in the order in which backward completes buckets
        if (!sharding.sums_apart()) comm.wait(tickets[b], *stream);
        const Bucket bucket = layout.bucket(b);
        const int64_t piece = bucket.size() / virtual_ranks;
        for (int v = comm.shard_index * own; v < (comm.shard_index + 1) * own; v++)
            square(squares + int64_t(b) * virtual_ranks + v, b, bucket.begin + v * piece,
                   bucket.begin + (v + 1) * piece);
    }
}

void GradReducer::finish(RankStatus status) {
    const int virtual_ranks = sharding.virtual_ranks, buckets = layout.num_buckets();
    for (int b = buckets - 1; b >= 0; b--) add_to_shard(b);
    RankStatus& host = host_statuses[step % 2];
    host = status;
    float *squares = step_stats.data + virtual_ranks, *statuses = squares + int64_t(buckets) * virtual_ranks;
    copy_to_device(statuses + STATUS * world.rank, &host, sizeof host, *stream);
    sum_squares(squares);
    world.wait(world.all_reduce(step_stats.data, step_stats.size, Dtype::fp32, *stream), *stream);
    fill_zero(sums.data, sums.bytes(), *stream);
    ops::accumulate_loss(sums.data, step_stats.data, virtual_ranks, 1.0f, *stream);
    ops::accumulate_loss(sums.data + 1, squares, buckets * virtual_ranks, 1.0f, *stream);
}
