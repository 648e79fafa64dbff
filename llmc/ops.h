// ops.h: the operations of the model, from ops.inc, in namespaces gpu and cpu; ops is the one that this build trains with.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "common.h"
#include "dtype.h"

// A weight matrix (OC, IC) as the products read it: its rows, and the copy that pack_weight made of them for this
// backend's matrix units. packed may be null: the product then packs for itself, each time.
template <class floatX>
struct Weight {
    const floatX* rows;
    const void* packed;
};

// AdamW's constants. Weight decay is decoupled and applied to the first decayed elements only.
struct AdamWConfig {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
};

// By what a GPU runs bf16 attention, where there is a choice: cuDNN or kernels of ours, which are deterministic always.
// Without deterministic, cuDNN sums dQ in the order in which blocks come, another in every run, and moves less memory.
struct AttentionChoice {
    bool cudnn = true;
    bool deterministic = true;
    int64_t part_bytes = 256 << 20;  // of the gradients of scores at a time, which its deterministic backward stores
};

namespace cpu {
#include "ops.inc"
}
namespace gpu {
#include "ops.inc"
}

#ifdef USE_CUDA
namespace ops = gpu;
#else
namespace ops = cpu;
#endif
