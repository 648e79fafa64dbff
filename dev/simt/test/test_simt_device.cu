// test_simt_device.cu: tests what the emulator knows of a GPU: which launches fit, how many blocks a multiprocessor
// runs at once, and which calls a stream capture allows.
#include "cuda/simt.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "internal.h"
#include "orders.h"

// Returns the text that f prints on stderr.
static std::string errors_of(const std::function<void()>& f) {
    FILE* file = tmpfile();
    const int stderr_before = dup(2);
    dup2(fileno(file), 2);
    f();
    dup2(stderr_before, 2);
    close(stderr_before);
    std::string text(size_t(ftell(file)), 0);
    rewind(file);
    text.resize(fread(text.data(), 1, text.size(), file));
    fclose(file);
    return text;
}

// Sets the emulated architecture for the lifetime of this object.
struct Architecture {
    const int before = simt::config.compute_capability;
    explicit Architecture(int capability) { simt::config.compute_capability = capability; }
    Architecture(const Architecture&) = delete;
    ~Architecture() { simt::config.compute_capability = before; }
};

TEST_CASE("a multiprocessor runs as many blocks as its threads, registers and shared memory allow") {
    const auto expect = [](int blocks, const std::vector<int>& capabilities, int registers, int threads, int fixed,
                           int dynamic) {
        for (const int capability : capabilities) {
            INFO("sm_", capability, ", ", registers, " registers, ", threads, " threads, ", fixed, " + ", dynamic,
                 " bytes of shared memory");
            CHECK(simt::blocks_per_multiprocessor({"", registers, fixed}, threads, dynamic, capability) == blocks);
        }
    };
    const int K = 1024;
    expect(8, {80, 90, 100}, 32, 256, 0, 0);  // 64 warps of threads
    expect(6, {86, 89, 120}, 32, 256, 0, 0);  // 48 warps
    expect(32, {80, 90, 100}, 16, 32, 0, 0);  // the number of blocks
    expect(24, {89, 120}, 16, 32, 0, 0);
    expect(16, {86}, 16, 32, 0, 0);
    expect(4, {80, 90, 120}, 64, 256, 0, 0);   // 2,048 registers in a warp, 8 warps in each of 4 parts
    expect(24, {80, 90, 120}, 33, 64, 0, 0);   // 1,056 registers, rounded to 1,280: 12 warps in each part
    expect(2, {80, 90, 120}, 96, 224, 0, 0);   // 5 warps of 3,072 in each part: 20, and not 21
    expect(1, {80, 90, 120}, 168, 288, 0, 0);  // 3 warps of 5,376 in each part: 12, of which the block has 9
    expect(0, {80, 90, 120}, 176, 288, 0, 0);  // 2 warps of 5,632
    expect(1, {80, 90, 120}, 255, 256, 0, 0);
    expect(3, {80}, 32, 128, 0, 48 * K);  // 164 / 49
    expect(4, {90, 100}, 32, 128, 0, 48 * K);
    expect(2, {89, 120}, 32, 128, 0, 48 * K);
    expect(4, {90}, 32, 128, 70, 45600);  // with 1,024, 46,720 after rounding to 128; five times 46,694 would fit
    expect(1, {80}, 32, 128, 0, 163 * K);
    expect(0, {80}, 32, 128, 0, 163 * K + 1);
    expect(1, {89, 120}, 32, 128, K, 98 * K);
    expect(0, {90, 100}, 32, 128, K, 227 * K);
}

TEST_CASE("a kernel takes the registers and the static shared memory of the code that a GPU runs") {
    const char* const budget = "# heading\n80 k 10 0 1\n80 kk<a,1> 20 5 2\n89 k 30 0 3\n90a k 40 0 4\n120 k 50 0 5\n";
    const struct {
        const char* name;
        int capability, registers;
    } cases[] = {{"k", 80, 10}, {"k", 86, 10},  {"k", 89, 30}, {"k", 90, 40},
                 {"k", 100, 0}, {"k", 120, 50}, {"kk", 80, 0}, {"kk<a,1>", 86, 20}};
    for (const auto& c : cases) {
        INFO(c.name, " on sm_", c.capability);
        CHECK(simt::usage_in(budget, c.name, c.capability).registers == c.registers);
    }
    CHECK(simt::usage_in(budget, "kk<a,1>", 89).shared == 2);
}

