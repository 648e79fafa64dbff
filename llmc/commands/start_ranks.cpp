// start_ranks.cpp: starts the ranks of this machine (--gpus, --ranks), and starts them again after a failure
// (--max-restarts).
#include <fcntl.h>
#include <omp.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/common.h"
#include "base/device.h"
#include "base/terminal.h"
#include "checkpoint/checkpoint.h"
#include "commands/commands.h"
#include "parallel/comm.h"
#include "parallel/local_ranks.h"
#include "parallel/rendezvous.h"
#include "train/stop.h"

static constexpr int ATTEMPTS_WITHOUT_PROGRESS = 3;
static constexpr double LONGEST_PAUSE = 60;  // seconds

static LaunchOptions launch_options(const Options& o) {
    return {o.rank, o.world_size, o.local_rank, o.rendezvous, o.run_id, o.rendezvous_timeout};
}

static std::vector<Launch> gpu_launches(const Options& o) {
    ENSURE(!device_memory_is_host(), "--gpus is for train_gpt2cu; this is the program for the CPU, which has --ranks");
    // Counted once, because the first use of a driver can take a second.
    static const std::vector<int> gpus = parse_gpus(o.gpus, [] { return call_in_child(device_count); });
    if (o.command == Command::train)
        return launch_gpus({o.gpus, o.nnodes, o.node_rank, o.rendezvous}, gpus, launch_options(o), getenv);
    std::vector<Launch> launches = launch_gpus({o.gpus}, gpus, {}, getenv);
    if (o.command == Command::plan)
        for (Launch& launch : launches) launch.world_size *= o.nnodes;
    return launches;
}

// Whether a launch by --ranks is the one that started this process.
static bool started_by_ranks(const Options& o, const Launch& launch) {
    return launch.launcher == "mpirun" && launch.world_size == o.ranks;
}

Launch launch_of(const Options& o) {
    const bool trains = o.command == Command::train, plans = o.command == Command::plan;
    if (!o.gpus.empty()) {
        Launch launch = gpu_launches(o)[0];
        if (launch.world_size == 1) launch.launcher = "single";
        return launch;
    }
    if (!trains && !plans) return find_launch({}, getenv);
    ENSURE(
        o.ranks == 0 ||
            (o.rank < 0 && o.world_size < 0 && o.local_rank < 0 && o.rendezvous.empty() && o.run_id.empty()),
        "--ranks %d starts all ranks and numbers them; leave out --rank, --world-size, --local-rank, --rendezvous and "
        "--run-id",
        o.ranks);
    if (plans) return find_launch({}, getenv);
    Launch launch = find_launch(launch_options(o), getenv);
    if (o.ranks == 0 || started_by_ranks(o, launch)) return launch;
    ENSURE(device_memory_is_host(), "--ranks is for train_gpt2, the program for the CPU; give --gpus %d", o.ranks);
    ENSURE(launch.launcher == "single",
           "--ranks %d starts the ranks by mpirun, but %s has started rank %d of %d; leave out "
           "--ranks or %s",
           o.ranks, launch.launcher.c_str(), launch.rank, launch.world_size, launch.launcher.c_str());
    return launch;
}

bool starts_ranks(const Options& o) {
    if (o.command == Command::plan) return false;
    if (o.gpus.empty() && o.ranks == 0) return false;
    const Launch launch = launch_of(o);
    if (o.max_restarts > 0) return !started_by_ranks(o, launch);
    return o.gpus.empty() ? o.ranks > 1 && !started_by_ranks(o, launch) : launch.world_size > 1;
}

// What to do about a rank that a signal has ended. With --max-restarts there is a line about the restart.
static std::string advice_of(const Options& o) {
    if (o.command != Command::train || o.output.empty() || o.max_restarts > 0) return "";
    const std::string newest = newest_directory(o.output);
    return newest.empty() ? "there is no checkpoint yet" : "--resume continues from " + newest;
}

// ---- one attempt

// The option that a restart adds. The last --resume on a command line counts, so it repeats the user's choice.
static const char* resume_flag(const Options& o) { return o.resume_strict ? "--resume=strict" : "--resume"; }

// A rank in a process of its own. resume: after a restart, which continues from the newest checkpoint.
static int run_rank(const Launch& own, Options options, char** argv, bool resume, const RunCommand& run_command) {
    return report_errors(own, [&](const Launch& launch, std::unique_ptr<Comm>& comm) {
        std::string flag = resume_flag(options);
        std::vector<char*> arguments;
        for (char** argument = argv; *argument; argument++) arguments.push_back(*argument);
        if (resume) arguments.push_back(flag.data());
        arguments.push_back(nullptr);
        if (resume) options = parse_options(int(arguments.size()) - 1, arguments.data());
        return run_command(options, arguments.data(), launch, comm);
    });
}

