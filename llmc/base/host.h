// host.h: this process's machine: its memory under the limits of control groups and `ulimit -v`, and its threads.
#pragma once
#include <cstdint>
#include <string>

#include "base/common.h"

// A limit of memory, and the bytes left under it. INT64_MAX: no limit.
struct MemoryLimit {
    int64_t limit = INT64_MAX, left = INT64_MAX;
};
// Returns the smallest limit of this process's control groups and their parents. root: "", or a test's folder for /.
MemoryLimit control_groups(const std::string& root = "");
MemoryLimit address_space();  // `ulimit -v`

// Returns the CPU quota of this process's control groups and their parents, in cores. INFINITY: no quota.
double cpu_quota(const std::string& root = "");
// Returns the cores that the process could use when it started, or its CPU quota, if that is less.
double cores_available();

// Returns the part of each of `processes` processes in the bytes that are free on the machine and under the control
// groups, without what is kept for the rest of the process and of the machine: 128 MiB, or a quarter if that is less.
int64_t host_bytes_left(int processes = 1);
// Returns the bytes that each of `processes` processes of this machine can still allocate.
int64_t host_bytes_free(int processes = 1);

// Refuses more threads than this process can start: OpenMP would end it with a message of its own.
void check_threads(int threads);
// Returns the number of threads of a parallel region. It depends on OMP_NUM_THREADS, OMP_THREAD_LIMIT and the cores
// that the process may use, so it is measured in a region.
int openmp_threads();
// The threads for each of `ranks` processes of this machine, and what limits their number: OMP_NUM_THREADS, or else its
// part of the cores and of the CPU quota.
struct ThreadChoice {
    int threads;
    std::string limit;
};
ThreadChoice choose_threads(int ranks = 1);
// Returns the number of threads that run, and what limits it: OMP_THREAD_LIMIT and OMP_DYNAMIC may allow fewer.
std::string describe_threads(int ranks = 1);

// Binds each OpenMP thread to a core of its own if there are as many as cores that the process may use. Beside a busy
// program the scheduler may put two of them on one core otherwise, where they wait for each other. Settings of the user
// (OMP_PROC_BIND and others) take precedence. Threads that the calling thread starts later are bound like it.
void bind_threads();

// Gives the calling thread, and those that it starts, all cores of the process and a lower priority. The threads of
// training wait for each other, so one that shared its core evenly with this thread would delay them all: at equal
// priority a save of 124M cost 8 s of training, now 2.
void yield_to_training();

// Call before exec: the new program may run on all cores, without OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY.
void unbind();
