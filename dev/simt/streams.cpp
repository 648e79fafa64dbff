// streams.cpp: the emulator's CUDA runtime: copies, streams, and events. Compiled without sanitizers, like
// emulator.cpp.
//
// A stream is a queue of operations. They run at once, or (deferred) when the host waits, interleaved with those of
// other streams. To ThreadSanitizer a stream is a thread: the host's code before an operation was queued happens before
// the operation, and the operation happens before the host's code only where the host synchronises.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <utility>
#include <unistd.h>

using namespace cudart;
using simt::Site;

namespace {

cudaStream_t new_stream(bool blocking) {
    Runtime& r = runtime();
    if (r.ended_streams.empty()) {
        r.streams.push_back(new CUstream_st);
    } else {
        r.streams.push_back(r.ended_streams.back());
        r.ended_streams.pop_back();
    }
    r.streams.back()->blocking = blocking;
    return r.streams.back();
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
    if (++r.operations == simt::config.fail_at || (simt::config.fail_in_capture && s->capture))
        r.sticky_error = cudaErrorIllegalAddress;
    if (r.sticky_error == cudaSuccess) return false;
    delete o;
    return true;
}

void synchronize(cudaStream_t s) {
    if (runtime().sticky_error != cudaSuccess) return;
    run_until([&] { return s->queue.empty(); });
    simt::acquire(&s->done_edge);
    for (Operation* o : s->finished) delete o;
    s->finished.clear();
}

// `height` rows of `width` bytes, whose begins are a pitch apart.
struct Rows {
    size_t to_pitch, from_pitch, width, height;
    size_t span(size_t pitch) const { return (height - 1) * pitch + width; }
};

void check_copy(void* to, const void* from, Rows rows, cudaMemcpyKind kind, Site site) {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    check_range(to, rows.span(rows.to_pitch), to_device,
                to_device ? "copy in the wrong direction: the destination is host memory"
                          : "copy in the wrong direction: the destination is device memory",
                site);
    check_range(from, rows.span(rows.from_pitch), from_device,
                from_device ? "copy in the wrong direction: the source is host memory"
                            : "copy in the wrong direction: the source is device memory",
                site);
}

cudaError_t copy_rows(void* to, const void* from, Rows rows, cudaMemcpyKind kind, cudaStream_t stream, const char* call,
                      Site site) {
    cudaStream_t s = stream_or_null_stream(stream);
    const void* host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
    const bool pageable = host && !is_pinned(host);
    if (pageable && s->capture) simt::report("a copy of pageable memory during a capture", site);
    check_copy(to, from, rows, kind, site);
    const auto copy = [=] {
        for (size_t i = 0; i < rows.height; i++)
            memcpy(static_cast<char*>(to) + i * rows.to_pitch, static_cast<const char*>(from) + i * rows.from_pitch,
                   rows.width);
    };
    const cudaError_t error = enqueue(s, new Operation{.kind = Operation::copy, .work = copy}, call);
    if (error == cudaSuccess && pageable) synchronize(s);  // a copy of pageable memory is synchronous
    return error;
}

}  // namespace

void cudart::synchronize_all() {
    for (cudaStream_t s : runtime().streams) synchronize(s);
}

bool cudart::has_queued_work() {
    const auto& all = runtime().streams;
    return std::any_of(all.begin(), all.end(), [](cudaStream_t s) { return !s->queue.empty(); });
}

cudaStream_t cudart::stream_or_null_stream(cudaStream_t stream) {
    if (stream) return stream;
    Runtime& r = runtime();
    if (!r.null_stream) r.null_stream = new_stream(true);
    return r.null_stream;
}

cudaError_t cudart::enqueue(cudaStream_t s, Operation* o, const char* call) {
    if (dropped(s, o)) return completed();
    if (const cudaError_t error = check_use(s, call)) {
        delete o;
        return error;
    }
    if (s->capture) {
        if (o->attempt) simt::report("a collective on a stream during a capture", {"streams", 0});
        s->position[s]++;
        s->capture->graph->operations->emplace_back(o);
        return completed();
    }
    simt::release(&o->edge);
    const size_t limit = simt::config.queue_limit;
    if (limit) run_until([&] { return s->queue.size() < limit; });
    s->queue.push_back(o);
    // An operation that waits for other processes stays queued; it continues when the host waits.
    if (!simt::config.deferred_streams) run_here_until([&] { return s->queue.empty(); });
    return completed();
}

void simt::enqueue_work(std::function<void()> work, float ms, CUstream_st* stream, std::function<bool()> attempt) {
    cudaStream_t s = stream_or_null_stream(stream);
    const auto run = [=] {
        work();
        s->clock_ms += ms;
    };
    const auto kind = attempt ? Operation::external : Operation::copy;
    cudart::enqueue(s, new Operation{.kind = kind, .work = run, .attempt = attempt}, "a call of a library");
}

cudaError_t simt::enqueue(Call* call, const cudaLaunchConfig_t& c) {
    for (unsigned i = 0; i < c.numAttrs; i++) {
        const auto [x, y, z] = c.attrs[i].val.clusterDim;
        if (y != 1 || z != 1) report("the emulator knows clusters in the first dimension of a grid", c.site);
        call->cluster = int(x);
    }
    return enqueue(call, c.gridDim, c.blockDim, int64_t(c.dynamicSmemBytes), c.stream, c.site);
}

