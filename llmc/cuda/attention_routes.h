// attention_routes.h: the routes to compute bf16 attention on a GPU, and the choice among them: plans of cuDNN
// (attention_cudnn.cpp), and kernels of ours: wgmma for Hopper (attention_hopper.cu), mma for every GPU
// (attention_kernels.cuh).
//
// Without a choice cuDNN's first plan computes, or mma where cuDNN has none. --autotune times the routes on the
// operands of a call. Of wgmma it first compares the results with those of another route on the same operands, because
// a kernel that is wrong on some GPU shall cost speed, not weights. AttentionBackend fixes the route.
#pragma once
#include <compare>
#include <cstdint>
#include <memory>
#include <string>

#include "ops/ops.h"

namespace gpu {

enum class AttentionPass { forward, backward, deterministic_backward };

struct AttentionSizes {
    int B, T, NH, HS;
    auto operator<=>(const AttentionSizes&) const = default;
};

struct AttentionKey {
    AttentionPass pass;
    AttentionSizes sizes;
    auto operator<=>(const AttentionKey&) const = default;
};

// Forward writes out and lse; backward reads them and dout, and writes dqkv.
struct AttentionCall {
    AttentionKey key;
    const bf16* qkv;
    bf16* out;
    float* lse;
    const bf16* dout = nullptr;
    bf16* dqkv = nullptr;
};

// A route to compute a pass for given sizes. It overwrites its results, so that it can be timed on a call's operands.
struct AttentionRoute {
    virtual ~AttentionRoute() = default;
    virtual std::string text() const = 0;                            // name for the log: "cuDNN 9.19.0, engine 10"
    virtual std::string choice() const = 0;                          // text in the file of kept choices
    virtual int64_t scratch_bytes() const = 0;                       // bytes of device_scratch that run() uses
    virtual bool run(const AttentionCall& call, Stream stream) = 0;  // false: it cannot run
};
using OwnedRoute = std::unique_ptr<AttentionRoute>;

// Kernels of ours. Tests put others in their place.
struct AttentionKernels {
    const char* name;
    // Part of the keys of choices, so that changed kernels are compared and timed again: raise it with each change.
    int version;
    std::string (*reason)(const AttentionSizes& sizes);  // why they cannot run here; empty if they can
    int64_t (*scratch_bytes)(const AttentionKey& key);
    void (*run)(const AttentionCall& call, Stream stream);
};
extern AttentionKernels wgmma_attention, mma_attention;  // attention_hopper.cu, ops.cu

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
