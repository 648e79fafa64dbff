// gelu.cuh: GELU in its tanh form (Hendrycks and Gimpel 2016), for matmuls whose epilogue does not apply it.
//
// A thread owns 16 bytes. Forward moves 2*count*sizeof(floatX) bytes and backward 3*count*sizeof(floatX), which bounds
// the time. 0.5 * (1 + tanh(u)) is computed as s = 1 / (1 + exp(-2u)): this loses no digits where tanh(u) is near -1,
// and the result is finite for every finite input (test: inputs of 1e30).
//
// Exponential and reciprocal are one instruction each, with errors of up to 2 and 1 ulp. The other roundings change 2u
// by at most 4 * 2^-23 of itself, so s has a relative error of at most (4 + 4 * |2u|) * 2^-23. Where s is below 2^-126,
// it becomes 0; there |gelu(x)| < 2e-37. The derivative contains s * (1 - s) * x^3. Where s is near 1, the difference 1
// - s would be nothing but the error of s, enlarged by x^3 without limit, so 1 - s is computed as exp(-2u) * s.
#pragma once
#include "cuda/amax.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr float GELU_SLOPE = 1.5957691216f, GELU_CUBIC = 0.044715f;  // 2u = GELU_SLOPE (x + GELU_CUBIC x^3)

// exp(-2u): infinity where x is far below 0, and 0 where x is far above.
__device__ inline float gelu_exponential(float x) {
    return exp2_fast(-GELU_SLOPE * LOG2_E * (x + GELU_CUBIC * x * x * x));
}

__device__ inline float gelu(float x) { return x * reciprocal_fast(1.0f + gelu_exponential(x)); }

__device__ inline float gelu_derivative(float x) {
    const float e = gelu_exponential(x), s = reciprocal_fast(1.0f + e);
    if (e == 0.0f || s == 0.0f) return s;  // else the product below could be 0 * infinity
    return s + s * (e * s) * GELU_SLOPE * x * (1.0f + 3.0f * GELU_CUBIC * x * x);
}

// out (count) = gelu(inp (count)). With amax, *amax is raised to the largest magnitude of out.
// Grid: blocks of 256 threads, a thread per 16 bytes.
template <class floatX>
__global__ void __launch_bounds__(256) gelu_forward_kernel(floatX* out, float* amax, const floatX* inp, int64_t count) {
    using V = Vec<floatX>;
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * V::size;
    Amax largest;
    if (i + V::size > count) {  // the last elements do not fill a vector
        for (int64_t k = i; k < count; k++) {
            out[k] = floatX(gelu(float(inp[k])));
            largest.add(out[k]);
        }
    } else {
        const V x = load128(inp + i);  // backward reads it again, but much later
        V y;
        for (int k = 0; k < V::size; k++) y[k] = floatX(gelu(float(x[k])));
        store128(out + i, y);
        largest.add(y);
    }
    if (amax) largest.raise_by_block(amax);
}

// dinp (count) = dout (count) * gelu'(inp (count)); dinp may be dout. With amax, *amax is raised to the largest
// magnitude of dinp. Grid: as gelu_forward_kernel.
template <class floatX>
__global__ void __launch_bounds__(256)
    gelu_backward_kernel(floatX* dinp, float* amax, const floatX* inp, const floatX* dout, int64_t count) {
    using V = Vec<floatX>;
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * V::size;
    Amax largest;
    if (i + V::size > count) {
        for (int64_t k = i; k < count; k++) {
            dinp[k] = floatX(float(dout[k]) * gelu_derivative(float(inp[k])));
            largest.add(dinp[k]);
        }
    } else {
        const V x = load128cs(inp + i), dy = load128(dout + i);
        V dx;
        for (int k = 0; k < V::size; k++) dx[k] = floatX(float(dy[k]) * gelu_derivative(float(x[k])));
        store128(dinp + i, dx);
        largest.add(dx);
    }
    if (amax) largest.raise_by_block(amax);
}

template <class floatX>
void gpu::gelu_forward(Out<floatX> out, const floatX* inp, int64_t count, Stream stream) {
    if (count == 0) return;
    constexpr int threads = 256;
    simt::launch(gelu_forward_kernel<floatX>, blocks_for(count, threads * Vec<floatX>::size), threads, 0, stream,
                 out.data, out.amax, inp, count);
}

template <class floatX>
void gpu::gelu_backward(Out<floatX> dinp, const floatX* inp, const floatX* dout, int64_t count, Stream stream) {
    if (count == 0) return;
    constexpr int threads = 256;
    simt::launch(gelu_backward_kernel<floatX>, blocks_for(count, threads * Vec<floatX>::size), threads, 0, stream,
                 dinp.data, dinp.amax, inp, dout, count);
}
