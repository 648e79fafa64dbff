// embedding.cpp: reference implementation of the token and position embeddings.
#include "cpu/variants.h"

template <class floatX>
void cpu::plain::embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T,
                                   int C, VocabShard shard, Stream) {
#pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        const int row = shard.row(tokens[n]);
        for (int c = 0; c < C; c++) {
            const float token = row < 0 ? 0.0f : float(wte[int64_t(row) * C + c]);
            out[int64_t(n) * C + c] = floatX(token + (wpe ? float(wpe[int64_t(n % T) * C + c]) : 0.0f));
        }
    }
}

// Serial, because several rows of dout may be added to the same row of dwte, and the order changes the rounding.
template <class floatX>
void cpu::plain::embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T,
                                    int C, VocabShard shard, Stream) {
    for (int n = 0; n < B * T; n++) {
        const int row = shard.row(tokens[n]);
        for (int c = 0; c < C; c++) {
            const float d = float(dout[int64_t(n) * C + c]);
            if (row >= 0) dwte[int64_t(row) * C + c] += d;
            dwpe[int64_t(n % T) * C + c] += d;
        }
    }
}

INSTANTIATE(cpu::plain::embedding_forward);
INSTANTIATE(cpu::plain::embedding_backward);
