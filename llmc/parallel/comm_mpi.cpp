// comm_mpi.cpp: collectives between CPU ranks by MPI.
//
// A thread makes all MPI calls of a rank, in their order, so that the training thread can continue. It sleeps while it
// waits: Open MPI would spin on training's core. While training itself waits for activations, it tests without pause.
//
// Reduce-scatter is recursive halving: at distance 1, 2, 4, ... a rank exchanges halves with rank XOR distance and adds
// the received half to the one it keeps. All-gather is the same exchanges in reverse (Thakur, Rabenseifner and Gropp
// 2005). In an all-reduce every rank sends 2 (n-1)/n of a buffer, which is the minimum. If ranks of a host are
// adjacent, the first exchanges stay inside hosts, and 2 (H-1) buffers in total leave the H hosts. The sum is the tree
// ((0+1)+(2+3))+... for any n, and a + b = b + a, so its bits do not depend on how many leaves a rank has. If the
// number of ranks is not a power of two, each rank receives its shard from all, and adds in their order.
#include "parallel/comm.h"

#define OMPI_SKIP_MPICXX 1  // no C++ bindings: MPI has removed them
#include <mpi.h>

#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/common.h"
#include "parallel/watchdog.h"

#define MPI_CHECK(call)                                                                                    \
    do {                                                                                                   \
        if (const int error = (call); error != MPI_SUCCESS) fail_of_mpi(#call, __FILE__, __LINE__, error); \
    } while (0)

namespace {

constexpr double PROMPT_SECONDS = 2e-3;  // after this time without a message the thread sleeps between tests
constexpr int64_t CHUNK = 1 << 20;       // elements in one message; the next message is sent while this one is added
// Bytes in one message of activations: a chunk is added while it is in the cache.
constexpr int64_t PROMPT_CHUNK_BYTES = 128 << 10;

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

// ---- sums += x, vectorized. The bits are the same with each instruction set.

template <class Sum, class Sent>
INLINE void add_loop(Sum* __restrict sums, const Sent* __restrict x, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = Sum(float(sums[i]) + float(x[i]));
}

#if defined(__x86_64__)
template <class Sum, class Sent>
__attribute__((target("avx2"))) void add_avx2(Sum* sums, const Sent* x, int64_t count) {
    add_loop(sums, x, count);
}
#endif

template <class Sum, class Sent>
void add(Sum* sums, const Sent* x, int64_t count) {
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) return add_avx2(sums, x, count);
#endif
    add_loop(sums, x, count);
}

// Returns the first `bytes` of a vector that only grows.
char* memory(std::vector<char>& vector, int64_t bytes) {
    if (int64_t(vector.size()) < bytes) vector.resize(bytes);
    return vector.data();
}

// ---- the thread

struct MpiThread {
    using Ticket = Comm::Ticket;

    std::mutex mutex;  // guards jobs, posted and done
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;  // an empty one ends the thread
    Ticket posted = 0, done = 0;
    std::exception_ptr error;                 // error of the first job that failed; the jobs after it are not run
    std::vector<char> outgoing, incoming[2];  // memory for messages; used by jobs, which run one after the other
    std::vector<float> sums;
    std::thread thread;

    MpiThread() : thread([this] { work(); }) {}
    MpiThread(const MpiThread&) = delete;
    ~MpiThread() {
        post(nullptr);
        thread.join();
    }

    Ticket post(std::function<void()> job) {
        const std::lock_guard lock(mutex);
        jobs.push_back(std::move(job));
        changed.notify_all();
        return ++posted;
    }

    // Returns whether the job was done within the time.
    bool wait_for(Ticket ticket, double seconds) {
        std::unique_lock lock(mutex);
        return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done >= ticket; });
    }

    // Throws the error of the first job that failed.
    void wait_for(Ticket ticket) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return done >= ticket; });
        if (error) std::rethrow_exception(error);
    }

    void run(const std::function<void()>& job) { wait_for(post(job)); }

    void work() {
        for (;;) {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return !jobs.empty(); });
            const std::function<void()> job = std::move(jobs.front());
            jobs.pop_front();
            if (!job) return;
            lock.unlock();
            try {
                if (!error) job();
            } catch (...) {
                error = std::current_exception();
            }
            lock.lock();
            done++;
            changed.notify_all();
        }
    }
};

// ---- a group of ranks, and its collectives. Everything here runs on the MPI thread.

struct MpiGroup {
    MPI_Comm comm = MPI_COMM_NULL;
    int rank = 0, size = 1, shard_index = 0;
    MpiThread& thread;
    bool votes[2] = {};  // results of the last two calls of any_rank, with an even and with an odd number

    explicit MpiGroup(MpiThread& thread) : thread(thread) {}

    void open(MPI_Comm of_ranks) {
        comm = of_ranks;
        MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        MPI_CHECK(MPI_Comm_rank(comm, &rank));
        MPI_CHECK(MPI_Comm_size(comm, &size));
        shard_index = rank_of(rank);
    }

    bool uses_halving() const { return std::has_single_bit(unsigned(size)); }

