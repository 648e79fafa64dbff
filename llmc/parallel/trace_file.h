// trace_file.h: the trace of all ranks (--trace), in the Trace Event Format that ui.perfetto.dev and chrome://tracing
// open.
#pragma once
#include <string>
#include <vector>

#include "base/trace.h"
#include "parallel/comm.h"

// Called by rank 0 before the run. Refuses (EXIT_CANNOT_CREATE) a path that cannot be written, and an existing file
// that is not a trace.
void check_trace_file(const std::string& path);
// Called by all ranks: aligns their clocks. Ranks of one machine share a clock; between machines the error is at most
// half the time of the quickest all-gather.
void align_trace(Comm& comm);
// Called by all ranks: ends the recording, and rank 0 writes the file. If writing fails, rank 0 throws, after all ranks
// have sent their events. Returns "steps 0 to 19", and the number of spans that this rank lost, if any.
std::string write_trace(Comm& comm, const std::string& path);

// A rank's clock readings, in seconds.
struct RankClock {
    std::string machine;
    double begin;                       // when its trace began
    std::vector<double> entered, left;  // times at which the rank entered and left a few exchanges
};
// The time, on this rank's clock, at which the earliest trace of all ranks began.
double zero_of_clock(const std::vector<RankClock>& clocks, int rank);
// The JSON events of one rank, one per line, separated by commas.
std::string trace_events(const Trace& trace, int rank, const std::string& host);
// The content of the file, from the events of all ranks.
std::string trace_file(const std::vector<std::string>& events);
