// trace.h: records what a rank does when (--trace). parallel/trace_file.h writes the records of all ranks to a file.
//
// A span is a named interval of time on one track of a rank. A span of a stream is measured in the stream's time,
// because the host runs ahead of the stream: two timers are queued around the work and read once they have completed.
// On the CPU, timers record the host's time, so the same calls work on both backends. Each span is also a range for a
// profiler, even without a trace.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/device.h"

// Spans of one track are nested or disjoint. `host` is the thread that queues work; on the CPU its spans are on
// `training`.
enum class Track { training, host, communication, loader };

// A span's label: "reduce bucket 3", and details that the trace viewer shows on a click. -1: not set.
struct SpanLabel {
    const char* name = nullptr;  // a string of static duration; null: do not record the span
    int64_t number = -1;
    int64_t step = -1, tokens = -1, bytes = -1;
    double queued = -1.0;  // when the rank asked for this collective, on this host's clock
};

// The spans of one rank. Only the training thread may create spans of streams; any thread may create others.
struct Trace {
    static constexpr int64_t MOST_SPANS = 1 << 18;  // 20 steps of 512 micro-steps fill a fifth of it

    explicit Trace(int64_t most_spans = MOST_SPANS) : most_spans(most_spans) {}
    ~Trace();
    Trace(const Trace&) = delete;

    struct Record {
        SpanLabel label;
        Track track;
        int64_t order;      // number of the span, in the order in which spans begin
        double begin, end;  // on this host's clock
    };
    void add(const Record& record);
    Event begin_on(Stream stream);  // queues a timer on the stream and returns it
    void end_on(Stream stream, const Record& record, Event begin);
    Event take_timer();
    void read_timers(bool wait);  // reads the timers that have completed, or waits for all

    const int64_t most_spans;
    const double begin = seconds_now();
    double zero = begin;  // zero of the file's times, on this host's clock: see align_trace
    std::atomic<bool> recording = true;
    std::atomic<int64_t> spans = 0;  // spans that have begun; those beyond most_spans are not recorded

    std::mutex mutex;             // guards records
    std::vector<Record> records;  // spans that have ended

    // Used by the training thread only.
    void begin_step(int64_t s) { step = s, first_step = first_step < 0 ? s : first_step; }
    int64_t first_step = -1, step = -1;  // the first and the latest step; -1: none has begun
    struct Queued {
        Record record;
        Event begin, end;
    };
    std::deque<Queued> queued;  // spans whose timers were not read yet, in the order in which the host ended them
    std::vector<Event> timers;  // unused timers
    Event anchor = nullptr;     // the last timer read; times are measured from it, because short intervals are precise
    double anchor_time = 0.0;   // when `anchor` completed, on this host's clock
};

// A span from its construction to the end of the block; trace may be null.
struct Span {
    Span(Trace* trace, Track track, SpanLabel label);                 // in the host's time
    Span(Trace* trace, Track track, Stream stream, SpanLabel label);  // in the stream's time; not during graph capture
    Span(const Span&) = delete;
    ~Span();

  private:
    Trace* trace;  // null: not recorded
    Trace::Record record = {};
    bool on_stream = false;
    Stream stream = nullptr;
    Event begin = nullptr;
    ProfileRange range;
};
