// attention_heads.cuh: what the attention kernels share: which block has which tile of which head, and where its rows
// are.
//
// Grid: (NH, tiles of T, B), so that blocks start in the order of sequences, and in a sequence all heads' first tiles
// before all second ones. The blocks that run at a time read the keys and values of a few sequences again and again:
// from the second-level cache, as C = 768, T = 1024 takes 3 MB per sequence. The caller numbers tiles from the one with
// the most work, so that light ones fill the gaps at the end.
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
    constexpr int most = 65535;  // of a grid's second and third dimension
    const int tiles = ceil_div(T, tile_rows);
    ENSURE(B <= most && tiles <= most, "attention of %d sequences of %d tokens: at most %d and %lld", B, T, most,
           static_cast<long long>(most) * tile_rows);
    return dim3(unsigned(NH), unsigned(tiles), unsigned(B));
}

__device__ inline int block_tile() { return int(blockIdx.y); }
__device__ inline int block_tile_from_end() { return int(gridDim.y - 1 - blockIdx.y); }

// Where lse and delta, (B, NH, T), have the block's head.
__device__ inline int64_t head_offset(const AttentionShape& s) {
    return (int64_t(blockIdx.z) * s.NH + blockIdx.x) * s.T;
}

// A row for each token of the block's head, stride elements apart. Offsets in a sequence fit in 32 bits (the launchers
// see to it), which halves the registers that addresses take.
template <class floatX>
struct HeadRows {
    floatX* data;
    unsigned stride;

    // In (B, T, 3, NH, HS). part: 0 queries, 1 keys, 2 values.
    __device__ static HeadRows of_qkv(floatX* qkv, const AttentionShape& s, int part) {
        const int C = s.NH * s.HS;
        return {qkv + int64_t(blockIdx.z) * s.T * 3 * C + part * C + int(blockIdx.x) * s.HS, unsigned(3 * C)};
    }
    // In (B, T, NH, HS).
    __device__ static HeadRows of_out(floatX* out, const AttentionShape& s) {
        const int C = s.NH * s.HS;
        return {out + int64_t(blockIdx.z) * s.T * C + int(blockIdx.x) * s.HS, unsigned(C)};
    }
    __device__ floatX* at(int t, int channel) const { return data + (unsigned(t) * stride + unsigned(channel)); }
};
