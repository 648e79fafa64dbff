// dispatch.cpp: each cpu::<op> checks its sizes and calls the variant that isa() selects. The scratch size of all
// operations, and the matmuls that are calls of the matmul: those in FP8 and those of many matrices.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/fp8.h"
#include "base/host.h"
#include "cpu/variants.h"

namespace cpu {

// ---- The choice of a variant

static const Variant* const variants[] = {
#define ROW(name, test) &name::variant,
    INSTRUCTION_SETS(ROW)
#undef ROW
};

// The operations of the best set up to isa() that has this one; null if none has it.
template <class floatX, class Op>
static const Operations<floatX>* best_with(Op Operations<floatX>::*op) {
    for (int i = int(isa()); i >= 0; i--) {
        const Operations<floatX>* operations;
        if constexpr (sizeof(floatX) == sizeof(float))
            operations = &variants[i]->of_float;
        else
            operations = &variants[i]->of_bf16;
        if (operations->*op) return operations;
    }
    return nullptr;
}

// Those of the best set that has all of them, as vector code.
template <class floatX>
static const Operations<floatX>& vector_operations() {
    return *best_with(&Operations<floatX>::adamw);
}

// The matmuls and attention of a matrix unit; null without one for this element type.
template <class floatX>
static const Operations<floatX>* matrix_operations() {
    return best_with(&Operations<floatX>::pack_weight);
}

// The matrix unit's operations, or vector code without one.
template <class floatX>
static const Operations<floatX>& unit_operations() {
    const auto* unit = matrix_operations<floatX>();
    return unit ? *unit : vector_operations<floatX>();
}

// Raises *amax (Out), if it is not null. fp32 tensors have none.
template <class floatX>
static void raise_amax(float* amax, const floatX* x, int64_t count) {
    if (!amax) return;
    if constexpr (sizeof(floatX) == 2) {
        // As integers, magnitudes are in the order of their values, and NaN is above all others.
        uint32_t largest = __builtin_bit_cast(uint32_t, *amax) >> 16;
#pragma omp parallel for simd schedule(static) reduction(max : largest)
        for (int64_t i = 0; i < count; i++) largest = std::max(largest, uint32_t(x[i].bits) & 0x7fff);
        *amax = __builtin_bit_cast(float, largest << 16);
    }
}

template <class floatX>
void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                       VocabShard shard, Stream stream) {
    check_vocab_shard("embedding_forward", shard);
    vector_operations<floatX>().embedding_forward(out, tokens, wte, wpe, B, T, C, shard, stream);
}

template <class floatX>
void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                        VocabShard shard, Stream stream) {
    check_vocab_shard("embedding_backward", shard);
    vector_operations<floatX>().embedding_backward(dwte, dwpe, dout, tokens, B, T, C, shard, stream);
}

template <class floatX>
void layernorm_forward(Out<floatX> out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, Stream stream) {
    vector_operations<floatX>().layernorm_forward(out, mean, rstd, inp, weight, bias, N, C, stream);
    raise_amax(out.amax, out.data, int64_t(N) * C);
}

template <class floatX>
void layernorm_backward(Out<floatX> dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                        const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                        const floatX* dresidual, int N, int C, Stream stream) {
    vector_operations<floatX>().layernorm_backward(dinp, dweight, dbias, dbranch_bias, dout, inp, weight, mean, rstd,
                                                   dresidual, N, C, stream);
    raise_amax(dinp.amax, dinp.data, int64_t(N) * C);
}

template <class floatX>
void add_residual(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int N, int C,
                  Stream stream) {
    vector_operations<floatX>().add_residual(out, inp, residual, bias, N, C, stream);
}

// Attention on a matrix unit takes heads of 32, 64, 96 or 128 channels.
template <class floatX>
static const Operations<floatX>& attention_operations(int HS) {
    const auto* unit = HS % 32 == 0 && HS <= 128 ? matrix_operations<floatX>() : nullptr;
    return unit ? *unit : vector_operations<floatX>();
}

template <class floatX>
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream stream) {
    attention_operations<floatX>(HS).attention_forward(out, lse, qkv, B, T, NH, HS, stream);
}

template <class floatX>
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv, int B,
                        int T, int NH, int HS, Stream stream) {
    attention_operations<floatX>(HS).attention_backward(dqkv, dout, out, lse, qkv, B, T, NH, HS, stream);
}

