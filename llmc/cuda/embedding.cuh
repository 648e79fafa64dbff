// embedding.cuh: token and position embeddings, and the sums of rows by token, which the head's backward uses, too.
//
// Forward: a warp owns a row. It moves 2*N*C*sizeof(floatX) bytes; the T*C position embeddings come from the L2 cache.
//
// Backward reads dout once for the positions and once for the tokens: 2*N*C*sizeof(floatX) bytes, which bounds the time
// (201 MB for N = 65536, C = 768, bf16). Any number of rows of dout may add to one row of dwte. To add them in a fixed
// order without float atomics, the device first sorts the rows by token, with a stable radix sort in which the keys of
// each thread are fixed. Then each warp adds up 32 rows in sorted order. It writes the sums of tokens that lie wholly
// within its rows, and stores partial sums of tokens that neighbouring warps have too; a second kernel adds these. A
// token that fills the whole batch is therefore not slower than others. Tokens of other vocabulary shards sort behind
// those of this shard, so no warp reads their rows.
#pragma once
#include "base/device.h"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int EMBEDDING_WARPS = 8;

// out (N, C) = wte[tokens[n]] + wpe[n % T]; tokens (N), wte (shard.count, C), wpe (T, C) or null.
// Grid: blocks of 8 warps, one warp per row.
template <class floatX>
__global__ void __launch_bounds__(EMBEDDING_WARPS* WARP_SIZE)
    embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int N, int T, int C,
                             VocabShard shard) {
    using V = Vec<floatX>;
    const int lane = threadIdx.x % WARP_SIZE, n = int(blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP_SIZE);
    if (n >= N) return;
    const int row = shard.row(tokens[n]);
    const floatX* token = row < 0 ? nullptr : wte + int64_t(row) * C;
    const floatX* position = wpe ? wpe + int64_t(n % T) * C : nullptr;
    for (int c = lane * V::size; c < C; c += WARP_SIZE * V::size) {
        const V a = token ? load128(token + c) : V{}, b = position ? load128(position + c) : V{};
        V sum;
        for (int k = 0; k < V::size; k++) sum[k] = floatX(float(a[k]) + float(b[k]));
        store128(out + int64_t(n) * C + c, sum);  // not a streaming store: LayerNorm reads it next
    }
}

// ---- Sorting rows by token: least significant digit first, 8 bits per pass

constexpr int SORT_THREADS = 256, SORT_DIGITS = 256, SORT_DIGIT_BITS = 8;
constexpr int SORT_ROUNDS = 4, SORT_TILE = SORT_ROUNDS * SORT_THREADS;  // keys per thread and per block
constexpr int SORT_SCAN_THREADS = 1024;

// A key of the sort, and the row that it belongs to. The key is the token's row in the vocabulary shard; shard.count if
// the token is in another shard.
struct alignas(8) TokenRow {
    int token, n;
};

// Input of a pass: the tokens in the first pass, then the output of the previous pass.
struct SortInput {
    const int* tokens;
    const TokenRow* rows;  // null in the first pass
    VocabShard shard;
    __device__ TokenRow operator[](int i) const {
        if (rows) return rows[i];
        const int row = shard.row(tokens[i]);
        return {row < 0 ? shard.count : row, i};
    }
};

// counts[digit, tile] = number of keys in the tile with that digit. counts (SORT_DIGITS, tiles).
// Grid: one block of 256 threads per tile of 1024 keys.
template <int SHIFT>
__global__ void __launch_bounds__(SORT_THREADS) sort_count_kernel(int* counts, SortInput in, int N) {
    SHARED(count, int[SORT_DIGITS]);
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int i = 0; i < SORT_ROUNDS; i++) {
        const int at = int(blockIdx.x) * SORT_TILE + i * SORT_THREADS + int(threadIdx.x);
        if (at < N) atomicAdd(&count[in[at].token >> SHIFT & (SORT_DIGITS - 1)], 1);  // integers: any order will do
    }
    __syncthreads();
    counts[int64_t(threadIdx.x) * gridDim.x + blockIdx.x] = count[threadIdx.x];
}

// Exclusive prefix sum of counts, in place. Afterwards counts[digit, tile] is the output position of the first key of
// that digit and tile. Grid: one block; a thread owns count / THREADS consecutive counts.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) sort_scan_kernel(int* counts, int count) {
    SHARED(warp_sums, int[WARP_SIZE]);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int per_thread = ceil_div(count, THREADS), begin = per_thread * int(threadIdx.x);
    const int end = begin + per_thread < count ? begin + per_thread : count;
    const auto inclusive_sum = [&](int x) {  // inclusive prefix sum over the warp
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int before = __shfl_up_sync(FULL_MASK, x, distance);
            if (lane >= distance) x += before;
        }
        return x;
    };

    int sum = 0;
    for (int i = begin; i < end; i++) sum += counts[i];
    const int up_to_here = inclusive_sum(sum);
    if (lane == WARP_SIZE - 1) warp_sums[warp] = up_to_here;
    __syncthreads();
    const int of_warp = lane < THREADS / WARP_SIZE ? warp_sums[lane] : 0;
    const int before_warp = __shfl_sync(FULL_MASK, inclusive_sum(of_warp) - of_warp, warp);

    int running = before_warp + up_to_here - sum;
    for (int i = begin; i < end; i++) {
        const int here = counts[i];
        counts[i] = running;
        running += here;
    }
}

