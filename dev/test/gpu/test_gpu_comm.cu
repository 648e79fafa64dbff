// test_gpu_comm.cu: tests the collectives of llmc/parallel/comm_nccl.cpp. A world of one rank makes every call, in the
// emulator and, with the real NCCL, on a GPU. The emulator also runs 2 and 3 ranks, each a process with its own GPU,
// connected by the emulator's NCCL. These tests check the results of collectives, the loss of a rank, and groups of 2,
// 3, 4 and 6 ranks. The last tests check that the emulator's NCCL reports incorrect calls.
#include <cmath>
#include <memory>

#include "gpu/on_gpu.h"
#include "parallel/comm.h"
#include "support/cases_groups.h"
#include "train/optimizer.h"
#include "train/plan.h"

#if defined(SIMT_EMULATOR) && defined(USE_NCCL)
#define SEVERAL_RANKS 1
#include <nccl.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "gpu/rank_processes.h"
#include "parallel/rendezvous.h"
#endif

// Initial value of element i on rank r: small integers, whose sums are exact in bf16 and fp32.
static float value_of(int r, int64_t i) { return float((i * 7 + r * 3) % 11 - 5); }

static std::vector<float> values_of(int r, int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) values[size_t(i)] = value_of(r, i);
    return values;
}

// x[i] += value. Queued before a collective, which must wait for it, and after the collective, for which it must wait.
__global__ void __launch_bounds__(256) shift_kernel(float* x, float value, int count) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) x[i] += value;
}

static void expect(bool right, const char* what) {
    if (!right) fail(EXIT_INTERNAL, "wrong: %s", what);
}

// Makes every collective on `count` elements, between other work on a stream, and checks results and counters.
static void check_collectives(Comm& comm, int64_t count, GradDtype dtype) {
    const int n = comm.world_size, r = comm.rank;
    const int64_t own = count / n;
    const int64_t sent = comm.bytes_sent, calls = comm.calls, dtype_bytes = dtype == GradDtype::bf16 ? 2 : 4;
    comm.reserve(dtype, count);
    const OwnedStream stream;
    DeviceBuffer<float> x(count, "x");
    std::vector<float> sums(size_t(count), 0.0f);
    for (int q = 0; q < n; q++)
        for (int64_t i = 0; i < count; i++) sums[size_t(i)] += value_of(q, i) + 1.0f;
    const std::vector<float> values = values_of(r, count);
    const auto fresh = [&] {
        copy_to_device(x.data, values.data(), x.bytes(), stream.stream);
        simt::launch(shift_kernel, blocks_for(count, 256), 256, 0, stream.stream, x.data, 1.0f, int(count));
    };
    const auto after = [&](Comm::Ticket ticket) {  // queues work that must run after the collective
        comm.wait(ticket, stream.stream);
        simt::launch(shift_kernel, blocks_for(count, 256), 256, 0, stream.stream, x.data, 0.5f, int(count));
        std::vector<float> got(static_cast<size_t>(count));
        copy_to_host(got.data(), x.data, x.bytes(), stream.stream);
        wait_for_stream(stream.stream);
        for (float& v : got) v -= 0.5f;
        return got;
    };

    fresh();
    expect(after(comm.all_reduce(x.data, count, dtype, stream.stream)) == sums, "all_reduce");
    fresh();
    const std::vector<float> part = after(comm.reduce_scatter(x.data, count, dtype, stream.stream));
    for (int64_t i = comm.shard_index * own; i < (comm.shard_index + 1) * own; i++)
        expect(part[size_t(i)] == sums[size_t(i)], "reduce_scatter");
    fresh();
    const std::vector<float> all = after(comm.all_gather(x.data, x.bytes(), stream.stream));
    for (int64_t i = 0; i < own * n; i++) expect(all[size_t(i)] == value_of(int(i / own), i) + 1.0f, "all_gather");
    for (int root = 0; root < n; root++) {
        fresh();
        const std::vector<float> got = after(comm.broadcast(x.data, x.bytes(), root, stream.stream));
        for (int64_t i = 0; i < count; i++) expect(got[size_t(i)] == value_of(root, i) + 1.0f, "broadcast");
    }
    expect(comm.calls - calls == 3 + n, "calls");
    expect(comm.bytes_sent - sent == (n - 1) * own * (3 * dtype_bytes + 4), "bytes_sent");
}

