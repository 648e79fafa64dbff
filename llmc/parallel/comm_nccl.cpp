// comm_nccl.cpp: collectives between GPUs by NCCL, on a stream of their own.
//
// Ranks that MPI started exchange NCCL's id by MPI; others exchange it by the rendezvous of rendezvous.h. NCCL calls do
// not block (blocking = 0), so that a missing rank ends the run after a timeout and does not hang it. NCCL reports a
// rank that ends during the run while the host waits for the device. All communicators are then aborted at once;
// otherwise their kernels would spin for ever, and the abort of one would wait for the kernels of another. A launch may
// block, too, behind the kernels of such a collective; then the watchdog's thread ends the process. The watchdog also
// ends a rank that waits for one of which NCCL reports nothing.
//
// A group of ranks (split) is a communicator of its own with a stream of its own.
#include "parallel/comm.h"

#ifdef USE_NCCL
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "base/print.h"
#include "ops/ops.h"
#include "parallel/rendezvous.h"
#include "parallel/watchdog.h"

namespace {

constexpr double ABORT_SECONDS = 10.0;   // time that NCCL gets to finalize or abort
constexpr double BLOCKED_SECONDS = 2.0;  // time that the training thread gets to come to an error of NCCL
constexpr double POLL_SECONDS = 200e-6;  // most calls complete within this time; after it, polls sleep in between
static_assert(sizeof(ncclUniqueId) == NCCL_ID_BYTES);
static_assert(NCCL_VERSION_CODE >= 21801, "groups of GPU ranks need NCCL 2.18.1 or later (ncclCommSplit)");

void pause(int tries) { std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 1000))); }

struct NcclComm : Comm {
    std::unique_ptr<Comm> host;     // MPI, if MPI started the ranks
    ncclComm_t nccl = nullptr;      // null after abort_all
    std::string abort_reason;       // reason of abort_all
    OwnedStream nccl_stream{true};  // runs the collectives, before the kernels of other streams
    static constexpr int RING = 64;
    Event completed[RING];  // completed[t % RING]: the end of ticket t, or of a later ticket
    Ticket issued = 0;
    Ticket ended = 0;                   // number of the issued collectives that the watchdog knows to have ended
    DeviceBuffer<bf16> bf16_gradients;  // a bucket, rounded to be sent; with Dtype::bf16 only

    // Two timers on the stream that waits, before and after a wait.
    struct Stall {
        Event from = create_timer(), to = create_timer();
        Stall() = default;
        Stall(const Stall&) = delete;
        ~Stall() {
            destroy_event(from);
            destroy_event(to);
        }
    };
    std::deque<Stall> stalls;  // stalls whose time is not yet added to exposed_seconds
    const std::thread::id thread = std::this_thread::get_id();
    // World communicator and its groups, in the order of their creation.
    static inline std::vector<NcclComm*> all_comms;
    // Held while the training thread calls NCCL or changes all_comms. The watchdog's thread reads them in look().
    static inline std::mutex in_nccl;

    NcclComm(int own_rank, int size) {
        rank = shard_index = own_rank;
        world_size = size;
        for (Event& event : completed) event = create_event();
        const std::lock_guard lock(in_nccl);
        all_comms.push_back(this);
        while_host_waits = watch;
    }

    // All ranks finalize together. If an exception ends this rank, the others do not: the process's end closes it.
    ~NcclComm() override {
        const std::lock_guard lock(in_nccl);
        all_comms.erase(std::find(all_comms.begin(), all_comms.end(), this));
        if (all_comms.empty()) while_host_waits = nullptr;
        for (Event event : completed) destroy_event(event);
        if (!nccl || std::uncaught_exceptions() > 0) return;
        ncclResult_t state = ncclCommFinalize(nccl);
        const double deadline = seconds_now() + ABORT_SECONDS;
        while (state == ncclInProgress && seconds_now() < deadline) {
            pause(1000);
            if (ncclCommGetAsyncError(nccl, &state) != ncclSuccess) break;
        }
        state == ncclSuccess ? ncclCommDestroy(nccl) : ncclCommAbort(nccl);
    }

    std::string describe() const override {
        int version = 0;
        ncclGetVersion(&version);
        return format("%d ranks by NCCL %d.%d.%d", world_size, version / 10000, version / 100 % 100, version % 100);
    }

    // ---- Errors

