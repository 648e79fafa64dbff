// comm_mpi.cpp: MPI between CPU ranks, and between GPU ranks through host memory.
//
// Reduce-scatter is recursive halving: at distance 1, 2, 4, ... a rank exchanges halves with rank XOR distance and adds
// the received half to the half that it keeps. All-gather is the same exchanges in reverse (Thakur, Rabenseifner and
// Gropp 2005). In an all-reduce every rank sends 2 (n-1)/n of a buffer, which is the minimum. If ranks of a host are
// adjacent, the first exchanges stay inside hosts, and 2 (H-1) buffers in total leave the H hosts. The sum is the tree
// ((0+1)+(2+3))+... for any n, and a + b = b + a, so the bits of the sum do not depend on how many leaves of the tree
// one rank has. If the number of ranks is not a power of two, MPI's own collectives are used, with their own order of
// summation.
//
// One thread makes all MPI calls of all communicators, in the order of the calls, so that the training thread can
// continue. The thread sleeps while it waits: Open MPI would spin on the core that training needs. While training
// itself waits for activations, the thread tests for messages without pause.
#define OMPI_SKIP_MPICXX 1  // no C++ bindings: MPI has removed them
#include <mpi.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "base/terminal.h"
#include "parallel/comm.h"
#include "parallel/missing_ranks.h"

namespace {

constexpr double QUIET_SECONDS = 10;  // wait before the first warning about missing ranks
constexpr int64_t PIECE = 1 << 20;    // elements in one message; the next message is sent while this one is added
// Bytes in one message of activations: a piece is added while it is in the cache.
constexpr int64_t PROMPT_PIECE_BYTES = 128 << 10;
constexpr std::chrono::milliseconds LAUNCHER_CHECKS(300);
constexpr double PROMPT_SECONDS = 2e-3;  // after this time without a message the thread sleeps between tests

#define MPI_CHECK(call)                                                                                    \
    do {                                                                                                   \
        if (const int error = (call); error != MPI_SUCCESS) fail_of_mpi(#call, __FILE__, __LINE__, error); \
    } while (0)

[[noreturn]] void fail_of_mpi(const char* call, const char* file, int line, int error) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(error, text, &length);
    fail(EXIT_INTERNAL, "%s at %s:%d: %s", call, file, line, text);
}

// Sets the thread name that /proc shows (missing_ranks.h).
void name_this_thread([[maybe_unused]] const char* name) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#endif
}

// Waits until the requests are done. The thread sleeps between tests, to leave the core to training. With `prompt` it
// first tests for PROMPT_SECONDS and only yields to threads that can run.
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

// TCP gives up on a host after 15 minutes without an answer. limit_silence makes the connections of this process give
// up after 10 s: Open MPI then aborts the run and names the host. With Open MPI 4 mpirun should notice before, by the
// options of docs/distributed.md: once it has sent a message to the lost host, it waits 15 minutes. With Open MPI 5 it
// must notice later, as it does by default: it would end with exit code 0.
constexpr int SILENT_SECONDS = 10;

void limit_silence() {
#if defined(__linux__)
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
        const int fd = atoi(entry.path().filename().c_str()), on = 1, probe_seconds = SILENT_SECONDS / 3;
        const unsigned silent_ms = SILENT_SECONDS * 1000;
        sockaddr_storage peer;
        socklen_t size = sizeof peer;
        if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
        if (peer.ss_family != AF_INET && peer.ss_family != AF_INET6) continue;
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof silent_ms);
        // Keep-alive probes, for connections on which only the other side sends.
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_seconds, sizeof probe_seconds);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_seconds, sizeof probe_seconds);
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    }
#endif
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

// Ends this process within LAUNCHER_CHECKS after its parent has ended: mpirun, its daemon on another host, or a script
// between them and this process. Open MPI itself ends a rank a second or more later, and until then a new run finds
// the output in use. PR_SET_PDEATHSIG would also act when only the thread ends that started this process, and daemons
// may start many ranks by several threads.
struct LauncherWatch {
    const pid_t launcher = getppid();
    std::mutex mutex;
    std::condition_variable changed;
    bool ending = false;
    std::thread thread;

