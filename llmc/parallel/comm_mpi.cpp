// comm_mpi.cpp: MPI between CPU ranks, and between GPU ranks through host memory. mpi_group.h has the algorithms.
#include <algorithm>
#include <deque>
#include <functional>
#include <memory>

#include "base/common.h"
#include "base/host.h"
#include "base/socket.h"
#include "base/print.h"
#include "parallel/comm.h"
#include "parallel/mpi_group.h"

namespace {

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
            copy_to_host(staging.data(), c.memory, c.bytes, copies.stream);
            wait_for_stream(copies.stream);
        }
        thread.run([&] { c.job(staging.data()); });
        copy_to_device(c.memory, staging.data(), c.bytes, copies.stream);
        wait_for_stream(copies.stream);
        waiting.pop_front();
    }
};

// A collective that begins, and ends with the block.
struct Watched {
    const std::shared_ptr<Watchdog> watchdog;

    explicit Watched(std::shared_ptr<Watchdog> watched) : watchdog(std::move(watched)) {
        if (watchdog) watchdog->collective_begins();
    }
    Watched(const Watched&) = delete;
    ~Watched() {
        if (watchdog) watchdog->collective_ended();
    }
};

struct MpiComm : Comm {
    std::shared_ptr<MpiThread> thread;          // common to all groups
    std::shared_ptr<StagedCollectives> staged;  // common to all groups; null if device memory is host memory
    std::shared_ptr<MpiGroup> group;            // jobs share it, so that they may end after this Comm
    Ticket voted = 0;                           // ticket of the last any_rank; 0: none yet
    int64_t votes_begun = 0;

    MpiComm() : thread(std::make_shared<MpiThread>()), group(std::make_shared<MpiGroup>(*thread)) {}
    MpiComm(const MpiComm& whole, std::shared_ptr<MpiGroup> part)
        : thread(whole.thread), staged(whole.staged), group(std::move(part)) {
        parent = &whole;
        watchdog = whole.watchdog;
        take_numbers();
    }

    // A group does not wait for its pending collectives: if an error ends this rank, the others never make them.
    ~MpiComm() override {
        if (parent)
            free_later(group);
        else
            thread->run([] { MPI_Finalize(); });
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
        if (!device_memory_is_host()) staged = std::make_shared<StagedCollectives>(*thread);
        take_numbers();
    }

    void start(const Launch& launch) {
        int granted;
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
                 std::function<void(char* host)> calls_of_mpi) {
        calls++;
        bytes_sent += sent;
        std::function<void(char* host)> job = [=, watched = watchdog,
                                               calls_of_mpi = std::move(calls_of_mpi)](char* host) {
            const ProfileRange range(kind);
            const Watched collective(watched);
            calls_of_mpi(host);
        };
        if (staged) return staged->queue({x, bytes, nullptr, std::move(job)}, after);
        return thread->post([x, job = std::move(job)] { job(static_cast<char*>(x)); });
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
        return queue("reduce-scatter", x, count * int64_t(sizeof(bf16)), share(count, sizeof(bf16)), after,
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
        thread->run([&] {
            const Watched collective(watchdog);
            all = group->all_gather_text(text);
        });
        return all;
    }

    bool any_rank(bool yes) override {
        const int64_t call = votes_begun++;
        const Ticket last = std::exchange(voted, thread->post([=, watched = watchdog, group = group] {
            const Watched collective(watched);
            group->vote(yes, call);
        }));
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
    const std::vector<std::string> addresses = addresses_of_this_host();
    if (std::any_of(addresses.begin(), addresses.end(), [](const std::string& a) { return a.find(':') == a.npos; }))
        setenv("OMPI_MCA_btl_tcp_disable_family", "6", 0);
}

std::unique_ptr<Comm> make_mpi_comm(const Launch& launch) {
    prefer_ipv4();
    MpiComm* comm = new MpiComm;
    comm->join(launch);  // if join throws, comm leaks: its thread may still be in MPI_Init
    return std::unique_ptr<Comm>(comm);
}
