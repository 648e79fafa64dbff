#include "parallel/mpi_group.h"

#include <algorithm>
#include <cstring>

#include "base/common.h"

namespace {

constexpr int64_t PIECE = 1 << 20;  // elements in one message; the next message is sent while this one is added
// Bytes in one message of activations: a piece is added while it is in the cache.
constexpr int64_t PROMPT_PIECE_BYTES = 128 << 10;

// ---- sums += x, vectorized for the instruction sets that are usual in servers. The bits are the same with each.

template <class Sum, class Sent>
__attribute__((always_inline)) inline void add_loop(Sum* __restrict sums, const Sent* __restrict x, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = Sum(float(sums[i]) + float(x[i]));
}

#if defined(__x86_64__)
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq"
#if defined(__clang__)  // clang does not know the option, and warns
#define WIDEST AVX512
#else
#define WIDEST AVX512 ",prefer-vector-width=512"
#endif
template <class Sum, class Sent>
__attribute__((target(WIDEST))) void add_avx512(Sum* sums, const Sent* x, int64_t count) {
    add_loop(sums, x, count);
}
template <class Sum, class Sent>
__attribute__((target("avx2"))) void add_avx2(Sum* sums, const Sent* x, int64_t count) {
    add_loop(sums, x, count);
}
#endif

template <class Sum, class Sent>
void add(Sum* sums, const Sent* x, int64_t count) {
#if defined(__x86_64__)
    static const bool avx512 =
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx512) return add_avx512(sums, x, count);
    if (avx2) return add_avx2(sums, x, count);
#endif
    add_loop(sums, x, count);
}

// The first `bytes` of a vector that only grows.
static char* memory(std::vector<char>& vector, int64_t bytes) {
    if (int64_t(vector.size()) < bytes) vector.resize(bytes);
    return vector.data();
}

}  // namespace

void MpiGroup::open(MPI_Comm of_ranks) {
    comm = of_ranks;
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_CHECK(MPI_Comm_rank(comm, &rank));
    MPI_CHECK(MPI_Comm_size(comm, &size));
    shard_index = rank;
    if (!uses_halving()) return;
    shard_index = 0;
    for (int distance = 1; distance < size; distance *= 2) shard_index = 2 * shard_index + ((rank & distance) != 0);
}

// Sends `count` elements of x to the partner and receives as many, in pieces. Calls take(at, received, n) with each
// received piece.
template <class Sent, class Element, class Take>
void MpiGroup::exchange_with(const Element* x, int64_t count, int partner, bool prompt, const Take& take) {
    constexpr bool rounds = !std::is_same_v<Sent, Element>;
    const int64_t piece = prompt ? PROMPT_PIECE_BYTES / int64_t(sizeof(Sent)) : PIECE;
    const int64_t most = std::min(piece, count) * int64_t(sizeof(Sent));
    char* const received[2] = {memory(thread.incoming[0], most), memory(thread.incoming[1], most)};
    MPI_Request requests[2][2];
    const auto begin = [&](int64_t at, int slot) {
        const int n = int(std::min(piece, count - at)), bytes = n * int(sizeof(Sent));
        const void* out = x + at;
        if constexpr (rounds) {
            Sent* rounded = reinterpret_cast<Sent*>(memory(thread.outgoing, most));
            for (int i = 0; i < n; i++) rounded[i] = Sent(x[at + i]);
            out = rounded;
        }
        MPI_CHECK(MPI_Irecv(received[slot], bytes, MPI_BYTE, partner, 0, comm, &requests[slot][0]));
        MPI_CHECK(MPI_Isend(out, bytes, MPI_BYTE, partner, 0, comm, &requests[slot][1]));
    };
    constexpr bool ahead = !rounds;  // there is one rounding buffer only
    if (count > 0) begin(0, 0);
    for (int64_t at = 0, slot = 0; at < count; at += piece, slot ^= 1) {
        const int64_t next = at + piece;
        if (ahead && next < count) begin(next, slot ^ 1);
        finish(requests[slot], 2, prompt);
        if (!ahead && next < count) begin(next, slot ^ 1);
        take(at, reinterpret_cast<const Sent*>(received[slot]), std::min(piece, count - at));
    }
}

template <class Sent, class Element>
void MpiGroup::reduce_by_halving(Element* x, int64_t count, bool prompt) {
    for (int distance = 1; distance < size; distance *= 2) {
        const int64_t half = count / 2;
        Element *keep = x, *give = x + half;
        if (rank & distance) std::swap(keep, give);
        exchange_with<Sent>(give, half, rank ^ distance, prompt,
                            [&](int64_t at, const Sent* received, int64_t n) { add(keep + at, received, n); });
        x = keep, count = half;
    }
}

