// attention.cuh: causal attention: forward, backward, and decoding (attention of the last token only).
//
// bf16 heads of 64 channels (every GPT-2) and of 128 channels run on tensor cores (attention_mma.cuh). fp32 and other
// head sizes run on the FMA units (attention_plain.cuh): HS * sizeof(floatX) must be a multiple of 16, HS at most 256,
// B and T are arbitrary. The kernels here store no (T, T) matrix and use no atomics: the same input gives the same
// bits. For the bf16 sizes that prepare_attention was called for, there are other routes (attention_routes.h).
#pragma once
#include <algorithm>
#include <string>

#include "base/device.h"
#include "cuda/attention_plain.cuh"
#include "cuda/attention_routes.h"
#include "cuda/simt.h"
#include "ops/ops.h"

namespace gpu {
// Bytes of device_scratch that attention_forward and attention_backward use.
template <class floatX>
int64_t attention_scratch_bytes(int B, int T, int NH, int HS);
}  // namespace gpu

template <class floatX>
void check_attention(const char* op, int B, int T, int NH, int HS) {
    constexpr int size = Vec<floatX>::size, max_channels = 256;
    ENSURE(B >= 1 && T >= 1 && NH >= 1, "%s of %d sequences of %d tokens, %d heads: there must be at least one of each",
           op, B, T, NH);
    ENSURE(int64_t(T) * 3 * NH * HS <= std::numeric_limits<int>::max(),
           "%s of %d tokens, %d heads of %d channels: a sequence has 2147483647 numbers at most", op, T, NH, HS);
    ENSURE(HS >= 1 && HS % size == 0 && HS <= max_channels,
           "%s: heads of %d channels must be a multiple of %d, at most %d", op, HS, size, max_channels);
}

template <class floatX>
std::string gpu::prepare_attention(int B, int T, int NH, int HS, bool backward) {
    check_attention<floatX>("attention", B, T, NH, HS);
    if constexpr (sizeof(floatX) == sizeof(bf16)) return prepare_attention_routes({B, T, NH, HS}, backward);
    return "kernels of ours: cuDNN's are for bf16";
}

inline int64_t attention_delta_bytes(int B, int T, int NH) { return int64_t(B) * NH * T * int64_t(sizeof(float)); }

template <class floatX>
int64_t gpu::attention_scratch_bytes(int B, int T, int NH, int HS) {
    int64_t bytes = attention_delta_bytes(B, T, NH);
    if constexpr (sizeof(floatX) == sizeof(bf16))
        bytes = std::max(bytes, attention_routes_scratch_bytes({B, T, NH, HS}));
    return bytes;
}

template <class floatX>
void gpu::attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream stream) {
    check_attention<floatX>("attention_forward", B, T, NH, HS);
    if constexpr (sizeof(floatX) == sizeof(bf16))
        run_attention({{AttentionPass::forward, {B, T, NH, HS}}, qkv, out, lse}, stream);
    else
        launch_attention_forward_plain(out, lse, qkv, B, T, NH, HS, stream);
}

template <class floatX>
void gpu::attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv,
                             int B, int T, int NH, int HS, Stream stream) {
    check_attention<floatX>("attention_backward", B, T, NH, HS);
    if constexpr (sizeof(floatX) == sizeof(bf16)) {
        const AttentionKey key{attention_backward_pass(), {B, T, NH, HS}};
        run_attention({key, qkv, const_cast<bf16*>(out), const_cast<float*>(lse), dout, dqkv}, stream);
    } else {
        float* delta = static_cast<float*>(device_scratch(attention_delta_bytes(B, T, NH)));
        launch_attention_backward_plain(dqkv, delta, dout, out, lse, qkv, B, T, NH, HS, stream);
    }
}

// ---- Decoding

constexpr int DECODE_THREADS = 256, DECODE_LANES = 8, DECODE_GROUPS = DECODE_THREADS / DECODE_LANES;

// out (HS) of a head = the weighted sums of values of all groups, each rescaled to the block's maximum and divided by
// the block's sum of weights.
template <class floatX, int CHANNELS>
__device__ void combine_groups(floatX* out, const float* group_max, const float* group_sum,
                               const float (*group_out)[CHANNELS], int HS) {
    float block_max = -INFINITY, block_sum = 0.0f;
    for (int g = 0; g < DECODE_GROUPS; g++) block_max = fmaxf(block_max, group_max[g]);
    for (int g = 0; g < DECODE_GROUPS; g++) block_sum += group_sum[g] * expf(group_max[g] - block_max);
    for (int c = int(threadIdx.x); c < HS; c += DECODE_THREADS) {
        float sum = 0.0f;
        for (int g = 0; g < DECODE_GROUPS; g++) sum += group_out[g][c] * expf(group_max[g] - block_max);
        out[c] = floatX(sum / block_sum);
    }
}

