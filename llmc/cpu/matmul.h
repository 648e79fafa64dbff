// matmul.h: what the forms of the matrix products share with each other and with device.cpp.
//
// matmul.cpp       the definition (cpu::plain), which form runs, and the working memory of all operations
// matmul_fp32.cpp  fp32 products, and bf16 ones widened to fp32
// strips.h         the loops of those, compiled for each instruction set
// matrix_matmul.h  bf16 products on matrix units, compiled for AMX (amx.cpp) and for AVX512-BF16 (avx512bf16.cpp)
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/ops.h"

namespace cpu {

// FLOP/s of the innermost product on operands in the near caches, on all threads, of which those count for which there
// are cores: what MFU is a share of. Takes 0.05 s.
// For bf16: of the matrix unit, or of the fp32 product where there is none.
template <class floatX>
double measure_peak_flops();

// The highest rate of run(), which does flop operations each time, in 0.02 s on the calling thread, or longer where
// other programs have taken its core.
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

namespace fast {  // by strips: float itself, bf16 widened to float

double measure_peak_flops();
template <class floatX>
int64_t matmul_scratch_bytes(int N, int IC, int OC);
template <class floatX>
void matmul_forward(floatX* out, floatX* pre_gelu, const floatX* inp, Weight<floatX> weight, const floatX* bias, int N,
                    int IC, int OC, Stream stream);
template <class floatX>
void matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                     Weight<floatX> weight, const floatX* pre_gelu, int N, int IC, int OC, bool accumulate,
                     Stream stream);

}  // namespace fast

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
