#include "model/memory.h"

#include <algorithm>

#include "ops/ops.h"

namespace {
// Elements of the activations of one layer on this rank.
struct ActivationSizes {
    int64_t rows;      // rows of the residual stream on this rank: N, or N / P with sequence parallelism
    int64_t residual;  // rows x channels
    int64_t heads;     // tokens x channels of this rank's heads
    int64_t lse;
};
}  // namespace

template <class floatX>
static LayerActivations<floatX> take_layer(Arena& arena, const ActivationSizes& size, bool with_gelu) {
    LayerActivations<floatX> a{};
    a.ln1 = arena.take<floatX>(size.residual);
    a.ln1_mean = arena.take<float>(size.rows);
    a.ln1_rstd = arena.take<float>(size.rows);
    a.qkv = arena.take<floatX>(3 * size.heads);
    a.att = arena.take<floatX>(size.heads);
    a.lse = arena.take<float>(size.lse);
    a.residual2 = arena.take<floatX>(size.residual);
    a.ln2 = arena.take<floatX>(size.residual);
    a.ln2_mean = arena.take<float>(size.rows);
    a.ln2_rstd = arena.take<float>(size.rows);
    a.fc = arena.take<floatX>(4 * size.heads);
    if (with_gelu) a.gelu = arena.take<floatX>(4 * size.heads);
    a.residual3 = arena.take<floatX>(size.residual);
    return a;
}

template <class floatX>
static int64_t head_bytes(const ParamLayout& layout, Purpose purpose, int logit_rows) {
    return ops::head_bytes<floatX>(logit_rows, layout.config.C, layout.rows(wte), purpose == Purpose::train);
}

template <class floatX>
Activations<floatX> place_activations(Arena& arena, const ParamLayout& layout, Purpose purpose, MemoryOptions options,
                                      int64_t N, int logit_rows) {
    const GPT2Config& config = layout.config;
    const int P = options.tensor.count;
    const int64_t rows = options.sequence_parallel ? ceil_div<int64_t>(N, P) : N;
    const ActivationSizes size = {rows, rows * config.C, N * config.C / P, N * config.NH / P};
    const Recompute recompute = options.recompute;
    const bool train = purpose == Purpose::train, keeps_all = train && recompute != Recompute::layer;
    const bool divided = layout.shard.count > 1;
    Activations<floatX> acts{};
    for (int l = 0; l < config.L; l++) {
        if (l == 0 || keeps_all) {
            const bool with_gelu = l == 0 || recompute != Recompute::gelu;
            acts.layer.push_back(take_layer<floatX>(arena, size, with_gelu));
            if (!with_gelu) acts.layer[l].gelu = acts.layer[0].gelu;
            continue;
        }
        acts.layer.push_back(acts.layer[0]);
        if (train) acts.layer[l].residual3 = arena.take<floatX>(size.residual);
        if (purpose == Purpose::generate) acts.layer[l].qkv = arena.take<floatX>(3 * size.heads);
    }
    acts.encoded = arena.take<floatX>(size.residual);
    acts.lnf = arena.take<floatX>(size.residual);
    acts.lnf_mean = arena.take<float>(size.rows);
    acts.lnf_rstd = arena.take<float>(size.rows);
    acts.losses = arena.take<float>(N);
    acts.loss = arena.take<float>(1);
    acts.amax = arena.take<float>(options.fp8 ? amax_count(config) : 0);
    acts.dx = arena.take<floatX>(train ? size.residual : 0);
    acts.dtmp = arena.take<floatX>(train ? N * config.C : 0);
    acts.dlarge = arena.take<floatX>(train ? 4 * size.heads : 0);
    acts.all_rows = arena.take<floatX>(divided ? N * config.C : 0);
    acts.target_logits = arena.take<float>(logit_rows);
    acts.sums = arena.take<float>(logit_rows);
    acts.parts = arena.take<float>(divided ? int64_t(logit_rows) * layout.shard.count : 0);
    acts.logits = arena.take<float>(int64_t(layout.shard.count) * layout.rows(wte));
    acts.first_row = arena.take<int>(layout.rows(wte));
    acts.exponentials = arena.take<std::byte>(head_bytes<floatX>(layout, purpose, logit_rows));
    return acts;
}

template <class floatX>
PackedWeights place_packed(Arena& arena, const ParamLayout& layout, const MemoryOptions& options) {
    PackedWeights packed;
    packed[wte] = {arena.take<std::byte>(ops::packed_bytes<floatX>(layout.rows(wte), layout.cols(wte)))};
    const int layers = options.shard_weights ? 1 : layout.config.L;
    for (int l = 0; options.fp8 && l < layers; l++)
        for (Param p : layer_matrices)
            packed[p].push_back(arena.take<std::byte>(ops::fp8_weight_bytes(layout.rows(p), layout.cols(p))));
    return packed;
}

int gradient_slots(const GPT2Config& config, Purpose purpose, MemoryOptions options) {
    if (purpose != Purpose::train) return 0;
    return options.sums_apart() ? std::min(2, config.L) : config.L;
}

int weight_slots(const GPT2Config& config, MemoryOptions options) {
    return options.shard_weights ? std::min(2, config.L) : config.L;
}

template <class floatX>
int64_t scratch_of(const ParamLayout& layout, int B, int T, bool muon) {
    const int C = layout.config.C;
    const int64_t bytes = ops::scratch_bytes<floatX>(B, T, C, local_heads(layout), layout.rows(wte));
    if (!muon) return bytes;
    return std::max(bytes, ops::muon_scratch_bytes<floatX>(C));
}

int64_t fp8_workspace_bytes(const ParamLayout& layout, int N, bool fp8) {
    if (!fp8) return 0;
    ENSURE(layout.config.C % 16 == 0,
           "--precision fp8 needs a multiple of 16 channels, and the model has %d; give --precision bf16",
           layout.config.C);
    int64_t bytes = 0;
    for (Param p : layer_matrices) bytes = std::max(bytes, ops::fp8_workspace_bytes(N, layout.cols(p), layout.rows(p)));
    return bytes;
}

int choose_logit_rows(int B, int T, int logit_chunks) {
    const int N = narrow(int64_t(B) * T);
    return logit_chunks ? ceil_div(N, logit_chunks) : std::min(N, ops::preferred_logit_rows());
}

template <class floatX>
std::vector<MemoryItem> model_memory(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options) {
    const ParamLayout layout(config, options.virtual_ranks, options.tensor);
    const int logit_rows = choose_logit_rows(B, T, options.logit_chunks);
    Arena packed{nullptr}, activations{nullptr};
    place_packed<floatX>(packed, layout, options);
    place_activations<floatX>(activations, layout, purpose, options, int64_t(B) * T, logit_rows);
    const int64_t logits = round_up<int64_t>(head_bytes<floatX>(layout, purpose, logit_rows), 256);
    const int64_t element = sizeof(floatX);
    const int64_t gradients = BucketBuffer<float>::elements(layout, gradient_slots(config, purpose, options));
    const int64_t weights = BucketBuffer<floatX>::elements(layout, weight_slots(config, options));
    return {{"weights", weights * element},
            {"packed weights", packed.used},
            {"FP8 operands", fp8_workspace_bytes(layout, B * T, options.fp8)},
            {"gradients", gradients * int64_t(sizeof(float))},
            {"activations", activations.used - logits},
            {"logits", logits},
            {"scratch", scratch_of<floatX>(layout, B, T, options.muon)}};
}

INSTANTIATE(place_activations);
INSTANTIATE(place_packed);
INSTANTIATE(scratch_of);
INSTANTIATE(model_memory);
