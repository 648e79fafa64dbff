// fp8.cuh: operands of the FP8 matmuls: the largest magnitude of a tensor, and its FP8 codes, in rows and transposed.
//
// cuBLASLt's FP8 matmuls take both operands with the inner dimension contiguous, so forward reads rows, and backward
// reads transposed copies. One pass reads a bf16 tensor once and writes the copies that a matmul needs: 3 bytes per
// element for one copy, 4 for two, which bounds the time (210 MB for N = 16384, 3200 channels). With two copies the
// same pass can add up the columns, which are the gradient of a bias. Every result depends only on the tensor: the
// maximum is the same in any order, a code depends on its element and on the maximum, and the order of the sums on the
// shape.
#pragma once
#include "base/device.h"
#include "cuda/amax.cuh"
#include "cuda/matmul.h"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int FP8_THREADS = 256;
constexpr int FP8_COLUMNS = 64;  // columns of a tile, which has FP8_ROWS rows: 128 bytes in each direction

// *amax = the larger of itself and the magnitudes of x (count). Grid: blocks of 256 threads; a thread owns every
// (gridDim.x * 256)-th vector of 16 bytes.
__global__ void __launch_bounds__(FP8_THREADS) amax_kernel(float* amax, const bf16* x, int64_t count) {
    constexpr int size = Vec<bf16>::size;
    Amax largest;
    const int64_t step = int64_t(gridDim.x) * FP8_THREADS * size;
    int64_t i = (int64_t(blockIdx.x) * FP8_THREADS + threadIdx.x) * size;
    for (; i + size <= count; i += step) largest.add(load128(x + i));  // not streaming: the cast reads x again
    for (; i < count; i++) largest.add(x[i]);                          // one thread has the rest, which fills no vector
    largest.raise_by_block(amax);
}

// Rows of four codes each become columns: byte j of out[i] is byte i of in[j].
__device__ inline void transpose_codes(uint32_t (&out)[4], const uint32_t (&in)[4]) {
    const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140), low23 = __byte_perm(in[2], in[3], 0x5140);
    const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362), high23 = __byte_perm(in[2], in[3], 0x7362);
    out[0] = __byte_perm(low01, low23, 0x5410);
    out[1] = __byte_perm(low01, low23, 0x7632);
    out[2] = __byte_perm(high01, high23, 0x5410);
    out[3] = __byte_perm(high01, high23, 0x7632);
}

// sums[c] = the sum of column c of a tile of columns first_c, first_c + 1, ... below C. Thread t has the partial
// sums of 8 neighbouring columns, from first_c + t % 8 * 8 on. All threads of the block call this.
__device__ inline void add_columns(float* sums, float (&partial)[Vec<bf16>::size], int first_c, int C) {
    constexpr int size = Vec<bf16>::size, groups = FP8_COLUMNS / size, warps = FP8_THREADS / WARP_SIZE;
    SHARED(of_warps, float[warps][FP8_COLUMNS]);
    const int t = int(threadIdx.x), lane = t % WARP_SIZE;
    UNROLL
    for (int k = 0; k < size; k++) {
        for (int distance = groups; distance < WARP_SIZE; distance *= 2)
            partial[k] += __shfl_xor_sync(FULL_MASK, partial[k], distance);
        if (lane < groups) of_warps[t / WARP_SIZE][lane * size + k] = partial[k];
    }
    __syncthreads();
    if (t >= FP8_COLUMNS || first_c + t >= C) return;
    float total = 0.0f;
    for (int w = 0; w < warps; w++) total += of_warps[w][t];
    sums[first_c + t] = total;
}

