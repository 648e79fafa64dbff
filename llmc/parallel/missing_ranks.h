// missing_ranks.h: which ranks have not come, where the others wait in MPI_Init for them. That waits for ever, and says
// nothing; but this host's processes of the job can be looked at.
#pragma once
#include <string>

#include "parallel/launch.h"

// What a thread of a rank calls itself as long as it waits for the others, so that they see it.
constexpr const char* WAITING_THREAD = "waits for ranks";  // at most 15 characters

struct MissingRanks {
    bool found = false;   // a rank of this host is missing; else the missing ones are on other hosts
    bool speaks = false;  // this rank is the first of those that wait on this host
    std::string text;     // "rank 1 (process 4711 on h0 runs /usr/bin/sleep)"
};

// job: PMIX_NAMESPACE, which Open MPI's mpirun and Slurm's PMIx set beside PMIX_RANK for each process of a job.
MissingRanks find_missing_ranks(const Launch& launch, const std::string& job, const std::string& proc = "/proc");
