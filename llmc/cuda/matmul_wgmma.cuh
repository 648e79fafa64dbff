// matmul_wgmma.cuh: bf16 matmuls whose epilogue is a function of ours, on Hopper's tensor cores (sm_90a).
//
// A block computes tiles of 128 x BN results, one after the other. A thread of warpgroup 0 loads tiles of the operands
// by TMA into a queue, without a break between results. Warpgroups 1 and 2 own alternate tiles of results and take the
// operands from the queue in the order of use: one multiplies, while the other is in its epilogue. Elements outside of
// the matrices are loaded as zeros and not stored, so sizes need not be multiples of the tiles.
//
// An epilogue is a struct with the tensors that it uses. Its operator() gets 64 rows of a tile (WgmmaPart) and
// says what becomes of them; HeadExponentials is an example. launch_matmul_wgmma makes a kernel of it.
//
// Bound: the tensor cores. With BN = 192 each element that is loaded is used in 77 products on average, and the sums
// take 192 of the 240 registers of a thread.
#pragma once
#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/matmul.h"

// Shared memory of a block: the queue of STAGES tiles of both operands, 64 rows of results of each group on their way
// to memory, and the barriers. All are panels of 64 rows and 64 columns. A warpgroup that multiplies is a group.
template <int BN>
struct WgmmaTiles {
    static constexpr int BM = 128, BK = 64, GROUPS = 2, THREADS = 128 * (1 + GROUPS);
    static constexpr int PANEL_BYTES = 64 * 128, PANELS = BN / 64, A_BYTES = BM / 64 * PANEL_BYTES;
    static constexpr int STAGE_BYTES = A_BYTES + PANELS * PANEL_BYTES, STAGING_BYTES = PANELS * PANEL_BYTES;
    static constexpr int LIMIT = 227 * 1024, BARRIER_BYTES = 256;
    static constexpr int STAGES = (LIMIT - GROUPS * STAGING_BYTES - BARRIER_BYTES) / STAGE_BYTES;
    static constexpr int STAGING = STAGES * STAGE_BYTES, BARRIERS = STAGING + GROUPS * STAGING_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS + BARRIER_BYTES;
    static_assert(BN % 64 == 0 && 8 * (2 * STAGES + 2 * GROUPS) <= BARRIER_BYTES);
    struct Place {
        int row, column;  // the first
    };
    unsigned char* shared;
    uint64_t *full, *empty, *turns, *loaded;
    int rows, columns, K, row_tiles, column_tiles, k_tiles;

    __device__ WgmmaTiles(int rows, int columns, int K)
        : shared(simt::dynamic_shared<unsigned char, 1024>()),
          full(reinterpret_cast<uint64_t*>(shared + BARRIERS)),
          empty(full + STAGES),
          turns(empty + STAGES),
          loaded(turns + GROUPS),
          rows(rows),
          columns(columns),
          K(K),
          row_tiles((rows + BM - 1) / BM),
          column_tiles((columns + BN - 1) / BN),
          k_tiles((K + BK - 1) / BK) {}
    // i: number of a tile of operands among those of the block.
    __device__ unsigned char* a(unsigned i) const { return shared + i % STAGES * STAGE_BYTES; }
    __device__ unsigned char* b(unsigned i) const { return a(i) + A_BYTES; }
    __device__ unsigned char* staging(int group) const { return shared + STAGING + group * STAGING_BYTES; }

    // Called by one thread.
    __device__ void init_barriers() const {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, 4);  // the warps of a group
        }
        for (int group = 0; group < GROUPS; group++) {
            mbarrier_init(turns + group, 4);
            mbarrier_init(loaded + group, 1);
        }
        fence_mbarrier_init();
    }

    // The block's tile of results number `turn`; row = -1: there are no more. The blocks compute
    // bands of 16 tiles of rows, column after column. So at a time they read about as many rows as columns, and in the
    // L2 cache the head's matmul finds the rows of a band, and reads its weight once for each band.
    __device__ Place place(int turn) const {
        constexpr int BAND = 16;
        const int tile = int(blockIdx.x) + turn * int(gridDim.x);
        if (tile >= row_tiles * column_tiles) return {-1, 0};
        const int above = tile / (BAND * column_tiles) * BAND, in_band = tile - above * column_tiles;
        const int height = row_tiles - above < BAND ? row_tiles - above : BAND;
        return {(above + in_band % height) * BM, in_band / height * BN};
    }
};

