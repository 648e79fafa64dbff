// launch.h: finds this process's rank, the world size and the rendezvous address, from options or from the environment
// that mpirun, torchrun or srun sets.
//
// Errors are EXIT_USAGE: numbers out of range, launchers that contradict each other, and a launcher that started
// several processes without telling them so. Such processes would be N copies of one run that write the same files.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

constexpr int MAX_RANKS = 1 << 16;
constexpr int MAX_RUN_ID = 256;  // characters, printable ASCII

struct Launch {
    std::string launcher = "single";  // single, options, mpirun, torchrun, srun, --gpus
    int rank = 0, world_size = 1;
    int local_rank = 0;        // index among the ranks of this host; -1: unknown
    int local_world_size = 1;  // 0: unknown
    int gpu = -1;              // index of this rank's GPU among those of its host; -1: local_rank
    bool mpi = false;          // MPI_Init works: Open MPI's mpirun, or a Slurm step with PMIx, started the process
    std::string master_addr;   // host on which rank 0 listens, for the TCP rendezvous; empty: unknown
    int master_port = 0;       // under torchrun the agent's port; rank 0 listens above it (rendezvous.h)
    std::string run_id;        // distinguishes runs that use the same port
    int listener = -1;         // socket on which rank 0 listens, if the process that started it has opened it
    int attempt = 0;           // number of restarts by torchrun (this host's agent), --max-restarts or of the Slurm job
    int64_t first_step = -1;   // after a restart by --max-restarts: the step at which the first attempt began
    std::string error_file;    // file in which torchrun looks for the reason of a failure
    std::string note;          // for the log: a setting that was ignored, or a limit of the launcher
    // How long ranks wait for each other at the start: ranks of a large job can start minutes apart.
    double join_seconds = 300;
};

// Options from the command line; -1 or empty: not given. Either none of them is given, or rank and world_size are
// given, and rendezvous too for more than one rank.
struct LaunchOptions {
    int rank = -1, world_size = -1, local_rank = -1;
    std::string rendezvous;  // HOST:PORT, the host of rank 0; [::1]:PORT with an IPv6 address
    std::string run_id;      // the same for all ranks of a run; optional
    double join_seconds = 300;
};

using Environment = std::function<const char*(const char*)>;  // getenv, or a test's

// Uses the first source that applies: options, Open MPI's mpirun, torchrun, a Slurm step of several tasks, a single
// process.
Launch find_launch(const LaunchOptions& options, const Environment& environment);

// --gpus: the ranks that this process starts on its host, one per GPU.
struct GpuOptions {
    std::string gpus;  // "all", a number, or a list "0,2,3"
    int nnodes = 1, node_rank = -1;
    std::string rendezvous = "";  // only with several nodes
};
// The GPUs of "all", of a number (the first ones), or of a list. count: returns how many GPUs this host has.
std::vector<int> parse_gpus(const std::string& text, const std::function<int()>& count);
// The launch of each rank on this host. On one host the ranks lack master_port and listener. others: the options that
// set the rank of a single process; they and launchers that started several processes are refused.
std::vector<Launch> launch_gpus(const GpuOptions& options, const std::vector<int>& gpus, const LaunchOptions& others,
                                const Environment& environment);

std::string describe_launch(const Launch& launch);  // "mpirun, rank 3 of 8, local rank 1 of 2 on h1"

// The first host of a list in Slurm's notation: "h[008-011],x12" -> h008. The whole list is checked.
std::string first_host(const std::string& slurm_list);

// Writes the reason of a failure to launch.error_file; torchrun prints it as the root cause. Does nothing if error_file
// is empty. A write error is ignored.
void write_error_file(const Launch& launch, const std::string& message);
void write_error_text(const Launch& launch, const std::string& text);  // the text is in the form of error_text
