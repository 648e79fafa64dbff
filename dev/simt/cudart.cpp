// cudart.cpp: the emulator's CUDA runtime: device memory, copies, streams, events, graphs. Compiled without sanitizers,
// like emulator.cpp.
//
// Device memory is one mapping, inaccessible while host code runs, so the host faults when it dereferences a device
// pointer. No address is used twice, so freed memory stays poisoned. A stream is a queue of operations. They run at
// once, or (deferred) when the host waits, interleaved with those of other streams. To ThreadSanitizer a stream is a
// thread: the host's code before an operation was queued happens before the operation, and the operation happens before
// the host's code only where the host synchronises.
#include "internal.h"

#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using simt::Site;

namespace {

// One call of cudaEventRecord. A wait for an event is a wait for the last record made before the wait.
struct Record {
    bool done = false;
    float ms = 0.0f;  // time on the stream's clock
    char edge = 0;
};

}  // namespace

struct CUevent_st {
    std::shared_ptr<Record> last;  // null: never recorded; a wait then returns at once
};

namespace {

struct Operation {
    enum Kind { kernel, copy, record, wait, graph, external } kind;
    std::function<void()> work = nullptr;     // kernel, copy
    std::function<bool()> attempt = nullptr;  // external
    std::shared_ptr<Record> event = nullptr;  // record, wait
    std::unique_ptr<simt::Call> call = nullptr;
    char edge = 0;  // one per operation; with one per stream, later host code would be ordered before this operation
};

using Captured = std::vector<std::unique_ptr<Operation>>;

}  // namespace

// The operations captured on one stream. Events are not supported.
struct CUgraph_st {
    std::shared_ptr<Captured> operations = std::make_shared<Captured>();
};
struct CUgraphExec_st : CUgraph_st {};

struct CUstream_st {
    simt::Block* block = simt::create_block();
    std::deque<Operation*> queue;
    std::vector<Operation*> finished;  // freed when the host has waited; it must not touch them earlier
    void* tsan_fiber = simt::detects_races() ? __tsan_create_fiber(0) : nullptr;
    cudaGraph_t captured = nullptr;  // not null during a capture
    float ms = 0.0f;                 // the stream's clock: durations given to simt::enqueue_work, and waits for events
    char done_edge = 0;
};

namespace {

constexpr size_t ARENA_BYTES = size_t(16) << 30;
constexpr size_t RED_ZONE = 256;  // also the alignment of cudaMalloc
constexpr int SHARED_OPTIN = 227 << 10, MULTIPROCESSORS = 4;
constexpr int runtime_version = 13000;

struct Allocation {
    size_t bytes;
    Site site;
};

struct Runtime {
    char* arena = nullptr;
    size_t used = 0, taken = 0;  // taken: by simt::take_device_memory
    std::map<char*, Allocation> allocations;
    std::map<const char*, size_t> host_allocations;    // pinned host memory: address, bytes
    std::vector<cudaStream_t> streams, ended_streams;  // ended streams are reused, with their fibers
    std::set<cudaEvent_t> events;
    std::set<cudaGraphExec_t> graphs;
    std::map<const void*, int64_t> max_dynamic;  // kernels that have opted in to more shared memory
    cudaStream_t null_stream = nullptr;
    cudaError_t last_error = cudaSuccess;
    cudaError_t sticky_error = cudaSuccess;  // of simt::config.fail_at: no operation runs any more
    int64_t operations = 0;
    int device = 0;
    uint64_t random_state = simt::config.stream_seed * 0x9e3779b97f4a7c15ull | 1;
};

// Never destroyed, because report_leaks reads it after all destructors.
Runtime& runtime() {
    static Runtime* const r = new Runtime;
    return *r;
}

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) runtime().last_error = error;
    return error;
}

// What a call returns that has not failed itself: an earlier error of an operation, if there was one.
cudaError_t completed() { return result(runtime().sticky_error); }

