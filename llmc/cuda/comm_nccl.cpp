// comm_nccl.cpp: collectives between GPUs by NCCL, on a stream of their own.
//
// Ranks that MPI started exchange NCCL's id by MPI; others exchange it by the rendezvous of rendezvous.h. NCCL calls do
// not block (blocking = 0), so that a missing rank ends the run after a timeout and does not hang it. A rank that ends
// during the run is detected while the host waits for the device: either NCCL reports an error, or this rank finds that
// a process on its machine has ended. The second check is needed because NCCL reports nothing about a process that it
// has no socket to. All communicators are then aborted at once; otherwise their kernels would spin for ever, and the
// abort of one would wait for the kernels of another.
//
// A group of ranks (split) is a communicator of its own with a stream of its own.
#include "parallel/comm.h"

#ifdef USE_NCCL
#include <nccl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <fstream>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "base/print.h"
#include "cuda/cuda_check.h"
#include "ops/ops.h"
#include "parallel/rendezvous.h"

namespace {

constexpr double CHECK_SECONDS = 0.5;   // interval between checks of the other processes
constexpr double GRACE_SECONDS = 5.0;   // duration of a wait before the first check: a rank that is done may have ended
constexpr double ABORT_SECONDS = 10.0;  // time that NCCL gets to finalize or abort
constexpr int OLDEST_TO_SPLIT = 21801;  // ncclCommSplit is in NCCL 2.18.1 and later

void watch_ranks(double seconds);

// Identifies this process to the other ranks: boot id, pid namespace and pid.
std::string process_identity() {
    char space[64] = "";
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
    return host_id() + space + " " + std::to_string(getpid());
}

bool has_ended(int process) {
    if (kill(process, 0) != 0 && errno == ESRCH) return true;
    std::ifstream file(format("/proc/%d/stat", process));
    std::string stat;
    std::getline(file, stat);
    const size_t name_end = stat.rfind(')');
    return name_end != std::string::npos && stat.compare(name_end, 3, ") Z") == 0;  // zombie: not waited for yet
}

struct NcclComm : Comm {
    std::unique_ptr<Comm> host;  // MPI, if MPI started the ranks
    ncclComm_t nccl = nullptr;  // null after abort_all
    std::string abort_reason;   // the reason of abort_all
    OwnedStream nccl_stream;    // the collectives' stream
    static constexpr int RING = 64;
    Event completed[RING];  // completed[t % RING]: the end of ticket t, or of a later ticket
    Ticket issued = 0;
    Ticket ended = 0;  // of the issued, those that the watchdog knows to have ended
    DeviceBuffer<bf16> bf16_gradients;                    // a bucket, rounded to be sent; with GradDtype::bf16 only

    // Two timers on the stream that waits, before and after a wait.
    struct Stall {
        Event from, to;
    };
    std::deque<Stall> stalls;        // stalls whose time is not yet added to exposed_seconds
    std::vector<Stall> free_stalls;  // unused timers

    struct Peer {
        int rank, process;
    };
    std::vector<Peer> local_peers;  // of the world's Comm: the other ranks on this machine
    double last_check = 0.0;        // time of the last check
    const std::thread::id thread = std::this_thread::get_id();

    explicit NcclComm(const Launch& launch) {
        rank = shard_index = launch.rank;
        world_size = launch.world_size;
        const ncclUniqueId id = exchange_id(launch);
        all().push_back(this);
        try {
            join(id);
            open();
        } catch (...) {
            leave();
            throw;
        }
    }

    // A group of the ranks of `whole`.
    NcclComm(const NcclComm& whole, ncclComm_t part, int rank_in_part, int size)
        : nccl(part) {
        parent = &whole;
        watchdog = whole.watchdog;
        rank = shard_index = rank_in_part;
        world_size = size;
        all().push_back(this);
        try {
            check("ncclCommSplit", ncclInProgress);
            open();
        } catch (...) {
            leave();
            throw;
        }
    }

    void open() {
        for (Event& event : completed) event = create_event();
        while_host_waits = watch_ranks;
    }

    // Removes this communicator from those that are watched and aborted.
    void leave() {
        all().erase(std::find(all().begin(), all().end(), this));
        if (all().empty()) while_host_waits = nullptr;
    }

