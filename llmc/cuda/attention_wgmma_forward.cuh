// attention_wgmma_forward.cuh: causal attention forward in bf16 on Hopper's tensor cores (sm_90a), for heads of 64 and
// 128 channels.
//
// A block takes pairs of tiles of queries of a head: the last with the first, the last but one with the second, and so
// on. So all pairs attend to the same number of keys, and those of a head run side by side and read its keys and values
// from the L2 cache. Warpgroup 0 loads tiles by TMA into queues, for all pairs of its block without a break. The others
// own 64 queries each. They take one tile of 64 keys after the other, the one on the diagonal first: only it has a
// mask, and after it each row has a largest score. While a warpgroup's threads compute weights, its tensor cores add
// the products of the weights before, and other warpgroups' the next scores.
//
// Rows past the last token are loaded as zeros and not stored. As keys they are behind every query that counts.
//
// Bound: with 64 channels, 256 queries and 64 keys take 1,024 cycles of the tensor cores, 1,024 of the units for
// exponentials, and about 930 of the schedulers. A warp alone takes four times as long as its instructions, because
// most depend on each other. So there are four warps for each scheduler, which leaves them 112 registers. Numerics as
// in attention_mma.cuh, but for weights of up to 2^8 (raise_max).
#pragma once
#include "cuda/attention_heads.cuh"
#include "cuda/hopper.h"

// Shared memory of a block: 2 tiles of queries, a queue of STAGES tiles of keys and their values, the results on their
// way to `out`, and the barriers. A tile of queries has 64 rows for each of GROUPS warpgroups, one of keys or values
// 64, in panels of 64 rows and 64 channels.
template <int HS>
struct WgmmaForward {
    static constexpr int GROUPS = HS == 64 ? 4 : 2, THREADS = 128 * (GROUPS + 1), REGISTERS = GROUPS == 4 ? 112 : 232;
    static constexpr int ROWS = 64 * GROUPS, PANELS = HS / 64, PANEL_BYTES = 64 * 128,
                         TILE_BYTES = PANELS * PANEL_BYTES;
    static constexpr int STAGES = 512 / HS, KEYS = 2 * GROUPS * TILE_BYTES;
    static constexpr int STAGING = KEYS + 2 * STAGES * TILE_BYTES, BARRIERS = STAGING + GROUPS * TILE_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS + 8 * (4 + 2 * STAGES);
    unsigned char* shared;
    uint64_t *queries_full, *queries_empty, *keys_full, *keys_empty;
    int heads, tiles, pairs;

    __device__ WgmmaForward(int heads, int T)
        : shared(simt::dynamic_shared<unsigned char, 1024>()),
          queries_full(reinterpret_cast<uint64_t*>(shared + BARRIERS)),
          queries_empty(queries_full + 2),
          keys_full(queries_empty + 2),
          keys_empty(keys_full + STAGES),
          heads(heads),
          tiles((T + ROWS - 1) / ROWS),
          pairs((tiles + 1) / 2) {}
    // i, k: numbers of a tile of queries and of one of keys among those of the block. part: 64 queries of the tile.
    __device__ unsigned char* queries(unsigned i, int part) const {
        return shared + (i % 2 * GROUPS + unsigned(part)) * TILE_BYTES;
    }
    __device__ unsigned char* keys(unsigned k) const { return shared + KEYS + k % STAGES * 2 * TILE_BYTES; }
    __device__ unsigned char* values(unsigned k) const { return keys(k) + TILE_BYTES; }
    __device__ void wait_queries(unsigned i) const { mbarrier_wait(queries_full + i % 2, i / 2 & 1); }
    __device__ void wait_keys(unsigned k) const { mbarrier_wait(keys_full + k % STAGES, k / STAGES & 1); }

    // Called by one thread. The warps that multiply empty a tile.
    __device__ void init_barriers() const {
        const auto init = [](uint64_t* full, uint64_t* empty, int count) {
            for (int i = 0; i < count; i++) {
                mbarrier_init(full + i, 1);
                mbarrier_init(empty + i, 4 * GROUPS);
            }
        };
        init(queries_full, queries_empty, 2);
        init(keys_full, keys_empty, STAGES);
        fence_mbarrier_init();
    }

