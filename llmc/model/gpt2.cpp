#include "model/gpt2.h"

#include <algorithm>
#include <type_traits>

#include "ops/ops.h"

namespace {

// Names for null arguments of the matmuls.
constexpr std::nullptr_t no_gelu = nullptr, no_bias = nullptr, no_dbias = nullptr, no_residual = nullptr;

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

// A layer's weight matrices, which are packed for the matmuls. The only other packed matrix is wte, in bucket 0.
constexpr Param layer_matrices[] = {qkvw, attprojw, fcw, fcprojw};

// Elements of acts.amax.
int64_t amax_count(const GPT2Config& config) { return config.L * int64_t(std::size(layer_matrices)) * 2; }

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
Activations<floatX> place_activations(Arena& arena, const GPT2Config& config, Purpose purpose, MemoryOptions options,
                                      int64_t N) {
    const int C = config.C;
    const Recompute recompute = options.recompute;
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
    acts.amax = arena.take<float>(options.fp8 ? amax_count(config) : 0);
    acts.dx = arena.take<floatX>(train ? N * C : 0);
    acts.dtmp = arena.take<floatX>(train ? N * C : 0);
    acts.dlarge = arena.take<floatX>(train ? N * 4 * C : 0);
    return acts;
}

template <class floatX>
int64_t packed_matrix_bytes(const ParamLayout& layout, Param p, bool fp8) {
    const int OC = layout.rows(p), IC = layout.cols(p);
    return round_up<int64_t>(fp8 && p != wte ? ops::fp8_weight_bytes(OC, IC) : ops::packed_bytes<floatX>(OC, IC), 256);
}

template <class floatX>
int64_t packed_layer_bytes(const ParamLayout& layout, bool fp8) {
    int64_t bytes = 0;
    for (Param p : layer_matrices) bytes += packed_matrix_bytes<floatX>(layout, p, fp8);
    return bytes;
}

template <class floatX>
int64_t packed_total_bytes(const ParamLayout& layout, int layers, bool fp8) {
    return packed_matrix_bytes<floatX>(layout, wte, fp8) + layers * packed_layer_bytes<floatX>(layout, fp8);
}

template <class floatX>
int64_t packed_offset(const ParamLayout& layout, Param p, int l, int layers, bool fp8) {
    if (p == wte) return 0;
    int64_t offset = packed_total_bytes<floatX>(layout, l % layers, fp8);
    for (Param before : layer_matrices) {
        if (before == p) break;
        offset += packed_matrix_bytes<floatX>(layout, before, fp8);
    }
    return offset;
}

// Layers whose gradients have memory of their own. Backward writes gradients of two layers at a time: the bias gradient
// of the layer below is computed with those of a layer.
int gradient_slots(const GPT2Config& config, Purpose purpose, MemoryOptions options) {
    if (purpose != Purpose::train) return 0;
    return options.shard_gradients ? std::min(2, config.L) : config.L;
}

// Layers whose weights have memory of their own. With shard_weights, one layer's arrive while the other one computes.
int weight_slots(const GPT2Config& config, MemoryOptions options) {
    return options.shard_weights ? std::min(2, config.L) : config.L;
}

int count_packed_layers(const GPT2Config& config, MemoryOptions options) {
    return options.shard_weights ? 1 : config.L;
}

// Bytes of the rounded operands of a layer's largest matmul.
int64_t fp8_operand_bytes(const ParamLayout& layout, int N, bool fp8) {
    if (!fp8) return 0;
    ENSURE(layout.config.C % 16 == 0,
           "--precision fp8 needs a multiple of 16 channels, and the model has %d; give --precision bf16",
           layout.config.C);
    int64_t bytes = 0;
    for (Param p : layer_matrices) bytes = std::max(bytes, ops::fp8_operand_bytes(N, layout.cols(p), layout.rows(p)));
    return bytes;
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
      fp8(options.fp8),
      shard_gradients(options.shard_gradients),
      B(B),
      T(T),
      logit_rows(choose_logit_rows(B, T, options.logit_chunks)),
      weights(layout, weight_slots(config, options), "weights"),
      packed_layers(count_packed_layers(config, options)),
      grads(layout, gradient_slots(config, purpose, options), "gradients") {
    ENSURE(B >= 1 && T >= 1 && T <= config.max_T,
           "a micro-batch of %d x %d tokens does not fit: the model has %d positions", B, T, config.max_T);
    INVARIANT(!fp8 || sizeof(floatX) == 2, "FP8 matmuls in a model whose activations are %s",
              dtype_name(dtype_of<floatX>));
    packed = DeviceBuffer<std::byte>(packed_total_bytes<floatX>(layout, packed_layers, fp8), "packed weights");
    fp8_operands = DeviceBuffer<std::byte>(fp8_operand_bytes(layout, B * T, fp8), "FP8 operands (--micro-batch)");
    const int64_t N = int64_t(B) * T, logits = int64_t(logit_rows) * config.Vp();
    Arena count{nullptr};
    place_activations<floatX>(count, config, purpose, options, N);
    count.take<floatX>(logits);
    memory = DeviceBuffer<std::byte>(count.used, "activations and logits (--micro-batch, --recompute, --logit-chunks)");
    Arena arena{memory.data};
    acts = place_activations<floatX>(arena, config, purpose, options, N);
    acts.logits = arena.take<floatX>(logits);
    device_reserve_scratch(ops::scratch_bytes<floatX>(B, T, config.C, config.NH, config.Vp()));
    attention = ops::prepare_attention<floatX>(B, T, config.NH, config.C / config.NH, purpose == Purpose::train);
}

template <class floatX>
std::vector<MemoryItem> model_memory(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options) {
    const ParamLayout layout(config, options.virtual_ranks);
    Arena activations{nullptr};
    place_activations<floatX>(activations, config, purpose, options, int64_t(B) * T);
    const int64_t element = sizeof(floatX);
    const int64_t gradients = BucketBuffer<float>::elements(layout, gradient_slots(config, purpose, options));
    const int64_t weights = BucketBuffer<floatX>::elements(layout, weight_slots(config, options));
    return {{"weights", weights * element},
            {"packed weights", packed_total_bytes<floatX>(layout, count_packed_layers(config, options), options.fp8)},
            {"FP8 operands", fp8_operand_bytes(layout, B * T, options.fp8)},
            {"gradients", gradients * int64_t(sizeof(float))},
            {"activations", activations.used},
            {"logits", int64_t(choose_logit_rows(B, T, options.logit_chunks)) * config.Vp() * element},
            {"scratch", ops::scratch_bytes<floatX>(B, T, config.C, config.NH, config.Vp())}};
}

template <class floatX>
std::byte* GPT2<floatX>::packed_copy(Param p, int l) {
    return packed.data ? packed.data + packed_offset<floatX>(layout, p, l, packed_layers, fp8) : nullptr;
}

template <class floatX>
Weight<floatX> GPT2<floatX>::matrix(Param p, int l) {
    const bool copy_is_fp8 = fp8 && p != wte;
    return {w(p, l), copy_is_fp8 ? nullptr : packed_copy(p, l)};
}

template <class floatX>
void copy_rounded(floatX* to, const float* from, int64_t count, Stream stream) {
    constexpr int64_t most = 1 << 20;
    std::vector<floatX> rounded(std::min(count, most));
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t piece = std::min(most, count - begin);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < piece; i++) rounded[i] = floatX(from[begin + i]);
        copy_to_device(to + begin, rounded.data(), piece * int64_t(sizeof(floatX)), stream);
        wait_for_stream(stream);  // the next iteration overwrites `rounded`
    }
}

