// matmul_routes.h: the choice between cuBLASLt and our kernel for Hopper (matmul_hopper.cu), for bf16 matmuls with an
// epilogue that both compute.
//
// Without a choice cuBLASLt computes. --autotune times both on the operands of a call. Before that it compares our
// results with cuBLASLt's of the same operands, because a kernel that is wrong on some GPU shall cost speed, not
// weights.
#pragma once
#include <cstdint>

#include "cuda/matmul.h"

namespace gpu {

// Our kernel. Tests put others in its place.
struct MatmulKernels {
    // Part of the keys of choices, so that changed kernels are compared and timed again: raise it with each change.
    int version;
    int64_t compared_bytes;  // memory for cuBLASLt's results, of as many rows at a time as fit
    bool (*computes)(const MatmulShape& shape);
    int64_t (*scratch_bytes)(const MatmulShape& shape);
    void (*run)(const MatmulCall<bf16>& call, Stream stream);
    bool always = false;  // needs no choice: for tests
};
extern MatmulKernels wgmma_matmul;

}  // namespace gpu