    // Calls f(head, tile of queries) for each tile of the block.
    template <class F>
    __device__ __forceinline__ void for_each_tile(const F& f) const {
        for (int item = int(blockIdx.x); item < heads * pairs; item += int(gridDim.x)) {
            const int low = item % pairs, high = tiles - 1 - low;
            for (int tile = high;; tile = low) {
                f(item / pairs, tile);
                if (tile == low) break;
            }
        }
    }
};

// One thread loads all tiles of the block, each when its place is empty.
template <int HS>
__device__ __forceinline__ void load_forward_tiles(const WgmmaForward<HS>& t, const CUtensorMap* qkv_map, int NH) {
    using Tiles = WgmmaForward<HS>;
    unsigned i = 0, k = 0;
    t.for_each_tile([&](int head, int tile) {
        // 64 rows of an operand: 0 for queries, 1 for keys, 2 for values.
        const auto load = [&](unsigned char* to, int operand, int row, uint64_t* full) {
            UNROLL
            for (int p = 0; p < Tiles::PANELS; p++)
                tma_load(to + p * Tiles::PANEL_BYTES, qkv_map, (operand * NH + head % NH) * HS + p * 64, row, head / NH,
                         full);
        };
        uint64_t* const full = t.queries_full + i % 2;
        mbarrier_wait(t.queries_empty + i % 2, (i / 2 + 1) & 1);
        mbarrier_arrive_expect(full, Tiles::GROUPS * Tiles::TILE_BYTES);
        for (int g = 0; g < Tiles::GROUPS; g++) load(t.queries(i, g), 0, tile * Tiles::ROWS + g * 64, full);
        i++;
        for (int n = (tile + 1) * Tiles::GROUPS - 1; n >= 0; n--, k++) {
            uint64_t* const full = t.keys_full + k % Tiles::STAGES;
            mbarrier_wait(t.keys_empty + k % Tiles::STAGES, (k / Tiles::STAGES + 1) & 1);
            mbarrier_arrive_expect(full, 2 * Tiles::TILE_BYTES);
            load(t.keys(k), 1, n * 64, full);
            load(t.values(k), 2, n * 64, full);
        }
    });
}

// A thread's part of its warpgroup's 64 queries: elements of two rows, own_row() and the one 8 below, laid out as
// wgmma's accumulators and operands.
template <int HS>
struct ForwardRows {
    using Tiles = WgmmaForward<HS>;
    float scores[32], sums[HS / 2], row_max[2], row_sum[2], factor[2], offset[2], rescale[2];
    uint32_t weights[4][4];  // rounded

    __device__ static int own_row() { return int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4; }

    // scores = queries keys'
    __device__ __forceinline__ void start_scores(const unsigned char* queries, const unsigned char* keys) {
        const uint64_t q = descriptor_of(queries), k = descriptor_of(keys);
        wgmma_fence();
        UNROLL
        for (int c = 0; c < HS / 16; c++) {
            const uint64_t step = c / 4 * (Tiles::PANEL_BYTES >> 4) + c % 4 * K_STEP;
            wgmma<false, false>(scores, q + step, k + step, c > 0);
        }
        wgmma_commit();
    }

    // sums += weights values
    __device__ __forceinline__ void start_sums(const unsigned char* values) {
        const uint64_t v = transposed_descriptor_of(values, Tiles::PANEL_BYTES);
        wgmma_fence();
        UNROLL
        for (int c = 0; c < 4; c++) wgmma<true>(sums, weights[c], v + c * TRANSPOSED_K_STEP, true);
        wgmma_commit();
    }

    // A query sees no later key: on the diagonal.
    __device__ __forceinline__ void mask() {
        const int row = own_row() - int(threadIdx.x) % 4 * 2;
        UNROLL
        for (int e = 0; e < 32; e++)
            if (e / 4 * 8 + e % 2 - e / 2 % 2 * 8 > row) scores[e] = -INFINITY;
    }