    LauncherWatch() {
        thread = std::thread([this] { work(); });
    }
    LauncherWatch(const LauncherWatch&) = delete;
    ~LauncherWatch() {
        {
            const std::lock_guard lock(mutex);
            ending = true;
        }
        changed.notify_all();
        thread.join();
    }

    void work() {
        std::unique_lock lock(mutex);
        while (!changed.wait_for(lock, LAUNCHER_CHECKS, [this] { return ending; })) {
            if (getppid() == launcher) continue;
            print_message(format("error: the process %d, which started this rank on %s, has ended", int(launcher),
                                 host_name().c_str()));
            _exit(EXIT_INTERNAL);
        }
    }
};

// The thread that makes all MPI calls, and its queue of jobs.
struct MpiThread {
    using Ticket = Comm::Ticket;

    std::mutex mutex;  // guards jobs, posted and done
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    Ticket posted = 0, done = 0;
    std::exception_ptr error;      // of the first job that failed; the jobs after it are not run
    double stopped_seconds = 0.0;  // time in which this process was not running while the training thread waited
    std::thread thread;
    LauncherWatch watch;

    // Memory for messages; used by jobs, which run one after the other.
    std::vector<char> outgoing, incoming[2];
    std::vector<float> sums;

    MpiThread() {
        thread = std::thread([this] { work(); });
    }
    ~MpiThread() {
        post(nullptr);
        thread.join();
    }

    void work() {
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
            // Called after jobs 1, 2, 4, 8, ..., because ranks connect when they first send to each other, in the
            // first steps.
            if (std::has_single_bit(uint64_t(done))) limit_silence();
        }
    }

    Ticket post(std::function<void()> job) {
        const std::lock_guard lock(mutex);
        jobs.push_back(std::move(job));
        changed.notify_all();
        return ++posted;
    }

    // Waits in slices of time. If a slice takes far longer, this process was stopped or had no core; that time does not
    // count as a wait for other ranks.
    void wait_for(Ticket ticket) {
        constexpr double slice = 0.05;
        for (bool finished = false; !finished;) {
            const double begin = seconds_now();
            finished = wait_for(ticket, slice);
            const double late = seconds_now() - begin - slice;
            if (late > slice) stopped_seconds += late;
        }
        if (error) std::rethrow_exception(error);
    }

    bool wait_for(Ticket ticket, double seconds) {
        std::unique_lock lock(mutex);
        return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done >= ticket; });
    }

    template <class Job>
    void run(const Job& job) {
        wait_for(post(job));
    }
};

// A group of ranks that make collectives, and the algorithms. Everything here runs on the MPI thread.
struct Group {
    MPI_Comm comm = MPI_COMM_NULL;
    int rank = 0, size = 1, shard_index = 0;
    MpiThread& thread;
    bool votes[2] = {};  // results of the last two calls of any_rank: of an even and of an odd call number

    explicit Group(MpiThread& thread) : thread(thread) {}

    void open(MPI_Comm of_ranks) {
        comm = of_ranks;
        MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        MPI_CHECK(MPI_Comm_rank(comm, &rank));
        MPI_CHECK(MPI_Comm_size(comm, &size));
        shard_index = rank;
        if (!uses_halving()) return;
        shard_index = 0;
        for (int distance = 1; distance < size; distance *= 2) shard_index = 2 * shard_index + ((rank & distance) != 0);
    }

    bool uses_halving() const { return std::has_single_bit(unsigned(size)); }

    // The first `bytes` of a vector that only grows.
    static char* memory(std::vector<char>& vector, int64_t bytes) {
        if (int64_t(vector.size()) < bytes) vector.resize(bytes);
        return vector.data();
    }

