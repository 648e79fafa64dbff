// attention_wgmma_forward.cuh: causal attention forward in bf16 on Hopper's tensor cores (sm_90a), for heads of 64 and
// 128 channels.
//
// A block takes pairs of tiles of 128 queries of a head: the last with the first, the last but one with the second, and
// so on. So all pairs attend to the same number of keys, and those of a head run side by side and read its keys and
// values from the L2 cache. Warpgroup 0 loads tiles by TMA into a queue, for all pairs of its block without a break.
// Warpgroups 1 and 2 own 64 queries each. A warpgroup's tensor core computes the scores of the next keys and the sums
// over the last ones' values while its threads and those of the other warpgroup compute weights.
//
// The tile of keys on the diagonal comes first. Only it has a mask, and after it each row has a largest score. Rows past
// the last token are loaded as zeros and not stored. As keys they are behind every query that counts.
//
// Bound: with 64 channels, a tile of 128 queries and 128 keys takes 1,024 cycles of the tensor cores, 1,024 cycles of
// the units for exponentials, and about 900 of the schedulers. Numerics as in attention_mma.cuh.
#pragma once
#include "cuda/attention_heads.cuh"
#include "cuda/hopper.h"

// Shared memory of a block: 2 tiles of queries, a queue of STAGES tiles of keys and of values, the results on their way
// to `out`, and the barriers. A tile has 128 rows, in panels of 64 channels.
template <int HS>
struct WgmmaForward {
    static constexpr int THREADS = 384, ROWS = 128, PANELS = HS / 64, STAGES = HS == 64 ? 4 : 2;
    static constexpr int PANEL_BYTES = ROWS * 128, TILE_BYTES = PANELS * PANEL_BYTES;
    static constexpr int KEYS = 2 * TILE_BYTES, STAGING = KEYS + 2 * STAGES * TILE_BYTES;
    static constexpr int BARRIERS = STAGING + TILE_BYTES, SHARED_BYTES = BARRIERS + 8 * (4 + 3 * STAGES);
    unsigned char* shared;
    uint64_t *queries_full, *queries_empty, *keys_full, *values_full, *empty;
    int heads, T;

    __device__ WgmmaForward(int heads, int T)
        : shared(simt::dynamic_shared<unsigned char, 1024>()),
          queries_full(reinterpret_cast<uint64_t*>(shared + BARRIERS)),
          queries_empty(queries_full + 2),
          keys_full(queries_empty + 2),
          values_full(keys_full + STAGES),
          empty(values_full + STAGES),
          heads(heads),
          T(T) {}
    __device__ unsigned char* queries(int i) const { return shared + i % 2 * TILE_BYTES; }
    __device__ unsigned char* keys(int i) const { return shared + KEYS + i % STAGES * 2 * TILE_BYTES; }
    __device__ unsigned char* values(int i) const { return keys(i) + TILE_BYTES; }

    // By one thread.
    __device__ void init_barriers() const {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(queries_full + i, 1);
            mbarrier_init(queries_empty + i, 8);  // the warps that multiply
        }
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(keys_full + i, 1);
            mbarrier_init(values_full + i, 1);
            mbarrier_init(empty + i, 8);
        }
        fence_mbarrier_init();
    }

    // Calls f(head, tile of queries) for each tile of the block.
    template <class F>
    __device__ __forceinline__ void for_each_tile(const F& f) const {
        const int tiles = (T + ROWS - 1) / ROWS, pairs = (tiles + 1) / 2;
        for (int item = int(blockIdx.x); item < heads * pairs; item += int(gridDim.x)) {
            const int low = item % pairs, high = tiles - 1 - low;
            for (int tile = high;; tile = low) {
                f(item / pairs, tile);
                if (tile == low) break;
            }
        }
    }
};

// Starts to load a tile, whose first row and channel are given.
template <int HS>
__device__ __forceinline__ void load_tile(unsigned char* to, const CUtensorMap* qkv_map, int channel, int row,
                                          int sequence, uint64_t* full) {
    using Tiles = WgmmaForward<HS>;
    mbarrier_arrive_expect(full, Tiles::TILE_BYTES);
    UNROLL
    for (int p = 0; p < Tiles::PANELS; p++)
        tma_load(to + p * Tiles::PANEL_BYTES, qkv_map, channel + p * 64, row, sequence, full);
}

// One thread loads the tiles of all rounds.
template <int HS>
__device__ __forceinline__ void load_forward_tiles(const WgmmaForward<HS>& t, const CUtensorMap* qkv_map, int NH) {
    using Tiles = WgmmaForward<HS>;
    int i = 0, k = 0;  // tiles of queries and of keys so far
    t.for_each_tile([&](int head, int tile) {
        const int sequence = head / NH, channel = head % NH * HS, C = NH * HS;
        mbarrier_wait(t.queries_empty + i % 2, (i / 2 + 1) & 1);
        load_tile<HS>(t.queries(i), qkv_map, channel, tile * Tiles::ROWS, sequence, t.queries_full + i % 2);
        i++;
        for (int n = tile; n >= 0; n--, k++) {
            const int s = k % Tiles::STAGES;
            mbarrier_wait(t.empty + s, (k / Tiles::STAGES + 1) & 1);
            load_tile<HS>(t.keys(k), qkv_map, C + channel, n * Tiles::ROWS, sequence, t.keys_full + s);
            load_tile<HS>(t.values(k), qkv_map, 2 * C + channel, n * Tiles::ROWS, sequence, t.values_full + s);
        }
    });
}

