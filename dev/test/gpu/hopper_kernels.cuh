// hopper_kernels.cuh: two kernels with the instructions of hopper.h, for the tests of the emulator and for
// check_cuda.sh. They have the structure of kernels for training: hopper_gemm_kernel multiplies matrices while it
// stores the tile before ("ping-pong"), hopper_chain_kernel multiplies the result of a product, as attention does.
//
// `bug` plants one of the bugs that test_simt_hopper_bugs.cu lists; NoBugs compiles to nothing.
#pragma once
#include "cuda/hopper.h"

struct NoBugs {
    __device__ constexpr bool operator()(int) const { return false; }
};
struct OneBug {
    int planted;
    __device__ bool operator()(int number) const { return number == planted; }
};

constexpr int TILE_BYTES = 64 * 128;  // 64 rows of 64 bf16

// Rounds a warpgroup's 64 x N accumulators to bf16, adds what staging has (`add`), and puts them there, in tiles of 64
// x
// 64. `linear` leaves out the swizzle.
template <int R>
__device__ __forceinline__ void stage(unsigned char* staging, const float (&acc)[R], bool add, bool linear) {
    const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    UNROLL
    for (int j = 0; j < R / 4; j += 2) {  // blocks of 8 columns
        const int chunk = j + lane / 16, in_tile = linear ? row * 128 + chunk % 8 * 16 : swizzled(row, chunk % 8);
        unsigned char* at = staging + chunk / 8 * TILE_BYTES + in_tile;
        uint32_t other[4] = {}, result[4];
        if (add) ldmatrix_x4(other, at);
        UNROLL
        for (int i = 0; i < 4; i++)
            result[i] = pack_bf16(acc[4 * j + 2 * i] + __uint_as_float(other[i] << 16),
                                  acc[4 * j + 2 * i + 1] + __uint_as_float(other[i] & 0xffff0000u));
        stmatrix_x4(at, result);
    }
}

// D (M, N) = A (M, K) B + residual, bf16 with float sums. B is (N, K), or (K, N) if TRANSPOSED_B.
//
// A thread of warpgroup 0 loads tiles of k into a queue of STAGES. Warpgroups 1 and 2 own alternate tiles of 128 x BN
// and take them from the queue in the order of use: one multiplies while the other stores. Blocks of a cluster have the
// same columns, and each loads its part of B for all of them.
template <int BN, int CLUSTER>
struct GemmTiles {
    static constexpr int STAGES = 4, BM = 128, BK = 64;
    static constexpr int A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2, STAGING_BYTES = 64 * BN * 2;
    static constexpr int BARRIERS = STAGES * STAGE_BYTES + 2 * STAGING_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS + 8 * (2 * STAGES + 4);
    unsigned char* shared;
    uint64_t *full, *empty, *residual_full, *turn;
    int M, N, K, rank, cluster, clusters;

    __device__ GemmTiles(int M, int N, int K)
        : shared(simt::dynamic_shared<unsigned char, 1024>()),
          M(M),
          N(N),
          K(K),
          rank(cluster_rank()),
          cluster(blockIdx.x / CLUSTER),
          clusters(gridDim.x / CLUSTER) {
        full = reinterpret_cast<uint64_t*>(shared + BARRIERS);
        empty = full + STAGES;
        residual_full = empty + STAGES;
        turn = residual_full + 2;
    }
    __device__ int k_tiles() const { return (K + BK - 1) / BK; }
    __device__ int tiles() const { return (M + BM * CLUSTER - 1) / (BM * CLUSTER) * ((N + BN - 1) / BN); }
    __device__ int row(int tile) const { return (tile / ((N + BN - 1) / BN) * CLUSTER + rank) * BM; }
    __device__ int column(int tile) const { return tile % ((N + BN - 1) / BN) * BN; }
    __device__ unsigned char* a(int stage) const { return shared + stage * STAGE_BYTES; }
    __device__ unsigned char* b(int stage) const { return a(stage) + A_BYTES; }
    __device__ unsigned char* staging(int group) const { return shared + STAGES * STAGE_BYTES + group * STAGING_BYTES; }
};