    // Returns the rank that has a shard, or the shard that a rank has: one index is the other with its bits reversed.
    int rank_of(int shard) const {
        if (!uses_halving()) return shard;
        int rank = 0;
        for (int power = 1; power < size; power *= 2, shard /= 2) rank = 2 * rank + shard % 2;
        return rank;
    }

    // Returns x as messages of type Sent: x itself, or a rounded copy.
    template <class Sent, class Element>
    const Sent* rounded(const Element* x, int64_t count) {
        if constexpr (std::is_same_v<Sent, Element>) {
            return x;
        } else {
            Sent* const copy = reinterpret_cast<Sent*>(memory(thread.outgoing, count * int64_t(sizeof(Sent))));
            for (int64_t i = 0; i < count; i++) copy[i] = Sent(x[i]);
            return copy;
        }
    }

    // Sends `give` to the partner, and adds what the partner sends to `keep`, both of `count` elements, in chunks.
    template <class Sent, class Element>
    void add_exchanged(Element* keep, const Element* give, int64_t count, int partner, bool prompt) {
        const int64_t chunk = std::min(count, prompt ? PROMPT_CHUNK_BYTES / int64_t(sizeof(Sent)) : CHUNK);
        const int64_t most = chunk * int64_t(sizeof(Sent));
        char* const received[2] = {memory(thread.incoming[0], most), memory(thread.incoming[1], most)};
        MPI_Request requests[2][2];
        const auto begin = [&](int64_t at, int slot) {
            const int64_t n = std::min(chunk, count - at);
            const int bytes = int(n) * int(sizeof(Sent));
            MPI_CHECK(MPI_Irecv(received[slot], bytes, MPI_BYTE, partner, 0, comm, &requests[slot][0]));
            MPI_CHECK(MPI_Isend(rounded<Sent>(give + at, n), bytes, MPI_BYTE, partner, 0, comm, &requests[slot][1]));
        };
        constexpr bool ahead = std::is_same_v<Sent, Element>;  // there is one rounding buffer only
        if (count > 0) begin(0, 0);
        for (int64_t at = 0, slot = 0; at < count; at += chunk, slot ^= 1) {
            const int64_t next = at + chunk;
            if (ahead && next < count) begin(next, slot ^ 1);
            finish(requests[slot], 2, prompt);
            if (!ahead && next < count) begin(next, slot ^ 1);
            add(keep + at, reinterpret_cast<const Sent*>(received[slot]), std::min(chunk, count - at));
        }
    }

    template <class Sent, class Element>
    void reduce_by_halving(Element* x, int64_t count, bool prompt) {
        for (int distance = 1; distance < size; distance *= 2) {
            const int64_t half = count / 2;
            Element *keep = x, *give = x + half;
            if (rank & distance) std::swap(keep, give);
            add_exchanged<Sent>(keep, give, half, rank ^ distance, prompt);
            x = keep, count = half;
        }
    }

    // Sums over ranks, sent as type Sent. x: `count` elements; this rank's shard becomes the sum. prompt: see finish.
    template <class Sent, class Element>
    void reduce_shards(Element* x, int64_t count, bool prompt) {
        if (uses_halving()) return reduce_by_halving<Sent>(x, count, prompt);
        const int64_t shard = count / size;
        const int bytes = narrow(shard * int64_t(sizeof(Sent)));
        const Sent* sent = rounded<Sent>(x, count);
        Sent* const received = reinterpret_cast<Sent*>(memory(thread.incoming[0], int64_t(bytes) * size));
        MPI_Request request;
        MPI_CHECK(MPI_Ialltoall(sent, bytes, MPI_BYTE, received, bytes, MPI_BYTE, comm, &request));
        finish(&request, 1, prompt);
        thread.sums.assign(shard, 0.0f);
        for (int r = 0; r < size; r++) add(thread.sums.data(), received + r * shard, shard);
        for (int64_t i = 0; i < shard; i++) x[rank * shard + i] = Element(thread.sums[i]);
    }

