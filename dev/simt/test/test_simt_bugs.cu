// test_simt_bugs.cu: kernels with a seeded bug. Each must be reported by the builds that can detect it: without
// sanitizers, with AddressSanitizer and UndefinedBehaviorSanitizer, with ThreadSanitizer, or with MemorySanitizer.
#include "cuda/simt.h"

#include <array>
#include <string>
#include <vector>

#include "orders.h"
#include "seeded_bugs.h"

// Some bugs show only in some orders of threads.
static void expect_report(const Expected& expected, const std::function<void()>& bug) {
    std::vector<Environment> runs;
    for (const auto& [order, async, streams] : {std::array{"random:1", "late", "now"},
                                                {"forward", "late", "now"},
                                                {"reverse", "early", "now"},
                                                {"random:2", "early", "deferred"}})
        runs.push_back({{"SIMT_ORDER", order}, {"SIMT_ASYNC", async}, {"SIMT_STREAMS", streams}});
    expect_report(expected, runs, bug);
}

static float anything(int, float got) { return got; }

// Launches kernel(out, args...), where out has 128 floats, out[i] = 1000 + i. Afterwards out[i] must be
// want(i, out[i]).
template <class... P>
static void run(void (*kernel)(float*, P...), int blocks, int threads, int64_t shared_bytes, float (*want)(int, float),
                std::type_identity_t<P>... args) {
    const Array<float> out(floats(128, [](int i) { return 1000 + i; }));
    simt::launch(kernel, blocks, threads, shared_bytes, nullptr, out.data, args...);
    const std::vector<float> got = out.host();
    for (int i = 0; i < 128; i++)
        require(got[i] == want(i, got[i]), format("out[%d] = %g, want %g", i, got[i], want(i, got[i])));
}

// The same for a kernel without other arguments, in one block.
static void expect_report(const Expected& expected, void (*kernel)(float*), int threads, int64_t shared_bytes = 0,
                          float (*want)(int, float) = anything) {
    expect_report(expected, [=] { run(kernel, 1, threads, shared_bytes, want); });
}

__global__ void past_dynamic_shared(float* out) {
    float* s = simt::dynamic_shared<float>();
    s[threadIdx.x + 1] = 1.0f;
    out[threadIdx.x] = 0.0f;
}
__global__ void past_static_shared(float* out) {
    SHARED(s, float[32]);
    float* p = s;
    p[threadIdx.x + 1] = 1.0f;
    out[threadIdx.x] = 0.0f;
}
__global__ void past_global(float* out) { out[threadIdx.x + 1] = 1.0f; }
__global__ void misaligned_load(float* out) { out[0] = load128(out + 1)[0]; }

TEST_CASE("bug: accesses that are out of bounds or misaligned, and launches that no GPU accepts, are reported") {
    expect_report({"out of bounds of its dynamic shared memory", asan, nullptr, nullptr}, past_dynamic_shared, 128,
                  512);
    expect_report({"out of bounds of its shared variable", asan, nullptr, nullptr}, past_static_shared, 32);
    expect_report({"out of bounds of a device array", asan, nullptr, nullptr}, past_global, 128);
    expect_report("misaligned 16-byte load", misaligned_load, 32);
    expect_report("an empty grid or block, or beyond the limits of a GPU", past_global, 1025);
}

TEST_CASE("bug: a kernel without known registers, and a copy of pageable memory in a stream capture, are reported") {
    expect_report("a kernel that dev/cuda_budget.txt does not have", [] {
        simt::start(past_global, 1, 32, 0, simt::StreamAt(nullptr, {"llmc/cuda/new.cuh", 1}), nullptr);
    });
    static float host[16] = {};
    expect_report("a copy of pageable memory during a capture", [] {
        const Array<float> a(16);
        cudaStream_t stream;
        cudaStreamCreate(&stream);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
        cudaMemcpyAsync(a.data, host, sizeof(host), cudaMemcpyHostToDevice, stream);
    });
}