// All-gathers the shards, each of `bytes`: the block that a rank holds doubles with each exchange.
void MpiGroup::gather_shards(char* x, int64_t bytes, bool prompt) {
    constexpr int64_t most = 1 << 30;
    int64_t have = shard_index;  // first shard that this rank holds
    int64_t shards = 1;
    for (int distance = size / 2; distance >= 1; distance /= 2, shards *= 2) {
        const int64_t other = have ^ shards, block = shards * bytes;
        for (int64_t at = 0; at < block; at += most) {
            const int n = int(std::min(most, block - at));
            MPI_Request requests[2];
            MPI_CHECK(MPI_Irecv(x + other * bytes + at, n, MPI_BYTE, rank ^ distance, 1, comm, &requests[0]));
            MPI_CHECK(MPI_Isend(x + have * bytes + at, n, MPI_BYTE, rank ^ distance, 1, comm, &requests[1]));
            finish(requests, 2, prompt);
        }
        have = std::min(have, other);
    }
}

void MpiGroup::reduce_shards(float* x, int64_t count, GradDtype dtype, bool prompt) {
    if (uses_halving())
        return dtype == GradDtype::bf16 ? reduce_by_halving<bf16>(x, count, prompt)
                                        : reduce_by_halving<float>(x, count, prompt);
    const int64_t shard = count / size;
    thread.sums.resize(shard);
    MPI_Request request;
    MPI_CHECK(MPI_Ireduce_scatter_block(x, thread.sums.data(), narrow(shard), MPI_FLOAT, MPI_SUM, comm, &request));
    finish(&request, 1, prompt);
    std::copy(thread.sums.begin(), thread.sums.end(), x + rank * shard);
}

void MpiGroup::reduce_shards(bf16* x, int64_t count, bool prompt) {
    if (uses_halving()) return reduce_by_halving<bf16>(x, count, prompt);
    const int64_t shard = count / size, bytes = shard * int64_t(sizeof(bf16));
    char* const received = memory(thread.incoming[0], bytes * size);
    MPI_Request request;
    MPI_CHECK(MPI_Ialltoall(x, narrow(bytes), MPI_BYTE, received, narrow(bytes), MPI_BYTE, comm, &request));
    finish(&request, 1, prompt);
    thread.sums.assign(shard, 0.0f);
    for (int r = 0; r < size; r++) add(thread.sums.data(), reinterpret_cast<const bf16*>(received + r * bytes), shard);
    for (int64_t i = 0; i < shard; i++) x[rank * shard + i] = bf16(thread.sums[i]);
}

void MpiGroup::gather_all(char* x, int64_t bytes, bool prompt) {
    const int64_t shard = bytes / size;
    if (uses_halving()) return gather_shards(x, shard, prompt);
    MPI_Request request;
    MPI_CHECK(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, x, narrow(shard), MPI_BYTE, comm, &request));
    finish(&request, 1, prompt);
}

// The bf16 values are gathered in the first half of x. They are converted from the end, so that float i overwrites only
// bf16 values that were already read.
void MpiGroup::gather_rounded(float* x, int64_t shard) {
    char* memory = reinterpret_cast<char*>(x);
    const auto at = [&](int64_t i) { return memory + i * int64_t(sizeof(bf16)); };
    for (int64_t i = shard_index * shard; i < (shard_index + 1) * shard; i++) {
        const bf16 sum(x[i]);
        std::memcpy(at(i), &sum, sizeof sum);
    }
    gather_all(memory, shard * size * int64_t(sizeof(bf16)));
    for (int64_t i = shard * size - 1; i >= 0; i--) {
        bf16 sum;
        std::memcpy(&sum, at(i), sizeof sum);
        x[i] = float(sum);
    }
}

void MpiGroup::broadcast(char* x, int64_t bytes, int from) {
    MPI_Request request;
    MPI_CHECK(MPI_Ibcast(x, narrow(bytes), MPI_BYTE, rank_of(from), comm, &request));
    finish(&request, 1);
}

// The rank that has a shard. The shard's index is the rank's index with its bits reversed.
int MpiGroup::rank_of(int shard) const {
    if (!uses_halving()) return shard;
    int rank = 0;
    for (int power = 1; power < size; power *= 2, shard /= 2) rank = 2 * rank + shard % 2;
    return rank;
}

std::vector<std::string> MpiGroup::all_gather_text(const std::string& text) {
    std::vector<std::string> all(size);
    const int own = narrow(int64_t(text.size()));
    std::vector<int> sizes(size), at(size);
    MPI_Request request;
    MPI_CHECK(MPI_Iallgather(&own, 1, MPI_INT, sizes.data(), 1, MPI_INT, comm, &request));
    finish(&request, 1);
    int total = 0;
    for (int r = 0; r < size; r++) at[r] = total, total += sizes[r];
    std::string joined(total, 0);
    MPI_CHECK(
        MPI_Iallgatherv(text.data(), own, MPI_CHAR, joined.data(), sizes.data(), at.data(), MPI_CHAR, comm, &request));
    finish(&request, 1);
    for (int r = 0; r < size; r++) all[r] = joined.substr(at[r], sizes[r]);
    return all;
}

void MpiGroup::vote(bool yes, int64_t call) {
    const int own = yes;
    int any = 0;
    MPI_Request request;
    MPI_CHECK(MPI_Iallreduce(&own, &any, 1, MPI_INT, MPI_MAX, comm, &request));
    finish(&request, 1);
    votes[call % 2] = any != 0;
}