    // x: the shards of all ranks, `bytes` in all, of which this rank's is given.
    void gather_all(char* x, int64_t bytes, bool prompt) {
        const int64_t shard = bytes / size;
        if (uses_halving()) return gather_by_doubling(x, shard, prompt);
        MPI_Request request;
        MPI_CHECK(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, x, narrow(shard), MPI_BYTE, comm, &request));
        finish(&request, 1, prompt);
    }

    // Gathers shards of `bytes`: the block that a rank holds doubles with each exchange.
    void gather_by_doubling(char* x, int64_t bytes, bool prompt) {
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

    // Gathers the sums of all shards, sent as type Sent.
    template <class Sent, class Element>
    void gather_sums(Element* x, int64_t count, bool prompt) {
        char* const memory = reinterpret_cast<char*>(x);
        if constexpr (std::is_same_v<Sent, Element>) {
            gather_all(memory, count * int64_t(sizeof(Sent)), prompt);
        } else {
            // Rounded sums are gathered in x's first half, and converted from the end, so that no unread one is lost.
            const auto at = [&](int64_t i) { return memory + i * int64_t(sizeof(Sent)); };
            const int64_t shard = count / size;
            for (int64_t i = shard_index * shard; i < (shard_index + 1) * shard; i++) {
                const Sent sum(x[i]);
                std::memcpy(at(i), &sum, sizeof sum);
            }
            gather_all(memory, count * int64_t(sizeof(Sent)), prompt);
            for (int64_t i = count - 1; i >= 0; i--) {
                Sent sum;
                std::memcpy(&sum, at(i), sizeof sum);
                x[i] = Element(sum);
            }
        }
    }

    // from: the shard index of the rank that sends.
    void broadcast(char* x, int64_t bytes, int from) {
        MPI_Request request;
        MPI_CHECK(MPI_Ibcast(x, narrow(bytes), MPI_BYTE, rank_of(from), comm, &request));
        finish(&request, 1);
    }

    std::vector<std::string> all_gather_text(const std::string& text) {
        const int own = narrow(int64_t(text.size()));
        std::vector<int> sizes(size), at(size);
        MPI_Request request;
        MPI_CHECK(MPI_Iallgather(&own, 1, MPI_INT, sizes.data(), 1, MPI_INT, comm, &request));
        finish(&request, 1);
        std::exclusive_scan(sizes.begin(), sizes.end(), at.begin(), 0);
        std::string joined(at.back() + sizes.back(), 0);
        MPI_CHECK(MPI_Iallgatherv(text.data(), own, MPI_CHAR, joined.data(), sizes.data(), at.data(), MPI_CHAR, comm,
                                  &request));
        finish(&request, 1);
        std::vector<std::string> all;
        for (int r = 0; r < size; r++) all.push_back(joined.substr(at[r], sizes[r]));
        return all;
    }

    void vote(bool yes, int64_t call) {
        const int own = yes;
        int any = 0;
        MPI_Request request;
        MPI_CHECK(MPI_Iallreduce(&own, &any, 1, MPI_INT, MPI_MAX, comm, &request));
        finish(&request, 1);
        votes[call % 2] = any != 0;
    }
};

// ---- the communicator

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
        const Ticket started = thread->post([this] {
            int granted;
            MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &granted));
            group->open(MPI_COMM_WORLD);
        });
        if (!thread->wait_for(started, JOIN_SECONDS))
            fail(EXIT_INTERNAL, "gave up after waiting %g s for other ranks to join by MPI", JOIN_SECONDS);
        thread->wait_for(started);
        take_numbers();
        ENSURE(rank == launch.rank && world_size == launch.world_size,
               "%s says rank %d of %d, but MPI says rank %d of %d: this program was built with another MPI than the "
               "one that started it",
               launch.launcher.c_str(), launch.rank, launch.world_size, rank, world_size);
    }

    std::unique_ptr<Comm> split(int color) override {
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
        bytes_sent += sent;
        return post(name, std::move(calls_of_mpi));
    }

    // Waits, and adds the time to exposed_seconds.
    void wait(Ticket ticket, Stream) override {
        const ProfileRange range("wait for ranks");
        const double start = seconds_now();
        thread->wait_for(ticket);
        exposed_seconds += seconds_now() - start;
    }

    // ---- collectives

    // Returns the bytes that a rank sends in a reduce-scatter or all-gather of `count` elements.
    int64_t share(int64_t count, int64_t element) const {
        INVARIANT(count % world_size == 0, "a buffer of %lld elements cannot be divided among %d ranks",
                  static_cast<long long>(count), world_size);
        return count / world_size * (world_size - 1) * element;
    }

    template <class Sent, class Element>
    Ticket sum_shards(Element* x, int64_t count, bool prompt) {
        return queue("reduce-scatter", share(count, sizeof(Sent)),
                     [=, group = group] { group->template reduce_shards<Sent>(x, count, prompt); });
    }
    template <class Sent, class Element>
    Ticket sum_all(Element* x, int64_t count, bool prompt) {
        return queue("all-reduce", 2 * share(count, sizeof(Sent)), [=, group = group] {
            group->template reduce_shards<Sent>(x, count, prompt);
            group->template gather_sums<Sent>(x, count, prompt);
        });
    }

    Ticket reduce_scatter(float* x, int64_t count, Dtype dtype, Stream) override {
        return dtype == Dtype::bf16 ? sum_shards<bf16>(x, count, false) : sum_shards<float>(x, count, false);
    }
    Ticket all_reduce(float* x, int64_t count, Dtype dtype, Stream) override {
        return dtype == Dtype::bf16 ? sum_all<bf16>(x, count, false) : sum_all<float>(x, count, false);
    }
    Ticket reduce_scatter(float* x, int64_t count, Stream) override { return sum_shards<float>(x, count, true); }
    Ticket all_reduce(float* x, int64_t count, Stream) override { return sum_all<float>(x, count, true); }
    Ticket reduce_scatter(bf16* x, int64_t count, Stream) override { return sum_shards<bf16>(x, count, true); }
    Ticket all_reduce(bf16* x, int64_t count, Stream) override { return sum_all<bf16>(x, count, true); }

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
        wait(last, nullptr);
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
