// test_simt_bugs.cu: kernels with a seeded bug. Each must be reported by the builds that can detect it: without
// sanitizers, with AddressSanitizer and UndefinedBehaviorSanitizer, with ThreadSanitizer, or with MemorySanitizer.
//
// A report ends its process, so each bug runs in a child process, and the test checks its output and exit status.
#include "cuda/simt.h"

#include <doctest/doctest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "gpu/simt_arrays.h"

#if defined(__has_feature)
#define HAS_FEATURE(x) __has_feature(x)
#else
#define HAS_FEATURE(x) 0
#endif
enum Build { PLAIN, ADDRESS, THREAD, MEMORY };
#if defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer)
constexpr Build BUILD = ADDRESS;
#elif defined(__SANITIZE_THREAD__) || HAS_FEATURE(thread_sanitizer)
constexpr Build BUILD = THREAD;
#elif HAS_FEATURE(memory_sanitizer)
constexpr Build BUILD = MEMORY;
#else
constexpr Build BUILD = PLAIN;
#endif

extern "C" const char* __tsan_default_options() { return "halt_on_error=1:atexit_sleep_ms=0:report_bugs=1"; }
extern "C" const char* __ubsan_default_options() { return "halt_on_error=1"; }

struct Ending {
    bool failed;
    std::string output;
};

// Runs the bug with this number in a new process (fork and exec). In a merely forked process, ThreadSanitizer would
// ignore the host's accesses.
static Ending in_child(const simt::Config& config, int bug) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        const char* const names[] = {"forward", "reverse", "random:"};
        const bool random = config.order == simt::Order::random;
        const std::string order = names[int(config.order)] + (random ? std::to_string(config.order_seed) : "");
        setenv("SIMT_ORDER", order.c_str(), 1);
        setenv("SIMT_CP_ASYNC", config.eager_cp_async ? "eager" : "lazy", 1);
        setenv("SIMT_STREAMS", config.deferred_streams ? "deferred" : "now", 1);
        setenv("TEST_SIMT_BUG", std::to_string(bug).c_str(), 1);
        execl("/proc/self/exe", "test_simt_bugs", "--test-case=bug:*", nullptr);
        _exit(127);
    }
    close(ends[1]);
    std::string output;
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) output.append(buffer, size_t(n));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) output += "ended by signal " + std::to_string(WTERMSIG(status)) + "\n";
    return {status != 0, output};
}

// The text that each build must print; null if the build need not detect the bug.
struct Expected {
    const char *plain, *address, *thread, *memory;
};
static const char* const wrong = "wrong result";
static const char* const asan = "ERROR: AddressSanitizer";
static const char* const race = "WARNING: ThreadSanitizer: data race";
static const char* const msan = "WARNING: MemorySanitizer: use-of-uninitialized-value";

// The bug must be reported in at least one of the thread orders; some bugs show only in some orders.
static void expect_report(const Expected& expected, const std::function<void()>& f) {
    static int calls = 0;
    const int bug = calls++;
    if (const char* wanted = getenv("TEST_SIMT_BUG")) {
        if (atoi(wanted) != bug) return;
        signal(SIGABRT, SIG_DFL);  // removes doctest's handler
        if (BUILD != ADDRESS) signal(SIGSEGV, SIG_DFL);
        alarm(60);
        f();
        exit(0);
    }
    const char* const text[] = {expected.plain, expected.address, expected.thread, expected.memory};
    if (!text[BUILD]) return;
    std::string outputs;
    bool reported = false;
    for (const simt::Config& c : orders()) {
        const Ending e = in_child(c, bug);
        outputs += e.output.substr(0, 4000) + (e.failed ? "-- failed\n" : "-- succeeded\n");
        reported = e.failed && e.output.find(text[BUILD]) != std::string::npos;
        if (reported) break;
    }
    const std::string message = "no run printed \"" + std::string(text[BUILD]) + "\", but:\n" + outputs;
    CHECK_MESSAGE(reported, message);
}

// Launches kernel(out, args...), where out has 128 floats, out[i] = 1000 + i. Afterwards out[i] must be
// want(i, out[i]).
template <class... P, class Want>
static void run(void (*kernel)(float*, P...), int blocks, int threads, int64_t shared_bytes, Want want,
                std::type_identity_t<P>... args) {
    const Array<float> out(floats(128, [](int i) { return 1000 + i; }));
    simt::launch(kernel, blocks, threads, shared_bytes, nullptr, out.data, args...);
    const std::vector<float> got = out.host();
    for (int i = 0; i < 128; i++)
        if (!(got[i] == want(i, got[i]))) {
            fprintf(stderr, "wrong result: out[%d] = %g, want %g\n", i, double(got[i]), double(want(i, got[i])));
            exit(3);
        }
}
static float anything(int, float got) { return got; }

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
__global__ void reads_past_global(float* out) { out[threadIdx.x] = out[threadIdx.x + 1]; }

