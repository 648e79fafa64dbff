// bias.cuh: the gradient of a bias, which is the column sums of dout (N, OC). Also the second stage of that reduction,
// the sum of partial rows, which LayerNorm's backward pass uses too.
//
// A block owns 128 bytes of channels and a chunk of the rows. A warp reads four rows at a time, 128 bytes of each, so
// that all lanes have work at every width of GPT-2. dout is read once: N*OC*sizeof(floatX) bytes, which bounds the time
// (302 MB for N = 65536, OC = 2304, bf16). Sums are float. The chunks and the order of the sums depend only on N and
// OC, and no atomics are used, so the same dout gives the same bits.
#pragma once
#include "cuda/simt.h"
#include "ops/ops.h"

// ---- Sum of partial rows

// Output arrays of up to three groups of columns.
struct RowSums {
    float* out[3];
};

// sums.out[g][c] = (+= with ACCUMULATE) partial[0, g, c] + ... + partial[rows - 1, g, c]; partial (rows, groups, C).
//
// Grid: (ceil(C / 32), groups) blocks of 32 warps; a block owns 32 columns. Warp w adds rows w, w + 32, ...; then, of
// the 32 partial sums of each column, warp w adds those of column w.
template <bool ACCUMULATE>
__global__ void __launch_bounds__(WARP_SIZE* WARP_SIZE)
    sum_rows_kernel(RowSums sums, const float* partial, int rows, int C) {
    SHARED(tile, float[WARP_SIZE][WARP_SIZE + 1]);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first = int(blockIdx.x) * WARP_SIZE, group = int(blockIdx.y), groups = int(gridDim.y);

    float sum = 0.0f;
    if (first + lane < C)
        for (int r = warp; r < rows; r += WARP_SIZE) sum += partial[(int64_t(r) * groups + group) * C + first + lane];
    tile[warp][lane] = sum;
    __syncthreads();

    const float total = warp_sum(tile[lane][warp]);
    float* out = group == 0 ? sums.out[0] : group == 1 ? sums.out[1] : sums.out[2];
    if (lane == 0 && first + warp < C) out[first + warp] = ACCUMULATE ? out[first + warp] + total : total;
}

// Launches sum_rows_kernel for partial (rows, groups, C).
inline void sum_rows(RowSums sums, const float* partial, int rows, int groups, int C, bool accumulate, Stream stream) {
    const dim3 grid(unsigned(ceil_div(C, WARP_SIZE)), unsigned(groups));
    simt::launch(accumulate ? sum_rows_kernel<true> : sum_rows_kernel<false>, grid, WARP_SIZE * WARP_SIZE, 0, stream,
                 sums, partial, rows, C);
}

// ---- Gradient of a bias

constexpr int BIAS_WARPS = 8;
constexpr int BIAS_LANES = 8;                                     // lanes that read a row together: 128 bytes
constexpr int BIAS_ROWS = BIAS_WARPS * (WARP_SIZE / BIAS_LANES);  // rows that a block reads at a time
constexpr int BIAS_BLOCKS = 132 * 6;  // blocks that an H100 runs at once, with 40 registers per thread

template <class floatX>
constexpr int BIAS_WIDTH = BIAS_LANES* Vec<floatX>::size;  // channels per block

// Rows per chunk. Each chunk gives one partial row. There are only as many chunks as fill the GPU, and no chunk is so
// short that the second stage would cost more than it gains.
template <class floatX>
int bias_chunk_rows(int N, int OC) {
    const int columns = ceil_div(OC, BIAS_WIDTH<floatX>);
    const int max_chunks = BIAS_BLOCKS / columns > 0 ? BIAS_BLOCKS / columns : 1;
    const int rows = ceil_div(N, max_chunks);
    return round_up(rows > 4 * BIAS_ROWS ? rows : 4 * BIAS_ROWS, BIAS_ROWS);
}

