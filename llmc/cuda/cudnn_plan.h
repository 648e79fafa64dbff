// cudnn_plan.h: causal attention as cuDNN operation graphs, and execution plans for them, through cuDNN's backend (C)
// API. Plans can also be made on a machine without a GPU, from a description of one (dev/test/gpu/cudnn_plans.cpp).
// attention_cudnn.cpp executes the plans.
#pragma once
#include <cudnn.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/common.h"
#include "cuda/attention_route.h"

#define CUDNN_CHECK(call) gpu::check_cudnn_call((call), #call, __FILE__, __LINE__)

namespace gpu {

void check_cudnn_call(cudnnStatus_t status, const char* call, const char* file, int line);

// By the release notes of cuDNN's frontend, backward reads invalid memory before 9.15.1 if T is not a multiple of 128.
// A mask value of -infinity needs 9.10, described devices need 9.8. Before 9.6 the caller had to zero dq_sums.
constexpr size_t OLDEST_CUDNN = 91501;

// Unique ids of the graphs' tensors in memory. An execution binds each id to an address.
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
    uid_dq_sums,   // (B, NH, T, HS) floats, to which blocks add; only where the plan has dq_sums_bytes
    uid_scale,     // 1 / sqrt(HS); this and the following are host floats, passed by value
    uid_masked,    // -infinity
    uid_one,
    uid_first_virtual = 1000
};

// Owns a descriptor of cuDNN's backend API. Set its attributes with set_attribute, then finalize it.
struct Descriptor {
    cudnnBackendDescriptor_t handle = nullptr;

    Descriptor() = default;
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

// The GPU to plan for: that of the handle, or, without a handle, the one that `device` describes in cuDNN's JSON.
struct CudnnTarget {
    cudnnHandle_t handle = nullptr;
    std::string device;
};

// An execution plan, or the reason why there is none.
struct CudnnPlan {
    std::deque<Descriptor> descriptors;  // descriptors of the graph; the plan refers to them
    Descriptor plan;                     // handle of the plan; null if there is no plan
    int64_t dq_sums_bytes = 0;           // size of the tensor dq_sums, a multiple of 256; 0: the graph has none
    int64_t workspace_bytes = 0;         // further scratch memory that cuDNN needs
    int candidate = -1;                  // number of the configuration, in the order of plan_attention
    int engine = -1;                     // the engine's global index in cuDNN
    std::string reason;                  // why there is no plan, in cuDNN's words; may be empty

    explicit operator bool() const { return plan.handle; }
    int64_t bytes() const { return dq_sums_bytes + workspace_bytes; }
};

// Upper bound of a plan's bytes() for this pass and shape.
int64_t workspace_limit(AttentionPass pass, const AttentionSizes& shape);

// Makes one plan, which takes cuDNN half a second: the first from candidate `first` on whose workspace is within
// workspace_limit. The candidates are numbered in the order of NVIDIA's frontend and cuDNN's heuristics, best first.
CudnnPlan plan_attention(AttentionPass pass, const AttentionSizes& shape, const CudnnTarget& target, int first);

}  // namespace gpu