// These have the names of kernels in dev/cuda_budget.txt, so the emulator takes their registers and static shared
// memory from there: more than 224 registers, and 33 KiB.
template <int HS>
__global__ void attention_forward_mma_kernel(int* ran) {
    if (threadIdx.x == 0) *ran = HS;
}
template <class floatX, int VECS>
__global__ void attention_decode_kernel(int* ran) {
    if (threadIdx.x == 0) *ran = VECS;
}
__global__ void not_in_budget(int* ran) {
    if (threadIdx.x == 0) *ran = 1;
}

// The error of a launch of one block, and whether it ran.
static cudaError_t launch_error(void (*kernel)(int*), int threads, int64_t dynamic, bool ran) {
    const Array<int> out(std::vector<int>{0});
    simt::start(kernel, 1, threads, dynamic, nullptr, out.data);
    const cudaError_t error = cudaGetLastError();
    CHECK((out.host()[0] != 0) == ran);
    return error;
}

TEST_CASE("a launch with more registers than a multiprocessor has is refused, also by the calculation of occupancy") {
    void (*const large)(int*) = attention_forward_mma_kernel<64>;
    const char* name = nullptr;
    CHECK(cudaFuncGetName(&name, reinterpret_cast<const void*>(large)) == cudaSuccess);
    CHECK(std::string(name) == "attention_forward_mma_kernel<64>");
    for (const int capability : {80, 86, 89, 90, 100, 120}) {
        CAPTURE(capability);
        const Architecture architecture(capability);
        int blocks = -1;
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, large, 128, 0) == cudaSuccess);
        CHECK(blocks == 2);  // 8,192 registers in a warp
        CHECK(launch_error(large, 256, 0, true) == cudaSuccess);
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, large, 288, 0) == cudaSuccess);
        CHECK(blocks == 0);
        const std::string report =
            errors_of([&] { CHECK(launch_error(large, 288, 0, false) == cudaErrorLaunchOutOfResources); });
        CHECK(report.find("emulator: a launch of attention_forward_mma_kernel<64> at " __FILE__) == 0);
        CHECK(report.find("(cudaErrorLaunchOutOfResources)\n") == report.size() - 32);  // one line
        CHECK(launch_error(not_in_budget, 1024, 0, true) == cudaSuccess);
    }
    errors_of([&] {
        CHECK_THROWS_WITH_AS(simt::launch(large, 1, 288, 0, nullptr, nullptr),
                             doctest::Contains("attention_forward_mma_kernel<64>, (1, 1, 1) blocks of (288, 1, 1) "
                                               "threads, 0 bytes of shared memory: too many resources requested"),
                             Error);
        CHECK(launch_error(not_in_budget, 1025, 0, false) == cudaErrorInvalidConfiguration);
        CHECK(launch_error(not_in_budget, 0, 0, false) == cudaErrorInvalidConfiguration);
    });
    int blocks = -1;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, large, 0, 0) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
}

TEST_CASE("a launch has 48 KiB of shared memory with the static part, or what it has asked for") {
    const int K = 1024;
    void (*const kernel)(int*) = attention_decode_kernel<float, 8>;
    for (const std::array<int, 2> gpu : {std::array{80, 163}, {86, 99}, {90, 227}, {120, 99}}) {
        CAPTURE(gpu[0]);
        const Architecture architecture(gpu[0]);
        const int limit = gpu[1] * K;
        cudaFuncAttributes attributes;
        CHECK(cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess);
        const int fixed = int(attributes.sharedSizeBytes);
        CHECK(fixed > 32 * K);
        const auto allow = [&](int bytes) {
            return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        };
        CHECK(allow(0) == cudaSuccess);
        errors_of([&] {
            CHECK(launch_error(kernel, 32, 48 * K - fixed, true) == cudaSuccess);
            CHECK(launch_error(kernel, 32, 48 * K - fixed + 1, false) == cudaErrorInvalidValue);
            int blocks = -1;
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 32, size_t(48 * K - fixed + 1));
            CHECK(blocks == 0);
            CHECK(allow(limit - fixed + 1) == cudaErrorInvalidValue);
            CHECK(cudaGetLastError() == cudaErrorInvalidValue);
            CHECK(allow(limit - fixed) == cudaSuccess);
            CHECK(launch_error(kernel, 32, limit - fixed, true) == cudaSuccess);
            CHECK(launch_error(kernel, 32, limit - fixed + 1, false) == cudaErrorInvalidValue);
        });
    }
}

// Streams a and b, of which a is captured, with a kernel. The event `captured` was recorded in the capture, the others
// before it.
struct Streams {
    cudaStream_t a, b;
    cudaEvent_t captured, earlier, no_time;
    const Array<float> x{floats(32, [](int) { return 1; })};
    float* pinned;
    cudaGraph_t graph = nullptr;

