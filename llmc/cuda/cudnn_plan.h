// cudnn_plan.h: causal attention as cuDNN's operation graphs, and plans to run them, by cuDNN's C API. Plans can be
// made with no GPU, for one that is described (dev/test/gpu/cudnn_plans.cpp); to run them is attention_cudnn.cpp's
// part.
#pragma once
#include <cudnn.h>

#include <compare>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/common.h"

#define CUDNN_CHECK(call) gpu::check_cudnn_call((call), #call, __FILE__, __LINE__)

namespace gpu {

void check_cudnn_call(cudnnStatus_t status, const char* call, const char* file, int line);

// -infinity as the mask needs 9.10, described devices 9.8; before 9.6 dq_sums had to be zeroed.
constexpr size_t OLDEST_CUDNN = 91000;

enum class AttentionPass { forward, backward, deterministic_backward };

struct CudnnShape {
    int B, T, NH, HS;
    auto operator<=>(const CudnnShape&) const = default;
};

// The tensors of the graphs that are in memory, by the numbers that an execution gives their addresses by.
enum Uid : int64_t {
    uid_q = 1,
    uid_k,
    uid_v,
    uid_out,
    uid_lse,
    uid_dout,
    uid_dq,
    uid_dk,
    uid_dv,
    uid_row_sums,  // (B, NH, T) floats: the sums of dout * out
    uid_dq_sums,   // (B, NH, T, HS) floats, added to in any order; not in deterministic_backward
    uid_scale,     // 1 / sqrt(HS); this and the following are floats of the host, passed by value
    uid_masked,    // -infinity
    uid_one,
    uid_first_virtual = 1000
};

// An object of cuDNN's, to be filled by set_attribute and then finalized.
struct Descriptor {
    cudnnBackendDescriptor_t handle = nullptr;

    explicit Descriptor(cudnnBackendDescriptorType_t type) { CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &handle)); }
    Descriptor(Descriptor&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(handle, other.handle);
        return *this;
    }
    ~Descriptor() {
        if (handle) cudnnBackendDestroyDescriptor(handle);
    }
};

void set_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                   cudnnBackendAttributeType_t type, int64_t count, const void* values);

// The GPU to plan for: that of a handle, or one described by cuDNN's JSON text.
struct CudnnTarget {
    cudnnHandle_t handle = nullptr;
    std::string device;
};

struct CudnnPlan {
    Descriptor plan;
    int64_t workspace_bytes;
    int engine;  // its number in cuDNN
};

struct CudnnPlans {
    std::deque<Descriptor> parts;  // what the plans refer to
    std::vector<CudnnPlan> plans;  // the heuristics' first choice first
};

// Bytes that the plans of this pass and shape may take beside the tensors.
int64_t workspace_limit(AttentionPass pass, const CudnnShape& shape);

// Up to `most` plans within workspace_limit; none where cuDNN has no engine for it.
CudnnPlans plan_attention(AttentionPass pass, const CudnnShape& shape, const CudnnTarget& target, size_t most);

}  // namespace gpu