// What a thread of a warpgroup has of its 64 queries: elements of two rows, own_row() and the one 8 below. Its scores
// and sums are laid out as wgmma's accumulators.
template <int HS>
struct ForwardRows {
    using Tiles = WgmmaForward<HS>;
    float scores[64], sums[HS / 2], row_max[2], row_sum[2], rescale[2];
    uint32_t weights[8][4];  // of the keys before those of `scores`, as operands

    __device__ static int own_row() { return int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4; }
    __device__ static int own_column() { return int(threadIdx.x) % 4 * 2; }

    // scores = queries keys', with tile k of the queue.
    __device__ __forceinline__ void start_scores(const WgmmaForward<HS>& t, uint64_t queries, int k) {
        mbarrier_wait(t.keys_full + k % Tiles::STAGES, k / Tiles::STAGES & 1);
        const uint64_t keys = descriptor_of(t.keys(k));
        wgmma_fence();
        UNROLL
        for (int c = 0; c < HS / 16; c++) {
            const uint64_t step = c / 4 * (Tiles::PANEL_BYTES >> 4) + c % 4 * K_STEP;
            wgmma<false, false>(scores, queries + step, keys + step, c > 0);
        }
        wgmma_commit();
    }

    // sums = weights values, plus the sums so far if `add`.
    __device__ __forceinline__ void start_sums(const WgmmaForward<HS>& t, int k, bool add) {
        mbarrier_wait(t.values_full + k % Tiles::STAGES, k / Tiles::STAGES & 1);
        const uint64_t values = transposed_descriptor_of(t.values(k), Tiles::PANEL_BYTES);
        wgmma_fence();
        UNROLL
        for (int c = 0; c < 8; c++) wgmma<true>(sums, weights[c], values + c * TRANSPOSED_K_STEP, add || c > 0);
        wgmma_commit();
    }

    // A query sees no later key. first_row: of the warpgroup, in the tile of queries.
    __device__ __forceinline__ void mask(int first_row) {
        const int row = first_row + own_row(), column = own_column();
        UNROLL
        for (int e = 0; e < 64; e++)
            if (e / 4 * 8 + e % 2 + column > row + e / 2 % 2 * 8) scores[e] = -INFINITY;
    }

    // Replaces scores by 2^(scale2 * (score - row_max)), with the maximum that includes these scores. `rescale` is the
    // factor of sums with the maximum before.
    template <bool FIRST>
    __device__ __forceinline__ void softmax(float scale2) {
        UNROLL
        for (int r = 0; r < 2; r++) {
            float largest = FIRST ? -INFINITY : row_max[r];
            UNROLL
            for (int j = 0; j < 32; j++) largest = fmaxf(largest, scores[j / 2 * 4 + 2 * r + j % 2]);
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));  // four lanes hold a row
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
            rescale[r] = FIRST ? 0.0f : exp2_fast((row_max[r] - largest) * scale2);
            row_max[r] = largest;
            // As in attention_mma.cuh: where the rounding error of the offset could overflow, any two different scores
            // are so far apart that every positive scale gives the same weights.
            const float factor = fabsf(largest) * scale2 < 0x1p30f ? scale2 : 0.125f, offset = largest * factor;
            float sum = 0.0f;
            UNROLL
            for (int j = 0; j < 32; j++) {
                float& x = scores[j / 2 * 4 + 2 * r + j % 2];
                sum += x = exp2_fast(fmaf(x, factor, -offset));
            }
            row_sum[r] = FIRST ? sum : row_sum[r] * rescale[r] + sum;
        }
    }

    __device__ __forceinline__ void round_weights() {
        UNROLL
        for (int j = 0; j < 32; j++) weights[j / 4][j % 4] = pack_bf16(scores[2 * j], scores[2 * j + 1]);
    }

    // Attends to `tiles` tiles of keys, from number k of the queue on.
    __device__ __forceinline__ void attend(const WgmmaForward<HS>& t, uint64_t queries, int first_row, int tiles, int k,
                                           float scale2) {
        const auto release = [&](uint64_t* barrier) {
            if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
        };
        start_scores(t, queries, k);
        wgmma_wait<0>();
        mask(first_row);
        softmax<true>(scale2);
        round_weights();
        const int last = k + tiles - 1;
        for (int first = k; k < last; k++) {
            start_scores(t, queries, k + 1);
            start_sums(t, k, k > first);
            wgmma_wait<1>();  // for the scores
            softmax<false>(scale2);
            wgmma_wait<0>();
            release(t.empty + k % Tiles::STAGES);
            UNROLL
            for (int e = 0; e < HS / 2; e++) sums[e] *= rescale[e / 2 % 2];
            round_weights();
        }
        start_sums(t, last, tiles > 1);
        wgmma_wait<0>();
        release(t.empty + last % Tiles::STAGES);
    }

    // Puts sums * factor, rounded, into the warpgroup's staging buffer: panels of 64 rows.
    __device__ __forceinline__ void stage(unsigned char* staging, const float (&factor)[2]) const {
        const int row = int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 16, half = int(threadIdx.x) % 32 / 16;
        UNROLL
        for (int j = 0; j < HS / 8; j += 2) {  // blocks of 8 channels
            uint32_t pairs[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                pairs[i] = pack_bf16(sums[4 * j + 2 * i] * factor[i % 2], sums[4 * j + 2 * i + 1] * factor[i % 2]);
            stmatrix_x4(staging + j / 8 * (Tiles::PANEL_BYTES / 2) + swizzled(row, j % 8 + half), pairs);
        }
    }
};