// Device memory.

struct OpenArena {
    OpenArena() { protect(PROT_READ | PROT_WRITE); }
    ~OpenArena() { protect(PROT_NONE); }
    OpenArena(const OpenArena&) = delete;
    OpenArena& operator=(const OpenArena&) = delete;
    static void protect(int how) {
        if (runtime().used) mprotect(runtime().arena, (runtime().used + 4095) / 4096 * 4096, how);
    }
};

bool is_device(const void* p) {
    const Runtime& r = runtime();
    return r.arena && p >= r.arena && p < r.arena + ARENA_BYTES;
}

void check_red_zones(Site site) {
    for (const auto& [p, a] : runtime().allocations) {
        if (simt::red_zone_is_intact(p - RED_ZONE, RED_ZONE) && simt::red_zone_is_intact(p + a.bytes, RED_ZONE))
            continue;
        fprintf(stderr, "emulator: the array of %zu bytes that cudaMalloc gave at %s:%d\n", a.bytes, a.site.file,
                a.site.line);
        simt::report("a kernel wrote around a device array", site);
    }
}

bool is_pinned(const void* pointer) {
    const auto& all = runtime().host_allocations;
    const char* p = static_cast<const char*>(pointer);
    const auto next = all.upper_bound(p);
    return next != all.begin() && p < std::prev(next)->first + std::prev(next)->second;
}

// Checks a range of a copy or fill: it must be host memory, or (on_device) lie within one device allocation.
void check_range(const void* pointer, size_t bytes, bool on_device, const char* wrong_side, Site site) {
    if (is_device(pointer) != on_device) simt::report(wrong_side, site);
    if (!on_device) return;
    const auto& all = runtime().allocations;
    auto* p = static_cast<char*>(const_cast<void*>(pointer));
    auto next = all.upper_bound(p);
    if (next == all.begin()) simt::report("a copy names device memory that is not allocated", site);
    const auto& [start, a] = *std::prev(next);
    if (p + bytes > start + a.bytes) simt::report("a copy leaves its device array, or uses it after cudaFree", site);
}

// Streams.

cudaStream_t new_stream() {
    Runtime& r = runtime();
    if (r.ended_streams.empty()) {
        r.streams.push_back(new CUstream_st);
    } else {
        r.streams.push_back(r.ended_streams.back());
        r.ended_streams.pop_back();
    }
    return r.streams.back();
}

cudaStream_t stream_or_null_stream(cudaStream_t stream) {
    if (stream) return stream;
    Runtime& r = runtime();
    if (!r.null_stream) r.null_stream = new_stream();
    return r.null_stream;
}

template <class F>
void as_stream(cudaStream_t s, F f) {
    void* host = simt::detects_races() ? __tsan_get_current_fiber() : nullptr;
    simt::switch_tsan_fiber(s->tsan_fiber);
    f();
    simt::switch_tsan_fiber(host);
}

// Runs the first operation of the queue. Returns false if it waits for an event or for another process.
bool step(cudaStream_t s) {
    Operation* o = s->queue.front();
    if (o->kind == Operation::wait && !o->event->done) return false;
    if (o->kind == Operation::external && !o->attempt()) return false;
    as_stream(s, [&] {
        simt::acquire(&o->edge);
        if (o->work) {
            OpenArena open;
            o->work();
        }
        if (o->kind == Operation::record) {
            simt::release(&o->event->edge);
            o->event->ms = s->ms;
            o->event->done = true;
        }
        if (o->kind == Operation::wait) {
            simt::acquire(&o->event->edge);
            s->ms = std::max(s->ms, o->event->ms);
        }
        simt::release(&s->done_edge);
    });
    s->finished.push_back(o);
    s->queue.pop_front();
    return true;
}

