#include "model/gpt2.h"

#include <algorithm>

#include "ops/ops.h"

namespace {

// Names for null arguments of the matmuls.
constexpr std::nullptr_t no_gelu = nullptr, no_bias = nullptr, no_residual = nullptr;

// Carves tensors out of one memory block. With base null the arena only counts bytes, so the plan and the
// allocation always agree.
struct Arena {
    std::byte* base;
    int64_t used = 0;

    template <class T>
    T* take(int64_t count) {
        std::byte* at = base ? base + used : nullptr;
        used += round_up<int64_t>(count * int64_t(sizeof(T)), 256);
        return reinterpret_cast<T*>(at);
    }
};

template <class floatX>
LayerActivations<floatX> carve_layer(Arena& arena, int64_t N, int C, int64_t lse_size, bool with_gelu) {
    LayerActivations<floatX> a{};
    a.ln1 = arena.take<floatX>(N * C);
    a.ln1_mean = arena.take<float>(N);
    a.ln1_rstd = arena.take<float>(N);
    a.qkv = arena.take<floatX>(N * 3 * C);
    a.att = arena.take<floatX>(N * C);
    a.lse = arena.take<float>(lse_size);
    a.residual2 = arena.take<floatX>(N * C);
    a.ln2 = arena.take<floatX>(N * C);
    a.ln2_mean = arena.take<float>(N);
    a.ln2_rstd = arena.take<float>(N);
    a.fc = arena.take<floatX>(N * 4 * C);
    if (with_gelu) a.gelu = arena.take<floatX>(N * 4 * C);
    a.residual3 = arena.take<floatX>(N * C);
    return a;
}

template <class floatX>
Activations<floatX> place_activations(Arena& arena, const GPT2Config& config, Purpose purpose, Recompute recompute,
                                      int64_t N) {
    const int C = config.C;
    const bool train = purpose == Purpose::train, keeps_all = train && recompute != Recompute::layer;
    Activations<floatX> acts{};
    for (int l = 0; l < config.L; l++) {
        if (l == 0 || keeps_all) {
            const bool with_gelu = l == 0 || recompute != Recompute::gelu;
            acts.layer.push_back(carve_layer<floatX>(arena, N, C, N * config.NH, with_gelu));
            if (!with_gelu) acts.layer[l].gelu = acts.layer[0].gelu;
            continue;
        }
        acts.layer.push_back(acts.layer[0]);
        if (train) acts.layer[l].residual3 = arena.take<floatX>(N * C);
        if (purpose == Purpose::generate) acts.layer[l].qkv = arena.take<floatX>(N * 3 * C);
    }
    acts.encoded = arena.take<floatX>(N * C);
    acts.lnf = arena.take<floatX>(N * C);
    acts.lnf_mean = arena.take<float>(N);
    acts.lnf_rstd = arena.take<float>(N);
    acts.losses = arena.take<float>(N);
    acts.loss = arena.take<float>(1);
    acts.dx = arena.take<floatX>(train ? N * C : 0);
    acts.dtmp = arena.take<floatX>(train ? N * C : 0);
    acts.dlarge = arena.take<floatX>(train ? N * 4 * C : 0);
    return acts;
}

// A layer's weight matrices, which are packed for the matmuls. The only other packed matrix is wte, in bucket
// 0.
constexpr Param layer_matrices[] = {qkvw, attprojw, fcw, fcprojw};

template <class floatX>
int64_t packed_matrix_bytes(const ParamLayout& layout, Param p) {
    return round_up<int64_t>(ops::packed_bytes<floatX>(layout.rows(p), layout.cols(p)), 256);
}

template <class floatX>
int64_t packed_layer_bytes(const ParamLayout& layout) {
    int64_t bytes = 0;
    for (Param p : layer_matrices) bytes += packed_matrix_bytes<floatX>(layout, p);
    return bytes;
}

template <class floatX>
int64_t packed_total_bytes(const ParamLayout& layout) {
    return packed_matrix_bytes<floatX>(layout, wte) + layout.config.L * packed_layer_bytes<floatX>(layout);
}

template <class floatX>
int64_t packed_offset(const ParamLayout& layout, Param p, int l) {
    if (p == wte) return 0;
    int64_t offset = packed_matrix_bytes<floatX>(layout, wte) + l * packed_layer_bytes<floatX>(layout);
    for (Param before : layer_matrices) {
        if (before == p) break;
        offset += packed_matrix_bytes<floatX>(layout, before);
    }
    return offset;
}

int choose_logit_rows(int B, int T, int logit_chunks) {
    const int N = narrow(int64_t(B) * T);
    return logit_chunks ? ceil_div(N, logit_chunks) : std::min(N, ops::preferred_logit_rows());
}

}  // namespace

