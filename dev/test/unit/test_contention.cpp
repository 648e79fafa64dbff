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

// Two threads on one core, while it lives.
struct SharedCore {
    cpu_set_t before;
    int threads_before = omp_get_max_threads();

    SharedCore() {
        REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
        cpu_set_t one;
        CPU_ZERO(&one);
        int core = 0;
        while (!CPU_ISSET(core, &before)) core++;
        CPU_SET(core, &one);
        omp_set_num_threads(2);
        bind(one);
    }
    ~SharedCore() {
        bind(before);
        omp_set_num_threads(threads_before);
    }
    static void bind(const cpu_set_t& cores) {
#pragma omp parallel
        sched_setaffinity(0, sizeof cores, &cores);
    }
};

// Six units of work, each of which takes the given time, and what the guard makes of them.
static void six_units(ContentionGuard& guard, double seconds) {
    for (int unit = 0; unit < 6; unit++) {
        CHECK(omp_get_max_threads() == 1);
        compute(seconds);
        guard.adapt();
    }
}

TEST_CASE("of two threads on one core, one is given up and tried again later") {
    if (access("/proc/thread-self/schedstat", R_OK) != 0) {
        skip_case("no /proc/thread-self/schedstat");
        return;
    }
    const SharedCore shared;
    {
        ContentionGuard guard;
        compute(0.1);
        guard.adapt();
        six_units(guard, 0.055);
        CHECK(omp_get_max_threads() == 2);
        compute(0.1);
        guard.adapt();  // the core is still shared
        CHECK(omp_get_max_threads() == 1);
        guard.restart();
        CHECK(omp_get_max_threads() == 2);
        compute(0.1);
        guard.adapt();
        CHECK(omp_get_max_threads() == 1);
    }
    CHECK(omp_get_max_threads() == 2);
}

TEST_CASE("all threads are used for a while if fewer threads were slower") {
    if (access("/proc/thread-self/schedstat", R_OK) != 0) {
        skip_case("no /proc/thread-self/schedstat");
        return;
    }
    const SharedCore shared;
    ContentionGuard guard;
    compute(0.03);
    guard.adapt();
    six_units(guard, 0.1);
    for (int unit = 0; unit < 3; unit++) {
        CHECK(omp_get_max_threads() == 2);
        compute(0.03);
        guard.adapt();
    }
    CHECK(omp_get_max_threads() == 2);
}

TEST_CASE("all threads are kept if none had to wait for a core") {
    ContentionGuard guard;
    const int threads = omp_get_max_threads();
    usleep(500'000);  // sleeping threads do not wait for a core
    guard.adapt();
    CHECK(omp_get_max_threads() == threads);
}

#endif
