// encoder.cuh: token and position embeddings.
//
// Forward: a warp owns a row; 2*N*C*sizeof(floatX) bytes move, the positions' C*T come from the second-level cache.
//
// Backward reads dout once for the positions and once for the tokens, 2*N*C*sizeof(floatX), which bounds the time (201
// MB for N = 65536, C = 768, bf16). Any number of rows of dout may meet in one row of dwte. So that they are added in
// one order without atomics on floats, the rows are sorted by token first, stably, on the device: a radix sort in
// which every thread's keys are fixed. Then a warp adds up 32 rows in sorted order, writes what it has whole, and
// leaves for the second stage the parts of tokens that its neighbours have too: a token that fills the batch is as
// quick.
#pragma once
#include "base/device.h"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int ENCODER_WARPS = 8;

// Grid: one warp per row.
template <class floatX>
__global__ void __launch_bounds__(ENCODER_WARPS* WARP_SIZE)
    encoder_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int N, int T, int C) {
    using V = Vec<floatX>;
    const int lane = threadIdx.x % WARP_SIZE, n = int(blockIdx.x * ENCODER_WARPS + threadIdx.x / WARP_SIZE);
    if (n >= N) return;
    const floatX *token = wte + int64_t(tokens[n]) * C, *position = wpe + int64_t(n % T) * C;
    for (int c = lane * V::size; c < C; c += WARP_SIZE * V::size) {
        const V a = load128(token + c), b = load128(position + c);
        V sum;
        for (int k = 0; k < V::size; k++) sum[k] = floatX(float(a[k]) + float(b[k]));
        store128(out + int64_t(n) * C + c, sum);  // plain store: LayerNorm reads it
    }
}

// ---- sorting rows by token

constexpr int SORT_THREADS = 256, SORT_DIGITS = 256, SORT_DIGIT_BITS = 8;
constexpr int SORT_ROUNDS = 4, SORT_TILE = SORT_ROUNDS * SORT_THREADS;  // keys of a thread, of a block
constexpr int SORT_SCAN_THREADS = 1024;

struct alignas(8) TokenRow {
    int token, n;
};

// What a pass of the sort reads: the tokens themselves in the first, then the pairs that the pass before it wrote.
struct SortInput {
    const int* tokens;
    const TokenRow* rows;  // null in the first pass
    __device__ TokenRow operator[](int i) const { return rows ? rows[i] : TokenRow{tokens[i], i}; }
};

// counts[digit, tile] = keys of the tile with that digit. Grid: a block per tile.
template <int SHIFT>
__global__ void __launch_bounds__(SORT_THREADS) sort_count_kernel(int* counts, SortInput in, int N) {
    SHARED(count, int[SORT_DIGITS]);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int i = 0; i < SORT_ROUNDS; i++) {
        const int at = int(blockIdx.x) * SORT_TILE + i * SORT_THREADS + int(threadIdx.x);
        if (at < N) atomicAdd(&count[in[at].token >> SHIFT & (SORT_DIGITS - 1)], 1);  // whole numbers: any order
    }
    __syncthreads();
    counts[int64_t(threadIdx.x) * gridDim.x + blockIdx.x] = count[threadIdx.x];
}

// In place, numbers become the sum of those before them: where the keys of each digit and tile begin. One block.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) sort_scan_kernel(int* counts, int count) {
    SHARED(warp_sums, int[WARP_SIZE]);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int own = ceil_div(count, THREADS), begin = own * int(threadIdx.x);
    const int end = begin + own < count ? begin + own : count;
    const auto inclusive = [&](int x) {  // over the warp
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int before = __shfl_up_sync(FULL_MASK, x, distance);
            if (lane >= distance) x += before;
        }
        return x;
    };

    int sum = 0;
    for (int i = begin; i < end; i++) sum += counts[i];
    const int up_to_here = inclusive(sum);
    if (lane == WARP_SIZE - 1) warp_sums[warp] = up_to_here;
    __syncthreads();
    const int of_warp = lane < THREADS / WARP_SIZE ? warp_sums[lane] : 0;
    const int before_warp = __shfl_sync(FULL_MASK, inclusive(of_warp) - of_warp, warp);

    int running = before_warp + up_to_here - sum;
    for (int i = begin; i < end; i++) {
        const int here = counts[i];
        counts[i] = running;
        running += here;
    }
}