TEST_CASE("bug: accesses out of bounds are reported") {
    expect_report({"out of bounds of its dynamic shared memory", asan, nullptr, nullptr},
                  [] { run(past_dynamic_shared, 1, 128, 512, anything); });
    expect_report({"out of bounds of its shared variable", asan, nullptr, nullptr},
                  [] { run(past_static_shared, 1, 32, 0, anything); });
    expect_report({"out of bounds of a device array", asan, nullptr, nullptr},
                  [] { run(past_global, 1, 128, 0, anything); });
    expect_report({nullptr, asan, nullptr, nullptr}, [] { run(reads_past_global, 1, 128, 0, anything); });
}

TEST_CASE("bug: device memory used after cudaFree, freed twice, used by the host or never freed is reported") {
    expect_report({nullptr, asan, nullptr, nullptr}, [] {
        float* p;
        cudaMalloc(&p, 512);
        cudaFree(p);
        simt::launch(add_kernel, 1, 32, 0, nullptr, p, p, 1.0f);
    });
    const char* const twice = "cudaFree of a pointer that is not from cudaMalloc";
    expect_report({twice, twice, twice, twice}, [] {
        float* p;
        cudaMalloc(&p, 512);
        cudaFree(p), cudaFree(p);
    });
    expect_report({"ended by signal 11", asan, "ended by signal 11", "ended by signal 11"}, [] {
        const Array<float> a(16);
        a.data[3] = 1.0f;
    });
    const char* const leak = "leak of 512 bytes";
    expect_report({leak, leak, leak, leak}, [] {
        float* p;
        cudaMalloc(&p, 512);
    });
    expect_report({"leak of 1 streams", "leak of 1 streams", "leak of 1 streams", "leak of 1 streams"}, [] {
        cudaStream_t s;
        cudaStreamCreate(&s);
    });
}

TEST_CASE("bug: copies in the wrong direction, and copies that are too long, are reported") {
    const char* const direction = "copy in the wrong direction";
    expect_report({direction, direction, direction, direction}, [] {
        const Array<float> a(16);
        float host[16] = {};
        cudaMemcpy(a.data, host, sizeof(host), cudaMemcpyDeviceToHost);
    });
    const char* const beyond = "an access beyond the end of a device array";
    expect_report({beyond, beyond, beyond, beyond}, [] {
        const Array<float> a(15);
        float host[16] = {};
        cudaMemcpy(a.data, host, sizeof(host), cudaMemcpyHostToDevice);
    });
}

__global__ void misaligned_load(float* out) { out[0] = load128(out + 1)[0]; }
__global__ void misaligned_store(float* out) { store128(out + 2, Vec<float>{}); }
__global__ void misaligned_half(float* out) { store64(out + 1, Vec<float, 2>{}); }
__global__ void misaligned_raw(float* out) { out[0] = reinterpret_cast<float4*>(out + 1)->x; }
__global__ void misaligned_ldmatrix(float* out) {
    bf16* s = simt::dynamic_shared<bf16>();
    uint32_t r[4];
    store128(s + threadIdx.x * 8, Vec<bf16>{});
    __syncwarp();
    ldmatrix_x4(r, s + threadIdx.x);
    out[threadIdx.x] = float(r[0]);
}
__global__ void ldmatrix_of_global(float* out) {
    uint32_t r[4];
    ldmatrix_x4(r, out);
    out[threadIdx.x] = float(r[0]);
}
__global__ void index_overflow(float* out, int n) { out[threadIdx.x] = (n + int(threadIdx.x)) * 65536; }

