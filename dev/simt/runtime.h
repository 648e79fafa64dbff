// runtime.h: the state of the emulated CUDA runtime, shared by cudart.cpp (errors, devices, memory), occupancy.cpp
// (which launches fit), streams.cpp (copies, streams, events) and capture.cpp (stream captures, graphs).
#pragma once
#include "internal.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace cudart {

// A position in a stream capture: how many of each stream's captured operations come before it.
using Position = std::map<cudaStream_t, int64_t>;

// A stream capture, from cudaStreamBeginCapture on the stream `origin` to cudaStreamEndCapture.
struct Capture {
    cudaStream_t origin;
    cudaStreamCaptureMode mode;
    cudaGraph_t graph;
    bool invalid = false;
};

// One call of cudaEventRecord. A wait for an event waits for the last record before the wait.
struct Record {
    bool done = false;
    float time_ms = 0.0f;  // on the stream's clock
    char edge = 0;
    std::shared_ptr<Capture> capture = nullptr;  // null: the record was not captured
    Position position = {};
};

struct Operation {
    enum Kind { kernel, copy, record, wait, graph, external } kind;
    std::function<void()> work = nullptr;     // kernel, copy
    std::function<bool()> attempt = nullptr;  // external
    std::shared_ptr<Record> event = nullptr;  // record, wait
    std::unique_ptr<simt::Call> call = nullptr;
    char edge = 0;  // one per operation: one per stream would hide races with later host code
};

}  // namespace cudart

struct CUevent_st {
    bool has_time = true;
    std::shared_ptr<cudart::Record> last = nullptr;  // null: never recorded; a wait then returns at once
};

// The captured operations, in the order of the calls.
struct CUgraph_st {
    std::shared_ptr<std::vector<std::unique_ptr<cudart::Operation>>> operations =
        std::make_shared<std::vector<std::unique_ptr<cudart::Operation>>>();
};
struct CUgraphExec_st : CUgraph_st {};

struct CUstream_st {
    simt::Block* block = simt::create_block();
    std::deque<cudart::Operation*> queue;
    std::vector<cudart::Operation*> finished;  // freed when the host has waited, because earlier it would be a race
    void* tsan_fiber = simt::detects_races() ? __tsan_create_fiber(0) : nullptr;
    bool blocking = true;  // not created with cudaStreamNonBlocking; the null stream may then not be used in a capture
    std::shared_ptr<cudart::Capture> capture = nullptr;  // null: not captured
    cudart::Position position = {};                      // in the capture
    float clock_ms = 0.0f;                               // advanced by simt::enqueue_work and waits for events
    char done_edge = 0;
};

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

// The rules of stream captures (capture.cpp). Each returns cudaSuccess if `call` may be made now. Otherwise it reports
// the call, makes the captures invalid, and returns the call's error.
cudaError_t check_use(cudaStream_t stream, const char* call);   // the call queues work
cudaError_t check_wait(cudaStream_t stream, const char* call);  // the host waits for the stream, or asks for its state
cudaError_t check_wait(cudaEvent_t event, const char* call);    // the event has been recorded
cudaError_t check_wait_for_device(const char* call);
cudaError_t check_unsafe(const char* call);  // the call may wait for the device, for example cudaMalloc
// A wait of a stream for an event, where the stream or the record is captured.
cudaError_t capture_wait(cudaStream_t stream, const Record& record);

// Reports a launch that does not fit the GPU (occupancy.cpp), and returns its error. Sets the call's registers.
cudaError_t check_launch(simt::Call* call, dim3 grid, dim3 block, int64_t shared_bytes, simt::Site site);
int64_t asked_shared(const void* kernel);  // the dynamic shared memory of cudaFuncSetAttribute, or 0

// Queues the operation, or captures it. `call` names it in a report.
cudaError_t enqueue(cudaStream_t s, Operation* o, const char* call);
cudaStream_t stream_or_null_stream(cudaStream_t stream);
// Runs all queued work, and waits for it as the host.
void synchronize_all();
bool has_queued_work();

}  // namespace cudart