static void exchange_texts(Comm& comm) {
    for (const size_t length : {size_t(0), size_t(1), size_t(5000)}) {
        const std::vector<std::string> all = comm.all_gather_text(std::string(length * size_t(comm.rank + 1), 'a'));
        expect(int(all.size()) == comm.world_size, "all_gather_text: the number of texts");
        for (size_t r = 0; r < all.size(); r++) expect(all[r] == std::string(length * (r + 1), 'a'), "all_gather_text");
    }
}

static void check_all_collectives(Comm& comm) {
    for (const GradDtype dtype : {GradDtype::fp32, GradDtype::bf16})
        for (const int64_t rows : {1, 3, 100}) check_collectives(comm, rows * 64 * comm.world_size, dtype);
    exchange_texts(comm);
}

static std::unique_ptr<Comm> world_of_one() {
    Launch launch;
    launch.launcher = "options";
    return make_nccl_comm(launch);
}

TEST_CASE("a world of one rank can make every call, and sends nothing") {
    const std::unique_ptr<Comm> comm = world_of_one();
    if (!comm) {
        MESSAGE("this build has no NCCL");
        return;
    }
    CHECK(comm->describe().find("1 ranks by NCCL 2.") == 0);
    check_all_collectives(*comm);
    CHECK(comm->bytes_sent == 0);
    const double exposed = comm->exposed(comm->waits);
    CHECK(exposed >= 0.0);
    CHECK(exposed < 60.0);
    const OwnedStream stream;
    DeviceBuffer<float> x(64, "x");
    Comm::Ticket first = 0, last = 0;
    for (int i = 0; i < 200; i++) {  // more tickets than NcclComm has events
        last = comm->all_reduce(x.data, 64, GradDtype::fp32, stream.stream);
        if (i == 0) first = last;
    }
    comm->wait(first, stream.stream);
    comm->wait(last, stream.stream);
    wait_for_stream(stream.stream);
    CHECK(comm->exposed(comm->waits) >= exposed);
    groups_cases::check_all_groups(*comm, {1, 64, 4096}, false);
}

TEST_CASE("--grad-dtype bf16 rounds to nearest, once for one rank, in memory that the plan counts") {
    const std::unique_ptr<Comm> comm = world_of_one();
    if (!comm) return;
    const int64_t count = 4096 + 64;
    const int64_t before = device_bytes_allocated();
    CHECK_THROWS_WITH_AS(
        [&] {
            DeviceBuffer<float> x(count, "x");
            comm->all_reduce(x.data, count, GradDtype::bf16, nullptr);
        }(),
        doctest::Contains("4160 gradients to be rounded, memory for 0"), Error);
    comm->reserve(GradDtype::fp32, count);
    CHECK(device_bytes_allocated() == before);
    comm->reserve(GradDtype::bf16, count);
    CHECK(device_bytes_allocated() == before + 2 * count);
    auto x = random_tensor<float>(count, 1);
    x[7] = NAN;
    x[8] = 1e-42f;
    x[9] = -INFINITY;
    x[10] = 3.39e38f;  // rounds to infinity
    const OwnedStream stream;
    DeviceBuffer<float> device(count, "x");
    copy_to_device(device.data, x.data(), device.bytes(), stream.stream);
    comm->wait(comm->all_reduce(device.data, count, GradDtype::bf16, stream.stream), stream.stream);
    wait_for_stream(stream.stream);
    const std::vector<float> got = to_host(device.data, count);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        const float want = float(bf16(x[i])), g = got[size_t(i)];
        wrong += !(g == want || (std::isnan(g) && std::isnan(want)));
    }
    CHECK(wrong == 0);

    const GPT2Config config = {32, 300, 3, 2, 64};
    const BatchPlan batch = plan_batch(2, 32, 0, 1);
    MemoryOptions with;
    with.bf16_gradients = true;
    const int64_t more = device_bytes(training_memory(Dtype::fp32, config, batch, with), false) -
                         device_bytes(training_memory(Dtype::fp32, config, batch, {}), false);
    const std::unique_ptr<Comm> fresh = world_of_one();
    GPT2<float> model(config, Purpose::train, batch.B, batch.T);
    const auto taken = [&](GradDtype dtype) {
        const int64_t allocated = device_bytes_allocated();
        const Groups groups = make_groups(*fresh, 1);
        const Optimizer<float> optimizer(model, OptimizerConfig{}, MemoryOptions{}, groups, dtype);
        return device_bytes_allocated() - allocated;
    };
    const int64_t without = taken(GradDtype::fp32);
    CHECK(taken(GradDtype::bf16) - without == more);
    CHECK(more == 2 * largest_bucket(ParamLayout(config)));
}