// Each key of the tile to its place: after the keys of lower digits, of tiles and warps before, of rounds and lanes
// before. A warp has SORT_ROUNDS * 32 keys that follow each other.
template <int SHIFT>
__global__ void __launch_bounds__(SORT_THREADS)
    sort_scatter_kernel(TokenRow* out, const int* begins, SortInput in, int N) {
    constexpr int warps = SORT_THREADS / WARP_SIZE;
    static_assert(SORT_THREADS == SORT_DIGITS);
    SHARED(place, int[warps][SORT_DIGITS + 1]);  // the last digit: of lanes past N
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (int d = lane; d <= SORT_DIGITS; d += WARP_SIZE) place[warp][d] = 0;
    __syncwarp();

    TokenRow key[SORT_ROUNDS];
    int digit[SORT_ROUNDS], rank[SORT_ROUNDS];  // rank: among the warp's keys of that digit
    UNROLL
    for (int i = 0; i < SORT_ROUNDS; i++) {
        const int at = int(blockIdx.x) * SORT_TILE + (warp * SORT_ROUNDS + i) * WARP_SIZE + lane;
        key[i] = at < N ? in[at] : TokenRow{};
        digit[i] = at < N ? key[i].token >> SHIFT & (SORT_DIGITS - 1) : SORT_DIGITS;
        const unsigned same = __match_any_sync(FULL_MASK, digit[i]), before = same & ((1u << lane) - 1);
        rank[i] = place[warp][digit[i]] + __popc(before);
        __syncwarp();  // all have read
        if (before == 0) place[warp][digit[i]] += __popc(same);
        __syncwarp();  // and the next round sees it
    }
    __syncthreads();

    int running = begins[int64_t(threadIdx.x) * gridDim.x + blockIdx.x];
    for (int w = 0; w < warps; w++) {
        const int here = place[w][threadIdx.x];
        place[w][threadIdx.x] = running;
        running += here;
    }
    __syncthreads();
    UNROLL
    for (int i = 0; i < SORT_ROUNDS; i++)
        if (digit[i] < SORT_DIGITS) out[place[warp][digit[i]] + rank[i]] = key[i];
}

template <int SHIFT>
void sort_pass(TokenRow* out, int* counts, SortInput in, int N, Stream stream) {
    const int tiles = ceil_div(N, SORT_TILE);
    simt::launch(sort_count_kernel<SHIFT>, tiles, SORT_THREADS, 0, stream, counts, in, N);
    simt::launch(sort_scan_kernel<SORT_SCAN_THREADS>, 1, SORT_SCAN_THREADS, 0, stream, counts, tiles * SORT_DIGITS);
    simt::launch(sort_scatter_kernel<SHIFT>, tiles, SORT_THREADS, 0, stream, out, counts, in, N);
}

// Rows (token, n) in the order of their tokens, and of n where those are equal; V tokens. The result is in a or b.
inline const TokenRow* sort_by_token(TokenRow* a, TokenRow* b, int* counts, const int* tokens, int N, int V,
                                     Stream stream) {
    sort_pass<0>(a, counts, {tokens, nullptr}, N, stream);
    if (V <= 1 << SORT_DIGIT_BITS) return a;
    sort_pass<SORT_DIGIT_BITS>(b, counts, {nullptr, a}, N, stream);
    if (V <= 1 << 2 * SORT_DIGIT_BITS) return b;
    sort_pass<2 * SORT_DIGIT_BITS>(a, counts, {nullptr, b}, N, stream);
    return a;
}

// ---- sums by token

// A chunk is 32 sorted rows: one per lane of the warps that add them up. The rows of one token in it are a part; a
// token whose rows go on in the next chunk has several, the first in a tail, the others in heads.
struct TokenParts {
    float *heads, *tails;  // (chunks, C)
};

template <class floatX>
struct TokenSum {
    static constexpr int size = Vec<floatX>::size;
    float sum[size] = {};

    __device__ void add(const Vec<floatX>& x) {
        UNROLL
        for (int k = 0; k < size; k++) sum[k] += float(x[k]);
    }
    __device__ void add(const float* x) {
        UNROLL
        for (int k = 0; k < size; k += 4) {
            const Vec<float> v = load128(x + k);
            for (int j = 0; j < 4; j++) sum[k + j] += v[j];
        }
    }
    __device__ void store(float* out) const {
        UNROLL
        for (int k = 0; k < size; k += 4) store128(out + k, Vec<float>{{sum[k], sum[k + 1], sum[k + 2], sum[k + 3]}});
    }
};

