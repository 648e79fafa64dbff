#include "parallel/comm.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/common.h"

void Comm::abort(int exit_code) {
    fflush(nullptr);
    _exit(exit_code);
}

std::unique_ptr<Comm> Comm::split(int) {
    auto group = std::make_unique<Comm>();
    group->watchdog = watchdog;
    return group;
}

bool built_with_mpi() {
#ifdef USE_MPI
    return true;
#else
    return false;
#endif
}

static std::unique_ptr<Comm> join_ranks(const Launch& launch) {
    if (launch.world_size == 1) return std::make_unique<Comm>();
    if (built_with_nccl()) return make_nccl_comm(launch);
    ENSURE(device_memory_is_host(),
           "this is one of %d GPU ranks (%s), but this build has no library that connects them: install NCCL and run "
           "make, or start one process",
           launch.world_size, launch.launcher.c_str());
#ifdef USE_MPI
    ENSURE(launch.mpi, "%d CPU ranks need MPI: start with mpirun -np %d (found: %s), or one process with --ranks %d",
           launch.world_size, launch.world_size, launch.launcher.c_str(), launch.world_size);
    return make_mpi_comm(launch);
#else
    fail(EXIT_USAGE,
         "this is one of %d CPU ranks (%s), but this build has no library that connects them: install libopenmpi-dev "
         "and run make, or start one process",
         launch.world_size, launch.launcher.c_str());
#endif
}

std::unique_ptr<Comm> make_comm(const Launch& launch, std::shared_ptr<Watchdog> watchdog) {
    std::unique_ptr<Comm> comm = join_ranks(launch);
    comm->watchdog = std::move(watchdog);
    return comm;
}
