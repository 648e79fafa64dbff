// test_gpu_comm.cu: tests the collectives of llmc/parallel/comm_nccl.cpp. A world of one rank makes every call, in the
// emulator and, with the real NCCL, on a GPU. The emulator also runs 2 and 3 ranks, each a process with its own GPU,
// connected by the emulator's NCCL. These tests check the results of collectives, the loss of a rank, and groups of 2,
// 3, 4 and 6 ranks. The last tests check that the emulator's NCCL reports incorrect calls.
#include <cmath>
#include <memory>

#include "gpu/on_gpu.h"
#include "parallel/comm.h"
#include "support/cases_groups.h"
#include "support/test.h"

#if defined(SIMT_EMULATOR) && defined(USE_NCCL)
#define SEVERAL_RANKS 1
#include <unistd.h>

#include <functional>

#include "gpu/rank_processes.h"
#include "parallel/watchdog.h"
#endif

// Initial value of element i on rank r: small integers, whose sums are exact in bf16 and fp32.
static float value_of(int r, int64_t i) { return float((i * 7 + r * 3) % 11 - 5); }

// x[i] += value. Queued before a collective, which must wait for it, and after the collective, for which it must wait.
__global__ void __launch_bounds__(256) shift_kernel(float* x, float value, int count) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) x[i] += value;
}

static void expect(bool right, const char* what) {
    if (!right) fail(EXIT_INTERNAL, "wrong: %s", what);
}

// Adds gradients up between other work on a stream, and checks results and counters. groups_cases has the others.
static void check_gradients(Comm& comm, int64_t count, Dtype dtype) {
    const int n = comm.world_size;
    const int64_t own = count / n, first = comm.shard_index * own;
    const int64_t sent = comm.bytes_sent, dtype_bytes = dtype == Dtype::bf16 ? 2 : 4;
    comm.reserve(dtype, count);
    const OwnedStream stream;
    DeviceBuffer<float> x(count, "x");
    std::vector<float> want(size_t(count), 0.5f), values(want.size());
    for (int q = 0; q < n; q++)
        for (int64_t i = 0; i < count; i++) want[size_t(i)] += value_of(q, i) + 1.0f;
    for (int64_t i = 0; i < count; i++) values[size_t(i)] = value_of(comm.rank, i);
    const auto shift = [&](float value) {
        simt::launch(shift_kernel, blocks_for(count, 256), 256, 0, stream.stream, x.data, value, int(count));
    };
    for (const bool scatter : {false, true}) {
        copy_to_device(x.data, values.data(), x.bytes(), stream.stream);
        shift(1.0f);
        const Comm::Ticket ticket = scatter ? comm.reduce_scatter(x.data, count, dtype, stream.stream)
                                            : comm.all_reduce(x.data, count, dtype, stream.stream);
        comm.wait(ticket, stream.stream);
        shift(0.5f);
        wait_for_stream(stream.stream);
        const std::vector<float> got = to_host(x.data, count);
        for (int64_t i = scatter ? first : 0; i < (scatter ? first + own : count); i++)
            expect(got[size_t(i)] == want[size_t(i)], scatter ? "reduce_scatter" : "all_reduce");
    }
    expect(comm.bytes_sent - sent == (n - 1) * own * 3 * dtype_bytes, "bytes_sent");
}

static void exchange_texts(Comm& comm) {
    for (const size_t length : {size_t(0), size_t(1), size_t(5000)}) {
        const std::vector<std::string> all = comm.all_gather_text(std::string(length * size_t(comm.rank + 1), 'a'));
        expect(int(all.size()) == comm.world_size, "all_gather_text: the number of texts");
        for (size_t r = 0; r < all.size(); r++) expect(all[r] == std::string(length * (r + 1), 'a'), "all_gather_text");
    }
}

static void check_all_collectives(Comm& comm) {
    for (const Dtype dtype : {Dtype::fp32, Dtype::bf16})
        for (const int64_t rows : {1, 3, 100}) check_gradients(comm, rows * 64 * comm.world_size, dtype);
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
    const OwnedStream stream;
    DeviceBuffer<float> x(64, "x");
    Comm::Ticket first = 0, last = 0;
    for (int i = 0; i < 200; i++) {  // more tickets than NcclComm has events
        last = comm->all_reduce(x.data, 64, Dtype::fp32, stream.stream);
        if (i == 0) first = last;
    }
    comm->wait(first, stream.stream);
    comm->wait(last, stream.stream);
    wait_for_stream(stream.stream);
    const double exposed = comm->exposed(comm->waits);
    CHECK(exposed >= 0.0);
    CHECK(exposed < 60.0);
    groups_cases::check_all_groups(*comm, {1, 64, 4096}, false);
}