template <class floatX>
void attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream stream) {
    vector_operations<floatX>().attention_decode(out, qkv, T, NH, HS, stream);
}

template <class floatX>
void gelu_forward(Out<floatX> out, const floatX* inp, int64_t count, Stream stream) {
    vector_operations<floatX>().gelu_forward(out, inp, count, stream);
    raise_amax(out.amax, out.data, count);
}

template <class floatX>
void gelu_backward(Out<floatX> dinp, const floatX* inp, const floatX* dout, int64_t count, Stream stream) {
    vector_operations<floatX>().gelu_backward(dinp, inp, dout, count, stream);
    raise_amax(dinp.amax, dinp.data, count);
}

template <class floatX>
int64_t head_bytes(int N, int C, int Vp, bool keep) {
    return unit_operations<floatX>().head_bytes(N, C, Vp, keep);
}

template <class floatX>
void head_targets(float* target_logits, const HeadInput<floatX>& head, Stream stream) {
    check_head("head_targets", head);
    vector_operations<floatX>().head_targets(target_logits, head, stream);
}

template <class floatX>
void head_forward(float* sums, void* exponentials, const float* target_logits, const HeadInput<floatX>& head, bool keep,
                  Stream stream) {
    check_head("head_forward", head);
    unit_operations<floatX>().head_forward(sums, exponentials, target_logits, head, keep, stream);
}

template <class floatX>
void head_backward(floatX* dinp, float* dweight, void* exponentials, const float* sums, const HeadInput<floatX>& head,
                   float scale, bool accumulate, Stream stream) {
    check_head("head_backward", head);
    unit_operations<floatX>().head_backward(dinp, dweight, exponentials, sums, head, scale, accumulate, stream);
}

void sum_of_squares(float* out, const float* x, int64_t count, Stream stream) {
    vector_operations<float>().sum_of_squares(out, x, count, stream);
}

template <class floatX>
void adamw(floatX* weight, float* master, Moment m, Moment v, const float* grad, const float* factor, int64_t begin,
           int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step, Stream stream) {
    check_adamw(begin, count, decay, step);
    vector_operations<floatX>().adamw(weight, master, m, v, grad, factor, begin, count, decay, config, lr, step,
                                      stream);
}

void accumulate_rounded(bf16* sum, const float* x, int64_t begin, int64_t count, uint64_t seed, int step, int addition,
                        Stream stream) {
    check_range(begin, count, step);
    vector_operations<float>().accumulate_rounded(sum, x, begin, count, seed, step, addition, stream);
}

void muon_momentum(float* out, Moment moment, const float* grad, const float* factor, int64_t begin, int64_t count,
                   float mu, uint64_t seed, int step, Stream stream) {
    check_range(begin, count, step);
    vector_operations<float>().muon_momentum(out, moment, grad, factor, begin, count, mu, seed, step, stream);
}

template <class floatX>
void muon_polynomial(floatX* out, const floatX* matrices, const floatX* squares, int count, int n, float a, float b,
                     float c, Stream stream) {
    vector_operations<floatX>().muon_polynomial(out, matrices, squares, count, n, a, b, c, stream);
}

template <class floatX>
void muon_update(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t begin,
                 int64_t count, float scale, AdamWConfig config, float lr, int step, Stream stream) {
    vector_operations<floatX>().muon_update(weight, master, direction, factor, begin, count, scale, config, lr, step,
                                            stream);
}

// ---- Matmuls, and the memory of all operations

template <class floatX>
double measure_peak_flops() {
    const auto run = unit_operations<floatX>().run_microkernel;
    alignas(64) static floatX x[MICROKERNEL_BYTES / sizeof(floatX)];  // not on a stack, which may be small
    for (int i = 0; i < int(std::size(x)); i++) x[i] = floatX(float(i * 37 % 101) - 50.5f);  // zeros are faster
    double flops = 0.0;
#pragma omp parallel reduction(+ : flops)
    flops = peak_of([&] { return run(x); });
    return flops * std::min(1.0, cores_available() / openmp_threads());  // threads of a core measure its full rate each
}
template double measure_peak_flops<float>();
template double measure_peak_flops<bf16>();

void set_attention(AttentionOptions) {}
template <class floatX>
std::string prepare_attention(int, int, int, int, bool) {
    return "";
}
INSTANTIATE(prepare_attention);

