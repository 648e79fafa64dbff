// attention_kernels.cuh: our kernels for every GPU as a route to compute bf16 attention (attention_routes.h): tensor
// cores for heads of 64 and 128 channels, or else the FMA units. Only ops.cu includes it.
#pragma once
#include "cuda/attention.cuh"
#include "cuda/attention_mma.cuh"
#include "cuda/attention_routes.h"

inline int64_t mma_scratch_bytes(const gpu::AttentionKey& key) {
    const auto& [B, T, NH, HS] = key.sizes;
    return key.pass == gpu::AttentionPass::forward ? 0 : attention_delta_bytes(B, T, NH);
}

inline void run_mma(const gpu::AttentionCall& call, Stream stream) {
    const auto& [key, qkv, out, lse, dout, dqkv] = call;
    const auto& [B, T, NH, HS] = key.sizes;
    if (key.pass == gpu::AttentionPass::forward) {
        if (HS == 64) return launch_attention_forward_mma<64>(out, lse, qkv, B, T, NH, stream);
        if (HS == 128) return launch_attention_forward_mma<128>(out, lse, qkv, B, T, NH, stream);
        return launch_attention_forward_plain(out, lse, qkv, B, T, NH, HS, stream);
    }
    float* const delta = static_cast<float*>(device_scratch(mma_scratch_bytes(key)));
    if (HS == 64) return launch_attention_backward_mma<64>(dqkv, delta, dout, out, lse, qkv, B, T, NH, stream);
    if (HS == 128) return launch_attention_backward_mma<128>(dqkv, delta, dout, out, lse, qkv, B, T, NH, stream);
    launch_attention_backward_plain(dqkv, delta, dout, out, lse, qkv, B, T, NH, HS, stream);
}

gpu::AttentionKernels gpu::mma_attention = {"mma", 1, nullptr, mma_scratch_bytes, run_mma};
