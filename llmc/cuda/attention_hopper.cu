// attention_hopper.cu: our kernels for Hopper as a route to compute bf16 attention (attention_routes.h). Not in ops.cu,
// because tiles with a swizzle are aligned to 1024 bytes, and ptxas aligns the shared memory of all kernels of a file
// alike.
#include "cuda/attention_routes.h"
#include "cuda/attention_wgmma_backward.cuh"
#include "cuda/attention_wgmma_forward.cuh"

static std::string wgmma_reason(const gpu::AttentionSizes& sizes) {
    if (!gpu::runs_hopper_code())
        return "it needs a GPU of compute capability 9.0 and a program built for sm_90a; this is " + device_info().name;
    if (sizes.HS == 64 || sizes.HS == 128) return "";
    return format("it is for heads of 64 and 128 channels, and these have %d", sizes.HS);
}

static int64_t wgmma_scratch_bytes(const gpu::AttentionKey& key) {
    const auto& [B, T, NH, HS] = key.sizes;
    return key.pass == gpu::AttentionPass::forward ? 0 : attention_wgmma_backward_scratch_bytes(B, T, NH, HS);
}

static void run_wgmma(const gpu::AttentionCall& call, Stream stream) {
    const auto& [key, qkv, out, lse, dout, dqkv] = call;
    const auto& [B, T, NH, HS] = key.sizes;
    if (key.pass == gpu::AttentionPass::forward) {
        if (HS == 64) return launch_attention_forward_wgmma<64>(out, lse, qkv, B, T, NH, stream);
        return launch_attention_forward_wgmma<128>(out, lse, qkv, B, T, NH, stream);
    }
    void* const scratch = device_scratch(wgmma_scratch_bytes(key));
    if (HS == 64) return launch_attention_backward_wgmma<64>(dqkv, scratch, dout, out, lse, qkv, B, T, NH, stream);
    launch_attention_backward_wgmma<128>(dqkv, scratch, dout, out, lse, qkv, B, T, NH, stream);
}

gpu::AttentionKernels gpu::wgmma_attention = {"wgmma", 1, wgmma_reason, wgmma_scratch_bytes, run_wgmma};