TEST_CASE("--grad-dtype bf16 rounds to nearest, once for one rank, in reserved memory") {
    const std::unique_ptr<Comm> comm = world_of_one();
    if (!comm) return;
    const int64_t count = 4096 + 64;
    auto x = random_tensor<float>(count, 1);
    const OwnedStream stream;
    DeviceBuffer<float> device(count, "x");
    copy_to_device(device.data, x.data(), device.bytes(), stream.stream);
    CHECK_THROWS_WITH_AS(comm->all_reduce(device.data, count, Dtype::bf16, stream.stream),
                         doctest::Contains("4160 gradients to be rounded, memory for 0"), Error);
    comm->reserve(Dtype::bf16, count);
    comm->wait(comm->all_reduce(device.data, count, Dtype::bf16, stream.stream), stream.stream);
    wait_for_stream(stream.stream);
    const std::vector<float> got = to_host(device.data, count);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong += got[size_t(i)] != float(bf16(x[i]));
    CHECK(wrong == 0);
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
        const OwnedStream stream;
        const DeviceBuffer<float> x(1 << 20, "x");
        const int64_t sent = comm->bytes_sent, before = device_bytes_free();
        comm->connect();
        const int64_t connected = device_bytes_free();
        expect(connected < before, "connect allocates memory");
        expect(comm->bytes_sent == sent, "connect counts no bytes");
        for (const int64_t count : {64, 1 << 20}) {
            comm->all_reduce(x.data, count, Dtype::fp32, stream.stream);
            comm->reduce_scatter(x.data, count, Dtype::fp32, stream.stream);
            comm->all_gather(x.data, count * int64_t(sizeof(float)), stream.stream);
            comm->broadcast(x.data, count * int64_t(sizeof(float)), 0, stream.stream);
        }
        wait_for_device();
        expect(device_bytes_free() == connected, "a collective allocates memory");
    }));
}