// Runs one operation of a random stream that has a runnable one.
bool step_any() {
    Runtime& r = runtime();
    uint64_t& x = r.random_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    const size_t n = r.streams.size(), first = size_t(x >> 33) % std::max<size_t>(n, 1);
    for (size_t i = 0; i < n; i++) {
        cudaStream_t s = r.streams[(first + i) % n];
        if (!s->queue.empty() && step(s)) return true;
    }
    return false;
}

bool waits_for_other_processes() {
    const auto& all = runtime().streams;
    return std::any_of(all.begin(), all.end(), [](cudaStream_t s) {
        return !s->queue.empty() && s->queue.front()->kind == Operation::external;
    });
}

// Runs operations until done() is true. Returns false if, before that, every stream waits for other processes.
template <class F>
bool run_here_until(F done) {
    while (!done()) {
        if (step_any()) continue;
        if (waits_for_other_processes()) return false;
        simt::report("deadlock: every stream waits for an event", {"streams", 0});
    }
    return true;
}

template <class F>
void run_until(F done) {
    while (!run_here_until(done)) usleep(50);
}

// Drops the operation if it is the one that is to fail, or comes after it.
bool dropped(const CUstream_st* s, Operation* o) {
    Runtime& r = runtime();
    if (++r.operations == simt::config.fail_at || (simt::config.fail_in_capture && s->captured))
        r.sticky_error = cudaErrorIllegalAddress;
    if (r.sticky_error == cudaSuccess) return false;
    delete o;
    return true;
}

void enqueue(cudaStream_t s, Operation* o) {
    if (dropped(s, o)) return;
    if (s->captured) {
        if (!o->work || o->attempt)
            simt::report("an event or a collective on a stream that is captured", {"streams", 0});
        return void(s->captured->operations->emplace_back(o));
    }
    simt::release(&o->edge);
    s->queue.push_back(o);
    // An operation that waits for other processes stays queued; it continues when the host waits.
    if (!simt::config.deferred_streams) run_here_until([&] { return s->queue.empty(); });
}

void synchronize(cudaStream_t s) {
    if (runtime().sticky_error != cudaSuccess) return;
    if (s->captured) simt::report("a stream was waited for while it was captured", {"streams", 0});
    run_until([&] { return s->queue.empty(); });
    simt::acquire(&s->done_edge);
    for (Operation* o : s->finished) delete o;
    s->finished.clear();
}

void synchronize_all() {
    for (cudaStream_t s : runtime().streams) synchronize(s);
}

void enqueue_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s, Site site) {
    if (kind != cudaMemcpyDefault) {
        const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        check_range(to, bytes, to_device, "copy in the wrong direction: its target is on the other side", site);
        check_range(from, bytes, from_device, "copy in the wrong direction: its source is on the other side", site);
    }
    enqueue(s, new Operation{.kind = Operation::copy, .work = [=] { memcpy(to, from, bytes); }});
}

void enqueue_fill(void* p, int value, size_t bytes, cudaStream_t s, Site site) {
    check_range(p, bytes, true, "cudaMemset of host memory", site);
    enqueue(s, new Operation{.kind = Operation::copy, .work = [=] { memset(p, value, bytes); }});
}

// Runs after main and all destructors.
__attribute__((destructor)) void report_leaks() {
    const Runtime& r = runtime();
    if (r.sticky_error != cudaSuccess) return;  // nothing could be freed
    int leaks = 0;
    for (const auto& [p, a] : r.allocations)
        if (leaks++ < 10)
            fprintf(stderr, "emulator: leak of %zu bytes of device memory, from cudaMalloc at %s:%d\n", a.bytes,
                    a.site.file, a.site.line);
    const size_t streams = r.streams.size() - (r.null_stream ? 1 : 0);
    if (!r.host_allocations.empty())
        fprintf(stderr, "emulator: leak of %zu arrays of cudaMallocHost\n", r.host_allocations.size());
    if (streams) fprintf(stderr, "emulator: leak of %zu streams\n", streams);
    if (!r.events.empty()) fprintf(stderr, "emulator: leak of %zu events\n", r.events.size());
    if (!r.graphs.empty()) fprintf(stderr, "emulator: leak of %zu graphs\n", r.graphs.size());
    bool never_ran = false;
    for (const cudaStream_t s : r.streams) never_ran = never_ran || !s->queue.empty();
    if (never_ran) fprintf(stderr, "emulator: the program ended before work that it had queued on a stream\n");
    if (leaks || streams || never_ran || !r.events.empty() || !r.graphs.empty() || !r.host_allocations.empty()) {
        fflush(nullptr);
        _exit(1);
    }
}

}  // namespace

