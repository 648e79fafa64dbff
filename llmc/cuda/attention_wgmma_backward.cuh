// attention_wgmma_backward.cuh: backward of causal attention in bf16 for Hopper (sm_90a), for heads of 64 and 128
// channels. The same input gives the same bits.
//
// A tile is a block of 128 keys n and a block of queries m that sees it (' : transposed, rows are keys):
//   S' = K Q'   dP' = V dO'   P' = 2^(scale2 S' - lse2)   dS' = P' (dP' - delta)
//   dV[n] += P' dO   dK[n] += dS' Q   dQ[m] += dS K
// A thread block owns whole heads, so it adds the parts of dQ in the order of its own loop. dK and dV stay in
// registers. The sums of dQ are in scratch memory, private to the thread block. Each thread adds its own elements there
// in the L2 cache, and no thread waits for it.
//
// Warpgroup 0 prepares tiles: a thread loads K, V, Q, dO and O by TMA, two warps compute delta = rowsum(dO O) and lse2.
// Warpgroups 1 and 2 have 64 of the keys each. P' is an operand in registers. dS' goes to shared memory, also for
// dQ: each warpgroup computes dQ of half the queries, or half the channels of dQ if a head has 128. With 64 channels,
// S' of the next tile is computed behind dK and dQ of this one.
//
// Rows past the last token are zeros in shared memory and are not stored. Their queries have lse2 = infinity, so that
// their weights are 0, and only they see their keys.
#pragma once
#include <algorithm>
#include <cmath>

#include "cuda/attention_mma.cuh"
#include "cuda/hopper.h"

struct BackwardArgs {
    int heads, NH, T;         // heads: B * NH
    int whole_heads, shares;  // the other heads are shared by so many thread blocks each
    int key_blocks, query_blocks;
    float scale;
    const float* lse;             // (B, NH, T)
    float* dq;                    // sums of dQ: (gridDim.x, query_blocks, 2 warpgroups, 8, 128 threads, 4)
    QueryStatistics* statistics;  // (gridDim.x, query_blocks, QUERIES)
};

// The shared memory of a block, in bytes. A tile consists of boxes of TMA, each 64 rows of 64 channels: first the
// boxes of all rows for 64 channels, then those of the next 64.
template <int HS>
struct WgmmaBackward {
    static constexpr int KEYS = 128, QUERIES = HS == 64 ? 128 : 64, BLOCKS_OF_QUERIES = KEYS / QUERIES;
    static constexpr int STORED_ROWS = 16, BOX_ROWS = 64, BOX = BOX_ROWS * 128, KEY_BYTES = KEYS * HS * 2,
                         QUERY_BYTES = QUERIES * HS * 2;
    static constexpr int KEY_BUFFERS = HS == 64 ? 2 : 1, DS_BYTES = KEYS * QUERIES * 2;
    static constexpr int THREADS = 384, STATISTICS_THREADS = 64;

    static constexpr int AT_QUERIES = KEY_BUFFERS * 2 * KEY_BYTES, AT_OUT = AT_QUERIES + 4 * QUERY_BYTES;
    static constexpr int AT_DS = AT_OUT + QUERY_BYTES, AT_STAGING = AT_DS + 2 * DS_BYTES;
    static constexpr int AT_STATISTICS = AT_STAGING + 2 * BOX, AT_HUGE = AT_STATISTICS + 5 * QUERIES * 4;
    static constexpr int AT_BARRIERS = AT_HUGE + 16, SHARED_BYTES = AT_BARRIERS + 12 * 8;
    static_assert(SHARED_BYTES <= 227 << 10);

    unsigned char* memory;
    // Two of each: full and empty, of keys with values, of queries with dO; of statistics, which are empty when the
    // queries are. Of O one.
    uint64_t *keys_full, *keys_empty, *queries_full, *queries_empty, *statistics_full, *out_full, *out_empty;

