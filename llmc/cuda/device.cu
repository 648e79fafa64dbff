// device.cu: implements base/device.h on CUDA: devices, memory, streams, events, graphs and scratch memory. A process
// uses one GPU, which device_init selects for the calling thread.
#include "base/device.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

#include "cuda/attention_routes.h"
#include "cuda/autotune.h"
#include "cuda/cuda_check.h"
#include "model/mfu.h"

namespace {

constexpr int OLDEST_MAJOR = 8;  // the first compute capability with bf16 tensor cores and cp.async

struct Memory {
    std::mutex mutex;
    std::unordered_map<void*, int64_t> blocks;
    int64_t allocated = 0;
};

// This object is never destroyed, because buffers of static storage duration are freed later.
Memory& memory() {
    static Memory& memory = *new Memory;
    return memory;
}

std::string version_text(int version) { return format("%d.%d", version / 1000, version % 1000 / 10); }

// check_code looks for this kernel at start-up instead of the kernels of ops.cu, which are compiled for the same GPUs.
__global__ void probe_kernel() {}

// Explains driver errors whose own text says too little, for example "system not yet initialized". Null for others.
const char* explanation(cudaError_t error) {
    switch (error) {
        case cudaErrorSystemNotReady:
            return "the GPUs of this machine are joined by switches, and the service that starts these does not run: "
                   "systemctl start nvidia-fabricmanager";
        case cudaErrorSystemDriverMismatch:
            return "the NVIDIA driver was updated, and Linux still runs the old one: restart the machine";
        case cudaErrorDevicesUnavailable:
            return "another process has the GPU for itself (nvidia-smi -c 0 lets several in), or it must be reset";
        default:
            return nullptr;
    }
}

std::string visible_devices() {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible ? format(" (CUDA_VISIBLE_DEVICES=%s)", visible) : "";
}

// Number of visible GPUs. Refuses a machine without a driver or a GPU that this build can use.
int count_gpus() {
    int count = 0, driver = 0, runtime = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) cudaGetLastError();  // clears it, else the next launch would report it again
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    ENSURE(driver > 0, "no NVIDIA driver is installed here; train_gpt2 is the same program for the CPU");
    ENSURE(error != cudaErrorInsufficientDriver,
           "the NVIDIA driver is for CUDA %s, this program was built with CUDA %s: update the driver, or build with an "
           "older toolkit",
           version_text(driver).c_str(), version_text(runtime).c_str());
    ENSURE(error != cudaErrorNoDevice && (error != cudaSuccess || count > 0),
           "no GPU is visible%s; train_gpt2 is the same program for the CPU", visible_devices().c_str());
    if (explanation(error))
        fail(EXIT_USAGE, "no GPU can be used: %s (%s)", explanation(error), cudaGetErrorName(error));
    CUDA_CHECK(error);
    return count;
}

// CUDA_ARCHS as text: "80 90a" gives "sm_80, sm_90a".
std::string built_for() {
    std::string text = "sm_";
    for (const char* c = CUDA_ARCHS; *c; c++) text += *c == ' ' ? ", sm_" : std::string(1, *c);
    return text;
}

// Refuses a GPU that this build has no code for. Otherwise the first kernel launch would fail, with a worse message.
void check_code(int device, const cudaDeviceProp& p) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();  // clears it, else the next launch would report it again
        fail(EXIT_USAGE, "this build has code for %s, and GPU %d, %s, is sm_%d%d: make CUDA_ARCHS=%d%d%s",
             built_for().c_str(), device, p.name, p.major, p.minor, p.major, p.minor, p.major == 9 ? "a" : "");
    }
    CUDA_CHECK(error);
}

const cudaDeviceProp& properties() {
    static const cudaDeviceProp properties = gpu::current_device();
    return properties;
}

[[noreturn]] void out_of_memory(int64_t bytes, const char* purpose) {
    cudaGetLastError();  // clears it, else the next launch would report it again
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    throw OutOfMemory(
        purpose, bytes,
        format("%s free of %s on %s, %s already allocated", human_bytes(int64_t(free)).c_str(),
               human_bytes(int64_t(total)).c_str(), properties().name, human_bytes(device_bytes_allocated()).c_str()));
}