void simt::enqueue_work(std::function<void()> work, float ms, CUstream_st* stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    const auto run = [=] {
        work();
        s->ms += ms;
    };
    ::enqueue(s, new Operation{.kind = Operation::copy, .work = run});
}

void simt::take_device_memory(size_t bytes) { runtime().taken += bytes; }

bool simt::device_has_failed() { return runtime().sticky_error != cudaSuccess; }

void simt::enqueue_external(std::function<bool()> attempt, std::function<void()> work, float ms, CUstream_st* stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    const auto run = [=] {
        work();
        s->ms += ms;
    };
    ::enqueue(s, new Operation{.kind = Operation::external, .work = run, .attempt = std::move(attempt)});
}

void simt::copy_uninstrumented(void* to, const void* from, size_t bytes) {
    OpenArena open;
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

void simt::check_device_range(const void* p, size_t bytes, const char* wrong, Site site) {
    check_range(p, bytes, true, wrong, site);
}

void simt::enqueue(Call* call, dim3 grid, dim3 block, int64_t shared_bytes, CUstream_st* stream, Site site) {
    cudaStream_t s = stream_or_null_stream(stream);
    const auto opted_in = runtime().max_dynamic.find(call->kernel);
    const int64_t max_dynamic = opted_in == runtime().max_dynamic.end() ? 0 : opted_in->second;
    const auto run = [=] {
        run_grid(s->block, call, grid, block, shared_bytes, max_dynamic, site);
        check_red_zones(site);
    };
    ::enqueue(s, new Operation{.kind = Operation::kernel, .work = run, .call = std::unique_ptr<simt::Call>(call)});
}

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInsufficientDriver:
            return "cudaErrorInsufficientDriver";
        case cudaErrorDevicesUnavailable:
            return "cudaErrorDevicesUnavailable";
        case cudaErrorInvalidDeviceFunction:
            return "cudaErrorInvalidDeviceFunction";
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorNoKernelImageForDevice:
            return "cudaErrorNoKernelImageForDevice";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorIllegalAddress:
            return "cudaErrorIllegalAddress";
        case cudaErrorSystemNotReady:
            return "cudaErrorSystemNotReady";
        case cudaErrorSystemDriverMismatch:
            return "cudaErrorSystemDriverMismatch";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
    }
    return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInsufficientDriver:
            return "CUDA driver version is insufficient for CUDA runtime version";
        case cudaErrorDevicesUnavailable:
            return "CUDA-capable device(s) is/are busy or unavailable";
        case cudaErrorInvalidDeviceFunction:
            return "invalid device function";
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorNoKernelImageForDevice:
            return "no kernel image is available for execution on the device";
        case cudaErrorNotReady:
            return "device not ready";
        case cudaErrorIllegalAddress:
            return "an illegal memory access was encountered";
        case cudaErrorSystemNotReady:
            return "system not yet initialized";
        case cudaErrorSystemDriverMismatch:
            return "system has unsupported display driver / cuda driver combination";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
    }
    return "unrecognized error code";
}

