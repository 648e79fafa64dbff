// missing_ranks.h: finds ranks that never called MPI_Init, which blocks the other ranks forever without a message, by
// inspecting this host's processes of the job.
#pragma once
#include <string>

#include "parallel/launch.h"

// Name of the thread that is in MPI_Init; other ranks find it in /proc.
constexpr const char* WAITING_THREAD = "waits for ranks";  // at most 15 characters

struct MissingRanks {
    bool found = false;    // a rank of this host is missing; false: the missing ranks are on other hosts
    bool reports = false;  // this rank is the lowest one that waits on this host, so it prints the message
    std::string text;      // "rank 1 (process 4711 on h0 runs /usr/bin/sleep)"
};

// job: the value of PMIX_NAMESPACE, which Open MPI's mpirun and Slurm's PMIx set, like PMIX_RANK, for each process of a
// job.
MissingRanks find_missing_ranks(const Launch& launch, const std::string& job, const std::string& proc = "/proc");
