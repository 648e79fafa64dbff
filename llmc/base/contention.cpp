#include "base/contention.h"

#include <fcntl.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "base/common.h"
#include "base/threads.h"

// The second number of a schedstat: the time for which the thread was ready but had no core, in ns.
static double run_delay(int schedstat) {
    char text[96] = "";
    int64_t delay = 0;
    if (schedstat < 0 || pread(schedstat, text, sizeof text - 1, 0) <= 0) return 0.0;
    sscanf(text, "%*s %" SCNd64, &delay);
    return double(delay) * 1e-9;
}

ContentionGuard::ContentionGuard() : threads(size_t(openmp_threads()), {-1, 0.0}), window_begin(seconds_now()) {
#pragma omp parallel
    {
        const int schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        threads[size_t(omp_get_thread_num())] = {schedstat, run_delay(schedstat)};
    }
}

ContentionGuard::~ContentionGuard() {
    for (const Thread& thread : threads)
        if (thread.schedstat >= 0) close(thread.schedstat);
    omp_set_num_threads(int(threads.size()));
}

// Seconds that all threads together have waited for a core since the last call.
double ContentionGuard::take_delay() {
    double waited = 0.0;
    for (Thread& thread : threads) {
        const double delay = run_delay(thread.schedstat);
        waited += delay - thread.delay;
        thread.delay = delay;
    }
    return waited;
}

void ContentionGuard::restart() {
    take_delay();
    calls = 0;
    window_begin = seconds_now();
    uses_all = true;
    omp_set_num_threads(int(threads.size()));
}

void ContentionGuard::adapt() {
    constexpr double WINDOW_ALL = 0.02, WINDOW_FEWER = 0.3, PAUSE = 3.0;  // seconds
    constexpr int LEAST_FEWER = 6;                                        // calls
    calls++;
    const double now = seconds_now(), window = now - window_begin;
    if (uses_all ? window < WINDOW_ALL : window < WINDOW_FEWER || calls < LEAST_FEWER) return;
    const double rate = calls / window, waited = take_delay();
    calls = 0;
    window_begin = now;
    int fewer = 0;
    if (uses_all) {
        rate_of_all = rate;
        // A program that shares one core with a thread makes it wait for half of the time.
        if (now >= try_fewer_at) fewer = int(ceil(waited / window - 0.25));
    } else if (rate < rate_of_all) {
        try_fewer_at = now + PAUSE;
    }
    uses_all = fewer == 0;
    omp_set_num_threads(std::max(1, int(threads.size()) - fewer));
}
