// matmul.cpp: the matmuls of ops.inc, by cuBLASLt (cublaslt.cpp).
//
// bf16 operands are accumulated in float, and gradients of weights stay float. fp32 matmuls are fp32 throughout, never
// tf32.
//
// FP8 matmuls exist only with A transposed and B not: both operands have the inner dimension contiguous. Backward
// therefore reads transposed copies, which fp8.cuh makes: of the weight, when it is packed; of inp and dout, in each
// call. A is always in E4M3. Results are bf16 or float.
#include "cuda/matmul.h"

#include <algorithm>
#include <type_traits>

#include "base/device.h"

using namespace gpu;

namespace {

template <class floatX>
void check_sizes(int N, int IC, int OC) {
    constexpr int multiple = 16 / sizeof(floatX);
    ENSURE(N >= 1 && IC >= 1 && OC >= 1, "a matmul of (%d, %d) and (%d, %d): every size must be at least 1", N, IC, IC,
           OC);
    ENSURE(IC % multiple == 0 && OC % multiple == 0,
           "a matmul of (%d, %d) and (%d, %d) in %s: the widths must be multiples of %d, so that rows begin at 16 "
           "bytes",
           N, IC, IC, OC, dtype_name(dtype_of<floatX>), multiple);
}

template <class floatX>
MatmulCall<floatX> forward_call(const MatmulForward<floatX>& m, Operands operands, int N, int IC, int OC) {
    const Epilogue epilogue =
        m.pre_gelu ? (m.bias ? Epilogue::bias_gelu : Epilogue::gelu) : (m.bias ? Epilogue::bias : Epilogue::nothing);
    return {.shape = {Kind::forward, epilogue, operands, OC, N, IC, m.residual != nullptr},
            .a = m.weight.rows,
            .b = m.inp,
            .out = m.out.data,
            .bias = m.bias,
            .residual = m.residual,
            .pre_gelu = m.pre_gelu,
            .amax = m.out.amax};
}

// ---- FP8 operands

void check_fp8_sizes(int N, int IC, int OC) {
    ENSURE(N >= 1 && IC >= 16 && OC >= 16 && IC % 16 == 0 && OC % 16 == 0,
           "an FP8 matmul of (%d, %d) and (%d, %d): the widths must be multiples of 16, and there must be a row", N, IC,
           IC, OC);
}

// A packed weight: its codes as rows (OC, IC) and transposed (IC, OC).
struct Fp8Weight {
    uint8_t *rows, *transposed;
    float *inverse, *amax;
    int64_t bytes;

    Fp8Weight(void* packed, int OC, int IC) {
        Arena memory{packed};
        rows = memory.take<uint8_t>(int64_t(OC) * IC);
        transposed = memory.take<uint8_t>(int64_t(OC) * IC);
        inverse = memory.take<float>(1);
        amax = memory.take<float>(1);
        bytes = memory.used;
    }
};

// The operands of backward. Forward needs only inp_rows, which takes the place of inp_transposed.
struct Fp8Operands {
    uint8_t *inp_transposed, *dout_rows, *dout_transposed;
    float *inp_inverse, *dout_inverse, *dout_sums;
    int64_t bytes;

    Fp8Operands(void* workspace, int N, int IC, int OC) {
        const int64_t padded_N = round_up(N, 16);
        Arena memory{workspace};
        inp_transposed = memory.take<uint8_t>(padded_N * IC);
        dout_rows = memory.take<uint8_t>(int64_t(N) * OC);
        dout_transposed = memory.take<uint8_t>(padded_N * OC);
        inp_inverse = memory.take<float>(1);
        dout_inverse = memory.take<float>(1);
        dout_sums = memory.take<float>(int64_t(ceil_div(N, FP8_ROWS)) * OC);
        bytes = memory.used;
    }
    uint8_t* inp_rows() const { return inp_transposed; }
};

void fp8_forward(const MatmulForward<bf16>& m, int N, int IC, int OC, Stream stream) {
    check_fp8_sizes(N, IC, OC);
    const Fp8& fp8 = m.weight.fp8;
    const Fp8Weight w(const_cast<void*>(fp8.packed), OC, IC);
    const Fp8Operands x(fp8.workspace, N, IC, OC);
    if (fp8.finds_input_amax) gpu::raise_amax(fp8.input_amax, m.inp, int64_t(N) * IC, stream);
    gpu::cast_to_fp8<E4M3>(x.inp_rows(), nullptr, x.inp_inverse, nullptr, m.inp, fp8.input_amax, N, IC, stream);
    MatmulCall<bf16> call = forward_call(m, Operands::fp8, N, IC, OC);
    call.a = w.rows, call.a_scale = w.inverse;
    call.b = x.inp_rows(), call.b_scale = x.inp_inverse;
    cublaslt_matmul(call, stream);
}

void fp8_backward(const MatmulBackward<bf16>& m, int N, int IC, int OC, Stream stream) {
    check_fp8_sizes(N, IC, OC);
    m.check_gradients(true);
    const Fp8& fp8 = m.weight.fp8;
    const Fp8Weight w(const_cast<void*>(fp8.packed), OC, IC);
    const Fp8Operands x(fp8.workspace, N, IC, OC);
    float* sums = m.dbias ? x.dout_sums : nullptr;
    if (fp8.finds_gradient_amax) gpu::raise_amax(fp8.gradient_amax, m.dout, int64_t(N) * OC, stream);
    gpu::cast_to_fp8<E5M2>(x.dout_rows, x.dout_transposed, x.dout_inverse, sums, m.dout, fp8.gradient_amax, N, OC,
                           stream);
    gpu::cast_to_fp8<E4M3>(nullptr, x.inp_transposed, x.inp_inverse, nullptr, m.inp, fp8.input_amax, N, IC, stream);
    const Epilogue epilogue = m.pre_gelu ? Epilogue::gelu_derivative : Epilogue::nothing;
    cublaslt_matmul<bf16>({.shape = {Kind::input_gradient, epilogue, Operands::fp8, IC, N, OC},
                           .a = w.transposed,
                           .b = x.dout_rows,
                           .out = m.dinp.data,
                           .pre_gelu = const_cast<bf16*>(m.pre_gelu),
                           .a_scale = w.inverse,
                           .b_scale = x.dout_inverse,
                           .amax = m.dinp.amax},
                          stream);
    cublaslt_matmul<bf16>({.shape = {Kind::weight_gradient, Epilogue::nothing, Operands::fp8, IC, OC, round_up(N, 16)},
                           .a = x.inp_transposed,
                           .b = x.dout_transposed,
                           .out = m.dweight,
                           .accumulate = m.accumulate,
                           .a_scale = x.inp_inverse,
                           .b_scale = x.dout_inverse},
                          stream);
    if (m.dbias) gpu::sum_bias_parts(m.dbias, x.dout_sums, ceil_div(N, FP8_ROWS), OC, m.accumulate, stream);
}

}  // namespace

