// test_contention.cpp: tests that OpenMP uses fewer threads while other programs use its cores (base/contention.h).
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include "base/common.h"
#include "base/contention.h"
#include "support/skip.h"
#include "support/test.h"

#if defined(__linux__)

// Lets all threads compute for the given time.
static void compute(double seconds) {
#pragma omp parallel
    for (const double start = seconds_now(); seconds_now() < start + seconds;) {
    }
}

TEST_CASE("of two threads on one core, one is given up and tried again later") {
    if (access("/proc/thread-self/schedstat", R_OK) != 0) {
        skip_case("no /proc/thread-self/schedstat");
        return;
    }
    cpu_set_t before, one;
    REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_ZERO(&one);
    int core = 0;
    while (!CPU_ISSET(core, &before)) core++;
    CPU_SET(core, &one);
    const int threads_before = omp_get_max_threads();
    omp_set_num_threads(2);
    {
        ContentionGuard guard;
#pragma omp parallel
        sched_setaffinity(0, sizeof one, &one);
        compute(0.1);
        guard.adapt();
        CHECK(omp_get_max_threads() == 1);
        compute(0.1);
        guard.adapt();  // too early to try again
        CHECK(omp_get_max_threads() == 1);
        usleep(300'000);
        guard.adapt();
        CHECK(omp_get_max_threads() == 2);
        compute(0.1);
        guard.adapt();  // the core is still shared
        CHECK(omp_get_max_threads() == 1);
    }
    CHECK(omp_get_max_threads() == 2);
#pragma omp parallel
    sched_setaffinity(0, sizeof before, &before);
    omp_set_num_threads(threads_before);
}

TEST_CASE("all threads are kept if none had to wait for a core") {
    ContentionGuard guard;
    const int threads = omp_get_max_threads();
    usleep(30'000);  // sleeping threads do not wait for a core
    guard.adapt();
    CHECK(omp_get_max_threads() == threads);
}

#endif