int preferred_logit_rows() { return 1024; }  // in fp32 the exponentials of GPT-2's vocabulary then take 206 MB

template <class floatX>
int64_t scratch_bytes(int B, int T, int C, int NH, int Vp) {
    const int N = B * T;
    int64_t bytes = vector_operations<floatX>().scratch_bytes(B, T, C, NH, Vp);
    // IC, OC. The head has operations of its own, and logits of one row are computed without scratch.
    for (const auto& [IC, OC] : {std::pair(C, 3 * C), {C, C}, {C, 4 * C}, {4 * C, C}})
        bytes = std::max(bytes, unit_operations<floatX>().matmul_scratch_bytes(N, IC, OC));
    if (const auto* unit = matrix_operations<floatX>()) bytes = std::max(bytes, unit->scratch_bytes(B, T, C, NH, Vp));
    return bytes;
}

template <class floatX>
int64_t muon_scratch_bytes(int C) {
    int64_t bytes = 0;
    const auto* unit = matrix_operations<floatX>();
    const auto scratch_of = unit ? unit->batch_scratch_bytes : vector_operations<floatX>().matmul_scratch_bytes;
    for (const auto& [IC, OC] : {std::pair(C, C), {C, 4 * C}, {4 * C, C}})
        bytes = std::max(bytes, scratch_of(C, IC, OC));
    return bytes;
}

template <class floatX>
int64_t packed_bytes(int OC, int IC) {
    const auto* unit = matrix_operations<floatX>();
    return unit ? unit->packed_bytes(OC, IC) : 0;
}

template <class floatX>
void pack_weight(void* packed, const floatX* weight, int OC, int IC, Stream stream) {
    if (const auto* unit = matrix_operations<floatX>()) unit->pack_weight(packed, weight, OC, IC, stream);
}

// ---- Matmuls in FP8. Operands are rounded to the values of a GPU's FP8 operands. These are exact in bf16, so the bf16
// matmuls then compute the same products; only the order of the sums differs.

template <class Format>
static void round_to_fp8(bf16* out, const bf16* x, int64_t count, float amax) {
    const Fp8Scale s = fp8_scale<Format>(amax);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++)
        round_to(out[i], fp8_value<Format>(fp8_code<Format>(float(x[i]) * s.scale)) * s.inverse);
}

int64_t fp8_weight_bytes(int OC, int IC) { return round_up<int64_t>(int64_t(OC) * IC * int64_t(sizeof(bf16)), 64); }

void pack_fp8_weight(void* packed, const bf16* weight, int OC, int IC, Stream) {
    const int64_t count = int64_t(OC) * IC;
    float amax = 0.0f;
    raise_amax(&amax, weight, count);
    round_to_fp8<E4M3>(static_cast<bf16*>(packed), weight, count, amax);
}

// The workspace has inp and dout, rounded.
int64_t fp8_workspace_bytes(int N, int IC, int OC) { return fp8_weight_bytes(N, IC) + fp8_weight_bytes(N, OC); }

static const bf16* rounded_input(const Fp8& fp8, const bf16* inp, int64_t count) {
    bf16* const rounded = static_cast<bf16*>(fp8.workspace);
    round_to_fp8<E4M3>(rounded, inp, count, *fp8.input_amax);
    return rounded;
}

static void fp8_matmul_forward(MatmulForward<bf16> m, int N, int IC, int OC, Stream stream) {
    const Fp8 fp8 = m.weight.fp8;
    if (fp8.finds_input_amax) raise_amax(fp8.input_amax, m.inp, int64_t(N) * IC);
    m.inp = rounded_input(fp8, m.inp, int64_t(N) * IC);
    m.weight = {static_cast<const bf16*>(fp8.packed), nullptr};  // the rounded rows
    matmul_forward(m, N, IC, OC, stream);
}

static void fp8_matmul_backward(MatmulBackward<bf16> m, int N, int IC, int OC, Stream stream) {
    const Fp8 fp8 = m.weight.fp8;
    bf16* dout = reinterpret_cast<bf16*>(static_cast<char*>(fp8.workspace) + fp8_weight_bytes(N, IC));
    if (fp8.finds_gradient_amax) raise_amax(fp8.gradient_amax, m.dout, int64_t(N) * OC);
    round_to_fp8<E5M2>(dout, m.dout, int64_t(N) * OC, *fp8.gradient_amax);
    if (m.dbias) vector_operations<bf16>().column_sums(m.dbias, m.dout, N, OC, m.accumulate);
    m.dbias = nullptr;
    m.dout = dout;
    m.inp = rounded_input(fp8, m.inp, int64_t(N) * IC);
    m.weight = {static_cast<const bf16*>(fp8.packed), nullptr};
    matmul_backward(m, N, IC, OC, stream);
}

