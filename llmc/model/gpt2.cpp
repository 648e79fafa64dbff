#include "model/gpt2.h"

#include <algorithm>
#include <type_traits>

#include "model/model_memory.h"
#include "ops/ops.h"
#include "parallel/comm.h"

// Names for null arguments of the matmuls.
static constexpr std::nullptr_t no_gelu = nullptr, no_bias = nullptr, no_dbias = nullptr, no_residual = nullptr;

void choose_attention(bool cudnn, bool deterministic) {
    ops::set_attention({.cudnn = cudnn, .deterministic = deterministic});
}

template <class floatX>
GPT2<floatX>::GPT2(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options)
    : layout(config, options.virtual_ranks, options.tensor),
      config(config),
      purpose(purpose),
      recompute(options.recompute),
      fp8(options.fp8),
      shard_gradients(options.shard_gradients),
      sequence_parallel(options.sequence_parallel),
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
    const int64_t N = int64_t(B) * T;
    Arena count{nullptr};
    place_activations<floatX>(count, layout, purpose, options, N, logit_rows);
    memory = DeviceBuffer<std::byte>(count.used, "activations and logits");
    Arena arena{memory.data};
    acts = place_activations<floatX>(arena, layout, purpose, options, N, logit_rows);
    device_reserve_scratch(scratch_of<floatX>(layout, B, T));
    attention = ops::prepare_attention<floatX>(B, T, own_heads(layout), config.HS(), purpose == Purpose::train);
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
    const int rows = own_rows(N);
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1)
            return ops::layernorm_forward_amax(out, mean, rstd, input_amax(reader_of(weight), l), inp, w(weight, l),
                                               w(bias, l), rows, config.C, stream);
    ops::layernorm_forward(out, mean, rstd, inp, w(weight, l), w(bias, l), rows, config.C, stream);
}

// acts.dx, the gradient of the residual stream, from dout, the gradient of LayerNorm's output. The input of a
// LayerNorm is the residual stream after a matmul's output was added to it: attproj of the same layer before ln2,
// fcproj of the layer below before ln1 and lnf. acts.dx is therefore also the gradient of that matmul's output, and its
// column sums, which are computed here, that of its bias. The input of the first ln1 is the embeddings, which have no
// bias.
template <class floatX>
void GPT2<floatX>::norm_backward(const floatX* dout, const floatX* inp, const float* mean, const float* rstd,
                                 Param weight, Param bias, int l, int N) {
    const int rows = own_rows(N);
    const bool of_attproj = weight == ln2w;
    const int of_layer = of_attproj ? l : weight == lnfw ? config.L - 1 : l - 1;
    float* dbranch_bias = of_layer < 0 ? nullptr : g(of_attproj ? attprojb : fcprojb, of_layer);
    const floatX* dresidual = weight == lnfw ? nullptr : acts.dx;  // no residual branch bypasses lnf
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1 && of_layer >= 0)
            return ops::layernorm_backward_amax(acts.dx, g(weight, l), g(bias, l), dbranch_bias,
                                                gradient_amax(of_attproj ? attprojw : fcprojw, of_layer), dout, inp,
                                                w(weight, l), mean, rstd, dresidual, rows, config.C, stream);
    ops::layernorm_backward(acts.dx, g(weight, l), g(bias, l), dbranch_bias, dout, inp, w(weight, l), mean, rstd,
                            dresidual, rows, config.C, stream);
}

// matmul_forward with a matrix of layer l.
template <class floatX>
void GPT2<floatX>::layer_matmul(floatX* out, floatX* pre_gelu, const floatX* inp, Param weight, const floatX* bias,
                                const floatX* residual, int l, int N) {
    const int IC = layout.cols(weight), OC = layout.rows(weight);
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8 && N > 1) {
            float* out_amax = pre_gelu ? input_amax(fcprojw, l) : nullptr;
            if (weight == attprojw) ops::raise_amax(input_amax(weight, l), inp, int64_t(N) * IC, stream);
            return ops::matmul_forward_fp8(out, pre_gelu, out_amax, inp, input_amax(weight, l), packed_copy(weight, l),
                                           bias, residual, fp8_operands.data, N, IC, OC, stream);
        }
    ops::matmul_forward<floatX>(out, pre_gelu, inp, matrix(weight, l), bias, residual, N, IC, OC, stream);
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

