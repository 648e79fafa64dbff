// rendezvous_rank.cpp: a program that starts as a rank, without MPI or a GPU. It finds its rank, joins the TCP
// rendezvous, and prints the result; `rendezvous_rank who` prints only its rank. test_slurm.py and test_torchrun.py
// start it.
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include "base/common.h"
#include "base/host.h"
#include "parallel/rendezvous.h"

// Joins the rendezvous. The id is a text of the process that gives it.
static std::string join(const Launch& launch) {
    const auto new_id = [] {
        std::string id = format("process %d", int(getpid()));
        id.resize(size_t(NCCL_ID_BYTES));
        return id;
    };
    const std::string id = share_nccl_id(launch, new_id, 30);
    return format("%s rank %d of %d on %s, attempt %d, joined %s", launch.launcher.c_str(), launch.rank,
                  launch.world_size, host_name().c_str(), launch.attempt, id.c_str());
}

int main(int argc, char**) {
    Launch launch;
    try {
        launch = find_launch(getenv);
        const std::string text = argc == 1 ? join(launch) : describe_launch(launch) + (launch.mpi ? ", MPI" : "");
        const std::string line = text + "\n";  // one write, because other ranks write to the same file
        return fputs(line.c_str(), stdout) < 0 || fflush(stdout) != 0 ? EXIT_IO : 0;
    } catch (const Error& error) {
        fprintf(stderr, "error: rank %d on %s: %s\n", launch.rank, host_name().c_str(), error.what());
        write_error_file(error.what());
        return error.exit_code;
    }
}