    // Makes a call of NCCL, and waits until it has completed. Aborts all communicators if it fails or does not
    // complete.
    template <class Call>
    void complete(const char* name, const Call& call) {
        const std::lock_guard lock(in_nccl);
        ncclResult_t result = call();
        const double start = seconds_now();
        double waited = 0.0;
        for (int tries = 0; result == ncclInProgress && waited < JOIN_SECONDS; waited = seconds_now() - start) {
            if (waited > POLL_SECONDS) pause(++tries);
            if (ncclCommGetAsyncError(nccl, &result) != ncclSuccess) break;
        }
        if (result == ncclSuccess) return;
        if (result == ncclInProgress)
            abort_all(format("%s: %s after %.0f s: is a rank missing? NCCL_DEBUG=INFO says more", name,
                             ncclGetErrorString(result), JOIN_SECONDS));
        abort_all(describe_error(result, name));
    }

    std::string describe_error(ncclResult_t result, const char* call) const {
        const std::string more = ncclGetLastError(nccl);
        return format("%s%s: %s%s%s; NCCL_DEBUG=INFO says more",
                      result == ncclRemoteError ? "another rank is gone, or not to be reached: " : "", call,
                      ncclGetErrorString(result), more.empty() ? "" : ": ", more.c_str());
    }

    // The error of this communicator, if it has one.
    ncclResult_t async_error() const {
        ncclResult_t state = ncclSuccess;
        const ncclResult_t result = ncclCommGetAsyncError(nccl, &state);
        if (result != ncclSuccess) return result;
        return state == ncclInProgress ? ncclSuccess : state;
    }

    // Aborts the pending collectives, which the other ranks will never join, so that memory can be freed, and fails
    // with EXIT_INTERNAL. The communicators are aborted as one NCCL group: the abort of a single one may wait for the
    // device, and so for a collective of another. A thread ends the process if NCCL hangs.
    [[noreturn]] static void abort_all(const std::string& why) {
        std::thread([why] {
            std::this_thread::sleep_for(std::chrono::duration<double>(ABORT_SECONDS));
            end_process(why);
        }).detach();
        while_host_waits = nullptr;
        ncclGroupStart();
        for (NcclComm* comm : all_comms) {
            comm->abort_reason = why;
            if (comm->nccl) ncclCommAbort(comm->nccl);
            comm->nccl = nullptr;
        }
        ncclGroupEnd();
        fail(EXIT_INTERNAL, "%s", why.c_str());
    }

    [[noreturn]] static void end_process(const std::string& why) {
        print_message(format("error: rank %d on %s: %s", all_comms[0]->rank, host_name().c_str(), why.c_str()));
        _exit(EXIT_INTERNAL);
    }

    // Called while the host waits for the device (while_host_waits). Other threads may not use the communicators.
    static void watch() {
        if (std::this_thread::get_id() != all_comms[0]->thread) return;
        const std::lock_guard lock(in_nccl);
        for (NcclComm* comm : all_comms) {
            if (!comm->nccl) continue;
            const ncclResult_t error = comm->async_error();
            if (error != ncclSuccess) abort_all(comm->describe_error(error, "ncclCommGetAsyncError"));
            comm->count_ended();
        }
    }

    // Called by the watchdog's thread. Ends the process at an error of NCCL when a launch blocks the training thread.
    static void look() {
        static int looks = 0;
        const std::unique_lock lock(in_nccl, std::try_to_lock);
        if (!lock) return;  // the training thread calls NCCL, and comes to its errors
        for (const NcclComm* comm : all_comms) {
            const ncclResult_t error = comm->nccl ? comm->async_error() : ncclSuccess;
            if (error == ncclSuccess) continue;
            if (++looks * Watchdog::LOOK < BLOCKED_SECONDS) return;
            end_process(comm->describe_error(error, "ncclCommGetAsyncError, while a launch blocks"));
        }
        looks = 0;
    }

    // Tells the watchdog of the collectives that have ended since the last call.
    void count_ended() {
        for (; watchdog && ended < issued && event_done(completed[(ended + 1) % RING]); ended++)
            watchdog->collective_ended();
    }

    [[noreturn]] void abort(int exit_code) override {
        if (host) host->abort(exit_code);
        Comm::abort(exit_code);  // the launcher then ends the other ranks
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
        std::string bytes;
        if (launch.mpi && world_size > 1 && built_with_mpi()) {
            host = make_mpi_comm(launch);
            bytes = host->all_gather_text(rank == 0 ? new_id() : "")[0];
        } else {
            bytes = share_nccl_id(launch, new_id, JOIN_SECONDS);
        }
        ncclUniqueId id;
        bytes.copy(id.internal, sizeof id.internal);
        return id;
    }