    // Raises row_max to the scores' maximum and returns true if that is far above row_max in a row of the warp.
    // `rescale` is then the factor of the sums so far. Otherwise weights of up to 2^8 do no harm.
    template <bool FIRST>
    __device__ __forceinline__ bool raise_max(float scale2) {
        float largest[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            float parts[2];
            UNROLL
            for (int j = 0; j < 8; j++) {
                const float pair = fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]);
                parts[j % 2] = j < 2 ? pair : fmaxf(parts[j % 2], pair);
            }
            largest[r] = fmaxf(parts[0], parts[1]);
            if (!FIRST) largest[r] = fmaxf(largest[r], row_max[r]);
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_MASK, largest[r], 1));  // four lanes hold a row
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_MASK, largest[r], 2));
        }
        if (!FIRST) {
            const bool far = (largest[0] - row_max[0]) * scale2 > 8.0f || (largest[1] - row_max[1]) * scale2 > 8.0f;
            if (!__any_sync(FULL_MASK, far)) return false;
        }
        UNROLL
        for (int r = 0; r < 2; r++) {
            rescale[r] = FIRST ? 0.0f : exp2_fast((row_max[r] - largest[r]) * scale2);
            row_sum[r] = FIRST ? 0.0f : row_sum[r] * rescale[r];
            row_max[r] = largest[r];
            // As in attention_mma.cuh: where the rounding error of the offset could overflow, any two different scores
            // are so far apart that every positive scale gives the same weights.
            factor[r] = fabsf(largest[r]) * scale2 < 0x1p30f ? scale2 : 0.125f;
            offset[r] = largest[r] * factor[r];
        }
        return true;
    }

    // Replaces scores by 2^(scale2 * (score - row_max)).
    __device__ __forceinline__ void compute_weights() {
        UNROLL
        for (int r = 0; r < 2; r++) {
            float sum[2] = {row_sum[r], 0.0f};
            UNROLL
            for (int j = 0; j < 16; j++) {
                float& x = scores[j / 2 * 4 + 2 * r + j % 2];
                x = exp2_fast(fmaf(x, factor[r], -offset[r]));
                sum[j % 2] = j == 1 ? x : sum[j % 2] + x;
            }
            row_sum[r] = sum[0] + sum[1];
        }
    }

    __device__ __forceinline__ void round_weights() {
        UNROLL
        for (int j = 0; j < 16; j++) weights[j / 4][j % 4] = pack_bf16(scores[2 * j], scores[2 * j + 1]);
    }
    __device__ __forceinline__ void rescale_sums() {
        UNROLL
        for (int e = 0; e < HS / 2; e++) sums[e] *= rescale[e / 2 % 2];
    }

    // Puts sums * factor, rounded, into the warp's 16 rows of panels.
    __device__ __forceinline__ void stage(unsigned char* panels, const float (&factor)[2]) const {
        const int lane = int(threadIdx.x) % 32;
        UNROLL
        for (int j = 0; j < HS / 8; j += 2) {  // blocks of 8 channels
            uint32_t pairs[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                pairs[i] = pack_bf16(sums[4 * j + 2 * i] * factor[i % 2], sums[4 * j + 2 * i + 1] * factor[i % 2]);
            stmatrix_x4(panels + j / 8 * Tiles::PANEL_BYTES + swizzled(lane % 16, j % 8 + lane / 16), pairs);
        }
    }
};

// A warpgroup's part of the tiles of queries.
template <int HS>
struct ForwardGroup {
    using Tiles = WgmmaForward<HS>;
    const Tiles& t;
    const CUtensorMap* out_map;
    float* lse;
    int group, T, NH;
    float scale;
    unsigned i = 0, k = 0;
    ForwardRows<HS> rows{};