// One thread loads all tiles of operands of the block, each when its place is empty.
template <int BN>
__device__ __forceinline__ void load_wgmma_tiles(const WgmmaTiles<BN>& t, const CUtensorMap* a_map,
                                                 const CUtensorMap* b_map) {
    using Tiles = WgmmaTiles<BN>;
    unsigned i = 0;
    for (int turn = 0;; turn++) {
        const auto [row, column] = t.place(turn);
        if (row < 0) return;
        for (int k = 0; k < t.k_tiles; k++, i++) {
            uint64_t* const full = t.full + i % Tiles::STAGES;
            mbarrier_wait(t.empty + i % Tiles::STAGES, (i / Tiles::STAGES + 1) & 1);
            mbarrier_arrive_expect(full, Tiles::STAGE_BYTES);
            tma_load(t.a(i), a_map, k * Tiles::BK, row, full);
            tma_load(t.b(i), b_map, k * Tiles::BK, column, full);
        }
    }
}

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __builtin_bit_cast(float, pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000u); }

// 64 rows of a tile of results, for an epilogue. A thread has the sums of two rows, own_row() and the one 8 below, laid
// out as wgmma's accumulators.
template <int BN>
struct WgmmaPart {
    using Tiles = WgmmaTiles<BN>;
    const Tiles& t;
    float (&sums)[BN / 2];
    int group, row, column;  // row and column: the first

    __device__ static int thread() { return int(threadIdx.x) % 128; }
    __device__ int own_row() const { return row + thread() / 32 * 16 + thread() % 32 / 4; }
    __device__ int own_column() const { return column + thread() % 4 * 2; }
    __device__ void wait_for_group() const { named_barrier(1 + group, 128); }

    // Calls f(x, h, c) for each sum x of row own_row() + 8 * h, in column c.
    template <class F>
    __device__ __forceinline__ void for_each(const F& f) {
        UNROLL
        for (int e = 0; e < BN / 2; e++) f(sums[e], e / 2 % 2, own_column() + e / 4 * 8 + e % 2);
    }

    // The row of 8 columns of the staging memory that this lane gives to stmatrix and ldmatrix for blocks j and j + 1.
    __device__ unsigned char* staged(int j) const {
        const int block = j + thread() % 32 / 16;
        return t.staging(group) + block / 8 * Tiles::PANEL_BYTES +
               swizzled(thread() / 32 * 16 + thread() % 16, block % 8);
    }

    // Starts to load elements into the staging memory, when the stores before have read it.
    __device__ __forceinline__ void start_load(const CUtensorMap& map) const {
        if (thread() != 0) return;
        store_wait_read<0>();
        mbarrier_arrive_expect(t.loaded + group, Tiles::STAGING_BYTES);
        for (int p = 0; p < Tiles::PANELS; p++)
            tma_load(t.staging(group) + p * Tiles::PANEL_BYTES, &map, column + p * 64, row, t.loaded + group);
    }

    // Adds them to the sums. load: the number of the load.
    __device__ __forceinline__ void add_loaded(unsigned load) {
        mbarrier_wait(t.loaded + group, load & 1);
        UNROLL
        for (int j = 0; j < BN / 8; j += 2) {
            uint32_t pairs[4];
            ldmatrix_x4(pairs, staged(j));
            UNROLL
            for (int i = 0; i < 4; i++) {
                sums[4 * j + 2 * i] += low_bf16(pairs[i]);
                sums[4 * j + 2 * i + 1] += high_bf16(pairs[i]);
            }
        }
    }