    void join(const Launch& launch) {
        const ncclUniqueId id = exchange_id(launch);
        ncclConfig_t config = make_config();
        complete("ncclCommInitRank", [&] { return ncclCommInitRankConfig(&nccl, world_size, id, rank, &config); });
    }

    static ncclConfig_t make_config() {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        return config;
    }

    // ncclCommSplit requires that no collective is pending. It returns ncclSuccess while it is in progress. NCCL sets
    // the new communicator when the old one is ready again, and the new one then becomes ready. A rank that is alone in
    // its group takes part in the call, but gets no communicator.
    std::unique_ptr<Comm> split(int color) override {
        const std::string own = std::to_string(color);
        const std::vector<std::string> colors = all_gather_text(own);
        const int size = int(std::count(colors.begin(), colors.end(), own));
        wait_for_stream(nccl_stream);
        ncclComm_t part = nullptr;
        ncclConfig_t config = make_config();
        complete("ncclCommSplit", [&] {
            const auto result = ncclCommSplit(nccl, size == 1 ? NCCL_SPLIT_NOCOLOR : color, rank, &part, &config);
            return result == ncclSuccess ? ncclInProgress : result;
        });
        if (size == 1) return Comm::split(color);
        auto group = std::make_unique<NcclComm>(int(std::count(colors.begin(), colors.begin() + rank, own)), size);
        group->watchdog = watchdog;
        group->nccl = part;
        group->complete("ncclCommSplit", [] { return ncclInProgress; });
        return group;
    }

    // ---- Collectives

    // Calls queue_calls, which queues a collective on nccl_stream. The collective runs after the work that stream
    // `after` has now. Returns its ticket. For the watchdog, a collective begins when the host queues it.
    template <class Calls>
    Ticket start(Stream after, const Calls& queue_calls) {
        if (!nccl) fail(EXIT_INTERNAL, "%s", abort_reason.c_str());
        count_ended();
        if (watchdog) watchdog->collective_begins();
        Event& event = completed[++issued % RING];
        record_event(event, after);
        stream_wait_event(nccl_stream, event);
        queue_calls();
        record_event(event, nccl_stream);
        return issued;
    }

    void wait(Ticket ticket, Stream stream) override {
        if (ticket <= 0) return;
        const Stall& stall = stalls.emplace_back();
        record_event(stall.from, stream);
        stream_wait_event(stream, completed[ticket % RING]);
        record_event(stall.to, stream);
        waits++;
    }

    double exposed(int64_t first_waits) override {
        while (waits - int64_t(stalls.size()) < first_waits && event_done(stalls.front().to)) {
            exposed_seconds += seconds_between(stalls.front().from, stalls.front().to);
            stalls.pop_front();
        }
        return exposed_seconds;
    }

    void reserve(Dtype dtype, int64_t max_count) override {
        if (dtype == Dtype::bf16 && bf16_gradients.size < max_count)
            bf16_gradients = DeviceBuffer<bf16>(max_count, "gradients rounded to bf16 (--grad-dtype bf16)");
    }

    // Returns the bytes that a rank sends in a reduce-scatter of `count` elements. An all-reduce sends twice as many.
    int64_t reduce_scatter_bytes(int64_t count, Dtype dtype) const {
        return count / world_size * (world_size - 1) * int64_t(dtype == Dtype::bf16 ? sizeof(bf16) : sizeof(float));
    }

    bf16* round(const float* x, int64_t count) {
        INVARIANT(count <= bf16_gradients.size, "%lld gradients to be rounded, memory for %lld is reserved",
                  static_cast<long long>(count), static_cast<long long>(bf16_gradients.size));
        ops::round_gradients(bf16_gradients.data, x, count, nccl_stream);
        return bf16_gradients.data;
    }

    void sum_all(void* x, int64_t count, ncclDataType_t type) {
        complete("ncclAllReduce", [&] { return ncclAllReduce(x, x, size_t(count), type, ncclSum, nccl, nccl_stream); });
    }
    void sum_shards(const void* x, void* own, int64_t own_count, ncclDataType_t type) {
        complete("ncclReduceScatter",
                 [&] { return ncclReduceScatter(x, own, size_t(own_count), type, ncclSum, nccl, nccl_stream); });
    }