// ---- Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022)
//
// A layer's first matmuls, qkv and fc, are divided by output channels, and its second ones, attproj and fcproj, by
// input channels, so that attention and GELU need no communication. The second matmuls compute parts of a sum over the
// ranks; their bias is added after the sum. The same holds for the gradient of the first matmuls' input. wte is divided
// by rows, so each rank has the logits of its part of the vocabulary.
//
// Between two sums all ranks would hold the same rows of the residual stream. With sequence parallelism each holds
// 1 / P of the rows: a sum leaves a rank only its rows, and the input of a first matmul is gathered.
//
// With one rank these functions call the operation itself.

// Gathers every rank's shard of x (bytes).
template <class floatX>
void GPT2<floatX>::gather(void* x, int64_t bytes) {
    tensor_ranks->wait(tensor_ranks->gather_activations(x, bytes, stream), stream);
}

// The rows of all ranks, from this rank's rows. They are valid until the next call of gather_rows or branch_output.
template <class floatX>
const floatX* GPT2<floatX>::gather_rows(const floatX* x, int N) {
    if (!divides_rows(N)) return x;
    const int64_t bytes = int64_t(N) * config.C * int64_t(sizeof(floatX)), own = bytes / layout.shard.count;
    copy_on_device(reinterpret_cast<std::byte*>(acts.all_rows) + layout.shard.index * own, x, own, stream);
    gather(acts.all_rows, bytes);
    return acts.all_rows;
}

// Sums parts (N, C) over the ranks, in place. end_sum returns this rank's rows of the sum.
template <class floatX>
int64_t GPT2<floatX>::begin_sum(floatX* parts, int N) {
    const int64_t count = int64_t(N) * config.C;
    if (!is_divided()) return 0;
    return divides_rows(N) ? tensor_ranks->reduce_scatter(parts, count, stream)
                           : tensor_ranks->all_reduce(parts, count, stream);
}

template <class floatX>
const floatX* GPT2<floatX>::end_sum(int64_t ticket, const floatX* parts, int N) {
    if (!is_divided()) return parts;
    tensor_ranks->wait(ticket, stream);
    return divides_rows(N) ? parts + int64_t(layout.shard.index) * own_rows(N) * config.C : parts;
}

// out = residual + inp * weight^T + bias, for attproj and fcproj.
template <class floatX>
void GPT2<floatX>::branch_output(floatX* out, const floatX* inp, Param weight, Param bias, const floatX* residual,
                                 int l, int N) {
    if (!is_divided()) return layer_matmul(out, no_gelu, inp, weight, w(bias, l), residual, l, N);
    layer_matmul(acts.all_rows, no_gelu, inp, weight, no_bias, no_residual, l, N);
    const floatX* sum = end_sum(begin_sum(acts.all_rows, N), acts.all_rows, N);
    ops::add_residual(out, sum, residual, w(bias, l), own_rows(N), config.C, stream);
}

// The backward of qkv or fc, whose input is inp (this rank's rows). Returns this rank's rows of the input's gradient,
// in acts.dtmp. The weight's gradient is computed while the ranks sum the input's.
template <class floatX>
const floatX* GPT2<floatX>::branch_input_backward(float* dbias, const floatX* dout, const floatX* inp, Param weight,
                                                  int l, int N, bool accumulate) {
    const int IC = layout.cols(weight), OC = layout.rows(weight);
    if (!is_divided()) {
        layer_matmul_backward(acts.dtmp, dbias, dout, inp, weight, no_gelu, l, N, accumulate);
        return acts.dtmp;
    }
    const floatX* all = gather_rows(inp, N);
    ops::matmul_backward<floatX>(acts.dtmp, nullptr, no_dbias, dout, all, matrix(weight, l), no_gelu, N, IC, OC,
                                 accumulate, stream);
    const int64_t sum = begin_sum(acts.dtmp, N);
    ops::matmul_backward<floatX>(nullptr, g(weight, l), dbias, dout, all, matrix(weight, l), no_gelu, N, IC, OC,
                                 accumulate, stream);
    return end_sum(sum, acts.dtmp, N);
}

// acts.encoded from tokens (B, T), of which the first is at first_position. Each rank looks up the tokens in its part
// of the vocabulary; the first rank adds the positions.
template <class floatX>
void GPT2<floatX>::embed(const int* tokens, int first_position, int B, int T) {
    const int N = B * T, C = config.C;
    const floatX* positions = layout.shard.index == 0 ? w(wpe) + int64_t(first_position) * C : nullptr;
    floatX* out = is_divided() ? acts.all_rows : acts.encoded;
    ops::embedding_forward(out, tokens, w(wte), positions, B, T, C, layout.vocab(), stream);
    const floatX* own = end_sum(begin_sum(out, N), out, N);
    if (is_divided()) copy_on_device(acts.encoded, own, int64_t(own_rows(N)) * C * int64_t(sizeof(floatX)), stream);
}

