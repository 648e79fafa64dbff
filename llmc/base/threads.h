// threads.h: OpenMP's threads: their number, their stacks, and how long they spin while they wait for each other.
#pragma once
#include <omp.h>

#include <string>

inline constexpr int MAX_THREADS = 4096;

// The number of threads of a parallel region. It depends on --threads, OMP_NUM_THREADS, OMP_THREAD_LIMIT and the cores
// that the process may use, so it is measured in a region.
inline int openmp_threads() {
    int threads = 1;
#pragma omp parallel
#pragma omp single
    threads = omp_get_num_threads();
    return threads;
}

// A note on more threads than the process has cores; "" if there are no more. threads_option: --threads, 0 = not given.
std::string note_on_threads(int threads_option);

// Gives the calling thread a lower priority, and the threads that it starts. The threads of training wait for each
// other, so one that shared its core evenly with this thread would delay them all.
void yield_to_training();

// Refuses (EXIT_USAGE) stack limits that are too small for the operations, which would cause a segmentation fault: the
// system's limit (ulimit -s) or that of OpenMP's threads (OMP_STACKSIZE). Call it in main(), before the first parallel
// region.
void check_stacks();
