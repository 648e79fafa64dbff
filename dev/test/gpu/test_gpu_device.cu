// test_gpu_device.cu: tests device.h on CUDA: allocations and their failures, the order of streams and events, graphs,
// scratch memory, and the machines that device_init refuses.
#include "cuda/autotune.h"
#include "gpu/on_gpu.h"
#ifdef SIMT_EMULATOR
#include "internal.h"
#endif
#include "support/cases_device.h"
#include "train/plan.h"

TEST_CASE("device_allocate returns zeroed, aligned memory and counts its bytes") {
    device_cases::allocation({1, 63, 100'000, (5 << 20) + 7});
    CHECK_THROWS_WITH_AS(device_allocate(-1, "weights"), doctest::Contains("weights: -1 bytes asked"), Error);
}

TEST_CASE("device_allocate has zeroed the memory before any stream can use it") {
    const Stream stream = create_stream();
    DeviceBuffer<char> a(100'000, "a");
    std::vector<char> host(100'000, 1);
    copy_to_host(host.data(), a.data, a.bytes(), stream);
    wait_for_stream(stream);
    CHECK(host == std::vector<char>(100'000));
    destroy_stream(stream);
}

TEST_CASE("a failed allocation names its purpose, the free memory and what to lower, and later work succeeds") {
    const int64_t before = device_bytes_allocated(), petabyte = int64_t(1) << 50;
    for (const char* part : {"no memory for logits: 1,125,899,906,842,624 bytes asked", " free of ", " on ",
                             "already allocated; lower --micro-batch, or try --recompute or --logit-chunks"})
        CHECK_THROWS_WITH_AS(device_allocate(petabyte, "logits"), doctest::Contains(part), Error);
    CHECK_THROWS_WITH_AS(device_allocate(petabyte, "weights"),
                         doctest::Contains("the model is too large for this machine; lower --layers or --channels"),
                         Error);
    CHECK(device_bytes_allocated() == before);
    CHECK(cudaGetLastError() == cudaSuccess);  // else the next launch would report the error
    DeviceBuffer<char> a(10, "a");
    CHECK(to_host(a.data, 10) == std::vector<char>(10));
}

TEST_CASE("host memory is not counted as device memory") { device_cases::host_memory(); }

TEST_CASE("copies to, from and within the device keep every byte, and fill_zero zeroes every byte") {
    device_cases::copies({0, 1, 1000, (1 << 20) + 3});
}

// x = 3 x + add, so that another order of launches gives another result. rounds only makes the kernel take longer.
__global__ void step_kernel(unsigned* x, unsigned add, int rounds) {
    unsigned value = x[threadIdx.x];
    for (int i = 0; i < rounds; i++) value = i == 0 ? 3 * value + add : value;
    x[threadIdx.x] = value;
}

// Makes the emulator's streams run only while the host waits, interleaved.
struct DeferredStreams {
#ifdef SIMT_EMULATOR
    bool before = simt::config.deferred_streams;
    DeferredStreams() { simt::config.deferred_streams = true; }
    ~DeferredStreams() { simt::config.deferred_streams = before; }
#else
    ~DeferredStreams() {}
#endif
};

TEST_CASE("a stream runs in order, an event orders two streams, and wait_for_event waits for the event") {
    const DeferredStreams deferred;
    constexpr int threads = 32, streams = 2, turns = 20;
    DeviceBuffer<unsigned> x(threads, "x");
    Stream stream[streams];
    Event event[streams];
    for (int s = 0; s < streams; s++) {
        stream[s] = create_stream();
        event[s] = create_event();
    }
    const Event timer[2] = {create_timer(), create_timer()};
    record_event(timer[0], stream[0]);
    unsigned want = 0;
    for (int turn = 0; turn < turns; turn++) {
        const int s = turn % streams;
        if (turn > 0) stream_wait_event(stream[s], event[1 - s]);
        simt::launch(step_kernel, 1, threads, 0, stream[s], x.data, unsigned(turn), 1000);
        record_event(event[s], stream[s]);
        want = 3 * want + unsigned(turn);
    }
    unsigned* host = static_cast<unsigned*>(host_allocate(x.bytes()));
    const int last = (turns - 1) % streams;
    copy_to_host(host, x.data, x.bytes(), stream[last]);
    record_event(event[last], stream[last]);
    record_event(timer[1], stream[last]);
    wait_for_event(timer[1]);
    CHECK(event_done(event[last]));
    const double seconds = seconds_between(timer[0], timer[1]);
    CHECK(seconds >= 0.0);
    CHECK(seconds < 60.0);
    for (int i = 0; i < threads; i++) CHECK(host[i] == want);

    simt::launch(step_kernel, 1, threads, 0, stream[0], x.data, 1u, 1000);
    want = 3 * want + 1;
    CHECK(to_host(x.data, threads) == std::vector<unsigned>(threads, want));  // without a wait for the stream before
    for (int s = 0; s < streams; s++) {
        destroy_event(event[s]);
        destroy_event(timer[s]);
        destroy_stream(stream[s]);
    }
    host_free(host);
}

TEST_CASE("event_done is true once the work is done, and before that leaves no error for a later launch") {
    const DeferredStreams deferred;
    const Stream stream = create_stream();
    const Event event = create_event();
    DeviceBuffer<unsigned> x(32, "x");
    unsigned* host = static_cast<unsigned*>(host_allocate(x.bytes()));
    for (int i = 0; i < 50; i++) simt::launch(step_kernel, 1, 32, 0, stream, x.data, 1u, 100'000);
    copy_to_host(host, x.data, x.bytes(), stream);
    record_event(event, stream);
    while (!event_done(event)) simt::launch(step_kernel, 1, 32, 0, stream, x.data, 0u, 0);
    unsigned want = 0;
    for (int i = 0; i < 50; i++) want = 3 * want + 1;
    CHECK(host[31] == want);
    wait_for_stream(stream);
    destroy_event(event);
    destroy_stream(stream);
    host_free(host);
}

TEST_CASE("a graph runs nothing while it is captured, and all its work each time it is launched") {
    const DeferredStreams deferred;
    DeviceBuffer<unsigned> x(32, "x"), y(32, "y");
    const OwnedStream own;
    CHECK(device_has_graphs());
    begin_graph(own.stream);
    simt::launch(step_kernel, 1, 32, 0, own.stream, x.data, 5u, 1);
    copy_on_device(y.data, x.data, x.bytes(), own.stream);
    simt::launch(step_kernel, 1, 32, 0, own.stream, x.data, 1u, 1);
    const Graph graph = end_graph(own.stream);
    CHECK(to_host(x.data, 32) == std::vector<unsigned>(32, 0));
    simt::launch(step_kernel, 1, 32, 0, own.stream, x.data, 2u, 1);  // not captured; the graph runs after it
    run_graph(graph, own.stream);
    run_graph(graph, own.stream);
    unsigned want = 2, copied = 0;
    for (int i = 0; i < 2; i++) {
        copied = 3 * want + 5;
        want = 3 * copied + 1;
    }
    CHECK(to_host(x.data, 32) == std::vector<unsigned>(32, want));
    CHECK(to_host(y.data, 32) == std::vector<unsigned>(32, copied));
    destroy_graph(graph);
}

TEST_CASE("the largest micro-batch does not count host memory against the memory of the device") {
    const GPT2Config config = {32, 50257, 1, 2, 64};  // one large tensor
    const auto items = [&](int B) { return training_memory(Dtype::bf16, config, plan_batch(B, 32, 0, 1), {}); };
    CHECK(!device_memory_is_host());
    const int64_t available = device_bytes(items(5));
    CHECK(available < device_bytes(items(5), false));
    CHECK(largest_micro_batch(Dtype::bf16, config, 32, 0, 1, {}, available) == 5);
    CHECK(largest_micro_batch(Dtype::bf16, config, 32, 0, 1, {}, available - 1) == 4);
}

TEST_CASE("scratch memory grows until it is reserved, and then a larger request is refused") {
    device_cases::scratch();
}

TEST_CASE("device_info and device_libraries name the GPU and the libraries") {
    device_init(0, 0);
    const DeviceInfo info = device_info();
    CHECK(!info.name.empty());
    CHECK(info.memory_bytes > 0);
    CHECK(!info.peak_source.empty());
    CHECK((info.peak_flops_bf16 > 0) == (info.peak_source == "data sheet"));
    CHECK(device_bf16_is_faster());
    for (const char* part : {"CUDA ", "driver for ", "cuBLASLt "})
        CHECK(device_libraries().find(part) != std::string::npos);
}

TEST_CASE("device_init refuses negative numbers of processes and threads") {
    CHECK_THROWS_WITH_AS(device_init(-1, 0), doctest::Contains("process -1"), Error);
}

#ifdef SIMT_EMULATOR
// The clock of an idle GPU, in the emulator: the first two kernels take four times as long.
TEST_CASE("the first of several algorithms is not timed before the GPU has raised its clock") {
    int runs = 0;
    const auto run = [&](size_t i) {
        simt::enqueue_work([] {}, (i == 0 ? 4.0f : 5.0f) * (runs++ < 2 ? 4.0f : 1.0f), nullptr);
        return true;
    };
    const std::optional<gpu::Fastest> best = gpu::fastest(nullptr, 2, run);
    REQUIRE(best.has_value());
    CHECK(best->index == 0);
    CHECK(best->ms == 4.0f);
}

static void expect_refused(const char* text) {
    try {
        device_init(0, 0);
        FAIL_CHECK("a machine that should be refused: " << text);
    } catch (const Error& error) {
        CHECK_MESSAGE(std::string(error.what()).find(text) != std::string::npos, error.what());
        CHECK(error.exit_code == EXIT_USAGE);
    }
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("a process uses the GPU whose index is its local rank, or the only one that it sees") {
    const simt::Config as_it_was = simt::config;
    simt::config.gpus = 2;
    device_init(1, 0);
    CHECK_THROWS_WITH_AS(device_init(2, 0), doctest::Contains("process 2 of this machine has no GPU of its own"),
                         Error);
    simt::config.gpus = 1;
    device_init(2, 0);
    int device = -1;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(device == 0);
    simt::config = as_it_was;
}

TEST_CASE("device_init refuses a machine without a GPU, with an old driver or with an old GPU, and says why") {
    const simt::Config as_it_was = simt::config;
    simt::config.driver_version = 0;
    expect_refused("no NVIDIA driver is installed here; train_gpt2 is the same program for the CPU");
    simt::config.driver_version = 12040;
    expect_refused("the NVIDIA driver is for CUDA 12.4, this program was built with CUDA 13.0");
    simt::config = as_it_was, simt::config.gpus = 0;
    expect_refused("no GPU is visible");
    simt::config = as_it_was, simt::config.compute_capability = 75;
    expect_refused("GPU 0, emulator, has compute capability 7.5; 8.0 is the least");
    simt::config = as_it_was, simt::config.compute_capability = 86, simt::config.kernel_images = false;
    expect_refused("this build has code for sm_");
    expect_refused(", and GPU 0, emulator, is sm_86: make CUDA_ARCHS=86");
    simt::config.compute_capability = 90;
    expect_refused("is sm_90: make CUDA_ARCHS=90a");
    simt::config = as_it_was, simt::config.start_error = cudaErrorSystemNotReady;
    expect_refused("systemctl start nvidia-fabricmanager (cudaErrorSystemNotReady)");
    simt::config.start_error = cudaErrorSystemDriverMismatch;
    expect_refused("Linux still runs the old one: restart the machine");
    simt::config = as_it_was, simt::config.device_error = cudaErrorDevicesUnavailable;
    expect_refused("GPU 0, emulator, cannot be used: another process has the GPU for itself");
    simt::config = as_it_was, simt::config.gpus = 2;
    device_init(1, 0);
    CHECK_THROWS_WITH_AS(device_init(2, 0), doctest::Contains("there are 2"), Error);
    simt::config = as_it_was;
}
#endif