    Streams(cudaStreamCaptureMode mode, unsigned flags) {
        cudaMallocHost(&pinned, 128);
        for (cudaStream_t* stream : {&a, &b}) cudaStreamCreateWithPriority(stream, flags, 0);
        for (cudaEvent_t* event : {&captured, &earlier}) cudaEventCreate(event);
        cudaEventCreateWithFlags(&no_time, cudaEventDisableTiming);
        for (const cudaEvent_t event : {earlier, no_time}) cudaEventRecord(event, b);
        REQUIRE(cudaStreamBeginCapture(a, mode) == cudaSuccess);
        launch(a);
        cudaEventRecord(captured, a);
    }
    Streams(const Streams&) = delete;
    ~Streams() {
        if (graph) cudaGraphDestroy(graph);
        for (const cudaStream_t stream : {a, b}) CHECK(cudaStreamDestroy(stream) == cudaSuccess);
        for (const cudaEvent_t event : {captured, earlier, no_time}) cudaEventDestroy(event);
        cudaFreeHost(pinned);
        cudaGetLastError();
    }
    void launch(cudaStream_t stream) const { simt::start(add_kernel, 1, 32, 0, stream, x.data, x.data, 1.0f); }
    cudaError_t end(cudaStream_t stream) { return cudaStreamEndCapture(stream, &graph); }
    // b joins the capture, with a kernel of its own, and is joined to a.
    void fork() const { cudaStreamWaitEvent(b, captured), launch(b); }
    cudaError_t join() const { return cudaEventRecord(captured, b), cudaStreamWaitEvent(a, captured); }
};

using Call = std::function<cudaError_t(Streams&)>;

// The call has this error and is reported in one line with its name. The captured stream is then unusable up to the
// end of the capture, which fails, too.
static void refused(cudaError_t error, const std::string& name, const Call& call, cudaStreamCaptureMode mode,
                    unsigned flags) {
    INFO(name, ", mode ", int(mode), ", flags ", flags);
    Streams s(mode, flags);
    const std::string report = errors_of([&] { CHECK(call(s) == error); });
    CHECK(report == "emulator: " + name + " during a stream capture: " + cudaGetErrorString(error) + " (" +
                        cudaGetErrorName(error) + ")\n");
    CHECK(cudaGetLastError() == error);
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(s.a, &status) == cudaSuccess);
    if (error == cudaErrorStreamCaptureUnjoined) {  // cudaStreamEndCapture itself has refused
        CHECK(status == cudaStreamCaptureStatusNone);
    } else {
        CHECK(status == cudaStreamCaptureStatusInvalidated);
        s.launch(s.a);
        CHECK(cudaGetLastError() == cudaErrorStreamCaptureInvalidated);
        CHECK(cudaEventRecord(s.captured, s.a) == cudaErrorStreamCaptureInvalidated);
        CHECK(cudaStreamWaitEvent(s.b, s.captured) == cudaErrorStreamCaptureInvalidated);
        CHECK(s.end(s.a) == cudaErrorStreamCaptureInvalidated);
        s.end(s.b);  // the other capture of the rule for merging
    }
    CHECK(s.graph == nullptr);
    CHECK(cudaStreamSynchronize(s.a) == cudaSuccess);
    CHECK(s.x.host()[0] == 1.0f);  // nothing has run
}

static void allowed(const std::string& name, const Call& call, cudaStreamCaptureMode mode, unsigned flags) {
    INFO(name, ", mode ", int(mode), ", flags ", flags);
    Streams s(mode, flags);
    CHECK(call(s) == cudaSuccess);
    CHECK(s.end(s.a) == cudaSuccess);
    CHECK(s.graph != nullptr);
}