// On the emulator's clock a collective takes 1 ms, and all other work takes no time.
TEST_CASE("ranks: exposed_seconds counts the time that a stream waits for collectives, and no other time") {
    expect_success(run_ranks({}, [](const Launch& launch) {
        const std::unique_ptr<Comm> world = make_nccl_comm(launch), comm = world->split(0);
        const OwnedStream stream;
        DeviceBuffer<float> x(64, "x");
        const int64_t waits = world->waits;
        Comm::Ticket tickets[3];
        const double before = comm->exposed(comm->waits);
        for (Comm::Ticket& ticket : tickets) ticket = comm->all_reduce(x.data, 64, Dtype::fp32, stream.stream);
        wait_for_device();
        expect(comm->exposed(comm->waits) == before, "no stream waited");
        comm->wait(tickets[1], stream.stream);
        comm->wait(tickets[0], stream.stream);
        comm->wait(tickets[2], stream.stream);
        comm->wait(0, stream.stream);
        wait_for_device();
        expect(std::fabs(comm->exposed(comm->waits) - before - 3e-3) < 1e-6,
               "the stream waits 2 ms for the second collective, 0 for the first, 1 for the third");
        expect(world->waits == waits, "the waits of a group are not the world's");
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

// The last rank ends while collectives of the world, of a group of all ranks and of pairs are pending on different
// streams, and the other rank of its pair waits for its pair. in_a_copy: the driver waits for the stream within a copy
// to pageable memory.
static void lose_a_rank(const Launch& launch, bool in_a_copy) {
    const std::unique_ptr<Comm> comm = make_nccl_comm(launch), all = comm->split(0),
                                pair = comm->split(launch.rank / 2);
    exchange_texts(*pair);
    comm->all_gather_text("");
    if (launch.rank == launch.world_size - 1) _exit(9);
    const OwnedStream stream;
    const DeviceBuffer<float> x(192, "x"), y(192, "y"), z(192, "z");
    std::vector<float> pageable(192);
    const Comm::Ticket of_all = all->all_reduce(x.data, 192, stream.stream);
    comm->all_reduce(y.data, 192, stream.stream);
    try {
        pair->wait(pair->all_reduce(z.data, 192, stream.stream), stream.stream);
        if (!in_a_copy) all->all_gather_text("");
        all->wait(of_all, stream.stream);
        copy_to_host(pageable.data(), x.data, x.bytes(), stream.stream);
    } catch (const Error& error) {
        fprintf(stderr, "error: %s\n", error.what());
        fflush(nullptr);
        for (Comm* each : {comm.get(), all.get(), pair.get()}) {  // must fail with the same text, not hang
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

TEST_CASE("ranks: if one rank ends, the others end with an error") {
    for (const bool in_a_copy : {false, true})
        for (const char* streams : {"now", "deferred"}) {
            const auto lose = [=](const Launch& launch) { lose_a_rank(launch, in_a_copy); };
            const std::vector<Ending> endings = run_ranks({4, streams}, lose);
            for (size_t r = 0; r + 1 < endings.size(); r++) {
                CHECK_MESSAGE(endings[r].status == EXIT_INTERNAL, "rank " << r << ": " << endings[r].status);
                CHECK_MESSAGE(endings[r].output.find("error: another rank is gone") != std::string::npos,
                              endings[r].output);
            }
        }
}

// The rank that is left queues kernels behind a collective until a launch blocks.
TEST_CASE("ranks: if one rank ends while a launch of another blocks, the watchdog's thread ends that one") {
    const std::vector<Ending> endings = run_ranks({}, [](const Launch& launch) {
        const std::unique_ptr<Comm> comm =
            make_comm(launch, std::make_shared<Watchdog>(60.0, launch.rank, launch.world_size));
        comm->connect();
        if (launch.rank == 1) {
            sleep(1);  // rank 0 starts its collective meanwhile; one that starts later fails at once
            _exit(9);
        }
        simt::config.queue_limit = 8;
        const OwnedStream stream;
        const DeviceBuffer<float> x(64, "x");
        comm->wait(comm->all_reduce(x.data, 64, Dtype::fp32, stream.stream), stream.stream);
        for (int i = 0; i < 20; i++) simt::launch(shift_kernel, 1, 256, 0, stream.stream, x.data, 1.0f, 64);
        _exit(98);
    });
    if (endings.empty()) return;
    CHECK_MESSAGE(endings[0].status == EXIT_INTERNAL, endings[0].status << " " << endings[0].output);
    CHECK_MESSAGE(endings[0].output.find("another rank is gone") != std::string::npos, endings[0].output);
    CHECK_MESSAGE(endings[0].output.find("while a launch blocks") != std::string::npos, endings[0].output);
}

// ---- Bugs that the emulator's NCCL reports

// At least one of two ranks must print the text and fail.
static void expect_report(const std::string& text, const std::function<void(Comm& comm, float* x, Stream)>& call) {
    const std::vector<Ending> endings = run_ranks({}, [&](const Launch& launch) {
        const std::unique_ptr<Comm> comm = make_nccl_comm(launch);
        const OwnedStream stream;
        const DeviceBuffer<float> x(64, "x");
        try {
            call(*comm, x.data, stream);
            wait_for_device();
        } catch (const Error&) {
            _exit(1);  // the other rank has ended, and freeing memory would wait for the collective
        }
    });
    bool said = endings.empty();
    for (const Ending& e : endings) said = said || (e.status != 0 && e.output.find(text) != std::string::npos);
    CHECK_MESSAGE(said, "no rank printed \"" << text << "\"");
}

TEST_CASE("ranks: a disagreement on a collective, and memory that it must not use, are reported") {
    const auto sum = [](Comm& comm, float* x, int64_t count, Stream s) { comm.all_reduce(x, count, Dtype::fp32, s); };
    expect_report("rank 1 ncclBroadcast number", [&](Comm& comm, float* x, Stream s) {
        comm.rank ? void(comm.broadcast(x, 32, 0, s)) : sum(comm, x, 8, s);
    });
    expect_report("of 9 elements", [&](Comm& comm, float* x, Stream s) { sum(comm, x, 8 + comm.rank, s); });
    expect_report("ncclAllReduce: a pointer that is not in device memory", [&](Comm& comm, float*, Stream s) {
        static float host[64];
        sum(comm, host, 32, s);
    });
    expect_report("beyond the end of a device array",
                  [&](Comm& comm, float* x, Stream s) { sum(comm, x + 33, 32, s); });
}
#endif