    __device__ WgmmaBackward() : memory(simt::dynamic_shared<unsigned char, 1024>()) {
        keys_full = reinterpret_cast<uint64_t*>(memory + AT_BARRIERS);
        keys_empty = keys_full + 2;
        queries_full = keys_empty + 2;
        queries_empty = queries_full + 2;
        statistics_full = queries_empty + 2;
        out_full = statistics_full + 2;
        out_empty = out_full + 1;
    }
    __device__ unsigned char* keys(int number) const { return memory + number % KEY_BUFFERS * 2 * KEY_BYTES; }
    __device__ unsigned char* values(int number) const { return keys(number) + KEY_BYTES; }
    __device__ unsigned char* queries(int number) const { return memory + AT_QUERIES + number % 2 * 2 * QUERY_BYTES; }
    __device__ unsigned char* douts(int number) const { return queries(number) + QUERY_BYTES; }
    __device__ unsigned char* out() const { return memory + AT_OUT; }
    __device__ unsigned char* ds(int number) const { return memory + AT_DS + number % 2 * DS_BYTES; }
    __device__ float* zeros() const { return reinterpret_cast<float*>(memory + AT_STATISTICS); }
    __device__ float* lse2(int number) const { return zeros() + (2 * (number % 2) + 1) * QUERIES; }
    __device__ float* delta(int number) const { return lse2(number) + QUERIES; }
    // Flags, one for each statistics warp: whether it has a query whose lse is huge.
    __device__ int* huge(int number) const { return reinterpret_cast<int*>(memory + AT_HUGE) + number % 2 * 2; }

