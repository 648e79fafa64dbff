// muon.cuh: the elementwise operations of Muon (train/muon.h), whose matmuls are the model's.
//
// In muon_update a thread owns one element, because a rank's shard may begin at any element of a matrix. A warp then
// reads and writes 64 or 128 consecutive bytes of each array.
//
// Memory traffic bounds the time of all kernels here. muon_momentum moves 16 bytes per element with moments in fp32,
// muon_update 12 (in bf16 direction read, master read and written, weight written), or 6 in bf16 without master
// weights. In bf16 muon_stack moves 10, of which the L2 cache may hold 4, muon_unstack 4, and muon_polynomial 6 for
// each element of a product.
#pragma once
#include <cmath>

#include "base/random.h"
#include "cuda/moments.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

// Grid of all kernels here: blocks of 256 threads, a thread per element.
constexpr int MUON_THREADS = 256;
constexpr int64_t MUON_SQUARES_BYTES = MuonBatch::MOST * WARP_SIZE * int64_t(sizeof(float));

__device__ inline int64_t muon_element() { return int64_t(blockIdx.x) * MUON_THREADS + threadIdx.x; }

// A thread owns 4 elements, as in the kernels of moments.cuh.
template <MomentDtype MOMENTS>
__global__ void __launch_bounds__(MOMENT_THREADS)
    muon_momentum_kernel(float* out, Moment m, const float* grad, const float* factor, int64_t begin, int64_t count,
                         float mu, Philox random) {
    using enum WhichMoment;
    constexpr int per_thread = PER_MOMENT_THREAD;
    const int64_t own = first_of_moment_thread(), at = own < count ? own : 0;
    const bool inside = own < count;
    const float f = *factor;
    if (!std::isfinite(f)) {  // the same for all threads
        if (inside) store128cs(out + at, Vec<float>{0.0f, 0.0f, 0.0f, 0.0f});
        return;
    }
    const Vec<float> grads = load128cs(grad + at);
    float means[per_thread];
    load_moment<MOMENTS, first>(means, m, at);
    Vec<float> momentum;
    UNROLL
    for (int k = 0; k < per_thread; k++) {
        const float g = grads[k] * f;
        means[k] = mu * means[k] + (1.0f - mu) * g;
        momentum[k] = mu * means[k] + (1.0f - mu) * g;
    }
    const MomentBits<per_thread> bits(random, begin + at);
    save_moment<MOMENTS, first>(m, at, means, &bits, inside);
    if (inside) store128cs(out + at, momentum);
}

// sums[i][blockIdx.x] = sum of squares of a WARP_SIZEth of matrix i. Grid: (WARP_SIZE, count) blocks.
__global__ void __launch_bounds__(MUON_THREADS) muon_squares_kernel(float* sums, MuonBatch batch) {
    const int i = int(blockIdx.y);
    const int64_t size = int64_t(batch.rows) * batch.cols, part = ceil_div(size, int64_t(WARP_SIZE));
    const int64_t begin = blockIdx.x * part, end = begin + part < size ? begin + part : size;
    float sum = 0.0f;
    for (int64_t k = begin + threadIdx.x; k < end; k += MUON_THREADS)
        sum += batch.matrices[i][k] * batch.matrices[i][k];
    const float total = block_sum(sum);
    if (threadIdx.x == 0) sums[i * WARP_SIZE + int(blockIdx.x)] = total;
}

constexpr int MUON_TILE = 32;

// out = a tile of inp (rows, cols) times scale. With transposed, out is (cols, rows). The tile goes through shared
// memory, so that both are accessed along rows. A block of 32 x 8 threads calls it.
template <class Out, class In>
__device__ void copy_tile(Out* out, const In* inp, int rows, int cols, bool transposed, float scale, int first_row,
                          int first_col) {
    SHARED(tile, float[MUON_TILE][MUON_TILE + 1]);
    const int lane = int(threadIdx.x) % MUON_TILE, first = int(threadIdx.x) / MUON_TILE;
    constexpr int step = MUON_THREADS / MUON_TILE;
    for (int i = first; i < MUON_TILE; i += step)
        if (first_row + i < rows && first_col + lane < cols)
            tile[i][lane] = float(inp[int64_t(first_row + i) * cols + first_col + lane]) * scale;
    __syncthreads();
    for (int i = first; i < MUON_TILE; i += step) {
        const int row = first_row + (transposed ? lane : i), col = first_col + (transposed ? i : lane);
        if (row >= rows || col >= cols) continue;
        const int64_t at = transposed ? int64_t(col) * rows + row : int64_t(row) * cols + col;
        out[at] = Out(tile[row - first_row][col - first_col]);
    }
}