void choose_attention(bool cudnn, bool deterministic) {
    ops::set_attention({.cudnn = cudnn, .deterministic = deterministic});
}

template <class floatX>
GPT2<floatX>::GPT2(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options)
    : layout(config, options.virtual_ranks),
      config(config),
      purpose(purpose),
      recompute(options.recompute),
      B(B),
      T(T),
      logit_rows(choose_logit_rows(B, T, options.logit_chunks)) {
    ENSURE(B >= 1 && T >= 1 && T <= config.max_T,
           "a micro-batch of %d x %d tokens does not fit: the model has %d positions", B, T, config.max_T);
    weights = DeviceBuffer<floatX>(layout.total, "weights");
    packed = DeviceBuffer<std::byte>(packed_total_bytes<floatX>(layout), "packed weights");
    if (purpose == Purpose::train) grads = DeviceBuffer<float>(layout.total, "gradients");
    const int64_t N = int64_t(B) * T, logits = int64_t(logit_rows) * config.Vp();
    Arena count{nullptr};
    place_activations<floatX>(count, config, purpose, recompute, N);
    count.take<floatX>(logits);
    memory = DeviceBuffer<std::byte>(count.used, "activations and logits (--micro-batch, --recompute, --logit-chunks)");
    Arena arena{memory.data};
    acts = place_activations<floatX>(arena, config, purpose, recompute, N);
    acts.logits = arena.take<floatX>(logits);
    device_reserve_scratch(ops::scratch_bytes<floatX>(B, T, config.C, config.NH, config.Vp()));
    attention = ops::prepare_attention<floatX>(B, T, config.NH, config.C / config.NH, purpose == Purpose::train);
}

template <class floatX>
std::vector<MemoryItem> model_memory(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options) {
    const ParamLayout layout(config, options.virtual_ranks);
    Arena activations{nullptr};
    place_activations<floatX>(activations, config, purpose, options.recompute, int64_t(B) * T);
    const int64_t floats = layout.total * int64_t(sizeof(float)), element = sizeof(floatX);
    return {{"weights", layout.total * element},
            {"packed weights", packed_total_bytes<floatX>(layout)},
            {"gradients", purpose == Purpose::train ? floats : 0},
            {"activations", activations.used},
            {"logits", int64_t(choose_logit_rows(B, T, options.logit_chunks)) * config.Vp() * element},
            {"scratch", ops::scratch_bytes<floatX>(B, T, config.C, config.NH, config.Vp())}};
}

template <class floatX>
Weight<floatX> GPT2<floatX>::matrix(Param p, int l) {
    const std::byte* copy = packed.data ? packed.data + packed_offset<floatX>(layout, p, l) : nullptr;
    return {w(p, l), copy};
}

template <class floatX>
void GPT2<floatX>::set_param(Param p, int l, const float* values) {
    constexpr int64_t piece = 1 << 20;
    std::vector<floatX> rounded(std::min(layout.size(p), piece));
    for (int64_t begin = 0; begin < layout.size(p); begin += piece) {
        const int64_t count = std::min(piece, layout.size(p) - begin);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < count; i++) rounded[i] = floatX(values[begin + i]);
        copy_to_device(w(p, l) + begin, rounded.data(), count * int64_t(sizeof(floatX)), stream);
        wait_for_stream(stream);  // the next iteration overwrites `rounded`
    }
}

