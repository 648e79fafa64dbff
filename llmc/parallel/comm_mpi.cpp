#include "parallel/comm_mpi.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "base/common.h"

#define MPI_CHECK(call)                                                                                    \
    do {                                                                                                   \
        if (const int error = (call); error != MPI_SUCCESS) fail_of_mpi(#call, __FILE__, __LINE__, error); \
    } while (0)

namespace {

constexpr double PROMPT_SECONDS = 2e-3;  // after this time without a message the thread sleeps between tests
constexpr int64_t PIECE = 1 << 20;  // elements in one message; the next message is sent while this one is added
// Bytes in one message of activations: a piece is added while it is in the cache.
constexpr int64_t PROMPT_PIECE_BYTES = 128 << 10;

[[noreturn]] void fail_of_mpi(const char* call, const char* file, int line, int error) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(error, text, &length);
    fail(EXIT_INTERNAL, "%s at %s:%d: %s", call, file, line, text);
}

// Waits until the requests are done. The thread sleeps between tests, to leave the core to training. With `prompt` it
// first tests for a few milliseconds and only yields to threads that can run.
void finish(MPI_Request* requests, int count, bool prompt = false) {
    int done = 0;
    const double start = prompt ? seconds_now() : 0.0;
    for (int tries = 0;;) {
        MPI_CHECK(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE));
        if (done) return;
        if (prompt && seconds_now() - start < PROMPT_SECONDS)
            sched_yield();
        else if (++tries > 20)
            std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 100)));
    }
}

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

// ---- the thread

void MpiThread::work() {
    for (;;) {
        std::function<void()> job;
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return !jobs.empty(); });
            job = std::move(jobs.front());
            jobs.pop_front();
        }
        if (!job) return;
        try {
            if (!error) job();
        } catch (...) {
            error = std::current_exception();
        }
        {
            const std::lock_guard lock(mutex);
            done++;
        }
        changed.notify_all();
    }
}

MpiThread::Ticket MpiThread::post(std::function<void()> job) {
    const std::lock_guard lock(mutex);
    jobs.push_back(std::move(job));
    changed.notify_all();
    return ++posted;
}

// Waits in slices of time. If a slice takes far longer, this process was stopped or had no core; that time does not
// count as a wait for other ranks.
void MpiThread::wait_for(Ticket ticket) {
    constexpr double slice = 0.05;
    for (bool finished = false; !finished;) {
        const double begin = seconds_now();
        finished = wait_for(ticket, slice);
        const double late = seconds_now() - begin - slice;
        if (late > slice) stopped_seconds += late;
    }
    if (error) std::rethrow_exception(error);
}

bool MpiThread::wait_for(Ticket ticket, double seconds) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done >= ticket; });
}

// ---- the communicator

namespace {

struct MpiComm : Comm {
    const bool is_world;
    std::shared_ptr<MpiThread> thread;  // common to all groups
    std::shared_ptr<MpiGroup> group;    // jobs share it, so that they may end after this Comm
    Ticket voted = 0;                   // ticket of the last any_rank; 0: none yet
    int64_t votes_begun = 0;

    MpiComm() : is_world(true), thread(std::make_shared<MpiThread>()), group(std::make_shared<MpiGroup>(*thread)) {}
    MpiComm(const MpiComm& whole, std::shared_ptr<MpiGroup> part)
        : is_world(false), thread(whole.thread), group(std::move(part)) {
        watchdog = whole.watchdog;
        take_numbers();
    }

    // A group does not wait for its pending collectives: if an error ends this rank, the others never make them.
    ~MpiComm() override {
        if (is_world)
            thread->run([] { MPI_Finalize(); });
        else
            free_later(group);
    }

    void free_later(const std::shared_ptr<MpiGroup>& of_ranks) {
        thread->post([of_ranks] { MPI_CHECK(MPI_Comm_free(&of_ranks->comm)); });
    }

    void take_numbers() {
        rank = group->rank;
        world_size = group->size;
        shard_index = group->shard_index;
    }

