// bias.cuh: the gradient of a bias, which is the sum of the columns of dout (N, OC), and the second stage that it
// shares with LayerNorm's backward pass: the sum of partial rows.
//
// A block owns 128 bytes of channels and a piece of the rows; a warp reads four rows at a time, 128 bytes of each, so
// that all lanes work at any width of GPT-2. dout is read once: N*OC*sizeof(floatX) bytes, which bounds the time (302
// MB for N = 65536, OC = 2304, bf16). Sums are float; the pieces and the order within them depend on N and OC alone,
// and no atomics are used: the same dout gives the same bits.
#pragma once
#include "cuda/simt.h"
#include "ops/ops.h"

// ---- the sum of partial rows

// Where the sums of up to three groups of columns go.
struct RowSums {
    float* out[3];
};

// sums.out[g][c] (+)= partial[0, g, c] + ... + partial[rows - 1, g, c]; partial (rows, groups, C).
// Grid: 32 columns per block in x, a group in y. Warp w adds rows w, w + 32, ..., then column w of the 32 sums.
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

// Queues the sum of partial (rows, groups, C) into sums.
inline void sum_rows(RowSums sums, const float* partial, int rows, int groups, int C, bool accumulate, Stream stream) {
    const dim3 grid(unsigned(ceil_div(C, WARP_SIZE)), unsigned(groups));
    simt::launch(accumulate ? sum_rows_kernel<true> : sum_rows_kernel<false>, grid, WARP_SIZE * WARP_SIZE, 0, stream,
                 sums, partial, rows, C);
}

// ---- the gradient of a bias

constexpr int BIAS_WARPS = 8;
constexpr int BIAS_LANES = 8;                                     // of a warp, side by side in a row: 128 bytes
constexpr int BIAS_ROWS = BIAS_WARPS * (WARP_SIZE / BIAS_LANES);  // that a block reads at a time
constexpr int BIAS_BLOCKS = 132 * 6;  // all that an H100 runs at once with 40 registers per thread

template <class floatX>
constexpr int BIAS_WIDTH = BIAS_LANES* Vec<floatX>::size;  // channels of a block

// Rows of a piece, each of which gives one partial row: as few pieces as fill the GPU, and none too short to be worth
// the second stage.
template <class floatX>
int bias_piece(int N, int OC) {
    const int columns = ceil_div(OC, BIAS_WIDTH<floatX>), most = BIAS_BLOCKS / columns > 0 ? BIAS_BLOCKS / columns : 1;
    const int rows = ceil_div(N, most);
    return round_up(rows > 4 * BIAS_ROWS ? rows : 4 * BIAS_ROWS, BIAS_ROWS);
}

// partial[blockIdx.y, c] = sum of dout[n, c] over the rows of piece blockIdx.y. partial (gridDim.y, OC).
template <class floatX>
__global__ void __launch_bounds__(BIAS_WARPS* WARP_SIZE)
    bias_backward_kernel(float* partial, const floatX* dout, int N, int OC, int piece) {
    using V = Vec<floatX>;
    constexpr int ahead = 4;  // loads on their way at once, per thread
    SHARED(tile, float[BIAS_WARPS][BIAS_WIDTH<floatX>]);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int own = lane % BIAS_LANES * V::size, c = int(blockIdx.x) * BIAS_WIDTH<floatX> + own;
    const int begin = int(blockIdx.y) * piece, end = N - begin < piece ? N : begin + piece;

    float sum[V::size] = {};
    const auto add = [&](const V& x) {
        UNROLL
        for (int k = 0; k < V::size; k++) sum[k] += float(x[k]);
    };
    if (c < OC) {
        int n = begin + int(threadIdx.x) / BIAS_LANES;
        for (; n < end - (ahead - 1) * BIAS_ROWS; n += ahead * BIAS_ROWS) {
            V x[ahead];
            UNROLL
            for (int j = 0; j < ahead; j++) x[j] = load128(dout + int64_t(n + j * BIAS_ROWS) * OC + c);
            UNROLL
            for (int j = 0; j < ahead; j++) add(x[j]);
        }
        for (; n < end; n += BIAS_ROWS) add(load128(dout + int64_t(n) * OC + c));
    }

    UNROLL
    for (int k = 0; k < V::size; k++) {
        for (int distance = BIAS_LANES; distance < WARP_SIZE; distance *= 2)
            sum[k] += __shfl_xor_sync(FULL_MASK, sum[k], distance);
        if (lane < BIAS_LANES) tile[warp][own + k] = sum[k];
    }
    __syncthreads();

    const int t = int(threadIdx.x), out = int(blockIdx.x) * BIAS_WIDTH<floatX> + t;
    if (t >= BIAS_WIDTH<floatX> || out >= OC) return;
    float total = 0.0f;
    for (int w = 0; w < BIAS_WARPS; w++) total += tile[w][t];
    partial[int64_t(blockIdx.y) * OC + out] = total;
}

namespace gpu {

// Bytes of scratch that bias_backward needs.
template <class floatX>
int64_t bias_scratch_bytes(int N, int OC) {
    return int64_t(ceil_div(N, bias_piece<floatX>(N, OC))) * OC * int64_t(sizeof(float));
}

// dbias = column sums of dout, or += with accumulate. Not an operation of its own in ops.inc: part of matmul_backward,
// where no product delivers the sums as it reads dout.
template <class floatX>
void bias_backward(float* dbias, const floatX* dout,  // (OC), (N, OC)
                   int N, int OC, bool accumulate, void* scratch, Stream stream) {
    ENSURE(N >= 1 && OC >= 1, "bias_backward of %d rows of %d: there must be at least one of each", N, OC);
    ENSURE(OC % Vec<floatX>::size == 0, "bias_backward: %d channels must be a multiple of %d", OC, Vec<floatX>::size);
    const int piece = bias_piece<floatX>(N, OC), pieces = ceil_div(N, piece);
    float* partial = static_cast<float*>(scratch);
    const dim3 grid(unsigned(ceil_div(OC, BIAS_WIDTH<floatX>)), unsigned(pieces));
    simt::launch(bias_backward_kernel<floatX>, grid, BIAS_WARPS * WARP_SIZE, 0, stream, partial, dout, N, OC, piece);
    sum_rows({{dbias}}, partial, pieces, 1, OC, accumulate, stream);
}

}  // namespace gpu