    __device__ void init() const {  // called by all threads
        if (threadIdx.x < QUERIES) zeros()[threadIdx.x] = 0.0f;
        if (threadIdx.x == 0) {
            for (int s = 0; s < 2; s++) {
                mbarrier_init(keys_full + s, 1);
                mbarrier_init(keys_empty + s, 8);  // the warps of two warpgroups
                mbarrier_init(queries_full + s, 1);
                mbarrier_init(queries_empty + s, 8);
                mbarrier_init(statistics_full + s, STATISTICS_THREADS);
            }
            mbarrier_init(out_full, 1);
            mbarrier_init(out_empty, STATISTICS_THREADS);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
};

// The tiles of a thread block in their order: of each of its heads the blocks of keys n, and of each of these the
// blocks of queries m that see it, forwards and backwards in turn, because the last ones are in the L2 cache. Where
// forwards becomes backwards, the queries of the tile before are used again.
//
// The last heads, too few for all thread blocks, are shared: each by args.shares thread blocks. Of every `shares`
// blocks of keys, share s takes the one after s others, and of the next ones the one before s others, so that all have
// about as many tiles.
template <int HS>
struct BackwardTile {
    static constexpr int BLOCKS_OF_QUERIES = WgmmaBackward<HS>::BLOCKS_OF_QUERIES;
    int head, n, m, share = 0;
    bool backwards = false;
    // Numbers of the tile, and of its keys and its queries among the blocks that are loaded.
    int number = 0, keys_number = 0, queries_number = 0;

    __device__ explicit BackwardTile(const BackwardArgs& args) { start(int(blockIdx.x), args); }
    __device__ bool exists(const BackwardArgs& args) const { return head < args.heads; }
    __device__ bool is_shared(const BackwardArgs& args) const { return head >= args.whole_heads; }
    // The first tile of a head, or of the thread block's part of a shared head.
    __device__ void start(int whole_head, const BackwardArgs& args) {
        const int shared_heads = args.heads - args.whole_heads;
        head = whole_head;
        if (whole_head >= args.whole_heads) {
            head = args.heads;
            if (int(blockIdx.x) < shared_heads * args.shares) {
                head = args.whole_heads + int(blockIdx.x) % shared_heads;
                share = int(blockIdx.x) / shared_heads;
            }
        }
        n = share;
        m = n * BLOCKS_OF_QUERIES;
        backwards = false;
    }

    __device__ bool is_at(bool end, const BackwardArgs& args) const {
        return m == (end ? args.query_blocks - 1 : n * BLOCKS_OF_QUERIES);
    }
    __device__ bool has_new_keys(const BackwardArgs& args) const { return is_at(backwards, args); }
    __device__ bool ends_keys(const BackwardArgs& args) const { return is_at(!backwards, args); }
    // Else they are those of the tile before.
    __device__ bool has_new_queries(const BackwardArgs& args) const { return !(backwards && has_new_keys(args)); }
    // The first keys of the head for this thread block. All queries that see any others see them.
    __device__ bool has_first_keys() const { return n == share; }
    __device__ bool is_diagonal() const { return m < (n + 1) * BLOCKS_OF_QUERIES; }  // the mask cuts the tile
    __device__ bool completes_queries(const BackwardArgs& args) const { return is_diagonal() && !is_shared(args); }
    __device__ BackwardTile next(const BackwardArgs& args) const {
        BackwardTile t = *this;
        t.number++;
        if (!ends_keys(args)) {
            t.m += backwards ? -1 : 1;
        } else {
            const int others = is_shared(args) ? args.shares - 1 - share : 0;
            t.keys_number++;
            t.n += 1 + 2 * (backwards ? share : others);
            t.backwards = !backwards;
            t.m = t.backwards ? args.query_blocks - 1 : t.n * BLOCKS_OF_QUERIES;
            if (t.n >= args.key_blocks && is_shared(args)) t.head = args.heads;
            if (t.n >= args.key_blocks && !is_shared(args)) t.start(head + int(gridDim.x), args);
        }
        t.queries_number += t.has_new_queries(args);
        return t;
    }
};

// The thread that loads the tiles, and O with the first keys. It does not fetch later tiles into the L2 cache, because
// that took 815 to 828 us a layer on an H200, in place of 809.
template <int HS>
struct BackwardLoader {
    using W = WgmmaBackward<HS>;
    const W& shared;
    const CUtensorMap *qkv_map, *dout_map, *out_map;
    const BackwardArgs& args;

    // The boxes of a tile's queries, keys or values (part 0, 1 or 2).
    __device__ __forceinline__ void load(unsigned char* to, const CUtensorMap* map, int part, const BackwardTile<HS>& t,
                                         uint64_t* full) const {
        const int row = part ? t.n * W::KEYS : t.m * W::QUERIES, rows = part ? W::KEYS : W::QUERIES;
        const int b = t.head / args.NH, column = (part * args.NH + t.head % args.NH) * HS;
        for (int c = 0; c < HS; c += 64)
            for (int r = 0; r < rows; r += W::BOX_ROWS)
                tma_load(to + (c / 64 * rows + r) * 128, map, column + c, row + r, b, full);
    }
    __device__ __forceinline__ void load_keys(const BackwardTile<HS>& t) const {
        const int s = t.keys_number % W::KEY_BUFFERS;
        mbarrier_wait(shared.keys_empty + s, (t.keys_number / W::KEY_BUFFERS + 1) & 1);
        mbarrier_arrive_expect(shared.keys_full + s, 2 * W::KEY_BYTES);
        load(shared.keys(t.keys_number), qkv_map, 1, t, shared.keys_full + s);
        load(shared.values(t.keys_number), qkv_map, 2, t, shared.keys_full + s);
    }
    __device__ __forceinline__ void load_queries(const BackwardTile<HS>& t) const {
        const int s = t.queries_number % 2;
        mbarrier_wait(shared.queries_empty + s, (t.queries_number / 2 + 1) & 1);
        mbarrier_arrive_expect(shared.queries_full + s, 2 * W::QUERY_BYTES);
        load(shared.queries(t.queries_number), qkv_map, 0, t, shared.queries_full + s);
        load(shared.douts(t.queries_number), dout_map, 0, t, shared.queries_full + s);
    }
    __device__ __forceinline__ void run() const {
        int outs = 0;
        for (BackwardTile<HS> t(args); t.exists(args); t = t.next(args)) {
            if (t.has_new_keys(args)) load_keys(t);
            if (t.has_new_queries(args)) load_queries(t);
            if (!t.has_first_keys()) continue;
            mbarrier_wait(shared.out_empty, (outs++ + 1) & 1);
            mbarrier_arrive_expect(shared.out_full, W::QUERY_BYTES);
            load(shared.out(), out_map, 0, t, shared.out_full);
        }
    }
};

// Two warps put lse2 and delta of each tile's queries into shared memory: a thread every 64th query. They compute them
// for a head's first keys, and keep them in scratch memory for the others. What comes from memory is loaded before the
// wait for the tile, so that the warpgroups do not wait for it, too.
template <int HS>
struct BackwardStatistics {
    using W = WgmmaBackward<HS>;
    static constexpr int ROWS = W::QUERIES / W::STATISTICS_THREADS;
    const W& shared;
    const BackwardArgs& args;
    int thread;
    QueryStatistics own[ROWS];

    __device__ BackwardStatistics(const W& shared, const BackwardArgs& args)
        : shared(shared), args(args), thread(int(threadIdx.x) % W::STATISTICS_THREADS) {}

    __device__ __forceinline__ QueryStatistics* kept(const BackwardTile<HS>& t) const {
        return args.statistics + (int64_t(blockIdx.x) * args.query_blocks + t.m) * W::QUERIES + thread;
    }
    __device__ __forceinline__ void load(const BackwardTile<HS>& t) {
        const float* const lse = args.lse + int64_t(t.head) * args.T;
        UNROLL
        for (int i = 0; i < ROWS; i++) {
            const int row = i * W::STATISTICS_THREADS, query = t.m * W::QUERIES + thread + row;
            if (!t.has_first_keys())
                own[i] = kept(t)[row];
            else
                own[i].lse2 = query < args.T ? lse[query] * LOG2_E : INFINITY;
        }
    }
    // The sums of products of rows of O and dO.
    __device__ __forceinline__ void compute_delta(const BackwardTile<HS>& t) {
        UNROLL
        for (int i = 0; i < ROWS; i++) own[i].delta = 0.0f;
        UNROLL_BY(1)
        for (int c = 0; c < HS / 8; c++) {
            Vec<bf16> x[ROWS], y[ROWS];
            UNROLL
            for (int i = 0; i < ROWS; i++) {
                const int at = c / 8 * W::QUERIES * 128 + swizzled(thread + i * W::STATISTICS_THREADS, c % 8);
                x[i] = load128(reinterpret_cast<const bf16*>(shared.out() + at));
                y[i] = load128(reinterpret_cast<const bf16*>(shared.douts(t.queries_number) + at));
            }
            UNROLL
            for (int i = 0; i < ROWS; i++) {
                UNROLL
                for (int e = 0; e < x[i].size; e++) own[i].delta += float(x[i][e]) * float(y[i][e]);
            }
        }
        UNROLL
        for (int i = 0; i < ROWS; i++) kept(t)[i * W::STATISTICS_THREADS] = own[i];
    }
    __device__ __forceinline__ void publish(const BackwardTile<HS>& t) const {
        bool huge = false;
        UNROLL
        for (int i = 0; i < ROWS; i++) {
            const int row = thread + i * W::STATISTICS_THREADS;
            shared.lse2(t.queries_number)[row] = own[i].lse2;
            shared.delta(t.queries_number)[row] = own[i].delta;
            huge = huge || (own[i].lse_is_huge() && own[i].lse2 < INFINITY);
        }
        huge = __any_sync(FULL_MASK, huge);
        if (thread % WARP_SIZE == 0) shared.huge(t.queries_number)[thread / WARP_SIZE] = huge;
    }
    __device__ __forceinline__ void run() {
        int outs = 0;
        for (BackwardTile<HS> t(args); t.exists(args); t = t.next(args)) {
            if (!t.has_new_queries(args)) continue;
            const int s = t.queries_number % 2, phase = t.queries_number / 2;
            load(t);
            mbarrier_wait(shared.queries_empty + s, (phase + 1) & 1);
            if (t.has_first_keys()) {
                mbarrier_wait(shared.queries_full + s, phase & 1);
                mbarrier_wait(shared.out_full, outs++ & 1);
                compute_delta(t);
                mbarrier_arrive(shared.out_empty);
            }
            publish(t);
            mbarrier_arrive(shared.statistics_full + s);
        }
    }
};

// d = A B', for 64 rows of A and all rows of B, which have HS channels.
template <int HS, int R>
__device__ __forceinline__ void start_product_of_rows(float (&d)[R], const unsigned char* a, int rows_of_a,
                                                      const unsigned char* b) {
    const uint64_t da = descriptor_of(a), db = descriptor_of(b);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < HS / 16; k++)  // a box has four steps of 16 channels
        wgmma<false, false>(d, da + k / 4 * (rows_of_a * 128 >> 4) + k % 4 * K_STEP,
                            db + k / 4 * (2 * R * 128 >> 4) + k % 4 * K_STEP, k > 0);
    wgmma_commit();
}

// d = A B, plus d if `accumulate`, for A in registers. B has as many rows as A columns, and 2 R channels.
template <int R, int K>
__device__ __forceinline__ void add_product(float (&d)[R], const uint32_t (&a)[K][4], const unsigned char* b,
                                            bool accumulate) {
    const uint64_t db = transposed_descriptor_of(b, K * 16 * 128);
    UNROLL
    for (int k = 0; k < K; k++) wgmma<true>(d, a[k], db + k * TRANSPOSED_K_STEP, accumulate || k > 0);
}

// The work of a thread of warpgroup 1 or 2: it has the keys (lane / 4 and lane / 4 + 8, of the 16 of its warp) and the
// queries (8 j + column and the next one) that wgmma gives it.
template <int HS>
struct BackwardConsumer {
    using W = WgmmaBackward<HS>;
    static constexpr int QUERIES = W::QUERIES, PAIRS = QUERIES / 16;
    static constexpr bool AHEAD = W::KEY_BUFFERS == 2;  // the next keys are there before these are released
    using Operand = uint32_t[PAIRS][4];                 // 64 keys of a warpgroup and the queries, in bf16