TEST_CASE("a call that breaks a rule of stream captures is refused, and ends the capture") {
    enum When { ALWAYS, UNLESS_RELAXED, IF_BLOCKING };
    constexpr cudaError_t unsupported = cudaErrorStreamCaptureUnsupported, implicit = cudaErrorStreamCaptureImplicit;
    void* memory = nullptr;
    float ms;
    const auto copy = [](Streams& s) { return cudaMemcpy(s.pinned, s.x.data, 4, cudaMemcpyDeviceToHost); };
    const auto merge = [](Streams& s) {
        cudaStreamBeginCapture(s.b, cudaStreamCaptureModeRelaxed);
        return cudaStreamWaitEvent(s.b, s.captured);
    };
    struct Rule {
        When when;
        cudaError_t error;
        std::string name;
        Call call;
    };
    const Rule rules[] = {
        // A captured stream or event has no state, nor has the device.
        {ALWAYS, unsupported, "cudaStreamSynchronize", [](Streams& s) { return cudaStreamSynchronize(s.a); }},
        {ALWAYS, unsupported, "cudaStreamQuery", [](Streams& s) { return cudaStreamQuery(s.a); }},
        {ALWAYS, unsupported, "cudaStreamDestroy", [](Streams& s) { return cudaStreamDestroy(s.a); }},
        {ALWAYS, unsupported, "cudaDeviceSynchronize", [](Streams&) { return cudaDeviceSynchronize(); }},
        {ALWAYS, cudaErrorCapturedEvent, "cudaEventQuery", [](Streams& s) { return cudaEventQuery(s.captured); }},
        {ALWAYS, cudaErrorCapturedEvent, "cudaEventSynchronize",
         [](Streams& s) { return cudaEventSynchronize(s.captured); }},
        {ALWAYS, cudaErrorCapturedEvent, "cudaEventElapsedTime",
         [&](Streams& s) { return cudaEventElapsedTime(&ms, s.earlier, s.captured); }},
        // Calls that may wait for the device.
        {UNLESS_RELAXED, unsupported, "cudaMalloc", [&](Streams&) { return cudaMalloc(&memory, 4); }},
        {UNLESS_RELAXED, unsupported, "cudaFree", [&](Streams&) { return cudaFree(memory); }},
        {UNLESS_RELAXED, unsupported, "cudaMallocHost", [&](Streams&) { return cudaMallocHost(&memory, 4); }},
        {UNLESS_RELAXED, unsupported, "cudaFreeHost", [&](Streams&) { return cudaFreeHost(memory); }},
        {UNLESS_RELAXED, unsupported, "cudaMemcpy", copy},
        {UNLESS_RELAXED, unsupported, "cudaEventQuery", [](Streams& s) { return cudaEventQuery(s.earlier); }},
        {UNLESS_RELAXED, unsupported, "cudaEventSynchronize",
         [](Streams& s) { return cudaEventSynchronize(s.earlier); }},
        {UNLESS_RELAXED, unsupported, "cudaStreamQuery", [](Streams& s) { return cudaStreamQuery(s.b); }},
        {UNLESS_RELAXED, unsupported, "cudaStreamSynchronize", [](Streams& s) { return cudaStreamSynchronize(s.b); }},
        // The null stream waits for blocking streams.
        {IF_BLOCKING, implicit, "cudaMemcpy", copy},
        {IF_BLOCKING, implicit, "cudaMemset", [](Streams& s) { return cudaMemset(s.x.data, 0, 4); }},
        {IF_BLOCKING, implicit, "cudaStreamQuery", [](Streams&) { return cudaStreamQuery(nullptr); }},
        {IF_BLOCKING, implicit, "cudaEventRecord", [](Streams& s) { return cudaEventRecord(s.earlier, nullptr); }},
        {IF_BLOCKING, implicit, "a launch of a kernel",
         [](Streams& s) { return s.launch(nullptr), cudaPeekAtLastError(); }},
        // No dependency crosses the border of a capture.
        {ALWAYS, implicit, "cudaStreamWaitEvent", [](Streams& s) { return cudaStreamWaitEvent(nullptr, s.captured); }},
        {ALWAYS, cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent", merge},
        {ALWAYS, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent",
         [](Streams& s) { return cudaStreamWaitEvent(s.a, s.earlier); }},
        // A capture ends on its first stream, to which the others are joined.
        {ALWAYS, cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture",
         [](Streams& s) { return s.fork(), s.end(s.b); }},
        {ALWAYS, cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture",
         [](Streams& s) { return s.fork(), s.end(s.a); }},
        {ALWAYS, cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture",
         [](Streams& s) { return s.fork(), s.join(), s.launch(s.b), s.end(s.a); }},
    };
    for (const Rule& rule : rules) {
        for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal})
            if (rule.when != IF_BLOCKING) refused(rule.error, rule.name, rule.call, mode, cudaStreamNonBlocking);
        const auto relaxed = cudaStreamCaptureModeRelaxed;
        if (rule.when == IF_BLOCKING) refused(rule.error, rule.name, rule.call, relaxed, 0);
        if (rule.when == ALWAYS) refused(rule.error, rule.name, rule.call, relaxed, cudaStreamNonBlocking);
        if (rule.when != ALWAYS) allowed(rule.name, rule.call, relaxed, cudaStreamNonBlocking);
    }
}