template <class floatX>
void GPT2<floatX>::pack_bucket(int bucket) {
    if (!packed.data) return;
    const auto pack = [&](Param p, int l) {
        ops::pack_weight(packed.data + packed_offset<floatX>(layout, p, l), w(p, l), layout.rows(p), layout.cols(p),
                         stream);
    };
    if (bucket == 0) return pack(wte, 0);
    for (Param p : layer_matrices) pack(p, bucket - 1);
}

template <class floatX>
void GPT2<floatX>::embeddings_forward(const int* tokens, int B, int T) {
    INVARIANT(B <= this->B && T <= this->T,
              "a micro-batch of %d x %d tokens does not fit: the model has memory for %d x %d", B, T, this->B, this->T);
    const LayerActivations<floatX>& a = acts.layer[0];
    ops::embedding_forward(acts.encoded, tokens, w(wte), w(wpe), B, T, config.C, stream);
    ops::layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, acts.encoded, w(ln1w, 0), w(ln1b, 0), B * T, config.C,
                           stream);
}

template <class floatX>
void GPT2<floatX>::layer_attention(int l, int B, int T) {
    const int C = config.C, NH = config.NH;
    const LayerActivations<floatX>& a = acts.layer[l];
    ops::matmul_forward<floatX>(a.qkv, no_gelu, a.ln1, matrix(qkvw, l), w(qkvb, l), no_residual, B * T, C, 3 * C,
                                stream);
    ops::attention_forward(a.att, a.lse, a.qkv, B, T, NH, C / NH, stream);
}

// Computes a layer from the attention's output to GELU's output.
template <class floatX>
void GPT2<floatX>::layer_hidden(int l, int N) {
    const int C = config.C;
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
    ops::matmul_forward<floatX>(a.residual2, no_gelu, a.att, matrix(attprojw, l), w(attprojb, l), x, N, C, C, stream);
    ops::layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w(ln2w, l), w(ln2b, l), N, C, stream);
    ops::matmul_forward<floatX>(a.gelu, a.fc, a.ln2, matrix(fcw, l), w(fcb, l), no_residual, N, C, 4 * C, stream);
}

// Computes a layer from GELU's output to the next layer's ln1; for the last layer, to acts.lnf.
template <class floatX>
void GPT2<floatX>::layer_output(int l, int N) {
    const int C = config.C;
    const LayerActivations<floatX>& a = acts.layer[l];
    ops::matmul_forward<floatX>(a.residual3, no_gelu, a.gelu, matrix(fcprojw, l), w(fcprojb, l), a.residual2, N, 4 * C,
                                C, stream);
    if (l + 1 == config.L) {
        ops::layernorm_forward(acts.lnf, acts.lnf_mean, acts.lnf_rstd, a.residual3, w(lnfw), w(lnfb), N, C, stream);
        return;
    }
    const LayerActivations<floatX>& next = acts.layer[l + 1];
    ops::layernorm_forward(next.ln1, next.ln1_mean, next.ln1_rstd, a.residual3, w(ln1w, l + 1), w(ln1b, l + 1), N, C,
                           stream);
}

template <class floatX>
void GPT2<floatX>::layer_forward(int l, int B, int T) {
    layer_attention(l, B, T);
    layer_hidden(l, B * T);
    layer_output(l, B * T);
}

template <class floatX>
void GPT2<floatX>::forward(const int* tokens, int B, int T, const BucketHook& before) {
    const auto about_to_read = [&](int bucket) {
        if (before && bucket < layout.num_buckets()) before(bucket);
    };
    about_to_read(0);
    about_to_read(1);
    embeddings_forward(tokens, B, T);
    for (int l = 0; l < config.L; l++) {
        about_to_read(2 + l);  // layer l ends with the LayerNorm of layer l + 1
        layer_forward(l, B, T);
    }
}