#ifdef SEVERAL_RANKS

// ---- Several ranks (rank_processes.h)

TEST_CASE("ranks: every collective is correct on 2 and 3 ranks, with immediate and with deferred streams") {
    for (const int number : {2, 3})
        for (const char* streams : {"now", "deferred:1", "deferred:2"})
            expect_success(run_ranks({number, streams}, [](const Launch& launch) {
                const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
                expect(comm->shard_index == launch.rank && comm->world_size == launch.world_size, "rank");
                check_all_collectives(*comm);
            }));
}

TEST_CASE("ranks: after connect, no collective allocates device memory") {
    expect_success(run_ranks({}, [](const Launch& launch) {
        const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
        const auto taken_by = [](const std::function<void()>& calls) {
            const int64_t before = device_bytes_free();
            calls();
            return before - device_bytes_free();
        };
        const OwnedStream stream;
        const DeviceBuffer<float> x(1 << 20, "x");
        fill_zero(x.data, x.bytes(), stream.stream);
        const int64_t sent = comm->bytes_sent, made = comm->calls;
        expect(taken_by([&] { comm->connect(); }) > 0, "connect allocates memory");
        expect(comm->bytes_sent == sent && comm->calls == made, "connect does not count as a call");
        expect(taken_by([&] {
                   for (const int64_t count : {64, 1 << 20}) {
                       comm->all_reduce(x.data, count, GradDtype::fp32, stream.stream);
                       comm->reduce_scatter(x.data, count, GradDtype::fp32, stream.stream);
                       comm->all_gather(x.data, count * int64_t(sizeof(float)), stream.stream);
                       comm->broadcast(x.data, count * int64_t(sizeof(float)), 0, stream.stream);
                   }
                   wait_for_device();
               }) == 0,
               "a collective allocates memory");
    }));
}

// On the emulator's clock a collective takes 1 ms, and all other work takes no time.
TEST_CASE("ranks: exposed_seconds counts the time that a stream waits for collectives, and no other time") {
    expect_success(run_ranks({}, [](const Launch& launch) {
        const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
        const OwnedStream stream;
        DeviceBuffer<float> x(64, "x");
        Comm::Ticket tickets[3];
        const double before = comm->exposed(comm->waits);
        for (Comm::Ticket& ticket : tickets) ticket = comm->all_reduce(x.data, 64, GradDtype::fp32, stream.stream);
        wait_for_device();
        expect(comm->exposed(comm->waits) == before, "no stream waited");
        comm->wait(tickets[1], stream.stream);
        comm->wait(tickets[0], stream.stream);
        comm->wait(tickets[2], stream.stream);
        comm->wait(0, stream.stream);
        wait_for_device();
        expect(std::fabs(comm->exposed(comm->waits) - before - 3e-3) < 1e-6,
               "the stream waits 2 ms for the second collective, 0 for the first, 1 for the third");
    }));
}

TEST_CASE("ranks: groups of every size, in use at the same time as each other and the world") {
    for (const int number : {2, 3, 4, 6})
        for (const char* streams : {"now", "deferred:1"})
            expect_success(run_ranks({number, streams}, [](const Launch& launch) {
                const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
                groups_cases::check_all_groups(*comm, {1, 64, 1000}, false);
            }));
}