    const W& shared;
    const BackwardArgs& args;
    const CUtensorMap* dqkv_map;
    int group = int(threadIdx.x) / 128 - 1, thread = int(threadIdx.x) % 128, lane = int(threadIdx.x) % 32;
    int column = lane % 4 * 2;
    float s[QUERIES / 2], dk[HS / 2], dv[HS / 2];

    __device__ BackwardConsumer(const W& shared, const BackwardArgs& args, const CUtensorMap* dqkv_map)
        : shared(shared), args(args), dqkv_map(dqkv_map) {}
    __device__ __forceinline__ void release(uint64_t* barrier) const {
        if (lane == 0) mbarrier_arrive(barrier);
    }

    // S' of a tile, whose operands are waited for if they are `new_tile`.
    __device__ __forceinline__ void start_scores(const BackwardTile<HS>& t, bool new_tile) {
        const int k = t.keys_number, q = t.queries_number;
        if (new_tile && t.has_new_keys(args))
            mbarrier_wait(shared.keys_full + k % W::KEY_BUFFERS, k / W::KEY_BUFFERS & 1);
        if (new_tile && t.has_new_queries(args)) mbarrier_wait(shared.queries_full + q % 2, q / 2 & 1);
        start_product_of_rows<HS>(s, shared.keys(k) + group * W::BOX, W::KEYS, shared.queries(q));
    }

