// fp8_matmul.cpp: simulates the FP8 matmuls of a GPU. Operands are rounded to the values of the GPU's FP8 operands.
// These are exact in bf16, so the bf16 matmuls then compute the same products; only the order of the sums differs.
#include "base/fp8.h"

#include <algorithm>

#include "cpu/variants.h"

namespace {

template <class Format>
void round_to_fp8(bf16* out, const bf16* x, int64_t count, float amax) {
    const Fp8Scale s = fp8_scale<Format>(amax);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++)
        round_to(out[i], fp8_value<Format>(fp8_code<Format>(float(x[i]) * s.scale)) * s.inverse);
}

// Bytes of count bf16 numbers, so that what follows is aligned.
int64_t aligned_bytes(int64_t count) { return round_up<int64_t>(count * int64_t(sizeof(bf16)), 64); }

}  // namespace

void cpu::raise_amax(float* amax, const bf16* x, int64_t count) {
    if (!amax) return;
    // As integers, magnitudes are in the order of their values, and NaN is above all others.
    uint32_t largest = __builtin_bit_cast(uint32_t, *amax) >> 16;
#pragma omp parallel for simd schedule(static) reduction(max : largest)
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, uint32_t(x[i].bits) & 0x7fff);
    *amax = __builtin_bit_cast(float, largest << 16);
}

int64_t cpu::fp8_weight_bytes(int OC, int IC) { return aligned_bytes(int64_t(OC) * IC); }

void cpu::pack_fp8_weight(void* packed, const bf16* weight, int OC, int IC, Stream) {
    const int64_t count = int64_t(OC) * IC;
    bf16* rows = static_cast<bf16*>(packed);
    float amax = 0.0f;
    raise_amax(&amax, weight, count);
    round_to_fp8<E4M3>(rows, weight, count, amax);
}

int64_t cpu::fp8_workspace_bytes(int N, int IC, int OC) {
    return aligned_bytes(int64_t(N) * IC) + aligned_bytes(int64_t(N) * OC);
}

void cpu::fp8_matmul_forward(MatmulForward<bf16> m, int N, int IC, int OC, Stream stream) {
    const Fp8 fp8 = m.weight.fp8;
    bf16* x = static_cast<bf16*>(fp8.workspace);
    if (fp8.finds_input_amax) raise_amax(fp8.input_amax, m.inp, int64_t(N) * IC);
    round_to_fp8<E4M3>(x, m.inp, int64_t(N) * IC, *fp8.input_amax);
    m.inp = x;
    m.weight = {static_cast<const bf16*>(fp8.packed), nullptr};  // the rounded rows
    matmul_forward(m, N, IC, OC, stream);
}

void cpu::fp8_matmul_backward(MatmulBackward<bf16> m, int N, int IC, int OC, Stream stream) {
    const Fp8 fp8 = m.weight.fp8;
    bf16* x = static_cast<bf16*>(fp8.workspace);
    bf16* dy = reinterpret_cast<bf16*>(static_cast<char*>(fp8.workspace) + aligned_bytes(int64_t(N) * IC));
    if (fp8.finds_gradient_amax) raise_amax(fp8.gradient_amax, m.dout, int64_t(N) * OC);
    round_to_fp8<E4M3>(x, m.inp, int64_t(N) * IC, *fp8.input_amax);
    round_to_fp8<E5M2>(dy, m.dout, int64_t(N) * OC, *fp8.gradient_amax);
    if (m.dbias) vector_operations<bf16>().column_sums(m.dbias, m.dout, N, OC, m.accumulate);
    m.dbias = nullptr;
    m.dout = dy;
    m.inp = x;
    m.weight = {static_cast<const bf16*>(fp8.packed), nullptr};  // the rounded rows
    matmul_backward(m, N, IC, OC, stream);
}
