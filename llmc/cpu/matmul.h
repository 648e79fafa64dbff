// matmul.h: declarations that the variants of the matmul share with each other and with device.cpp.
//
// matmul.cpp          the reference (cpu::reference), the choice of a variant, and the scratch size of all operations
// matmul_fp32.cpp     fp32 matmul, and bf16 matmul widened to fp32
// microkernel_fp32.h  its innermost loops, compiled for each instruction set
// matrix_matmul.h     bf16 matmul on matrix units, compiled for AMX (amx.cpp) and for AVX512-BF16 (avx512bf16.cpp)
// microkernel_bf16.h  its innermost loops, which bf16 attention uses too
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/ops.h"

namespace cpu {

// The peak FLOP/s that MFU is relative to: the microkernel's rate on operands in the nearest caches, summed over all
// threads, or over as many of them as there are cores. bf16: the matrix unit's microkernel, or the fp32 one on CPUs
// without a matrix unit. Takes 0.05 s.
template <class floatX>
double measure_peak_flops();

// The highest FLOP/s of run(), which does `flop` operations per call. The calling thread repeats it for 0.02 s, and at
// least 10 times, which takes longer when other programs use its core.
template <class Run>
double peak_of(const Run& run, double flop) {
    double best = 0.0;
    const double start = seconds_now();
    for (int tries = 0; tries < 10 || seconds_now() < start + 0.02; tries++) {
        const double before = seconds_now();
        for (int i = 0; i < 4; i++) run();
        best = std::max(best, 4 * flop / (seconds_now() - before));
    }
    return best;
}

// fp8.cpp. raise_amax raises *amax (Out), if it is not null. The matmuls are those of ops.inc with weight.in_fp8(N).
void raise_amax(float* amax, const bf16* x, int64_t count);
inline void raise_amax(float*, const float*, int64_t) {}  // fp32 tensors have no FP8 copies
void fp8_matmul_forward(MatmulForward<bf16> m, int N, int IC, int OC, Stream stream);
void fp8_matmul_backward(MatmulBackward<bf16> m, int N, int IC, int OC, Stream stream);

namespace fp32 {  // computes in fp32: floatX is float, or bf16 widened to float

double measure_peak_flops();
template <class floatX>
int64_t matmul_scratch_bytes(int N, int IC, int OC);
template <class floatX>
void matmul_forward(const MatmulForward<floatX>& m, int N, int IC, int OC, Stream stream);
template <class floatX>
void matmul_backward(const MatmulBackward<floatX>& m, int N, int IC, int OC, Stream stream);

}  // namespace fp32

namespace avx512bf16 {

double measure_peak_flops();
int64_t matmul_scratch_bytes(int N, int IC, int OC);
int64_t attention_scratch_bytes(int T, int HS);

}  // namespace avx512bf16

namespace amx {

double measure_peak_flops();
int64_t matmul_scratch_bytes(int N, int IC, int OC);
int64_t attention_scratch_bytes(int T, int HS);

}  // namespace amx
}  // namespace cpu
