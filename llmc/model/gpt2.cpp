#include "model/gpt2.h"

#include <algorithm>
#include <type_traits>

#include "ops/ops.h"
#include "parallel/comm.h"

void choose_attention(AttentionBackend backend, bool deterministic) {
    ops::set_attention({.backend = backend, .deterministic = deterministic});
}

template <class floatX>
GPT2<floatX>::GPT2(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options)
    : layout(config, options.virtual_ranks, options.tensor),
      config(config),
      purpose(purpose),
      recompute(options.recompute),
      fp8(options.fp8),
      sums_apart(options.sums_apart()),
      sequence_parallel(options.sequence_parallel),
      B(B),
      T(T),
      logit_rows(choose_logit_rows(B, T, options.logit_chunks)),
      weights(layout, weight_slots(config, options), "weights"),
      grads(layout, gradient_slots(config, purpose, options), "gradients") {
    ENSURE(B >= 1 && T >= 1 && T <= config.max_T,
           "a micro-batch of %d x %d tokens does not fit: the model has %d positions", B, T, config.max_T);
    INVARIANT(!fp8 || sizeof(floatX) == 2, "FP8 matmuls in a model whose activations are %s",
              dtype_name(dtype_of<floatX>));
    const auto place = [](DeviceBuffer<std::byte>& block, const char* of, const auto& take_from) {
        Arena count{nullptr};
        take_from(count);
        block = DeviceBuffer<std::byte>(count.used, of);
        Arena arena{block.data};
        return take_from(arena);
    };
    packed = place(packed_memory, "packed weights",
                   [&](Arena& arena) { return place_packed<floatX>(arena, layout, options); });
    fp8_workspace = DeviceBuffer<std::byte>(fp8_workspace_bytes(layout, B * T, fp8), "FP8 operands (--micro-batch)");
    acts = place(memory, "activations and logits", [&](Arena& arena) {
        return place_activations<floatX>(arena, layout, purpose, options, int64_t(B) * T, logit_rows);
    });
    prepare_attention();  // its plans say how much scratch memory they need
    device_reserve_scratch(scratch_of<floatX>(layout, B, T, options.muon));
}

template <class floatX>
std::string GPT2<floatX>::prepare_attention() const {
    return ops::prepare_attention<floatX>(B, T, local_heads(layout), config.HS(), purpose == Purpose::train);
}

template <class floatX>
Weight<floatX> GPT2<floatX>::matrix(Param p, int l) {
    if (!fp8 || p == wte) return {w(p, l), p == wte ? packed_copy(p, l) : nullptr};
    return {w(p, l),
            nullptr,
            {.packed = packed_copy(p, l),
             .workspace = fp8_workspace.data,
             .input_amax = input_amax(p, l),
             .gradient_amax = gradient_amax(p, l),
             .finds_input_amax = p == attprojw,  // attention's kernels raise no amax
             .finds_gradient_amax = p == qkvw}};
}

// The largest magnitude of the input of a layer's matmul in FP8, which the operation that writes this input raises.
template <class floatX>
float* GPT2<floatX>::input_amax(Param weight, int l) {
    if (!fp8) return nullptr;
    const auto found = std::find(std::begin(layer_matrices), std::end(layer_matrices), weight);
    return acts.amax + 2 * (l * int64_t(std::size(layer_matrices)) + (found - std::begin(layer_matrices)));
}

// The largest magnitude of the gradient of its output.
template <class floatX>
float* GPT2<floatX>::gradient_amax(Param weight, int l) {
    return fp8 ? input_amax(weight, l) + 1 : nullptr;
}

template <class floatX>
void copy_rounded(floatX* to, const float* from, int64_t count, Stream stream) {
    constexpr int64_t most = 1 << 16;  // small beside the tensors that plans count
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
    if (!packed_memory.data) return;
    const auto call = [&](auto pack, Param p, int l) {
        pack(packed_copy(p, l), w(p, l), layout.rows(p), layout.cols(p), stream);
    };
    if (bucket == 0) return call(ops::pack_weight<floatX>, wte, 0);
    if constexpr (std::is_same_v<floatX, bf16>)
        if (fp8)
            for (Param p : layer_matrices) call(ops::pack_fp8_weight, p, bucket - 1);
}

