// embedding.cpp: reference implementation of the token and position embeddings.
#include "cpu/variants.h"

template <class floatX>
void cpu::plain::embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T,
                                   int C, Stream) {
#pragma omp parallel for
    for (int n = 0; n < B * T; n++)
        for (int c = 0; c < C; c++)
            out[int64_t(n) * C + c] =
                floatX(float(wte[int64_t(tokens[n]) * C + c]) + float(wpe[int64_t(n % T) * C + c]));
}

// Serial, because several rows of dout may be added to the same row of dwte, and the order changes the rounding.
template <class floatX>
void cpu::plain::embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T,
                                    int C, int, Stream) {
    for (int n = 0; n < B * T; n++)
        for (int c = 0; c < C; c++) {
            const float d = float(dout[int64_t(n) * C + c]);
            dwte[int64_t(tokens[n]) * C + c] += d;
            dwpe[int64_t(n % T) * C + c] += d;
        }
}

INSTANTIATE(cpu::plain::embedding_forward);
INSTANTIATE(cpu::plain::embedding_backward);
