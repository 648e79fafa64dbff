// attention_cudnn.h: bf16 attention by cuDNN. attention.cuh asks here first, where cuDNN is built in (USE_CUDNN).
#pragma once
#include <cstdint>
#include <string>

#include "ops/ops.h"

namespace gpu {

// Makes the plans for these sizes, and says in words by what attention will run, and why. Only what was prepared runs
// by cuDNN: a plan takes up to a second, so prompts, each of another length, are not worth one, and none may be made
// while a CUDA graph is captured.
std::string cudnn_prepare_attention(int B, int T, int NH, int HS, bool backward);

// What backward takes of device_scratch.
int64_t cudnn_attention_scratch_bytes(int B, int T, int NH, int HS);

// As in ops.inc; false: not prepared, or not by cuDNN, and nothing was done.
bool cudnn_attention_forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream stream);
bool cudnn_attention_backward(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B,
                              int T, int NH, int HS, Stream stream);

}  // namespace gpu