// Starts one rank per GPU. After a restart first_step is the step at which the first attempt began.
static LocalRanks gpu_ranks(const Options& o, int attempt, int64_t first_step, char** argv,
                            const RunCommand& run_command) {
    std::vector<Launch> launches = gpu_launches(o);
    ENSURE(launches[0].world_size == 1 || device_joins_ranks(),
           "--gpus needs NCCL, which this build lacks: install libnccl-dev and run make%s",
           mpi_joins_ranks() ? format(", or start with mpirun -np %d", launches[0].world_size).c_str() : "");
    const bool on_this_machine = launches[0].master_port == 0;
    const int listener = on_this_machine ? open_local_listener(launches[0].master_port) : -1;
    for (Launch& launch : launches) {
        launch.attempt += attempt;
        launch.first_step = attempt > 0 ? first_step : -1;
        launch.master_port = launches[0].master_port;
    }
    LocalRanks ranks;
    ranks.count = int(launches.size());
    ranks.first_rank = launches[0].rank;
    ranks.run = [&o, &run_command, argv, launches, listener, attempt](int index) {
        Launch launch = launches[size_t(index)];
        if (launch.rank == 0) launch.listener = listener;
        if (launch.rank != 0 && listener >= 0) close(listener);
        return run_rank(launch, o, argv, attempt > 0, run_command);
    };
    ranks.advice = [&o] { return advice_of(o); };
    ranks.started = [listener] {
        if (listener >= 0) close(listener);
    };
    return ranks;
}

static bool is_in_path(const std::string& program) {
    const char* path = getenv("PATH");
    std::istringstream folders(path ? path : "");
    for (std::string folder; std::getline(folders, folder, ':');)
        if (access((folder + "/" + program).c_str(), X_OK) == 0) return true;
    return false;
}