    // Weights of keys that queries do not see become 0.
    __device__ __forceinline__ void mask(const BackwardTile<HS>& t) {
        const int key = t.n * W::KEYS + group * 64 + thread / 32 * 16 + lane / 4, query = t.m * QUERIES + column;
        UNROLL
        for (int i = 0; i < QUERIES / 2; i++)
            if (key + i / 2 % 2 * 8 > query + i / 4 * 8 + i % 2) s[i] = -INFINITY;
    }

    // P' = 2^(scale2 S' - lse2)
    __device__ __forceinline__ void weigh(Operand& p, const BackwardTile<HS>& t) {
        const float* lse2 = shared.lse2(t.queries_number) + column;
        float scale2 = args.scale * LOG2_E;
        if (shared.huge(t.queries_number)[0] | shared.huge(t.queries_number)[1]) {  // then s becomes the exponents
            UNROLL
            for (int i = 0; i < QUERIES / 2; i++) {
                const QueryStatistics query{lse2[i / 4 * 8 + i % 2], 0.0f};
                s[i] = query.clamp_exponent(fmaf(s[i], scale2, -query.lse2));
            }
            lse2 = shared.zeros() + column;
            scale2 = 1.0f;
        }
        UNROLL
        for (int j = 0; j < QUERIES / 8; j++) {
            const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * j);
            UNROLL
            for (int half = 0; half < 2; half++) {
                const float* x = &s[4 * j + 2 * half];
                p[j / 2][j % 2 * 2 + half] =
                    pack_bf16(exp2_fast(fmaf(x[0], scale2, -l.x)), exp2_fast(fmaf(x[1], scale2, -l.y)));
            }
        }
    }

    // dS' = P' (dP' - delta)
    __device__ __forceinline__ void score_gradients(Operand& ds, const Operand& p, const float (&dp)[QUERIES / 2],
                                                    const BackwardTile<HS>& t) const {
        UNROLL
        for (int j = 0; j < QUERIES / 8; j++) {
            const float2 delta = *reinterpret_cast<const float2*>(shared.delta(t.queries_number) + column + 8 * j);
            UNROLL
            for (int half = 0; half < 2; half++) {
                const uint32_t pair = p[j / 2][j % 2 * 2 + half];
                const float low = __builtin_bit_cast(float, pair << 16) * (dp[4 * j + 2 * half] - delta.x);
                const float high = __builtin_bit_cast(float, pair & 0xffff0000u) * (dp[4 * j + 2 * half + 1] - delta.y);
                ds[j / 2][j % 2 * 2 + half] = pack_bf16(low, high);
            }
        }
    }