cudaError_t cudaPeekAtLastError() { return runtime().last_error; }
cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
    *version = simt::config.driver_version;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = runtime_version;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 0;
    if (simt::config.start_error) return result(cudaError_t(simt::config.start_error));
    if (simt::config.driver_version < runtime_version) return result(cudaErrorInsufficientDriver);
    if (simt::config.gpus == 0) return result(cudaErrorNoDevice);
    *count = simt::config.gpus;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = runtime().device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (simt::config.device_error) return result(cudaError_t(simt::config.device_error));
    if (device < 0 || device >= simt::config.gpus) return result(cudaErrorInvalidDevice);
    runtime().device = device;
    return cudaSuccess;
}

// A UUID made from the host's name and the GPU's index in the machine.
static cudaUUID_t uuid_of(int gpu) {
    cudaUUID_t id = {};
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    uint64_t hash = 14695981039346656037ull;  // FNV-1a
    for (const char* c = host; *c; c++) hash = (hash ^ uint8_t(*c)) * 1099511628211ull;
    memcpy(id.bytes, &hash, sizeof(hash));
    memcpy(id.bytes + 12, &gpu, sizeof(gpu));
    return id;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= simt::config.gpus) return result(cudaErrorInvalidDevice);
    *properties = {.name = "emulator",
                   .uuid = uuid_of(simt::config.first_gpu + device),
                   .totalGlobalMem = ARENA_BYTES,
                   .sharedMemPerBlock = 48 << 10,
                   .sharedMemPerBlockOptin = SHARED_OPTIN,
                   .major = simt::config.compute_capability / 10,
                   .minor = simt::config.compute_capability % 10,
                   .multiProcessorCount = MULTIPROCESSORS,
                   .warpSize = 32,
                   .maxThreadsPerBlock = 1024,
                   .l2CacheSize = 32 << 20};
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    return result(simt::config.kernel_images ? cudaSuccess : cudaErrorNoKernelImageForDevice);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
    if (value < 0 || value > SHARED_OPTIN) return result(cudaErrorInvalidValue);
    runtime().max_dynamic[kernel] = value;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = MULTIPROCESSORS;
    return completed();
}

cudaError_t cudaDeviceSynchronize() {
    synchronize_all();
    return completed();
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *free = ARENA_BYTES - runtime().used - runtime().taken;
    *total = ARENA_BYTES;
    return completed();
}

cudaError_t cudaMalloc(void** p, size_t bytes, Site site) {
    Runtime& r = runtime();
    *p = nullptr;
    if (bytes == 0) return completed();
    if (!r.arena) {
        r.arena = simt::map_memory(ARENA_BYTES);
        simt::poison(r.arena, 4096);
    }
    const size_t start = (r.used + RED_ZONE - 1) / RED_ZONE * RED_ZONE + RED_ZONE;
    if (bytes > ARENA_BYTES || start + bytes + RED_ZONE > ARENA_BYTES) return result(cudaErrorMemoryAllocation);
    r.used = start + bytes + RED_ZONE;
    char* memory = r.arena + start;
    OpenArena open;
    simt::fill(memory - RED_ZONE, simt::red_zone_byte, RED_ZONE);
    simt::fill(memory, simt::uninitialized, bytes);
    simt::fill(memory + bytes, simt::red_zone_byte, RED_ZONE);
    simt::poison(memory - RED_ZONE, RED_ZONE + bytes + RED_ZONE);
    simt::unpoison(memory, bytes);
    simt::mark_uninitialized(memory, bytes);
    r.allocations[memory] = {bytes, site};
    *p = memory;
    return completed();
}

cudaError_t cudaFree(void* p, Site site) {
    if (!p) return completed();
    synchronize_all();
    Runtime& r = runtime();
    const auto found = r.allocations.find(static_cast<char*>(p));
    if (found == r.allocations.end()) simt::report("cudaFree of what cudaMalloc did not give, or twice", site);
    OpenArena open;
    check_red_zones(site);
    simt::fill(p, simt::uninitialized, found->second.bytes);
    simt::poison(p, found->second.bytes);
    r.allocations.erase(found);
    return completed();
}