    // Stores the sums, rounded. The staging memory is free when the stores before have read it.
    __device__ __forceinline__ void store(const CUtensorMap& map) const {
        if (thread() == 0) store_wait_read<0>();
        wait_for_group();
        UNROLL
        for (int j = 0; j < BN / 8; j += 2) {  // blocks of 8 columns
            uint32_t pairs[4];
            UNROLL
            for (int i = 0; i < 4; i++) pairs[i] = pack_bf16(sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
            stmatrix_x4(staged(j), pairs);
        }
        fence_proxy_async();
        wait_for_group();
        if (thread() != 0) return;
        for (int p = 0; p < Tiles::PANELS; p++)
            tma_store(&map, t.staging(group) + p * Tiles::PANEL_BYTES, column + p * 64, row);
        store_commit();
    }
};

// A warpgroup's part of the tiles of results.
template <int BN>
struct WgmmaGroup {
    using Tiles = WgmmaTiles<BN>;
    const Tiles& t;
    int group;

    __device__ void release(unsigned i) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(t.empty + i % Tiles::STAGES);
    }

    // sums = the product of the operands' tiles from the block's number i on, of rows 0 to 63 and 64 to 127.
    __device__ __forceinline__ void multiply(float (&sums)[2][BN / 2], unsigned i) const {
        for (const unsigned first = i, end = i + unsigned(t.k_tiles); i < end; i++) {
            mbarrier_wait(t.full + i % Tiles::STAGES, i / Tiles::STAGES & 1);
            const uint64_t a = descriptor_of(t.a(i)), b = descriptor_of(t.b(i));
            wgmma_fence();
            UNROLL
            for (int k = 0; k < Tiles::BK / 16; k++) {
                const uint64_t ak = a + k * K_STEP, bk = b + k * K_STEP;
                wgmma<false, false>(sums[0], ak, bk, i > first || k > 0);
                wgmma<false, false>(sums[1], ak + (Tiles::PANEL_BYTES >> 4), bk, i > first || k > 0);
            }
            wgmma_commit();
            if (i == first) continue;
            wgmma_wait<1>();
            release(i - 1);
        }
    }

    template <class Epilogue>
    __device__ __forceinline__ void run(const Epilogue& epilogue) const {
        float sums[2][BN / 2];
        unsigned load = 0;
        for (int turn = group;; turn += Tiles::GROUPS) {
            const auto [row, column] = t.place(turn);
            if (row < 0) break;
            WgmmaPart<BN> upper{t, sums[0], group, row, column}, lower{t, sums[1], group, row + 64, column};
            if constexpr (Epilogue::LOADS) upper.start_load(epilogue.loaded);
            // The other group must have waited for all operands of its tile. Otherwise a wait for the phase after the
            // next one of a barrier would return at once.
            if (turn > 0) mbarrier_wait(t.turns + group, unsigned(turn - 1) / Tiles::GROUPS & 1);
            multiply(sums, unsigned(turn * t.k_tiles));
            __syncwarp();  // with one tile of operands, lanes of the warp may still wait for the turn
            if (threadIdx.x % 32 == 0) mbarrier_arrive(t.turns + (group ^ 1));
            wgmma_wait<0>();
            release(unsigned((turn + 1) * t.k_tiles - 1));
            if constexpr (Epilogue::LOADS) upper.add_loaded(load++);
            epilogue(upper);
            if constexpr (Epilogue::LOADS) lower.start_load(epilogue.loaded);
            if constexpr (Epilogue::LOADS) lower.add_loaded(load++);
            epilogue(lower);
        }
        if (threadIdx.x % 128 == 0) store_wait<0>();
    }
};

// A (rows, K), B (columns, K).
template <int BN, class Epilogue>
__global__ void __launch_bounds__(WgmmaTiles<BN>::THREADS, 1)
    matmul_wgmma_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                        const __grid_constant__ Epilogue epilogue, int rows, int columns, int K) {
    if constexpr (HOPPER_CODE) {
        const WgmmaTiles<BN> t(rows, columns, K);
        if (threadIdx.x == 0) t.init_barriers();
        __syncthreads();
        if (threadIdx.x < 128) {
            give_registers<24>();
            if (threadIdx.x < 32 && elect_one()) load_wgmma_tiles(t, &a_map, &b_map);
        } else {
            take_registers<240>();
            // The shuffle shows the compiler that the group is the same in a warp.
            const int group = __shfl_sync(FULL_MASK, int(threadIdx.x) / 128, 0) - 1;
            WgmmaGroup<BN>{t, group}.run(epilogue);
        }
    }
}