    // dS' in tiles of 128 keys and 64 queries.
    __device__ __forceinline__ void share(const Operand& ds, unsigned char* to) const {
        const int row = group * 64 + thread / 32 * 16 + lane % 16;
        UNROLL
        for (int j = 0; j < QUERIES / 8; j += 2)
            stmatrix_x4(to + j / 8 * 2 * W::BOX + swizzled(row, (j + lane / 16) % 8), ds[j / 2]);
        fence_proxy_async();
    }

    // dK += dS' Q, with dS' from shared memory, which leaves registers to S' of the next tile.
    __device__ __forceinline__ void start_key_gradients(const BackwardTile<HS>& t) {
        const uint64_t a = descriptor_of(shared.ds(t.number) + group * W::BOX);
        const uint64_t b = transposed_descriptor_of(shared.queries(t.queries_number), QUERIES * 128);
        UNROLL
        for (int k = 0; k < QUERIES / 16; k++)
            wgmma<false, true>(dk, a + k / 4 * (2 * W::BOX >> 4) + k % 4 * K_STEP, b + k * TRANSPOSED_K_STEP,
                               !t.has_new_keys(args) || k > 0);
    }

    // Half of dQ = dS K.
    __device__ __forceinline__ void start_query_gradients(float (&dq)[32], const BackwardTile<HS>& t) const {
        const int half = group * 2 * W::BOX;  // offset of this half of the queries, or of the channels
        const uint64_t a = transposed_descriptor_of(shared.ds(t.number) + (HS == 64 ? half : 0), 0);
        const uint64_t b = transposed_descriptor_of(shared.keys(t.keys_number) + (HS == 64 ? 0 : half), 0);
        UNROLL
        for (int k = 0; k < W::KEYS / 16; k++)
            wgmma<true, true>(dq, a + k * TRANSPOSED_K_STEP, b + k * TRANSPOSED_K_STEP, k > 0);
    }