TEST_CASE("bug: misaligned accesses, and an index that overflows, are reported") {
    const char* const load = "misaligned 16-byte load";
    expect_report({load, load, load, load}, [] { run(misaligned_load, 1, 32, 0, anything); });
    const char* const store = "misaligned 16-byte store";
    expect_report({store, store, store, store}, [] { run(misaligned_store, 1, 32, 0, anything); });
    const char* const half = "misaligned 8-byte store";
    expect_report({half, half, half, half}, [] { run(misaligned_half, 1, 32, 0, anything); });
    expect_report({nullptr, "misaligned address", nullptr, nullptr}, [] { run(misaligned_raw, 1, 32, 0, anything); });
    const char* const row = "ldmatrix: a row is not 16-byte aligned";
    expect_report({row, row, row, row}, [] { run(misaligned_ldmatrix, 1, 32, 512, anything); });
    const char* const place = "ldmatrix: a row is not in shared memory";
    expect_report({place, place, place, place}, [] { run(ldmatrix_of_global, 1, 32, 0, anything); });
    expect_report({nullptr, "signed integer overflow", nullptr, nullptr},
                  [] { run(index_overflow, 1, 32, 0, anything, 40000); });
}

__global__ void unwritten_sum(float* out) {
    SHARED(s, float[128]);
    if (threadIdx.x != 5) s[threadIdx.x] = 0.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
__global__ void unwritten_comparison(float* out) {  // NaN > 0 is false, so the result is right by chance
    SHARED(s, float[128]);
    if (threadIdx.x != 5) s[threadIdx.x] = 0.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x] > 0.0f ? 1.0f : 0.0f;
}

__global__ void unwritten_maximum(float* out) {  // a maximum ignores NaN
    SHARED(s, float[128]);
    if (threadIdx.x != 5) s[threadIdx.x] = 0.0f;
    __syncthreads();
    out[threadIdx.x] = warp_max(s[threadIdx.x]);
}
__global__ void unwritten_variable(float* out) {
    float x[2];
    x[threadIdx.x == 5] = 0.0f;
    out[threadIdx.x] = x[0] > 0.0f ? 1.0f : 0.0f;
}

TEST_CASE("bug: reads of uninitialised shared memory, local variables and device memory are reported") {
    expect_report({nullptr, nullptr, nullptr, msan}, [] { run(unwritten_maximum, 1, 128, 0, anything); });
    expect_report({nullptr, nullptr, nullptr, msan}, [] { run(unwritten_variable, 1, 128, 0, anything); });
    expect_report({wrong, wrong, wrong, msan}, [] { run(unwritten_sum, 1, 128, 0, [](int, float) { return 0.0f; }); });
    expect_report({nullptr, nullptr, nullptr, msan}, [] { run(unwritten_comparison, 1, 128, 0, anything); });
    expect_report({wrong, wrong, wrong, msan}, [] {
        const Array<float> in(128);
        run(
            add_kernel, 1, 128, 0, [](int, float) { return 1.0f; }, in.data, 1.0f);
    });
}

__global__ void no_barrier_reads_below(float* out) {
    SHARED(s, float[128]);
    const int t = threadIdx.x;
    s[t] = t;
    out[t] = t ? s[t - 1] : -1.0f;
}
__global__ void no_barrier_reads_above(float* out) {
    SHARED(s, float[128]);
    const int t = threadIdx.x;
    s[t] = t;
    out[t] = s[(t + 1) % 128];
}
__global__ void reused_too_early(float* out) {
    SHARED(s, float[128]);
    const int t = threadIdx.x;
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        s[t] = t + i;
        __syncthreads();
        sum += s[(t + 37) % 128];
    }
    out[t] = sum;
}
__global__ void no_syncwarp(float* out) {
    SHARED(s, float[32]);
    const int t = threadIdx.x;
    s[t] = t;
    out[t] = __shfl_sync(FULL_MASK, s[t], 0) + s[31 - t];
}
__global__ void target_overwritten(float* out) {
    const float target = threadIdx.x == 100 ? out[0] : 0.0f;
    out[threadIdx.x] = 1.0f;
    if (target != 0.0f) out[100] = target;
}
__global__ void blocks_overlap(float* out) { out[threadIdx.x] = blockIdx.x; }
__global__ void plain_increment(float* out) { out[0] += 1.0f; }
__global__ void no_threadfence(float* out, float* partial, unsigned* counter) {
    SHARED(is_last, bool);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = 1.0f;
        is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last && threadIdx.x < gridDim.x) out[threadIdx.x] = partial[threadIdx.x];
}
__global__ void large_reused_too_early(float* out) {
    SHARED(s, float[1024]);
    const int t = threadIdx.x;
    s[t] = t;
    __syncthreads();
    const float sum = s[(t + 37) % 1024];
    s[t] = 0.0f;
    if (t < 128) out[t] = sum;
}