// Writes each key of the tile to its output position. Keys with the same digit keep their order: by tile, warp, round
// and lane. A warp owns SORT_ROUNDS * 32 consecutive keys. begins (SORT_DIGITS, tiles): output of sort_scan_kernel.
// Grid: one block of 256 threads per tile of 1024 keys.
template <int SHIFT>
__global__ void __launch_bounds__(SORT_THREADS)
    sort_scatter_kernel(TokenRow* out, const int* begins, SortInput in, int N) {
    constexpr int warps = SORT_THREADS / WARP_SIZE;
    static_assert(SORT_THREADS == SORT_DIGITS);
    SHARED(positions, int[warps][SORT_DIGITS + 1]);  // the extra digit is for lanes past N
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    for (int d = lane; d <= SORT_DIGITS; d += WARP_SIZE) positions[warp][d] = 0;
    __syncwarp();

    TokenRow key[SORT_ROUNDS];
    int digit[SORT_ROUNDS], rank[SORT_ROUNDS];  // rank: position among the warp's keys with the same digit
    UNROLL
    for (int i = 0; i < SORT_ROUNDS; i++) {
        const int at = int(blockIdx.x) * SORT_TILE + (warp * SORT_ROUNDS + i) * WARP_SIZE + lane;
        key[i] = at < N ? in[at] : TokenRow{};
        digit[i] = at < N ? key[i].token >> SHIFT & (SORT_DIGITS - 1) : SORT_DIGITS;
        const unsigned same = __match_any_sync(FULL_MASK, digit[i]), before = same & ((1u << lane) - 1);
        rank[i] = positions[warp][digit[i]] + __popc(before);
        __syncwarp();  // all lanes have read place
        if (before == 0) positions[warp][digit[i]] += __popc(same);
        __syncwarp();  // the next round reads the new value
    }
    __syncthreads();

    int running = begins[int64_t(threadIdx.x) * gridDim.x + blockIdx.x];
    for (int w = 0; w < warps; w++) {
        const int here = positions[w][threadIdx.x];
        positions[w][threadIdx.x] = running;
        running += here;
    }
    __syncthreads();
    UNROLL
    for (int i = 0; i < SORT_ROUNDS; i++)
        if (digit[i] < SORT_DIGITS) out[positions[warp][digit[i]] + rank[i]] = key[i];
}

template <int SHIFT>
void sort_pass(TokenRow* out, int* counts, SortInput in, int N, Stream stream) {
    const int tiles = ceil_div(N, SORT_TILE);
    simt::launch(sort_count_kernel<SHIFT>, tiles, SORT_THREADS, 0, stream, counts, in, N);
    simt::launch(sort_scan_kernel<SORT_SCAN_THREADS>, 1, SORT_SCAN_THREADS, 0, stream, counts, tiles * SORT_DIGITS);
    simt::launch(sort_scatter_kernel<SHIFT>, tiles, SORT_THREADS, 0, stream, out, counts, in, N);
}

constexpr int SORT_MAX_KEY = (1 << 3 * SORT_DIGIT_BITS) - 1;

// Returns the rows of all N tokens, sorted by key, and by n among equal keys. The result (N) is in a or b. The keys are
// 0 to shard.count, which is at most SORT_MAX_KEY. counts: scratch memory (SORT_DIGITS, tiles).
inline const TokenRow* sort_by_token(TokenRow* a, TokenRow* b, int* counts, const int* tokens, int N, VocabShard shard,
                                     Stream stream) {
    sort_pass<0>(a, counts, {tokens, nullptr, shard}, N, stream);
    if (shard.count < 1 << SORT_DIGIT_BITS) return a;
    sort_pass<SORT_DIGIT_BITS>(b, counts, {nullptr, a, shard}, N, stream);
    if (shard.count < 1 << 2 * SORT_DIGIT_BITS) return b;
    sort_pass<2 * SORT_DIGIT_BITS>(a, counts, {nullptr, b, shard}, N, stream);
    return a;
}

// ---- Sums by token

