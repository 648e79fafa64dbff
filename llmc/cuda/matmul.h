// matmul.h: what matmul.cpp (the operations), cublaslt.cpp (the library), matmul_routes.cpp (the choice between it and
// our kernel) and ops.cu (kernels) use of each other.
#pragma once
#include <compare>
#include <cstdint>
#include <string>

#include "base/fp8.h"
#include "ops/ops.h"

constexpr int FP8_ROWS = 128;  // rows of which cast_to_fp8 adds the columns

namespace gpu {

// Upper bound of the device_scratch bytes that a model's matmuls use: N rows, weights of up to (4C, C).
template <class floatX>
int64_t matmul_scratch_bytes(int N, int C);

// ---- a matmul by cuBLASLt

enum class Kind { forward, input_gradient, weight_gradient };

// The operation on the result of a matmul, as the caller sees it.
enum class Epilogue { nothing, bias, gelu, bias_gelu, gelu_derivative, exponentials };

enum class Operands { fp32, bf16, fp8 };
template <class floatX>
constexpr Operands operands_of = sizeof(floatX) == sizeof(float) ? Operands::fp32 : Operands::bf16;

struct MatmulShape {
    Kind kind;
    Epilogue epilogue;
    Operands operands;
    int m, n, k;
    bool adds_residual = false;
    int alignment = 0;      // common to all operands, in bytes
    int batch = 0;          // matmuls whose operands lie one after another; 0: a single one, which has plans of its own
    bool to_float = false;  // the result is float, as a weight's gradient always is
    auto operator<=>(const MatmulShape&) const = default;
};

// The arguments of head_forward (ops.inc) for Epilogue::exponentials, which turns logits into e. Without `keep` only
// `sums` is a result, and the library's logits must be float.
struct HeadRows {
    float* sums;
    const float* target_logits;
    const int* targets;
    VocabShard shard;
    bool keep;
};

// cuBLASLt's matrices are column-major: a row-major (R, C) matrix is to it a (C, R) matrix with leading dimension C.
// Each call therefore computes the transpose of the result in ops.inc, D (m, n) = A (m, k) B (k, n):
//   forward          out^T    (OC, N)  = weight^T^T (OC, IC)   inp^T  (IC, N)     A transposed
//   input_gradient   dinp^T   (IC, N)  = weight^T   (IC, OC)   dout^T (OC, N)
//   weight_gradient  dweight^T (IC, OC) = inp^T     (IC, N)    dout^T^T (N, OC)   B transposed
//
// Pointers have the names of ops.inc; out is the result: out, dinp or dweight.
template <class floatX>
struct MatmulCall {
    MatmulShape shape;
    const void *a, *b;
    void* out;
    const floatX *bias = nullptr, *residual = nullptr;
    floatX* pre_gelu = nullptr;  // written by Epilogue::gelu and bias_gelu, read by gelu_derivative
    bool accumulate = false;     // into out
    const float *a_scale = nullptr, *b_scale = nullptr;  // FP8 dequantization scales
    float* amax = nullptr;                               // raised to the largest magnitude of out
    HeadRows head = {};                                  // for Epilogue::exponentials
};

// Queues the matmul, with a plan that later calls of this shape use again.
template <class floatX>
void cublaslt_matmul(MatmulCall<floatX> call, Stream stream);

// Bytes of device_scratch that the matmuls of a model of C channels use.
int64_t cublaslt_scratch_bytes(int C);

// The key of a shape's choice (autotune.h).
std::string matmul_key(const MatmulShape& shape);

// ---- a matmul by cuBLASLt or by our kernel for Hopper (matmul_routes.h)

// Upper bound of the device_scratch bytes of our kernel and of the comparison, for N rows and Vp logits.
template <class floatX>
int64_t matmul_routes_scratch_bytes(int N, int C, int Vp);

// Whether a choice says that our kernel computes this shape.
bool is_by_wgmma(const MatmulShape& shape);

// Queues the matmul by the chosen route.
template <class floatX>
void matmul(const MatmulCall<floatX>& call, Stream stream);

// ---- kernels of ops.cu

// The bias gradient of matmul_backward. bias.cuh has the contracts.
template <class floatX>
int64_t bias_scratch_bytes(int N, int OC);
template <class floatX>
void bias_backward(float* dbias, const floatX* dout, int N, int OC, bool accumulate, void* scratch, Stream stream);
void sum_bias_parts(float* dbias, const float* parts, int rows, int OC, bool accumulate, Stream stream);

// Writes e over logits (rows, Vp) with keep, and the sums of e.
template <class T>
void head_exponentials(T* logits, const HeadRows& head, int rows, int Vp, Stream stream);

// Raises *amax (Out) to the largest magnitude of x (count).
void raise_amax(float* amax, const bf16* x, int64_t count, Stream stream);

// FP8 codes of x (R, C) with the scale of *amax: rows (R, C) and transposed (C, R rounded up to 16, padded with zeros).
// One of the two may be null. *inverse = the factor that turns a code into its value. C is a multiple of 16. sums
// (ceil(R / FP8_ROWS), C) receives the column sums of each FP8_ROWS rows of x; it may be null, and needs both outputs.
template <class Format>
void cast_to_fp8(uint8_t* rows, uint8_t* transposed, float* inverse, float* sums, const bf16* x, const float* amax,
                 int R, int C, Stream stream);

}  // namespace gpu