cudaError_t simt::enqueue(Call* call, dim3 grid, dim3 block, int64_t shared_bytes, CUstream_st* stream, Site site) {
    std::unique_ptr<Call> owned(call);
    if (const cudaError_t error = check_launch(call, grid, block, shared_bytes, site)) return error;
    cudaStream_t s = stream_or_null_stream(stream);
    const int64_t asked = asked_shared(call->kernel);
    const auto run = [=] {
        run_grid(s->block, call, grid, block, shared_bytes, asked, site);
        check_red_zones(site);
    };
    auto* o = new Operation{.kind = Operation::kernel, .work = run, .call = std::move(owned)};
    return cudart::enqueue(s, o, "a launch of a kernel");
}

cudaError_t cudaDeviceSynchronize() {
    if (const cudaError_t error = check_wait_for_device("cudaDeviceSynchronize")) return error;
    synchronize_all();
    return completed();
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                            Site site) {
    return copy_rows(to, from, {bytes, bytes, bytes, 1}, kind, stream, "cudaMemcpyAsync", site);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream, Site site) {
    constexpr size_t largest_pitch = 0x7fffffff;  // cudaDeviceProp::memPitch of every GPU
    if (width == 0 || height == 0) return completed();
    if (width > std::min(to_pitch, from_pitch) || std::max(to_pitch, from_pitch) > largest_pitch)
        return result(cudaErrorInvalidPitchValue);
    return copy_rows(to, from, {to_pitch, from_pitch, width, height}, kind, stream, "cudaMemcpy2DAsync", site);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Site site) {
    if (const cudaError_t error = check_wait(stream_or_null_stream(nullptr), "cudaMemcpy")) return error;
    cudaMemcpyAsync(to, from, bytes, kind, nullptr, site);
    return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream, Site site) {
    check_range(p, bytes, true, "cudaMemset of host memory", site);
    const auto fill = [=] { memset(p, value, bytes); };
    return enqueue(stream_or_null_stream(stream), new Operation{.kind = Operation::copy, .work = fill}, "cudaMemset");
}
cudaError_t cudaMemset(void* p, int value, size_t bytes, Site site) {
    return cudaMemsetAsync(p, value, bytes, nullptr, site);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    *stream = new_stream(!(flags & cudaStreamNonBlocking));
    return completed();
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream->capture) return check_wait(stream, "cudaStreamDestroy");
    synchronize(stream);
    std::erase(runtime().streams, stream);
    runtime().ended_streams.push_back(stream);
    return completed();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    if (const cudaError_t error = check_wait(s, "cudaStreamSynchronize")) return error;
    synchronize(s);
    return completed();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    if (runtime().sticky_error != cudaSuccess) return completed();
    if (const cudaError_t error = check_wait(s, "cudaStreamQuery")) return error;
    if (!s->queue.empty()) step_any();  // so that a host that polls makes progress
    if (!s->queue.empty()) return result(cudaErrorNotReady);
    simt::acquire(&s->done_edge);
    return completed();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    cudaStream_t s = stream_or_null_stream(stream);
    if (!event->last) return completed();
    if (s->capture || event->last->capture) return capture_wait(s, *event->last);
    return enqueue(s, new Operation{.kind = Operation::wait, .event = event->last}, "cudaStreamWaitEvent");
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = new CUevent_st{.has_time = !(flags & cudaEventDisableTiming)};
    runtime().events.insert(*event);
    return completed();
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    runtime().events.erase(event);
    delete event;
    return completed();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cudaStream_t s = stream_or_null_stream(stream);
    if (const cudaError_t error = check_use(s, "cudaEventRecord")) return error;
    event->last = std::make_shared<Record>();
    if (!s->capture)
        return enqueue(s, new Operation{.kind = Operation::record, .event = event->last}, "cudaEventRecord");
    event->last->capture = s->capture;
    event->last->position = s->position;
    return completed();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const auto record = event->last;
    if (!record || runtime().sticky_error != cudaSuccess) return completed();
    if (const cudaError_t error = check_wait(event, "cudaEventSynchronize")) return error;
    run_until([&] { return record->done; });
    simt::acquire(&record->edge);
    return completed();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!event->last || runtime().sticky_error != cudaSuccess) return completed();
    if (const cudaError_t error = check_wait(event, "cudaEventQuery")) return error;
    if (!event->last->done) step_any();
    if (!event->last->done) return result(cudaErrorNotReady);
    simt::acquire(&event->last->edge);
    return completed();
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    for (cudaEvent_t event : {start, end}) {
        if (!event->last || !event->has_time) {
            fprintf(stderr, "emulator: cudaEventElapsedTime of an event that %s (cudaErrorInvalidResourceHandle)\n",
                    event->has_time ? "was never recorded" : "was created with cudaEventDisableTiming");
            return result(cudaErrorInvalidResourceHandle);
        }
        if (event->last->capture) return check_wait(event, "cudaEventElapsedTime");
    }
    if (!start->last->done || !end->last->done) return result(cudaErrorNotReady);
    *ms = end->last->time_ms - start->last->time_ms;
    return completed();
}
