// matmul.h: what the products and the kernels in ops.cu need of each other.
#pragma once
#include <cstdint>

#include "ops/ops.h"

namespace gpu {

// Bytes of device_scratch that the products of a model take at most: N rows, matrices of up to (4C, C).
template <class floatX>
int64_t matmul_scratch_bytes(int N, int C);

// The part of matmul_backward that is a kernel of ours: bias.cuh has the contract.
template <class floatX>
int64_t bias_scratch_bytes(int N, int OC);
template <class floatX>
void bias_backward(float* dbias, const floatX* dout, int N, int OC, bool accumulate, void* scratch, Stream stream);

}  // namespace gpu