    // All ranks finalize together. If an exception ends this rank, the others do not, so the communicator is left to
    // the end of the process.
    ~NcclComm() override {
        leave();
        for (Event event : completed) destroy_event(event);
        free_stalls.insert(free_stalls.end(), stalls.begin(), stalls.end());
        for (const Stall& stall : free_stalls) {
            destroy_event(stall.from);
            destroy_event(stall.to);
        }
        if (!nccl || std::uncaught_exceptions() > 0) return;
        ncclResult_t state = ncclCommFinalize(nccl);
        const double deadline = seconds_now() + ABORT_SECONDS;
        while (state == ncclInProgress && seconds_now() < deadline) {
            pause(1000);
            if (ncclCommGetAsyncError(nccl, &state) != ncclSuccess) break;
        }
        state == ncclSuccess ? ncclCommDestroy(nccl) : ncclCommAbort(nccl);
    }

    // The world's communicator and its groups, in the order of their creation.
    static std::vector<NcclComm*>& all() {
        static std::vector<NcclComm*> all;
        return all;
    }

    std::string describe() const override {
        int version = 0;
        ncclGetVersion(&version);
        return format("%d rank%s by NCCL %d.%d.%d", world_size, world_size == 1 ? "" : "s", version / 10000,
                      version / 100 % 100, version % 100);
    }