template <int BN, class Epilogue>
void launch_matmul_wgmma(const gpu::MatmulCall<bf16>& call, const Epilogue& epilogue, Stream stream) {
    using Tiles = WgmmaTiles<BN>;
    const int rows = call.shape.n, columns = call.shape.m, K = call.shape.k;
    const auto kernel = matmul_wgmma_kernel<BN, Epilogue>;
    static const int resident = simt::resident_blocks(kernel, Tiles::THREADS, Tiles::SHARED_BYTES);
    const int tiles = ceil_div(rows, Tiles::BM) * ceil_div(columns, BN);
    simt::launch(kernel, std::min(tiles, resident), Tiles::THREADS, Tiles::SHARED_BYTES, stream,
                 simt::tensor_map<bf16, 2>(static_cast<const bf16*>(call.b), {rows, K}, {Tiles::BM, Tiles::BK}),
                 simt::tensor_map<bf16, 2>(static_cast<const bf16*>(call.a), {columns, K}, {BN, Tiles::BK}), epilogue,
                 rows, columns, K);
}

// ---- Epilogues

// The head's (ops.inc): from logits e, which is stored with `keep`, and the sums of e over the columns of each tile.
struct HeadExponentials {
    static constexpr int BN = 192;
    static constexpr bool LOADS = false;
    CUtensorMap out;
    gpu::HeadRows head;
    float* tile_sums;  // (tiles of columns, rows)
    int rows;

    __device__ __forceinline__ void operator()(WgmmaPart<BN>& part) const {
        float target_logit[2], sum[2] = {};
        int end[2], target[2];  // columns where e is 0: from `end` on, and the target's
        UNROLL
        for (int h = 0; h < 2; h++) {
            const int n = part.own_row() + 8 * h < rows ? part.own_row() + 8 * h : rows - 1, token = head.targets[n];
            target_logit[h] = head.target_logits[n];
            target[h] = head.shard.row(token);
            end[h] = token < 0 ? 0 : head.shard.count;
        }
        const auto ends_here = [&](int h) {
            return end[h] < part.column + BN || unsigned(target[h] - part.column) < unsigned(BN);
        };
        if (ends_here(0) || ends_here(1))  // in few tiles
            part.for_each([&](float& x, int h, int c) {
                if (c >= end[h] || c == target[h]) x = -INFINITY;
            });
        part.for_each([&](float& x, int h, int) {
            const float exponent = x - target_logit[h];
            x = exp_fast(exponent > HEAD_LIMIT ? HEAD_LIMIT : exponent);  // NaN stays NaN, unlike with fminf
            sum[h] += x;
        });
        if (head.keep) part.store(out);
        UNROLL
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(FULL_MASK, sum[h], 1);  // four lanes hold a row
            sum[h] += __shfl_xor_sync(FULL_MASK, sum[h], 2);
            const int n = part.own_row() + 8 * h;
            if (threadIdx.x % 4 == 0 && n < rows) tile_sums[int64_t(part.column / BN) * rows + n] = sum[h];
        }
    }
};

// Adds the residual, and the bias unless it is null.
template <int BN>
struct BiasAndResidual {
    static constexpr bool LOADS = true;
    CUtensorMap out, loaded;  // loaded: the residual
    const bf16* bias;
    int columns;  // even

    __device__ __forceinline__ void operator()(WgmmaPart<BN>& part) const {
        UNROLL
        for (int j = 0; j < BN / 8 && bias; j++) {
            const int c = part.own_column() + 8 * j < columns ? part.own_column() + 8 * j : 0;
            const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + c);
            UNROLL
            for (int h = 0; h < 2; h++) {
                part.sums[4 * j + 2 * h] += low_bf16(pair);
                part.sums[4 * j + 2 * h + 1] += high_bf16(pair);
            }
        }
        part.store(out);
    }
};
