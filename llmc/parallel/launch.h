// launch.h: which of how many processes this is, as options, mpirun, torchrun or srun tell, and where the ranks meet.
//
// Errors are EXIT_USAGE: numbers that cannot be, launchers that contradict each other, and a launcher that started
// several processes but would leave each of them alone. N copies of one run would write the same files.
#pragma once
#include <functional>
#include <string>
#include <vector>

constexpr int MAX_RANKS = 1 << 16;
constexpr int MAX_RUN_ID = 256;  // characters, printable ASCII

struct Launch {
    std::string launcher = "single";  // single, options, mpirun, torchrun, srun
    int rank = 0, world_size = 1;
    int local_rank = 0;        // among the ranks of this host; -1: not told
    int local_world_size = 1;  // 0: not told
    bool mpi = false;          // MPI_Init works here: the environment is Open MPI's, or PMIx's of a Slurm step
    std::string master_addr;   // where rank 0 listens, for ranks that meet by TCP; empty: nowhere known
    int master_port = 0;       // under torchrun its agent's, with rank 0's above it: see rendezvous.h
    std::string run_id;        // separates runs on one port
    int attempt = 0;           // restarts by torchrun (of this host's agent) or of the Slurm job
    std::string error_file;    // where torchrun looks for the reason of a failure
    std::string note;          // what was seen and not followed, or what the launcher cannot do
    // That ranks wait for each other at the start: those of a large job come minutes apart.
    double join_seconds = 300;
};

// -1, or empty: not given. All of rank, world_size and, for more than one rank, rendezvous; or none of the options.
struct LaunchOptions {
    int rank = -1, world_size = -1, local_rank = -1;
    std::string rendezvous;  // HOST:PORT, the host of rank 0; [::1]:PORT with an IPv6 address
    std::string run_id;      // the same for all ranks of a run; may be left out
    double join_seconds = 300;
};

using Environment = std::function<const char*(const char*)>;  // getenv, or a test's

// The first that applies: options, Open MPI's mpirun, torchrun, a Slurm step of several tasks, a single process.
Launch find_launch(const LaunchOptions& options, const Environment& environment);
std::string describe_launch(const Launch& launch);  // "mpirun, rank 3 of 8, local rank 1 of 2 on h1"

// The names in a list as Slurm writes it: "h[0-2,7],x12" -> h0 h1 h2 h7 x12.
std::vector<std::string> expand_hosts(const std::string& slurm_list);

// Tells torchrun the reason, which it prints as the root cause. Nothing without launch.error_file; a file that cannot
// be written is no second error.
void write_error_file(const Launch& launch, const std::string& message);