// A chunk is 32 consecutive sorted rows. A token whose rows extend over several chunks has one partial sum in each of
// them: in `tails` for the chunk where the token begins, in `heads` for the chunks where it continues.
struct TokenParts {
    float *heads, *tails;  // (chunks, C)
};

// Float sums of one 16-byte vector of channels.
template <class floatX>
struct TokenSum {
    static constexpr int size = Vec<floatX>::size;
    float sum[size] = {};

    __device__ void add(const Vec<floatX>& x, float factor = 1.0f) {
        UNROLL
        for (int k = 0; k < size; k++) sum[k] += factor * float(x[k]);
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

// First stage: dwte[token] += the rows of dout (N, C), times their factors (N), of each token that lies within one
// chunk; partial sums of other tokens go to parts. factors may be null: all 1. Rows with the key `outside`, which are
// the last in sorted order, are not read. Grid: (ceil(chunks / 8), ceil(C / 32 vectors)) blocks of 8 warps; a warp owns
// a chunk, and a lane one vector of 16 bytes of all its rows.
template <class floatX>
__global__ void __launch_bounds__(EMBEDDING_WARPS* WARP_SIZE)
    token_parts_kernel(float* dwte, TokenParts parts, const floatX* dout, const float* factors, const TokenRow* sorted,
                       int outside, int N, int C) {
    constexpr int loads_in_flight = 4;  // loads in flight per thread
    const int lane = threadIdx.x % WARP_SIZE, chunk = int(blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP_SIZE);
    const int begin = chunk * WARP_SIZE, c = (int(blockIdx.y) * WARP_SIZE + lane) * Vec<floatX>::size;
    if (begin >= N) return;
    const TokenRow own_row = begin + lane < N ? sorted[begin + lane] : TokenRow{outside, 0};
    const int count = __popc(__ballot_sync(FULL_MASK, own_row.token != outside));
    if (count == 0) return;
    const float own_factor = factors && lane < count ? factors[own_row.n] : 1.0f;
    const int token_before = begin > 0 ? sorted[begin - 1].token : -1;
    const int token_after = begin + count < N ? sorted[begin + count].token : -1;
    const int neighbour = __shfl_up_sync(FULL_MASK, own_row.token, 1);
    const unsigned begins = __ballot_sync(FULL_MASK, lane > 0 && own_row.token != neighbour);

    TokenSum<floatX> sum;
    const auto flush = [&](int last) {  // stores the sum of the token whose last row in this chunk is `last`
        const int token = __shfl_sync(FULL_MASK, own_row.token, last);
        const bool from_before = token == token_before, goes_on = last + 1 == count && token == token_after;
        if (c >= C) return;
        if (from_before) return sum.store(parts.heads + int64_t(chunk) * C + c);
        if (goes_on) return sum.store(parts.tails + int64_t(chunk) * C + c);
        sum.add(dwte + int64_t(token) * C + c);
        sum.store(dwte + int64_t(token) * C + c);
    };
    for (int i = 0; i < count; i += loads_in_flight) {
        Vec<floatX> x[loads_in_flight];
        UNROLL
        for (int j = 0; j < loads_in_flight; j++) {
            const int n = __shfl_sync(FULL_MASK, own_row.n, i + j);
            x[j] = i + j < count && c < C ? load128cs(dout + int64_t(n) * C + c) : Vec<floatX>{};
        }
        UNROLL
        for (int j = 0; j < loads_in_flight; j++) {
            if (i + j < count && begins >> (i + j) & 1) {
                flush(i + j - 1);
                sum = {};
            }
            sum.add(x[j], __shfl_sync(FULL_MASK, own_factor, i + j));
        }
    }
    flush(count - 1);
}

// Second stage: dwte[token] += the partial sums of each token that extends over several chunks. Grid: as
// token_parts_kernel; the warp of the chunk where the token begins adds all of its partial sums.
template <class floatX>
__global__ void __launch_bounds__(EMBEDDING_WARPS* WARP_SIZE)
    token_join_kernel(float* dwte, TokenParts parts, const TokenRow* sorted, int outside, int N, int C) {
    const int lane = threadIdx.x % WARP_SIZE, chunk = int(blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP_SIZE);
    const int begin = chunk * WARP_SIZE, c = (int(blockIdx.y) * WARP_SIZE + lane) * Vec<floatX>::size;
    if (begin + WARP_SIZE >= N) return;
    const int token = sorted[begin + WARP_SIZE - 1].token;
    if (token == outside || sorted[begin + WARP_SIZE].token != token) return;
    if (begin > 0 && sorted[begin - 1].token == token) return;

    TokenSum<floatX> sum;
    if (c < C) sum.add(parts.tails + int64_t(chunk) * C + c);
    for (int next = chunk + 1, heads = WARP_SIZE; heads == WARP_SIZE; next += WARP_SIZE) {
        // Each lane looks at one of the next 32 chunks: does it begin with the token?
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

// dwpe[t] += dout[0, t] + ... + dout[B - 1, t]; dwpe (T, C), dout (B, T, C).
// Grid: blocks of 256 threads, a thread per 16-byte vector of dout[0].
template <class floatX>
__global__ void __launch_bounds__(EMBEDDING_WARPS* WARP_SIZE)
    position_sums_kernel(float* dwpe, const floatX* dout, int B, int T, int C) {
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * Vec<floatX>::size, stride = int64_t(T) * C;
    if (i >= stride) return;
    TokenSum<floatX> sum;
    for (int b = 0; b < B; b++) sum.add(load128(dout + b * stride + i));  // not streaming: the token sums read it next
    sum.add(dwpe + i);
    sum.store(dwpe + i);
}

// ---- Launchers

inline int token_chunks(int N) { return ceil_div(N, WARP_SIZE); }

// Layout of backward's scratch memory at `base`. With base = nullptr it only computes the size, `bytes`.
struct EmbeddingScratch {
    TokenRow *a, *b;
    int* counts;
    TokenParts parts;
    int64_t bytes;

    EmbeddingScratch(void* base, int N, int C) {
        Arena memory{base};
        a = memory.take<TokenRow>(N);
        b = memory.take<TokenRow>(N);
        counts = memory.take<int>(int64_t(ceil_div(N, SORT_TILE)) * SORT_DIGITS);
        parts.heads = memory.take<float>(int64_t(token_chunks(N)) * C);
        parts.tails = memory.take<float>(int64_t(token_chunks(N)) * C);
        bytes = memory.used;
    }
};

// dwte[tokens[n]] += factors[n] * dout[n] for each token of the shard. dout, factors: as token_parts_kernel.
template <class floatX>
void add_by_token(float* dwte, const floatX* dout, const float* factors, const int* tokens, int N, int C,
                  VocabShard shard, const EmbeddingScratch& scratch, Stream stream) {
    constexpr int threads = EMBEDDING_WARPS * WARP_SIZE;
    const dim3 grid(unsigned(ceil_div(token_chunks(N), EMBEDDING_WARPS)),
                    unsigned(ceil_div(C, WARP_SIZE * Vec<floatX>::size)));
    const TokenRow* sorted = sort_by_token(scratch.a, scratch.b, scratch.counts, tokens, N, shard, stream);
    simt::launch(token_parts_kernel<floatX>, grid, threads, 0, stream, dwte, scratch.parts, dout, factors, sorted,
                 shard.count, N, C);
    simt::launch(token_join_kernel<floatX>, grid, threads, 0, stream, dwte, scratch.parts, sorted, shard.count, N, C);
}

inline void check_sort_keys(const char* op, VocabShard shard) {
    ENSURE(shard.count <= SORT_MAX_KEY, "%s: a vocabulary of %d tokens; at most %d", op, shard.count, SORT_MAX_KEY);
}

template <class floatX>
void check_embedding_sizes(const char* op, int B, int T, int C) {
    const int64_t N = int64_t(B) * T;
    ENSURE(N >= 1 && C >= 1, "%s of %lld rows of %d: there must be at least one of each", op, static_cast<long long>(N),
           C);
    ENSURE(N <= 1 << 24, "%s of %lld rows: at most %d", op, static_cast<long long>(N), 1 << 24);
    ENSURE(C % Vec<floatX>::size == 0, "%s: %d channels must be a multiple of %d", op, C, Vec<floatX>::size);
}

template <class floatX>
void gpu::embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                            VocabShard shard, Stream stream) {
    check_embedding_sizes<floatX>("embedding_forward", B, T, C);
    check_vocab_shard("embedding_forward", shard);
    simt::launch(embedding_forward_kernel<floatX>, ceil_div(B * T, EMBEDDING_WARPS), EMBEDDING_WARPS * WARP_SIZE, 0,
                 stream, out, tokens, wte, wpe, B * T, T, C, shard);
}

template <class floatX>
void gpu::embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                             VocabShard shard, Stream stream) {
    check_embedding_sizes<floatX>("embedding_backward", B, T, C);
    check_vocab_shard("embedding_backward", shard);
    check_sort_keys("embedding_backward", shard);
    constexpr int threads = EMBEDDING_WARPS * WARP_SIZE;
    const int N = B * T;
    const EmbeddingScratch scratch(device_scratch(EmbeddingScratch(nullptr, N, C).bytes), N, C);
    simt::launch(position_sums_kernel<floatX>, blocks_for(int64_t(T) * C, threads * Vec<floatX>::size), threads, 0,
                 stream, dwpe, dout, B, T, C);
    add_by_token<floatX>(dwte, dout, nullptr, tokens, N, C, shard, scratch, stream);
}