template <class floatX>
void GPT2<floatX>::decode(const int* token, int t) {
    const int C = config.C, NH = config.NH;
    const LayerActivations<floatX>& first = acts.layer[0];
    ops::embedding_forward(acts.encoded, token, w(wte), w(wpe) + int64_t(t) * C, 1, 1, C, stream);
    ops::layernorm_forward(first.ln1, first.ln1_mean, first.ln1_rstd, acts.encoded, w(ln1w, 0), w(ln1b, 0), 1, C,
                           stream);
    for (int l = 0; l < config.L; l++) {
        const LayerActivations<floatX>& a = acts.layer[l];
        ops::matmul_forward<floatX>(a.qkv + int64_t(t) * 3 * C, no_gelu, a.ln1, matrix(qkvw, l), w(qkvb, l),
                                    no_residual, 1, C, 3 * C, stream);
        ops::attention_decode(a.att, a.qkv, t + 1, NH, C / NH, stream);
        layer_hidden(l, 1);
        layer_output(l, 1);
    }
}

template <class floatX>
const floatX* GPT2<floatX>::row_logits(int row) {
    ops::matmul_forward<floatX>(acts.logits, no_gelu, acts.lnf + int64_t(row) * config.C, matrix(wte), no_bias,
                                no_residual, 1, config.C, config.Vp(), stream);
    return acts.logits;
}

template <class floatX>
void GPT2<floatX>::token_losses(const int* targets, int B, int T) {
    const int N = B * T, C = config.C, Vp = config.Vp();
    for (int n = 0; n < N; n += logit_rows) {
        const int rows = std::min(logit_rows, N - n);
        ops::matmul_forward<floatX>(acts.logits, no_gelu, acts.lnf + int64_t(n) * C, matrix(wte), no_bias, no_residual,
                                    rows, C, Vp, stream);
        ops::cross_entropy_forward(acts.losses + n, acts.logits, targets + n, rows, config.V, Vp, stream);
    }
}

// Zeroes the gradients that kernels never overwrite and always add to: biases and LayerNorm parameters, which are at
// the end of each bucket, and wpe.
template <class floatX>
void GPT2<floatX>::zero_gradients() {
    fill_zero(acts.loss, sizeof(float), stream);
    fill_zero(g(wpe), layout.size(wpe) * int64_t(sizeof(float)), stream);
    for (int b = 0; b < layout.num_buckets(); b++) {
        const Bucket bucket = layout.bucket(b);
        fill_zero(grads.data + bucket.decayed_end, (bucket.end - bucket.decayed_end) * int64_t(sizeof(float)), stream);
    }
}

// Leaves the gradient of the last layer's output in acts.dx.
template <class floatX>
void GPT2<floatX>::head_backward(const int* targets, int B, int T, int micro_step, float scale) {
    const int N = B * T, C = config.C, Vp = config.Vp();
    for (int n = 0; n < N; n += logit_rows) {
        const int rows = std::min(logit_rows, N - n);
        floatX *inp = acts.lnf + int64_t(n) * C, *dinp = acts.dtmp + int64_t(n) * C;
        ops::matmul_forward<floatX>(acts.logits, no_gelu, inp, matrix(wte), no_bias, no_residual, rows, C, Vp, stream);
        ops::cross_entropy(acts.logits, acts.losses + n, targets + n, rows, config.V, Vp, scale / float(N), stream);
        ops::matmul_backward<floatX>(dinp, g(wte), nullptr, acts.logits, inp, matrix(wte), no_gelu, rows, C, Vp,
                                     micro_step > 0 || n > 0, stream);
    }
    ops::accumulate_loss(acts.loss, acts.losses, N, scale / float(N), stream);
    const floatX* none = nullptr;  // no residual branch bypasses lnf
    ops::layernorm_backward(acts.dx, g(lnfw), g(lnfb), g(fcprojb, config.L - 1), acts.dtmp,
                            acts.layer[config.L - 1].residual3, w(lnfw), acts.lnf_mean, acts.lnf_rstd, none, N, C,
                            stream);
}

