// matmul.h: functions that matmul.cpp (cuBLASLt) and ops.cu (kernels) use of each other.
#pragma once
#include <cstdint>

#include "base/fp8.h"
#include "ops/ops.h"

constexpr int FP8_ROWS = 128;  // rows of which cast_to_fp8 adds the columns

namespace gpu {

// Upper bound of the device_scratch bytes that a model's matmuls use: N rows, weights of up to (4C, C).
template <class floatX>
int64_t matmul_scratch_bytes(int N, int C);

// The bias gradient of matmul_backward. bias.cuh has the contracts.
template <class floatX>
int64_t bias_scratch_bytes(int N, int OC);
template <class floatX>
void bias_backward(float* dbias, const floatX* dout, int N, int OC, bool accumulate, void* scratch, Stream stream);
void sum_bias_parts(float* dbias, const float* parts, int rows, int OC, bool accumulate, Stream stream);

// Raises *amax (ops.inc) to the largest magnitude of x (count).
void raise_amax(float* amax, const bf16* x, int64_t count, Stream stream);

// GELU and its derivative, as in ops.inc; they raise *amax to the largest magnitude of the result if amax is not null.
template <class floatX>
void gelu_forward_amax(floatX* out, float* amax, const floatX* inp, int64_t count, Stream stream);
template <class floatX>
void gelu_backward_amax(floatX* dinp, float* amax, const floatX* inp, const floatX* dout, int64_t count, Stream stream);

// FP8 codes of x (R, C) with the scale of *amax: rows (R, C) and transposed (C, R rounded up to 16, padded with zeros).
// One of the two may be null. *inverse = the factor that turns a code into its value. C is a multiple of 16. sums
// (ceil(R / FP8_ROWS), C) receives the column sums of each FP8_ROWS rows of x; it may be null, and needs both outputs.
template <class Format>
void cast_to_fp8(uint8_t* rows, uint8_t* transposed, float* inverse, float* sums, const bf16* x, const float* amax,
                 int R, int C, Stream stream);

}  // namespace gpu