template <class floatX>
void GPT2<floatX>::set_param(Param p, int l, const float* values) {
    copy_rounded(w(p, l), values, layout.size(p), stream);
}

template <class floatX>
void GPT2<floatX>::pack_bucket(int bucket) {
    if (!packed.data) return;
    const auto pack = [&](Param p, int l) {
        const int OC = layout.rows(p), IC = layout.cols(p);
        if constexpr (std::is_same_v<floatX, bf16>)
            if (fp8 && p != wte) return ops::pack_fp8_weight(packed_copy(p, l), w(p, l), OC, IC, stream);
        ops::pack_weight(packed_copy(p, l), w(p, l), OC, IC, stream);
    };
    if (bucket == 0) return pack(wte, 0);
    for (Param p : layer_matrices) pack(p, bucket - 1);
}

template <class floatX>
void GPT2<floatX>::about_to_read(int bucket) {
    if (before_read) before_read(bucket);
}

template <class floatX>
void GPT2<floatX>::embeddings_forward(const int* tokens, int B, int T) {
    INVARIANT(B <= this->B && T <= this->T,
              "a micro-batch of %d x %d tokens does not fit: the model has memory for %d x %d", B, T, this->B, this->T);
    const LayerActivations<floatX>& a = acts.layer[0];
    about_to_read(0);
    ops::embedding_forward(acts.encoded, tokens, w(wte), w(wpe), B, T, config.C, stream);
    about_to_read(1);
    layer_norm(a.ln1, a.ln1_mean, a.ln1_rstd, acts.encoded, ln1w, ln1b, 0, B * T);
}