    // Sends `count` elements of x to the partner and receives as many, in pieces. Calls take(at, received, n) with each
    // received piece.
    template <class Sent, class Element, class Take>
    void exchange_with(const Element* x, int64_t count, int partner, bool prompt, const Take& take) {
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
    void reduce_by_halving(Element* x, int64_t count, bool prompt) {
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
    void gather_shards(char* x, int64_t bytes, bool prompt) {
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

    // Sums of gradients, sent in this dtype, or of activations in fp32.
    void reduce_shards(float* x, int64_t count, GradDtype dtype, bool prompt) {
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

    // Sums of activations in bf16. If the number of ranks is not a power of two, each rank receives its shard from all
    // ranks, adds in the order of ranks in fp32, and rounds once.
    void reduce_shards(bf16* x, int64_t count, bool prompt) {
        if (uses_halving()) return reduce_by_halving<bf16>(x, count, prompt);
        const int64_t shard = count / size, bytes = shard * int64_t(sizeof(bf16));
        char* const received = memory(thread.incoming[0], bytes * size);
        MPI_Request request;
        MPI_CHECK(MPI_Ialltoall(x, narrow(bytes), MPI_BYTE, received, narrow(bytes), MPI_BYTE, comm, &request));
        finish(&request, 1, prompt);
        thread.sums.assign(shard, 0.0f);
        for (int r = 0; r < size; r++)
            add(thread.sums.data(), reinterpret_cast<const bf16*>(received + r * bytes), shard);
        for (int64_t i = 0; i < shard; i++) x[rank * shard + i] = bf16(thread.sums[i]);
    }

    void gather_all(char* x, int64_t bytes, bool prompt = false) {
        const int64_t shard = bytes / size;
        if (uses_halving()) return gather_shards(x, shard, prompt);
        MPI_Request request;
        MPI_CHECK(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, x, narrow(shard), MPI_BYTE, comm, &request));
        finish(&request, 1, prompt);
    }

    // Rounds this rank's shard of the sums to bf16, and all-gathers the bf16 values in the first half of x. Then
    // converts them to float from the end, so that float i overwrites only bf16 values that were already read.
    void gather_rounded(float* x, int64_t shard) {
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

    void broadcast(char* x, int64_t bytes, int from) {
        MPI_Request request;
        MPI_CHECK(MPI_Ibcast(x, narrow(bytes), MPI_BYTE, rank_of(from), comm, &request));
        finish(&request, 1);
    }

    // The rank that has a shard. The shard's index is the rank's index with its bits reversed.
    int rank_of(int shard) const {
        if (!uses_halving()) return shard;
        int rank = 0;
        for (int power = 1; power < size; power *= 2, shard /= 2) rank = 2 * rank + shard % 2;
        return rank;
    }

    std::vector<std::string> all_gather_text(const std::string& text) {
        std::vector<std::string> all(size);
        const int own = narrow(int64_t(text.size()));
        std::vector<int> sizes(size), at(size);
        MPI_Request request;
        MPI_CHECK(MPI_Iallgather(&own, 1, MPI_INT, sizes.data(), 1, MPI_INT, comm, &request));
        finish(&request, 1);
        int total = 0;
        for (int r = 0; r < size; r++) at[r] = total, total += sizes[r];
        std::string joined(total, 0);
        MPI_CHECK(MPI_Iallgatherv(text.data(), own, MPI_CHAR, joined.data(), sizes.data(), at.data(), MPI_CHAR, comm,
                                  &request));
        finish(&request, 1);
        for (int r = 0; r < size; r++) all[r] = joined.substr(at[r], sizes[r]);
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

// Collectives on device memory that is not host memory. They run when the training thread waits for them, because it is
// the only thread that calls the device, and it copies the buffers between device and host. The queue is common to all
// groups, so that all ranks run their collectives in the order of the calls.
struct StagedCollectives {
    using Ticket = Comm::Ticket;

    struct Collective {
        void* memory;
        int64_t bytes;
        Event ready;
        std::function<void(char* host)> job;
        Trace* trace;
    };
    MpiThread& thread;
    std::deque<Collective> waiting;
    Ticket queued = 0, moved = 0;
    std::vector<char> staging;
    OwnedStream copies;

    explicit StagedCollectives(MpiThread& thread) : thread(thread) {}

    Ticket queue(Collective collective, Stream after) {
        collective.ready = create_event();
        record_event(collective.ready, after);
        waiting.push_back(std::move(collective));
        return ++queued;
    }

    void run_until(Ticket ticket) {
        for (; moved < ticket; moved++) run_first();
    }

    void run_first() {
        const Collective& c = waiting.front();
        staging.resize(std::max<size_t>(staging.size(), c.bytes));
        wait_for_event(c.ready);
        destroy_event(c.ready);
        {
            const Span span(c.trace, Track::host, {.name = "copy to host", .bytes = c.bytes});
            copy_to_host(staging.data(), c.memory, c.bytes, copies.stream);
            wait_for_stream(copies.stream);
        }
        thread.run([&] { c.job(staging.data()); });
        const Span span(c.trace, Track::host, {.name = "copy to device", .bytes = c.bytes});
        copy_to_device(c.memory, staging.data(), c.bytes, copies.stream);
        wait_for_stream(copies.stream);
        waiting.pop_front();
    }
};

struct MpiComm : Comm {
    std::shared_ptr<MpiThread> thread;          // common to all groups
    std::shared_ptr<StagedCollectives> staged;  // common to all groups; null if device memory is host memory
    std::shared_ptr<Group> group;               // jobs share it, so that they may end after this Comm
    Ticket voted = 0;                           // ticket of the last any_rank; 0: none yet
    int64_t votes_begun = 0;

    MpiComm() : thread(std::make_shared<MpiThread>()), group(std::make_shared<Group>(*thread)) {}
    MpiComm(const MpiComm& whole, std::shared_ptr<Group> part)
        : thread(whole.thread), staged(whole.staged), group(std::move(part)) {
        parent = &whole;
        take_numbers();
    }

    // A group does not wait for its pending collectives: if an error ends this rank, the others never make them.
    ~MpiComm() override {
        if (parent)
            free_later(group);
        else
            thread->run([] { MPI_Finalize(); });
    }

    void free_later(const std::shared_ptr<Group>& of_ranks) {
        thread->post([of_ranks] { MPI_CHECK(MPI_Comm_free(&of_ranks->comm)); });
    }

    void take_numbers() {
        rank = group->rank;
        world_size = group->size;
        shard_index = group->shard_index;
    }

    // MPI_Init returns when all ranks have called it, so a rank that never calls it would block the others forever. At
    // the timeout all ranks look for missing ranks at the same time, but they fail one after the other: the first one
    // ends the job, which takes mpirun a second. Ranks of a host on which no rank is missing fail last.
    void join(const Launch& launch) {
        const Ticket started = thread->post([this, launch] { start(launch); });
        const double quiet = std::min(QUIET_SECONDS, launch.join_seconds), rest = launch.join_seconds - quiet;
        bool joined = thread->wait_for(started, quiet);
        if (!joined && rest > 0) {
            warn_of_missing_ranks(launch, quiet, rest);
            joined = thread->wait_for(started, rest);
        }
        if (!joined) {
            const MissingRanks missing = find_missing_ranks(launch, job_name());
            if (!thread->wait_for(started, missing.found ? 2.0 * std::clamp(launch.local_rank, 0, 3) : 8.0))
                fail(EXIT_INTERNAL, "gave up after waiting %g s for %s", launch.join_seconds, missing.text.c_str());
        }
        thread->wait_for(started);
        if (!device_memory_is_host()) staged = std::make_shared<StagedCollectives>(*thread);
        take_numbers();
    }

    // Only the first waiting rank of a host prints the warning: one line for each host.
    static void warn_of_missing_ranks(const Launch& launch, double waited, double rest) {
        const MissingRanks missing = find_missing_ranks(launch, job_name());
        if (!missing.reports) return;
        print_message(
            format("warning: rank %d on %s: still waiting after %g s for %s; giving up in %g s (--rendezvous-timeout)",
                   launch.rank, host_name().c_str(), waited, missing.text.c_str(), rest));
    }

    static std::string job_name() {
        const char* job = getenv("PMIX_NAMESPACE");
        return job ? job : "";
    }

    void start(const Launch& launch) {
        int granted;
        name_this_thread(WAITING_THREAD);
        MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &granted));
        name_this_thread("ranks");
        group->open(MPI_COMM_WORLD);
        ENSURE(
            group->rank == launch.rank && group->size == launch.world_size,
            "%s says rank %d of %d, but MPI says rank %d of %d: this program was built with another MPI than the one "
            "that started it",
            launch.launcher.c_str(), launch.rank, launch.world_size, group->rank, group->size);
    }

    std::unique_ptr<Comm> split(int color) override {
        INVARIANT(color >= 0, "a group of ranks has color %d", color);
        const auto part = std::make_shared<Group>(*thread);
        thread->run([&] {
            MPI_Comm made;
            MPI_CHECK(MPI_Comm_split(group->comm, color, rank, &made));
            part->open(made);
        });
        if (part->size > 1) return std::make_unique<MpiComm>(*this, part);
        free_later(part);
        return Comm::split(color);
    }

    std::string describe() const override {
        return format("%d ranks by MPI%s", world_size,
                      device_memory_is_host() ? "" : ", staged through host memory: slow");
    }

    void check_grad_dtype(GradDtype dtype) const override {
        ENSURE(dtype == GradDtype::fp32 || group->uses_halving(),
               "--grad-dtype bf16 by MPI needs 2, 4, 8, ... data-parallel ranks, not %d; give --grad-dtype fp32",
               world_size);
    }

    // Queues a collective on x (bytes), in which this rank sends `sent` bytes. The bytes are counted here, because the
    // MPI thread may run the collective as late as the next step. With the CPU backend x is host memory, and all
    // earlier work on it is complete.
    Ticket queue(const char* kind, void* x, int64_t bytes, int64_t sent, Stream after,
                 std::function<void(char* host)> unrecorded) {
        calls++;
        bytes_sent += sent;
        Trace* const trace_of_world = recorder();
        FlightRecorder* const flights_of_world = flight_recorder();
        const SpanLabel label = take_label();
        const Collective collective = next_collective(kind, bytes, label);
        std::function<void(char* host)> job = [=, unrecorded = std::move(unrecorded)](char* host) {
            const Span span(trace_of_world, Track::communication, label);
            const Flight flight(flights_of_world, collective);
            unrecorded(host);
        };
        if (staged) return staged->queue({x, bytes, nullptr, std::move(job), trace_of_world}, after);
        return thread->post([x, job = std::move(job)] { job(static_cast<char*>(x)); });
    }

    // Calls wait_for_others and adds its time to exposed_seconds.
    template <class Wait>
    void expose(const Wait& wait_for_others) {
        const double start = seconds_now(), stopped_before = thread->stopped_seconds;
        wait_for_others();
        exposed_seconds += seconds_now() - start - (thread->stopped_seconds - stopped_before);
    }

    void wait(Ticket ticket, Stream) override {
        expose([&] { staged ? staged->run_until(ticket) : thread->wait_for(ticket); });
    }

    // ---- collectives

    // Allocates memory that the first step would otherwise allocate.
    void reserve(GradDtype, int64_t count) override {
        if (!group->uses_halving()) thread->run([this, count] { thread->sums.reserve(count / world_size); });
    }

    // Bytes that a rank sends in a reduce-scatter or all-gather of `count` elements.
    int64_t share(int64_t count, int64_t element) const { return count / world_size * (world_size - 1) * element; }
    static int64_t bytes_of(GradDtype dtype) { return dtype == GradDtype::bf16 ? sizeof(bf16) : sizeof(float); }

    static void check(int64_t count, int world_size) {
        INVARIANT(count % world_size == 0, "a buffer of %lld elements cannot be divided among %d ranks",
                  static_cast<long long>(count), world_size);
    }

    Ticket queue_reduce_scatter(float* x, int64_t count, GradDtype dtype, bool prompt, Stream after) {
        check(count, world_size);
        return queue("reduce-scatter", x, count * int64_t(sizeof(float)), share(count, bytes_of(dtype)), after,
                     [=, group = group](char* host) {
                         group->reduce_shards(reinterpret_cast<float*>(host), count, dtype, prompt);
                     });
    }

    Ticket queue_all_reduce(float* x, int64_t count, GradDtype dtype, bool prompt, Stream after) {
        check(count, world_size);
        const int64_t sent = 2 * share(count, bytes_of(dtype));
        return queue("all-reduce", x, count * int64_t(sizeof(float)), sent, after, [=, group = group](char* host) {
            float* sums = reinterpret_cast<float*>(host);
            group->reduce_shards(sums, count, dtype, prompt);
            if (dtype == GradDtype::fp32) return group->gather_all(host, count * int64_t(sizeof(float)), prompt);
            group->gather_rounded(sums, count / group->size);
        });
    }

    Ticket reduce_scatter(float* x, int64_t count, GradDtype dtype, Stream after) override {
        return queue_reduce_scatter(x, count, dtype, false, after);
    }
    Ticket all_reduce(float* x, int64_t count, GradDtype dtype, Stream after) override {
        return queue_all_reduce(x, count, dtype, false, after);
    }
    Ticket reduce_scatter(float* x, int64_t count, Stream after) override {
        return queue_reduce_scatter(x, count, GradDtype::fp32, true, after);
    }
    Ticket all_reduce(float* x, int64_t count, Stream after) override {
        return queue_all_reduce(x, count, GradDtype::fp32, true, after);
    }

    Ticket reduce_scatter(bf16* x, int64_t count, Stream after) override {
        check(count, world_size);
        return queue(
            "reduce-scatter", x, count * int64_t(sizeof(bf16)), share(count, sizeof(bf16)), after,
            [=, group = group](char* host) { group->reduce_shards(reinterpret_cast<bf16*>(host), count, true); });
    }
    Ticket all_reduce(bf16* x, int64_t count, Stream after) override {
        check(count, world_size);
        const int64_t bytes = count * int64_t(sizeof(bf16));
        return queue("all-reduce", x, bytes, 2 * share(count, sizeof(bf16)), after, [=, group = group](char* host) {
            group->reduce_shards(reinterpret_cast<bf16*>(host), count, true);
            group->gather_all(host, bytes, true);
        });
    }

    Ticket queue_all_gather(void* x, int64_t bytes, bool prompt, Stream after) {
        check(bytes, world_size);
        return queue("all-gather", x, bytes, share(bytes, 1), after,
                     [=, group = group](char* host) { group->gather_all(host, bytes, prompt); });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream after) override {
        return queue_all_gather(x, bytes, false, after);
    }
    Ticket gather_activations(void* x, int64_t bytes, Stream after) override {
        return queue_all_gather(x, bytes, true, after);
    }

    Ticket broadcast(void* x, int64_t bytes, int from, Stream after) override {
        return queue("broadcast", x, bytes, 0, after,
                     [=, group = group](char* host) { group->broadcast(host, bytes, from); });
    }

    std::vector<std::string> all_gather_text(const std::string& text) override {
        std::vector<std::string> all;
        const Collective collective = next_collective("exchange of texts", int64_t(text.size()));
        thread->run([&] {
            const Flight flight(flight_recorder(), collective);
            all = group->all_gather_text(text);
        });
        return all;
    }

    bool any_rank(bool yes) override {
        const int64_t call = votes_begun++;
        const Collective collective = next_collective("vote", sizeof(int));
        const Ticket last = std::exchange(voted, thread->post([=, to = flight_recorder(), group = group] {
            const Flight flight(to, collective);
            group->vote(yes, call);
        }));
        Trace* const trace_of_world = recorder();
        const Track track = device_memory_is_host() ? Track::training : Track::host;
        const Span span(trace_of_world, track,
                        {.name = "wait for ranks", .step = trace_of_world ? trace_of_world->step : -1});
        expose([&] { thread->wait_for(last); });
        return group->votes[(call + 1) % 2];
    }

    [[noreturn]] void abort(int exit_code) override {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        Comm::abort(exit_code);
    }
};

}  // namespace

std::unique_ptr<Comm> make_mpi_comm(const Launch& launch) {
    MpiComm* comm = new MpiComm;
    comm->join(launch);  // if join throws, comm leaks: its thread may still be in MPI_Init
    return std::unique_ptr<Comm>(comm);
}
