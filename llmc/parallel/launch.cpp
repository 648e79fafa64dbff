#include "parallel/launch.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>

#include "base/common.h"
#include "base/json.h"
#include "base/host.h"
#include "base/print.h"

namespace {
// Names of the variables in which a launcher gives rank and world size.
struct Names {
    const char *launcher, *rank, *world_size, *local_rank, *local_world_size;
};
constexpr Names mpirun = {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                          "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names torchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
// SLURM_NTASKS does not serve as world size: a batch script has it too, and under mpirun it differs from host to host.
constexpr Names srun = {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};

struct Variables {
    const Environment& environment;

    std::string text(const char* name) const {
        const char* value = name ? environment(name) : nullptr;
        return value ? value : "";
    }
    bool has(const char* name) const { return !text(name).empty(); }

    int number(const char* name, int least, int most) const {
        const std::string value = text(name);
        ENSURE(!value.empty(), "%s is not set; the launcher sets it to a number from %d to %d", name, least, most);
        int number = 0;
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
        const bool whole = error == std::errc() && end == value.data() + value.size();
        ENSURE(whole && number >= least && number <= most, "%s is '%s', not a number from %d to %d", name,
               value.c_str(), least, most);
        return number;
    }
    int number_or(const char* name, int least, int most, int absent) const {
        return has(name) ? number(name, least, most) : absent;
    }
    bool set(const Names& names) const { return has(names.world_size) && (has(names.rank) || &names == &mpirun); }
    // A batch script and salloc's shell, whose step has the number 2^32 - 6, are one process for any SLURM_NTASKS.
    bool in_step() const { return has("SLURM_STEP_ID") && text("SLURM_STEP_ID").size() < 10; }
    int step_tasks() const { return in_step() ? number_or(srun.world_size, 1, MAX_RANKS, 0) : 0; }

    // Returns the error if some of the variables are set and others are not, else "".
    std::string incomplete(std::initializer_list<const char*> names) const {
        std::string present, missing;
        for (const char* name : names) {
            std::string& list = has(name) ? present : missing;
            list += (list.empty() ? "" : ", ") + std::string(name);
        }
        if (present.empty() || missing.empty()) return "";
        return format(
            "%s: set, but not %s: each process of such a run would train alone; set all of them, as torchrun "
            "and srun do, or none (env -u %s)",
            present.c_str(), missing.c_str(), present.substr(0, present.find(',')).c_str());
    }
};
}  // namespace

static constexpr int MOST = std::numeric_limits<int>::max();

static Launch read_numbers(const Names& names, const Variables& variables) {
    Launch launch;
    launch.launcher = names.launcher;
    launch.world_size = variables.number(names.world_size, 1, MAX_RANKS);
    launch.rank = variables.number(names.rank, 0, launch.world_size - 1);
    if (launch.world_size == 1) return launch;
    launch.local_world_size = variables.number_or(names.local_world_size, 1, launch.world_size, 0);
    const int local_ranks = launch.local_world_size ? launch.local_world_size : launch.world_size;
    launch.local_rank = variables.number(names.local_rank, 0, local_ranks - 1);
    return launch;
}

// launch.mpi stays false: under torchrun MPI_Init would succeed, but as rank 0 of 1 in every process.
static void add_torchrun(Launch& launch, const Variables& variables) {
    launch.master_addr = variables.text("MASTER_ADDR");
    if (launch.master_addr.starts_with('[') && launch.master_addr.ends_with(']'))  // [::1]
        launch.master_addr = launch.master_addr.substr(1, launch.master_addr.size() - 2);
    if (launch.world_size > 1) launch.master_port = variables.number("MASTER_PORT", 1, 65535);
    launch.run_id = variables.text("TORCHELASTIC_RUN_ID");
    launch.attempt = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0, MOST, launch.attempt);
}

static void add_srun(Launch& launch, const Variables& variables) {
    const int job = variables.number_or("SLURM_JOB_ID", 0, MOST, 0), step = variables.number("SLURM_STEP_ID", 0, MOST);
    launch.run_id = format("%d.%d", job, step);
    // SLURM_LAUNCH_NODE_IPADDR is the host on which srun was called, which need not be rank 0's host.
    launch.master_addr = first_host(variables.text("SLURM_STEP_NODELIST"));
    // By default a port that is unlikely to be the same for two steps on a host, below the system's ephemeral ports.
    launch.master_port = variables.number_or("MASTER_PORT", 1, 65535, 20000 + job % 1000 * 10 + step % 10);
    // The numbers of this host's tasks, as in 4,5,6,7.
    if (const std::string tasks = variables.text("SLURM_GTIDS"); !tasks.empty())
        launch.local_world_size = 1 + int(std::ranges::count(tasks, ','));
    // With --mpi=none or pmi2 MPI_Init of an Open MPI that is built for PMIx ends the process.
    launch.mpi = variables.has("PMIX_RANK");
    const int rank = variables.number_or("PMIX_RANK", 0, MAX_RANKS - 1, launch.rank);
    ENSURE(rank == launch.rank,
           "SLURM_PROCID=%d, but PMIX_RANK=%d: they come from two launchers; start with one of them", launch.rank,
           rank);
}

