// attention_heads.cuh: the grid of the attention kernels, and the addresses of one head's rows.
//
// Grid: (NH, tiles of T, B). The GPU starts blocks sequence by sequence, and within a sequence the first tile of every
// head before the second tile of any. The blocks that run at the same time therefore read the keys and values of a few
// sequences repeatedly, and these fit in the L2 cache (3 MB per sequence for C = 768, T = 1024). Each kernel numbers
// its tiles so that those with the most work start first; the short ones then fill the gaps at the end.
#pragma once
#include <cmath>

#include "cuda/simt.h"
#include "ops/ops.h"

struct AttentionShape {
    int T, NH, HS;
    float scale;
};

inline AttentionShape attention_shape(int T, int NH, int HS) { return {T, NH, HS, 1.0f / std::sqrt(float(HS))}; }

inline dim3 attention_grid(int B, int T, int NH, int tile_rows) {
    constexpr int max_dim = 65535;  // limit of a grid's second and third dimension
    const int tiles = ceil_div(T, tile_rows);
    ENSURE(B <= max_dim && tiles <= max_dim, "attention of %d sequences of %d tokens: at most %d and %lld", B, T,
           max_dim, static_cast<long long>(max_dim) * tile_rows);
    return dim3(unsigned(NH), unsigned(tiles), unsigned(B));
}

__device__ inline int block_tile() { return int(blockIdx.y); }
__device__ inline int block_tile_from_end() { return int(gridDim.y - 1 - blockIdx.y); }

// Offset of the block's head in lse and delta, which are (B, NH, T).
__device__ inline int64_t head_offset(const AttentionShape& s) {
    return (int64_t(blockIdx.z) * s.NH + blockIdx.x) * s.T;
}

// The rows of the block's head: one per token, `stride` elements apart. Offsets within a sequence fit in 32 bits
// (check_attention ensures it), which halves the number of registers for addresses.
template <class floatX>
struct HeadRows {
    floatX* data;
    unsigned stride;

    // Rows in qkv (B, T, 3, NH, HS). part: 0 queries, 1 keys, 2 values.
    __device__ static HeadRows of_qkv(floatX* qkv, const AttentionShape& s, int part) {
        const int C = s.NH * s.HS;
        return {qkv + int64_t(blockIdx.z) * s.T * 3 * C + part * C + int(blockIdx.x) * s.HS, unsigned(3 * C)};
    }
    // Rows in out (B, T, NH, HS).
    __device__ static HeadRows of_out(floatX* out, const AttentionShape& s) {
        const int C = s.NH * s.HS;
        return {out + int64_t(blockIdx.z) * s.T * C + int(blockIdx.x) * s.HS, unsigned(C)};
    }
    __device__ floatX* at(int t, int channel) const { return data + (unsigned(t) * stride + unsigned(channel)); }
};
