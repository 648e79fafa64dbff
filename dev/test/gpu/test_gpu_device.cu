// test_gpu_device.cu: tests device.h on CUDA: allocations and their failures, the order of streams and events, graphs,
// scratch memory, and the machines that device_init refuses.
#include "cuda/autotune.h"
#include "gpu/on_gpu.h"
#ifdef SIMT_EMULATOR
#include "internal.h"
#endif
#include "ops/ops.h"
#include "support/cases_device.h"
#include "train/optimizer.h"
#include "train/plan.h"

TEST_CASE("device_allocate returns zeroed, aligned memory and counts its bytes, without host memory") {
    device_cases::allocation({1, 63, 100'000, (5 << 20) + 7});
    device_cases::host_memory();
    const OwnedStream own;  // the memory is zero before any stream can use it
    DeviceBuffer<char> a(100'000, "a");
    std::vector<char> host(100'000, 1);
    copy_to_host(host.data(), a.data, a.bytes(), own.stream);
    wait_for_stream(own.stream);
    CHECK(host == std::vector<char>(100'000));
    CHECK_THROWS_WITH_AS(device_allocate(-1, "weights"), doctest::Contains("weights: -1 bytes asked"), Error);
}

TEST_CASE("a failed allocation names its purpose and the free memory, and later work succeeds") {
    const int64_t before = device_bytes_allocated(), petabyte = int64_t(1) << 50;
    for (const char* part :
         {"no memory for logits: 1,125,899,906,842,624 bytes asked", " free of ", " on ", "already allocated"})
        CHECK_THROWS_WITH_AS(device_allocate(petabyte, "logits"), doctest::Contains(part), OutOfMemory);
    CHECK(device_bytes_allocated() == before);
    CHECK(cudaGetLastError() == cudaSuccess);  // else the next launch would report the error
    DeviceBuffer<char> a(10, "a");
    CHECK(to_host(a.data, 10) == std::vector<char>(10));
}

TEST_CASE("copies to, from and within the device keep every byte, and fill_zero zeroes every byte") {
    device_cases::copies({0, 1, 1000, (1 << 20) + 3});
    device_cases::copies_of_rows();
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

TEST_CASE("a stream runs in order, an event orders two streams, and event_done is true once the work is done") {
    const DeferredStreams deferred;
    const OwnedStream stream[2];
    const Event event[2] = {create_event(), create_event()};
    DeviceBuffer<unsigned> x(32, "x"), other(32, "other");
    unsigned* host = static_cast<unsigned*>(host_allocate(x.bytes()));
    unsigned want = 0;
    for (int turn = 0; turn < 20; turn++) {
        const int s = turn % 2;
        if (turn > 0) stream_wait_event(stream[s].stream, event[1 - s]);
        simt::launch(step_kernel, 1, 32, 0, stream[s].stream, x.data, unsigned(turn), 100'000);
        if (turn == 19) copy_to_host(host, x.data, x.bytes(), stream[s].stream);
        record_event(event[s], stream[s].stream);
        want = 3 * want + unsigned(turn);
    }
    // The launch shows that event_done has left no error.
    while (!event_done(event[1])) simt::launch(step_kernel, 1, 32, 0, stream[1].stream, other.data, 0u, 0);
    CHECK(std::vector<unsigned>(host, host + 32) == std::vector<unsigned>(32, want));

    simt::launch(step_kernel, 1, 32, 0, stream[0].stream, x.data, 1u, 1000);
    record_event(event[0], stream[0].stream);
    copy_to_host(host, x.data, x.bytes(), stream[0].stream);
    wait_for_event(event[0]);
    CHECK(event_done(event[0]));
    want = 3 * want + 1;
    CHECK(to_host(x.data, 32) == std::vector<unsigned>(32, want));  // without a wait for the stream before
    wait_for_stream(stream[0].stream);
    for (const Event each : event) destroy_event(each);
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

TEST_CASE_TEMPLATE("state in host memory takes none of the device, and the plan knows it", floatX, float, bf16) {
    const GPT2Config config = {32, 300, 2, 2, 64};
    device_reserve_scratch(1 << 27);  // all models of the process share it, and the plan counts it separately
    for (const MomentDtype moments : {MomentDtype::fp32, MomentDtype::block8})
        for (const Offload offload : {Offload::none, Offload::moments, Offload::master, Offload::all}) {
            const MemoryOptions options = {.logit_chunks = 1, .moments = moments, .offload = offload};
            const int64_t before = device_bytes_allocated();
            GPT2<floatX> model(config, Purpose::train, 2, 32, options);
            Optimizer<floatX> optimizer(model, {}, options);
            int64_t planned = 0;
            for (const MemoryItem& item : training_memory(dtype_of<floatX>, config, plan_batch(2, 32, 0, 1), options))
                if (!item.on_host && std::string(item.purpose) != "scratch") planned += item.bytes;
            CHECK(device_bytes_allocated() - before >= planned);
            CHECK(device_bytes_allocated() - before <= planned + 4096);  // rounding of each block
        }
    const MemoryOptions least = {.recompute = Recompute::layer,
                                 .logit_chunks = 8,
                                 .master_weights = false,
                                 .moments = MomentDtype::block8,
                                 .offload = Offload::moments};
    const auto items = training_memory(Dtype::bf16, config_by_name("d48"), plan_batch(1, 1024, 0, 1), least);
    CHECK(double(device_bytes(items)) <= 9.5 * 0x1p30);
}

TEST_CASE("device_info and device_libraries name the GPU and the libraries") {
    device_init(0, 0);
    const DeviceInfo info = device_info();
    CHECK(info.name != "");
    CHECK(info.memory_bytes > 0);
    CHECK((info.peak_flops_bf16 > 0) == (info.peak_source == "data sheet"));
    for (const char* part : {"CUDA ", "driver for ", "cuBLASLt "})
        CHECK(device_libraries().find(part) != std::string::npos);
}

#ifdef SIMT_EMULATOR
// Starts on the machine that the emulator's configuration describes.
static void expect_refused(int process, const simt::Config& machine, const char* text) {
    const simt::Config as_it_was = simt::config;
    simt::config = machine;
    try {
        device_init(process, 0);
        FAIL_CHECK("a machine that should be refused: " << text);
    } catch (const Error& error) {
        CHECK_MESSAGE(std::string(error.what()).find(text) != std::string::npos, error.what());
        CHECK(error.exit_code == EXIT_USAGE);
    }
    CHECK(cudaGetLastError() == cudaSuccess);
    simt::config = as_it_was;
}

TEST_CASE("a process uses the GPU whose index is its local rank, or the only one that it sees") {
    const simt::Config as_it_was = simt::config;
    simt::config.gpus = 2;
    device_init(1, 0);
    expect_refused(2, simt::config, "process 2 of this machine has no GPU of its own");
    expect_refused(-1, simt::config, "process -1");
    simt::config.gpus = 1;
    device_init(2, 0);
    int device = -1;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(device == 0);
    simt::config = as_it_was;
}

// Its kernel has another number of registers for each width.
TEST_CASE_TEMPLATE("a LayerNorm of each width fits each GPU", floatX, float, bf16) {
    const simt::Config as_it_was = simt::config;
    const int step = 32 * 16 / int(sizeof(floatX)), widest = 20 * step;
    DeviceBuffer<floatX> row(4 * widest, "rows");
    DeviceBuffer<float> statistics(3, "statistics");
    for (const int capability : {80, 86, 89, 90, 100, 120}) {
        CAPTURE(capability);
        simt::config.compute_capability = capability;
        for (int C = step; C <= widest; C += step)
            for (float* amax : {static_cast<float*>(nullptr), statistics.data + 2})
                gpu::layernorm_forward({row.data, amax}, statistics.data, statistics.data + 1, row.data + widest,
                                       row.data + 2 * widest, row.data + 3 * widest, 1, C, nullptr);
    }
    wait_for_device();
    simt::config = as_it_was;
}

TEST_CASE("device_init refuses a machine without a GPU, with an old driver or with an old GPU, and says why") {
    expect_refused(0, {.driver_version = 0}, "no NVIDIA driver is installed here; train_gpt2 is the same program");
    expect_refused(0, {.driver_version = 12040}, "the NVIDIA driver is for CUDA 12.4");
    expect_refused(0, {.gpus = 0}, "no GPU is visible");
    expect_refused(0, {.compute_capability = 75}, "GPU 0, emulator, has compute capability 7.5; 8.0 is the least");
    expect_refused(0, {.compute_capability = 86, .kernel_images = false}, "is sm_86: make CUDA_ARCHS=86");
    expect_refused(0, {.compute_capability = 90, .kernel_images = false}, "is sm_90: make CUDA_ARCHS=90a");
    expect_refused(0, {.start_error = cudaErrorSystemNotReady}, "systemctl start nvidia-fabricmanager");
    expect_refused(0, {.start_error = cudaErrorSystemDriverMismatch}, "restart the machine");
    expect_refused(0, {.device_error = cudaErrorDevicesUnavailable}, "another process has the GPU for itself");
}
#endif