    // MPI_Init returns when all ranks have called it.
    void join(const Launch& launch) {
        const Ticket started = thread->post([this, launch] { start(launch); });
        if (!thread->wait_for(started, JOIN_SECONDS))
            fail(EXIT_INTERNAL, "gave up after waiting %g s for other ranks to join by MPI", JOIN_SECONDS);
        thread->wait_for(started);
        take_numbers();
    }

    void start(const Launch& launch) {
        int granted;
        MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &granted));
        group->open(MPI_COMM_WORLD);
        ENSURE(
            group->rank == launch.rank && group->size == launch.world_size,
            "%s says rank %d of %d, but MPI says rank %d of %d: this program was built with another MPI than the one "
            "that started it",
            launch.launcher.c_str(), launch.rank, launch.world_size, group->rank, group->size);
    }

    std::unique_ptr<Comm> split(int color) override {
        INVARIANT(color >= 0, "a group of ranks has color %d", color);
        const auto part = std::make_shared<MpiGroup>(*thread);
        thread->run([&] {
            MPI_Comm made;
            MPI_CHECK(MPI_Comm_split(group->comm, color, rank, &made));
            part->open(made);
        });
        if (part->size > 1) return std::make_unique<MpiComm>(*this, part);
        free_later(part);
        return Comm::split(color);
    }

    std::string describe() const override { return format("%d ranks by MPI", world_size); }

    void check_grad_dtype(GradDtype dtype) const override {
        ENSURE(dtype == GradDtype::fp32 || group->uses_halving(),
               "--grad-dtype bf16 by MPI needs 2, 4, 8, ... data-parallel ranks, not %d; give --grad-dtype fp32",
               world_size);
    }

    // Posts a collective, which the watchdog counts and the trace shows.
    template <class Calls>
    Ticket post(const char* name, Calls calls_of_mpi) {
        return thread->post([=, watched = watchdog, calls_of_mpi = std::move(calls_of_mpi)] {
            const ProfileRange range(name);
            if (watched) watched->collective_begins();
            calls_of_mpi();
            if (watched) watched->collective_ended();
        });
    }

    // Queues a collective in which this rank sends `sent` bytes. The bytes are counted here, because the MPI thread may
    // run it as late as the next step. All earlier work on the stream is complete: ranks by MPI have the CPU backend.
    template <class Calls>
    Ticket queue(const char* name, int64_t sent, Calls calls_of_mpi) {
        calls++;
        bytes_sent += sent;
        return post(name, std::move(calls_of_mpi));
    }

    // Calls wait_for_others and adds its time to exposed_seconds.
    template <class Wait>
    void expose(const Wait& wait_for_others) {
        const ProfileRange range("wait for ranks");
        const double start = seconds_now(), stopped_before = thread->stopped_seconds;
        wait_for_others();
        exposed_seconds += seconds_now() - start - (thread->stopped_seconds - stopped_before);
    }

    void wait(Ticket ticket, Stream) override {
        expose([&] { thread->wait_for(ticket); });
    }

    // ---- collectives

    // Allocates memory that the first step would otherwise allocate.
    void reserve(GradDtype, int64_t count) override {
        if (!group->uses_halving()) thread->run([this, count] { thread->sums.reserve(count / world_size); });
    }

    // Bytes that a rank sends in a reduce-scatter or all-gather of `count` elements.
    int64_t share(int64_t count, int64_t element) const {
        INVARIANT(count % world_size == 0, "a buffer of %lld elements cannot be divided among %d ranks",
                  static_cast<long long>(count), world_size);
        return count / world_size * (world_size - 1) * element;
    }
    static int64_t bytes_of(GradDtype dtype) { return dtype == GradDtype::bf16 ? sizeof(bf16) : sizeof(float); }

    Ticket queue_reduce_scatter(float* x, int64_t count, GradDtype dtype, bool prompt) {
        return queue("reduce-scatter", share(count, bytes_of(dtype)),
                     [=, group = group] { group->reduce_shards(x, count, dtype, prompt); });
    }

    Ticket queue_all_reduce(float* x, int64_t count, GradDtype dtype, bool prompt) {
        return queue("all-reduce", 2 * share(count, bytes_of(dtype)), [=, group = group] {
            group->reduce_shards(x, count, dtype, prompt);
            if (dtype == GradDtype::bf16) return group->gather_rounded(x, count / group->size);
            group->gather_all(reinterpret_cast<char*>(x), count * int64_t(sizeof(float)), prompt);
        });
    }

    Ticket reduce_scatter(float* x, int64_t count, GradDtype dtype, Stream) override {
        return queue_reduce_scatter(x, count, dtype, false);
    }
    Ticket all_reduce(float* x, int64_t count, GradDtype dtype, Stream) override {
        return queue_all_reduce(x, count, dtype, false);
    }
    Ticket reduce_scatter(float* x, int64_t count, Stream) override {
        return queue_reduce_scatter(x, count, GradDtype::fp32, true);
    }
    Ticket all_reduce(float* x, int64_t count, Stream) override {
        return queue_all_reduce(x, count, GradDtype::fp32, true);
    }

    Ticket reduce_scatter(bf16* x, int64_t count, Stream) override {
        return queue("reduce-scatter", share(count, sizeof(bf16)),
                     [=, group = group] { group->reduce_shards(x, count, true); });
    }
    Ticket all_reduce(bf16* x, int64_t count, Stream) override {
        return queue("all-reduce", 2 * share(count, sizeof(bf16)), [=, group = group] {
            group->reduce_shards(x, count, true);
            group->gather_all(reinterpret_cast<char*>(x), count * int64_t(sizeof(bf16)), true);
        });
    }

    Ticket queue_all_gather(void* x, int64_t bytes, bool prompt) {
        return queue("all-gather", share(bytes, 1),
                     [=, group = group] { group->gather_all(static_cast<char*>(x), bytes, prompt); });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream) override { return queue_all_gather(x, bytes, false); }
    Ticket gather_activations(void* x, int64_t bytes, Stream) override { return queue_all_gather(x, bytes, true); }

    Ticket broadcast(void* x, int64_t bytes, int from, Stream) override {
        return queue("broadcast", 0, [=, group = group] { group->broadcast(static_cast<char*>(x), bytes, from); });
    }

    std::vector<std::string> all_gather_text(const std::string& text) override {
        std::vector<std::string> all;
        thread->wait_for(post("all-gather of texts", [&] { all = group->all_gather_text(text); }));
        return all;
    }

    bool any_rank(bool yes) override {
        const int64_t call = votes_begun++;
        const Ticket last = std::exchange(voted, post("vote", [=, group = group] { group->vote(yes, call); }));
        expose([&] { thread->wait_for(last); });
        return group->votes[(call + 1) % 2];
    }

    [[noreturn]] void abort(int exit_code) override {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        Comm::abort(exit_code);
    }
};

}  // namespace

// Open MPI 5.0 pairs interfaces wrongly if hosts have addresses of both families: each pair of ranks prints an error,
// and ranks of several hosts may not reach each other (issue 14079 of open-mpi/ompi). Therefore it gets only IPv4 where
// this host has such an address. A variable that the user has set remains.
static void prefer_ipv4() {
    if (OMPI_MAJOR_VERSION < 5) return;
    ifaddrs* first = nullptr;
    if (getifaddrs(&first) != 0) return;
    for (const ifaddrs* i = first; i; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & (IFF_UP | IFF_LOOPBACK)) == IFF_UP)
            setenv("OMPI_MCA_btl_tcp_disable_family", "6", 0);
    freeifaddrs(first);
}

std::unique_ptr<Comm> make_mpi_comm(const Launch& launch) {
#if defined(__linux__)
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives mpirun, or its daemon on another host
#endif
    prefer_ipv4();
    MpiComm* comm = new MpiComm;
    comm->join(launch);  // if join throws, comm leaks: its thread may still be in MPI_Init
    return std::unique_ptr<Comm>(comm);
}
