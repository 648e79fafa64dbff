#include "base/trace.h"

#include <utility>

Trace::~Trace() {
    for (const Queued& q : queued) {
        destroy_event(q.begin);
        destroy_event(q.end);
    }
    for (Event timer : timers) destroy_event(timer);
    destroy_event(anchor);
}

void Trace::add(const Record& record) {
    const std::lock_guard lock(mutex);
    records.push_back(record);
}

// The first span also aligns the stream's clock with the host's. The constructor does not, because clocks drift apart.
Event Trace::begin_on(Stream stream) {
    if (!anchor) {
        anchor = create_timer();
        record_event(anchor, stream);
        wait_for_event(anchor);
        anchor_time = seconds_now();
    }
    const Event begin = take_timer();
    record_event(begin, stream);
    return begin;
}

Event Trace::take_timer() {
    if (timers.empty()) read_timers(false);
    if (timers.empty()) return create_timer();
    const Event timer = timers.back();
    timers.pop_back();
    return timer;
}

// Ignores errors: an error here comes from work that was queued earlier, and the next call to the device reports it
// too.
void Trace::end_on(Stream stream, const Record& record, Event begin) {
    try {
        const Event end = take_timer();
        queued.push_back({record, begin, end});
        record_event(end, stream);
    } catch (const Error&) {
    }
}

void Trace::read_timers(bool wait) {
    for (; !queued.empty(); queued.pop_front()) {
        Queued& q = queued.front();
        if (wait) wait_for_event(q.end);
        if (!event_done(q.end)) return;
        q.record.begin = anchor_time + seconds_between(anchor, q.begin);
        q.record.end = anchor_time + seconds_between(anchor, q.end);
        add(q.record);
        std::swap(anchor, q.end);
        anchor_time = q.record.end;
        timers.push_back(q.begin);
        timers.push_back(q.end);
    }
}

Span::Span(Trace* trace, Track track, SpanLabel label)
    : trace(trace && label.name && trace->recording ? trace : nullptr), range(label.name ? label.name : "") {
    if (!this->trace) return;
    if (track == Track::host && device_memory_is_host()) track = Track::training;
    record = {label, track, trace->spans++, 0.0, 0.0};
    if (record.order >= trace->most_spans) this->trace = nullptr;
    record.begin = seconds_now();
}

Span::Span(Trace* trace, Track track, Stream stream, SpanLabel label) : Span(trace, track, label) {
    // The member is null while begin_on may throw, so that the destructor then records nothing.
    if (!std::exchange(this->trace, nullptr)) return;
    begin = trace->begin_on(stream);
    this->trace = trace;
    this->stream = stream;
    on_stream = true;
}

Span::~Span() {
    if (!trace) return;
    if (on_stream) {
        trace->end_on(stream, record, begin);
    } else {
        record.end = seconds_now();
        trace->add(record);
    }
}
