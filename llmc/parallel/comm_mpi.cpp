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
// One thread makes all MPI calls, so that the training thread can continue. The thread sleeps while it waits: Open MPI
// would spin on the core that training needs.
#define OMPI_SKIP_MPICXX 1  // no C++ bindings: MPI has removed them
#include <mpi.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
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
#include "parallel/comm.h"
#include "parallel/missing_ranks.h"

namespace {

constexpr double QUIET_SECONDS = 10;  // wait before the first warning about missing ranks
constexpr int64_t PIECE = 1 << 20;    // elements in one message; the next message is sent while this one is added

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

// Waits until the requests are done; sleeps between tests, to leave the core to training.
void finish(MPI_Request* requests, int count) {
    int done = 0;
    for (int tries = 0;; tries++) {
        MPI_CHECK(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE));
        if (done) return;
        if (tries > 20) std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 100)));
    }
}

// TCP gives up on a host after 15 minutes without an answer. limit_silence makes the connections of this process give
// up after 30 s: Open MPI then aborts the run and names the host. This must happen before mpirun notices on its own
// connections: Open MPI 5's mpirun notices after 8 minutes, and then ends with exit code 0.
constexpr int SILENT_SECONDS = 30;

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

struct MpiComm : Comm {
    std::thread thread;
    std::mutex mutex;  // guards the members below
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    Ticket posted = 0, done = 0;
    std::exception_ptr error;
    double stopped_seconds = 0.0;  // time in which this process was not running while the training thread waited

    struct Staged {
        void* memory;
        int64_t bytes;
        Event ready;
        std::function<void(char* host)> job;
    };
    std::deque<Staged> staged;  // collectives on device memory, which run when the training thread waits for them
    Ticket queued = 0, moved = 0;
    std::unique_ptr<OwnedStream> copies;

    Ticket voted = 0;    // ticket of the last any_rank; 0: none yet
    bool votes[2] = {};  // results of the last two calls of any_rank: of an even and of an odd call number
    int64_t votes_begun = 0;

    std::vector<char> outgoing, incoming[2], staging;
    std::vector<float> own_sums;

    MpiComm() {
        thread = std::thread([this] { work(); });
    }

    ~MpiComm() override {
        run_on_thread([] { MPI_Finalize(); });
        post(nullptr);
        thread.join();
    }

    // MPI_Init returns when all ranks have called it, so a rank that never calls it would block the others forever. At
    // the timeout all ranks look for missing ranks at the same time, but they fail one after the other: the first one
    // ends the job, which takes mpirun a second. Ranks of a host on which no rank is missing fail last.
    void join(const Launch& launch) {
        const Ticket started = post([this, launch] { start(launch); });
        const double quiet = std::min(QUIET_SECONDS, launch.join_seconds), rest = launch.join_seconds - quiet;
        bool joined = wait_for(started, quiet);
        if (!joined && rest > 0) {
            warn_of_missing_ranks(launch, quiet, rest);
            joined = wait_for(started, rest);
        }
        if (!joined) {
            const MissingRanks missing = find_missing_ranks(launch, job_name());
            if (!wait_for(started, missing.found ? 2.0 * std::clamp(launch.local_rank, 0, 3) : 8.0))
                fail(EXIT_INTERNAL, "gave up after waiting %g s for %s", launch.join_seconds, missing.text.c_str());
        }
        wait_for(started);
        if (!device_memory_is_host()) copies = std::make_unique<OwnedStream>();
    }

