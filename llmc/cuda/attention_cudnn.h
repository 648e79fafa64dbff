// attention_cudnn.h: bf16 attention by cuDNN. In a build with cuDNN (USE_CUDNN), attention.cuh calls these functions
// first.
#pragma once
#include <cstdint>
#include <string>

#include "ops/ops.h"

namespace gpu {

// Makes the execution plans for these sizes, unless they are there. Returns a description, for the log, of which
// kernels attention uses and why. cuDNN runs only the sizes that were prepared: making a plan takes up to a second,
// which is too slow for prompts, each of which has another length, and it is not allowed while a CUDA graph is
// captured.
std::string cudnn_prepare_attention(int B, int T, int NH, int HS, bool backward);

// Bytes of device_scratch that forward and backward use: with their plans, or an upper bound before they are prepared.
int64_t cudnn_attention_scratch_bytes(int B, int T, int NH, int HS);

// attention_forward and attention_backward as in ops.inc. They return false, and do nothing, for sizes that were not
// prepared or that cuDNN does not support.
bool cudnn_attention_forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream stream);
bool cudnn_attention_backward(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B,
                              int T, int NH, int HS, Stream stream);

}  // namespace gpu