    static void pause(int tries) { std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 1000))); }

    // Waits until a non-blocking NCCL call has completed; aborts all communicators if it fails or does not complete.
    void check(const char* call, ncclResult_t result) {
        const double start = seconds_now();
        for (int tries = 0; result == ncclInProgress && seconds_now() - start < JOIN_SECONDS; tries++) {
            if (tries > 20) pause(tries);
            if (seconds_now() - start > GRACE_SECONDS) all()[0]->check_local_peers();
            if (ncclCommGetAsyncError(nccl, &result) != ncclSuccess) break;
        }
        if (result == ncclSuccess) return;
        if (result == ncclInProgress)
            abort_all(format("%s: %s after %.0f s: is a rank missing? NCCL_DEBUG=INFO says more", call,
                             ncclGetErrorString(result), JOIN_SECONDS));
        abort_comm(result, call);
    }

    [[noreturn]] void abort_comm(ncclResult_t result, const char* call) {
        const std::string more = ncclGetLastError(nccl);
        abort_all(format("%s%s: %s%s%s; NCCL_DEBUG=INFO says more",
                         result == ncclRemoteError ? "another rank is gone, or not to be reached: " : "", call,
                         ncclGetErrorString(result), more.empty() ? "" : ": ", more.c_str()));
    }

    // Aborts the pending collectives and ends this rank with EXIT_INTERNAL. A thread ends the process if NCCL hangs.
    [[noreturn]] static void abort_all(const std::string& why) {
        std::thread([line = format("error: rank %d on %s: %s", all()[0]->rank, host_name().c_str(), why.c_str())] {
            std::this_thread::sleep_for(std::chrono::duration<double>(ABORT_SECONDS));
            print_message(line);
            _exit(EXIT_INTERNAL);
        }).detach();
        abort_pending(why);
        fail(EXIT_INTERNAL, "%s", why.c_str());
    }

    // Aborts the pending collectives, which the other ranks will never join, so that memory can be freed. The
    // communicators are aborted as one NCCL group: the abort of a single one may wait for the device, and so for a
    // collective of another.
    static void abort_pending(const std::string& why) {
        while_host_waits = nullptr;
        ncclGroupStart();
        for (NcclComm* comm : all()) {
            comm->abort_reason = why;
            if (comm->nccl) ncclCommAbort(comm->nccl);
            comm->nccl = nullptr;
        }
        ncclGroupEnd();
    }

    // while_host_waits: called repeatedly while the host waits for the device. seconds: duration of the wait so far.
    static void watch(double seconds) {
        if (std::this_thread::get_id() != all()[0]->thread) return;
        for (NcclComm* comm : all()) {
            comm->check_state();
            comm->count_ended();
        }
        if (seconds > GRACE_SECONDS) all()[0]->check_local_peers();
    }

    void check_state() {
        if (!nccl) return;
        ncclResult_t state = ncclSuccess;
        const ncclResult_t result = ncclCommGetAsyncError(nccl, &state);
        if (result != ncclSuccess) state = result;
        if (state != ncclSuccess && state != ncclInProgress) abort_comm(state, "ncclCommGetAsyncError");
    }

    void check_local_peers() {
        const double now = seconds_now();
        if (now - last_check < CHECK_SECONDS) return;
        last_check = now;
        for (const Peer& n : local_peers)
            if (has_ended(n.process))
                abort_all(format("rank %d (process %d of this machine) has ended, and this rank waits for it", n.rank,
                                 n.process));
    }

    // ---- Joining

    static std::string new_id() {
        ncclUniqueId id;
        const ncclResult_t result = ncclGetUniqueId(&id);
        if (result != ncclSuccess) fail(EXIT_INTERNAL, "ncclGetUniqueId: %s", ncclGetErrorString(result));
        return {id.internal, sizeof id.internal};
    }

    // Returns NCCL's id, which rank 0 creates and sends to all.
    ncclUniqueId exchange_id(const Launch& launch) {
        const std::string rank_info = device_identity() + "\n" + process_identity();
        std::string bytes;
        if (world_size == 1) bytes = new_id();
#ifdef USE_MPI
        if (launch.mpi && world_size > 1) {
            host = make_mpi_comm(launch);
            record_peers(host->all_gather_text(rank_info));
            bytes = host->all_gather_text(rank == 0 ? new_id() : "")[0];
        }
#endif
        if (bytes.empty()) bytes = share_nccl_id(launch, device_identity(), new_id, JOIN_SECONDS);
        ncclUniqueId id;
        INVARIANT(bytes.size() == sizeof id.internal, "the id of NCCL has %zu bytes, %zu came", sizeof id.internal,
                  bytes.size());
        std::memcpy(id.internal, bytes.data(), bytes.size());
        return id;
    }

    void record_peers(const std::vector<std::string>& rank_infos) {
        std::vector<std::string> devices, processes;
        for (const std::string& rank_info : rank_infos) {
            const size_t line = rank_info.find('\n');
            devices.push_back(rank_info.substr(0, line));
            processes.push_back(rank_info.substr(line + 1));
        }
        check_own_devices(devices);
        const auto machine = [&](int r) { return processes[r].substr(0, processes[r].rfind(' ')); };
        for (int r = 0; r < world_size; r++)
            if (r != rank && machine(r) == machine(rank))
                local_peers.push_back({r, std::stoi(processes[r].substr(machine(r).size() + 1))});
    }

    static ncclConfig_t make_config() {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        if (device_comm_sms > 0) config.minCTAs = config.maxCTAs = device_comm_sms;
        return config;
    }

    void join(const ncclUniqueId& id) {
        ncclConfig_t config = make_config();
        check("ncclCommInitRankConfig", ncclCommInitRankConfig(&nccl, world_size, id, rank, &config));
    }

    // ncclCommSplit requires that no collective is pending. NCCL sets the new communicator when the old one is ready
    // again, and the new one then becomes ready.
    std::unique_ptr<Comm> split(int color) override {
        INVARIANT(color >= 0, "a group of ranks has color %d", color);
        const std::vector<std::string> colors = all_gather_text(std::to_string(color));
        const std::string own = std::to_string(color);
        const int size = int(std::count(colors.begin(), colors.end(), own));
        const int rank_in_part = int(std::count(colors.begin(), colors.begin() + rank, own));
        wait_for_stream(nccl_stream.stream);
        ncclComm_t part = nullptr;
        start_split(color, size, &part);
        return size == 1 ? Comm::split(color) : std::make_unique<NcclComm>(*this, part, rank_in_part, size);
    }

    // A rank that is alone in its group takes part in the call, but gets no communicator.
    void start_split([[maybe_unused]] int color, [[maybe_unused]] int size, [[maybe_unused]] ncclComm_t* part) {
        int version = 0;
        ncclGetVersion(&version);
        ENSURE(NCCL_VERSION_CODE >= OLDEST_TO_SPLIT && version >= OLDEST_TO_SPLIT,
               "groups of GPU ranks need NCCL 2.18.1 or later; this program was built with NCCL %d.%d.%d and runs with "
               "%d.%d.%d: install a newer NCCL and run make, or give --tensor-parallel 1",
               NCCL_VERSION_CODE / 10000, NCCL_VERSION_CODE / 100 % 100, NCCL_VERSION_CODE % 100, version / 10000,
               version / 100 % 100, version % 100);
#if NCCL_VERSION_CODE >= 21801
        ncclConfig_t config = make_config();
        check("ncclCommSplit", ncclCommSplit(nccl, size == 1 ? NCCL_SPLIT_NOCOLOR : color, rank, part, &config));
#endif
    }

    // ---- Collectives

    // Calls queue_calls, which queues a collective on nccl_stream. The collective runs after the work that stream
    // `after` has now. Returns its ticket. For the watchdog, a collective begins when the host queues it.
    template <class Calls>
    Ticket start(Stream after, const Calls& queue_calls) {
        if (!nccl) fail(EXIT_INTERNAL, "%s", abort_reason.c_str());
        calls++;
        count_ended();
        if (watchdog) watchdog->collective_begins();
        Event& event = completed[++issued % RING];
        record_event(event, after);
        stream_wait_event(nccl_stream.stream, event);
        queue_calls();
        record_event(event, nccl_stream.stream);
        return issued;
    }

    // Tells the watchdog of the collectives that have ended since the last call.
    void count_ended() {
        for (; watchdog && ended < issued && event_done(completed[(ended + 1) % RING]); ended++)
            watchdog->collective_ended();
    }

    void wait(Ticket ticket, Stream stream) override {
        if (ticket <= 0) return;
        if (free_stalls.empty()) free_stalls.push_back({create_timer(), create_timer()});
        const Stall stall = free_stalls.back();
        free_stalls.pop_back();
        record_event(stall.from, stream);
        stream_wait_event(stream, completed[ticket % RING]);
        record_event(stall.to, stream);
        stalls.push_back(stall);
        waits++;
    }

    double exposed(int64_t first_waits) override {
        while (waits - int64_t(stalls.size()) < first_waits && event_done(stalls.front().to)) {
            exposed_seconds += seconds_between(stalls.front().from, stalls.front().to);
            free_stalls.push_back(stalls.front());
            stalls.pop_front();
        }
        return exposed_seconds;
    }

    void reserve(GradDtype dtype, int64_t max_count) override {
        if (dtype == GradDtype::bf16 && bf16_gradients.size < max_count)
            bf16_gradients = DeviceBuffer<bf16>(max_count, "gradients rounded to bf16 (--grad-dtype bf16)");
    }

    // Bytes that a rank sends in a reduce-scatter of `count` elements. An all-reduce sends twice as many.
    int64_t reduce_scatter_bytes(int64_t count, GradDtype dtype) const {
        return count / world_size * (world_size - 1) * int64_t(dtype == GradDtype::bf16 ? sizeof(bf16) : sizeof(float));
    }

    bf16* round(const float* x, int64_t count) {
        INVARIANT(count <= bf16_gradients.size, "%lld gradients to be rounded, memory for %lld is reserved",
                  static_cast<long long>(count), static_cast<long long>(bf16_gradients.size));
        ops::round_gradients(bf16_gradients.data, x, count, nccl_stream.stream);
        return bf16_gradients.data;
    }

    void sum_all(void* x, int64_t count, ncclDataType_t type) {
        check("ncclAllReduce", ncclAllReduce(x, x, size_t(count), type, ncclSum, nccl, nccl_stream.stream));
    }
    void sum_shards(const void* x, void* own, int64_t own_count, ncclDataType_t type) {
        check("ncclReduceScatter",
              ncclReduceScatter(x, own, size_t(own_count), type, ncclSum, nccl, nccl_stream.stream));
    }

    Ticket all_reduce(float* x, int64_t count, GradDtype dtype, Stream after) override {
        bytes_sent += 2 * reduce_scatter_bytes(count, dtype);
        return start(after, [&] {
            if (dtype == GradDtype::fp32) return sum_all(x, count, ncclFloat);
            sum_all(round(x, count), count, ncclBfloat16);
            ops::widen_gradients(x, bf16_gradients.data, count, nccl_stream.stream);
        });
    }
    Ticket reduce_scatter(float* x, int64_t count, GradDtype dtype, Stream after) override {
        const int64_t own = count / world_size, at = rank * own;
        bytes_sent += reduce_scatter_bytes(count, dtype);
        return start(after, [&] {
            if (dtype == GradDtype::fp32) return sum_shards(x, x + at, own, ncclFloat);
            bf16* const all = round(x, count);
            sum_shards(all, all + at, own, ncclBfloat16);
            ops::widen_gradients(x + at, all + at, own, nccl_stream.stream);
        });
    }
    using Comm::all_reduce;  // of activations in fp32: the same as of gradients
    using Comm::reduce_scatter;
    Ticket all_reduce(bf16* x, int64_t count, Stream after) override {
        bytes_sent += 2 * reduce_scatter_bytes(count, GradDtype::bf16);
        return start(after, [&] { sum_all(x, count, ncclBfloat16); });
    }
    Ticket reduce_scatter(bf16* x, int64_t count, Stream after) override {
        const int64_t own = count / world_size;
        bytes_sent += reduce_scatter_bytes(count, GradDtype::bf16);
        return start(after,
                     [&] { sum_shards(x, x + rank * own, own, ncclBfloat16); });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream after) override {
        const int64_t own = bytes / world_size;
        bytes_sent += (world_size - 1) * own;
        const char* from = static_cast<char*>(x) + rank * own;
        return start(after, [&] {
            check("ncclAllGather", ncclAllGather(from, x, size_t(own), ncclInt8, nccl, nccl_stream.stream));
        });
    }
    Ticket broadcast(void* x, int64_t bytes, int from, Stream after) override {
        return start(after, [&] {
            check("ncclBroadcast", ncclBroadcast(x, x, size_t(bytes), ncclInt8, from, nccl, nccl_stream.stream));
        });
    }

    void connect() override {
        constexpr int64_t large = 1 << 20;  // elements of a rank
        const int64_t sent = bytes_sent, made = calls;
        const Stream stream = nccl_stream.stream;
        const DeviceBuffer<float> x(large * world_size, "the first collectives");
        fill_zero(x.data, x.bytes(), stream);
        for (const int64_t own : {int64_t(1), large}) {
            const int64_t count = own * world_size;
            all_reduce(x.data, count, GradDtype::fp32, stream);
            reduce_scatter(x.data, count, GradDtype::fp32, stream);
            all_gather(x.data, count * int64_t(sizeof(float)), stream);
            broadcast(x.data, count * int64_t(sizeof(float)), 0, stream);
        }
        wait_for_stream(stream);
        bytes_sent = sent;
        calls = made;
    }

    // An all-gather over the GPUs: first of the sizes, then of the texts, each padded to the longest.
    std::vector<std::string> all_gather_text(const std::string& text) override {
        DeviceBuffer<int64_t> sizes(world_size, "sizes of messages");
        const int64_t own = int64_t(text.size());
        copy_to_device(sizes.data + rank, &own, sizeof own, nccl_stream.stream);
        all_gather(sizes.data, sizes.bytes(), nccl_stream.stream);
        wait_for_stream(nccl_stream.stream);
        const std::vector<int64_t> size_of = to_host(sizes.data, world_size);
        const int64_t longest = std::max<int64_t>(1, *std::max_element(size_of.begin(), size_of.end()));

        DeviceBuffer<char> texts(longest * world_size, "messages");
        copy_to_device(texts.data + rank * longest, text.data(), own, nccl_stream.stream);
        all_gather(texts.data, texts.bytes(), nccl_stream.stream);
        wait_for_stream(nccl_stream.stream);
        const std::vector<char> padded = to_host(texts.data, texts.size);
        std::vector<std::string> all;
        for (int r = 0; r < world_size; r++) all.emplace_back(padded.data() + r * longest, size_of[r]);
        return all;
    }

    [[noreturn]] void abort(int exit_code) override {
        if (Comm* const by_mpi = all().empty() ? nullptr : all()[0]->host.get()) by_mpi->abort(exit_code);
        Comm::abort(exit_code);  // the launcher then ends the other ranks
    }
};

void watch_ranks(double seconds) { NcclComm::watch(seconds); }

}  // namespace

bool device_joins_ranks() { return true; }
std::unique_ptr<Comm> make_device_comm(const Launch& launch) { return std::make_unique<NcclComm>(launch); }
#else
bool device_joins_ranks() { return false; }
std::unique_ptr<Comm> make_device_comm(const Launch&) { return nullptr; }
#endif