TEST_CASE("ranks: a group connects, and its waits count as its own") {
    expect_success(run_ranks({4}, [](const Launch& launch) {
        const std::unique_ptr<Comm> comm = make_nccl_comm(launch), group = comm->split(launch.rank / 2);
        const int64_t made = comm->calls, waits = comm->waits;
        const OwnedStream stream;
        DeviceBuffer<bf16> x(64, "x");
        group->wait(group->all_reduce(x.data, 64, stream.stream), stream.stream);
        wait_for_device();
        expect(std::fabs(group->exposed(group->waits) - 1e-3) < 1e-6, "the stream waits 1 ms for the group");
        group->connect();
        expect(group->calls == 1 && group->waits == 1 && group->bytes_sent == 128, "connect does not count as a call");
        expect(comm->calls == made && comm->waits == waits, "the world's calls");
        exchange_texts(*group);
    }));
}

TEST_CASE("ranks: an error on one rank does not wait for the other ranks of its groups") {
    const std::vector<Ending> endings = run_ranks({2}, [](const Launch& launch) {
        const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
        double failed = 0.0;
        try {
            const std::unique_ptr<Comm> group = comm->split(0);
            group->all_gather_text("");
            failed = seconds_now();
            if (launch.rank == 1) fail(EXIT_USAGE, "an error on rank 1");
            std::this_thread::sleep_for(std::chrono::seconds(3));
            _exit(7);
        } catch (const Error& error) {
            comm->abort(seconds_now() - failed < 1.0 ? error.exit_code : 99);
        }
    });
    if (endings.empty()) return;
    CHECK(endings[1].status == EXIT_USAGE);
}

// A way to wait for a rank that has ended.
using WaitForRank = void (*)(Comm& comm, const DeviceBuffer<float>& x, Stream stream);

static void wait_in_a_collective(Comm& comm, const DeviceBuffer<float>&, Stream) { comm.all_gather_text(""); }
// The driver waits for the stream within a copy to pageable memory.
static void wait_in_a_copy(Comm& comm, const DeviceBuffer<float>& x, Stream stream) {
    std::vector<float> pageable(static_cast<size_t>(x.size));
    comm.wait(comm.all_reduce(x.data, x.size, GradDtype::fp32, stream), stream);
    copy_to_host(pageable.data(), x.data, x.bytes(), stream);
}

// The last rank ends after the first collective; the others wait for it.
static void lose_a_rank(const Launch& launch, WaitForRank wait) {
    const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
    exchange_texts(*comm);
    if (launch.rank == launch.world_size - 1) _exit(9);
    const OwnedStream stream;
    const DeviceBuffer<float> x(192, "x");
    comm->all_reduce(x.data, 192, GradDtype::fp32, stream.stream);
    try {
        wait(*comm, x, stream.stream);
    } catch (const Error& error) {
        fprintf(stderr, "error: %s\n", error.what());
        fflush(nullptr);
        try {
            comm->all_reduce(x.data, 192, GradDtype::fp32, stream.stream);  // must fail with the same text, not hang
        } catch (const Error& again) {
            _exit(std::string(again.what()) == error.what() ? error.exit_code : 99);
        }
    }
    _exit(98);
}

