// ops.h: the operations of the model, from ops.inc, in namespaces gpu and cpu; ops is the one that this build trains with.
#pragma once
#include <cstddef>
#include <cstdint>

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