TEST_CASE("bug: missing barriers, fences and atomics are reported") {
    expect_report({wrong, wrong, race, nullptr},
                  [] { run(no_barrier_reads_below, 1, 128, 0, [](int i, float) { return i - 1.0f; }); });
    expect_report({wrong, wrong, race, msan},
                  [] { run(no_barrier_reads_above, 1, 128, 0, [](int i, float) { return (i + 1.0f) * (i < 127); }); });
    expect_report({wrong, wrong, race, wrong}, [] {
        run(reused_too_early, 1, 128, 0, [](int i, float) { return 4.0f * ((i + 37) % 128) + 6.0f; });
    });
    expect_report({nullptr, nullptr, race, nullptr}, [] { run(no_syncwarp, 1, 32, 0, anything); });
    expect_report({wrong, wrong, race, wrong},
                  [] { run(target_overwritten, 1, 128, 0, [](int i, float) { return i == 100 ? 1000.0f : 1.0f; }); });
    expect_report({nullptr, nullptr, race, nullptr}, [] { run(blocks_overlap, 2, 128, 0, anything); });
    expect_report({nullptr, nullptr, race, nullptr}, [] { run(plain_increment, 4, 32, 0, anything); });
    expect_report({nullptr, nullptr, race, nullptr}, [] {
        const Array<float> partial(8);
        const Array<unsigned> counter(std::vector<unsigned>{0});
        run(no_threadfence, 8, 32, 0, anything, partial.data, counter.data);
    });
    expect_report({wrong, wrong, race, wrong},
                  [] { run(large_reused_too_early, 1, 1024, 0, [](int i, float) { return i + 37.0f; }); });
}