// Grid: a warp for each chunk in x, and for each 32 vectors of a row in y.
template <class floatX>
__global__ void __launch_bounds__(ENCODER_WARPS* WARP_SIZE)
    token_parts_kernel(float* dwte, TokenParts parts, const floatX* dout, const TokenRow* sorted, int N, int C) {
    constexpr int ahead = 4;  // rows on their way at once
    const int lane = threadIdx.x % WARP_SIZE, chunk = int(blockIdx.x * ENCODER_WARPS + threadIdx.x / WARP_SIZE);
    const int begin = chunk * WARP_SIZE, c = (int(blockIdx.y) * WARP_SIZE + lane) * Vec<floatX>::size;
    if (begin >= N) return;
    const int count = N - begin < WARP_SIZE ? N - begin : WARP_SIZE;
    const TokenRow own = lane < count ? sorted[begin + lane] : TokenRow{-1, 0};
    const int token_before = begin > 0 ? sorted[begin - 1].token : -1;
    const int token_after = begin + count < N ? sorted[begin + count].token : -1;
    const int neighbour = __shfl_up_sync(FULL_MASK, own.token, 1);
    const unsigned begins = __ballot_sync(FULL_MASK, lane > 0 && own.token != neighbour);

    TokenSum<floatX> sum;
    const auto finish = [&](int last) {  // the part whose last row is this
        const int token = __shfl_sync(FULL_MASK, own.token, last);
        const bool from_before = token == token_before, goes_on = last + 1 == count && token == token_after;
        if (c >= C) return;
        if (from_before) return sum.store(parts.heads + int64_t(chunk) * C + c);
        if (goes_on) return sum.store(parts.tails + int64_t(chunk) * C + c);
        sum.add(dwte + int64_t(token) * C + c);
        sum.store(dwte + int64_t(token) * C + c);
    };
    for (int i = 0; i < count; i += ahead) {
        Vec<floatX> x[ahead];
        UNROLL
        for (int j = 0; j < ahead; j++) {
            const int n = __shfl_sync(FULL_MASK, own.n, i + j);
            x[j] = i + j < count && c < C ? load128cs(dout + int64_t(n) * C + c) : Vec<floatX>{};
        }
        UNROLL
        for (int j = 0; j < ahead; j++) {
            if (i + j < count && begins >> (i + j) & 1) {
                finish(i + j - 1);
                sum = {};
            }
            sum.add(x[j]);
        }
    }
    finish(count - 1);
}

// Adds the parts of each token that has several. Grid as above: the warp of the chunk where the token begins does it.
template <class floatX>
__global__ void __launch_bounds__(ENCODER_WARPS* WARP_SIZE)
    token_join_kernel(float* dwte, TokenParts parts, const TokenRow* sorted, int N, int C) {
    const int lane = threadIdx.x % WARP_SIZE, chunk = int(blockIdx.x * ENCODER_WARPS + threadIdx.x / WARP_SIZE);
    const int begin = chunk * WARP_SIZE, c = (int(blockIdx.y) * WARP_SIZE + lane) * Vec<floatX>::size;
    if (begin + WARP_SIZE >= N) return;
    const int token = sorted[begin + WARP_SIZE - 1].token;
    if (sorted[begin + WARP_SIZE].token != token) return;
    if (begin > 0 && sorted[begin - 1].token == token) return;

    TokenSum<floatX> sum;
    if (c < C) sum.add(parts.tails + int64_t(chunk) * C + c);
    for (int next = chunk + 1, heads = WARP_SIZE; heads == WARP_SIZE; next += WARP_SIZE) {
        // A lane looks at a chunk: does it begin with the token?
        const int64_t at = int64_t(next + lane) * WARP_SIZE;
        const unsigned others = __ballot_sync(FULL_MASK, at >= N || sorted[at].token != token);
        heads = others ? __ffs(int(others)) - 1 : WARP_SIZE;
        if (c < C)
            for (int i = 0; i < heads; i++) sum.add(parts.heads + int64_t(next + i) * C + c);
    }
    if (c >= C) return;
    sum.add(dwte + int64_t(token) * C + c);
    sum.store(dwte + int64_t(token) * C + c);
}

