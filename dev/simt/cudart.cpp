// cudart.cpp: the emulator's CUDA runtime: errors, devices, and memory. streams.cpp, capture.cpp and occupancy.cpp have
// the rest. Compiled without sanitizers, like emulator.cpp.
//
// Device memory is one mapping, inaccessible while host code runs, so the host faults when it dereferences a device
// pointer. No address is used twice, so freed memory stays poisoned.
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <sys/mman.h>
#include <unistd.h>

using namespace cudart;
using simt::Site;

constexpr size_t RED_ZONE = 256;  // also the alignment of cudaMalloc
constexpr int MULTIPROCESSORS = 4;
constexpr int runtime_version = 13000;

// Never destroyed, because report_leaks reads it after all destructors.
Runtime& cudart::runtime() {
    static Runtime* const r = new Runtime;
    return *r;
}

cudaError_t cudart::result(cudaError_t error) {
    if (error != cudaSuccess) runtime().last_error = error;
    return error;
}

cudaError_t cudart::completed() { return result(runtime().sticky_error); }

// Device memory is one arena. Every call of the runtime protects the whole arena from the host. With huge pages (2 MiB)
// this changes far fewer entries of the page table than with pages of 4 KiB. A system without huge pages uses the
// latter.

constexpr size_t HUGE_PAGE = 2 << 20;

static char* map_arena() {
    const uintptr_t memory = reinterpret_cast<uintptr_t>(simt::map_memory(HUGE_PAGE + ARENA_BYTES));
    char* arena = reinterpret_cast<char*>((memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(arena, ARENA_BYTES, MADV_HUGEPAGE);
    return arena;
}

static void protect_arena(int how) {
    if (runtime().used) mprotect(runtime().arena, (runtime().used + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, how);
}

OpenArena::OpenArena() { protect_arena(PROT_READ | PROT_WRITE); }
OpenArena::~OpenArena() { protect_arena(PROT_NONE); }

static bool is_device(const void* p) {
    const Runtime& r = runtime();
    return r.arena && p >= r.arena && p < r.arena + ARENA_BYTES;
}

void cudart::check_red_zones(Site site) {
    for (const auto& [p, a] : runtime().allocations) {
        if (simt::red_zone_is_intact(p - RED_ZONE, RED_ZONE) && simt::red_zone_is_intact(p + a.bytes, RED_ZONE))
            continue;
        fprintf(stderr, "emulator: the array of %zu bytes from cudaMalloc at %s:%d\n", a.bytes, a.site.file,
                a.site.line);
        simt::report("a kernel wrote out of bounds of a device array", site);
    }
}

bool cudart::is_pinned(const void* pointer) {
    const auto& all = runtime().host_allocations;
    const char* p = static_cast<const char*>(pointer);
    const auto next = all.upper_bound(p);
    return next != all.begin() && p < std::prev(next)->first + std::prev(next)->second;
}

void cudart::check_range(const void* pointer, size_t bytes, bool on_device, const char* wrong_side, Site site) {
    if (is_device(pointer) != on_device) simt::report(wrong_side, site);
    if (!on_device) return;
    const auto& all = runtime().allocations;
    auto* p = static_cast<char*>(const_cast<void*>(pointer));
    auto next = all.upper_bound(p);
    if (next == all.begin()) simt::report("an access to device memory that is not allocated", site);
    const auto& [start, a] = *std::prev(next);
    if (p + bytes > start + a.bytes)
        simt::report("an access beyond the end of a device array, or after cudaFree", site);
}

void simt::take_device_memory(size_t bytes) { runtime().taken += bytes; }

bool simt::device_has_failed() { return runtime().sticky_error != cudaSuccess; }

void simt::copy_uninstrumented(void* to, const void* from, size_t bytes) {
    OpenArena open;
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

void simt::check_device_range(const void* p, size_t bytes, const char* wrong, Site site) {
    check_range(p, bytes, true, wrong, site);
}

// Runs after main and all destructors.
__attribute__((destructor)) static void report_leaks() {
    const Runtime& r = runtime();
    if (r.sticky_error != cudaSuccess) return;  // after this error the program cannot free anything
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
    const bool never_ran = has_queued_work();
    if (never_ran) fprintf(stderr, "emulator: the program ended before the work that it had queued on a stream ran\n");
    if (leaks || streams || never_ran || !r.events.empty() || !r.graphs.empty() || !r.host_allocations.empty()) {
        fflush(nullptr);
        _exit(1);
    }
}

// The names and texts of CUDA 13.
#define ERROR(name, text) \
    { name, #name, text }
static constexpr struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR(cudaErrorSystemNotReady, "system not yet initialized"),
    ERROR(cudaErrorSystemDriverMismatch, "system has unsupported display driver / cuda driver combination"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(cudaErrorInvalidClusterSize, "invalid cluster size"),
};
#undef ERROR

const char* cudaGetErrorName(cudaError_t error) {
    for (const auto& e : errors)
        if (e.error == error) return e.name;
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    for (const auto& e : errors)
        if (e.error == error) return e.text;
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

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= simt::config.gpus) return result(cudaErrorInvalidDevice);
    const int capability = simt::config.compute_capability;
    *properties = {.name = "emulator",
                   .totalGlobalMem = ARENA_BYTES,
                   .major = capability / 10,
                   .minor = capability % 10,
                   .multiProcessorCount = MULTIPROCESSORS};
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? MULTIPROCESSORS
             : attribute == cudaDevAttrMemoryClockRate   ? 2'619'000
                                                         : 5120;
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
    if (const cudaError_t error = check_unsafe("cudaMalloc")) return error;
    if (bytes == 0) return completed();
    if (!r.arena) {
        r.arena = map_arena();
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
    if (const cudaError_t error = check_unsafe("cudaFree")) return error;
    synchronize_all();
    Runtime& r = runtime();
    const auto found = r.allocations.find(static_cast<char*>(p));
    if (found == r.allocations.end())
        simt::report("cudaFree of a pointer that is not from cudaMalloc, or that is already freed", site);
    OpenArena open;
    check_red_zones(site);
    simt::fill(p, simt::uninitialized, found->second.bytes);
    simt::poison(p, found->second.bytes);
    r.allocations.erase(found);
    return completed();
}

cudaError_t cudaMallocHost(void** p, size_t bytes) {
    *p = nullptr;
    if (const cudaError_t error = check_unsafe("cudaMallocHost")) return error;
    *p = malloc(bytes);
    if (!*p) return result(cudaErrorMemoryAllocation);
    simt::fill(*p, simt::uninitialized, bytes);
    runtime().host_allocations[static_cast<char*>(*p)] = bytes;
    return completed();
}

cudaError_t cudaFreeHost(void* p) {
    if (!p) return completed();
    if (const cudaError_t error = check_unsafe("cudaFreeHost")) return error;
    if (!runtime().host_allocations.erase(static_cast<char*>(p))) return result(cudaErrorInvalidValue);
    free(p);
    return completed();
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
    attributes->type = is_device(p)   ? cudaMemoryTypeDevice
                       : is_pinned(p) ? cudaMemoryTypeHost
                                      : cudaMemoryTypeUnregistered;
    return completed();
}