template <class floatX>
void GPT2<floatX>::wait_for_weights(int bucket) {
    if (on_wait_for_weights) on_wait_for_weights(bucket);
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
// With one rank these functions do nothing.

// Gathers every rank's shard of x (bytes).
template <class floatX>
void GPT2<floatX>::gather(void* x, int64_t bytes) {
    tensor_ranks->wait(tensor_ranks->gather_activations(x, bytes, stream), stream);
}

// The rows of all ranks, from this rank's rows. They are valid until acts.all_rows is written again.
template <class floatX>
const floatX* GPT2<floatX>::all_gather_rows(const floatX* x, int N) {
    if (!divides_rows(N)) return x;
    const int64_t bytes = int64_t(N) * config.C * int64_t(sizeof(floatX)), own = bytes / layout.shard.count;
    copy_on_device(reinterpret_cast<std::byte*>(acts.all_rows) + layout.shard.index * own, x, own, stream);
    gather(acts.all_rows, bytes);
    return acts.all_rows;
}

// Sums parts (N, C) over the ranks, in place. finish_reduce returns this rank's rows of the sum.
template <class floatX>
int64_t GPT2<floatX>::start_reduce(floatX* parts, int N) {
    const int64_t count = int64_t(N) * config.C;
    if (!is_divided()) return 0;
    return divides_rows(N) ? tensor_ranks->reduce_scatter(parts, count, stream)
                           : tensor_ranks->all_reduce(parts, count, stream);
}

template <class floatX>
const floatX* GPT2<floatX>::finish_reduce(int64_t ticket, const floatX* parts, int N) {
    if (!is_divided()) return parts;
    tensor_ranks->wait(ticket, stream);
    return divides_rows(N) ? parts + int64_t(layout.shard.index) * local_rows(N) * config.C : parts;
}

template <class floatX>
const floatX* GPT2<floatX>::reduced_over_ranks(floatX* parts, int N) {
    return finish_reduce(start_reduce(parts, N), parts, N);
}

// Computes acts.encoded from tokens (B, T); the first one is at first_position. Each rank looks up the tokens in its
// part of the vocabulary; the first rank adds the positions.
template <class floatX>
void GPT2<floatX>::embed(const int* tokens, int first_position, int B, int T) {
    const int N = B * T, C = config.C;
    const floatX* positions = layout.shard.index == 0 ? w(wpe) + int64_t(first_position) * C : nullptr;
    floatX* out = is_divided() ? acts.all_rows : acts.encoded;
    ops::embedding_forward(out, tokens, w(wte), positions, B, T, C, layout.vocab(), stream);
    const floatX* own = reduced_over_ranks(out, N);
    if (is_divided()) copy_on_device(acts.encoded, own, int64_t(local_rows(N)) * C * int64_t(sizeof(floatX)), stream);
}

// The products in float of head_targets, for which each row of wte is an input and the row of lnf is the target's.
template <class floatX>
const float* GPT2<floatX>::row_logits(int row) {
    const int Vp = layout.rows(wte);
    const floatX* lnf = all_gather_rows(acts.lnf, lnf_tokens) + int64_t(row) * config.C;
    fill_zero(acts.first_row, Vp * int64_t(sizeof(int)), stream);
    const HeadInput<floatX> head = {w(wte), {lnf, nullptr}, acts.first_row, {0, 1}, Vp, config.C, Vp};
    ops::head_targets(acts.logits + int64_t(layout.shard.index) * Vp, head, stream);
    if (is_divided()) gather(acts.logits, int64_t(layout.shard.count) * Vp * int64_t(sizeof(float)));
    return acts.logits;
}

// ---- The layers

template <class floatX>
const floatX* GPT2<floatX>::layer_input(int l) const {
    return l == 0 ? acts.encoded : acts.layer[l - 1].residual3;
}

// out = inp * weight^T + bias + residual. With tensor parallelism the product is a sum over the ranks.
template <class floatX>
void GPT2<floatX>::second_matmul(Param weight, Param bias, int l, MatmulForward<floatX> m, int N) {
    const int IC = layout.cols(weight), C = config.C;
    m.weight = matrix(weight, l);
    m.bias = w(bias, l);
    if (!is_divided()) return ops::matmul_forward(m, N, IC, C, stream);
    ops::matmul_forward<floatX>({.out = acts.all_rows, .inp = m.inp, .weight = m.weight}, N, IC, C, stream);
    ops::add_residual(m.out.data, reduced_over_ranks(acts.all_rows, N), m.residual, m.bias, local_rows(N), C, stream);
}

// residual2 = x + attention(ln1(x)); residual3 = residual2 + mlp(ln2(residual2)). recomputes: for backward, stops at
// GELU's output.
template <class floatX>
void GPT2<floatX>::layer_forward(int l, int B, int T, int decode_at, bool recomputes) {
    const int N = B * T, C = config.C, NH = local_heads(layout), HS = config.HS(), own_C = NH * HS,
              rows = local_rows(N);
    const LayerActivations<floatX>& a = acts.layer[l];
    const floatX* x = layer_input(l);
    floatX* qkv = a.qkv + int64_t(std::max(0, decode_at)) * 3 * own_C;
    if (!recomputes) wait_for_weights(1 + l);  // backward has waited for them

    ops::layernorm_forward({a.ln1, input_amax(qkvw, l)}, a.ln1_mean, a.ln1_rstd, x, w(ln1w, l), w(ln1b, l), rows, C,
                           stream);
    const floatX* ln1 = all_gather_rows(a.ln1, N);
    ops::matmul_forward<floatX>({.out = qkv, .inp = ln1, .weight = matrix(qkvw, l), .bias = w(qkvb, l)}, N, C,
                                3 * own_C, stream);
    if (decode_at < 0)
        ops::attention_forward(a.att, a.lse, a.qkv, B, T, NH, HS, stream);
    else
        ops::attention_decode(a.att, a.qkv, decode_at + 1, NH, HS, stream);
    second_matmul(attprojw, attprojb, l, {.out = a.residual2, .inp = a.att, .residual = x}, N);

    ops::layernorm_forward({a.ln2, input_amax(fcw, l)}, a.ln2_mean, a.ln2_rstd, a.residual2, w(ln2w, l), w(ln2b, l),
                           rows, C, stream);
    const floatX* ln2 = all_gather_rows(a.ln2, N);
    const Out<floatX> gelu = {a.gelu, input_amax(fcprojw, l)};
    ops::matmul_forward<floatX>(
        {.out = gelu, .pre_gelu = a.fc, .inp = ln2, .weight = matrix(fcw, l), .bias = w(fcb, l)}, N, C, 4 * own_C,
        stream);
    if (recomputes) return;
    second_matmul(fcprojw, fcprojb, l, {.out = a.residual3, .inp = a.gelu, .residual = a.residual2}, N);
}

template <class floatX>
void GPT2<floatX>::decode(const int* token, int t) {
    INVARIANT(keeps_keys(), "decoding with the keys of the last layer, at position %d", t);
    forward(token, 1, 1, t);
}

template <class floatX>
void GPT2<floatX>::forward(const int* tokens, int B, int T, int decode_at) {
    const ProfileRange range("forward");
    INVARIANT(int64_t(B) * T <= int64_t(this->B) * this->T && T <= this->T,
              "a micro-batch of %d x %d tokens does not fit: the model has memory for %d x %d", B, T, this->B, this->T);
    INVARIANT(!divides_rows(B * T) || T % layout.shard.count == 0, "%d tokens cannot be divided among %d ranks", T,
              layout.shard.count);
    if (fp8 && decode_at < 0) fill_zero(acts.amax, amax_count(config) * int64_t(sizeof(float)), stream);
    lnf_tokens = B * T;
    wait_for_weights(0);
    embed(tokens, std::max(0, decode_at), B, T);
    for (int l = 0; l < config.L; l++) layer_forward(l, B, T, decode_at, false);
    ops::layernorm_forward({acts.lnf}, acts.lnf_mean, acts.lnf_rstd, layer_input(config.L), w(lnfw), w(lnfb),
                           local_rows(B * T), config.C, stream);
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
    if (sums_apart) return;  // backward zeroes each bucket when it begins it
    for (int b = 0; b < layout.num_buckets(); b++) zero_bucket(b);
}

// own (count) = the sum over the tensor-parallel ranks, in their order.
template <class floatX>
void GPT2<floatX>::sum_over_shards(float* own, int count) {
    const int64_t bytes = count * int64_t(sizeof(float));
    if (!is_divided()) return;
    copy_on_device(acts.parts + int64_t(layout.shard.index) * count, own, bytes, stream);
    gather(acts.parts, layout.shard.count * bytes);
    ops::sum_of_shards(own, acts.parts, layout.shard.count, count, stream);
}

// acts.losses, for logit_rows rows at a time. Each tensor-parallel rank has its part of the vocabulary. backward: also
// computes the gradients of scale * the sum of the losses, that of lnf in acts.dtmp.
template <class floatX>
void GPT2<floatX>::head(const int* targets, int N, bool backward, bool accumulate, float scale) {
    const int C = config.C;
    const floatX* lnf = all_gather_rows(acts.lnf, N);
    for (int n = 0; n < N; n += logit_rows) {
        const HeadInput<floatX> head = {.inp = lnf + int64_t(n) * C,
                                        .weight = matrix(wte),
                                        .targets = targets + n,
                                        .shard = layout.vocab(),
                                        .N = std::min(logit_rows, N - n),
                                        .C = C,
                                        .Vp = layout.rows(wte)};
        ops::head_targets(acts.target_logits, head, stream);
        sum_over_shards(acts.target_logits, head.N);
        ops::head_forward(acts.sums, acts.exponentials, acts.target_logits, head, backward, stream);
        sum_over_shards(acts.sums, head.N);
        ops::head_losses(acts.losses + n, acts.sums, head.targets, head.N, stream);
        if (backward)
            ops::head_backward(acts.dtmp + int64_t(n) * C, g(wte), acts.exponentials, acts.sums, head, scale,
                               accumulate || n > 0, stream);
    }
}

template <class floatX>
void GPT2<floatX>::token_losses(const int* targets, int B, int T) {
    head(targets, B * T, false, false, 0.0f);
}

// From acts.dlarge, the gradient of the output of qkv or fc, the gradient of its input `inp`, of the weight and of the
// bias. While the ranks sum the first, the others are computed.
template <class floatX>
const floatX* GPT2<floatX>::first_matmul_backward(Param weight, Param bias, int l, const floatX* inp, int N,
                                                  bool accumulate) {
    const int C = config.C, OC = layout.rows(weight);
    MatmulBackward<floatX> m = {.dinp = acts.dtmp,
                                .dweight = g(weight, l),
                                .dbias = g(bias, l),
                                .dout = acts.dlarge,
                                .inp = all_gather_rows(inp, N),
                                .weight = matrix(weight, l),
                                .accumulate = accumulate};
    if (is_divided())
        ops::matmul_backward<floatX>({.dinp = m.dinp, .dout = m.dout, .weight = m.weight}, N, C, OC, stream);
    const int64_t sum = start_reduce(acts.dtmp, N);
    if (is_divided()) m.dinp = nullptr;
    ops::matmul_backward(m, N, C, OC, stream);
    return finish_reduce(sum, acts.dtmp, N);
}

// dfc = dx fcprojw * gelu'(fc), dln2 = dfc fcw, dx += dln2 through ln2; datt = dx attprojw, dqkv from datt,
// dln1 = dqkv qkvw, dx += dln1 through ln1.
//
// On entry acts.dx is the gradient of the layer's output, on exit the gradient of its input. It is also the gradient of
// the output of the matmul that was added to the residual stream last: fcproj, then attproj, then fcproj of the layer
// below. LayerNorm's backward, which completes acts.dx, therefore adds its column sums to the gradient of this matmul's
// bias. The input of the first layer is the embeddings, which have no bias. Calls begin(bucket) for the layer below.
template <class floatX>
void GPT2<floatX>::layer_backward(int l, int B, int T, bool accumulate, const BucketHook& begin) {
    const int N = B * T, C = config.C, NH = local_heads(layout), HS = config.HS(), own_C = NH * HS,
              rows = local_rows(N);
    const LayerActivations<floatX>& a = acts.layer[l];
    const bool last = l + 1 == config.L;  // the last layer's activations are still in the shared memory
    wait_for_weights(1 + l);
    if (recompute == Recompute::layer && !last) layer_forward(l, B, T, -1, true);
    if (recompute == Recompute::gelu && !last) ops::gelu_forward({a.gelu}, a.fc, int64_t(N) * 4 * own_C, stream);
    const auto second_matmul_backward = [&](Param weight, MatmulBackward<floatX> m) {
        m.weight = matrix(weight, l);
        m.dweight = g(weight, l);
        m.accumulate = accumulate;
        ops::matmul_backward(m, N, layout.cols(weight), C, stream);
    };

    const Out<floatX> dfc = {acts.dlarge, gradient_amax(fcw, l)};
    const floatX* dx = all_gather_rows(acts.dx, N);
    second_matmul_backward(fcprojw, {.dinp = dfc, .dout = dx, .inp = a.gelu, .pre_gelu = a.fc});
    const floatX* dln2 = first_matmul_backward(fcw, fcb, l, a.ln2, N, accumulate);
    ops::layernorm_backward({acts.dx, gradient_amax(attprojw, l)}, g(ln2w, l), g(ln2b, l), g(attprojb, l), dln2,
                            a.residual2, w(ln2w, l), a.ln2_mean, a.ln2_rstd, acts.dx, rows, C, stream);

    dx = all_gather_rows(acts.dx, N);
    second_matmul_backward(attprojw, {.dinp = acts.dtmp, .dout = dx, .inp = a.att});
    ops::attention_backward(acts.dlarge, acts.dtmp, a.att, a.lse, a.qkv, B, T, NH, HS, stream);
    const floatX* dln1 = first_matmul_backward(qkvw, qkvb, l, a.ln1, N, accumulate);
    if (l > 0) begin(l);
    float* dbias_below = l > 0 ? g(fcprojb, l - 1) : nullptr;
    ops::layernorm_backward({acts.dx, l > 0 ? gradient_amax(fcprojw, l - 1) : nullptr}, g(ln1w, l), g(ln1b, l),
                            dbias_below, dln1, layer_input(l), w(ln1w, l), a.ln1_mean, a.ln1_rstd, acts.dx, rows, C,
                            stream);
}

template <class floatX>
void GPT2<floatX>::backward(const int* tokens, const int* targets, int B, int T, int micro_step, float scale,
                            const BucketHook& after, const BucketHook& before) {
    const ProfileRange range("backward");
    INVARIANT(!sums_apart || micro_step == 0, "micro-step %d adds to gradients whose sums are apart", micro_step);
    const BucketHook begin = [&](int bucket) {
        if (!sums_apart) return;
        if (before) before(bucket);
        zero_bucket(bucket);
    };
    begin(0);
    begin(config.L);
    const int N = B * T, last = config.L - 1;
    head(targets, N, true, micro_step > 0, scale / float(N));
    ops::accumulate_loss(acts.loss, acts.losses, N, scale / float(N), stream);
    const floatX* dlnf = reduced_over_ranks(acts.dtmp, N);
    const floatX* no_residual = nullptr;
    ops::layernorm_backward({acts.dx, gradient_amax(fcprojw, last)}, g(lnfw), g(lnfb), g(fcprojb, last), dlnf,
                            layer_input(config.L), w(lnfw), acts.lnf_mean, acts.lnf_rstd, no_residual, local_rows(N),
                            config.C, stream);
    for (int l = last; l >= 0; l--) {
        layer_backward(l, B, T, micro_step > 0, begin);
        if (after) after(1 + l);
    }
    ops::embedding_backward(g(wte), g(wpe), all_gather_rows(acts.dx, N), tokens, B, T, config.C, layout.vocab(),
                            stream);
    if (after) after(0);
}

INSTANTIATE(copy_rounded);
template struct GPT2<float>;
template struct GPT2<bf16>;