template <class floatX>
void matmul_forward(const MatmulForward<floatX>& m, int N, int IC, int OC, Stream stream) {
    INVARIANT(!m.pre_gelu || !m.residual, "a matmul of (%d, %d) with both GELU and a residual", N, IC);
    if constexpr (sizeof(floatX) == 2)
        if (m.weight.in_fp8(N)) return fp8_matmul_forward(m, N, IC, OC, stream);
    // One row (generation) is bound by reading the weight, which packing would do twice.
    const auto* unit = N > 1 ? matrix_operations<floatX>() : nullptr;
    (unit ? *unit : vector_operations<floatX>()).matmul_forward(m, N, IC, OC, stream);
    raise_amax(m.out.amax, m.out.data, int64_t(N) * OC);
}

template <class floatX>
void matmul_backward(const MatmulBackward<floatX>& m, int N, int IC, int OC, Stream stream) {
    m.check_gradients(m.weight.in_fp8(N));
    if constexpr (sizeof(floatX) == 2)
        if (m.weight.in_fp8(N)) return fp8_matmul_backward(m, N, IC, OC, stream);
    unit_operations<floatX>().matmul_backward(m, N, IC, OC, stream);
    raise_amax(m.dinp.amax, m.dinp.data, int64_t(N) * IC);
}

constexpr int MIRROR_COLUMNS = 128;

// out = x x^T, for CPUs without a matrix unit. Blocks of columns are computed from the diagonal
// down, and mirrored: the elements above have the same products in the same order, so the same bits. 32 rows at a time
// stay in the first-level cache.
template <class floatX>
static void product_with_itself(floatX* out, const floatX* x, int N, int IC, Stream stream) {
    std::vector<floatX> block(size_t(N) * MIRROR_COLUMNS);
    for (int first = 0; first < N; first += MIRROR_COLUMNS) {
        const int width = std::min(MIRROR_COLUMNS, N - first), rows = N - first;
        const floatX* const from = x + int64_t(first) * IC;
        matmul_forward<floatX>({.out = block.data(), .inp = from, .weight = {from, nullptr}}, rows, IC, width, stream);
        floatX* const to = out + int64_t(first) * N + first;
#pragma omp parallel for schedule(static)
        for (int64_t r0 = 0; r0 < rows; r0 += 32) {
            const int64_t r1 = std::min<int64_t>(r0 + 32, rows);
            for (int64_t r = r0; r < r1; r++) std::copy_n(&block[size_t(r * width)], width, to + r * N);
            for (int64_t c = 0; c < width && r0 >= width; c++)
                for (int64_t r = r0; r < r1; r++) to[c * N + r] = block[size_t(r * width + c)];
        }
    }
}

template <class floatX>
void matmul_batch(floatX* out, const floatX* left, const floatX* right, bool transposed, int count, int N, int IC,
                  int OC, Stream stream) {
    if (const auto* unit = matrix_operations<floatX>())
        return unit->matmul_batch(out, left, right, transposed, count, N, IC, OC, stream);
    for (int64_t i = 0; i < count; i++) {
        floatX* const product = out + i * N * OC;
        const floatX* const factor = left + i * N * IC;
        const Weight<floatX> weight = {right + i * IC * OC, nullptr};
        if (transposed && left == right && N > MIRROR_COLUMNS)
            product_with_itself<floatX>(product, factor, N, IC, stream);
        else if (transposed)
            matmul_forward<floatX>({.out = product, .inp = factor, .weight = weight}, N, IC, OC, stream);
        else
            matmul_backward<floatX>({.dinp = product, .dout = factor, .weight = weight}, N, OC, IC, stream);
    }
}

#define OP(op) INSTANTIATE(op);
EACH_OPERATION(OP)
INSTANTIATE(packed_bytes);
INSTANTIATE(pack_weight);
INSTANTIATE(matmul_batch);
INSTANTIATE(scratch_bytes);
INSTANTIATE(muon_scratch_bytes);

}  // namespace cpu