// Refuses fewer ranks than processes. More ranks are allowed: a Slurm task may be a script, or torchrun, that starts
// several. Open MPI's mpirun itself starts one Slurm task per host.
static void refuse_copies(const Launch& launch, const Variables& variables) {
    if (launch.launcher == "mpirun") return;
    for (const auto& [name, processes] : {std::pair(srun.world_size, variables.step_tasks()),
                                          {"PMI_SIZE", variables.number_or("PMI_SIZE", 1, MAX_RANKS, 1)}})
        ENSURE(processes <= launch.world_size,
               "this is one of %d processes (%s=%d), but one of %d ranks (%s): they would be copies of the same run; "
               "start with Open MPI's mpirun (not MPICH's or Intel's mpiexec), torchrun or srun --mpi=pmix, or with "
               "env -u %s",
               processes, name, processes, launch.world_size, launch.launcher.c_str(), name);
    ENSURE(launch.launcher != "single" || !variables.has("PMIX_RANK") || variables.step_tasks() == 1,
           "PMIX_RANK=%s, but nothing says how many ranks there are; start with Open MPI's mpirun, torchrun or "
           "srun --mpi=pmix",
           variables.text("PMIX_RANK").c_str());
}

Launch find_launch(const Environment& environment) {
    const Variables variables{environment};
    Launch launch;
    if (variables.set(mpirun))
        launch = read_numbers(mpirun, variables);
    else if (variables.set(torchrun))
        launch = read_numbers(torchrun, variables);
    else if (variables.step_tasks() > 1)
        launch = read_numbers(srun, variables);
    launch.attempt = variables.number_or("SLURM_RESTART_COUNT", 0, MOST, 0);
    if (launch.launcher == "mpirun" && variables.set(torchrun)) {
        const Launch other = read_numbers(torchrun, variables);
        ENSURE(launch.rank == other.rank && launch.world_size == other.world_size,
               "mpirun says rank %d of %d, but RANK=%d and WORLD_SIZE=%d: they contradict each other; start with one "
               "launcher, or with env -u RANK",
               launch.rank, launch.world_size, other.rank, other.world_size);
    }
    refuse_copies(launch, variables);
    launch.mpi = launch.launcher == "mpirun";
    if (launch.launcher == "torchrun") add_torchrun(launch, variables);
    if (launch.launcher == "srun") add_srun(launch, variables);
    const char* secret = environment("TRAIN_GPT2_SECRET");  // an empty one is refused, and not taken for none
    if (secret && launch.world_size > 1 && !launch.mpi) launch.secret = secret;
    ENSURE(!secret || strlen(secret) >= 16,
           "TRAIN_GPT2_SECRET has %zu characters, and needs at least 16; openssl rand -hex 16 makes one",
           strlen(secret));
    const bool alone = launch.launcher == "single";
    if (alone || (launch.launcher == "torchrun" && launch.world_size > 1))
        launch.incomplete = variables.incomplete({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"});
    if (alone && variables.in_step() && launch.incomplete.empty())
        launch.incomplete = variables.incomplete({"SLURM_STEP_ID", srun.world_size, srun.rank});
    const int tasks = variables.number_or("SLURM_NTASKS", 1, MAX_RANKS, 1);
    if (alone && tasks > 1 && variables.step_tasks() == 0)
        launch.note = format(" (SLURM_NTASKS=%d, but srun did not start this process)", tasks);
    return launch;
}

std::string describe_launch(const Launch& launch) {
    std::string out = "single process";
    if (launch.launcher != "single")
        out = format("%s, rank %d of %d, local rank %d", launch.launcher.c_str(), launch.rank, launch.world_size,
                     launch.local_rank);
    if (launch.launcher != "single" && launch.local_world_size > 0) out += format(" of %d", launch.local_world_size);
    out += " on " + host_name();
    if (launch.attempt > 0) out += format(", restart %d", launch.attempt);
    return out + launch.note;
}

// Takes the text before the first comma outside of brackets, and each bracket's first number.
std::string first_host(const std::string& list) {
    const size_t end = list.find_first_of("[],");
    if (end == list.npos || list[end] == ',') return list.substr(0, end);
    const size_t number_end = list.find_first_of("-,]", end + 1), close = list.find(']', end + 1);
    ENSURE(list[end] == '[' && close != list.npos, "'%.100s' is not a list of hosts as in h[0-2,7],x12", list.c_str());
    return list.substr(0, end) + list.substr(end + 1, number_end - end - 1) + first_host(list.substr(close + 1));
}

void write_error_file(const std::string& message) {
    const char* path = getenv("TORCHELASTIC_ERROR_FILE");
    if (!path) return;
    // "extraInfo" has no "py_callstack": torchrun would print it, even an empty one, instead of the message. torchrun
    // prints the message as it is.
    std::ofstream(path) << format(R"({"message":{"message":%s,"extraInfo":{"timestamp":"%lld"}}})",
                                  json_quoted(message).c_str(), static_cast<long long>(time(nullptr)));
}
