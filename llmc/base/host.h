// host.h: the machine that this process runs on: its name, its memory under the limits of control groups and of
// `ulimit -v`, and the number of threads.
#pragma once
#include <cstdint>
#include <string>

#include "base/common.h"

// An id that is equal for processes on the same kernel and network, whatever their host names are. Containers with
// separate networks may have the same host name, but not the same id.
std::string host_id();

constexpr int64_t HOST_BYTES_KEPT = 128 << 20;  // left to the rest of the process and of the machine

// The smallest memory limit of this process's control groups and their parents, and the bytes still available under
// them; INT64_MAX without a limit. root: "", or the folder that a test uses as /.
struct ControlGroups {
    int64_t limit, available;
};
ControlGroups control_groups(const std::string& root = "");

// The address space that `ulimit -v` permits this process, and the bytes of it that are left. INT64_MAX: no limit.
struct AddressSpace {
    int64_t limit, left;
};
AddressSpace address_space();

// Bytes that are free on the machine and under the control groups.
int64_t host_bytes_left();
// Bytes that each of `processes` processes of this machine can still allocate, apart from HOST_BYTES_KEPT.
int64_t host_bytes_free(int processes = 1);

inline constexpr int MAX_THREADS = 4096;

// The number of threads of a parallel region. It depends on OMP_NUM_THREADS, OMP_THREAD_LIMIT and the cores that the
// process may use, so it is measured in a region.
int openmp_threads();

// Gives the calling thread a lower priority, and the threads that it starts. The threads of training wait for each
// other, so one that shared its core evenly with this thread would delay them all.
void yield_to_training();
