// residual.cpp: reference implementation of the sum of a matmul's output, its bias and the residual stream.
#include "cpu/variants.h"

template <class floatX>
void cpu::plain::add_residual(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int N, int C,
                              Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            const int64_t at = int64_t(n) * C + c;
            out[at] = floatX(float(inp[at]) + float(bias[c]) + float(residual[at]));
        }
}

INSTANTIATE(cpu::plain::add_residual);