// partial[blockIdx.y, c] = sum of dout[n, c] over the rows n of chunk blockIdx.y. partial (gridDim.y, OC).
//
// Grid: (ceil(OC / BIAS_WIDTH), chunks) blocks of 8 warps. A thread owns 16 bytes of channels and every 32nd row of the
// chunk; shuffles and shared memory then add up the threads of a block that own the same channels.
template <class floatX>
__global__ void __launch_bounds__(BIAS_WARPS* WARP_SIZE)
    bias_backward_kernel(float* partial, const floatX* dout, int N, int OC, int chunk_rows) {
    using V = Vec<floatX>;
    constexpr int loads_in_flight = 4;  // loads in flight per thread
    SHARED(tile, float[BIAS_WARPS][BIAS_WIDTH<floatX>]);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int own_channel = lane % BIAS_LANES * V::size, c = int(blockIdx.x) * BIAS_WIDTH<floatX> + own_channel;
    const int begin = int(blockIdx.y) * chunk_rows, end = N - begin < chunk_rows ? N : begin + chunk_rows;

    float sum[V::size] = {};
    const auto add = [&](const V& x) {
        UNROLL
        for (int k = 0; k < V::size; k++) sum[k] += float(x[k]);
    };
    if (c < OC) {
        int n = begin + int(threadIdx.x) / BIAS_LANES;
        for (; n < end - (loads_in_flight - 1) * BIAS_ROWS; n += loads_in_flight * BIAS_ROWS) {
            V x[loads_in_flight];
            UNROLL
            for (int j = 0; j < loads_in_flight; j++) x[j] = load128(dout + int64_t(n + j * BIAS_ROWS) * OC + c);
            UNROLL
            for (int j = 0; j < loads_in_flight; j++) add(x[j]);
        }
        for (; n < end; n += BIAS_ROWS) add(load128(dout + int64_t(n) * OC + c));
    }

    UNROLL
    for (int k = 0; k < V::size; k++) {
        for (int distance = BIAS_LANES; distance < WARP_SIZE; distance *= 2)
            sum[k] += __shfl_xor_sync(FULL_MASK, sum[k], distance);
        if (lane < BIAS_LANES) tile[warp][own_channel + k] = sum[k];
    }
    __syncthreads();

    const int t = int(threadIdx.x), out = int(blockIdx.x) * BIAS_WIDTH<floatX> + t;
    if (t >= BIAS_WIDTH<floatX> || out >= OC) return;
    float total = 0.0f;
    for (int w = 0; w < BIAS_WARPS; w++) total += tile[w][t];
    partial[int64_t(blockIdx.y) * OC + out] = total;
}

namespace gpu {

// Bytes of device_scratch that bias_backward uses.
template <class floatX>
int64_t bias_scratch_bytes(int N, int OC) {
    return int64_t(ceil_div(N, bias_chunk_rows<floatX>(N, OC))) * OC * int64_t(sizeof(float));
}

// dbias (OC) = column sums of dout (N, OC), or += with accumulate. It is not an operation in ops.inc, but a part of
// matmul_backward.
template <class floatX>
void bias_backward(float* dbias, const floatX* dout,  // (OC), (N, OC)
                   int N, int OC, bool accumulate, void* scratch, Stream stream) {
    ENSURE(N >= 1 && OC >= 1, "bias_backward of %d rows of %d: there must be at least one of each", N, OC);
    ENSURE(OC % Vec<floatX>::size == 0, "bias_backward: %d channels must be a multiple of %d", OC, Vec<floatX>::size);
    const int chunk_rows = bias_chunk_rows<floatX>(N, OC), chunks = ceil_div(N, chunk_rows);
    float* partial = static_cast<float*>(scratch);
    const dim3 grid(unsigned(ceil_div(OC, BIAS_WIDTH<floatX>)), unsigned(chunks));
    simt::launch(bias_backward_kernel<floatX>, grid, BIAS_WARPS * WARP_SIZE, 0, stream, partial, dout, N, OC,
                 chunk_rows);
    sum_rows({{dbias}}, partial, chunks, 1, OC, accumulate, stream);
}

// dbias (OC) = the sum of the rows of parts (rows, OC), or += with accumulate.
inline void sum_bias_parts(float* dbias, const float* parts, int rows, int OC, bool accumulate, Stream stream) {
    sum_rows({{dbias}}, parts, rows, 1, OC, accumulate, stream);
}

}  // namespace gpu