TEST_CASE("a stream that waits for an event of a capture joins it, until the capture ends") {
    Streams s(cudaStreamCaptureModeThreadLocal, 0);
    CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamBeginCapture(s.a, cudaStreamCaptureModeRelaxed) == cudaErrorIllegalState);
    CHECK(s.end(s.b) == cudaErrorIllegalState);
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(nullptr, &status) == cudaErrorStreamCaptureImplicit);
    s.fork();
    CHECK(s.join() == cudaSuccess);
    s.launch(s.a);
    REQUIRE(s.end(s.a) == cudaSuccess);
    cudaGraphExec_t exec;
    cudaGraphInstantiate(&exec, s.graph, 0);
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, s.b) == cudaSuccess);
    CHECK(s.x.host()[0] == 1.0f + 2 * 3);
    cudaGraphExecDestroy(exec);

    errors_of([&] {  // the event is one of the capture until it is recorded again
        CHECK(cudaStreamWaitEvent(s.b, s.captured) == cudaErrorCapturedEvent);
        CHECK(cudaEventQuery(s.captured) == cudaErrorCapturedEvent);
    });
    cudaEventRecord(s.captured, s.b);
    CHECK(cudaStreamWaitEvent(s.a, s.captured) == cudaSuccess);
    CHECK(cudaEventQuery(s.captured) == cudaSuccess);
}

TEST_CASE("a launch returns the error of an earlier call that nobody has cleared") {
    const simt::Config before = simt::config;
    simt::config.deferred_streams = true;
    const Array<float> x(floats(32, [](int) { return 1; })), y(32);
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    for (int i = 0; i < 3; i++) simt::launch(add_kernel, 1, 32, 0, stream, y.data, x.data, 1.0f);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK_THROWS_WITH_AS(simt::launch(add_kernel, 1, 32, 0, stream, y.data, x.data, 1.0f),
                         doctest::Contains("device not ready"), Error);
    cudaStreamDestroy(stream);
    simt::config = before;
}

TEST_CASE("a time is only between events that were recorded and have times") {
    Streams s(cudaStreamCaptureModeThreadLocal, 0);
    CHECK(cudaStreamWaitEvent(s.b, s.captured) == cudaSuccess);  // b joins without work, so it needs not be joined
    CHECK(s.end(s.a) == cudaSuccess);
    float ms = -1.0f;
    cudaEvent_t never;
    cudaEventCreate(&never);
    CHECK(cudaEventElapsedTime(&ms, s.earlier, s.earlier) == cudaSuccess);
    CHECK(ms == 0.0f);
    const std::string report = errors_of([&] {
        CHECK(cudaEventElapsedTime(&ms, s.no_time, s.earlier) == cudaErrorInvalidResourceHandle);
        CHECK(cudaEventElapsedTime(&ms, s.earlier, never) == cudaErrorInvalidResourceHandle);
    });
    CHECK(report ==
          "emulator: cudaEventElapsedTime of an event that was created with cudaEventDisableTiming "
          "(cudaErrorInvalidResourceHandle)\n"
          "emulator: cudaEventElapsedTime of an event that was never recorded (cudaErrorInvalidResourceHandle)\n");
    cudaEventDestroy(never);
}

TEST_CASE("a copy of rows runs in its stream's order, and rows wider than a pitch or too wide a pitch are refused") {
    in_every_order([] {
        cudaStream_t stream;
        cudaStreamCreate(&stream);
        const Array<float> in(floats(32, [](int i) { return i; })), a(32), b(floats(32, [](int) { return -1; }));
        const auto copy = [&](size_t to_pitch, size_t from_pitch, size_t width, size_t height) {
            return cudaMemcpy2DAsync(b.data, to_pitch, a.data, from_pitch, width, height, cudaMemcpyDeviceToDevice,
                                     stream);
        };
        simt::launch(add_kernel, 1, 32, 0, stream, a.data, in.data, 1.0f);
        CHECK(copy(12, 32, 8, 4) == cudaSuccess);
        simt::launch(add_kernel, 1, 32, 0, stream, a.data, in.data, 50.0f);
        CHECK(copy(4, 4, 4, 0) == cudaSuccess);
        CHECK(copy(12, 32, 13, 1) == cudaErrorInvalidPitchValue);
        CHECK(copy(32, 12, 13, 1) == cudaErrorInvalidPitchValue);
        CHECK(copy(size_t(1) << 31, 12, 12, 1) == cudaErrorInvalidPitchValue);
        CHECK(cudaGetLastError() == cudaErrorInvalidPitchValue);
        CHECK(b.host() == floats(32, [](int i) { return i < 11 && i % 3 < 2 ? i / 3 * 8 + i % 3 + 1 : -1; }));
        cudaStreamDestroy(stream);
    });
}