    // Only the first waiting rank of a host prints the warning: one line for each host.
    static void warn_of_missing_ranks(const Launch& launch, double waited, double rest) {
        const MissingRanks missing = find_missing_ranks(launch, job_name());
        if (!missing.reports) return;
        fprintf(stderr,
                "warning: rank %d on %s: still waiting after %g s for %s; giving up in %g s (--rendezvous-timeout)\n",
                launch.rank, host_name().c_str(), waited, missing.text.c_str(), rest);
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
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
        MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &world_size));
        ENSURE(
            rank == launch.rank && world_size == launch.world_size,
            "%s says rank %d of %d, but MPI says rank %d of %d: this program was built with another MPI than the one "
            "that started it",
            launch.launcher.c_str(), launch.rank, launch.world_size, rank, world_size);
        shard_index = rank;
        if (uses_halving()) {
            shard_index = 0;
            for (int distance = 1; distance < world_size; distance *= 2)
                shard_index = 2 * shard_index + ((rank & distance) != 0);
        }
    }

    bool uses_halving() const { return std::has_single_bit(unsigned(world_size)); }

    std::string describe() const override {
        return format("%d ranks by MPI%s", world_size,
                      device_memory_is_host() ? "" : ", staged through host memory: slow");
    }

    void check_grad_dtype(GradDtype dtype) const override {
        ENSURE(dtype == GradDtype::fp32 || uses_halving(),
               "--grad-dtype bf16 by MPI needs 2, 4, 8, ... ranks, not %d; give --grad-dtype fp32", world_size);
    }

    // ---- the MPI thread and its queue

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
    void run_on_thread(const Job& job) {
        wait_for(post(job));
    }

    // Queues a collective on x (bytes), in which this rank sends `sent` bytes. The bytes are counted here, because the
    // MPI thread may run the collective as late as the next step. With the CPU backend x is host memory, and all
    // earlier work on it is complete.
    Ticket queue(void* x, int64_t bytes, int64_t sent, Stream after, std::function<void(char* host)> job) {
        calls++;
        bytes_sent += sent;
        if (const SpanLabel name = take_label(); name.name)
            job = [=, this, untraced = std::move(job)](char* host) {
                const Span span(trace.get(), Track::communication, name);
                untraced(host);
            };
        if (device_memory_is_host()) return post([=] { job(static_cast<char*>(x)); });
        const Event ready = create_event();
        record_event(ready, after);
        staged.push_back({x, bytes, ready, std::move(job)});
        return ++queued;
    }

    // Calls wait_for_others and adds its time to exposed_seconds.
    template <class Wait>
    void expose(const Wait& wait_for_others) {
        const double start = seconds_now(), stopped_before = stopped_seconds;
        wait_for_others();
        exposed_seconds += seconds_now() - start - (stopped_seconds - stopped_before);
    }

    // The waiting thread copies the buffers of staged collectives between device and host, because it is the only
    // thread that calls the device.
    void wait(Ticket ticket, Stream) override {
        expose([&] {
            if (device_memory_is_host()) wait_for(ticket);
            for (; !device_memory_is_host() && moved < ticket; moved++) move_staged();
        });
    }

    void move_staged() {
        const Staged& s = staged.front();
        staging.resize(std::max<size_t>(staging.size(), s.bytes));
        wait_for_event(s.ready);
        destroy_event(s.ready);
        {
            const Span span(trace.get(), Track::host, {.name = "copy to host", .bytes = s.bytes});
            copy_to_host(staging.data(), s.memory, s.bytes, copies->stream);
            wait_for_stream(copies->stream);
        }
        run_on_thread([&] { s.job(staging.data()); });
        const Span span(trace.get(), Track::host, {.name = "copy to device", .bytes = s.bytes});
        copy_to_device(s.memory, staging.data(), s.bytes, copies->stream);
        wait_for_stream(copies->stream);
        staged.pop_front();
    }

    // ---- exchanges between two ranks, called on the MPI thread

    // Sends `count` elements of x to the partner and receives as many, in pieces. Calls take(at, received, n) with each
    // received piece.
    template <class Sent, class Take>
    void exchange_with(const float* x, int64_t count, int partner, const Take& take) {
        outgoing.resize(sizeof(Sent) * PIECE);
        for (auto& buffer : incoming) buffer.resize(sizeof(Sent) * PIECE);
        MPI_Request requests[2][2];
        const auto begin = [&](int64_t at, int slot) {
            const int n = int(std::min(PIECE, count - at)), bytes = n * int(sizeof(Sent));
            const void* out = x + at;
            if constexpr (!std::is_same_v<Sent, float>) {
                Sent* rounded = reinterpret_cast<Sent*>(outgoing.data());
                for (int i = 0; i < n; i++) rounded[i] = Sent(x[at + i]);
                out = rounded;
            }
            MPI_CHECK(
                MPI_Irecv(incoming[slot].data(), bytes, MPI_BYTE, partner, 0, MPI_COMM_WORLD, &requests[slot][0]));
            MPI_CHECK(MPI_Isend(out, bytes, MPI_BYTE, partner, 0, MPI_COMM_WORLD, &requests[slot][1]));
        };
        constexpr bool ahead = std::is_same_v<Sent, float>;  // bf16 has one rounding buffer only
        if (count > 0) begin(0, 0);
        for (int64_t at = 0, slot = 0; at < count; at += PIECE, slot ^= 1) {
            const int64_t next = at + PIECE;
            if (ahead && next < count) begin(next, slot ^ 1);
            finish(requests[slot], 2);
            if (!ahead && next < count) begin(next, slot ^ 1);
            take(at, reinterpret_cast<const Sent*>(incoming[slot].data()), std::min(PIECE, count - at));
        }
    }

    template <class Sent>
    void reduce_by_halving(float* x, int64_t count) {
        for (int distance = 1; distance < world_size; distance *= 2) {
            const int64_t half = count / 2;
            float *keep = x, *give = x + half;
            if (rank & distance) std::swap(keep, give);
            exchange_with<Sent>(give, half, rank ^ distance, [&](int64_t at, const Sent* received, int64_t n) {
                for (int64_t i = 0; i < n; i++) keep[at + i] += float(received[i]);
            });
            x = keep, count = half;
        }
    }

    // All-gathers the shards, each of `size` bytes: the block that a rank holds doubles with each exchange.
    void gather_shards(char* x, int64_t size) {
        constexpr int64_t most = 1 << 30;
        int64_t have = shard_index;  // first shard that this rank holds
        int64_t shards = 1;
        for (int distance = world_size / 2; distance >= 1; distance /= 2, shards *= 2) {
            const int64_t other = have ^ shards, bytes = shards * size;
            for (int64_t at = 0; at < bytes; at += most) {
                const int n = int(std::min(most, bytes - at));
                MPI_Request requests[2];
                MPI_CHECK(
                    MPI_Irecv(x + other * size + at, n, MPI_BYTE, rank ^ distance, 1, MPI_COMM_WORLD, &requests[0]));
                MPI_CHECK(
                    MPI_Isend(x + have * size + at, n, MPI_BYTE, rank ^ distance, 1, MPI_COMM_WORLD, &requests[1]));
                finish(requests, 2);
            }
            have = std::min(have, other);
        }
    }

    void reduce_shards(float* x, int64_t count, GradDtype dtype) {
        if (uses_halving())
            return dtype == GradDtype::bf16 ? reduce_by_halving<bf16>(x, count) : reduce_by_halving<float>(x, count);
        const int64_t size = count / world_size;
        own_sums.resize(size);
        MPI_Request request;
        MPI_CHECK(
            MPI_Ireduce_scatter_block(x, own_sums.data(), narrow(size), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request));
        finish(&request, 1);
        std::copy(own_sums.begin(), own_sums.end(), x + rank * size);
    }

    void gather_all(char* x, int64_t bytes) {
        const int64_t size = bytes / world_size;
        if (uses_halving()) return gather_shards(x, size);
        MPI_Request request;
        MPI_CHECK(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, x, narrow(size), MPI_BYTE, MPI_COMM_WORLD, &request));
        finish(&request, 1);
    }

    // ---- collectives

    // Allocates memory that the first step would otherwise allocate.
    void reserve(GradDtype, int64_t count) override {
        if (!uses_halving()) own_sums.resize(count / world_size);
    }

    // Bytes that a rank sends in a reduce-scatter or all-gather of `count` elements.
    int64_t share(int64_t count, int64_t element) const { return count / world_size * (world_size - 1) * element; }
    static int64_t bytes_of(GradDtype dtype) { return dtype == GradDtype::bf16 ? sizeof(bf16) : sizeof(float); }

    static void check(int64_t count, int world_size) {
        INVARIANT(count % world_size == 0, "a buffer of %lld elements cannot be divided among %d ranks",
                  static_cast<long long>(count), world_size);
    }

    Ticket reduce_scatter(float* x, int64_t count, GradDtype dtype, Stream after) override {
        check(count, world_size);
        return queue(x, count * int64_t(sizeof(float)), share(count, bytes_of(dtype)), after,
                     [=, this](char* host) { reduce_shards(reinterpret_cast<float*>(host), count, dtype); });
    }

    Ticket all_reduce(float* x, int64_t count, GradDtype dtype, Stream after) override {
        check(count, world_size);
        const int64_t sent = 2 * share(count, bytes_of(dtype));
        return queue(x, count * int64_t(sizeof(float)), sent, after, [=, this](char* host) {
            float* sums = reinterpret_cast<float*>(host);
            reduce_shards(sums, count, dtype);
            if (dtype == GradDtype::fp32) return gather_all(host, count * int64_t(sizeof(float)));
            gather_rounded(sums, count / world_size);
        });
    }

    // Rounds this rank's shard of the sums to bf16, and all-gathers the bf16 values in the first half of x. Then
    // converts them to float from the end, so that float i overwrites only bf16 values that were already read.
    void gather_rounded(float* x, int64_t size) {
        char* memory = reinterpret_cast<char*>(x);
        const auto at = [&](int64_t i) { return memory + i * int64_t(sizeof(bf16)); };
        for (int64_t i = shard_index * size; i < (shard_index + 1) * size; i++) {
            const bf16 sum(x[i]);
            std::memcpy(at(i), &sum, sizeof sum);
        }
        gather_all(memory, size * world_size * int64_t(sizeof(bf16)));
        for (int64_t i = size * world_size - 1; i >= 0; i--) {
            bf16 sum;
            std::memcpy(&sum, at(i), sizeof sum);
            x[i] = float(sum);
        }
    }

    Ticket all_gather(void* x, int64_t bytes, Stream after) override {
        check(bytes, world_size);
        return queue(x, bytes, share(bytes, 1), after, [=, this](char* host) { gather_all(host, bytes); });
    }

    Ticket broadcast(void* x, int64_t bytes, int from, Stream after) override {
        return queue(x, bytes, 0, after, [=, this](char* host) {
            MPI_Request request;
            MPI_CHECK(MPI_Ibcast(host, narrow(bytes), MPI_BYTE, rank_of(from), MPI_COMM_WORLD, &request));
            finish(&request, 1);
        });
    }

    // The rank that has a shard. The shard's index is the rank's index with its bits reversed.
    int rank_of(int shard) const {
        if (!uses_halving()) return shard;
        int rank = 0;
        for (int size = 1; size < world_size; size *= 2, shard /= 2) rank = 2 * rank + shard % 2;
        return rank;
    }

    std::vector<std::string> all_gather_text(const std::string& text) override {
        std::vector<std::string> all(world_size);
        run_on_thread([&] {
            const int own = narrow(int64_t(text.size()));
            std::vector<int> sizes(world_size), at(world_size);
            MPI_Request request;
            MPI_CHECK(MPI_Iallgather(&own, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD, &request));
            finish(&request, 1);
            int total = 0;
            for (int r = 0; r < world_size; r++) at[r] = total, total += sizes[r];
            std::string joined(total, 0);
            MPI_CHECK(MPI_Iallgatherv(text.data(), own, MPI_CHAR, joined.data(), sizes.data(), at.data(), MPI_CHAR,
                                      MPI_COMM_WORLD, &request));
            finish(&request, 1);
            for (int r = 0; r < world_size; r++) all[r] = joined.substr(at[r], sizes[r]);
        });
        return all;
    }

    bool any_rank(bool yes) override {
        bool& vote = votes[votes_begun % 2];
        const bool& before = votes[(votes_begun + 1) % 2];
        votes_begun++;
        const Ticket last =
            std::exchange(voted, post([yes, &vote] {
                              const int own = yes;
                              int any = 0;
                              MPI_Request request;
                              MPI_CHECK(MPI_Iallreduce(&own, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &request));
                              finish(&request, 1);
                              vote = any != 0;
                          }));
        const Track track = device_memory_is_host() ? Track::training : Track::host;
        const Span span(trace.get(), track, {.name = "wait for ranks", .step = trace ? trace->step : -1});
        expose([&] { wait_for(last); });
        return before;
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
