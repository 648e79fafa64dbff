// dispatch.cpp: each cpu::<op> checks its sizes and calls the variant that isa() selects.
#include "cpu/matmul.h"
#include "cpu/variants.h"

#if defined(__x86_64__)
#define VARIANT_OF(op) (isa() == Isa::plain ? reference::op : isa() == Isa::avx2 ? avx2::op : avx512::op)
#elif defined(__aarch64__)
#define VARIANT_OF(op) (isa() == Isa::plain ? reference::op : neon::op)
#else
#define VARIANT_OF(op) reference::op
#endif

namespace cpu {

template <class floatX>
int64_t reference::scratch_bytes(int, int, int, int, int) {
    return 0;
}

int64_t vector_scratch_bytes(int B, int T, int C, int NH, int Vp) {
    return VARIANT_OF(scratch_bytes<float>)(B, T, C, NH, Vp);
}

static void check_rows(const char* op, int64_t rows, int width) {
    INVARIANT(rows >= 1 && width >= 1, "%s of %lld rows of %d: there must be at least one of each", op,
              static_cast<long long>(rows), width);
}

template <class floatX>
void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                       VocabShard shard, Stream stream) {
    check_rows("embedding_forward", int64_t(B) * T, C);
    check_vocab_shard("embedding_forward", shard);
    VARIANT_OF(embedding_forward<floatX>)(out, tokens, wte, wpe, B, T, C, shard, stream);
}

template <class floatX>
void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                        VocabShard shard, Stream stream) {
    check_rows("embedding_backward", int64_t(B) * T, C);
    check_vocab_shard("embedding_backward", shard);
    VARIANT_OF(embedding_backward<floatX>)(dwte, dwpe, dout, tokens, B, T, C, shard, stream);
}

template <class floatX>
void layernorm_forward(Out<floatX> out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, Stream stream) {
    check_rows("layernorm_forward", N, C);
    VARIANT_OF(layernorm_forward<floatX>)(out, mean, rstd, inp, weight, bias, N, C, stream);
    raise_amax(out.amax, out.data, int64_t(N) * C);
}

template <class floatX>
void layernorm_backward(Out<floatX> dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                        const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                        const floatX* dresidual, int N, int C, Stream stream) {
    check_rows("layernorm_backward", N, C);
    VARIANT_OF(layernorm_backward<floatX>)
    (dinp, dweight, dbias, dbranch_bias, dout, inp, weight, mean, rstd, dresidual, N, C, stream);
    raise_amax(dinp.amax, dinp.data, int64_t(N) * C);
}

template <class floatX>
void add_residual(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int N, int C,
                  Stream stream) {
    check_rows("add_residual", N, C);
    VARIANT_OF(add_residual<floatX>)(out, inp, residual, bias, N, C, stream);
}

// Whether the bf16 variants of attention on matrix units can run: HS is 32, 64, 96 or 128.
static bool has_matrix_attention(int HS) { return isa() >= Isa::avx512bf16 && HS % 32 == 0 && HS <= 128; }

static void check_attention(const char* op, int B, int T, int NH, int HS) {
    INVARIANT(B >= 1 && T >= 1 && NH >= 1,
              "%s of %d sequences of %d tokens, %d heads: there must be at least one of each", op, B, T, NH);
    ENSURE(HS >= 1 && HS <= 256, "%s: heads of %d channels; they have 1 to 256, so choose another number of heads", op,
           HS);
}

template <class floatX>
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream stream) {
    check_attention("attention_forward", B, T, NH, HS);
    if constexpr (has_matrix_variant<floatX>)
        if (has_matrix_attention(HS))
            return MATRIX_VARIANT_OF(attention_forward<floatX>)(out, lse, qkv, B, T, NH, HS, stream);
    VARIANT_OF(attention_forward<floatX>)(out, lse, qkv, B, T, NH, HS, stream);
}

template <class floatX>
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv, int B,
                        int T, int NH, int HS, Stream stream) {
    check_attention("attention_backward", B, T, NH, HS);
    if constexpr (has_matrix_variant<floatX>)
        if (has_matrix_attention(HS))
            return MATRIX_VARIANT_OF(attention_backward<floatX>)(dqkv, dout, out, lse, qkv, B, T, NH, HS, stream);
    VARIANT_OF(attention_backward<floatX>)(dqkv, dout, out, lse, qkv, B, T, NH, HS, stream);
}