// ---- LayerNorm and matmuls of a layer, in FP8 or not
//
// Only calls with several rows are in FP8. Those with a single row, as in generation, are in bf16: tensor cores would
// not make them faster. The kernels that write the input of an FP8 matmul also raise its amax, where they can.

// The matmul that reads the output of this LayerNorm.
static Param reader_of(Param norm_weight) { return norm_weight == ln1w ? qkvw : fcw; }

// The largest magnitude of the input of a layer's matmul.
template <class floatX>
float* GPT2<floatX>::input_amax(Param weight, int l) {
    const auto found = std::find(std::begin(layer_matrices), std::end(layer_matrices), weight);
    return acts.amax + 2 * (l * int64_t(std::size(layer_matrices)) + (found - std::begin(layer_matrices)));
}

// The largest magnitude of the gradient of its output.
template <class floatX>
float* GPT2<floatX>::gradient_amax(Param weight, int l) {
    return input_amax(weight, l) + 1;
}

template <class floatX>
void GPT2<floatX>::layer_norm(floatX* out, float* mean, float* rstd, const floatX* inp, Param weight, Param bias, int l,
                              int N) {
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1)
            return ops::layernorm_forward_amax(out, mean, rstd, input_amax(reader_of(weight), l), inp, w(weight, l),
                                               w(bias, l), N, config.C, stream);
    ops::layernorm_forward(out, mean, rstd, inp, w(weight, l), w(bias, l), N, config.C, stream);
}

// acts.dx, the gradient of the residual stream, from acts.dtmp, the gradient of LayerNorm's output. The input of a
// LayerNorm is the residual stream after a matmul's output was added to it: attproj of the same layer before ln2,
// fcproj of the layer below before ln1 and lnf. acts.dx is therefore also the gradient of that matmul's output, and its
// column sums, which are computed here, that of its bias. The input of the first ln1 is the embeddings, which have no
// bias.
template <class floatX>
void GPT2<floatX>::norm_backward(const floatX* inp, const float* mean, const float* rstd, Param weight, Param bias,
                                 int l, int N) {
    const bool of_attproj = weight == ln2w;
    const int of_layer = of_attproj ? l : weight == lnfw ? config.L - 1 : l - 1;
    float* dbranch_bias = of_layer < 0 ? nullptr : g(of_attproj ? attprojb : fcprojb, of_layer);
    const floatX* dresidual = weight == lnfw ? nullptr : acts.dx;  // no residual branch bypasses lnf
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1 && of_layer >= 0)
            return ops::layernorm_backward_amax(acts.dx, g(weight, l), g(bias, l), dbranch_bias,
                                                gradient_amax(of_attproj ? attprojw : fcprojw, of_layer), acts.dtmp,
                                                inp, w(weight, l), mean, rstd, dresidual, N, config.C, stream);
    ops::layernorm_backward(acts.dx, g(weight, l), g(bias, l), dbranch_bias, acts.dtmp, inp, w(weight, l), mean, rstd,
                            dresidual, N, config.C, stream);
}

// matmul_forward with a matrix of layer l.
template <class floatX>
void GPT2<floatX>::layer_matmul(floatX* out, floatX* pre_gelu, const floatX* inp, Param weight, Param bias,
                                const floatX* residual, int l, int N) {
    const int IC = layout.cols(weight), OC = layout.rows(weight);
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1) {
            float* out_amax = pre_gelu ? input_amax(fcprojw, l) : nullptr;
            if (weight == attprojw) ops::raise_amax(input_amax(weight, l), inp, int64_t(N) * IC, stream);
            return ops::matmul_forward_fp8(out, pre_gelu, out_amax, inp, input_amax(weight, l), packed_copy(weight, l),
                                           w(bias, l), residual, fp8_operands.data, N, IC, OC, stream);
        }
    ops::matmul_forward<floatX>(out, pre_gelu, inp, matrix(weight, l), w(bias, l), residual, N, IC, OC, stream);
}

