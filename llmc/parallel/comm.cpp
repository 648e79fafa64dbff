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

#ifdef USE_MPI
bool built_with_mpi() { return true; }
#else
bool built_with_mpi() { return false; }
std::unique_ptr<Comm> make_mpi_comm(const Launch&) { return nullptr; }
#endif

static std::unique_ptr<Comm> join_ranks(const Launch& launch) {
    ENSURE(launch.incomplete.empty(), "%s", launch.incomplete.c_str());
    if (launch.world_size == 1) return std::make_unique<Comm>();
    if (built_with_nccl()) return make_nccl_comm(launch);
    const bool cpu = device_memory_is_host();
    ENSURE(cpu && built_with_mpi(),
           "this is one of %d %s ranks (%s), but this build has no library that connects them: install %s and run "
           "make, or start one process",
           launch.world_size, cpu ? "CPU" : "GPU", launch.launcher.c_str(), cpu ? "libopenmpi-dev" : "NCCL");
    ENSURE(launch.mpi, "%d CPU ranks need MPI: start with mpirun -np %d (found: %s), or one process with --ranks %d",
           launch.world_size, launch.world_size, launch.launcher.c_str(), launch.world_size);
    return make_mpi_comm(launch);
}

std::unique_ptr<Comm> make_comm(const Launch& launch, std::shared_ptr<Watchdog> watchdog) {
    std::unique_ptr<Comm> comm = join_ranks(launch);
    comm->watchdog = std::move(watchdog);
    return comm;
}
