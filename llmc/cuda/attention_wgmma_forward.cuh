// attention_wgmma_forward.cuh: causal attention forward in bf16 on Hopper's tensor cores (sm_90a), for heads of 64 and
// 128 channels.
//
// A block takes pairs of tiles of 128 queries of a head: the last with the first, the last but one with the second, and
// so on. So all pairs attend to the same number of keys, and those of a head run side by side and read its keys and
// values from the L2 cache. Warpgroup 0 loads tiles by TMA into a queue, for all pairs of its block without a break.
// Warpgroups 1 and 2 own 64 queries each. A warpgroup's tensor core computes the scores of the next keys and the sums
// over the last ones' values while its threads and those of the other warpgroup compute weights.
//
// The tile of keys on the diagonal comes first. Only it has a mask, and after it each row has a largest score. Rows
// past the last token are loaded as zeros and not stored. As keys they are behind every query that counts.
//
// Bound: with 64 channels, a tile of 128 queries and 128 keys takes 1,024 cycles of the tensor cores, 1,024 cycles of
// the units for exponentials, and about 900 of the schedulers. Numerics as in attention_mma.cuh.
#pragma once
#include "cuda/attention_heads.cuh"
#include "cuda/hopper.h"

// Shared memory of a block: 2 tiles of queries, queues of STAGES tiles of keys and of values, the results on their way
// to `out`, and the barriers. A tile has 128 rows, in panels of 64 channels.
template <int HS>
struct WgmmaForward {
    static constexpr int THREADS = 384, ROWS = 128, PANELS = HS / 64, STAGES = HS == 64 ? 4 : 2;
    static constexpr int PANEL_BYTES = ROWS * 128, TILE_BYTES = PANELS * PANEL_BYTES;
    static constexpr int KEYS = 2 * TILE_BYTES, VALUES = KEYS + STAGES * TILE_BYTES;
    static constexpr int STAGING = VALUES + STAGES * TILE_BYTES, BARRIERS = STAGING + TILE_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS + 8 * (4 + 4 * STAGES);
    unsigned char* shared;
    uint64_t *queries_full, *queries_empty, *keys_full, *keys_empty, *values_full, *values_empty;
    int heads, tiles, pairs;

    __device__ WgmmaForward(int heads, int T)
        : shared(simt::dynamic_shared<unsigned char, 1024>()),
          queries_full(reinterpret_cast<uint64_t*>(shared + BARRIERS)),
          queries_empty(queries_full + 2),
          keys_full(queries_empty + 2),
          keys_empty(keys_full + STAGES),
          values_full(keys_empty + STAGES),
          values_empty(values_full + STAGES),
          heads(heads),
          tiles((T + ROWS - 1) / ROWS),
          pairs((tiles + 1) / 2) {}
    // i, k: numbers of a tile of queries and of one of keys among those of the block.
    __device__ unsigned char* queries(unsigned i) const { return shared + i % 2 * TILE_BYTES; }
    __device__ unsigned char* keys(unsigned k) const { return shared + KEYS + k % STAGES * TILE_BYTES; }
    __device__ unsigned char* values(unsigned k) const { return shared + VALUES + k % STAGES * TILE_BYTES; }
    __device__ void wait_queries(unsigned i) const { mbarrier_wait(queries_full + i % 2, i / 2 & 1); }
    __device__ void wait_keys(unsigned k) const { mbarrier_wait(keys_full + k % STAGES, k / STAGES & 1); }
    __device__ void wait_values(unsigned k) const { mbarrier_wait(values_full + k % STAGES, k / STAGES & 1); }

    // By one thread. The 8 warps that multiply empty a tile.
    __device__ void init_barriers() const {
        const auto init = [](uint64_t* full, uint64_t* empty, int count) {
            for (int i = 0; i < count; i++) {
                mbarrier_init(full + i, 1);
                mbarrier_init(empty + i, 8);
            }
        };
        init(queries_full, queries_empty, 2);
        init(keys_full, keys_empty, STAGES);
        init(values_full, values_empty, STAGES);
        fence_mbarrier_init();
    }

    // The block's tiles of queries in order.
    struct Position {
        int item, tile;
        __device__ int head(const WgmmaForward& t) const { return item / t.pairs; }
        __device__ bool exists(const WgmmaForward& t) const { return item < t.heads * t.pairs; }
        __device__ Position next(const WgmmaForward& t) const {
            const int low = item % t.pairs;
            return tile == low ? of(t, item + int(gridDim.x)) : Position{item, low};
        }
        __device__ static Position of(const WgmmaForward& t, int item) { return {item, t.tiles - 1 - item % t.pairs}; }
        __device__ static Position first(const WgmmaForward& t) { return of(t, int(blockIdx.x)); }
    };
};

