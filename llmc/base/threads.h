// threads.h: OpenMP's threads: how many there are, and how long they spin when they wait for each other.
#pragma once
#include <omp.h>

inline constexpr int MAX_THREADS = 4096;

// The number of threads that run a parallel region. --threads, OMP_NUM_THREADS, OMP_THREAD_LIMIT and the cores that the
// process may use all have a say, so it is measured in a region.
inline int openmp_threads() {
    int threads = 1;
#pragma omp parallel
#pragma omp single
    threads = omp_get_num_threads();
    return threads;
}

// Refuses (EXIT_USAGE) stacks that the operations would overflow, which is a segmentation fault: a limit of the system
// (ulimit -s) or of OpenMP's threads (OMP_STACKSIZE). From main(), before the first parallel region.
void check_stacks();

// Lets threads that wait for each other sleep soon, so that they do not take the cores of other programs. A choice in
// the environment wins (OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME, KMP_LIBRARY). The runtime reads its environment
// before main(), so this sets it and starts the program once more, in the same process. The first call of main().
void limit_spinning(char** argv);