// matmul_backward with a matrix of layer l. inp has not changed since layer_matmul, or was recomputed.
template <class floatX>
void GPT2<floatX>::layer_matmul_backward(floatX* dinp, float* dbias, const floatX* dout, const floatX* inp,
                                         Param weight, const floatX* pre_gelu, int l, int N, bool accumulate) {
    const int IC = layout.cols(weight), OC = layout.rows(weight);
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1) {
            float* dinp_amax = pre_gelu ? gradient_amax(fcw, l) : nullptr;
            if (weight == qkvw) ops::raise_amax(gradient_amax(weight, l), dout, int64_t(N) * OC, stream);
            return ops::matmul_backward_fp8(dinp, dinp_amax, g(weight, l), dbias, dout, gradient_amax(weight, l), inp,
                                            input_amax(weight, l), packed_copy(weight, l), pre_gelu, fp8_operands.data,
                                            N, IC, OC, accumulate, stream);
        }
    ops::matmul_backward<floatX>(dinp, g(weight, l), dbias, dout, inp, matrix(weight, l), pre_gelu, N, IC, OC,
                                 accumulate, stream);
}

// ---- The layers

template <class floatX>
void GPT2<floatX>::layer_attention(int l, int B, int T) {
    const int C = config.C, NH = config.NH;
    const LayerActivations<floatX>& a = acts.layer[l];
    layer_matmul(a.qkv, no_gelu, a.ln1, qkvw, qkvb, no_residual, l, B * T);
    ops::attention_forward(a.att, a.lse, a.qkv, B, T, NH, C / NH, stream);
}

// Computes a layer from the attention's output to GELU's output.
template <class floatX>
void GPT2<floatX>::layer_hidden(int l, int N) {
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
    layer_matmul(a.residual2, no_gelu, a.att, attprojw, attprojb, x, l, N);
    layer_norm(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, ln2w, ln2b, l, N);
    layer_matmul(a.gelu, a.fc, a.ln2, fcw, fcb, no_residual, l, N);
}

// Computes a layer from GELU's output to the next layer's ln1; for the last layer, to acts.lnf.
template <class floatX>
void GPT2<floatX>::layer_output(int l, int N) {
    const LayerActivations<floatX>& a = acts.layer[l];
    layer_matmul(a.residual3, no_gelu, a.gelu, fcprojw, fcprojb, a.residual2, l, N);
    if (l + 1 == config.L) {
        ops::layernorm_forward(acts.lnf, acts.lnf_mean, acts.lnf_rstd, a.residual3, w(lnfw), w(lnfb), N, config.C,
                               stream);
        return;
    }
    const LayerActivations<floatX>& next = acts.layer[l + 1];
    about_to_read(2 + l);
    layer_norm(next.ln1, next.ln1_mean, next.ln1_rstd, a.residual3, ln1w, ln1b, l + 1, N);
}

template <class floatX>
void GPT2<floatX>::layer_forward(int l, int B, int T) {
    layer_attention(l, B, T);
    layer_hidden(l, B * T);
    layer_output(l, B * T);
}

template <class floatX>
void GPT2<floatX>::forward(const int* tokens, int B, int T) {
    if (fp8) fill_zero(acts.amax, amax_count(config) * int64_t(sizeof(float)), stream);
    embeddings_forward(tokens, B, T);
    for (int l = 0; l < config.L; l++) layer_forward(l, B, T);
}