// Starts to load a tile, once it is empty, whose first row and channel are given.
template <int HS>
__device__ __forceinline__ void load_tile(unsigned char* to, const CUtensorMap* qkv_map, int channel, int row,
                                          int sequence, uint64_t* full, uint64_t* empty, unsigned round) {
    using Tiles = WgmmaForward<HS>;
    mbarrier_wait(empty, (round + 1) & 1);
    mbarrier_arrive_expect(full, Tiles::TILE_BYTES);
    UNROLL
    for (int p = 0; p < Tiles::PANELS; p++)
        tma_load(to + p * Tiles::PANEL_BYTES, qkv_map, channel + p * 64, row, sequence, full);
}

// One thread loads all tiles of the block.
template <int HS>
__device__ __forceinline__ void load_forward_tiles(const WgmmaForward<HS>& t, const CUtensorMap* qkv_map, int NH) {
    using Tiles = WgmmaForward<HS>;
    unsigned i = 0, k = 0;
    for (auto at = Tiles::Position::first(t); at.exists(t); at = at.next(t), i++) {
        const int head = at.head(t), sequence = head / NH, channel = head % NH * HS, C = NH * HS;
        load_tile<HS>(t.queries(i), qkv_map, channel, at.tile * Tiles::ROWS, sequence, t.queries_full + i % 2,
                      t.queries_empty + i % 2, i / 2);
        for (int n = at.tile; n >= 0; n--, k++) {
            const unsigned s = k % Tiles::STAGES, round = k / Tiles::STAGES;
            load_tile<HS>(t.keys(k), qkv_map, C + channel, n * Tiles::ROWS, sequence, t.keys_full + s, t.keys_empty + s,
                          round);
            load_tile<HS>(t.values(k), qkv_map, 2 * C + channel, n * Tiles::ROWS, sequence, t.values_full + s,
                          t.values_empty + s, round);
        }
    }
}

// What a thread of a warpgroup has of its 64 queries: elements of two rows, own_row() and the one 8 below, laid out as
// wgmma's accumulators and operands.
template <int HS>
struct ForwardRows {
    using Tiles = WgmmaForward<HS>;
    float scores[64], sums[HS / 2], row_max[2], row_sum[2], rescale[2];
    uint32_t weights[8][4];  // rounded

    __device__ static int own_row() { return int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4; }
    __device__ static int own_column() { return int(threadIdx.x) % 4 * 2; }

    // scores = queries keys'. Both are descriptors.
    __device__ __forceinline__ void start_scores(uint64_t queries, uint64_t keys) {
        wgmma_fence();
        UNROLL
        for (int c = 0; c < HS / 16; c++) {
            const uint64_t step = c / 4 * (Tiles::PANEL_BYTES >> 4) + c % 4 * K_STEP;
            wgmma<false, false>(scores, queries + step, keys + step, c > 0);
        }
        wgmma_commit();
    }

    // sums += weights values
    __device__ __forceinline__ void start_sums(uint64_t values) {
        wgmma_fence();
        UNROLL
        for (int c = 0; c < 8; c++) wgmma<true>(sums, weights[c], values + c * TRANSPOSED_K_STEP, true);
        wgmma_commit();
    }

    // A query sees no later key. first_row: of the warpgroup, in the tile of queries.
    __device__ __forceinline__ void mask(int first_row) {
        const int row = first_row + own_row() - own_column();
        UNROLL
        for (int e = 0; e < 64; e++)
            if (e / 4 * 8 + e % 2 - e / 2 % 2 * 8 > row) scores[e] = -INFINITY;
    }