    __device__ void release(uint64_t* empty) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
    }
    __device__ void release_keys(unsigned k) const { release(t.keys_empty + k % Tiles::STAGES); }

    // Skips the tiles of keys behind all queries of the part. Each phase of a barrier needs a wait.
    __device__ __forceinline__ void skip(int count) {
        for (const unsigned end = k + unsigned(count); k < end; k++) {
            t.wait_keys(k);
            __syncwarp();  // a lane must not wait for a phase after the next has ended
            release_keys(k);
        }
    }

    // Attends to all keys, `last` is the last tile's number.
    __device__ __forceinline__ void attend(const unsigned char* queries, unsigned last) {
        t.wait_keys(k);
        rows.start_scores(queries, t.keys(k));
        wgmma_wait<0>();
        rows.mask();
        rows.template raise_max<true>(scale * LOG2_E);
        rows.compute_weights();
        rows.round_weights();
        UNROLL
        for (float& x : rows.sums) x = 0.0f;
        bool raised = false;
        if (k < last) t.wait_keys(k + 1);
        UNROLL_BY(1)
        for (; k < last; k++) {
            if (raised) rows.rescale_sums();
            rows.start_scores(queries, t.keys(k + 1));
            rows.start_sums(t.values(k));
            wgmma_wait<1>();  // the scores are complete
            raised = rows.template raise_max<false>(scale * LOG2_E);
            rows.compute_weights();
            // Here, because ptxas would move the next wait up to the one before, and the sums would not be beside the
            // weights.
            if (k + 1 < last) t.wait_keys(k + 2);
            wgmma_wait<0>();
            release_keys(k);
            rows.round_weights();
        }
        if (raised) rows.rescale_sums();
        rows.start_sums(t.values(k));
        wgmma_wait<0>();
        release_keys(k++);
    }

    // Stores the results. `first` is the part's first query.
    __device__ __forceinline__ void store(int head, int first) const {
        const int warp_row = int(threadIdx.x) % 128 / 32 * 16;
        unsigned char* const panels = t.shared + Tiles::STAGING + group * Tiles::TILE_BYTES + warp_row * 128;
        float reciprocal[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            float sum = rows.row_sum[r];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            reciprocal[r] = reciprocal_fast(sum);
            const int row = first + rows.own_row() + 8 * r;
            if (threadIdx.x % 4 == 0 && row < T) lse[int64_t(head) * T + row] = rows.row_max[r] * scale + logf(sum);
        }
        const bool stores = threadIdx.x % 32 == 0;
        if (stores) store_wait_read<0>();  // the tile before has left the panels
        __syncwarp();
        rows.stage(panels, reciprocal);
        fence_proxy_async();
        __syncwarp();
        for (int p = 0; p < Tiles::PANELS && stores; p++)
            tma_store(out_map, panels + p * Tiles::PANEL_BYTES, head % NH * HS + p * 64, first + warp_row, head / NH);
        if (stores) store_commit();
    }

    __device__ __forceinline__ void run() {
        t.for_each_tile([&](int head, int tile) {
            // The later parts have more keys. In turn, so that all warpgroups have the same work.
            const int part = i % 2 == 0 ? group : Tiles::GROUPS - 1 - group, keys = tile * Tiles::GROUPS + part + 1;
            t.wait_queries(i);
            skip(Tiles::GROUPS - 1 - part);
            attend(t.queries(i, part), k + unsigned(keys) - 1);
            release(t.queries_empty + i % 2);
            i++;
            store(head, (tile * Tiles::GROUPS + part) * 64);
        });
        if (threadIdx.x % 32 == 0) store_wait<0>();
    }
};

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
            give_registers<24>();
            if (threadIdx.x < 32 && elect_one()) load_forward_tiles(t, &qkv_map, NH);
        } else {
            take_registers<WgmmaForward<HS>::REGISTERS>();
            // The shuffle shows the compiler that the group is the same in a warp.
            const int group = __shfl_sync(FULL_MASK, int(threadIdx.x) / 128, 0) - 1;
            ForwardGroup<HS>{t, &out_map, lse, group, T, NH, scale}.run();
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
                 simt::tensor_map<bf16, 3>(qkv, {B, T, 3 * NH * HS}, {1, 64, 64}),
                 simt::tensor_map<bf16, 3>(out, {B, T, NH * HS}, {1, 16, 64}), lse, heads, T, NH,
                 1.0f / std::sqrt(float(HS)));
}
