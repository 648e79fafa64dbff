// streams.cpp: the emulator's CUDA runtime: copies, streams, events, and graphs. Compiled without sanitizers, like
// emulator.cpp.
//
// A stream is a queue of operations. They run at once, or (deferred) when the host waits, interleaved with those of
// other streams. To ThreadSanitizer a stream is a thread: the host's code before an operation was queued happens before
// the operation, and the operation happens before the host's code only where the host synchronises.
#include "runtime.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <unistd.h>

using namespace cudart;
using simt::Site;

namespace {

// One call of cudaEventRecord. A wait for an event waits for the last record before the wait.
struct Record {
    bool done = false;
    float time_ms = 0.0f;  // on the stream's clock
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
    char edge = 0;  // one per operation: one per stream would hide races with later host code
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
    std::vector<Operation*> finished;  // freed when the host has waited, because earlier it would be a race
    void* tsan_fiber = simt::detects_races() ? __tsan_create_fiber(0) : nullptr;
    cudaGraph_t captured = nullptr;  // not null during a capture
    float clock_ms = 0.0f;           // advanced by simt::enqueue_work, simt::enqueue_external and waits for events
    char done_edge = 0;
};

namespace {

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

// Runs the first operation of the queue, unless it waits for an event or for another process. Returns whether it ran.
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
            o->event->time_ms = s->clock_ms;
            o->event->done = true;
        }
        if (o->kind == Operation::wait) {
            simt::acquire(&o->event->edge);
            s->clock_ms = std::max(s->clock_ms, o->event->time_ms);
        }
        simt::release(&s->done_edge);
    });
    s->finished.push_back(o);
    s->queue.pop_front();
    return true;
}

// Runs one operation, of a random stream among those that can run one. Returns false if there is none.
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

// Deletes the operation if simt::config says that it fails, or if an earlier one has failed.
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
            simt::report("an event or a collective on a stream during a capture", {"streams", 0});
        return void(s->captured->operations->emplace_back(o));
    }
    simt::release(&o->edge);
    const size_t limit = simt::config.queue_limit;
    if (limit) run_until([&] { return s->queue.size() < limit; });
    s->queue.push_back(o);
    // An operation that waits for other processes stays queued; it continues when the host waits.
    if (!simt::config.deferred_streams) run_here_until([&] { return s->queue.empty(); });
}

void synchronize(cudaStream_t s) {
    if (runtime().sticky_error != cudaSuccess) return;
    if (s->captured) simt::report("a wait for a stream during its capture", {"streams", 0});
    run_until([&] { return s->queue.empty(); });
    simt::acquire(&s->done_edge);
    for (Operation* o : s->finished) delete o;
    s->finished.clear();
}

void enqueue_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s, Site site) {
    if (kind != cudaMemcpyDefault) {
        const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        check_range(to, bytes, to_device,
                    to_device ? "copy in the wrong direction: the destination is host memory"
                              : "copy in the wrong direction: the destination is device memory",
                    site);
        check_range(from, bytes, from_device,
                    from_device ? "copy in the wrong direction: the source is host memory"
                                : "copy in the wrong direction: the source is device memory",
                    site);
    }
    enqueue(s, new Operation{.kind = Operation::copy, .work = [=] { memcpy(to, from, bytes); }});
}

void enqueue_fill(void* p, int value, size_t bytes, cudaStream_t s, Site site) {
    check_range(p, bytes, true, "cudaMemset of host memory", site);
    enqueue(s, new Operation{.kind = Operation::copy, .work = [=] { memset(p, value, bytes); }});
}

}  // namespace

void cudart::synchronize_all() {
    for (cudaStream_t s : runtime().streams) synchronize(s);
}

bool cudart::is_capturing() {
    const auto& all = runtime().streams;
    return std::any_of(all.begin(), all.end(), [](cudaStream_t s) { return s->captured != nullptr; });
}

bool cudart::has_queued_work() {
    const auto& all = runtime().streams;
    return std::any_of(all.begin(), all.end(), [](cudaStream_t s) { return !s->queue.empty(); });
}

void simt::enqueue_work(std::function<void()> work, float ms, CUstream_st* stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    const auto run = [=] {
        work();
        s->clock_ms += ms;
    };
    ::enqueue(s, new Operation{.kind = Operation::copy, .work = run});
}

void simt::enqueue_external(std::function<bool()> attempt, std::function<void()> work, float ms, CUstream_st* stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    const auto run = [=] {
        work();
        s->clock_ms += ms;
    };
    ::enqueue(s, new Operation{.kind = Operation::external, .work = run, .attempt = std::move(attempt)});
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

cudaError_t cudaDeviceSynchronize() {
    synchronize_all();
    return completed();
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                            Site site) {
    cudaStream_t s = stream_or_null_stream(stream);
    const void* host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
    if (host && !is_pinned(host) && s->captured) simt::report("a copy of pageable memory during a capture", site);
    enqueue_copy(to, from, bytes, kind, s, site);
    if (host && !is_pinned(host)) synchronize(s);  // a copy of pageable memory is synchronous
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
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

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
    if (!s->queue.empty()) step_any();  // so that a host that polls makes progress
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
    *ms = end->last->time_ms - start->last->time_ms;
    return completed();
}
