#include "base/threads.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cinttypes>
#include <climits>
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

#if defined(__linux__)
#include <sys/auxv.h>

namespace {

// How long a waiting thread spins before it sleeps. libgomp's default of 300,000 turns is 8 ms on an AMD EPYC (26 ns
// each); libomp's default is 200 ms. A thread that spins until a descheduled thread returns wastes its core. Measured
// on 2 cores with 4 layers and 256 channels: one training takes 25 ms a step, but two at the same time took 940 ms.
// With 100 us two take 60 ms, and one takes up to 13 % longer than with the default (medians; the means do not differ).
// With 0, one takes 1.1 to 4 times as long.
constexpr double SPIN_SECONDS = 100e-6;

// Seconds that one turn of libgomp's spin loop takes.
double seconds_of_turn() {
    constexpr int turns = 200;
    const int value = 0;
    double least = 1e-6;
    for (int i = 0; i < 5; i++) {  // the thread may be descheduled during some runs
        const double begin = seconds_now();
        for (int turn = 0; turn < turns && __atomic_load_n(&value, __ATOMIC_ACQUIRE) == 0; turn++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#else
            asm volatile("" ::: "memory");
#endif
        }
        least = std::min(least, (seconds_now() - begin) / turns);
    }
    return std::max(least, 1e-10);
}

}  // namespace

void limit_spinning(char** argv) {
    for (const char* setting : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"})
        if (getenv(setting)) return;
    if (getauxval(AT_BASE) == 0) return;  // started as `ld.so PROGRAM`: the link below would name ld.so
    char program[PATH_MAX];               // executing /proc/self/exe itself would name the process "exe"
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return;
    program[length] = 0;
    setenv("GOMP_SPINCOUNT", std::to_string(int64_t(SPIN_SECONDS / seconds_of_turn())).c_str(), 0);
    setenv("KMP_BLOCKTIME", "1", 0);  // ms, the smallest value that every version of libomp accepts
    execv(program, argv);             // returns only if it fails: threads then spin for the runtime's default time
}

#else

void limit_spinning(char**) { setenv("KMP_BLOCKTIME", "1", 0); }  // libomp reads this at the first parallel region

#endif
