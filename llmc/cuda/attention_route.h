// attention_route.h: a pass of attention, and a route to compute it.
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

}  // namespace gpu
