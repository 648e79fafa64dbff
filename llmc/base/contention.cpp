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

ContentionGuard::ContentionGuard() : threads(size_t(openmp_threads()), {-1, 0.0}), last_look(seconds_now()) {
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

void ContentionGuard::adapt() {
    constexpr double WINDOW = 0.02, PAUSE = 0.3;  // seconds
    const double now = seconds_now(), window = now - last_look;
    if (window < WINDOW || now < retry_at) return;
    double waited = 0.0;  // seconds that all threads together waited for a core
    for (Thread& thread : threads) {
        const double delay = run_delay(thread.schedstat);
        waited += delay - thread.delay;
        thread.delay = delay;
    }
    last_look = now;
    const bool all_in_use = retry_at == 0.0;
    const int cores_lost = all_in_use ? int(lround(waited / window)) : 0;
    retry_at = cores_lost > 0 ? now + PAUSE : 0.0;
    omp_set_num_threads(std::max(1, int(threads.size()) - cores_lost));
}
