// capture.cpp: the emulator's CUDA runtime: stream captures and graphs. Compiled without sanitizers, like emulator.cpp.
//
// A captured stream's operations go into a graph and do not run. The rules are those of the CUDA programming guide
// ("Creating a Graph Using Stream Capture", "Prohibited and Unhandled Operations") and of the documentation of
// cudaThreadExchangeStreamCaptureMode. After a call that breaks one, all calls for the captured streams fail, up to
// cudaStreamEndCapture. Where several streams are captured apart, such a call ends all these captures.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <utility>

using namespace cudart;

template <class F>
static bool any_capture(const F& is) {
    const auto& all = runtime().streams;
    return std::any_of(all.begin(), all.end(), [&](cudaStream_t s) { return s->capture && is(*s); });
}

static cudaError_t refuse(const char* call, cudaError_t error) {
    fprintf(stderr, "emulator: %s during a stream capture: %s (%s)\n", call, cudaGetErrorString(error),
            cudaGetErrorName(error));
    any_capture([](const CUstream_st& s) { return s.capture->invalid = true, false; });
    return result(error);
}

// The null stream waits for the blocking streams, so it may not be used while one of them is captured.
static bool null_stream_is_unusable() {
    return any_capture([](const CUstream_st& s) { return s.blocking; });
}

cudaError_t cudart::check_use(cudaStream_t s, const char* call) {
    if (s->capture && s->capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
    const bool unusable = s == runtime().null_stream && null_stream_is_unusable();
    return unusable ? refuse(call, cudaErrorStreamCaptureImplicit) : cudaSuccess;
}

cudaError_t cudart::check_unsafe(const char* call) {
    const bool unsafe =
        any_capture([](const CUstream_st& s) { return s.capture->mode != cudaStreamCaptureModeRelaxed; });
    return unsafe ? refuse(call, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudart::check_wait(cudaStream_t s, const char* call) {
    if (const cudaError_t error = check_use(s, call)) return error;
    return s->capture ? refuse(call, cudaErrorStreamCaptureUnsupported) : check_unsafe(call);
}

cudaError_t cudart::check_wait(cudaEvent_t event, const char* call) {
    return event->last->capture ? refuse(call, cudaErrorCapturedEvent) : check_unsafe(call);
}

cudaError_t cudart::check_wait_for_device(const char* call) {
    const bool captured = any_capture([](const CUstream_st&) { return true; });
    return captured ? refuse(call, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// A dependency may not cross the border of a capture.
static cudaError_t wait_error(cudaStream_t s, const Record& record) {
    const Capture *here = s->capture.get(), *there = record.capture.get();
    if ((here && here->invalid) || (there && there->invalid)) return cudaErrorStreamCaptureInvalidated;
    if (s == runtime().null_stream) return cudaErrorStreamCaptureImplicit;
    const bool ended = there && !there->graph;
    if (!here) return ended ? cudaErrorCapturedEvent : cudaSuccess;
    if (!there || ended) return cudaErrorStreamCaptureIsolation;
    return here == there ? cudaSuccess : cudaErrorStreamCaptureMerge;
}

// A stream that waits for an event of a capture joins the capture.
cudaError_t cudart::capture_wait(cudaStream_t s, const Record& record) {
    const cudaError_t error = wait_error(s, record);
    if (error == cudaErrorStreamCaptureInvalidated) return result(error);
    if (error != cudaSuccess) return refuse("cudaStreamWaitEvent", error);
    s->capture = record.capture;
    for (const auto& [stream, count] : record.position) s->position[stream] = std::max(s->position[stream], count);
    return completed();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    if (!stream) return result(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return result(cudaErrorIllegalState);
    stream->capture = std::make_shared<Capture>(Capture{stream, mode, new CUgraph_st});
    return completed();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    if (!stream && null_stream_is_unusable()) return result(cudaErrorStreamCaptureImplicit);
    *status = !stream || !stream->capture ? cudaStreamCaptureStatusNone
              : stream->capture->invalid  ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    return completed();
}

// All streams leave the capture, also after an error. Each stream's operations must come before the end of the first.
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = nullptr;
    if (!stream || !stream->capture) return result(cudaErrorIllegalState);
    const std::shared_ptr<Capture> capture = stream->capture;
    if (stream != capture->origin) return refuse("cudaStreamEndCapture", cudaErrorStreamCaptureUnmatched);
    Position end = stream->position;
    bool joined = true;
    for (cudaStream_t s : runtime().streams) {
        if (s->capture != capture) continue;
        joined = joined && s->position[s] == end[s];
        s->capture = nullptr;
        s->position.clear();
    }
    std::unique_ptr<CUgraph_st> captured(std::exchange(capture->graph, nullptr));
    if (capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
    if (!joined) return refuse("cudaStreamEndCapture", cudaErrorStreamCaptureUnjoined);
    *graph = captured.release();
    return completed();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CUgraphExec_st{*graph};
    runtime().graphs.insert(*exec);
    return completed();
}
// The kernels of a graph run with the threads of the streams that they were captured on, whichever stream launches it.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (!runtime().graphs.contains(exec)) return result(cudaErrorInvalidValue);
    const auto run = [operations = exec->operations] {
        for (const auto& o : *operations) o->work();
    };
    return enqueue(stream_or_null_stream(stream), new Operation{.kind = Operation::graph, .work = run},
                   "cudaGraphLaunch");
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
