#include "commands/watch_ranks.h"

#include <filesystem>
#include <random>

#include "base/host.h"
#include "train/run.h"

// A name that nobody can guess: others may write to the folder for temporary files.
static std::string unused_folder() {
    std::error_code none;
    const std::filesystem::path parent = std::filesystem::temp_directory_path(none);
    std::random_device random;
    return ((none ? "/tmp" : parent) / format("train_gpt2_%08x%08x", random(), random())).string();
}

void watch_ranks(const Options& o, const Launch& launch, Comm& comm) {
    WatchdogOptions options = {timeouts_of(o), "", launch, o.tensor_parallel};
    start_watchdog(comm, options);
    if (comm.world_size == 1) return;  // its sentence says all that a report would say
    options.output = comm.all_gather_text(comm.rank == 0 ? unused_folder() : "")[0];
    const std::vector<std::string> hosts = comm.all_gather_text(host_name());
    start_watchdog(comm, options);
    comm.watchdog->set_hosts(hosts);
    comm.watchdog->set_output_is_shared(std::count(hosts.begin(), hosts.end(), hosts[0]) == int64_t(hosts.size()));
}