cudaError_t cudaMallocHost(void** p, size_t bytes) {
    *p = malloc(bytes);
    if (!*p) return result(cudaErrorMemoryAllocation);
    simt::fill(*p, simt::uninitialized, bytes);
    runtime().host_allocations[static_cast<char*>(*p)] = bytes;
    return completed();
}

cudaError_t cudaFreeHost(void* p) {
    if (p && !runtime().host_allocations.erase(static_cast<char*>(p))) return result(cudaErrorInvalidValue);
    free(p);
    return completed();
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
    attributes->type = is_device(p)   ? cudaMemoryTypeDevice
                       : is_pinned(p) ? cudaMemoryTypeHost
                                      : cudaMemoryTypeUnregistered;
    return completed();
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                            Site site) {
    cudaStream_t s = stream_or_null_stream(stream);
    enqueue_copy(to, from, bytes, kind, s, site);
    const void* host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
    if (host && !is_pinned(host) && !s->captured) synchronize(s);  // a copy of pageable memory returns when it is done
    return completed();
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Site site) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr, site);
    return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream, Site site) {
    enqueue_fill(p, value, bytes, stream_or_null_stream(stream), site);
    return completed();
}
cudaError_t cudaMemset(void* p, int value, size_t bytes, Site site) {
    return cudaMemsetAsync(p, value, bytes, nullptr, site);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = new_stream();
    return completed();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    synchronize(stream);
    std::erase(runtime().streams, stream);
    runtime().ended_streams.push_back(stream);
    return completed();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    synchronize(stream_or_null_stream(stream));
    return completed();
}
// The kernels of a graph run with the threads of the stream that they were captured on, whichever stream launches it.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || stream->captured) return result(cudaErrorStreamCaptureUnsupported);
    stream->captured = new CUgraph_st;
    return completed();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = stream && stream->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return completed();
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (!stream || !stream->captured) return result(cudaErrorInvalidValue);
    *graph = std::exchange(stream->captured, nullptr);
    return completed();
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CUgraphExec_st{*graph};
    runtime().graphs.insert(*exec);
    return completed();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (!runtime().graphs.contains(exec)) return result(cudaErrorInvalidValue);
    const auto run = [operations = exec->operations] {
        for (const auto& o : *operations)
            if (o->work) o->work();
    };
    enqueue(stream_or_null_stream(stream), new Operation{.kind = Operation::graph, .work = run});
    return completed();
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return completed();
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    if (!runtime().graphs.erase(exec)) return result(cudaErrorInvalidValue);
    delete exec;
    return completed();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    if (runtime().sticky_error != cudaSuccess) return completed();
    if (!s->queue.empty()) step_any();  // so that a host which polls makes progress
    if (!s->queue.empty()) return cudaErrorNotReady;
    simt::acquire(&s->done_edge);
    return completed();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (event->last)
        enqueue(stream_or_null_stream(stream), new Operation{.kind = Operation::wait, .event = event->last});
    return completed();
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new CUevent_st;
    runtime().events.insert(*event);
    return completed();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    runtime().events.erase(event);
    delete event;
    return completed();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->last = std::make_shared<Record>();
    enqueue(stream_or_null_stream(stream), new Operation{.kind = Operation::record, .event = event->last});
    return completed();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const auto record = event->last;
    if (!record || runtime().sticky_error != cudaSuccess) return completed();
    run_until([&] { return record->done; });
    simt::acquire(&record->edge);
    return completed();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (runtime().sticky_error != cudaSuccess) return completed();
    if (event->last && !event->last->done) step_any();
    if (event->last && !event->last->done) return cudaErrorNotReady;
    if (event->last) simt::acquire(&event->last->edge);
    return completed();
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->last || !end->last) return result(cudaErrorInvalidValue);
    if (!start->last->done || !end->last->done) return result(cudaErrorNotReady);
    *ms = end->last->ms - start->last->ms;
    return completed();
}
