// attention_wgmma_forward.cuh: causal attention forward in bf16 on Hopper's tensor cores (sm_90a), for heads of 64 and
// 128 channels.
//
// A block takes pairs of tiles of 128 queries of a head: the last with the first, the last but one with the second, and
// so on. So all pairs attend to the same number of keys, and those of a head run side by side and read its keys and
// values from the L2 cache. Warpgroup 0 loads tiles by TMA into queues, for all pairs of its block without a break.
// Warpgroups 1 and 2 own 64 queries each and take one tile of keys after the other, the one on the diagonal first: only
// it has a mask, and after it each row has a largest score. While the threads compute a tile's weights, the tensor
// cores add the products of the weights before and compute the next scores.
//
// Rows past the last token are loaded as zeros and not stored. As keys they are behind every query that counts.
//
// Bound: with 64 channels, 128 queries and 128 keys take 1,024 cycles of the tensor cores, 1,024 of the units for
// exponentials, and about 940 of the schedulers. Numerics as in attention_mma.cuh.
#pragma once
#include "cuda/attention_heads.cuh"
#include "cuda/hopper.h"

// Shared memory of a block: 2 tiles of queries, queues of STAGES tiles of keys and of values, the results on their way
// to `out`, and the barriers. A tile of queries has ROWS rows, one of keys or values KEYS, both in panels of 64
// channels.
template <int HS>
struct WgmmaForward {
    static constexpr int THREADS = 384, ROWS = 128, KEYS = HS == 64 ? 128 : 64, PANELS = HS / 64, STAGES = 4;
    static constexpr int QUERY_BYTES = ROWS * HS * 2, KEY_PANEL_BYTES = KEYS * 128,
                         KEY_BYTES = PANELS * KEY_PANEL_BYTES;
    static constexpr int KEYS_AT = 2 * QUERY_BYTES, VALUES_AT = KEYS_AT + STAGES * KEY_BYTES;
    static constexpr int STAGING = VALUES_AT + STAGES * KEY_BYTES, BARRIERS = STAGING + QUERY_BYTES;
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
    __device__ unsigned char* queries(unsigned i) const { return shared + i % 2 * QUERY_BYTES; }
    __device__ unsigned char* keys(unsigned k) const { return shared + KEYS_AT + k % STAGES * KEY_BYTES; }
    __device__ unsigned char* values(unsigned k) const { return shared + VALUES_AT + k % STAGES * KEY_BYTES; }
    __device__ void wait_queries(unsigned i) const { mbarrier_wait(queries_full + i % 2, i / 2 & 1); }
    __device__ void wait_keys(unsigned k) const { mbarrier_wait(keys_full + k % STAGES, k / STAGES & 1); }
    __device__ void wait_values(unsigned k, bool never = false) const {
        mbarrier_wait(values_full + k % STAGES, (k / STAGES & 1) ^ uint32_t(never));
    }

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
};

// A tile of queries among those of the block, in order.
template <int HS>
struct ForwardPosition {
    int item, tile;

    __device__ ForwardPosition(const WgmmaForward<HS>& t, int item) : item(item), tile(t.tiles - 1 - item % t.pairs) {}
    __device__ explicit ForwardPosition(const WgmmaForward<HS>& t) : ForwardPosition(t, int(blockIdx.x)) {}
    __device__ bool exists(const WgmmaForward<HS>& t) const { return item < t.heads * t.pairs; }
    __device__ int head(const WgmmaForward<HS>& t) const { return item / t.pairs; }
    __device__ void advance(const WgmmaForward<HS>& t) {
        const int low = item % t.pairs;
        if (tile == low)
            *this = ForwardPosition(t, item + int(gridDim.x));
        else
            tile = low;
    }
};