// Replaces this process by mpirun, which starts this program's command line as ranks.
static int become_mpirun(const Options& o, int attempt, int64_t first_step, bool on_terminal, char** argv) {
    const std::string count = std::to_string(o.ranks), restarts = std::to_string(attempt);
    const std::string first = attempt > 0 ? std::to_string(first_step) : "";
    std::vector<std::string> words = {"mpirun", "-np", count};
    for (char** word = argv; *word; word++) {
        const bool colon = strcmp(*word, ":") == 0;  // mpirun would take this word for the end of the command line
        if (!colon) words.push_back(*word);
        if (colon) words.back() += words.back().starts_with("--") ? "=:" : ":";
    }
    if (attempt > 0) words.push_back(resume_flag(o));
    // Variables of Open MPI 4 and of Open MPI 5: ranks are not bound to cores, may be more than the cores, and stay on
    // this machine if a scheduler has granted several. mpirun adds no summary of notices about ranks that end, which
    // the supervisor reads.
    for (const auto& [name, value] : {std::pair("OMPI_MCA_hwloc_base_binding_policy", "none"),
                                      {"PRTE_MCA_hwloc_default_binding_policy", "none"},
                                      {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                      {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
                                      {"OMPI_MCA_orte_base_help_aggregate", "0"},
                                      {"OMPI_MCA_ras", "^slurm,tm,lsf,gridengine,alps"},
                                      {"PRTE_MCA_ras", "^slurm,pbs,lsf,gridengine"},
                                      {STDOUT_IS_TERMINAL, on_terminal ? "1" : "0"},
                                      {"TRAIN_GPT2_RESTARTS", restarts.c_str()},
                                      {"TRAIN_GPT2_FIRST_STEP", first.c_str()}})
        setenv(name, value, 0);
    // Without ssh and rsh mpirun refuses to start, although it needs neither for ranks of this machine.
    if (!is_in_path("ssh") && !is_in_path("rsh")) setenv("OMPI_MCA_plm_rsh_agent", "", 0);
    if (geteuid() == 0)
        for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) setenv(name, "1", 0);
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    // mpirun is in a background group of the terminal, from which it may not read.
    if (const int null = open("/dev/null", O_RDONLY); null >= 0) dup2(null, 0);
    execvp(pointers[0], pointers.data());
    print_message(format("error: --ranks %d needs mpirun, which cannot be started (%s): apt-get install openmpi-bin",
                         o.ranks, strerror(errno)));
    return EXIT_USAGE;
}

namespace {
struct ResourceLimit {
    int resource, exit_code;
    int64_t least;
    const char *name, *command;
};
}  // namespace

// Below one of these limits mpirun hangs or crashes, and so does MPI_Init. The figures are of Open MPI 4.1.4 on Linux.
static void check_limits(int ranks) {
    const ResourceLimit limits[] = {
        {RLIMIT_NOFILE, EXIT_USAGE, 40 + 5 * ranks, "open files", "ulimit -n"},
        {RLIMIT_FSIZE, EXIT_USAGE, 4 << 20, "bytes in a file, for shared memory", "ulimit -f"},
        {RLIMIT_AS, EXIT_INTERNAL, 256 << 20, "bytes of address space", "ulimit -v"},
    };
    for (const ResourceLimit& l : limits) {
        rlimit now;
        if (getrlimit(l.resource, &now) != 0 || now.rlim_cur >= rlim_t(l.least)) continue;
        fail(l.exit_code,
             "--ranks %d: mpirun and each of its ranks need %s %s, but the limit is %s (%s); raise it, or start one "
             "process without --ranks",
             ranks, with_commas(l.least).c_str(), l.name, with_commas(int64_t(now.rlim_cur)).c_str(), l.command);
    }
}

static LocalRanks cpu_ranks(const Options& o, int attempt, int64_t first_step, char** argv) {
    ENSURE(mpi_joins_ranks(),
           "--ranks needs MPI, which this build lacks: apt-get install libopenmpi-dev, and run make");
    check_limits(o.ranks);
    const int cores = omp_get_num_procs();
    if (o.ranks > cores && attempt == 0 && !o.quiet)
        print_message(
            format("note: --ranks %d on %d core%s: ranks that share a core take turns, which is slower than "
                   "--ranks %d",
                   o.ranks, cores, cores == 1 ? "" : "s", cores));
    LocalRanks ranks;
    ranks.program = "mpirun";
    ranks.ranks_of_program = o.ranks;
    ranks.advice = [&o] { return advice_of(o); };
    ranks.stdout_is_result = o.command != Command::train;
    ranks.own_group = true;      // at a SIGINT from the terminal mpirun would end its ranks before they save
    ranks.end_signal = SIGTERM;  // mpirun then ends its ranks
    const bool on_terminal = stdout_is_terminal();
    ranks.run = [&o, attempt, first_step, on_terminal, argv](int) {
        return become_mpirun(o, attempt, first_step, on_terminal, argv);
    };
    return ranks;
}

// ---- restarts

static bool may_restart(const Outcome& outcome) {
    const int code = outcome.exit_code;
    if (outcome.request != 0) return false;
    return code == EXIT_INTERNAL || code == EXIT_IO || code == EXIT_WATCHDOG || code > 128;
}

// The step at which the first attempt begins, from which --stop-after counts. Other runs do not need it, so their
// checkpoint is not read here.
static int64_t find_first_step(const Options& o) {
    if (!o.resume || o.stop_after == 0 || o.max_restarts == 0) return 0;
    const std::string newest = find_latest(o.output).dir;
    return newest.empty() ? 0 : read_trainer_state(newest).step;
}

int start_ranks(const Options& o, char** argv, const RunCommand& run_command) {
    const int64_t first_step = find_first_step(o);
    Supervisor supervisor;
    int stuck = 0;      // attempts in a row after which there was no newer checkpoint
    std::string newest = newest_directory(o.output);
    for (int attempt = 0;; attempt++) {
        const Outcome outcome = supervisor.run(o.gpus.empty() ? cpu_ranks(o, attempt, first_step, argv)
                                                              : gpu_ranks(o, attempt, first_step, argv, run_command));
        if (o.max_restarts == 0 || !may_restart(outcome)) return outcome.exit_code;
        const std::string before = std::exchange(newest, newest_directory(o.output));
        stuck = newest == before ? stuck + 1 : 0;
        if (stuck == ATTEMPTS_WITHOUT_PROGRESS)
            print_message(format("error: %d attempts in a row ended without a new checkpoint; no restart", stuck));
        else if (attempt == o.max_restarts)
            print_message(format("error: the ranks have failed after %d restarts (--max-restarts)", attempt));
        if (stuck == ATTEMPTS_WITHOUT_PROGRESS || attempt == o.max_restarts) return outcome.exit_code;
        const double seconds = std::min(LONGEST_PAUSE, double(1 << std::min(stuck, 6)));
        print_message(format("restart %d of %d in %g s: %s; %s", attempt + 1, o.max_restarts, seconds,
                             outcome.failure.c_str(), newest.empty() ? "there is no checkpoint yet" : newest.c_str()));
        if (!supervisor.pause(seconds)) return 128 + supervisor.request();
    }
}

int print_launches(const Options& o) {
    std::vector<Launch> launches = o.gpus.empty() ? std::vector<Launch>(size_t(o.ranks)) : gpu_launches(o);
    for (int i = 0; o.gpus.empty() && i < o.ranks; i++) {
        Launch& launch = launches[size_t(i)];
        launch.launcher = "mpirun", launch.mpi = true;
        launch.rank = launch.local_rank = i;
        launch.world_size = launch.local_world_size = o.ranks;
    }
    for (const Launch& launch : launches) print_launch(launch);
    return 0;
}
