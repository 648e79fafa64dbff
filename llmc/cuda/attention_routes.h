// attention_routes.h: the routes to compute bf16 attention on a GPU, and the choice among them: plans of cuDNN
// (attention_cudnn.cpp), and kernels of ours: wgmma for Hopper (attention_hopper.cu), mma for every GPU
// (attention_kernels.cuh).
//
// Without a choice cuDNN's first plan computes, or mma where cuDNN has none. --autotune times the routes on the
// operands of a call. Of wgmma it first compares the results with those of another route on the same operands, because
// a kernel that is wrong on some GPU shall cost speed, not weights. AttentionBackend fixes the route.
#pragma once
#include <string>

#include "cuda/attention_route.h"

namespace gpu {

// Makes the routes for these sizes, unless they are there. Returns a description for the log: which routes compute, and
// why. Refuses a fixed backend that cannot run here. Sizes that were not prepared are computed by mma: making a plan of
// cuDNN takes up to a second, which is too slow for prompts, each of which has another length, and it is not allowed
// while a CUDA graph is captured.
std::string prepare_attention_routes(const AttentionSizes& sizes, bool backward);

// Bytes of device_scratch that the prepared routes use, or an upper bound before the sizes are prepared.
int64_t attention_routes_scratch_bytes(const AttentionSizes& sizes);

AttentionPass attention_backward_pass();
void run_attention(const AttentionCall& call, Stream stream);

// Whether this is a GPU of compute capability 9.0, and the program has code with all of its instructions (device.cu).
bool runs_hopper_code();

}  // namespace gpu
