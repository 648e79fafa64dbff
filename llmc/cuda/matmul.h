// matmul.h: functions that matmul.cpp (cuBLASLt) and ops.cu (kernels) use of each other.
#pragma once
#include <cstdint>

#include "ops/ops.h"

namespace gpu {

// Upper bound of the device_scratch bytes that a model's matmuls use: N rows, weights of up to (4C, C).
template <class floatX>
int64_t matmul_scratch_bytes(int N, int C);

// The bias gradient of matmul_backward. bias.cuh has the contracts.
template <class floatX>
int64_t bias_scratch_bytes(int N, int OC);
template <class floatX>
void bias_backward(float* dbias, const floatX* dout, int N, int OC, bool accumulate, void* scratch, Stream stream);
void add_bias_gradient(float* dbias, const float* added, int OC, Stream stream);

}  // namespace gpu