TEST_CASE("bug: device memory used after cudaFree, freed twice, used by the host, never freed or copied wrongly") {
    expect_report({nullptr, asan, nullptr, nullptr}, [] {
        float* p;
        cudaMalloc(&p, 512);
        cudaFree(p);
        simt::launch(add_kernel, 1, 32, 0, nullptr, p, p, 1.0f);
    });
    expect_report("cudaFree of a pointer that is not from cudaMalloc", [] {
        float* p;
        cudaMalloc(&p, 512);
        cudaFree(p), cudaFree(p);
    });
    expect_report({"status 139", asan, "status 139", "status 139"}, [] {
        const Array<float> a(16);
        a.data[3] = 1.0f;
    });
    expect_report("leak of 512 bytes", [] {
        float* p;
        cudaMalloc(&p, 512);
    });
    static float host[16] = {};
    expect_report("copy in the wrong direction", [] {
        const Array<float> a(16);
        cudaMemcpy(a.data, host, sizeof(host), cudaMemcpyDeviceToHost);
    });
    expect_report("an access beyond the end of a device array", [] {
        const Array<float> a(15);
        cudaMemcpy(a.data, host, sizeof(host), cudaMemcpyHostToDevice);
    });
    for (const bool to_end : {false, true})  // b ends in the middle of the last row
        expect_report("an access beyond the end of a device array", [=] {
            const Array<float> a(11), b(10);
            const auto [to, from] = to_end ? std::pair(b.data, a.data) : std::pair(a.data, b.data);
            cudaMemcpy2DAsync(to, 12, from, 12, 8, 4, cudaMemcpyDeviceToDevice);
        });
    expect_report("copy in the wrong direction", [] {
        const Array<float> a(16);
        cudaMemcpy2DAsync(a.data, 8, host, 8, 8, 2, cudaMemcpyDeviceToDevice);
    });
}