    Ticket all_reduce(float* x, int64_t count, Dtype dtype, Stream after) override {
        bytes_sent += 2 * reduce_scatter_bytes(count, dtype);
        return start(after, [&] {
            if (dtype == Dtype::fp32) return sum_all(x, count, ncclFloat);
            sum_all(round(x, count), count, ncclBfloat16);
            ops::widen_gradients(x, bf16_gradients.data, count, nccl_stream);
        });
    }
    Ticket reduce_scatter(float* x, int64_t count, Dtype dtype, Stream after) override {
        const int64_t own = count / world_size, at = rank * own;
        bytes_sent += reduce_scatter_bytes(count, dtype);
        return start(after, [&] {
            if (dtype == Dtype::fp32) return sum_shards(x, x + at, own, ncclFloat);
            bf16* const all = round(x, count);
            sum_shards(all, all + at, own, ncclBfloat16);
            ops::widen_gradients(x + at, all + at, own, nccl_stream);
        });
    }
    using Comm::all_reduce;  // activations in fp32 are summed like gradients
    using Comm::reduce_scatter;
    Ticket all_reduce(bf16* x, int64_t count, Stream after) override {
        bytes_sent += 2 * reduce_scatter_bytes(count, Dtype::bf16);
        return start(after, [&] { sum_all(x, count, ncclBfloat16); });
    }
    Ticket reduce_scatter(bf16* x, int64_t count, Stream after) override {
        const int64_t own = count / world_size;
        bytes_sent += reduce_scatter_bytes(count, Dtype::bf16);
        return start(after, [&] { sum_shards(x, x + rank * own, own, ncclBfloat16); });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream after) override {
        const int64_t own = bytes / world_size;
        bytes_sent += (world_size - 1) * own;
        const char* from = static_cast<char*>(x) + rank * own;
        return start(after, [&] {
            complete("ncclAllGather", [&] { return ncclAllGather(from, x, size_t(own), ncclInt8, nccl, nccl_stream); });
        });
    }
    Ticket broadcast(void* x, int64_t bytes, int from, Stream after) override {
        return start(after, [&] {
            complete("ncclBroadcast",
                     [&] { return ncclBroadcast(x, x, size_t(bytes), ncclInt8, from, nccl, nccl_stream); });
        });
    }

    void connect() override {
        if (watchdog) watchdog->at_each_look(look);
        const int64_t sent = bytes_sent;
        const Stream stream = nccl_stream;
        const DeviceBuffer<float> x(int64_t(1 << 20) * world_size, "the first collectives");
        fill_zero(x.data, x.bytes(), stream);
        for (const int64_t count : {int64_t(world_size), x.size}) {
            all_reduce(x.data, count, Dtype::fp32, stream);
            reduce_scatter(x.data, count, Dtype::fp32, stream);
            all_gather(x.data, count * int64_t(sizeof(float)), stream);
            broadcast(x.data, count * int64_t(sizeof(float)), 0, stream);
        }
        wait_for_stream(stream);
        bytes_sent = sent;
    }

    // Gathers over the GPUs: first the sizes, then the texts, each padded to the longest.
    std::vector<std::string> all_gather_text(const std::string& text) override {
        const std::vector<int64_t> sizes = gather_host(std::vector<int64_t>{int64_t(text.size())});
        const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
        std::vector<char> own(text.begin(), text.end());
        own.resize(std::max<int64_t>(1, longest));
        const std::vector<char> padded = gather_host(own);
        std::vector<std::string> all;
        for (int r = 0; r < world_size; r++) all.emplace_back(padded.data() + r * own.size(), sizes[r]);
        return all;
    }

    // Gathers vectors of equal size in host memory.
    template <class T>
    std::vector<T> gather_host(const std::vector<T>& own) {
        const int64_t count = int64_t(own.size());
        DeviceBuffer<T> all(count * world_size, "messages");
        copy_to_device(all.data + rank * count, own.data(), count * int64_t(sizeof(T)), nccl_stream);
        all_gather(all.data, all.bytes(), nccl_stream);
        wait_for_stream(nccl_stream);
        return to_host(all.data, all.size);
    }
};

}  // namespace

bool built_with_nccl() { return true; }

std::unique_ptr<Comm> make_nccl_comm(const Launch& launch) {
    auto comm = std::make_unique<NcclComm>(launch.rank, launch.world_size);
    comm->join(launch);
    return comm;
}
#else
bool built_with_nccl() { return false; }
std::unique_ptr<Comm> make_nccl_comm(const Launch&) { return nullptr; }
#endif