template <int BN, int CLUSTER, bool TRANSPOSED_B, class Bugs>
__device__ __forceinline__ void load_gemm_tiles(const GemmTiles<BN, CLUSTER>& t, const CUtensorMap* a_map,
                                                const CUtensorMap* b_map, Bugs bug) {
    using T = GemmTiles<BN, CLUSTER>;
    constexpr int rows = (TRANSPOSED_B ? T::BK : BN) / CLUSTER;  // rows of B that each block loads
    constexpr uint16_t all = (1 << CLUSTER) - 1;
    int i = 0;
    for (int tile = t.cluster; tile < t.tiles(); tile += t.clusters)
        for (int k = 0; k < t.k_tiles(); k++, i++) {
            const int s = i % T::STAGES, round = i / T::STAGES, x = t.column(tile);
            mbarrier_wait(t.empty + s, (bug(11) ? round : round + 1) & 1);
            mbarrier_arrive_expect(t.full + s, bug(7) ? T::STAGE_BYTES - 16 : T::STAGE_BYTES);
            tma_load(t.a(s), a_map, k * T::BK, t.row(tile), t.full + s);
            unsigned char* to = t.b(s) + t.rank * rows * 128;
            if constexpr (TRANSPOSED_B) {
                UNROLL
                for (int j = 0; j < BN / 64; j++)
                    tma_load_multicast(to + j * TILE_BYTES, b_map, x + j * 64, k * T::BK + t.rank * rows, t.full + s,
                                       all);
            } else {
                tma_load_multicast(to, b_map, k * T::BK, x + t.rank * rows, t.full + s, all);
            }
        }
}

// One lane of a warp tells each block of the cluster that the warp has read the stage.
template <int BN, int CLUSTER>
__device__ __forceinline__ void release(const GemmTiles<BN, CLUSTER>& t, int stage) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) mbarrier_arrive(t.empty + stage);
    if (CLUSTER > 1 && lane == 1) mbarrier_arrive_at(t.empty + stage, t.rank ^ 1);
}