template <class floatX>
void attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream stream) {
    check_attention("attention_decode", 1, T, NH, HS);
    VARIANT_OF(attention_decode<floatX>)(out, qkv, T, NH, HS, stream);
}

template <class floatX>
void gelu_forward(Out<floatX> out, const floatX* inp, int64_t count, Stream stream) {
    VARIANT_OF(gelu_forward<floatX>)(out, inp, count, stream);
    raise_amax(out.amax, out.data, count);
}

template <class floatX>
void gelu_backward(Out<floatX> dinp, const floatX* inp, const floatX* dout, int64_t count, Stream stream) {
    VARIANT_OF(gelu_backward<floatX>)(dinp, inp, dout, count, stream);
    raise_amax(dinp.amax, dinp.data, count);
}

template <class floatX>
void cross_entropy_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                           Stream stream) {
    check_rows("cross_entropy_forward", N, V);
    INVARIANT(V <= Vp, "cross_entropy_forward: a vocabulary of %d in rows of %d", V, Vp);
    VARIANT_OF(cross_entropy_forward<floatX>)(losses, logits, targets, N, V, Vp, stream);
}

template <class floatX>
void cross_entropy(floatX* logits, float* losses, const int* targets, int N, int V, int Vp, float scale,
                   Stream stream) {
    check_rows("cross_entropy", N, V);
    INVARIANT(V <= Vp, "cross_entropy: a vocabulary of %d in rows of %d", V, Vp);
    VARIANT_OF(cross_entropy<floatX>)(logits, losses, targets, N, V, Vp, scale, stream);
}

static void check_logits(const char* op, int N, VocabShard shard, int Vp) {
    check_rows(op, N, Vp);
    check_vocab_shard(op, shard);
    INVARIANT(shard.count <= Vp, "%s: a shard of %d tokens in rows of %d", op, shard.count, Vp);
}

template <class floatX>
void cross_entropy_shard(float* partials, const floatX* logits, const int* targets, int N, VocabShard shard, int Vp,
                         Stream stream) {
    check_logits("cross_entropy_shard", N, shard, Vp);
    VARIANT_OF(cross_entropy_shard<floatX>)(partials, logits, targets, N, shard, Vp, stream);
}

template <class floatX>
void cross_entropy_shard_backward(floatX* logits, const float* lse, const int* targets, int N, VocabShard shard, int Vp,
                                  float scale, Stream stream) {
    check_logits("cross_entropy_shard_backward", N, shard, Vp);
    VARIANT_OF(cross_entropy_shard_backward<floatX>)(logits, lse, targets, N, shard, Vp, scale, stream);
}

void sum_of_squares(float* out, const float* x, int64_t count, Stream stream) {
    VARIANT_OF(sum_of_squares)(out, x, count, stream);
}

template <class floatX>
void adamw(floatX* weight, float* master, float* m, float* v, const float* grad, const float* factor, int64_t begin,
           int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step, Stream stream) {
    check_adamw(begin, count, decay, step);
    VARIANT_OF(adamw<floatX>)(weight, master, m, v, grad, factor, begin, count, decay, config, lr, step, stream);
}

}  // namespace cpu

INSTANTIATE(cpu::embedding_forward);
INSTANTIATE(cpu::embedding_backward);
INSTANTIATE(cpu::add_residual);
INSTANTIATE(cpu::layernorm_forward);
INSTANTIATE(cpu::layernorm_backward);
INSTANTIATE(cpu::attention_forward);
INSTANTIATE(cpu::attention_backward);
INSTANTIATE(cpu::attention_decode);
INSTANTIATE(cpu::gelu_forward);
INSTANTIATE(cpu::gelu_backward);
INSTANTIATE(cpu::cross_entropy_forward);
INSTANTIATE(cpu::cross_entropy);
INSTANTIATE(cpu::cross_entropy_shard);
INSTANTIATE(cpu::cross_entropy_shard_backward);
INSTANTIATE(cpu::adamw);