// The same with a group of all ranks and a group of pairs. Collectives of the groups and of the world are pending on
// different streams when the last rank ends, and the other rank of its pair waits for its pair.
static void lose_a_rank_of_groups(const Launch& launch, WaitForRank) {
    const std::unique_ptr<Comm> comm = make_nccl_comm(launch), all = comm->split(0),
                                pair = comm->split(launch.rank / 2);
    exchange_texts(*pair);
    comm->all_gather_text("");
    if (launch.rank == launch.world_size - 1) _exit(9);
    const OwnedStream stream;
    const DeviceBuffer<float> x(192, "x"), y(192, "y"), z(192, "z");
    all->all_reduce(x.data, 192, stream.stream);
    comm->all_reduce(y.data, 192, stream.stream);
    try {
        pair->wait(pair->all_reduce(z.data, 192, stream.stream), stream.stream);
        all->all_gather_text("");
    } catch (const Error& error) {
        fprintf(stderr, "error: %s\n", error.what());
        fflush(nullptr);
        for (Comm* each : {comm.get(), all.get(), pair.get()}) {
            try {
                each->all_reduce(x.data, 192, stream.stream);
                _exit(97);
            } catch (const Error& again) {
                if (std::string(again.what()) != error.what()) _exit(99);
            }
        }
        _exit(error.exit_code);
    }
    _exit(98);
}

static void expect_loss(const Ranks& ranks, WaitForRank wait, const char* text,
                        decltype(lose_a_rank)* lose = lose_a_rank) {
    const double start = seconds_now();
    const std::vector<Ending> endings = run_ranks(ranks, [=](const Launch& launch) { lose(launch, wait); });
    for (size_t r = 0; r + 1 < endings.size(); r++) {
        CHECK_MESSAGE(endings[r].status == EXIT_INTERNAL, "rank " << r << ": " << endings[r].status);
        CHECK_MESSAGE(endings[r].output.find(text) != std::string::npos, endings[r].output);
    }
    CHECK(seconds_now() - start < 15.0);
}

TEST_CASE("ranks: if one rank ends, the others end with an error") {
    for (const WaitForRank wait : {wait_in_a_collective, wait_in_a_copy})
        for (const char* streams : {"now", "deferred"}) expect_loss({3, streams}, wait, "error: another rank is gone");
}

TEST_CASE("ranks: if one rank ends during collectives of groups, the others abort all and end with an error") {
    for (const char* streams : {"now", "deferred"})
        expect_loss({4, streams}, nullptr, "error: another rank is gone", lose_a_rank_of_groups);
}

// ---- Bugs that the emulator's NCCL reports

static std::string new_id() {
    ncclUniqueId id;
    expect(ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId");
    return {id.internal, sizeof id.internal};
}

static void until_done(ncclComm_t comm, ncclResult_t result) {
    while (result == ncclInProgress && ncclCommGetAsyncError(comm, &result) == ncclSuccess)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (result == ncclSuccess) return;
    fprintf(stderr, "%s\n", ncclGetErrorString(result));
    _exit(1);  // an exception would free device memory, which waits for the device, and would hang
}

static ncclUniqueId common_id(const Launch& launch) {
    const std::string bytes = share_nccl_id(launch, new_id, 20);
    ncclUniqueId id;
    std::memcpy(id.internal, bytes.data(), sizeof id.internal);
    return id;
}

static ncclComm_t begin(const Launch& launch, const ncclUniqueId& id, int blocking = 0) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    ncclComm_t comm;
    expect(ncclCommInitRankConfig(&comm, launch.world_size, id, launch.rank, &config) == ncclInProgress, "init");
    return comm;
}

static ncclComm_t joined(const Launch& launch) {
    const ncclComm_t comm = begin(launch, common_id(launch));
    until_done(comm, ncclInProgress);
    return comm;
}

static void end(ncclComm_t comm) {
    until_done(comm, ncclCommFinalize(comm));
    ncclCommDestroy(comm);
}

// At least one of the ranks must print the text and fail.
static void expect_report(int ranks, const char* text, const std::function<void(const Launch&)>& bug) {
    const std::vector<Ending> endings = run_ranks({ranks}, [&](const Launch& launch) {
        bug(launch);
        fprintf(stderr, "nothing was reported\n");
    });
    if (endings.empty()) return;
    std::string outputs;
    bool said = false;
    for (const Ending& e : endings) {
        outputs += e.output + "\n";
        said = said || (e.status != 0 && e.output.find(text) != std::string::npos);
    }
    CHECK_MESSAGE(said, "no rank printed \"" << std::string(text) << "\", but:\n" << outputs);
}