// Calls while_host_waits. During stack unwinding, a destructor must not throw another error.
void call_while_host_waits() {
    try {
        while_host_waits();
    } catch (const Error&) {
        if (std::uncaught_exceptions() == 0) throw;
    }
}

// Waits for the device: by the blocking call `wait`, or, if while_host_waits is set, by polling `query` and calling
// while_host_waits in between.
template <class Wait, class Query>
void wait_on_host(const Wait& wait, const Query& query) {
    for (int tries = 0; while_host_waits; tries++) {
        const cudaError_t error = query();
        if (error != cudaErrorNotReady) return CUDA_CHECK(error);
        cudaGetLastError();  // clears it, else the next launch would report it again
        call_while_host_waits();
        if (tries > 20) std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 100)));
    }
    CUDA_CHECK(wait());
}

// All streams that create_stream made and that still exist, so that wait_for_device can poll them.
struct Streams {
    std::mutex mutex;
    std::set<Stream> all;
};

Streams& streams() {
    static Streams& streams = *new Streams;
    return streams;
}

cudaError_t query_streams() {
    std::lock_guard lock(streams().mutex);
    cudaError_t error = cudaStreamQuery(nullptr);
    for (const Stream stream : streams().all)
        if (error == cudaSuccess) error = cudaStreamQuery(stream);
    return error;
}

struct Scratch {
    DeviceBuffer<char> memory;
    bool reserved = false;

    void grow(int64_t bytes) {
        if (bytes <= memory.size) return;
        memory = {};  // frees the old memory first, so that both need not fit; waits for the operations that use it
        memory = DeviceBuffer<char>(bytes, "working memory of the operations");
    }
};

Scratch& scratch() {
    static Scratch scratch;
    return scratch;
}

}  // namespace

void device_init(int local_rank, int threads) {
    if (threads) omp_set_num_threads(threads);
    const int count = count_gpus();
    // If a launcher or a container lets each process see one GPU, that GPU is the process's own. If it is the only
    // GPU of the machine, the ranks find out that they share it, and refuse to start.
    if (count == 1 && local_rank > 0) {
        if (visible_devices().empty())
            fprintf(stderr, "note: process %d of this machine sees one GPU and uses it\n", local_rank);
        local_rank = 0;
    }
    ENSURE(local_rank >= 0 && local_rank < count,
           "process %d of this machine has no GPU of its own: there %s %d%s; start one process per GPU", local_rank,
           count == 1 ? "is" : "are", count, visible_devices().c_str());
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, local_rank));
    ENSURE(p.major >= OLDEST_MAJOR,
           "GPU %d, %s, has compute capability %d.%d; 8.0 is the least (A100, RTX 30). train_gpt2 is the same program "
           "for the CPU",
           local_rank, p.name, p.major, p.minor);
    const cudaError_t error = cudaSetDevice(local_rank);
    if (error != cudaSuccess) cudaGetLastError();
    if (explanation(error))
        fail(EXIT_USAGE, "GPU %d, %s, cannot be used: %s (%s)", local_rank, p.name, explanation(error),
             cudaGetErrorName(error));
    CUDA_CHECK(error);
    check_code(local_rank, p);
}

DeviceInfo device_info() {
    const cudaDeviceProp& p = properties();
    const GpuPeak peak = gpu_peak(p.name);
    return {.name = p.name,
            .memory_bytes = int64_t(p.totalGlobalMem),
            .peak_flops_bf16 = 1e12 * peak.bf16,
            .peak_flops_fp32 = 1e12 * peak.fp32,  // fp32 matmuls are strictly fp32, never tf32
            .peak_source = peak.bf16 > 0 ? "data sheet" : "no data sheet known"};
}

double device_measure_peak(Dtype) { return 0.0; }
int device_count() { return count_gpus(); }

bool device_memory_is_host() { return false; }
bool device_bf16_is_faster() { return properties().major >= OLDEST_MAJOR; }