    // Replaces scores by 2^(scale2 * (score - row_max)), with the maximum that includes these scores. `rescale` is the
    // factor of sums with the maximum before.
    template <bool FIRST>
    __device__ __forceinline__ void softmax(float scale2) {
        float largest[2], factor[2], offset[2], sum[2][2] = {};
        UNROLL
        for (int r = 0; r < 2; r++) {
            float parts[4];
            UNROLL
            for (int j = 0; j < 16; j++) {  // four chains, because a maximum takes long
                const float pair = fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]);
                parts[j % 4] = j < 4 ? pair : fmaxf(parts[j % 4], pair);
            }
            largest[r] = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
            if (!FIRST) largest[r] = fmaxf(largest[r], row_max[r]);
        }
        UNROLL
        for (int distance = 1; distance <= 2; distance *= 2) {  // four lanes hold a row
            UNROLL
            for (int r = 0; r < 2; r++)
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_MASK, largest[r], distance));
        }
        UNROLL
        for (int r = 0; r < 2; r++) {
            rescale[r] = FIRST ? 0.0f : exp2_fast((row_max[r] - largest[r]) * scale2);
            row_max[r] = largest[r];
            // As in attention_mma.cuh: where the rounding error of the offset could overflow, any two different scores
            // are so far apart that every positive scale gives the same weights.
            factor[r] = fabsf(largest[r]) * scale2 < 0x1p30f ? scale2 : 0.125f;
            offset[r] = largest[r] * factor[r];
        }
        UNROLL
        for (int e = 0; e < 64; e++) {
            const int r = e / 2 % 2;
            sum[r][e % 2] += scores[e] = exp2_fast(fmaf(scores[e], factor[r], -offset[r]));
        }
        UNROLL
        for (int r = 0; r < 2; r++)
            row_sum[r] = FIRST ? sum[r][0] + sum[r][1] : row_sum[r] * rescale[r] + (sum[r][0] + sum[r][1]);
    }

    __device__ __forceinline__ void round_weights() {
        UNROLL
        for (int j = 0; j < 32; j++) weights[j / 4][j % 4] = pack_bf16(scores[2 * j], scores[2 * j + 1]);
    }
    __device__ __forceinline__ void rescale_sums() {
        UNROLL
        for (int e = 0; e < HS / 2; e++) sums[e] *= rescale[e / 2 % 2];
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

// A warpgroup's half of the tiles of queries.
template <int HS>
struct ForwardGroup {
    using Tiles = WgmmaForward<HS>;
    using Position = typename Tiles::Position;
    const Tiles& t;
    const CUtensorMap* out_map;
    float* lse;
    int group, T, NH;  // group: 0 or 1
    float scale;
    unsigned i = 0, k = 0;
    ForwardRows<HS> rows = {};

    __device__ void release(uint64_t* empty) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
    }
    __device__ uint64_t queries() const { return descriptor_of(t.queries(i) + group * 64 * 128); }

    // Starts the scores of the tile of queries number i.
    __device__ __forceinline__ void start_tile() {
        t.wait_queries(i);
        t.wait_keys(k);
        rows.start_scores(queries(), descriptor_of(t.keys(k)));
    }

    // Attends to all keys of the tile but for the product of the last weights and values. Its first scores have been
    // started. So each step begins with the products of the step before: they end while a step's weights are computed.
    __device__ __forceinline__ void attend(int key_tiles) {
        wgmma_wait<0>();
        release(t.keys_empty + k % Tiles::STAGES);
        rows.mask(group * 64);
        rows.template softmax<true>(scale * LOG2_E);
        UNROLL
        for (float& x : rows.sums) x = 0.0f;
        rows.round_weights();
        const unsigned last = k + unsigned(key_tiles) - 1;
        if (k < last) t.wait_keys(k + 1);
        UNROLL_BY(1)
        for (; k < last; k++) {
            rows.start_scores(queries(), descriptor_of(t.keys(k + 1)));
            rows.rescale_sums();
            t.wait_values(k);
            rows.start_sums(transposed_descriptor_of(t.values(k), Tiles::PANEL_BYTES));
            wgmma_wait<1>();  // for the scores
            release(t.keys_empty + (k + 1) % Tiles::STAGES);
            rows.template softmax<false>(scale * LOG2_E);
            if (k + 1 < last) t.wait_keys(k + 2);
            wgmma_wait<0>();  // for the sums
            release(t.values_empty + k % Tiles::STAGES);
            rows.round_weights();
        }
        rows.rescale_sums();
        release(t.queries_empty + i % 2);
    }

    // Stores the results of the tile.
    __device__ __forceinline__ void store(Position at) {
        unsigned char* const staging = t.shared + Tiles::STAGING + group * (Tiles::TILE_BYTES / 2);
        const auto group_barrier = [&] { group == 0 ? named_barrier<1>(128) : named_barrier<2>(128); };
        const int head = at.head(t), first = at.tile * Tiles::ROWS + group * 64;
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
        const bool stores = threadIdx.x % 128 == 0;
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
    }

    __device__ __forceinline__ void run() {
        Position at = Position::first(t);
        while (at.exists(t)) {
            start_tile();
            attend(at.tile + 1);
            const Position next = at.next(t);
            const unsigned last = k++;
            i++;
            t.wait_values(last);
            rows.start_sums(transposed_descriptor_of(t.values(last), Tiles::PANEL_BYTES));
            wgmma_wait<0>();
            release(t.values_empty + last % Tiles::STAGES);
            store(at);
            at = next;
        }
        if (threadIdx.x % 128 == 0) store_wait<0>();
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
            give_registers<40>();
            if (threadIdx.x < 32 && elect_one()) load_forward_tiles(t, &qkv_map, NH);
        } else {
            take_registers<232>();
            const int group =
                __shfl_sync(FULL_MASK, int(threadIdx.x) / 128, 0) - 1;  // to the compiler the same in a warp
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
                 simt::tensor_map<bf16, 3>(qkv, {B, T, 3 * NH * HS}, {1, Tiles::ROWS, 64}),
                 simt::tensor_map<bf16, 3>(out, {B, T, NH * HS}, {1, 64, 64}), lse, heads, T, NH,
                 1.0f / std::sqrt(float(HS)));
}
