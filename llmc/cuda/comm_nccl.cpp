// comm_nccl.cpp: NCCL between GPUs, on a stream of its own.
//
// The id that ranks join by goes over MPI where MPI started them, else over the meeting of rendezvous.h. Calls do not
// block (blocking = 0): a rank that is gone ends the run after a deadline instead of hanging it.
#include "../comm.h"

#ifdef USE_NCCL
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "../common.h"
#include "../rendezvous.h"
#include "cuda_check.h"

namespace {

struct NcclComm : Comm {
    std::unique_ptr<Comm> host;  // MPI, where it is there
    const double join_seconds;
    ncclComm_t nccl = nullptr;
    OwnedStream queue;
    static constexpr int RING = 64;
    Event reached[RING];  // of ticket t at t % RING, or of a later one
    Ticket issued = 0;

    explicit NcclComm(const Launch& launch) : join_seconds(launch.join_seconds) {
        rank = part = launch.rank, world_size = launch.world_size;
        join(unique_id(launch));
        for (Event& event : reached) event = create_event();
    }

    ~NcclComm() override {
        for (Event event : reached) destroy_event(event);
        ncclCommFinalize(nccl);
        ncclResult_t state = ncclInProgress;
        while (state == ncclInProgress && ncclCommGetAsyncError(nccl, &state) == ncclSuccess) pause();
        ncclCommDestroy(nccl);
    }

    std::string describe() const override {
        int version = 0;
        ncclGetVersion(&version);
        return format("%d ranks by NCCL %d.%d.%d", world_size, version / 10000, version / 100 % 100, version % 100);
    }

    void check_wire(WireType wire) const override {
        ENSURE(wire == WireType::fp32, "--grad-dtype bf16 is for ranks by MPI; NCCL moves fp32 gradients");
    }

    static void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

    // What a call that does not block came to.
    void check(const char* call, ncclResult_t result) const {
        const double deadline = seconds_now() + join_seconds;
        while (result == ncclInProgress && seconds_now() < deadline) {
            pause();
            if (ncclCommGetAsyncError(nccl, &result) != ncclSuccess) break;
        }
        if (result == ncclSuccess) return;
        fail(EXIT_INTERNAL, "%s: %s%s%s; NCCL_DEBUG=INFO says more", call, ncclGetErrorString(result),
             result == ncclInProgress ? format(" after %.0f s: is a rank missing?", join_seconds).c_str() : ": ",
             result == ncclInProgress ? "" : ncclGetLastError(nccl));
    }

    static std::string new_id() {
        ncclUniqueId id;
        const ncclResult_t result = ncclGetUniqueId(&id);
        if (result != ncclSuccess) fail(EXIT_INTERNAL, "ncclGetUniqueId: %s", ncclGetErrorString(result));
        return {id.internal, sizeof id.internal};
    }

    ncclUniqueId unique_id(const Launch& launch) {
        std::string bytes;
#ifdef USE_MPI
        if (launch.mpi) {
            host = make_mpi_comm(launch);
            bytes = host->exchange(rank == 0 ? new_id() : "")[0];
        }
#endif
        if (bytes.empty()) bytes = meet(launch, "", new_id, join_seconds).gift;
        ncclUniqueId id;
        ENSURE(bytes.size() == sizeof id.internal, "the id of NCCL has %zu bytes, %zu came", sizeof id.internal,
               bytes.size());
        std::memcpy(id.internal, bytes.data(), bytes.size());
        return id;
    }

    void join(const ncclUniqueId& id) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        check("ncclCommInitRankConfig", ncclCommInitRankConfig(&nccl, world_size, id, rank, &config));
    }

    // Queues a collective after what `after` has now.
    template <class Call>
    Ticket start(const char* name, Stream after, const Call& call) {
        calls++;
        Event& event = reached[++issued % RING];
        record_event(event, after);
        stream_wait_event(queue.stream, event);
        {
            const Span span(trace.get(), Track::communication, queue.stream, take_name());
            check(name, call(queue.stream));
        }
        record_event(event, queue.stream);
        return issued;
    }
    void wait(Ticket ticket, Stream stream) override {
        if (ticket > 0) stream_wait_event(stream, reached[ticket % RING]);
    }

    Ticket all_reduce(float* x, int64_t count, WireType, Stream after) override {
        bytes_sent += 2 * (world_size - 1) * (count / world_size) * int64_t(sizeof(float));
        return start("ncclAllReduce", after, [&](cudaStream_t stream) {
            return ncclAllReduce(x, x, size_t(count), ncclFloat, ncclSum, nccl, stream);
        });
    }
    Ticket reduce_scatter(float* x, int64_t count, WireType, Stream after) override {
        const int64_t own = count / world_size;
        bytes_sent += (world_size - 1) * own * int64_t(sizeof(float));
        return start("ncclReduceScatter", after, [&](cudaStream_t stream) {
            return ncclReduceScatter(x, x + rank * own, size_t(own), ncclFloat, ncclSum, nccl, stream);
        });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream after) override {
        const int64_t own = bytes / world_size;
        bytes_sent += (world_size - 1) * own;
        return start("ncclAllGather", after, [&](cudaStream_t stream) {
            return ncclAllGather(static_cast<char*>(x) + rank * own, x, size_t(own), ncclInt8, nccl, stream);
        });
    }
    Ticket broadcast(void* x, int64_t bytes, int from, Stream after) override {
        return start("ncclBroadcast", after, [&](cudaStream_t stream) {
            return ncclBroadcast(x, x, size_t(bytes), ncclInt8, from, nccl, stream);
        });
    }

    // Texts go through the GPUs: first their sizes, then all filled up to the longest.
    std::vector<std::string> exchange(const std::string& text) override {
        DeviceBuffer<int64_t> sizes(world_size, "sizes of messages");
        const int64_t own = int64_t(text.size());
        copy_to_device(sizes.data + rank, &own, sizeof own, queue.stream);
        wait(all_gather(sizes.data, sizes.bytes(), queue.stream), queue.stream);
        wait_for_stream(queue.stream);
        const std::vector<int64_t> size_of = to_host(sizes.data, world_size);
        const int64_t longest = std::max<int64_t>(1, *std::max_element(size_of.begin(), size_of.end()));

        DeviceBuffer<char> texts(longest * world_size, "messages");
        copy_to_device(texts.data + rank * longest, text.data(), own, queue.stream);
        wait(all_gather(texts.data, texts.bytes(), queue.stream), queue.stream);
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

}  // namespace

std::unique_ptr<Comm> make_device_comm(const Launch& launch) { return std::make_unique<NcclComm>(launch); }
#else
std::unique_ptr<Comm> make_device_comm(const Launch&) { return nullptr; }
#endif