// turn: the number of the tile among those of the cluster.
template <int BN, int CLUSTER, bool TRANSPOSED_B, class Bugs>
__device__ __forceinline__ void multiply_gemm_tile(const GemmTiles<BN, CLUSTER>& t, float (&acc)[2][BN / 2], int turn,
                                                   Bugs bug) {
    using T = GemmTiles<BN, CLUSTER>;
    const int group = turn % 2, k_tiles = t.k_tiles();
    // The other group must have waited for all stages of its tile. Otherwise a wait for the phase after the next one of
    // a barrier would return at once.
    if (turn > 0 && !bug(15)) mbarrier_wait(t.turn + group, (turn - 1) / 2 & 1);
    for (int k = 0; k < k_tiles; k++) {
        const int i = turn * k_tiles + k, s = i % T::STAGES;
        mbarrier_wait(t.full + s, (bug(2) ? 0 : i / T::STAGES) & 1);
        const uint64_t a = descriptor_of(t.a(s));
        const uint64_t b = TRANSPOSED_B ? transposed_descriptor_of(t.b(s), bug(3) ? TILE_BYTES / 2 : TILE_BYTES)
                           : bug(12)    ? descriptor(t.b(s), 16, 512)
                                        : descriptor_of(t.b(s));
        if (!bug(10)) wgmma_fence();
        UNROLL
        for (int kk = 0; kk < T::BK / 16; kk++) {
            const uint64_t ak = a + kk * (bug(13) ? TRANSPOSED_K_STEP : K_STEP);
            const uint64_t bk = b + kk * (TRANSPOSED_B ? TRANSPOSED_K_STEP : K_STEP);
            wgmma<false, TRANSPOSED_B>(acc[0], ak, bk, k + kk > 0);
            wgmma<false, TRANSPOSED_B>(acc[1], ak + (TILE_BYTES >> 4), bk, k + kk > 0);
        }
        wgmma_commit();
        if (bug(5)) release(t, s);
        if (k > 0) wgmma_wait<1>();
        if (k > 0 && !bug(5)) release(t, (i - 1) % T::STAGES);
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive(t.turn + (group ^ 1));
    if (!bug(6)) wgmma_wait<0>();
    if (!bug(5)) release(t, (turn * k_tiles + k_tiles - 1) % T::STAGES);
}

template <int BN, int CLUSTER, bool TRANSPOSED_B, bool RESIDUAL, class Bugs>
__device__ __forceinline__ void multiply_gemm_tiles(const GemmTiles<BN, CLUSTER>& t, const CUtensorMap* out_map,
                                                    const CUtensorMap* residual_map, Bugs bug) {
    using T = GemmTiles<BN, CLUSTER>;
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    unsigned char* const staging = t.staging(group);
    float acc[2][BN / 2];
    const auto group_barrier = [&] { named_barrier(1 + group, 128); };
    const auto load_residual = [&](int tile, int half) {  // by one thread
        if (!bug(8)) store_wait_read<0>();
        mbarrier_arrive_expect(t.residual_full + group, T::STAGING_BYTES);
        for (int j = 0; j < BN / 64; j++)
            tma_load(staging + j * TILE_BYTES, residual_map, t.column(tile) + j * 64, t.row(tile) + half * 64,
                     t.residual_full + group);
    };
    int residuals = 0;
    for (int turn = group; t.cluster + turn * t.clusters < t.tiles(); turn += 2) {
        const int tile = t.cluster + turn * t.clusters;
        if (RESIDUAL && thread == 0) load_residual(tile, 0);
        multiply_gemm_tile<BN, CLUSTER, TRANSPOSED_B>(t, acc, turn, bug);
        UNROLL
        for (int half = 0; half < 2; half++) {
            if (RESIDUAL) {
                mbarrier_wait(t.residual_full + group, residuals++ & 1);
            } else {
                if (thread == 0 && !bug(14)) store_wait_read<0>();
                group_barrier();
            }
            stage(staging, acc[half], RESIDUAL, bug(4));
            if (!bug(1)) fence_proxy_async();
            group_barrier();
            if (thread != 0) continue;
            for (int j = 0; j < BN / 64; j++)
                tma_store(out_map, staging + j * TILE_BYTES, t.column(tile) + j * 64, t.row(tile) + half * 64);
            store_commit();
            if (RESIDUAL && half == 0) load_residual(tile, 1);
        }
    }
    if (thread == 0) store_wait<0>();
}

template <int BN, int CLUSTER, bool TRANSPOSED_B, bool RESIDUAL, class Bugs>
__global__ void __launch_bounds__(384, 1)
    hopper_gemm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                       const __grid_constant__ CUtensorMap out_map, const __grid_constant__ CUtensorMap residual_map,
                       int M, int N, int K, Bugs bug) {
    using T = GemmTiles<BN, CLUSTER>;
    const T t(M, N, K);
    if (threadIdx.x == 0) {
        for (int s = 0; s < T::STAGES; s++) {
            mbarrier_init(t.full + s, 1);
            mbarrier_init(t.empty + s, bug(9) ? 4 : 4 * CLUSTER);  // the warps of a group, of each block
        }
        for (int group = 0; group < 2; group++) {
            mbarrier_init(t.residual_full + group, 1);
            mbarrier_init(t.turn + group, 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (threadIdx.x < 32 && elect_one()) load_gemm_tiles<BN, CLUSTER, TRANSPOSED_B>(t, &a_map, &b_map, bug);
    } else {
        take_registers<240>();
        multiply_gemm_tiles<BN, CLUSTER, TRANSPOSED_B, RESIDUAL>(t, &out_map, &residual_map, bug);
    }
    if (CLUSTER > 1) cluster_sync();  // a block may not end while the other still arrives at its barriers
}

// For each of `tiles` blocks of 128 rows of X and Y (128 * tiles, 64): P = X Y' scaled by column, rounded to bf16; then
// out[0] += P' X and out[1] += P Y, where out is (2, 128, 64), bf16 with float sums. One block of threads.
//
// Warpgroup 0 loads X and Y (warp 0) and the scales (warp 1). Warpgroups 1 and 2 have 64 rows of P each, in registers
// for P Y, and in shared memory for P' X, of which each computes 64 rows.
struct ChainTiles {
    static constexpr int INPUT_BYTES = 4 * TILE_BYTES, P_BYTES = 4 * TILE_BYTES;  // bytes of one of two buffers
    static constexpr int P = 2 * INPUT_BYTES, STAGING = P + 2 * P_BYTES, SCALES = STAGING + 2 * TILE_BYTES;
    static constexpr int BARRIERS = SCALES + 2 * 512, SHARED_BYTES = BARRIERS + 8 * 6;
};

__device__ __forceinline__ void load_chain_tiles(unsigned char* shared, uint64_t* full, const CUtensorMap* x_map,
                                                 const CUtensorMap* y_map, const float* scales, int tiles) {
    uint64_t *const scaled = full + 2, *const empty = full + 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < tiles && warp < 2; i++) {
        const int s = i % 2;
        if (warp == 1) {
            float* to = reinterpret_cast<float*>(shared + ChainTiles::SCALES) + s * 128;
            mbarrier_wait(empty + s, (i / 2 + 1) & 1);
            for (int j = lane; j < 128; j += 32) to[j] = scales[i * 128 + j];
            mbarrier_arrive(scaled + s);
        } else if (lane == 0) {
            unsigned char* to = shared + s * ChainTiles::INPUT_BYTES;
            mbarrier_wait(empty + s, (i / 2 + 1) & 1);
            mbarrier_arrive_expect(full + s, ChainTiles::INPUT_BYTES);
            tma_load(to, x_map, 0, i * 128, full + s);
            tma_load(to + 2 * TILE_BYTES, y_map, 0, i * 128, full + s);
        }
    }
}

// sums += the products of tile i, of which x, y and scale are in shared memory.
template <class Bugs>
__device__ __forceinline__ void multiply_chain_tile(float (&sums)[2][32], int i, unsigned char* shared, uint64_t* full,
                                                    Bugs bug) {
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32, s = i % 2;
    unsigned char *const x = shared + s * ChainTiles::INPUT_BYTES, *const y = x + 2 * TILE_BYTES;
    unsigned char* const p_tile = shared + ChainTiles::P + (bug(24) ? 0 : s) * ChainTiles::P_BYTES;
    float p[64];
    if (!bug(22)) mbarrier_wait(full + s, i / 2 & 1);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < 4; k++)
        wgmma<false, false>(p, descriptor_of(x + group * TILE_BYTES) + k * K_STEP, descriptor_of(y) + k * K_STEP,
                            k > 0);
    wgmma_commit();
    if (!bug(27)) mbarrier_wait(full + 2 + s, i / 2 & 1);  // the scales
    if (!bug(23)) wgmma_wait<0>();
    const float* const scale = reinterpret_cast<float*>(shared + ChainTiles::SCALES) + s * 128 + lane % 4 * 2;
    uint32_t operand[8][4];
    UNROLL
    for (int j = 0; j < 16; j++) {  // blocks of 8 columns
        const float first = scale[8 * j], second = scale[8 * j + 1];
        operand[j / 2][j % 2 * 2] = pack_bf16(p[4 * j] * first, p[4 * j + 1] * second);
        operand[j / 2][j % 2 * 2 + 1] = pack_bf16(p[4 * j + 2] * first, p[4 * j + 3] * second);
    }
    UNROLL
    for (int j = 0; j < 16; j += 2)
        stmatrix_x4(
            p_tile + j / 8 * 2 * TILE_BYTES + swizzled(group * 64 + thread / 32 * 16 + lane % 16, (j + lane / 16) % 8),
            operand[j / 2]);
    if (!bug(25)) fence_proxy_async();
    if (!bug(26)) named_barrier(1, 256);
    wgmma_fence();
    const uint64_t own_p = transposed_descriptor_of(p_tile + group * 2 * TILE_BYTES, 0);
    const uint64_t own_x = transposed_descriptor_of(x, 0), own_y = transposed_descriptor_of(y, 0);
    UNROLL
    for (int k = 0; k < 8; k++)
        wgmma<true, true>(sums[0], own_p + k * TRANSPOSED_K_STEP, own_x + k * TRANSPOSED_K_STEP, i + k > 0);
    UNROLL
    for (int k = 0; k < 8; k++) wgmma<true>(sums[1], operand[k], own_y + k * TRANSPOSED_K_STEP, i + k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(full + 4 + s);
}

template <class Bugs>
__global__ void __launch_bounds__(384, 1)
    hopper_chain_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap y_map,
                        const __grid_constant__ CUtensorMap out_map, const float* scales, int tiles, Bugs bug) {
    unsigned char* const shared = simt::dynamic_shared<unsigned char, 1024>();
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared + ChainTiles::BARRIERS);
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            mbarrier_init(full + s, 1);
            mbarrier_init(full + 2 + s, 32);  // scaled
            mbarrier_init(full + 4 + s, 8);   // empty
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<40>();
        load_chain_tiles(shared, full, &x_map, &y_map, scales, tiles);
        return;
    }
    take_registers<232>();
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const auto group_barrier = [&] { named_barrier(2 + group, 128); };
    float sums[2][32];
    for (int i = 0; i < tiles; i++) multiply_chain_tile(sums, i, shared, full, bug);
    unsigned char* const staging = shared + ChainTiles::STAGING + group * TILE_BYTES;
    UNROLL
    for (int part = 0; part < 2; part++) {
        if (thread == 0) store_wait_read<0>();
        group_barrier();
        stage(staging, sums[part], false, false);
        if (!bug(21)) fence_proxy_async();
        group_barrier();
        if (thread == 0) tma_store(&out_map, staging, 0, part * 128 + group * 64);
        if (thread == 0) store_commit();
    }
    if (thread == 0) store_wait<0>();
}
