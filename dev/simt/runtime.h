// runtime.h: the state of the emulated CUDA runtime, shared by cudart.cpp (errors, devices, memory) and streams.cpp
// (copies, streams, events, graphs).
#pragma once
#include "internal.h"

#include <map>
#include <set>
#include <vector>

namespace cudart {

constexpr size_t ARENA_BYTES = size_t(16) << 30;

struct Allocation {
    size_t bytes;
    simt::Site site;
};

struct Runtime {
    char* arena = nullptr;
    size_t used = 0;   // bytes of the arena that cudaMalloc has given out, also if they are free again
    size_t taken = 0;  // bytes of simt::take_device_memory
    std::map<char*, Allocation> allocations;
    std::map<const char*, size_t> host_allocations;    // pinned host memory: address, bytes
    std::vector<cudaStream_t> streams, ended_streams;  // ended streams are reused, with their fibers
    std::set<cudaEvent_t> events;
    std::set<cudaGraphExec_t> graphs;
    std::map<const void*, int64_t> max_dynamic;  // kernels that have opted in to more shared memory
    cudaStream_t null_stream = nullptr;
    cudaError_t last_error = cudaSuccess;
    cudaError_t sticky_error = cudaSuccess;  // set by simt::config.fail_at; afterwards no operation runs
    int64_t operations = 0;                  // number of operations so far
    int device = 0;
    uint64_t random_state = simt::config.stream_seed * 0x9e3779b97f4a7c15ull | 1;
};

Runtime& runtime();

// Stores an error for cudaGetLastError, and returns it.
cudaError_t result(cudaError_t error);
// The return value of a call that has not failed itself: the error of an earlier operation, if there was one.
cudaError_t completed();

// Makes device memory accessible for the lifetime of this object.
struct OpenArena {
    OpenArena();
    ~OpenArena();
    OpenArena(const OpenArena&) = delete;
    OpenArena& operator=(const OpenArena&) = delete;
};

bool is_pinned(const void* pointer);
// Reports a write out of bounds of any device array. site: the kernel that has just run.
void check_red_zones(simt::Site site);
// Checks a range of an operation: it must be host memory, or (on_device) lie within one device allocation.
void check_range(const void* pointer, size_t bytes, bool on_device, const char* wrong_side, simt::Site site);

// Whether a stream is being captured. The host thread may then not allocate memory (cudaStreamCaptureModeThreadLocal).
bool is_capturing();
// Runs all queued work, and waits for it as the host.
void synchronize_all();
bool has_queued_work();

}  // namespace cudart
