// launch.h: starts ranks on this machine, and finds this process's rank, the number of ranks and the address of rank 0
// in the environment, which mpirun, torchrun or srun sets. A user can set torchrun's variables by hand.
//
// Errors are EXIT_USAGE: numbers out of range, launchers that contradict each other, and a launcher that started
// several processes without telling them so. Such processes would be N copies of one run that write the same files.
#pragma once
#include <functional>
#include <string>

constexpr int MAX_RANKS = 1 << 16;
// How long ranks wait for each other at the start: those of a large job can start minutes apart.
constexpr double JOIN_SECONDS = 300;

struct Launch {
    std::string launcher = "single";  // single, mpirun, torchrun, srun
    int rank = 0, world_size = 1;
    int local_rank = 0;        // index among the ranks of this host: the index of this rank's GPU
    int local_world_size = 1;  // number of ranks of this host; 0: unknown
    bool mpi = false;          // MPI_Init works: Open MPI's mpirun, or a Slurm step with PMIx, started the process
    std::string master_addr;   // host on which rank 0 listens (rendezvous.h); empty: unknown
    int master_port = 0;       // port; under torchrun the agent's, and rank 0 listens above it
    std::string run_id;        // name that distinguishes runs that use the same port
    std::string secret;        // the ranks prove it to each other (rendezvous.h); empty: none
    int attempt = 0;           // number of restarts by torchrun (this host's agent) or of the Slurm job
    std::string note;          // remark for the log, on a setting that was ignored
    std::string incomplete;    // error, which make_comm gives: variables of which only some are set; empty: none
};

using Environment = std::function<const char*(const char*)>;  // getenv, or a test's

// Uses the first launcher whose variables are set: Open MPI's mpirun, torchrun, a Slurm step of several tasks, none.
Launch find_launch(const Environment& environment);

std::string describe_launch(const Launch& launch);  // "mpirun, rank 3 of 8, local rank 1 of 2 on h1"

// Returns the first host of a list in Slurm's notation: "h[008-011],x12" -> h008.
std::string first_host(const std::string& slurm_list);

// Writes the reason of a failure to torchrun's file for it. Ignores errors, and does nothing without torchrun.
void write_error_file(const std::string& message);

// --ranks N|all starts the ranks of a run on this machine (spawn.cpp). CPU ranks are started by mpirun, a child
// process. GPU ranks are child processes with the variables that torchrun sets. If one fails, the others get SIGTERM
// and in ten seconds SIGKILL, which also follows a second signal. This process passes STOP_SIGNALS on to all; mpirun
// gets SIGUSR1 for those at which it kills the ranks, and none before its ranks have joined and ask for it by SIGURG
// (make_comm). On Linux the ranks are asked to stop if this process is killed.
//
// ranks: -1 is one for each visible GPU. reads_stdin: rank 0 gets the caller's stdin, unless that is a terminal.
// Returns when all ranks have ended: the exit code of the rank that failed first, else EXIT_PREEMPTED if one has
// stopped. Call it before any thread exists.
int spawn_ranks(int ranks, char** argv, bool reads_stdin);
// Does the same for ranks that are child processes, on any device.
int spawn_processes(int count, char** argv);
