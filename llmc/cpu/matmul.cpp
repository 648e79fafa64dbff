// matmul.cpp: the choice of the matmul's variant, and the size of the scratch memory that all operations share. Shapes:
// inp (N, IC), weight (OC, IC), out (N, OC).
#include "cpu/matmul.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/host.h"
#include "cpu/variants.h"

// ---- The choice of a variant: bf16 runs on the matrix unit if isa() has one, else widened to fp32.

namespace cpu {

template <class floatX>
static bool on_matrix_unit() {
    return has_matrix_variant<floatX> && isa() >= Isa::avx512bf16;
}

template <class floatX>
static double sum_of_threads() {
    if constexpr (has_matrix_variant<floatX>)
        if (on_matrix_unit<floatX>()) return MATRIX_VARIANT_OF(measure_peak_flops)();
    return fp32::measure_peak_flops();
}

template <class floatX>
double measure_peak_flops() {  // threads that share a core each measure its full rate, hence the factor
    return sum_of_threads<floatX>() * std::min(1.0, cores_available() / openmp_threads());
}
template double measure_peak_flops<float>();
template double measure_peak_flops<bf16>();

template <class floatX>
static int64_t matmul_scratch_bytes(int N, int IC, int OC) {
    if constexpr (has_matrix_variant<floatX>)
        if (on_matrix_unit<floatX>()) return MATRIX_VARIANT_OF(matmul_scratch_bytes)(N, IC, OC);
    return fp32::matmul_scratch_bytes<floatX>(N, IC, OC);
}

void set_attention(AttentionChoice) {}
template <class floatX>
std::string prepare_attention(int, int, int, int, bool) {
    return "";
}
INSTANTIATE(prepare_attention);

int preferred_logit_rows() { return 2048; }  // bf16 logits of GPT-2's vocabulary take 206 MB

template <class floatX>
int64_t scratch_bytes(int B, int T, int C, int NH, int Vp) {
    const int N = B * T;
    int64_t bytes = vector_scratch_bytes(B, T, C, NH, Vp);
    const int shapes[][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}, {C, Vp}};  // IC, OC
    for (const auto& [IC, OC] : shapes) bytes = std::max(bytes, matmul_scratch_bytes<floatX>(N, IC, OC));
    if constexpr (has_matrix_variant<floatX>)
        if (on_matrix_unit<floatX>()) bytes = std::max(bytes, MATRIX_VARIANT_OF(attention_scratch_bytes)(T, C / NH));
    return bytes;
}

template <class floatX>
int64_t muon_scratch_bytes(int C) {
    int64_t bytes = 0;
    for (const auto& [IC, OC] : {std::pair(C, C), {C, 4 * C}, {4 * C, C}})
        bytes = std::max(bytes, matmul_scratch_bytes<floatX>(C, IC, OC));
    return bytes;
}

template <class floatX>
int64_t packed_bytes(int OC, int IC) {
    if constexpr (has_matrix_variant<floatX>)
        if (on_matrix_unit<floatX>()) return MATRIX_VARIANT_OF(packed_bytes<floatX>)(OC, IC);
    return 0;
}

template <class floatX>
void pack_weight(void* packed, const floatX* weight, int OC, int IC, Stream stream) {
    if constexpr (has_matrix_variant<floatX>)
        if (on_matrix_unit<floatX>()) MATRIX_VARIANT_OF(pack_weight<floatX>)(packed, weight, OC, IC, stream);
}

static void check_sizes(int N, int IC, int OC) {
    INVARIANT(N >= 1 && IC >= 1 && OC >= 1, "a matmul of (%d, %d) and (%d, %d): every size must be at least 1", N, IC,
              IC, OC);
}

template <class floatX>
void matmul_forward(const MatmulForward<floatX>& m, int N, int IC, int OC, Stream stream) {
    check_sizes(N, IC, OC);
    INVARIANT(!m.pre_gelu || !m.residual, "a matmul of (%d, %d) with both GELU and a residual", N, IC);
    if constexpr (sizeof(floatX) == 2)
        if (m.weight.in_fp8(N)) return fp8_matmul_forward(m, N, IC, OC, stream);
    // One row (generation) is bound by reading the weight, and the packed weight is twice as large.
    const bool on_unit = on_matrix_unit<floatX>() && N > 1;
    if constexpr (has_matrix_variant<floatX>)
        if (on_unit) MATRIX_VARIANT_OF(matmul_forward<floatX>)(m, N, IC, OC, stream);
    if (!on_unit) fp32::matmul_forward(m, N, IC, OC, stream);
    raise_amax(m.out.amax, m.out.data, int64_t(N) * OC);
}

template <class floatX>
void matmul_backward(const MatmulBackward<floatX>& m, int N, int IC, int OC, Stream stream) {
    check_sizes(N, IC, OC);
    m.check_gradients(m.weight.in_fp8(N));
    if constexpr (sizeof(floatX) == 2)
        if (m.weight.in_fp8(N)) return fp8_matmul_backward(m, N, IC, OC, stream);
    if constexpr (has_matrix_variant<floatX>)
        if (on_matrix_unit<floatX>()) MATRIX_VARIANT_OF(matmul_backward<floatX>)(m, N, IC, OC, stream);
    if (!on_matrix_unit<floatX>()) fp32::matmul_backward(m, N, IC, OC, stream);
    raise_amax(m.dinp.amax, m.dinp.data, int64_t(N) * IC);
}

// out = x x^T. Blocks of columns are computed from the diagonal down, and mirrored: the elements above have the same
// products in the same order, so the same bits.
template <class floatX>
static void product_with_itself(floatX* out, const floatX* x, int N, int IC, Stream stream) {
    constexpr int most = 192;
    std::vector<floatX> block(size_t(N) * most);
    for (int first = 0; first < N; first += most) {
        const int width = std::min(most, N - first), rows = N - first;
        const floatX* const from = x + int64_t(first) * IC;
        matmul_forward<floatX>({.out = block.data(), .inp = from, .weight = {from, nullptr}}, rows, IC, width, stream);
#pragma omp parallel for schedule(static)
        for (int64_t r = first; r < N; r++)
            for (int64_t c = first; c < std::min<int64_t>(first + width, r + 1); c++)
                out[r * N + c] = out[c * N + r] = block[size_t((r - first) * width + c - first)];
    }
}

template <class floatX>
void matmul_batch(floatX* out, const floatX* left, const floatX* right, bool transposed, int count, int N, int IC,
                  int OC, Stream stream) {
    for (int64_t i = 0; i < count; i++) {
        floatX* const product = out + i * N * OC;
        const floatX* const factor = left + i * N * IC;
        const Weight<floatX> weight = {right + i * IC * OC, nullptr};
        if (transposed && left == right)
            product_with_itself<floatX>(product, factor, N, IC, stream);
        else if (transposed)
            matmul_forward<floatX>({.out = product, .inp = factor, .weight = weight}, N, IC, OC, stream);
        else
            matmul_backward<floatX>({.dinp = product, .dout = factor, .weight = weight}, N, OC, IC, stream);
    }
}

INSTANTIATE(scratch_bytes);
INSTANTIATE(muon_scratch_bytes);
INSTANTIATE(packed_bytes);
INSTANTIATE(pack_weight);
INSTANTIATE(matmul_forward);
INSTANTIATE(matmul_backward);
INSTANTIATE(matmul_batch);

}  // namespace cpu
