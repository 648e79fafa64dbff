// comm_nccl.cpp: NCCL between GPUs, on a stream of its own.
//
// The id that ranks join by goes over MPI where MPI started them, else over the meeting of rendezvous.h. Calls do not
// block (blocking = 0): a rank that is gone ends the run after a deadline instead of hanging it. Later one is noticed
// while the host waits for the device: by NCCL's own word, or, since NCCL has none for a process that no socket leads
// to, by looking whether the processes of this machine are alive. The communicator is then aborted, without which its
// kernels would turn for ever.
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
#include <fstream>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "cuda/cuda_check.h"
#include "ops/ops.h"
#include "parallel/rendezvous.h"

namespace {

constexpr double LOOK_SECONDS = 0.5;    // between looks at the other processes
constexpr double GRACE_SECONDS = 5.0;   // of one wait: a rank that is through may end first
constexpr double ABORT_SECONDS = 10.0;  // for NCCL to give up

void watch_ranks(double seconds);

// A process of this machine, as the others may name it: with the kernel and the name space that its number belongs to.
std::string process_card() {
    char space[64] = "";
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
    return boot_id() + space + " " + std::to_string(getpid());
}

bool has_ended(int process) {
    if (kill(process, 0) != 0 && errno == ESRCH) return true;
    std::ifstream file(format("/proc/%d/stat", process));
    std::string stat;
    std::getline(file, stat);
    const size_t name_end = stat.rfind(')');
    return name_end != std::string::npos && stat.compare(name_end, 3, ") Z") == 0;  // nobody has asked for it yet
}

struct NcclComm : Comm {
    std::unique_ptr<Comm> host;  // MPI, where it is there
    const double join_seconds;
    ncclComm_t nccl = nullptr;  // null after the loss of a rank
    std::string loss;           // then why
    OwnedStream queue;
    static constexpr int RING = 64;
    Event reached[RING];  // of ticket t at t % RING, or of a later one
    Ticket issued = 0;
    DeviceBuffer<bf16> rounded;  // what travels, with ReduceDtype::bf16

    struct Stall {
        Event from, to;  // timers on the stream that waits
    };
    std::deque<Stall> stands;  // not added to exposed_seconds yet
    std::vector<Stall> spare;

    struct Neighbour {
        int rank, process;
    };
    std::vector<Neighbour> neighbours;  // on this machine
    double looked = 0.0;                // when
    const std::thread::id thread = std::this_thread::get_id();

    explicit NcclComm(const Launch& launch) : join_seconds(launch.join_seconds) {
        rank = part = launch.rank, world_size = launch.world_size;
        join(meet_ranks(launch));
        for (Event& event : reached) event = create_event();
        joined() = this, while_host_waits = watch_ranks;
    }

    ~NcclComm() override {
        joined() = nullptr, while_host_waits = nullptr;
        for (Event event : reached) destroy_event(event);
        spare.insert(spare.end(), stands.begin(), stands.end());
        for (const Stall& stand : spare) destroy_event(stand.from), destroy_event(stand.to);
        if (!nccl) return;
        ncclResult_t state = ncclCommFinalize(nccl);
        const double deadline = seconds_now() + ABORT_SECONDS;
        while (state == ncclInProgress && seconds_now() < deadline) {
            pause(1000);
            if (ncclCommGetAsyncError(nccl, &state) != ncclSuccess) break;
        }
        state == ncclSuccess ? ncclCommDestroy(nccl) : ncclCommAbort(nccl);
    }

    static NcclComm*& joined() {
        static NcclComm* joined = nullptr;
        return joined;
    }

    std::string describe() const override {
        int version = 0;
        ncclGetVersion(&version);
        return format("%d rank%s by NCCL %d.%d.%d", world_size, world_size == 1 ? "" : "s", version / 10000,
                      version / 100 % 100, version % 100);
    }