// Warpgroup `group`, 0 or 1, computes its half of each tile of queries.
template <int HS>
__device__ __forceinline__ void compute_forward_tiles(const WgmmaForward<HS>& t, const CUtensorMap* out_map, float* lse,
                                                      int NH, float scale, int group) {
    using Tiles = WgmmaForward<HS>;
    unsigned char* const staging = t.shared + Tiles::STAGING + group * (Tiles::TILE_BYTES / 2);
    const auto group_barrier = [&] { group == 0 ? named_barrier<1>(128) : named_barrier<2>(128); };
    const bool stores = threadIdx.x % 128 == 0;
    int i = 0, k = 0;
    t.for_each_tile([&](int head, int tile) {
        ForwardRows<HS> rows;
        mbarrier_wait(t.queries_full + i % 2, i / 2 & 1);
        rows.attend(t, descriptor_of(t.queries(i) + group * 64 * 128), group * 64, tile + 1, k, scale * LOG2_E);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(t.queries_empty + i % 2);
        i++;
        k += tile + 1;

        const int first = tile * Tiles::ROWS + group * 64;
        float reciprocal[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            float sum = rows.row_sum[r];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            reciprocal[r] = 1.0f / sum;
            const int row = first + rows.own_row() + 8 * r;
            if (threadIdx.x % 4 == 0 && row < t.T) lse[int64_t(head) * t.T + row] = rows.row_max[r] * scale + logf(sum);
        }
        if (stores) store_wait_read<0>();  // of the tile before
        group_barrier();
        rows.stage(staging, reciprocal);
        fence_proxy_async();
        group_barrier();
        if (!stores) return;
        UNROLL
        for (int p = 0; p < Tiles::PANELS; p++)
            tma_store(out_map, staging + p * (Tiles::PANEL_BYTES / 2), head % NH * HS + p * 64, first, head / NH);
        store_commit();
    });
    if (stores) store_wait<0>();
}

// out (B, T, NH * HS), lse (B, NH, T) from qkv (B, T, 3, NH, HS), where heads = B * NH.
template <int HS>
__global__ void __launch_bounds__(WgmmaForward<HS>::THREADS, 1)
    attention_forward_wgmma_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                   const __grid_constant__ CUtensorMap out_map, float* lse, int heads, int T, int NH,
                                   float scale) {
    if constexpr (HOPPER_CODE) {
        const WgmmaForward<HS> t(heads, T);
        if (threadIdx.x == 0) t.init_barriers();
        __syncthreads();
        if (threadIdx.x < 128) {
            give_registers<40>();
            if (threadIdx.x < 32 && elect_one()) load_forward_tiles(t, &qkv_map, NH);
        } else {
            take_registers<232>();
            compute_forward_tiles(t, &out_map, lse, NH, scale, int(threadIdx.x) / 128 - 1);
        }
    }
}

template <int HS>
void launch_attention_forward_wgmma(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, Stream stream) {
    using Tiles = WgmmaForward<HS>;
    const auto kernel = attention_forward_wgmma_kernel<HS>;
    const int heads = B * NH, pairs = ceil_div(ceil_div(T, Tiles::ROWS), 2);
    static const int resident = simt::resident_blocks(kernel, Tiles::THREADS, Tiles::SHARED_BYTES);
    simt::launch(kernel, std::min(heads * pairs, resident), Tiles::THREADS, Tiles::SHARED_BYTES, stream,
                 simt::tensor_map<bf16, 3>(qkv, {B, T, 3 * NH * HS}, {1, Tiles::ROWS, 64}),
                 simt::tensor_map<bf16, 3>(out, {B, T, NH * HS}, {1, 64, 64}), lse, heads, T, NH,
                 1.0f / std::sqrt(float(HS)));
}