// Starts to load `rows` rows of HS channels once their place is empty.
template <int HS>
__device__ __forceinline__ void load_tile(unsigned char* to, int rows, const CUtensorMap* qkv_map, int channel, int row,
                                          int sequence, uint64_t* full, uint64_t* empty, unsigned round) {
    constexpr int box = WgmmaForward<HS>::KEYS;
    mbarrier_wait(empty, (round + 1) & 1);
    mbarrier_arrive_expect(full, uint32_t(rows * HS * 2));
    for (int p = 0; p < HS / 64; p++)
        for (int r = 0; r < rows; r += box)
            tma_load(to + (p * rows + r) * 128, qkv_map, channel + p * 64, row + r, sequence, full);
}

// One thread loads all tiles of the block.
template <int HS>
__device__ __forceinline__ void load_forward_tiles(const WgmmaForward<HS>& t, const CUtensorMap* qkv_map, int NH) {
    using Tiles = WgmmaForward<HS>;
    constexpr int ROWS = Tiles::ROWS, KEYS = Tiles::KEYS;
    unsigned i = 0, k = 0;
    for (ForwardPosition<HS> at(t); at.exists(t); at.advance(t), i++) {
        const int head = at.head(t), sequence = head / NH, channel = head % NH * HS, C = NH * HS;
        load_tile<HS>(t.queries(i), ROWS, qkv_map, channel, at.tile * ROWS, sequence, t.queries_full + i % 2,
                      t.queries_empty + i % 2, i / 2);
        for (int n = (at.tile + 1) * (ROWS / KEYS) - 1; n >= 0; n--, k++) {
            const unsigned s = k % Tiles::STAGES, round = k / Tiles::STAGES;
            load_tile<HS>(t.keys(k), KEYS, qkv_map, C + channel, n * KEYS, sequence, t.keys_full + s, t.keys_empty + s,
                          round);
            load_tile<HS>(t.values(k), KEYS, qkv_map, 2 * C + channel, n * KEYS, sequence, t.values_full + s,
                          t.values_empty + s, round);
        }
    }
}

// A thread's part of a warpgroup's 64 queries: elements of two rows, own_row() and the one 8 below, laid out as wgmma's
// accumulators and operands.
template <int HS>
struct ForwardRows {
    using Tiles = WgmmaForward<HS>;
    static constexpr int SCORES = Tiles::KEYS / 2, WEIGHTS = Tiles::KEYS / 16;
    using Scores = float[SCORES];
    float sums[HS / 2], row_max[2], row_sum[2], rescale[2];
    uint32_t weights[WEIGHTS][4];  // rounded

    __device__ static int own_row() { return int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4; }
    __device__ static int own_column() { return int(threadIdx.x) % 4 * 2; }

    // scores = queries keys'. Both are descriptors.
    __device__ __forceinline__ static void start_scores(Scores& scores, uint64_t queries, uint64_t keys) {
        wgmma_fence();
        UNROLL
        for (int c = 0; c < HS / 16; c++)
            wgmma<false, false>(scores, queries + c / 4 * (Tiles::ROWS * 128 >> 4) + c % 4 * K_STEP,
                                keys + c / 4 * (Tiles::KEY_PANEL_BYTES >> 4) + c % 4 * K_STEP, c > 0);
        wgmma_commit();
    }

    // sums += weights values
    __device__ __forceinline__ void start_sums(const unsigned char* values_tile) {
        const uint64_t values = transposed_descriptor_of(values_tile, Tiles::KEY_PANEL_BYTES);
        wgmma_fence();
        UNROLL
        for (int c = 0; c < WEIGHTS; c++) wgmma<true>(sums, weights[c], values + c * TRANSPOSED_K_STEP, true);
        wgmma_commit();
    }

    // A query sees no later key. first_row: of the warpgroup, minus the first key.
    __device__ __forceinline__ static void mask(Scores& scores, int first_row) {
        const int row = first_row + own_row() - own_column();
        UNROLL
        for (int e = 0; e < SCORES; e++)
            if (e / 4 * 8 + e % 2 - e / 2 % 2 * 8 > row) scores[e] = -INFINITY;
    }

