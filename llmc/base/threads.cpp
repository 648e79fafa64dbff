#include "base/threads.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/common.h"

// The operations overflow a thread's stack of 20 KiB; 24 KiB are enough. They overflow the main thread's stack of 32
// KiB; 40 KiB are enough. (Measured with g++ 12 at -O3. Smaller stacks end the program before main().)
static constexpr int64_t LEAST_STACK = 64 << 10;

// Parses a size as OpenMP does: a number of KiB, or a number with suffix B, K, M or G. Returns -1 if the text is not
// a size.
static int64_t bytes_of(const char* text) {
    int64_t number;
    char unit = 'K', more;
    const int found = sscanf(text, "%" SCNd64 " %c %c", &number, &unit, &more);
    static constexpr char units[] = "BKMG";
    const char* place = strchr(units, toupper(uint8_t(unit)));
    if (found < 1 || found > 2 || !place) return -1;
    const int shift = 10 * int(place - units);
    return number < 0 || number > INT64_MAX >> shift ? -1 : number << shift;
}

void yield_to_training() {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, id_t(gettid()), 10);
#endif
}

void check_stacks() {
    const char* thread_stack = getenv("OMP_STACKSIZE");
    const int64_t bytes = thread_stack ? bytes_of(thread_stack) : -1;  // OpenMP also ignores an invalid size
    ENSURE(bytes < 0 || bytes >= LEAST_STACK,
           "OMP_STACKSIZE=%s gives each thread a stack of %s, but the operations need %s; unset it", thread_stack,
           human_bytes(bytes).c_str(), human_bytes(LEAST_STACK).c_str());
    rlimit limit;
    ENSURE(getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= rlim_t(LEAST_STACK),
           "the stack limit is %s (ulimit -s), but the operations need %s; try ulimit -s 8192",
           human_bytes(int64_t(limit.rlim_cur)).c_str(), human_bytes(LEAST_STACK).c_str());
}

std::string note_on_threads(int threads_option) {
    const int threads = openmp_threads(), cores = omp_get_num_procs();
    if (threads <= cores) return "";
    const char* variable = getenv("OMP_NUM_THREADS");
    std::string what = format("%d threads", threads);
    if (threads_option > 0)
        what = format("--threads %d", threads_option);
    else if (variable)
        what = format("OMP_NUM_THREADS=%s", variable);
    return format("%s on %d core%s: threads that share a core take turns, which is slower than --threads %d",
                  what.c_str(), cores, cores == 1 ? "" : "s", cores);
}

// Limits how long a waiting thread spins before it sleeps: 4000 turns of libgomp, 100 us on an AMD EPYC. libgomp's
// default is 8 ms there, libomp's 200 ms. A thread that spins until a descheduled thread returns wastes its core:
// beside one busy thread on two cores, training then takes 2 times as long as alone, and with this limit 1.5 times.
// libgomp reads its environment in its constructor, which runs after this one if libgomp is linked statically
// (mk/find.mk), and libomp at the first parallel region. Settings of the user take precedence.
__attribute__((constructor(101))) static void limit_spinning() {
    for (const char* setting : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"})
        if (getenv(setting)) return;
    setenv("GOMP_SPINCOUNT", "4000", 0);
    setenv("KMP_BLOCKTIME", "1", 0);  // ms, the smallest value that every version of libomp accepts
}
