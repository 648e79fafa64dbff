// trace_file.h: the trace of all ranks (--trace), in the Trace Event Format that ui.perfetto.dev and chrome://tracing
// open.
#pragma once
#include <string>
#include <vector>

#include "base/trace.h"
#include "parallel/comm.h"

// For rank 0, before the run: refuses (EXIT_CANNOT_CREATE) a file that could not be written, or that is there and is no
// trace.
void check_trace_file(const std::string& path);
// All ranks: brings their clocks together, which are one on one machine, and elsewhere as close as half of the quickest
// exchange.
void align_trace(Comm& comm);
// All ranks: ends the recording; rank 0 writes the file, or throws what is in the way when all have done their part.
// Returns "steps 0 to 19", on rank 0 also what was lost.
std::string write_trace(Comm& comm, const std::string& path);

// What a rank tells of its clock.
struct RankClock {
    std::string machine;
    double begin;                       // of its trace
    std::vector<double> entered, left;  // the moments, of a few exchanges
};
// The moment on this rank's clock at which the first of all traces began.
double zero_of_clock(const std::vector<RankClock>& clocks, int rank);
// One line of JSON for each span and track, with a comma between.
std::string trace_events(const Trace& trace, int rank, const std::string& host);
// The file, of what ranks wrote.
std::string trace_file(const std::vector<std::string>& events);
