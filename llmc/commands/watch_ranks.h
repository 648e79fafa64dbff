// watch_ranks.h: the watchdog (parallel/watchdog.h) of eval and generate.
#pragma once
#include "base/common.h"
#include "train/options.h"
#include "parallel/watchdog.h"

// Called by all ranks, first of all. These commands have no --output, so the reports of several ranks go into a new
// folder for temporary files, which exists only after a hang.
void watch_ranks(const Options& options, const Launch& launch, Comm& comm);

// The batches of eval or the tokens of generate, whose times give the limit.
struct WatchedUnits {
    Watchdog& watchdog;
    const char* const name;  // "batch"
    int64_t number = 0;      // of the next unit
    double begun = 0.0;      // seconds_now() at the begin of this unit; 0: there is none yet

    // first: the time that a unit takes at most on a slow device.
    void begin_phase(Phase phase, double first = 0.0) {
        if (first > 0.0) watchdog.set_first_step(first);
        watchdog.begin(phase, -1);
    }
    void next() {  // a unit begins, and ends the one before
        const double now = seconds_now();
        if (begun > 0.0) watchdog.step_done(now - begun);
        begun = now;
        watchdog.reached(name, number++);
    }
};