__global__ void unwritten_sum(float* out) {
    SHARED(s, float[128]);
    if (threadIdx.x != 5) s[threadIdx.x] = 0.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

TEST_CASE("bug: reads of uninitialised shared and device memory are reported") {
    expect_report({wrong, wrong, wrong, msan}, unwritten_sum, 128, 0, [](int, float) { return 0.0f; });
    expect_report({wrong, wrong, wrong, msan}, [] {
        const Array<float> in(128);
        const auto one = [](int, float) { return 1.0f; };
        run(add_kernel, 1, 128, 0, one, in.data, 1.0f);
    });
}

__global__ void no_barrier(float* out) {
    SHARED(s, float[128]);
    const int t = threadIdx.x;
    s[t] = t;
    out[t] = s[(t + 1) % 128];
}
__global__ void reused_too_early(float* out) {
    SHARED(s, float[1024]);
    const int t = threadIdx.x;
    s[t] = t;
    __syncthreads();
    const float sum = s[(t + 37) % 1024];
    s[t] = 0.0f;
    if (t < 128) out[t] = sum;
}
__global__ void no_syncwarp(float* out) {
    SHARED(s, float[32]);
    const int t = threadIdx.x;
    s[t] = t;
    out[t] = __shfl_sync(FULL_MASK, s[t], 0) + s[31 - t];
}
__global__ void flag_of_all(float* out) {
    SHARED(flag, int);
    flag = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = float(flag);
}
__global__ void blocks_overlap(float* out) { out[threadIdx.x] = blockIdx.x; }

TEST_CASE("bug: missing barriers and atomics are reported") {
    expect_report({wrong, wrong, race, msan, order}, no_barrier, 128, 0,
                  [](int i, float) { return (i + 1.0f) * (i < 127); });
    expect_report({wrong, wrong, race, wrong, order}, reused_too_early, 1024, 0,
                  [](int i, float) { return i + 37.0f; });
    expect_report({nullptr, nullptr, race, nullptr, order}, flag_of_all, 64);
    expect_report({nullptr, nullptr, race, nullptr}, no_syncwarp, 32);
    expect_report({nullptr, nullptr, race, nullptr}, [] { run(blocks_overlap, 2, 128, 0, anything); });
}

__global__ void cp_async_without_wait(float* out, const float* in) {
    float* s = simt::dynamic_shared<float>();
    cp_async_16(s + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
    cp_async_wait<0>();
}
__global__ void cp_async_left_behind(float* out, const float* in) {
    cp_async_16(simt::dynamic_shared<float>() + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    out[threadIdx.x] = 0.0f;
}
// The second tile overwrites the first while it is still read. Without ThreadSanitizer only an early copy shows it.
__global__ void cp_async_too_early(float* out, const float* in) {
    float* s = simt::dynamic_shared<float>() + threadIdx.x * 4;
    cp_async_16(s, in + threadIdx.x * 4);
    cp_async_commit();
    cp_async_wait<0>();
    cp_async_16(s, in + 256 + threadIdx.x * 4);
    cp_async_commit();
    out[threadIdx.x] = s[0];
    cp_async_wait<0>();
}

TEST_CASE("bug: cp.async without a wait, or too early, is reported") {
    const auto report = [](const Expected& expected, auto kernel, float (*want)(int, float)) {
        expect_report(expected, [=] {
            const Array<float> in(floats(512, [](int i) { return i; }));
            run(kernel, 1, 32, 512, want, in.data);
        });
    };
    report({wrong, wrong, race, msan}, cp_async_without_wait, [](int i, float got) { return i < 32 ? i : got; });
    report("cp.async copies that it never waited for", cp_async_left_behind, anything);
    report(wrong, cp_async_too_early, [](int i, float got) { return i < 32 ? 4 * i : got; });
}

__global__ void divergent_barrier(float* out) {
    if (threadIdx.x < 16) __syncthreads();
    out[threadIdx.x] = __shfl_xor_sync(FULL_MASK, 1.0f, 1);
}
__global__ void two_barriers(float* out) {
    if (threadIdx.x < 16) {
        __syncthreads();
        out[0] = 1.0f;
    } else {
        __syncthreads();
    }
}
__global__ void exit_before_barrier(float* out) {
    if (threadIdx.x < 32) return;
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}
__global__ void divergent_shuffle(float* out) {
    const float x = 1.0f;
    out[threadIdx.x] = threadIdx.x < 16 ? __shfl_xor_sync(FULL_MASK, x, 1) : x;
}
__global__ void reads_outside_mask(float* out) {
    const float x = 1.0f;
    out[threadIdx.x] = threadIdx.x < 16 ? __shfl_xor_sync(0xffffu, x, 16) : x;
}

TEST_CASE("bug: divergence at barriers and warp operations is reported") {
    expect_report("deadlock: every live thread waits", divergent_barrier, 32);
    expect_report("threads of one block meet in different __syncthreads", two_barriers, 32);
    expect_report("__syncthreads after a thread of the block has ended", exit_before_barrier, 64);
    expect_report("a thread ends while other threads of its block wait in __syncthreads", exit_before_barrier, 64);
    expect_report("a lane ends while a warp operation waits for it", divergent_shuffle, 32);
    expect_report("the mask names a lane that has ended", divergent_shuffle, 32);
    expect_report("a shuffle reads a lane that does not take part", reads_outside_mask, 32);
}

// Overwrites pinned memory while a copy may still read it.
static void overwrite_pinned() {
    float* host;
    cudaStream_t stream;
    cudaMallocHost(&host, 512);
    cudaStreamCreate(&stream);
    const Array<float> a(floats(128, [](int) { return 5; }));
    for (int i = 0; i < 128; i++) host[i] = 3.0f;
    cudaMemcpyAsync(a.data, host, 512, cudaMemcpyHostToDevice, stream);
    host[7] = 4.0f;
    require(a.host()[7] == 3.0f, "a copy to the device");
    cudaStreamDestroy(stream);
    cudaFreeHost(host);
}

TEST_CASE("bug: a missing event between streams, and pinned memory overwritten before it is copied, are reported") {
    expect_report({wrong, wrong, race, nullptr}, [] { two_streams(false); });
    expect_report({wrong, wrong, race, wrong}, overwrite_pinned);
}