// Recomputes the layer's activations from its input.
template <class floatX>
void GPT2<floatX>::recompute_layer(int l, int B, int T) {
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
    ops::layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, x, w(ln1w, l), w(ln1b, l), B * T, config.C, stream);
    layer_attention(l, B, T);
    layer_hidden(l, B * T);
}

// On entry acts.dx is the gradient of the layer's output, on exit the gradient of its input. The outputs of attproj and
// fcproj, with their biases, are added to the residual stream. The LayerNorm backward that computes the residual
// stream's gradient at that point therefore also computes their bias gradients. For fcproj this LayerNorm is the
// next layer's ln1, or lnf.
template <class floatX>
void GPT2<floatX>::layer_backward(int l, int B, int T, int micro_step) {
    const int N = B * T, C = config.C, NH = config.NH;
    const bool accumulate = micro_step > 0;
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
    float* below = l == 0 ? nullptr : g(fcprojb, l - 1);  // the embeddings have no bias
    const bool last = l + 1 == config.L;                  // the last layer's activations are still in the shared memory
    if (recompute == Recompute::layer && !last) recompute_layer(l, B, T);
    if (recompute == Recompute::gelu && !last) ops::gelu_forward(a.gelu, a.fc, int64_t(N) * 4 * C, stream);
    ops::matmul_backward<floatX>(acts.dlarge, g(fcprojw, l), nullptr, acts.dx, a.gelu, matrix(fcprojw, l), a.fc, N,
                                 4 * C, C, accumulate, stream);
    ops::matmul_backward<floatX>(acts.dtmp, g(fcw, l), g(fcb, l), acts.dlarge, a.ln2, matrix(fcw, l), no_gelu, N, C,
                                 4 * C, accumulate, stream);
    ops::layernorm_backward(acts.dx, g(ln2w, l), g(ln2b, l), g(attprojb, l), acts.dtmp, a.residual2, w(ln2w, l),
                            a.ln2_mean, a.ln2_rstd, acts.dx, N, C, stream);
    ops::matmul_backward<floatX>(acts.dtmp, g(attprojw, l), nullptr, acts.dx, a.att, matrix(attprojw, l), no_gelu, N, C,
                                 C, accumulate, stream);
    ops::attention_backward(acts.dlarge, acts.dtmp, a.att, a.lse, a.qkv, B, T, NH, C / NH, stream);
    ops::matmul_backward<floatX>(acts.dtmp, g(qkvw, l), g(qkvb, l), acts.dlarge, a.ln1, matrix(qkvw, l), no_gelu, N, C,
                                 3 * C, accumulate, stream);
    ops::layernorm_backward(acts.dx, g(ln1w, l), g(ln1b, l), below, acts.dtmp, x, w(ln1w, l), a.ln1_mean, a.ln1_rstd,
                            acts.dx, N, C, stream);
}

template <class floatX>
void GPT2<floatX>::embeddings_backward(const int* tokens, int B, int T) {
    ops::embedding_backward(g(wte), g(wpe), acts.dx, tokens, B, T, config.C, config.V, stream);
}

template <class floatX>
void GPT2<floatX>::backward(const int* tokens, const int* targets, int B, int T, int micro_step, float scale,
                            const BucketHook& after) {
    head_backward(targets, B, T, micro_step, scale);
    for (int l = config.L - 1; l >= 0; l--) {
        layer_backward(l, B, T, micro_step);
        if (after) after(1 + l);
    }
    embeddings_backward(tokens, B, T);
    if (after) after(0);
}

template struct GPT2<float>;
template struct GPT2<bf16>;
template std::vector<MemoryItem> model_memory<float>(const GPT2Config&, Purpose, int, int, MemoryOptions);
template std::vector<MemoryItem> model_memory<bf16>(const GPT2Config&, Purpose, int, int, MemoryOptions);