template <class floatX>
int64_t gpu::matmul_scratch_bytes(int N, int C) {
    int64_t bytes = cublaslt_scratch_bytes(C);
    for (const int OC : {C, 3 * C, 4 * C}) bytes = std::max(bytes, bias_scratch_bytes<floatX>(N, OC));
    return bytes;
}

template <class floatX>
int64_t gpu::packed_bytes(int, int) {
    return 0;
}

template <class floatX>
void gpu::pack_weight(void*, const floatX*, int, int, Stream) {}

template <class floatX>
void gpu::matmul_forward(const MatmulForward<floatX>& m, int N, int IC, int OC, Stream stream) {
    INVARIANT(!m.pre_gelu || !m.residual, "a matmul of (%d, %d) with both GELU and a residual", N, IC);
    if constexpr (sizeof(floatX) == 2)
        if (m.weight.in_fp8(N)) return fp8_forward(m, N, IC, OC, stream);
    check_sizes<floatX>(N, IC, OC);
    matmul(forward_call(m, operands_of<floatX>, N, IC, OC), stream);
}

template <class floatX>
void gpu::matmul_backward(const MatmulBackward<floatX>& m, int N, int IC, int OC, Stream stream) {
    if constexpr (sizeof(floatX) == 2)
        if (m.weight.in_fp8(N)) return fp8_backward(m, N, IC, OC, stream);
    check_sizes<floatX>(N, IC, OC);
    m.check_gradients(false);
    const Epilogue of_input = m.pre_gelu ? Epilogue::gelu_derivative : Epilogue::nothing;
    floatX* aux = const_cast<floatX*>(m.pre_gelu);  // only read, but the library has one attribute for both
    if (m.dinp.data)
        cublaslt_matmul<floatX>({.shape = {Kind::input_gradient, of_input, operands_of<floatX>, IC, N, OC},
                                 .a = m.weight.rows,
                                 .b = m.dout,
                                 .out = m.dinp.data,
                                 .pre_gelu = aux,
                                 .amax = m.dinp.amax},
                                stream);
    if (m.dweight)
        cublaslt_matmul<floatX>({.shape = {Kind::weight_gradient, Epilogue::nothing, operands_of<floatX>, IC, OC, N},
                                 .a = m.inp,
                                 .b = m.dout,
                                 .out = m.dweight,
                                 .accumulate = m.accumulate},
                                stream);
    if (m.dbias)  // not by the library's epilogue: on an H200 qkv's weight gradient takes 0.447 ms with it, for 0.39
        bias_backward(m.dbias, m.dout, N, OC, m.accumulate, device_scratch(bias_scratch_bytes<floatX>(N, OC)), stream);
}

template <class floatX>
void gpu::matmul_batch(floatX* out, const floatX* left, const floatX* right, bool transposed, int count, int N, int IC,
                       int OC, Stream stream) {
    check_sizes<floatX>(N, IC, OC);
    const Kind kind = transposed ? Kind::forward : Kind::input_gradient;
    MatmulShape shape = {kind, Epilogue::nothing, operands_of<floatX>, OC, N, IC};
    shape.batch = count;
    cublaslt_matmul<floatX>({.shape = shape, .a = right, .b = left, .out = out}, stream);
}

int64_t gpu::fp8_weight_bytes(int OC, int IC) { return Fp8Weight(nullptr, OC, IC).bytes; }

void gpu::pack_fp8_weight(void* packed, const bf16* weight, int OC, int IC, Stream stream) {
    const Fp8Weight w(packed, OC, IC);
    fill_zero(w.amax, sizeof(float), stream);
    raise_amax(w.amax, weight, int64_t(OC) * IC, stream);
    cast_to_fp8<E4M3>(w.rows, w.transposed, w.inverse, nullptr, weight, w.amax, OC, IC, stream);
}

int64_t gpu::fp8_workspace_bytes(int N, int IC, int OC) { return Fp8Operands(nullptr, N, IC, OC).bytes; }

INSTANTIATE(gpu::matmul_scratch_bytes);
INSTANTIATE(gpu::packed_bytes);
INSTANTIATE(gpu::pack_weight);
INSTANTIATE(gpu::matmul_forward);
INSTANTIATE(gpu::matmul_backward);
INSTANTIATE(gpu::matmul_batch);