__global__ void cp_async_without_wait(float* out, const float* in) {
    float* s = simt::dynamic_shared<float>();
    cp_async_16(s + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
    cp_async_wait<0>();
}
__global__ void cp_async_without_barrier(float* out, const float* in) {
    float* s = simt::dynamic_shared<float>();
    cp_async_16(s + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = s[threadIdx.x];
}
__global__ void cp_async_left_behind(float* out, const float* in) {
    cp_async_16(simt::dynamic_shared<float>() + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    out[threadIdx.x] = 0.0f;
}
// The second tile overwrites the first while it is still read. Without ThreadSanitizer only an eager copy shows it.
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

TEST_CASE("bug: cp.async without a wait or a barrier, or too early, is reported") {
    const auto with_input = [](void (*kernel)(float*, const float*), float (*want)(int, float)) {
        return [=] {
            const Array<float> in(floats(512, [](int i) { return i; }));
            run(kernel, 1, 32, 512, want, in.data);
        };
    };
    const auto same = [](int i, float) { return i < 32 ? float(i) : 1000.0f + float(i); };
    const auto first = [](int i, float) { return i < 32 ? 4.0f * float(i) : 1000.0f + float(i); };
    expect_report({wrong, wrong, race, msan}, with_input(cp_async_without_wait, same));
    expect_report({wrong, wrong, race, nullptr}, with_input(cp_async_without_barrier, same));
    const char* const left = "cp.async copies that it never waited for";
    expect_report({left, left, left, left}, with_input(cp_async_left_behind, anything));
    expect_report({wrong, wrong, wrong, wrong}, with_input(cp_async_too_early, first));
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
    float x = 1.0f;
    if (threadIdx.x < 16) x = __shfl_xor_sync(FULL_MASK, x, 1);
    out[threadIdx.x] = x;
}
__global__ void two_shuffles(float* out) {
    float x = 1.0f;
    if (threadIdx.x < 16)
        x = __shfl_xor_sync(FULL_MASK, x, 1);
    else
        x += __shfl_xor_sync(FULL_MASK, x, 1);
    out[threadIdx.x] = x;
}
__global__ void not_in_mask(float* out) {
    float x = 1.0f;
    if (threadIdx.x >= 16) x = __shfl_xor_sync(0xffffu, x, 1);
    out[threadIdx.x] = x;
}
__global__ void reads_outside_mask(float* out) {
    float x = 1.0f;
    if (threadIdx.x < 16) x = __shfl_xor_sync(0xffffu, x, 16);
    out[threadIdx.x] = x;
}
__global__ void full_mask_of_half_warp(float* out) { out[threadIdx.x] = warp_sum(1.0f); }

TEST_CASE("bug: divergence at barriers and warp operations is reported") {
    const auto everywhere = [](const char* text, void (*kernel)(float*), int threads) {
        expect_report({text, text, text, text}, [=] { run(kernel, 1, threads, 0, anything); });
    };
    everywhere("deadlock: every live thread waits", divergent_barrier, 32);
    everywhere("threads of one block meet in different __syncthreads", two_barriers, 32);
    everywhere("__syncthreads after a thread of the block has ended", exit_before_barrier, 64);
    everywhere("a thread ends while other threads of its block wait in __syncthreads", exit_before_barrier, 64);
    everywhere("a lane ends while a warp operation waits for it", divergent_shuffle, 32);
    everywhere("the mask names a lane that has ended", divergent_shuffle, 32);
    everywhere("lanes of one mask meet in different warp operations", two_shuffles, 32);
    everywhere("the calling lane is not in its own mask", not_in_mask, 32);
    everywhere("a shuffle reads a lane that does not take part", reads_outside_mask, 32);
    everywhere("the mask names a lane that has ended or does not exist", full_mask_of_half_warp, 48);
}

// Passing the frame's address down keeps the compiler from turning the recursion into a loop.
__attribute__((noinline)) static int recurse(int n, volatile char* above) {
    volatile char frame[1000];
    frame[0] = above ? char(above[0] + 1) : char(0);
    return (n ? recurse(n - 1, frame) : 0) + frame[0];
}
__global__ void deep_recursion(float* out) { out[threadIdx.x] = recurse(1000, nullptr); }

TEST_CASE("bug: a stack overflow, and launches that no GPU accepts, are reported") {
    expect_report({"ended by signal 11", asan, nullptr, nullptr}, [] { run(deep_recursion, 1, 32, 0, anything); });
    const char* const launch = "a launch with an empty grid or block, or beyond the limits of a GPU";
    expect_report({launch, launch, launch, launch}, [] { run(past_global, 1, 1025, 0, anything); });
    expect_report({launch, launch, launch, launch}, [] { run(past_global, 0, 32, 0, anything); });
    expect_report({launch, launch, launch, launch}, [] { run(past_global, 1, 32, 228 << 10, anything); });
}

__global__ void static_and_dynamic(float* out) {
    SHARED(x, float[64]);
    x[threadIdx.x] = 1.0f;
    out[threadIdx.x] = x[threadIdx.x];
}

TEST_CASE("bug: static and dynamic shared memory above 48 KiB needs cudaFuncSetAttribute") {
    const auto start = [](int64_t bytes, int opt_in) {
        const Array<float> out(floats(32, [](int) { return 0; }));
        if (opt_in) cudaFuncSetAttribute(static_and_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in);
        simt::start(static_and_dynamic, 1, 32, bytes, nullptr, out.data);
        cudaDeviceSynchronize();
    };
    const char* const limit = "static and dynamic shared memory above 48 KiB, without cudaFuncSetAttribute";
    const char* const block = "more than 227 KiB of static and dynamic shared memory in a block";
    expect_report({limit, limit, limit, limit}, [=] { start(49000, 0); });
    expect_report({block, block, block, block}, [=] { start(227 << 10, 227 << 10); });
    start(49152 - 256, 0);
    start(49000, 49000);
}

TEST_CASE("bug: a missing event between streams, and host accesses before a copy has run, are reported") {
    expect_report({wrong, wrong, race, nullptr}, [] { two_streams(false); });

    const auto pinned = [](const std::function<void(float* host, const Array<float>&, cudaStream_t)>& f) {
        return [=] {
            float* host;
            cudaStream_t stream;
            cudaMallocHost(&host, 512);
            cudaStreamCreate(&stream);
            const Array<float> a(floats(128, [](int) { return 5; }));
            for (int i = 0; i < 128; i++) host[i] = 3.0f;
            f(host, a, stream);
            cudaStreamDestroy(stream);
            cudaFreeHost(host);
        };
    };
    const auto require = [](bool right) {
        if (right) return;
        fprintf(stderr, "wrong result\n");
        exit(3);
    };
    expect_report({wrong, wrong, race, wrong}, pinned([=](float* host, const Array<float>& a, cudaStream_t stream) {
                      cudaMemcpyAsync(a.data, host, 512, cudaMemcpyHostToDevice, stream);
                      host[7] = 4.0f;  // before the copy has run
                      require(a.host()[7] == 3.0f);
                  }));
    expect_report({wrong, wrong, race, wrong}, pinned([=](float* host, const Array<float>& a, cudaStream_t stream) {
                      cudaMemcpyAsync(host, a.data, 512, cudaMemcpyDeviceToHost, stream);
                      require(host[7] == 5.0f);  // without cudaStreamSynchronize
                  }));
}
