// same_ranks.h: refuses ranks that were not started alike. All ranks call each function.
#pragma once
#include <string>

#include "base/json.h"
#include "parallel/comm.h"
#include "train/options.h"

// To be called before any other collective.
void check_same_command(Comm& comm, Command command);
// Refuses ranks that differ in the program, in options or in these facts, by name. The error names the first that
// differs, and the first rank that differs from rank 0.
void compare_ranks(Comm& comm, const Options& options, Json facts);
// Names the first rank whose CPU_ISA or build is not that of rank 0, so that it may round differently; "" if none is.
std::string differing_rounding(Comm& comm);
