// test_simt.cu: the emulator itself. Correct kernels give the right numbers in every order of threads and say nothing;
// kernels with a seeded bug are reported by the build that is meant to see it: plain, under AddressSanitizer and
// UndefinedBehaviorSanitizer, under ThreadSanitizer, or under MemorySanitizer.
//
// A bug ends its process, so each runs in a child, whose output and exit status are what is looked at.
#include "../../llmc/cuda/simt.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <csignal>
#include <doctest/doctest.h>

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

// Arrays of the device, with copies that wait.
template <class T>
struct Array {
    T* data = nullptr;
    size_t size;
    explicit Array(size_t size) : size(size) { cudaMalloc(&data, size * sizeof(T)); }
    explicit Array(const std::vector<T>& values) : Array(values.size()) {
        cudaMemcpy(data, values.data(), size * sizeof(T), cudaMemcpyHostToDevice);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { cudaFree(data); }
    std::vector<T> host() const {
        std::vector<T> values(size);
        cudaDeviceSynchronize();
        cudaMemcpy(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
        return values;
    }
};

template <class F>
static std::vector<float> floats(int n, F f) {
    std::vector<float> values;
    for (int i = 0; i < n; i++) values.push_back(float(f(i)));
    return values;
}

static std::vector<simt::Config> orders() {
    return {{.order = simt::Order::random, .order_seed = 1},
            {.order = simt::Order::forward},
            {.order = simt::Order::reverse, .eager_cp_async = true},
            {.order = simt::Order::random, .order_seed = 2, .eager_cp_async = true, .deferred_streams = true}};
}

template <class F>
static void in_every_order(F f) {
    const simt::Config before = simt::config;
    for (const simt::Config& c : orders()) {
        CAPTURE(int(c.order));
        simt::config = c;
        f();
    }
    simt::config = before;
}

// Correct kernels.

__global__ void indices_kernel(int* out) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * threads + thread;
}

TEST_CASE("every thread of every block runs once") {
    in_every_order([] {
        Array<int> out(2 * 3 * 4 * 64);
        simt::launch(indices_kernel, dim3(2, 3, 4), dim3(8, 4, 2), 0, nullptr, out.data);
        const std::vector<int> got = out.host();
        for (int i = 0; i < int(got.size()); i++) REQUIRE(got[i] == i);
    });
}

__global__ void sums_kernel(float* out, const float* in) {
    const float x = in[threadIdx.x];
    float* o = out + threadIdx.x * 4;
    o[0] = warp_sum(x), o[1] = warp_max(x), o[2] = block_sum(x), o[3] = block_max(x);
    o[2] += block_sum(1.0f) - blockDim.x;  // its shared memory is used again
}

TEST_CASE("sums and maxima of warps and blocks") {
    in_every_order([] {
        for (const int threads : {32, 64, 256, 1024}) {
            CAPTURE(threads);
            const Array<float> in(floats(threads, [](int i) { return i % 7 - 100; }));
            const Array<float> out(4 * threads);
            simt::launch(sums_kernel, 1, threads, 0, nullptr, out.data, in.data);
            const std::vector<float> got = out.host(), x = in.host();
            float all = 0.0f;
            for (const float v : x) all += v;  // whole numbers: exact in every order
            for (int t = 0; t < threads; t++) {
                float sum = 0.0f, most = -1e9f;
                for (int k = t / 32 * 32; k < t / 32 * 32 + 32; k++) sum += x[k], most = std::fmax(most, x[k]);
                REQUIRE(got[t * 4] == sum);
                REQUIRE(got[t * 4 + 1] == most);
                REQUIRE(got[t * 4 + 2] == all);
                REQUIRE(got[t * 4 + 3] == -94.0f);
            }
        }
    });
}

__global__ void exchange_kernel(int* out) {
    const int t = threadIdx.x;
    int* o = out + t * 12;
    o[0] = __shfl_sync(FULL_MASK, t, 5);
    o[1] = __shfl_sync(FULL_MASK, t, 3, 8);
    o[2] = __shfl_xor_sync(FULL_MASK, t, 6);
    o[3] = __shfl_up_sync(FULL_MASK, t, 3);
    o[4] = __shfl_down_sync(FULL_MASK, t, 3, 16);
    o[5] = __ballot_sync(FULL_MASK, t % 3 == 0);
    o[6] = __any_sync(FULL_MASK, t == 9) + 2 * __any_sync(FULL_MASK, t == 99);
    o[7] = __all_sync(FULL_MASK, t >= 0) + 2 * __all_sync(FULL_MASK, t != 9);
    o[8] = __match_any_sync(FULL_MASK, t % 4);
    const unsigned odd = __ballot_sync(FULL_MASK, t % 2);
    o[9] = t % 2 ? __shfl_sync(odd, t, 7) : -1;  // part of a warp
    o[10] = __syncthreads_count(t < 10);
    o[11] = __syncthreads_or(t == 40) + 2 * __syncthreads_and(t != 40);
}

TEST_CASE("shuffles, votes and matches") {
    in_every_order([] {
        const Array<int> out(64 * 12);
        simt::launch(exchange_kernel, 1, 64, 0, nullptr, out.data);
        const std::vector<int> got = out.host();
        for (int t = 0; t < 64; t++) {
            CAPTURE(t);
            const int lane = t % 32, base = t - lane;
            unsigned thirds = 0;
            for (int k = 0; k < 32; k++) thirds |= unsigned((base + k) % 3 == 0) << k;
            const int want[12] = {base + 5,
                                  base + lane / 8 * 8 + 3,
                                  t ^ 6,
                                  lane < 3 ? t : t - 3,
                                  lane % 16 > 12 ? t : t + 3,
                                  int(thirds),
                                  base == 0 ? 1 : 0,
                                  base == 0 ? 1 : 3,
                                  int(0x11111111u << (t % 4)),
                                  t % 2 ? base + 7 : -1,
                                  10,
                                  1};
            for (int i = 0; i < 12; i++) {
                CAPTURE(i);
                REQUIRE(got[t * 12 + i] == want[i]);
            }
        }
    });
}

// C (16, 16) = A (16, 16) * B (16, 16), row-major. DIRECT: fragments by the layout that simt.h states, else by
// ldmatrix.
template <bool DIRECT>
__global__ void product_kernel(float* C, const bf16* A, const bf16* B) {
    constexpr int stride = 24;       // 48 bytes: rows stay aligned and fall into other banks
    SHARED(tile, Vec<bf16>[16][3]);  // an array of bf16 would be aligned to 2 bytes only
    bf16* a = tile[0][0].values;
    bf16* b = simt::dynamic_shared<bf16>();
    const int lane = threadIdx.x;
    for (int i = lane; i < 32; i += WARP_SIZE) {
        store128(a + i / 2 * stride + i % 2 * 8, load128(A + i * 8));
        store128(b + i / 2 * stride + i % 2 * 8, load128cs(B + i * 8));
    }
    __syncwarp();

    uint32_t fa[4], fb[4];
    const int g = lane / 4, t = lane % 4 * 2;
    if (DIRECT) {
        const auto pair = [](bf16 low, bf16 high) { return uint32_t(low.bits) | uint32_t(high.bits) << 16; };
        const auto from_a = [&](int row, int k) { return pair(a[row * stride + k], a[row * stride + k + 1]); };
        const auto from_b = [&](int k, int col) { return pair(b[k * stride + col], b[(k + 1) * stride + col]); };
        fa[0] = from_a(g, t), fa[1] = from_a(g + 8, t), fa[2] = from_a(g, t + 8), fa[3] = from_a(g + 8, t + 8);
        fb[0] = from_b(t, g), fb[1] = from_b(t + 8, g), fb[2] = from_b(t, g + 8), fb[3] = from_b(t + 8, g + 8);
    } else {
        ldmatrix_x4(fa, a + lane % 16 * stride + lane / 16 * 8);
        ldmatrix_x4_trans(fb, b + lane % 16 * stride + lane / 16 * 8);
    }

    for (int half = 0; half < 2; half++) {
        float acc[4] = {100.0f, 100.0f, 100.0f, 100.0f};
        mma_m16n8k16(acc, fa, {fb[2 * half], fb[2 * half + 1]});
        for (int i = 0; i < 4; i++) C[(g + i / 2 * 8) * 16 + half * 8 + t + i % 2] = acc[i] - 100.0f;
    }
}

TEST_CASE("mma and ldmatrix against a plain product") {
    std::vector<bf16> A, B;
    for (int i = 0; i < 256; i++) A.push_back(bf16(float(i * 7 % 19 - 9))), B.push_back(bf16(float(i * 5 % 23 - 11)));
    in_every_order([&] {
        for (const bool direct : {false, true}) {
            CAPTURE(direct);
            const Array<bf16> a(A), b(B);
            const Array<float> out(256);
            simt::launch(direct ? product_kernel<true> : product_kernel<false>, 1, 32, 16 * 24 * 2, nullptr, out.data,
                         a.data, b.data);
            const std::vector<float> got = out.host();
            for (int i = 0; i < 256; i++) {
                float want = 0.0f;
                for (int k = 0; k < 16; k++) want += float(A[i / 16 * 16 + k]) * float(B[k * 16 + i % 16]);
                REQUIRE(got[i] == want);
            }
        }
    });
}

// Copies tiles through two buffers, the next one on its way while this one is read, by another thread than fetched it.
__global__ void double_buffer_kernel(float* out, const float* in, int tiles) {
    SHARED(buffer, Vec<float>[2][64]);
    const int t = threadIdx.x;
    cp_async_16(&buffer[0][t], in + t * 4);
    cp_async_commit();
    for (int i = 0; i < tiles; i++) {
        if (i + 1 < tiles) cp_async_16(&buffer[(i + 1) % 2][t], in + ((i + 1) * 64 + t) * 4);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        store128cs(out + (i * 64 + t) * 4, buffer[i % 2][63 - t]);
        __syncthreads();
    }
}

TEST_CASE("cp.async through two buffers") {
    in_every_order([] {
        const Array<float> in(floats(64 * 4 * 5, [](int i) { return i; })), out(in.size);
        simt::launch(double_buffer_kernel, 1, 64, 0, nullptr, out.data, in.data, 5);
        const std::vector<float> got = out.host();
        for (int i = 0; i < int(got.size()); i++) REQUIRE(got[i] == i / 256 * 256 + (63 - i / 4 % 64) * 4 + i % 4);
    });
}

__global__ void atomics_kernel(float* sum, int* most, unsigned* words, float* partial, float* total) {
    SHARED(is_last, bool);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, 1.0f);
    atomicMax(most, i);
    atomicMin(most + 1, -i);
    atomicCAS(words, 0u, 7u);
    if (threadIdx.x == 0) {  // the last block adds up what all blocks wrote
        partial[blockIdx.x] = blockIdx.x;
        __threadfence();
        is_last = atomicInc(words + 1, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last && threadIdx.x == 0) {
        __threadfence();
        float x = 0.0f;
        for (unsigned k = 0; k < gridDim.x; k++) x += partial[k];
        *total = x;
    }
}

TEST_CASE("atomics, and a last block that sees what the others wrote") {
    in_every_order([] {
        const Array<float> sum(floats(1, [](int) { return 0; })), partial(8), total(1);
        const Array<int> most(std::vector<int>{0, 0});
        const Array<unsigned> words(std::vector<unsigned>{0, 0});
        simt::launch(atomics_kernel, 8, 64, 0, nullptr, sum.data, most.data, words.data, partial.data, total.data);
        CHECK(sum.host()[0] == 512.0f);
        CHECK(most.host() == std::vector<int>{511, -511});
        CHECK(words.host() == std::vector<unsigned>{7, 0});
        CHECK(total.host()[0] == 28.0f);
    });
}

__global__ void add_kernel(float* out, const float* in, float x) { out[threadIdx.x] = in[threadIdx.x] + x; }

// in -> a on one stream, a -> b on another, as an event orders them; wait: whether it does.
static void two_streams(bool wait) {
    cudaStream_t first, second;
    cudaEvent_t event;
    cudaStreamCreate(&first), cudaStreamCreate(&second), cudaEventCreate(&event);
    float* host;
    cudaMallocHost(&host, 64 * sizeof(float));
    for (int i = 0; i < 64; i++) host[i] = i;
    {
        const Array<float> in(64), a(64), b(64);
        for (int round = 0; round < 3; round++) {
            cudaMemcpyAsync(in.data, host, 64 * sizeof(float), cudaMemcpyHostToDevice, first);
            simt::launch(add_kernel, 1, 64, 0, first, a.data, in.data, 1.0f);
            cudaEventRecord(event, first);
            if (wait) cudaStreamWaitEvent(second, event);
            simt::launch(add_kernel, 1, 64, 0, second, b.data, a.data, 1.0f);
            cudaEventRecord(event, second);
            cudaStreamWaitEvent(first, event);
            cudaMemcpyAsync(host, b.data, 64 * sizeof(float), cudaMemcpyDeviceToHost, first);
        }
        cudaStreamSynchronize(first);
    }
    for (int i = 0; i < 64; i++)
        if (host[i] != i + 6) {
            fprintf(stderr, "wrong result\n");
            exit(3);
        }
    cudaFreeHost(host);
    cudaStreamDestroy(first), cudaStreamDestroy(second), cudaEventDestroy(event);
}

TEST_CASE("streams run in order, and events order them") {
    in_every_order([] { two_streams(true); });
    const simt::Config before = simt::config;
    for (uint64_t seed = 0; seed < 8; seed++) {
        simt::config = {.deferred_streams = true, .stream_seed = seed};
        two_streams(true);
    }
    simt::config = before;
}

TEST_CASE("errors of the runtime have names, and the last one is kept") {
    void* p;
    CHECK(cudaMalloc(&p, size_t(1) << 60) == cudaErrorMemoryAllocation);
    CHECK(std::string(cudaGetErrorString(cudaGetLastError())) == "out of memory");
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
    CHECK(std::string(cudaGetErrorName(cudaGetLastError())) == "cudaErrorInvalidDevice");
}

// Seeded bugs.

struct Ending {
    bool failed;
    std::string output;
};

// Runs the bug with this number in a new process: in a forked one ThreadSanitizer would ignore what the host does.
static Ending in_child(const simt::Config& config, int bug) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(ends[1], 1), dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        const char* const names[] = {"forward", "reverse", "random:"};
        const bool random = config.order == simt::Order::random;
        const std::string order = names[int(config.order)] + (random ? std::to_string(config.order_seed) : "");
        setenv("SIMT_ORDER", order.c_str(), 1);
        setenv("SIMT_CP_ASYNC", config.eager_cp_async ? "eager" : "lazy", 1);
        setenv("SIMT_STREAMS", config.deferred_streams ? "deferred" : "now", 1);
        setenv("TEST_SIMT_BUG", std::to_string(bug).c_str(), 1);
        execl("/proc/self/exe", "test_simt", "--test-case=bug:*", nullptr);
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

// What each build is meant to say; null where it need not see the bug.
struct Expected {
    const char *plain, *address, *thread, *memory;
};
static const char* const wrong = "wrong result";
static const char* const asan = "ERROR: AddressSanitizer";
static const char* const race = "WARNING: ThreadSanitizer: data race";
static const char* const msan = "WARNING: MemorySanitizer: use-of-uninitialized-value";

// In one of the orders at least: some bugs show in some orders only.
static void expect_report(const Expected& expected, const std::function<void()>& f) {
    static int calls = 0;
    const int bug = calls++;
    if (const char* wanted = getenv("TEST_SIMT_BUG")) {
        if (atoi(wanted) != bug) return;
        signal(SIGABRT, SIG_DFL);  // instead of doctest's handlers
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
    const std::string message = "never said \"" + std::string(text[BUILD]) + "\", but:\n" + outputs;
    CHECK_MESSAGE(reported, message);
}

// One block of a kernel(out, args...), where out has 128 floats 1000 + i, and what out has to be then.
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

TEST_CASE("bug: accesses out of bounds") {
    expect_report({"around its dynamic shared memory", asan, nullptr, nullptr},
                  [] { run(past_dynamic_shared, 1, 128, 512, anything); });
    expect_report({"around its shared variable", asan, nullptr, nullptr},
                  [] { run(past_static_shared, 1, 32, 0, anything); });
    expect_report({"around a device array", asan, nullptr, nullptr}, [] { run(past_global, 1, 128, 0, anything); });
    expect_report({nullptr, asan, nullptr, nullptr}, [] { run(reads_past_global, 1, 128, 0, anything); });
}

TEST_CASE("bug: device memory after cudaFree, twice, from the host, and never freed") {
    expect_report({nullptr, asan, nullptr, nullptr}, [] {
        float* p;
        cudaMalloc(&p, 512);
        cudaFree(p);
        simt::launch(add_kernel, 1, 32, 0, nullptr, p, p, 1.0f);
    });
    const char* const twice = "cudaFree of what cudaMalloc did not give";
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

TEST_CASE("bug: copies in the wrong direction and too long") {
    const char* const direction = "copy in the wrong direction";
    expect_report({direction, direction, direction, direction}, [] {
        const Array<float> a(16);
        float host[16] = {};
        cudaMemcpy(a.data, host, sizeof(host), cudaMemcpyDeviceToHost);
    });
    const char* const leaves = "a copy leaves its device array";
    expect_report({leaves, leaves, leaves, leaves}, [] {
        const Array<float> a(15);
        float host[16] = {};
        cudaMemcpy(a.data, host, sizeof(host), cudaMemcpyHostToDevice);
    });
}

__global__ void misaligned_load(float* out) { out[0] = load128(out + 1)[0]; }
__global__ void misaligned_store(float* out) { store128(out + 2, Vec<float>{}); }
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

TEST_CASE("bug: misaligned accesses, and an index that overflows") {
    const char* const load = "misaligned 16-byte load";
    expect_report({load, load, load, load}, [] { run(misaligned_load, 1, 32, 0, anything); });
    const char* const store = "misaligned 16-byte store";
    expect_report({store, store, store, store}, [] { run(misaligned_store, 1, 32, 0, anything); });
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
__global__ void unwritten_comparison(float* out) {  // NaN > 0 is false: the result is right by luck
    SHARED(s, float[128]);
    if (threadIdx.x != 5) s[threadIdx.x] = 0.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x] > 0.0f ? 1.0f : 0.0f;
}

__global__ void unwritten_maximum(float* out) {  // a maximum drops NaN
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

TEST_CASE("bug: memory that nobody wrote: shared, of a thread, of the device") {
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

TEST_CASE("bug: missing barriers, fences and atomics") {
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
// The second tile lands on the first while that is still read: only an eager copy shows it without ThreadSanitizer.
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

TEST_CASE("bug: cp.async without a wait or a barrier, or too early") {
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

TEST_CASE("bug: divergence") {
    const auto everywhere = [](const char* text, void (*kernel)(float*), int threads) {
        expect_report({text, text, text, text}, [=] { run(kernel, 1, threads, 0, anything); });
    };
    everywhere("deadlock: every thread that lives waits", divergent_barrier, 32);
    everywhere("threads of one block meet in different __syncthreads", two_barriers, 32);
    everywhere("__syncthreads after a thread of the block has ended", exit_before_barrier, 64);
    everywhere("a thread ends while others of its block wait in __syncthreads", exit_before_barrier, 64);
    everywhere("a lane ends that a warp operation waits for", divergent_shuffle, 32);
    everywhere("the mask names a lane that has ended", divergent_shuffle, 32);
    everywhere("lanes of one mask meet in different warp operations", two_shuffles, 32);
    everywhere("the calling lane is not in its own mask", not_in_mask, 32);
    everywhere("a shuffle reads a lane that does not take part", reads_outside_mask, 32);
    everywhere("the mask names a lane that has ended or does not exist", full_mask_of_half_warp, 48);
}

// The frame's address goes down with the call, so that no compiler turns the recursion into a loop.
__attribute__((noinline)) static int recurse(int n, volatile char* above) {
    volatile char frame[1000];
    frame[0] = above ? char(above[0] + 1) : char(0);
    return (n ? recurse(n - 1, frame) : 0) + frame[0];
}
__global__ void deep_recursion(float* out) { out[threadIdx.x] = recurse(1000, nullptr); }

TEST_CASE("bug: stack overflow, and launches that no GPU takes") {
    expect_report({"ended by signal 11", asan, nullptr, nullptr}, [] { run(deep_recursion, 1, 32, 0, anything); });
    const char* const launch = "a launch with a grid, block or shared memory that no GPU has";
    expect_report({launch, launch, launch, launch}, [] { run(past_global, 1, 1025, 0, anything); });
    expect_report({launch, launch, launch, launch}, [] { run(past_global, 0, 32, 0, anything); });
    expect_report({launch, launch, launch, launch}, [] { run(past_global, 1, 32, 228 << 10, anything); });
}

TEST_CASE("bug: streams without an event, and results read too early") {
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
