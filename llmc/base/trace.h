// trace.h: records what a rank does when (--trace). parallel/trace_file.h writes the records of all ranks to a file.
//
// A span is a name for a stretch of time, on a track of its rank. On a stream that is the stream's time, which the host
// runs ahead of: two timers are queued around the work, and read once they have been reached. On the CPU they keep the
// host's time, so that the same calls serve both. Each span is a range for a profiler too, also without a trace.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/device.h"

// A track's spans lie in each other or apart. host: the thread that queues work, where training is not on it already.
enum class Track { training, host, communication, loader };

// What a span says: "reduce bucket 3", and more to whoever clicks on it. -1: nothing.
struct SpanLabel {
    const char* name = nullptr;  // of static duration; null: not to be recorded
    int64_t number = -1;
    int64_t step = -1, tokens = -1, bytes = -1;
};

// The spans of one rank. Those of streams are the training thread's to make, others anyone's.
struct Trace {
    static constexpr int64_t MOST_SPANS = 1 << 18;  // 20 steps of 512 micro-steps are a fifth of it

    explicit Trace(int64_t most_spans = MOST_SPANS) : most_spans(most_spans) {}
    ~Trace();
    Trace(const Trace&) = delete;

    struct Record {
        SpanLabel label;
        Track track;
        int64_t order;      // of beginnings
        double begin, end;  // on this host's clock
    };
    void add(const Record& record);
    Event begin_on(Stream stream);  // the timer
    void end_on(Stream stream, const Record& record, Event begin);
    Event take_timer();
    void read_timers(bool wait);  // those that have been reached, or all

    const int64_t most_spans;
    const double begin = seconds_now();
    double zero = begin;  // of the file's times, on this host's clock: see align_trace
    std::atomic<bool> recording = true;
    std::atomic<int64_t> spans = 0;  // begun, those beyond most_spans too, which are lost

    std::mutex mutex;             // guards the next line
    std::vector<Record> records;  // that have ended

    // What follows is the training thread's.
    void begin_step(int64_t s) { step = s, first_step = first_step < 0 ? s : first_step; }
    int64_t first_step = -1, step = -1;  // begun
    struct Queued {
        Record record;
        Event begin, end;
    };
    std::deque<Queued> queued;  // in the order of their ends on the host
    std::vector<Event> timers;  // to be used again
    Event anchor = nullptr;     // the last timer that was read: differences to it keep their digits
    double anchor_time = 0.0;   // when it was reached, on this host's clock
};

// A span from here to the end of the block; trace may be null.
struct Span {
    Span(Trace* trace, Track track, SpanLabel label);                 // in the host's time
    Span(Trace* trace, Track track, Stream stream, SpanLabel label);  // in the stream's; not while it makes a graph
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