    // Rounds 64 rows, and stores them to part 0, 1 or 2 of dqkv, from row `row` and channel `channel` of the head on.
    // Each warp stores 16 rows. The gradient of qkv's bias is another kernel's: column sums here cost 87 us a layer on
    // an H200, that kernel 70.
    template <int R>
    __device__ __forceinline__ void store_rows(const float (&x)[R], float factor, const BackwardTile<HS>& t, int part,
                                               int row, int channel) const {
        const int warp_row = thread / WARP_SIZE * W::STORED_ROWS;
        unsigned char* const staging = shared.memory + W::AT_STAGING + group * W::BOX + warp_row * 128;
        UNROLL
        for (int c = 0; c < R; c += 32) {
            if (lane == 0) store_wait_read<0>();
            __syncwarp();
            UNROLL
            for (int j = 0; j < 8; j += 2) {
                uint32_t r[4];
                UNROLL
                for (int i = 0; i < 4; i++)
                    r[i] = pack_bf16(x[c + 4 * j + 2 * i] * factor, x[c + 4 * j + 2 * i + 1] * factor);
                stmatrix_x4(staging + swizzled(lane % 16, j + lane / 16), r);
            }
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                const int column = (part * args.NH + t.head % args.NH) * HS + channel + 2 * c;
                tma_store(dqkv_map, staging, column, row + warp_row, t.head / args.NH);
                store_commit();
            }
        }
    }

    // dQ is stored if it is complete, and otherwise added to the sums of the keys before. Nothing waits for the
    // addition.
    __device__ __forceinline__ void keep_or_store(float (&dq)[32], const BackwardTile<HS>& t) const {
        float* const sums =
            args.dq + int64_t(blockIdx.x) * args.query_blocks * 8192 + unsigned((t.m * 2 + group) * 4096 + thread * 4);
        if (t.completes_queries(args)) {
            UNROLL
            for (int i = 0; i < 8 && !t.has_first_keys(); i++) {
                const Vec<float> before = load128_l2(sums + i * 512);
                UNROLL
                for (int e = 0; e < 4; e++) dq[4 * i + e] += before[e];
            }
            store_rows(dq, args.scale, t, 0, t.m * QUERIES + (HS == 64 ? group * 64 : 0), HS == 64 ? 0 : group * 64);
            return;
        }
        UNROLL
        for (int i = 0; i < 8; i++) {
            const Vec<float> x{{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]}};
            if (t.has_first_keys())
                store128_whole(sums + i * 512, x);
            else
                add128_l2(sums + i * 512, x);
        }
    }

    // Adds the tile's gradients. On entry s is S', on exit that of the next tile, if there is one.
    __device__ __forceinline__ void add_tile(const BackwardTile<HS>& t, const BackwardTile<HS>& next, bool has_next) {
        float dp[QUERIES / 2], dq[32];
        Operand p, ds;
        start_product_of_rows<HS>(dp, shared.values(t.keys_number) + group * W::BOX, W::KEYS,
                                  shared.douts(t.queries_number));
        if (t.has_new_queries(args))
            mbarrier_wait(shared.statistics_full + t.queries_number % 2, t.queries_number / 2 & 1);
        if (t.is_diagonal()) mask(t);
        weigh(p, t);
        wgmma_fence();
        add_product(dv, p, shared.douts(t.queries_number), !t.has_new_keys(args));
        wgmma_commit();
        wgmma_wait<1>();  // dP' is complete
        score_gradients(ds, p, dp, t);
        wgmma_wait<0>();  // dV is complete, which reads p from registers that are used again
        share(ds, shared.ds(t.number));
        // dK needs the dS' of its warpgroup alone, dQ also the other's. A warpgroup may be a tile ahead at its arrival.
        const int both = 3 + t.number % 2 * 2;
        named_arrive(both + 1 - group, 256);
        named_barrier(1 + group, 128);
        wgmma_fence();
        start_key_gradients(t);
        named_barrier(both + group, 256);
        start_query_gradients(dq, t);
        wgmma_commit();
        if (AHEAD) start_scores(next, has_next);
        wgmma_wait<AHEAD ? 1 : 0>();  // dK, dQ
        if (next.queries_number != t.queries_number) release(shared.queries_empty + t.queries_number % 2);
        if (t.ends_keys(args)) release(shared.keys_empty + t.keys_number % W::KEY_BUFFERS);
        keep_or_store(dq, t);
        if (!AHEAD) start_scores(next, has_next);
        wgmma_wait<0>();  // S': ptxas serializes wgmma that are pending at the end of an iteration
        if (!t.ends_keys(args)) return;
        store_rows(dk, args.scale, t, 1, t.n * W::KEYS + group * 64, 0);
        store_rows(dv, 1.0f, t, 2, t.n * W::KEYS + group * 64, 0);
    }

    // Without a next tile the last one's scores are computed again, and not read: a branch around wgmma would make
    // ptxas serialize.
    __device__ __forceinline__ void run() {
        BackwardTile<HS> t(args);
        start_scores(t, true);
        wgmma_wait<0>();
        for (bool has_next = true; has_next;) {
            BackwardTile<HS> next = t.next(args);
            has_next = next.exists(args);
            if (!has_next) next = t;
            add_tile(t, next, has_next);
            t = next;
        }
        if (lane == 0) store_wait<0>();
    }
};

template <int HS>
__global__ void __launch_bounds__(WgmmaBackward<HS>::THREADS, 1)
    attention_backward_wgmma_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap dout_map,
                                    const __grid_constant__ CUtensorMap out_map,
                                    const __grid_constant__ CUtensorMap dqkv_map, BackwardArgs args) {
    if constexpr (HOPPER_CODE) {
        const WgmmaBackward<HS> shared;
        shared.init();
        const int warp = int(threadIdx.x) / WARP_SIZE;
        if (warp < 4) {
            give_registers<40>();
            if (warp == 0 && elect_one()) BackwardLoader<HS>{shared, &qkv_map, &dout_map, &out_map, args}.run();
            if (warp >= 2) BackwardStatistics<HS>(shared, args).run();
        } else {
            take_registers<232>();
            BackwardConsumer<HS>(shared, args, &dqkv_map).run();
        }
    }
}

