#include "train/traffic.h"

#include <algorithm>
#include <bit>

#include "parallel/gradients.h"

static SentBytes operator+(SentBytes a, SentBytes b) { return {a.inside + b.inside, a.between + b.between}; }
static SentBytes operator*(int64_t n, SentBytes a) { return {n * a.inside, n * a.between}; }

namespace {
// Ranks that make collectives together.
struct Group {
    int size, hosts;
    CollectiveAlgorithm algorithm;
};
}  // namespace

// What a rank sends in a reduce-scatter or in an all-gather.
static SentBytes one_pass(int64_t bytes, const Group& group) {
    const int64_t n = group.size, share = bytes / n, sent = share * (n - 1);
    const bool halving = group.algorithm == CollectiveAlgorithm::halving && std::has_single_bit(unsigned(n));
    const int64_t between = group.hosts == 1 ? 0 : halving ? share * (group.hosts - 1) : sent * group.hosts / n;
    return {sent - between, between};
}

// The activations that tensor-parallel ranks exchange in a micro-step, in reduce-scatters and all-gathers of N x C
// elements. An all-reduce is two of them.
//
// Without sequence parallelism a layer has four all-reduces: of the outputs of attproj and fcproj in forward, of the
// gradients of ln2 and ln1 in backward. The embedding's output and lnf's gradient are one each.
//
// With sequence parallelism a rank keeps its share of the tokens between the matmuls. A layer's forward gathers ln1,
// scatters attproj's output, gathers ln2 and scatters fcproj's output. Its backward gathers the residual's gradient for
// fcproj and for attproj, gathers ln2 and ln1 again for the gradients of fcw and qkvw, and scatters their gradients.
// The model scatters the embedding's output, gathers lnf, scatters its gradient, and gathers the gradient of the
// embedding's output.
//
// --recompute layer repeats, for all layers but the last, a layer's forward up to fcproj.
static SentBytes activations_sent(const GPT2Config& config, const TrafficOptions& o, const Group& group) {
    if (group.size == 1) return {};
    const int64_t element = o.dtype == Dtype::fp32 ? 4 : 2;
    const int64_t in_layer = o.sequence_parallel ? 4 + 6 : 2 * (2 + 2), in_model = o.sequence_parallel ? 4 : 2 * 2;
    const int64_t again = o.recompute_layer ? (config.L - 1) * int64_t(o.sequence_parallel ? 3 : 2) : 0;
    const int64_t partials = o.tokens * 2 * int64_t(sizeof(float)) * group.size;  // of cross entropy, from every rank
    return (config.L * in_layer + again + in_model) * one_pass(o.tokens * config.C * element, group) +
           one_pass(partials, group);
}

Traffic traffic_of(const GPT2Config& config, const TrafficOptions& o, const RankPlaces& places) {
    const int tp = o.tensor_parallel;
    INVARIANT(places.world_size % places.hosts == 0 && places.world_size / places.hosts % tp == 0,
              "%d ranks on %d hosts, tensor parallel %d", places.world_size, places.hosts, tp);
    const Group world = {places.world_size, places.hosts, places.algorithm};
    const Group tensor = {tp, 1, places.algorithm}, data = {places.world_size / tp, places.hosts, places.algorithm};
    const int virtual_ranks = std::max(o.virtual_ranks, data.size);
    const ParamLayout layout(config, virtual_ranks, {0, tp});
    const int64_t gradient = o.grad_dtype == GradDtype::bf16 ? 2 : 4;
    const int64_t gathered = o.zero == 0 ? gradient : o.dtype == Dtype::fp32 ? 4 : 2;

    // Each forward and each backward of ZeRO-3 gathers the layers, but for two that are in memory from the pass before.
    const int64_t in_pass = o.zero >= 3 ? std::max(0, config.L - 2) * layout.layer_stride : 0;
    const SentBytes gradients = one_pass(layout.total * gradient, data);
    const SentBytes activations = activations_sent(config, o, tensor);
    const SentBytes weights_again = 2 * one_pass(in_pass * gathered, data);
    SentBytes per_step = one_pass((layout.total - in_pass) * gathered, data);
    per_step = per_step + 2 * one_pass(step_stats_bytes(layout, virtual_ranks, places.world_size), world);

    // With ZeRO-2 every micro-step sums the gradients, but a rank adds up its virtual ranks first.
    const int64_t own_virtual_ranks = virtual_ranks / data.size;
    const int64_t sums = o.zero >= 2 ? o.grad_accum_steps / own_virtual_ranks : 1;
    // Gradients that are sums over a rank's rows are summed before them.
    if (o.sequence_parallel)
        per_step = per_step + 2 * (o.zero >= 2 ? o.grad_accum_steps : own_virtual_ranks) *
                                  one_pass(row_sums_bytes(layout), tensor);
    per_step = per_step + sums * gradients + o.grad_accum_steps * (weights_again + activations);
    SentBytes per_micro_step = weights_again + activations;
    if (o.zero >= 2)
        per_micro_step =
            per_micro_step + SentBytes{gradients.inside / own_virtual_ranks, gradients.between / own_virtual_ranks};
    return {per_step, per_micro_step};
}