    static void pause(int tries) { std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 1000))); }

    // What a call that does not block came to.
    void check(const char* call, ncclResult_t result) {
        const double start = seconds_now();
        for (int tries = 0; result == ncclInProgress && seconds_now() - start < join_seconds; tries++) {
            if (tries > 20) pause(tries);
            if (seconds_now() - start > GRACE_SECONDS) look_for_neighbours();
            if (ncclCommGetAsyncError(nccl, &result) != ncclSuccess) break;
        }
        if (result == ncclSuccess) return;
        if (result == ncclInProgress)
            abort_comm(format("%s: %s after %.0f s: is a rank missing? NCCL_DEBUG=INFO says more", call,
                              ncclGetErrorString(result), join_seconds));
        abort_comm(result, call);
    }

    [[noreturn]] void abort_comm(ncclResult_t result, const char* call) {
        const std::string more = ncclGetLastError(nccl);
        abort_comm(format("%s%s: %s%s%s; NCCL_DEBUG=INFO says more",
                          result == ncclRemoteError ? "another rank is gone, or not to be reached: " : "", call,
                          ncclGetErrorString(result), more.empty() ? "" : ": ", more.c_str()));
    }

    // Ends what other ranks will never take part in, so that memory can be freed, and this rank. NCCL itself may hang
    // in that.
    [[noreturn]] void abort_comm(const std::string& why) {
        std::thread([line = format("error: rank %d on %s: %s\n", rank, host_name().c_str(), why.c_str())] {
            std::this_thread::sleep_for(std::chrono::duration<double>(ABORT_SECONDS));
            fputs(line.c_str(), stderr);
            _exit(EXIT_INTERNAL);
        }).detach();
        loss = why;
        while_host_waits = nullptr;
        if (nccl) ncclCommAbort(nccl);
        nccl = nullptr;
        fail(EXIT_INTERNAL, "%s", why.c_str());
    }

    // Called while the host waits for the device, so long by now.
    void watch(double seconds) {
        if (!nccl || std::this_thread::get_id() != thread) return;
        ncclResult_t state = ncclSuccess;
        const ncclResult_t result = ncclCommGetAsyncError(nccl, &state);
        if (result != ncclSuccess) state = result;
        if (state != ncclSuccess && state != ncclInProgress) abort_comm(state, "ncclCommGetAsyncError");
        if (seconds > GRACE_SECONDS) look_for_neighbours();
    }

    void look_for_neighbours() {
        const double now = seconds_now();
        if (now - looked < LOOK_SECONDS) return;
        looked = now;
        for (const Neighbour& n : neighbours)
            if (has_ended(n.process))
                abort_comm(format("rank %d (process %d of this machine) has ended, and this rank waits for it", n.rank,
                                  n.process));
    }

    // ---- joining

    static std::string new_id() {
        ncclUniqueId id;
        const ncclResult_t result = ncclGetUniqueId(&id);
        if (result != ncclSuccess) fail(EXIT_INTERNAL, "ncclGetUniqueId: %s", ncclGetErrorString(result));
        return {id.internal, sizeof id.internal};
    }

    // Every rank's rank_info comes to all, and then the id that rank 0 makes.
    ncclUniqueId meet_ranks(const Launch& launch) {
        const std::string rank_info = device_identity() + "\n" + process_card();
        std::string bytes;
        if (world_size == 1) bytes = new_id();
#ifdef USE_MPI
        if (launch.mpi && world_size > 1) {
            host = make_mpi_comm(launch);
            record_peers(host->exchange(rank_info));
            bytes = host->exchange(rank == 0 ? new_id() : "")[0];
        }
#endif
        if (bytes.empty()) {
            const Rendezvous result = rendezvous(launch, rank_info, new_id, join_seconds);
            record_peers(result.rank_infos);
            bytes = result.nccl_id;
        }
        ncclUniqueId id;
        ENSURE(bytes.size() == sizeof id.internal, "the id of NCCL has %zu bytes, %zu came", sizeof id.internal,
               bytes.size());
        std::memcpy(id.internal, bytes.data(), bytes.size());
        return id;
    }

    void record_peers(const std::vector<std::string>& rank_infos) {
        std::vector<std::string> devices, processes;
        for (const std::string& rank_info : rank_infos) {
            const size_t line = rank_info.find('\n');
            devices.push_back(rank_info.substr(0, line)), processes.push_back(rank_info.substr(line + 1));
        }
        check_own_devices(devices);
        const auto machine = [&](int r) { return processes[r].substr(0, processes[r].rfind(' ')); };
        for (int r = 0; r < world_size; r++)
            if (r != rank && machine(r) == machine(rank))
                neighbours.push_back({r, std::stoi(processes[r].substr(machine(r).size() + 1))});
    }

    void join(const ncclUniqueId& id) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        check("ncclCommInitRankConfig", ncclCommInitRankConfig(&nccl, world_size, id, rank, &config));
    }

    // ---- collectives

    // Queues what `calls` queues on queue.stream after what `after` has now.
    template <class Calls>
    Ticket start(Stream after, const Calls& queue_calls) {
        if (!nccl) fail(EXIT_INTERNAL, "%s", loss.c_str());
        calls++;
        Event& event = reached[++issued % RING];
        record_event(event, after);
        stream_wait_event(queue.stream, event);
        {
            const Span span(trace.get(), Track::communication, queue.stream, take_name());
            queue_calls();
        }
        record_event(event, queue.stream);
        return issued;
    }

    void wait(Ticket ticket, Stream stream) override {
        if (ticket <= 0) return;
        if (spare.empty()) spare.push_back({create_timer(), create_timer()});
        const Stall stand = spare.back();
        spare.pop_back();
        record_event(stand.from, stream);
        stream_wait_event(stream, reached[ticket % RING]);
        record_event(stand.to, stream);
        stands.push_back(stand);
        waits++;
    }

    double exposed(int64_t first_waits) override {
        while (waits - int64_t(stands.size()) < first_waits && event_done(stands.front().to)) {
            exposed_seconds += seconds_between(stands.front().from, stands.front().to);
            spare.push_back(stands.front());
            stands.pop_front();
        }
        return exposed_seconds;
    }

    void reserve(ReduceDtype wire, int64_t most) override {
        if (wire == ReduceDtype::bf16 && rounded.size < most)
            rounded = DeviceBuffer<bf16>(most, "gradients on their way, rounded (--grad-dtype bf16)");
    }

    // What a rank sends of `count` elements when each of them goes through all ranks once.
    int64_t share(int64_t count, ReduceDtype wire) const {
        return count / world_size * (world_size - 1) *
               int64_t(wire == ReduceDtype::bf16 ? sizeof(bf16) : sizeof(float));
    }

    bf16* round(const float* x, int64_t count) {
        ENSURE(count <= rounded.size, "%lld gradients to be rounded, memory for %lld is reserved",
               static_cast<long long>(count), static_cast<long long>(rounded.size));
        ops::round_gradients(rounded.data, x, count, queue.stream);
        return rounded.data;
    }

    Ticket all_reduce(float* x, int64_t count, ReduceDtype wire, Stream after) override {
        bytes_sent += 2 * share(count, wire);
        const auto sum = [&](void* data, ncclDataType_t type) {
            check("ncclAllReduce", ncclAllReduce(data, data, size_t(count), type, ncclSum, nccl, queue.stream));
        };
        return start(after, [&] {
            if (wire == ReduceDtype::fp32) return sum(x, ncclFloat);
            sum(round(x, count), ncclBfloat16);
            ops::widen_gradients(x, rounded.data, count, queue.stream);
        });
    }
    Ticket reduce_scatter(float* x, int64_t count, ReduceDtype wire, Stream after) override {
        const int64_t own = count / world_size, at = rank * own;
        bytes_sent += share(count, wire);
        const auto sum = [&](const void* from, void* to, ncclDataType_t type) {
            check("ncclReduceScatter", ncclReduceScatter(from, to, size_t(own), type, ncclSum, nccl, queue.stream));
        };
        return start(after, [&] {
            if (wire == ReduceDtype::fp32) return sum(x, x + at, ncclFloat);
            bf16* const all = round(x, count);
            sum(all, all + at, ncclBfloat16);
            ops::widen_gradients(x + at, all + at, own, queue.stream);
        });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream after) override {
        const int64_t own = bytes / world_size;
        bytes_sent += (world_size - 1) * own;
        const char* from = static_cast<char*>(x) + rank * own;
        return start(
            after, [&] { check("ncclAllGather", ncclAllGather(from, x, size_t(own), ncclInt8, nccl, queue.stream)); });
    }
    Ticket broadcast(void* x, int64_t bytes, int from, Stream after) override {
        return start(after, [&] {
            check("ncclBroadcast", ncclBroadcast(x, x, size_t(bytes), ncclInt8, from, nccl, queue.stream));
        });
    }

    // Texts go through the GPUs: first their sizes, then all filled up to the longest.
    std::vector<std::string> exchange(const std::string& text) override {
        DeviceBuffer<int64_t> sizes(world_size, "sizes of messages");
        const int64_t own = int64_t(text.size());
        copy_to_device(sizes.data + rank, &own, sizeof own, queue.stream);
        all_gather(sizes.data, sizes.bytes(), queue.stream);
        wait_for_stream(queue.stream);
        const std::vector<int64_t> size_of = to_host(sizes.data, world_size);
        const int64_t longest = std::max<int64_t>(1, *std::max_element(size_of.begin(), size_of.end()));

        DeviceBuffer<char> texts(longest * world_size, "messages");
        copy_to_device(texts.data + rank * longest, text.data(), own, queue.stream);
        all_gather(texts.data, texts.bytes(), queue.stream);
        wait_for_stream(queue.stream);
        const std::vector<char> joined = to_host(texts.data, texts.size);
        std::vector<std::string> all;
        for (int r = 0; r < world_size; r++) all.emplace_back(joined.data() + r * longest, size_of[r]);
        return all;
    }

    [[noreturn]] void abort(int exit_code) override {
        if (host) host->abort(exit_code);
        Comm::abort(exit_code);  // the launcher ends the others
    }
};

void watch_ranks(double seconds) { NcclComm::joined()->watch(seconds); }

}  // namespace

bool device_joins_ranks() { return true; }
std::unique_ptr<Comm> make_device_comm(const Launch& launch) { return std::make_unique<NcclComm>(launch); }
#else
bool device_joins_ranks() { return false; }
std::unique_ptr<Comm> make_device_comm(const Launch&) { return nullptr; }
#endif