cudaDeviceProp gpu::current_device() {
    int device = 0;
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&p, device));
    return p;
}

void device_check_fp8() {
    const cudaDeviceProp p = gpu::current_device();
    ENSURE(10 * p.major + p.minor >= 89,
           "--precision fp8: %s has compute capability %d.%d, and FP8 needs 8.9 (RTX 40, L4, H100) or later; give "
           "--precision bf16",
           p.name, p.major, p.minor);
}

bool gpu::runs_hopper_code() {
    const cudaDeviceProp p = current_device();
    return p.major == 9 && p.minor == 0 && strstr(CUDA_ARCHS, "90a");
}

std::string device_libraries() {
    int driver = 0, runtime = 0;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    const int blas = int(cublasLtGetVersion());
    return format("CUDA %s, driver for %s, cuBLASLt %d.%d.%d", version_text(runtime).c_str(),
                  version_text(driver).c_str(), blas / 10000, blas / 100 % 100, blas % 100);
}

void* device_allocate(int64_t bytes, const char* purpose) {
    ENSURE(bytes >= 0, "%s: %lld bytes asked", purpose, static_cast<long long>(bytes));
    if (bytes == 0) return nullptr;
    void* block = nullptr;
    const cudaError_t error = cudaMalloc(&block, size_t(bytes));
    if (error == cudaErrorMemoryAllocation) out_of_memory(bytes, purpose);
    CUDA_CHECK(error);
    CUDA_CHECK(cudaMemset(block, 0, size_t(bytes)));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));  // other streams would not wait for the memset
    std::lock_guard lock(memory().mutex);
    memory().blocks[block] = bytes;
    memory().allocated += bytes;
    return block;
}

// Destructors call it, also after an error and at exit, when the driver may already be unloaded. The result of cudaFree
// is therefore not checked.
void device_free(void* block) {
    if (!block) return;
    {
        std::lock_guard lock(memory().mutex);
        const auto found = memory().blocks.find(block);
        ENSURE(found != memory().blocks.end(), "device_free of memory that is not ours: %p", block);
        memory().allocated -= found->second;
        memory().blocks.erase(found);
    }
    cudaFree(block);
}

int64_t device_bytes_free(int) {  // the number of processes is ignored: each has a GPU of its own
    constexpr int64_t library_bytes = int64_t(256) << 20;  // CUDA graphs, and what load_libraries does not load
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return int64_t(free) > library_bytes ? int64_t(free) - library_bytes : 0;
}

int64_t device_bytes_allocated() {
    std::lock_guard lock(memory().mutex);
    return memory().allocated;
}

void* host_allocate(int64_t bytes) {
    ENSURE(bytes >= 0, "host memory: %lld bytes asked", static_cast<long long>(bytes));
    if (bytes == 0) return nullptr;
    void* block = nullptr;
    const cudaError_t error = cudaMallocHost(&block, size_t(bytes));
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        fail(EXIT_INTERNAL, "no pinned host memory: %s bytes asked; free memory of this machine, or see what plan says",
             with_commas(bytes).c_str());
    }
    CUDA_CHECK(error);
    memset(block, 0, size_t(bytes));
    return block;
}

void host_free(void* block) {
    if (block) cudaFreeHost(block);
}

Stream create_stream(bool first) {
    Stream stream = nullptr;
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, first ? greatest : least));
    std::lock_guard lock(streams().mutex);
    streams().all.insert(stream);
    return stream;
}
void destroy_stream(Stream stream) {
    if (!stream) return;
    {
        std::lock_guard lock(streams().mutex);
        streams().all.erase(stream);
    }
    cudaStreamDestroy(stream);
}
void wait_for_stream(Stream stream) {
    wait_on_host([&] { return cudaStreamSynchronize(stream); }, [&] { return cudaStreamQuery(stream); });
}
void wait_for_device() { wait_on_host(cudaDeviceSynchronize, query_streams); }

Event create_event() {
    Event event = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}
