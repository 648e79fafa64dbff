#include "parallel/comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/common.h"
#include "base/host.h"

void Comm::abort(int exit_code) {
    fflush(nullptr);
    _exit(exit_code);
}

std::unique_ptr<Comm> Comm::split(int) {
    auto group = std::make_unique<Comm>();
    group->parent = this;
    group->watchdog = watchdog;
    return group;
}

std::unique_ptr<Comm> make_comm(const Launch& launch, bool staged) {
    if (launch.world_size == 1) return std::make_unique<Comm>();
    if (!staged)
        if (std::unique_ptr<Comm> comm = make_device_comm(launch)) return comm;
    const char* kind = device_memory_is_host() ? "CPU" : "GPU";
#ifdef USE_MPI
    if (launch.mpi) return make_mpi_comm(launch);
    fail(EXIT_USAGE, "%d %s ranks need MPI%s: start with mpirun -np %d (found: %s)%s", launch.world_size, kind,
         device_memory_is_host() ? "" : ", in this build without NCCL", launch.world_size, launch.launcher.c_str(),
         device_memory_is_host() ? format(", or one process with --ranks %d", launch.world_size).c_str() : "");
#else
    fail(EXIT_USAGE,
         "this is one of %d %s ranks (%s), but this build has no library that connects them: install "
         "libopenmpi-dev%s and run make, or start one process",
         launch.world_size, kind, launch.launcher.c_str(), device_memory_is_host() ? "" : " or NCCL");
#endif
}

bool mpi_joins_ranks() {
#ifdef USE_MPI
    return true;
#else
    return false;
#endif
}

std::string device_identity() { return device_id() + " " + host_name(); }

void check_own_devices(const std::vector<std::string>& rank_infos) {
    for (size_t rank = 0; rank < rank_infos.size(); rank++) {
        const size_t first = std::find(rank_infos.begin(), rank_infos.end(), rank_infos[rank]) - rank_infos.begin();
        if (first == rank) continue;
        const size_t space = rank_infos[rank].find(' ');
        fail(
            EXIT_USAGE,
            "ranks %zu and %zu are both on %s of %s, and each needs a GPU of its own: start one process per GPU and "
            "check LOCAL_RANK, or CUDA_VISIBLE_DEVICES if something sets it; mpirun with --share-gpu lets them share",
            first, rank, rank_infos[rank].substr(0, space).c_str(), rank_infos[rank].substr(space + 1).c_str());
    }
}