    // Replaces scores by 2^(scale2 * (score - row_max)), with the maximum that includes these scores. `rescale` is the
    // factor of sums with the maximum before.
    __device__ __forceinline__ void softmax(Scores& scores, float scale2) {
        float largest[2], factor[2], offset[2], sum[2][2] = {};
        UNROLL
        for (int r = 0; r < 2; r++) {
            float parts[4];
            UNROLL
            for (int j = 0; j < SCORES / 4; j++) {  // four chains, because a maximum takes long
                const float pair = fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]);
                parts[j % 4] = j < 4 ? pair : fmaxf(parts[j % 4], pair);
            }
            largest[r] = fmaxf(fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3])), row_max[r]);
        }
        UNROLL
        for (int distance = 1; distance <= 2; distance *= 2) {  // four lanes hold a row
            UNROLL
            for (int r = 0; r < 2; r++)
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_MASK, largest[r], distance));
        }
        UNROLL
        for (int r = 0; r < 2; r++) {
            rescale[r] = exp2_fast((row_max[r] - largest[r]) * scale2);
            row_max[r] = largest[r];
            // As in attention_mma.cuh: where the rounding error of the offset could overflow, any two different scores
            // are so far apart that every positive scale gives the same weights.
            factor[r] = fabsf(largest[r]) * scale2 < 0x1p30f ? scale2 : 0.125f;
            offset[r] = largest[r] * factor[r];
        }
        UNROLL
        for (int e = 0; e < SCORES; e++) {
            const int r = e / 2 % 2;
            sum[r][e % 2] += scores[e] = exp2_fast(fmaf(scores[e], factor[r], -offset[r]));
        }
        UNROLL
        for (int r = 0; r < 2; r++) row_sum[r] = row_sum[r] * rescale[r] + (sum[r][0] + sum[r][1]);
    }

    __device__ __forceinline__ void round_weights(const Scores& scores) {
        UNROLL
        for (int j = 0; j < SCORES / 2; j++) weights[j / 4][j % 4] = pack_bf16(scores[2 * j], scores[2 * j + 1]);
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
            stmatrix_x4(staging + j / 8 * (64 * 128) + swizzled(row, j % 8 + half), pairs);
        }
    }
};

// A warpgroup's half of the tiles of queries, one tile of keys after the other.
//
// In step k the tensor cores compute the sums of step k - 1 and the scores of step k + 1, while the threads compute the
// weights of step k. That does not stop where the next step is of another tile of queries.
template <int HS>
struct ForwardGroup {
    using Tiles = WgmmaForward<HS>;
    using Rows = ForwardRows<HS>;
    const Tiles& t;
    const CUtensorMap* out_map;
    float* lse;
    int group, T, NH;  // group: 0 or 1
    float scale;
    Rows rows{};

    struct Step {
        ForwardPosition<HS> at;
        int keys;       // tiles of keys after this one
        bool diagonal;  // the first of its queries
        unsigned i, k;
    };