// acts.logits (rows, Vp) of this rank's part of the vocabulary.
template <class floatX>
void GPT2<floatX>::logits_forward(const floatX* inp, int rows) {
    ops::matmul_forward<floatX>(acts.logits, no_gelu, inp, matrix(wte), no_bias, no_residual, rows, config.C,
                                layout.rows(wte), stream);
}

// The losses from acts.logits.
template <class floatX>
void GPT2<floatX>::logits_losses(float* losses, const int* targets, int rows) {
    if (!is_divided())
        return ops::cross_entropy_forward(losses, acts.logits, targets, rows, config.V, layout.rows(wte), stream);
    const int shards = layout.shard.count;
    float* own = acts.partials + int64_t(layout.shard.index) * 2 * rows;
    ops::cross_entropy_shard(own, acts.logits, targets, rows, layout.vocab(), layout.rows(wte), stream);
    const int64_t bytes = int64_t(shards) * 2 * rows * int64_t(sizeof(float));
    gather(acts.partials, bytes);
    ops::cross_entropy_combine(losses, acts.logit_lse, acts.partials, targets, shards, rows, stream);
}

// The losses from acts.logits, which become their gradient.
template <class floatX>
void GPT2<floatX>::logits_backward(float* losses, const int* targets, int rows, float scale) {
    const int Vp = layout.rows(wte);
    if (!is_divided()) return ops::cross_entropy(acts.logits, losses, targets, rows, config.V, Vp, scale, stream);
    logits_losses(losses, targets, rows);
    ops::cross_entropy_shard_backward(acts.logits, acts.logit_lse, targets, rows, layout.vocab(), Vp, scale, stream);
}

template <class floatX>
const floatX* GPT2<floatX>::row_logits(int row) {
    const int shards = layout.shard.count, Vp = layout.rows(wte);
    const floatX* inp = gather_rows(acts.lnf, lnf_tokens) + int64_t(row) * config.C;
    ops::matmul_forward<floatX>(acts.logits + int64_t(layout.shard.index) * Vp, no_gelu, inp, matrix(wte), no_bias,
                                no_residual, 1, config.C, Vp, stream);
    if (is_divided()) {
        const int64_t bytes = int64_t(shards) * Vp * int64_t(sizeof(floatX));
        gather(acts.logits, bytes);
    }
    return acts.logits;
}

// ---- The layers

template <class floatX>
const floatX* GPT2<floatX>::layer_input(int l) const {
    return l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
}

// residual2 = x + attention(ln1(x)); residual3 = residual2 + mlp(ln2(residual2)). recomputes: for backward, stops at
// GELU's output.
template <class floatX>
void GPT2<floatX>::layer_forward(int l, int B, int T, int decode_at, bool recomputes) {
    const int N = B * T, NH = own_heads(layout), HS = config.HS();
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = layer_input(l);
    floatX* qkv = a.qkv + int64_t(std::max(0, decode_at)) * layout.rows(qkvw);
    if (!recomputes) about_to_read(1 + l);  // backward has waited for them
    layer_norm(a.ln1, a.ln1_mean, a.ln1_rstd, x, ln1w, ln1b, l, N);
    layer_matmul(qkv, no_gelu, gather_rows(a.ln1, N), qkvw, w(qkvb, l), no_residual, l, N);
    if (decode_at < 0)
        ops::attention_forward(a.att, a.lse, a.qkv, B, T, NH, HS, stream);
    else
        ops::attention_decode(a.att, a.qkv, decode_at + 1, NH, HS, stream);
    branch_output(a.residual2, a.att, attprojw, attprojb, x, l, N);
    layer_norm(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, ln2w, ln2b, l, N);
    layer_matmul(a.gelu, a.fc, gather_rows(a.ln2, N), fcw, w(fcb, l), no_residual, l, N);
    if (recomputes) return;
    branch_output(a.residual3, a.gelu, fcprojw, fcprojb, a.residual2, l, N);
}

template <class floatX>
void GPT2<floatX>::decode(const int* token, int t) {
    INVARIANT(keeps_keys(), "decoding with the keys of the last layer, at position %d", t);
    forward(token, 1, 1, t);
}