// dq of the shared heads: the sums of all shares, of which share s has the queries from its first keys on.
//
// Grid: (query_blocks, shared heads) blocks of 256 threads, which have the elements of the warpgroups above.
template <int HS>
__global__ void __launch_bounds__(256) attention_backward_shared_dq_kernel(bf16* dqkv, BackwardArgs args) {
    using W = WgmmaBackward<HS>;
    const int m = int(blockIdx.x), group = int(threadIdx.x) / 128, lane = int(threadIdx.x) % WARP_SIZE;
    const int head = args.whole_heads + int(blockIdx.y), C = args.NH * HS;
    float dq[32] = {};
    for (int share = 0; share < args.shares && share * W::BLOCKS_OF_QUERIES <= m; share++) {
        const int64_t block = share * int(gridDim.y) + int(blockIdx.y);
        const float* sums =
            args.dq + (block * args.query_blocks + m) * 8192 + group * 4096 + int(threadIdx.x) % 128 * 4;
        UNROLL
        for (int i = 0; i < 8; i++) {
            const Vec<float> x = load128(sums + i * 512);
            UNROLL
            for (int e = 0; e < 4; e++) dq[4 * i + e] += x[e];
        }
    }
    const int row = m * W::QUERIES + (HS == 64 ? group * 64 : 0) + int(threadIdx.x) % 128 / 32 * 16 + lane / 4;
    const int channel = head % args.NH * HS + (HS == 64 ? 0 : group * 64) + lane % 4 * 2;
    UNROLL
    for (int i = 0; i < 16; i++) {  // pairs: two rows of each 8 channels
        const int t = row + i % 2 * 8;
        bf16* to = dqkv + (int64_t(head / args.NH) * args.T + t) * 3 * C + channel + i / 2 * 8;
        if (t < args.T)
            *reinterpret_cast<uint32_t*>(to) = pack_bf16(dq[2 * i] * args.scale, dq[2 * i + 1] * args.scale);
    }
}

// ---- Launch

// How the heads are divided into thread blocks, of which the GPU runs `resident` at once.
template <int HS>
struct BackwardPlan {
    using W = WgmmaBackward<HS>;
    int heads, key_blocks, query_blocks, shared_heads, shares, grid;

    BackwardPlan(int B, int T, int NH)
        : heads(B * NH), key_blocks(ceil_div(T, W::KEYS)), query_blocks(ceil_div(T, W::QUERIES)) {
        const int resident = simt::resident_blocks(attention_backward_wgmma_kernel<HS>, W::THREADS, W::SHARED_BYTES);
        shared_heads = heads % resident;
        shares = shared_heads ? std::min(key_blocks, resident / shared_heads) : 1;
        if (shares == 1) shared_heads = 0;
        grid = heads - shared_heads ? std::min(heads, resident) : shared_heads * shares;
    }
    int64_t dq_bytes() const { return int64_t(grid) * query_blocks * W::QUERIES * HS * int64_t(sizeof(float)); }
    int64_t bytes() const {
        return dq_bytes() + int64_t(grid) * query_blocks * W::QUERIES * int64_t(sizeof(QueryStatistics));
    }
};

// Bytes of scratch memory for launch_attention_backward_wgmma. HS is 64 or 128.
inline int64_t attention_wgmma_backward_scratch_bytes(int B, int T, int NH, int HS) {
    return HS == 64 ? BackwardPlan<64>(B, T, NH).bytes() : BackwardPlan<128>(B, T, NH).bytes();
}

template <int HS>
void launch_attention_backward_wgmma(bf16* dqkv, void* scratch, const bf16* dout, const bf16* out, const float* lse,
                                     const bf16* qkv, int B, int T, int NH, Stream stream) {
    using W = WgmmaBackward<HS>;
    const BackwardPlan<HS> plan(B, T, NH);
    char* const memory = static_cast<char*>(scratch);
    const BackwardArgs args{plan.heads,
                            NH,
                            T,
                            plan.heads - plan.shared_heads,
                            plan.shares,
                            plan.key_blocks,
                            plan.query_blocks,
                            1.0f / std::sqrt(float(HS)),
                            lse,
                            reinterpret_cast<float*>(memory),
                            reinterpret_cast<QueryStatistics*>(memory + plan.dq_bytes())};
    const auto map = [&](const bf16* data, int parts, int rows) {
        return simt::tensor_map<bf16, 3>(data, {B, T, int64_t(parts) * NH * HS}, {1, rows, 64});
    };
    simt::launch(attention_backward_wgmma_kernel<HS>, unsigned(plan.grid), W::THREADS, W::SHARED_BYTES, stream,
                 map(qkv, 3, W::BOX_ROWS), map(dout, 1, W::BOX_ROWS), map(out, 1, W::BOX_ROWS),
                 map(dqkv, 3, W::STORED_ROWS), args);
    if (plan.shared_heads)
        simt::launch(attention_backward_shared_dq_kernel<HS>,
                     dim3(unsigned(plan.query_blocks), unsigned(plan.shared_heads)), 256, 0, stream, dqkv, args);
}