    __device__ void release(uint64_t* empty) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
    }
    // The first step of the tile of queries. Keys behind all queries of the warpgroup are not multiplied.
    __device__ __forceinline__ Step first_step(ForwardPosition<HS> at, unsigned i, unsigned k) const {
        constexpr int per_tile = Tiles::ROWS / Tiles::KEYS;
        if (!at.exists(t)) return {at, 0, true, i, k};
        t.wait_queries(i);
        if (per_tile == 2 && group == 0) {
            t.wait_keys(k);
            release(t.keys_empty + k % Tiles::STAGES);
            t.wait_values(k);
            release(t.values_empty + k % Tiles::STAGES);
            k++;
        }
        t.wait_keys(k);
        return {at, at.tile * per_tile + (per_tile == 2 ? group : 0), true, i, k};
    }
    __device__ __forceinline__ Step step_after(const Step& s) const {
        if (s.keys > 0) {
            t.wait_keys(s.k + 1);
            return {s.at, s.keys - 1, false, s.i, s.k + 1};
        }
        ForwardPosition<HS> at = s.at;
        at.advance(t);
        return first_step(at, s.i + 1, s.k + 1);
    }
    __device__ __forceinline__ void start_scores(typename Rows::Scores& scores, const Step& s) const {
        rows.start_scores(scores, descriptor_of(t.queries(s.i) + group * 64 * 128), descriptor_of(t.keys(s.k)));
    }

    // Stores the results of a tile of queries.
    __device__ __forceinline__ void store(ForwardPosition<HS> at, const float (&row_max)[2],
                                          const float (&row_sum)[2]) {
        unsigned char* const staging = t.shared + Tiles::STAGING + group * (Tiles::QUERY_BYTES / 2);
        const auto group_barrier = [&] { named_barrier(1 + group, 128); };
        const int head = at.head(t), first = at.tile * Tiles::ROWS + group * 64;
        float reciprocal[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            float sum = row_sum[r];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            reciprocal[r] = reciprocal_fast(sum);
            const int row = first + rows.own_row() + 8 * r;
            if (threadIdx.x % 4 == 0 && row < T) lse[int64_t(head) * T + row] = row_max[r] * scale + logf(sum);
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
            tma_store(out_map, staging + p * (64 * 128), head % NH * HS + p * 64, first, head / NH);
        store_commit();
    }

    // Computes the weights of step `now` from its scores, and the scores of the next step, which it returns. `before`
    // is the step whose weights are there.
    template <bool FIRST>
    __device__ __forceinline__ Step step(const Step& before, const Step& now, typename Rows::Scores& scores,
                                         typename Rows::Scores& next_scores) {
        if (!FIRST) rows.start_sums(t.values(before.k));
        const Step next = step_after(now);
        const bool more = next.at.exists(t);
        // Without a next step it computes these scores again, for nobody. ptxas serializes products under a condition.
        start_scores(next_scores, more ? next : now);
        const float row_max[2] = {rows.row_max[0], rows.row_max[1]}, row_sum[2] = {rows.row_sum[0], rows.row_sum[1]};
        if (FIRST || now.diagonal) {
            rows.mask(scores, Tiles::KEYS == 128 ? group * 64 : 0);
            UNROLL
            for (int r = 0; r < 2; r++) {
                rows.row_max[r] = -INFINITY;
                rows.row_sum[r] = 0.0f;
            }
        }
        rows.softmax(scores, scale * LOG2_E);
        // ptxas would compute the weights after the waits, and so not beside the products. It does not know that their
        // sum is never negative.
        t.wait_values(now.k, rows.row_sum[0] + rows.row_sum[1] < 0.0f);
        wgmma_wait<0>();
        if (!FIRST) release(t.values_empty + before.k % Tiles::STAGES);
        if (more) release(t.keys_empty + next.k % Tiles::STAGES);
        if (next.i != now.i) release(t.queries_empty + now.i % 2);
        rows.round_weights(scores);
        if (FIRST || now.diagonal) {
            if (!FIRST) store(before.at, row_max, row_sum);
            UNROLL
            for (float& x : rows.sums) x = 0.0f;
        } else {
            rows.rescale_sums();
        }
        return next;
    }

    __device__ __forceinline__ void run() {
        typename Rows::Scores even, odd;
        Step before = first_step(ForwardPosition<HS>(t), 0, 0);
        if (!before.at.exists(t)) return;
        start_scores(even, before);
        wgmma_wait<0>();
        release(t.keys_empty + before.k % Tiles::STAGES);
        Step now = step<true>(before, before, even, odd);
        while (now.at.exists(t)) {
            const Step next = step<false>(before, now, odd, even);
            before = now;
            now = next;
            if (!now.at.exists(t)) break;
            const Step after = step<false>(before, now, even, odd);
            before = now;
            now = after;
        }
        rows.start_sums(t.values(before.k));
        wgmma_wait<0>();
        release(t.values_empty + before.k % Tiles::STAGES);
        store(before.at, rows.row_max, rows.row_sum);
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
                 simt::tensor_map<bf16, 3>(qkv, {B, T, 3 * NH * HS}, {1, Tiles::KEYS, 64}),
                 simt::tensor_map<bf16, 3>(out, {B, T, NH * HS}, {1, 64, 64}), lse, heads, T, NH,
                 1.0f / std::sqrt(float(HS)));
}