template <class floatX>
void GPT2<floatX>::forward(const int* tokens, int B, int T, int decode_at) {
    INVARIANT(B <= this->B && T <= this->T,
              "a micro-batch of %d x %d tokens does not fit: the model has memory for %d x %d", B, T, this->B, this->T);
    INVARIANT(!divides_rows(B * T) || T % layout.shard.count == 0, "%d tokens cannot be divided among %d ranks", T,
              layout.shard.count);
    if (fp8 && decode_at < 0) fill_zero(acts.amax, amax_count(config) * int64_t(sizeof(float)), stream);
    lnf_tokens = B * T;
    about_to_read(0);
    embed(tokens, std::max(0, decode_at), B, T);
    for (int l = 0; l < config.L; l++) layer_forward(l, B, T, decode_at, false);
    ops::layernorm_forward(acts.lnf, acts.lnf_mean, acts.lnf_rstd, layer_input(config.L), w(lnfw), w(lnfb),
                           own_rows(B * T), config.C, stream);
}

template <class floatX>
void GPT2<floatX>::token_losses(const int* targets, int B, int T) {
    const int N = B * T;
    const floatX* lnf = gather_rows(acts.lnf, N);
    for (int n = 0; n < N; n += logit_rows) {
        const int rows = std::min(logit_rows, N - n);
        logits_forward(lnf + int64_t(n) * config.C, rows);
        logits_losses(acts.losses + n, targets + n, rows);
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
    const int N = B * T, C = config.C;
    const floatX* lnf = gather_rows(acts.lnf, N);
    for (int n = 0; n < N; n += logit_rows) {
        const int rows = std::min(logit_rows, N - n);
        const floatX* inp = lnf + int64_t(n) * C;
        logits_forward(inp, rows);
        logits_backward(acts.losses + n, targets + n, rows, scale / float(N));
        ops::matmul_backward<floatX>(acts.dtmp + int64_t(n) * C, g(wte), no_dbias, acts.logits, inp, matrix(wte),
                                     no_gelu, rows, C, layout.rows(wte), micro_step > 0 || n > 0, stream);
    }
    ops::accumulate_loss(acts.loss, acts.losses, N, scale / float(N), stream);
    const floatX* dlnf = end_sum(begin_sum(acts.dtmp, N), acts.dtmp, N);
    norm_backward(dlnf, acts.layer[config.L - 1].residual3, acts.lnf_mean, acts.lnf_rstd, lnfw, lnfb, 0, N);
}

// On entry acts.dx is the gradient of the layer's output, on exit the gradient of its input. Calls begin(bucket) for
// the layer below, whose bias gradient of fcproj is computed here.
template <class floatX>
void GPT2<floatX>::layer_backward(int l, int B, int T, int micro_step, const BucketHook& begin) {
    const int N = B * T;
    const bool accumulate = micro_step > 0;
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = layer_input(l);
    const bool last = l + 1 == config.L;  // the last layer's activations are still in the shared memory
    about_to_read(1 + l);
    if (recompute == Recompute::layer && !last) layer_forward(l, B, T, -1, true);
    if (recompute == Recompute::gelu && !last) ops::gelu_forward(a.gelu, a.fc, int64_t(N) * layout.rows(fcw), stream);
    layer_matmul_backward(acts.dlarge, no_dbias, gather_rows(acts.dx, N), a.gelu, fcprojw, a.fc, l, N, accumulate);
    const floatX* dln2 = branch_input_backward(g(fcb, l), acts.dlarge, a.ln2, fcw, l, N, accumulate);
    norm_backward(dln2, a.residual2, a.ln2_mean, a.ln2_rstd, ln2w, ln2b, l, N);
    layer_matmul_backward(acts.dtmp, no_dbias, gather_rows(acts.dx, N), a.att, attprojw, no_gelu, l, N, accumulate);
    ops::attention_backward(acts.dlarge, acts.dtmp, a.att, a.lse, a.qkv, B, T, own_heads(layout), config.HS(), stream);
    const floatX* dln1 = branch_input_backward(g(qkvb, l), acts.dlarge, a.ln1, qkvw, l, N, accumulate);
    if (l > 0) begin(l);
    norm_backward(dln1, x, a.ln1_mean, a.ln1_rstd, ln1w, ln1b, l, N);
}

template <class floatX>
void GPT2<floatX>::embeddings_backward(const int* tokens, int B, int T) {
    ops::embedding_backward(g(wte), g(wpe), gather_rows(acts.dx, B * T), tokens, B, T, config.C, layout.vocab(),
                            stream);
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