// dwpe[t] += dout[0, t] + ... + dout[B - 1, t]. Grid: a thread for each vector of (T, C).
template <class floatX>
__global__ void __launch_bounds__(ENCODER_WARPS* WARP_SIZE)
    position_sums_kernel(float* dwpe, const floatX* dout, int B, int T, int C) {
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * Vec<floatX>::size, stride = int64_t(T) * C;
    if (i >= stride) return;
    TokenSum<floatX> sum;
    for (int b = 0; b < B; b++) sum.add(load128(dout + b * stride + i));  // plain: the tokens' sums read it next
    sum.add(dwpe + i);
    sum.store(dwpe + i);
}

// ---- launchers

inline int token_chunks(int N) { return ceil_div(N, WARP_SIZE); }

// The working memory of backward, in pieces; with base null it only counts.
struct EncoderScratch {
    TokenRow *a, *b;
    int* counts;
    TokenParts parts;
    int64_t bytes = 0;

    EncoderScratch(void* base, int N, int C) {
        const auto take = [&](int64_t size) {
            std::byte* at = base ? static_cast<std::byte*>(base) + bytes : nullptr;
            bytes += round_up<int64_t>(size, 256);
            return static_cast<void*>(at);
        };
        const int64_t part_bytes = int64_t(token_chunks(N)) * C * int64_t(sizeof(float));
        a = static_cast<TokenRow*>(take(N * int64_t(sizeof(TokenRow))));
        b = static_cast<TokenRow*>(take(N * int64_t(sizeof(TokenRow))));
        counts = static_cast<int*>(take(int64_t(ceil_div(N, SORT_TILE)) * SORT_DIGITS * int64_t(sizeof(int))));
        parts.heads = static_cast<float*>(take(part_bytes));
        parts.tails = static_cast<float*>(take(part_bytes));
    }
};

namespace gpu {

// Bytes of device_scratch that encoder_backward takes.
inline int64_t encoder_scratch_bytes(int N, int C) { return EncoderScratch(nullptr, N, C).bytes; }

}  // namespace gpu

template <class floatX>
void check_encoder_sizes(const char* op, int B, int T, int C) {
    const int64_t N = int64_t(B) * T;
    ENSURE(N >= 1 && C >= 1, "%s of %lld rows of %d: there must be at least one of each", op, static_cast<long long>(N),
           C);
    ENSURE(N <= 1 << 24, "%s of %lld rows: at most %d", op, static_cast<long long>(N), 1 << 24);
    ENSURE(C % Vec<floatX>::size == 0, "%s: %d channels must be a multiple of %d", op, C, Vec<floatX>::size);
}

template <class floatX>
void gpu::encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                          Stream stream) {
    check_encoder_sizes<floatX>("encoder_forward", B, T, C);
    simt::launch(encoder_forward_kernel<floatX>, ceil_div(B * T, ENCODER_WARPS), ENCODER_WARPS * WARP_SIZE, 0, stream,
                 out, tokens, wte, wpe, B * T, T, C);
}

template <class floatX>
void gpu::encoder_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T, int C, int V,
                           Stream stream) {
    check_encoder_sizes<floatX>("encoder_backward", B, T, C);
    ENSURE(V >= 1 && V <= 1 << 3 * SORT_DIGIT_BITS, "encoder_backward: a vocabulary of %d; it has 1 to %d tokens", V,
           1 << 3 * SORT_DIGIT_BITS);
    constexpr int threads = ENCODER_WARPS * WARP_SIZE;
    const int N = B * T;
    const EncoderScratch scratch(device_scratch(encoder_scratch_bytes(N, C)), N, C);
    const dim3 grid(unsigned(ceil_div(token_chunks(N), ENCODER_WARPS)),
                    unsigned(ceil_div(C, WARP_SIZE * Vec<floatX>::size)));
    simt::launch(position_sums_kernel<floatX>, blocks_for(int64_t(T) * C, threads * Vec<floatX>::size), threads, 0,
                 stream, dwpe, dout, B, T, C);
    const TokenRow* sorted = sort_by_token(scratch.a, scratch.b, scratch.counts, tokens, N, V, stream);
    simt::launch(token_parts_kernel<floatX>, grid, threads, 0, stream, dwte, scratch.parts, dout, sorted, N, C);
    simt::launch(token_join_kernel<floatX>, grid, threads, 0, stream, dwte, scratch.parts, sorted, N, C);
}