// The codes of x (R, C): rows (R, C), and transposed (C, padded_R), where columns from R on are zero; the kernel writes
// those of the two that ROWS and TRANSPOSED name. *inverse = what codes are multiplied by when they are read. C is a
// multiple of 16, padded_R is R rounded up to a multiple of 16. With SUMS, sums (gridDim.y, C) receives the column
// sums of x over the rows of each tile.
//
// Grid: (ceil(C / 64), ceil(R / 128)) blocks of 256 threads. A thread converts a piece of 4 rows and 8 columns.
// Transposed pieces pass through shared memory: column c has 8 chunks of 16 codes, and chunk k is at position k ^ (c /
// 8). The 32 lanes of a store have 8 values of c / 8 and 4 neighbouring words of a chunk, and the 8 lanes of a 16-byte
// load have the chunks of one column: both are in 32 different banks.
template <class Format, bool ROWS, bool TRANSPOSED, bool SUMS>
__global__ void __launch_bounds__(FP8_THREADS)
    fp8_cast_kernel(uint8_t* rows, uint8_t* transposed, float* inverse, float* sums, const bf16* x, const float* amax,
                    int R, int C, int padded_R) {
    constexpr int size = Vec<bf16>::size, piece_rows = 4, chunk = 16, chunks = FP8_ROWS / chunk;
    const Fp8Scale s = fp8_scale<Format>(*amax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *inverse = s.inverse;
    const int group = threadIdx.x % (FP8_COLUMNS / size), piece = threadIdx.x / (FP8_COLUMNS / size);
    const int first_r = int(blockIdx.y) * FP8_ROWS, first_c = int(blockIdx.x) * FP8_COLUMNS;
    const int r = first_r + piece * piece_rows, c = first_c + group * size;

    uint32_t left[piece_rows] = {}, right[piece_rows] = {};
    float sum[size] = {};
    UNROLL
    for (int j = 0; j < piece_rows; j++) {
        if (r + j >= R || c >= C) continue;
        const int64_t at = int64_t(r + j) * C + c;
        const Floats<bf16> v = widened(load128cs(x + at));
        if constexpr (SUMS) {
            UNROLL
            for (int k = 0; k < size; k++) sum[k] += v[k];
        }
        left[j] = pack_fp8<Format>(v[0] * s.scale, v[1] * s.scale, v[2] * s.scale, v[3] * s.scale);
        right[j] = pack_fp8<Format>(v[4] * s.scale, v[5] * s.scale, v[6] * s.scale, v[7] * s.scale);
        if constexpr (ROWS) *reinterpret_cast<uint64_t*>(rows + at) = left[j] | uint64_t(right[j]) << 32;
    }
    if constexpr (SUMS) add_columns(sums + int64_t(blockIdx.y) * C, sum, first_c, C);
    if constexpr (TRANSPOSED) {
        SHARED(tile, Vec<uint32_t>[FP8_COLUMNS * chunks]);
        const int position = (piece / 4) ^ group;
        const auto put = [&](int column, const uint32_t(&of_rows)[piece_rows]) {
            uint32_t columns[4];
            transpose_codes(columns, of_rows);
            UNROLL
            for (int i = 0; i < 4; i++) tile[(column + i) * chunks + position][piece % 4] = columns[i];
        };
        put(group * size, left);
        put(group * size + 4, right);
        __syncthreads();
        for (int i = int(threadIdx.x); i < FP8_COLUMNS * chunks; i += FP8_THREADS) {
            const int column = i / chunks, k = i % chunks, to_r = first_r + k * chunk;
            if (first_c + column >= C || to_r >= padded_R) continue;
            store128(reinterpret_cast<uint32_t*>(transposed + int64_t(first_c + column) * padded_R + to_r),
                     tile[column * chunks + (k ^ (column / size))]);
        }
    }
}

namespace gpu {

inline void raise_amax(float* amax, const bf16* x, int64_t count, Stream stream) {
    constexpr int64_t per_thread = 8;  // vectors, at least, so that few blocks wait for each other's atomics
    constexpr int max_blocks = 132 * 8;
    if (count == 0) return;
    const int64_t blocks = ceil_div(count, FP8_THREADS * Vec<bf16>::size * per_thread);
    simt::launch(amax_kernel, int(blocks < max_blocks ? blocks : max_blocks), FP8_THREADS, 0, stream, amax, x, count);
}

template <class Format>
void cast_to_fp8(uint8_t* rows, uint8_t* transposed, float* inverse, float* sums, const bf16* x, const float* amax,
                 int R, int C, Stream stream) {
    INVARIANT(C % 16 == 0 && (rows || transposed) && (!sums || (rows && transposed)), "FP8 codes of (%d, %d)", R, C);
    const dim3 grid(unsigned(ceil_div(C, FP8_COLUMNS)), unsigned(ceil_div(R, FP8_ROWS)));
    const auto kernel = !transposed ? fp8_cast_kernel<Format, true, false, false>
                        : !rows     ? fp8_cast_kernel<Format, false, true, false>
                        : !sums     ? fp8_cast_kernel<Format, true, true, false>
                                    : fp8_cast_kernel<Format, true, true, true>;
    simt::launch(kernel, grid, FP8_THREADS, 0, stream, rows, transposed, inverse, sums, x, amax, R, C, round_up(R, 16));
}

}  // namespace gpu
