// rendezvous_rank.cpp: a program that starts as a rank, without MPI or a GPU. It finds its rank, joins the TCP
// rendezvous, and prints the result. test_slurm.sh and test_torchrun.sh start it.
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include "base/common.h"
#include "base/host.h"
#include "parallel/rendezvous.h"

int main() {
    Launch launch;
    try {
        launch = find_launch({}, getenv);
        const auto nccl_id = [] { return format("from process %d", int(getpid())); };
        const Rendezvous joined = rendezvous(launch, format("%d@%s", launch.rank, host_name().c_str()), nccl_id, 30);
        std::string line = format("%s rank %d of %d, attempt %d, joined", launch.launcher.c_str(), launch.rank,
                                  launch.world_size, launch.attempt);
        for (const std::string& rank_info : joined.rank_infos) line += " " + rank_info;
        line += ", nccl_id " + joined.nccl_id + "\n";
        // The whole line is one write, because other ranks write to the same file.
        return fputs(line.c_str(), stdout) < 0 || fflush(stdout) != 0 ? EXIT_IO : 0;
    } catch (const Error& error) {
        fprintf(stderr, "error: rank %d on %s: %s\n", launch.rank, host_name().c_str(), error.what());
        write_error_file(launch, error.what());
        return error.exit_code;
    }
}