template <class floatX>
void GPT2<floatX>::decode(const int* token, int t) {
    const int C = config.C, NH = config.NH;
    const LayerActivations<floatX>& first = acts.layer[0];
    about_to_read(0);
    ops::embedding_forward(acts.encoded, token, w(wte), w(wpe) + int64_t(t) * C, 1, 1, C, stream);
    about_to_read(1);
    layer_norm(first.ln1, first.ln1_mean, first.ln1_rstd, acts.encoded, ln1w, ln1b, 0, 1);
    for (int l = 0; l < config.L; l++) {
        const LayerActivations<floatX>& a = acts.layer[l];
        layer_matmul(a.qkv + int64_t(t) * 3 * C, no_gelu, a.ln1, qkvw, qkvb, no_residual, l, 1);
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
void GPT2<floatX>::zero_bucket(int b) {
    const Bucket bucket = layout.bucket(b);
    if (b == 0) fill_zero(g(wpe), layout.size(wpe) * int64_t(sizeof(float)), stream);
    fill_zero(grads.bucket(b) + bucket.decayed_end - bucket.begin,
              (bucket.end - bucket.decayed_end) * int64_t(sizeof(float)), stream);
}

template <class floatX>
void GPT2<floatX>::zero_gradients() {
    fill_zero(acts.loss, sizeof(float), stream);
    if (shard_gradients) return;  // backward zeroes each bucket when it begins it
    for (int b = 0; b < layout.num_buckets(); b++) zero_bucket(b);
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
    norm_backward(acts.layer[config.L - 1].residual3, acts.lnf_mean, acts.lnf_rstd, lnfw, lnfb, 0, N);
}

// Recomputes the layer's activations from its input.
template <class floatX>
void GPT2<floatX>::recompute_layer(int l, int B, int T) {
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
    layer_norm(a.ln1, a.ln1_mean, a.ln1_rstd, x, ln1w, ln1b, l, B * T);
    layer_attention(l, B, T);
    layer_hidden(l, B * T);
}

// On entry acts.dx is the gradient of the layer's output, on exit the gradient of its input. Calls begin(bucket) for
// the layer below, whose bias gradient of fcproj is computed here.
template <class floatX>
void GPT2<floatX>::layer_backward(int l, int B, int T, int micro_step, const BucketHook& begin) {
    const int N = B * T, C = config.C, NH = config.NH;
    const bool accumulate = micro_step > 0;
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
    const bool last = l + 1 == config.L;  // the last layer's activations are still in the shared memory
    about_to_read(1 + l);
    if (recompute == Recompute::layer && !last) recompute_layer(l, B, T);
    if (recompute == Recompute::gelu && !last) ops::gelu_forward(a.gelu, a.fc, int64_t(N) * 4 * C, stream);
    layer_matmul_backward(acts.dlarge, no_dbias, acts.dx, a.gelu, fcprojw, a.fc, l, N, accumulate);
    layer_matmul_backward(acts.dtmp, g(fcb, l), acts.dlarge, a.ln2, fcw, no_gelu, l, N, accumulate);
    norm_backward(a.residual2, a.ln2_mean, a.ln2_rstd, ln2w, ln2b, l, N);
    layer_matmul_backward(acts.dtmp, no_dbias, acts.dx, a.att, attprojw, no_gelu, l, N, accumulate);
    ops::attention_backward(acts.dlarge, acts.dtmp, a.att, a.lse, a.qkv, B, T, NH, C / NH, stream);
    layer_matmul_backward(acts.dtmp, g(qkvb, l), acts.dlarge, a.ln1, qkvw, no_gelu, l, N, accumulate);
    if (l > 0) begin(l);
    norm_backward(x, a.ln1_mean, a.ln1_rstd, ln1w, ln1b, l, N);
}

template <class floatX>
void GPT2<floatX>::embeddings_backward(const int* tokens, int B, int T) {
    ops::embedding_backward(g(wte), g(wpe), acts.dx, tokens, B, T, config.C, config.V, stream);
}

template <class floatX>
void GPT2<floatX>::backward(const int* tokens, const int* targets, int B, int T, int micro_step, float scale,
                            const BucketHook& after, const BucketHook& before) {
    INVARIANT(!shard_gradients || micro_step == 0, "micro-step %d adds to gradients that are sharded", micro_step);
    const BucketHook begin = [&](int bucket) {
        if (!shard_gradients) return;
        if (before) before(bucket);
        zero_bucket(bucket);
    };
    begin(0);
    begin(config.L);
    head_backward(targets, B, T, micro_step, scale);
    for (int l = config.L - 1; l >= 0; l--) {
        layer_backward(l, B, T, micro_step, begin);
        if (after) after(1 + l);
    }
    embeddings_backward(tokens, B, T);
    if (after) after(0);
}

template void copy_rounded(float*, const float*, int64_t, Stream);
template void copy_rounded(bf16*, const float*, int64_t, Stream);
template struct GPT2<float>;
template struct GPT2<bf16>;
template std::vector<MemoryItem> model_memory<float>(const GPT2Config&, Purpose, int, int, MemoryOptions);
template std::vector<MemoryItem> model_memory<bf16>(const GPT2Config&, Purpose, int, int, MemoryOptions);
