#include "parallel/comm.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/common.h"
#include "base/print.h"
#include "parallel/watchdog.h"

void Comm::abort(int exit_code) {
    fflush(nullptr);
    _exit(exit_code);
}

void Comm::reached(const char* what, int64_t number) const {
    if (watchdog) watchdog->reached(what, number);
}

std::unique_ptr<Comm> Comm::split(int) {
    auto group = std::make_unique<Comm>();
    group->watchdog = watchdog;
    return group;
}

#ifdef USE_MPI
bool built_with_mpi() { return true; }
#else
bool built_with_mpi() { return false; }
std::unique_ptr<Comm> make_mpi_comm(const Launch&) { return nullptr; }
#endif

static std::unique_ptr<Comm> join_ranks(const Launch& launch) {
    ENSURE(launch.incomplete.empty(), "%s", launch.incomplete.c_str());
    if (launch.world_size == 1) return std::make_unique<Comm>();
    if (built_with_nccl()) return make_nccl_comm(launch);
    const bool cpu = device_memory_is_host();
    ENSURE(cpu && built_with_mpi(),
           "this is one of %d %s ranks (%s), but this build has no library that connects them: install %s and run "
           "make, or start one process",
           launch.world_size, cpu ? "CPU" : "GPU", launch.launcher.c_str(), cpu ? "libopenmpi-dev" : "NCCL");
    ENSURE(launch.mpi, "%d CPU ranks need MPI: start with mpirun -np %d%s (found: %s), or one process with --ranks %d",
           launch.world_size, launch.world_size, launch.launcher == "srun" ? " or srun --mpi=pmix" : "",
           launch.launcher.c_str(), launch.world_size);
    return make_mpi_comm(launch);
}

// Asks the process that has started mpirun (TRAIN_GPT2_SAVES=HOST:PID) for the signal that it got before, if any. If it
// was killed before, mpirun may have dropped the signal of its death, too.
static void ask_for_signal() {
    const char* value = getenv("TRAIN_GPT2_SAVES");
    const std::string starter = value ? value : "", here = host_name() + ":";
    const int pid = starter.starts_with(here) ? atoi(starter.c_str() + here.size()) : 0;
    if (pid > 0 && kill(pid, SIGURG) != 0 && errno == ESRCH) raise(SIGTERM);
}

std::unique_ptr<Comm> make_comm(const Launch& launch, std::shared_ptr<Watchdog> watchdog) {
    std::unique_ptr<Comm> comm = join_ranks(launch);
    if (launch.launcher == "mpirun") ask_for_signal();
    comm->watchdog = std::move(watchdog);
    return comm;
}

// ---- groups of ranks

std::string possible_tensor_parallel(int world_size, int heads) {
    std::vector<int> divisors;
    for (int d = 1; d <= world_size; d++)
        if (world_size % d == 0 && heads % d == 0) divisors.push_back(d);
    std::string text;
    for (size_t i = 0; i < divisors.size(); i++)
        text += format("%s%d", i == 0 ? "" : i + 1 == divisors.size() ? " or " : ", ", divisors[i]);
    return text;
}

int count_data_parallel(int world_size, int tensor_parallel, int heads) {
    ENSURE(tensor_parallel >= 1, "--tensor-parallel %d: must be at least 1", tensor_parallel);
    if (world_size % tensor_parallel == 0) return world_size / tensor_parallel;
    const bool divides_heads = heads % tensor_parallel == 0;
    const std::string more = divides_heads ? format(", or start %d ranks", round_up(world_size, tensor_parallel)) : "";
    fail(EXIT_USAGE, "--tensor-parallel %d does not divide %d rank%s%s; give %s%s", tensor_parallel, world_size,
         world_size == 1 ? "" : "s", divides_heads ? "" : format(" and %d heads", heads).c_str(),
         possible_tensor_parallel(world_size, heads).c_str(), more.c_str());
}

std::string warn_of_hosts(const std::vector<std::string>& hosts, int tensor_parallel) {
    for (size_t rank = 0; rank < hosts.size(); rank++) {
        const std::string& first = hosts[rank - rank % size_t(tensor_parallel)];
        if (hosts[rank] != first)
            return format("warning: --tensor-parallel %d: ranks on %s and %s exchange activations in every layer",
                          tensor_parallel, first.c_str(), hosts[rank].c_str());
    }
    return "";
}

Groups make_groups(Comm& world, int tensor_parallel) {
    // Ranks that divide the layers differently would wait for each other.
    const std::vector<std::string> all = world.all_gather_text(std::to_string(tensor_parallel));
    for (size_t rank = 1; rank < all.size(); rank++)
        ENSURE(all[rank] == all[0], "rank %zu differs from rank 0: --tensor-parallel %s there, %s on rank 0", rank,
               all[rank].c_str(), all[0].c_str());
    count_data_parallel(world.world_size, tensor_parallel);
    if (tensor_parallel == 1) {
        std::unique_ptr<Comm> alone = world.Comm::split(0);
        Comm& tp = *alone;
        world.connect();
        return {world, nullptr, std::move(alone), world, tp};
    }
    const std::string warning = warn_of_hosts(world.all_gather_text(host_name()), tensor_parallel);
    if (world.rank == 0 && !warning.empty()) print_message(warning);
    std::unique_ptr<Comm> own_tp = world.split(world.rank / tensor_parallel);
    std::unique_ptr<Comm> own_dp = world.split(world.rank % tensor_parallel);
    Comm &dp = *own_dp, &tp = *own_tp;
    for (Comm* comm : {&world, &tp, &dp}) comm->connect();
    return {world, std::move(own_dp), std::move(own_tp), dp, tp};
}

double Groups::exposed(const Waits& first_waits) const {
    return world.exposed(first_waits.world) + tp.exposed(first_waits.tp) + (own_dp ? dp.exposed(first_waits.dp) : 0.0);
}
