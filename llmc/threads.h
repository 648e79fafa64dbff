// threads.h: how many threads OpenMP runs a parallel region on. --threads, OMP_NUM_THREADS, OMP_THREAD_LIMIT and the
// cores that the process may use all have a say, so it is measured in a region.
#pragma once
#include <omp.h>

inline int openmp_threads() {
    int threads = 1;
#pragma omp parallel
#pragma omp single
    threads = omp_get_num_threads();
    return threads;
}