// A test body that joins the ranks, makes one call on 64 floats in device memory, and finishes.
using Call = std::function<ncclResult_t(const Launch&, float* x, ncclComm_t comm)>;
static std::function<void(const Launch&)> calls(const Call& call) {
    return [=](const Launch& launch) {
        const ncclComm_t comm = joined(launch);
        const DeviceBuffer<float> x(64, "x");
        until_done(comm, call(launch, x.data, comm));
        while (cudaStreamQuery(nullptr) != cudaSuccess) until_done(comm, ncclInProgress);  // fails if a rank has ended
        end(comm);
    };
}

TEST_CASE("ranks: a disagreement on collective, count, type, root, ranks or rank numbers is reported") {
    expect_report(2, "rank 0 calls ncclAllReduce number 0", calls([](const Launch& l, float* x, ncclComm_t c) {
                      return l.rank ? ncclBroadcast(x, x, 8, ncclFloat, 0, c, nullptr)
                                    : ncclAllReduce(x, x, 8, ncclFloat, ncclSum, c, nullptr);
                  }));
    expect_report(2, "rank 1 ncclAllReduce number 0 of 9 elements", calls([](const Launch& l, float* x, ncclComm_t c) {
                      return ncclAllReduce(x, x, 8 + size_t(l.rank), ncclFloat, ncclSum, c, nullptr);
                  }));
    expect_report(2, "of type 9", calls([](const Launch& l, float* x, ncclComm_t c) {
                      return ncclAllReduce(x, x, 8, l.rank ? ncclBfloat16 : ncclFloat, ncclSum, c, nullptr);
                  }));
    expect_report(2, "root 1", calls([](const Launch& l, float* x, ncclComm_t c) {
                      return ncclBroadcast(x, x, 8, ncclFloat, l.rank, c, nullptr);
                  }));
    expect_report(2, "ranks disagree on the number of ranks", [](const Launch& launch) {
        Launch other = launch;
        other.world_size += launch.rank;
        until_done(begin(other, common_id(launch)), ncclInProgress);
    });
    expect_report(3, "two ranks have the same number", [](const Launch& launch) {
        Launch other = launch;
        other.rank = std::min(launch.rank, 1);
        until_done(begin(other, common_id(launch)), ncclInProgress);
    });
}

TEST_CASE("ranks: a collective on memory that it must not use is reported") {
    const auto all_reduce = [](const char* text, auto from, auto to) {
        expect_report(1, text, calls([=](const Launch&, float* x, ncclComm_t c) {
                          static float host[64];
                          return ncclAllReduce(from(x, host), to(x, host), 32, ncclFloat, ncclSum, c, nullptr);
                      }));
    };
    const auto first = [](float* x, float*) { return x; };
    const auto second = [](float* x, float*) { return x + 1; };
    const auto on_host = [](float*, float* host) { return host; };
    const auto beyond = [](float* x, float*) { return x + 33; };
    all_reduce("ncclAllReduce: a pointer that is not in device memory", on_host, first);
    all_reduce("ncclAllReduce: a pointer that is not in device memory", first, on_host);
    all_reduce("beyond the end of a device array", beyond, first);
    all_reduce("beyond the end of a device array", first, beyond);
    all_reduce("ncclAllReduce: its output overlaps its input, but not in place", first, second);
    expect_report(2, "ncclReduceScatter: its output overlaps", calls([](const Launch&, float* x, ncclComm_t c) {
                      return ncclReduceScatter(x, x, 32, ncclFloat, ncclSum, c, nullptr);  // rank 1: x + 32
                  }));
    expect_report(2, "ncclAllGather: its output overlaps", calls([](const Launch&, float* x, ncclComm_t c) {
                      return ncclAllGather(x, x, 32, ncclFloat, c, nullptr);
                  }));
}

TEST_CASE("ranks: a correct collective is not reported") {
    expect_success(run_ranks({2}, calls([](const Launch& l, float* x, ncclComm_t c) {
                                 return ncclReduceScatter(x, x + 32 * l.rank, 32, ncclFloat, ncclSum, c, nullptr);
                             })));
}
#endif