Event create_timer() {
    Event event = nullptr;
    CUDA_CHECK(cudaEventCreate(&event));
    return event;
}
double seconds_between(Event from, Event to) {
    float ms = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
    return 1e-3 * double(ms);
}
void destroy_event(Event event) {
    if (event) cudaEventDestroy(event);
}
void record_event(Event event, Stream stream) { CUDA_CHECK(cudaEventRecord(event, stream)); }
void stream_wait_event(Stream stream, Event event) { CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0)); }
bool event_done(Event event) {
    const cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
        cudaGetLastError();  // clears it, else the next launch would report it again
        return false;
    }
    CUDA_CHECK(error);
    return true;
}
void wait_for_event(Event event) {
    wait_on_host([&] { return cudaEventSynchronize(event); }, [&] { return cudaEventQuery(event); });
}
void wait_ignoring_errors(Event event) noexcept {
    try {
        wait_for_event(event);
    } catch (const Error&) {
    }
}

#if __has_include(<nvtx3/nvToolsExt.h>)
void device_begin_range(const char* name) { nvtxRangePushA(name); }
void device_end_range() { nvtxRangePop(); }
#else
void device_begin_range(const char*) {}
void device_end_range() {}
#endif

bool gpu::is_capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}
bool device_has_graphs() { return true; }
void begin_graph(Stream stream) { CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); }
Graph end_graph(Stream stream) {
    cudaGraph_t calls = nullptr;
    Graph graph = nullptr;
    CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
    const cudaError_t error = cudaGraphInstantiate(&graph, calls, 0);
    cudaGraphDestroy(calls);
    CUDA_CHECK(error);
    return graph;
}
void abandon_graph(Stream stream) noexcept {
    cudaGraph_t calls = nullptr;
    cudaStreamEndCapture(stream, &calls);
    if (calls) cudaGraphDestroy(calls);
}
void run_graph(Graph graph, Stream stream) { CUDA_CHECK(cudaGraphLaunch(graph, stream)); }
void destroy_graph(Graph graph) {
    if (graph) cudaGraphExecDestroy(graph);
}

// In a copy of pageable memory the driver waits for the work queued before it, and does not notice that a rank on which
// this work depends has ended. So several ranks wait here before such a copy.
static void wait_before_pageable_copy(const void* host, Stream stream) {
    if (!while_host_waits || gpu::is_capturing(stream)) return;
    cudaPointerAttributes attributes = {};
    CUDA_CHECK(cudaPointerGetAttributes(&attributes, host));
    if (attributes.type == cudaMemoryTypeUnregistered) wait_for_stream(stream);
}

void copy_to_device(void* device, const void* host, int64_t bytes, Stream stream) {
    if (bytes) wait_before_pageable_copy(host, stream);
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(device, host, size_t(bytes), cudaMemcpyHostToDevice, stream));
}
void copy_to_host(void* host, const void* device, int64_t bytes, Stream stream) {
    if (bytes) wait_before_pageable_copy(host, stream);
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(host, device, size_t(bytes), cudaMemcpyDeviceToHost, stream));
}
void copy_on_device(void* to, const void* from, int64_t bytes, Stream stream) {
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, stream));
}
void copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t row_bytes, int64_t rows,
               Stream stream) {
    if (row_bytes && rows)
        CUDA_CHECK(cudaMemcpy2DAsync(to, size_t(to_stride), from, size_t(from_stride), size_t(row_bytes), size_t(rows),
                                     cudaMemcpyDeviceToDevice, stream));
}
void fill_zero(void* device, int64_t bytes, Stream stream) {
    if (bytes) CUDA_CHECK(cudaMemsetAsync(device, 0, size_t(bytes), stream));
}

void device_reserve_scratch(int64_t bytes) {
    scratch().grow(bytes);
    scratch().reserved = true;
}

void* device_scratch(int64_t bytes) {
    if (bytes > scratch().memory.size && scratch().reserved)
        fail(EXIT_INTERNAL, "an operation asks for %s bytes of working memory, %s are reserved: scratch_bytes is wrong",
             with_commas(bytes).c_str(), with_commas(scratch().memory.size).c_str());
    scratch().grow(bytes);
    return scratch().memory.data;
}