// A block has a tile of the stack's matrix blockIdx.z. sums: those of muon_squares_kernel.
template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS) muon_stack_kernel(floatX* stack, MuonBatch batch, const float* sums) {
    const int i = int(blockIdx.z), row = int(blockIdx.y) * MUON_TILE, col = int(blockIdx.x) * MUON_TILE;
    const bool transposed = batch.transposed[i];
    const float squares = warp_sum(sums[i * WARP_SIZE + int(threadIdx.x) % WARP_SIZE]);
    copy_tile(stack + i * int64_t(batch.rows) * batch.cols, batch.matrices[i], batch.rows_of(i), batch.cols_of(i),
              transposed, 1.0f / (sqrtf(squares) + 1e-7f), transposed ? col : row, transposed ? row : col);
}

template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS) muon_unstack_kernel(MuonBatch batch, const floatX* stack) {
    const int i = int(blockIdx.z), row = int(blockIdx.y) * MUON_TILE, col = int(blockIdx.x) * MUON_TILE;
    copy_tile(reinterpret_cast<floatX*>(batch.matrices[i]), stack + i * int64_t(batch.rows) * batch.cols, batch.rows,
              batch.cols, batch.transposed[i], 1.0f, row, col);
}

// The elements of a matrix's diagonal are n + 1 apart.
template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_polynomial_kernel(floatX* out, const floatX* matrices, const floatX* squares, int64_t count, uint32_t n,
                           float a, float b, float c) {
    const int64_t i = muon_element();
    if (i >= count) return;
    const uint64_t at = uint64_t(i) % (uint64_t(n) * n);
    out[i] = floatX(b * float(matrices[i]) + c * float(squares[i]) + (at % (n + uint64_t(1)) == 0 ? a : 0.0f));
}

// master is null if weight holds the only copy of the value: in fp32, or without master weights.
template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_update_kernel(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t begin,
                       int64_t count, float scale, float weight_decay, float lr, Philox random) {
    const int64_t i = muon_element();
    if (i >= count || !std::isfinite(*factor)) return;
    const float w = master ? master[i] : float(weight[i]);
    const float next = w - lr * (scale * float(direction[i]) + weight_decay * w);
    if (master) master[i] = next;
    if (master || sizeof(floatX) == sizeof(float)) {
        weight[i] = floatX(next);
    } else {
        uint32_t words[4];
        random.words(words, uint64_t(begin + i) / 8);
        weight[i] = floatX(round_randomly(next, Philox::bits16(words, int((begin + i) % 8))));
    }
}

template <class... P>
void launch_muon(void (*kernel)(P...), int64_t count, Stream stream, std::type_identity_t<P>... args) {
    if (count > 0) simt::launch(kernel, blocks_for(count, MUON_THREADS), MUON_THREADS, 0, stream, args...);
}

inline void gpu::muon_momentum(float* out, Moment m, const float* grad, const float* factor, int64_t begin,
                               int64_t count, float mu, uint64_t seed, int step, Stream stream) {
    check_range(begin, count, step);
    if (count == 0) return;
    with_moments(m.dtype, [&](auto moments) {
        simt::launch(muon_momentum_kernel<moments>, moment_blocks(count), MOMENT_THREADS, 0, stream, out, m, grad,
                     factor, begin, count, mu, Philox{seed, MOMENT_STREAMS + uint64_t(step)});
    });
}

inline dim3 muon_tiles(const MuonBatch& batch) {
    return dim3(unsigned(ceil_div(batch.cols, MUON_TILE)), unsigned(ceil_div(batch.rows, MUON_TILE)),
                unsigned(batch.count));
}

template <class floatX>
void gpu::muon_stack(floatX* stack, const MuonBatch& batch, Stream stream) {
    auto* sums = static_cast<float*>(device_scratch(MUON_SQUARES_BYTES));
    simt::launch(muon_squares_kernel, dim3(WARP_SIZE, unsigned(batch.count)), MUON_THREADS, 0, stream, sums, batch);
    simt::launch(muon_stack_kernel<floatX>, muon_tiles(batch), MUON_THREADS, 0, stream, stack, batch, sums);
}

template <class floatX>
void gpu::muon_unstack(const MuonBatch& batch, const floatX* stack, Stream stream) {
    simt::launch(muon_unstack_kernel<floatX>, muon_tiles(batch), MUON_THREADS, 0, stream, batch, stack);
}

template <class floatX>
void gpu::muon_polynomial(floatX* out, const floatX* matrices, const floatX* squares, int count, int n, float a,
                          float b, float c, Stream stream) {
    launch_muon(muon_polynomial_kernel<floatX>, int64_t(count) * n * n, stream, out, matrices, squares,
                int64_t(count) * n * n, uint32_t(n), a, b, c);
}

template <class floatX>
void gpu::muon_update(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t begin,
                      int64_t count, float scale, AdamWConfig config, float lr, int step, Stream stream) {
    if constexpr (sizeof(floatX) == sizeof(float)) master = nullptr;
    launch_muon(muon_update_kernel<floatX>, count, stream, weight, master, direction, factor, begin, count, scale,
                config.weight_decay, lr, Philox{config.seed, ROUNDING_STREAMS + uint64_t(step)});
}
