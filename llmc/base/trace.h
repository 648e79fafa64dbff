// trace.h: the timeline of --trace FILE: what the threads of this rank did in the first steps, by the host's clock, in
// the Trace Event Format that ui.perfetto.dev opens. Each ProfileRange (base/device.h) is an event.
//
// Each event is in the file as soon as it has ended, and the file is whole JSON then. An error in writing it is a
// warning.
#pragma once
#include <cstdint>
#include <string>

constexpr int TRACE_STEPS = 20;  // steps after which the recording ends

// Begins the recording in FILE, on rank 3 in FILE.rank3. Fails (EXIT_CANNOT_CREATE) if it exists and is no trace.
void open_trace(const std::string& path, int rank, int world_size);
// Writes an event of this thread. The times are those of seconds_now(). number: -1: none.
void trace_event(const char* name, int64_t number, double begin, double end);
// Writes the event of a step, and ends the recording after TRACE_STEPS of them.
void trace_step(int64_t step, double begin, double end);