// out (C) = attention of the last of T tokens, from qkv (T, 3, NH, HS).
//
// Grid: one block of 256 threads per head. A group of 8 lanes reads one key and its value, 16 bytes per lane and load.
// The block's 32 groups take every 32nd key; each keeps an online softmax of its own, and the block combines them at
// the end. Every key and value is read once: 2*T*C*sizeof(floatX) bytes. VECS: 16-byte vectors per lane, so
// HS <= VECS * 8 * Vec::size.
template <class floatX, int VECS>
__global__ void __launch_bounds__(DECODE_THREADS)
    attention_decode_kernel(floatX* out, const floatX* qkv, AttentionShape s) {
    using V = Vec<floatX>;
    constexpr int step = DECODE_LANES * V::size;
    const int lane = int(threadIdx.x) % DECODE_LANES, group = int(threadIdx.x) / DECODE_LANES;
    const auto rows = [&](int part) { return HeadRows<const floatX>::of_qkv(qkv, s, part); };
    const HeadRows<const floatX> q = rows(0), k = rows(1), v = rows(2);
    const auto load = [&](const HeadRows<const floatX>& from, int t, int i) {
        const int channel = lane * V::size + i * step;
        return t < s.T && channel < s.HS ? load128(from.at(t, channel)) : V{};
    };
    V query[VECS];
    UNROLL
    for (int i = 0; i < VECS; i++) query[i] = load(q, s.T - 1, i);

    float row_max = -INFINITY, sum = 0.0f, o[VECS][V::size] = {};
    for (int first = 0; first < s.T; first += DECODE_GROUPS) {  // every lane makes every iteration, for the shuffles
        const int t = first + group;
        float score = 0.0f;
        UNROLL
        for (int i = 0; i < VECS; i++) {
            const V key = load(k, t, i);
            UNROLL
            for (int e = 0; e < V::size; e++) score += float(query[i][e]) * float(key[e]);
        }
        for (int distance = DECODE_LANES / 2; distance > 0; distance /= 2)
            score += __shfl_xor_sync(FULL_MASK, score, distance);
        if (t >= s.T) continue;  // in the last iteration
        score = mul_rn(score, s.scale);
        const float new_max = fmaxf(row_max, score);
        const float rescale = expf(row_max - new_max), weight = expf(score - new_max);
        row_max = new_max;
        sum = sum * rescale + weight;
        UNROLL
        for (int i = 0; i < VECS; i++) {
            const V value = load(v, t, i);
            UNROLL
            for (int e = 0; e < V::size; e++) o[i][e] = o[i][e] * rescale + weight * float(value[e]);
        }
    }

    SHARED(group_max, float[DECODE_GROUPS]);
    SHARED(group_sum, float[DECODE_GROUPS]);
    SHARED(group_out, float[DECODE_GROUPS][VECS * step]);
    UNROLL
    for (int i = 0; i < VECS; i++) {
        UNROLL
        for (int e = 0; e < V::size; e++) group_out[group][lane * V::size + i * step + e] = o[i][e];
    }
    if (lane == 0) {
        group_max[group] = row_max;
        group_sum[group] = sum;
    }
    __syncthreads();

    combine_groups(out + int(blockIdx.x) * s.HS, group_max, group_sum, group_out, s.HS);
}

template <class floatX>
void gpu::attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream stream) {
    check_attention<floatX>("attention_decode", 1, T, NH, HS);
    constexpr int per_group = DECODE_LANES * Vec<floatX>::size;
    const AttentionShape shape = attention_shape(T, NH, HS);
    with_constant<256 / per_group>(ceil_div(HS, per_group), [&](auto vecs) {
        simt::launch(attention_decode_kernel<floatX, vecs>, NH, DECODE_THREADS, 0, stream, out, qkv, shape);
    });
}

// Tests include this file for its constants and sizes, and test the kernels that ops.cu instantiates.
INSTANTIATED_ELSEWHERE(gpu::attention_forward);
INSTANTIATED_ELSEWHERE(gpu::attention_backward);
INSTANTIATED_ELSEWHERE(gpu::attention_decode);
