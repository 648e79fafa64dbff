// same_ranks.cpp: refuses ranks that were not started alike.
#include <set>

#include "base/common.h"
#include "base/device.h"
#include "base/files.h"
#include "parallel/comm.h"
#include "train/options.h"
#include "train/start.h"

// Returns the same for two builds of the same sources, by other compilers for example.
static std::string describe_program() {
    return version() + (device_memory_is_host() ? " for the CPU" : " for GPUs") + ", sources " + SOURCES_CHECKSUM;
}

void check_same_command(Comm& comm, Command command) {
    const std::vector<std::string> names = comm.all_gather_text(command_name(command));
    for (size_t rank = 1; rank < names.size(); rank++)
        ENSURE(names[rank] == names[0], "rank %zu runs %s, and rank 0 runs %s: start all ranks with one command", rank,
               names[rank].c_str(), names[0].c_str());
}

void compare_ranks(Comm& comm, const Options& o, Json facts) {
    facts["program"] = describe_program();
    const std::set<std::string> may_differ = {"quiet", "trace", "config"};
    const Json options = options_json(o);
    for (const auto& [name, value] : options.members)
        if (!may_differ.contains(name)) facts["--" + name] = value;
    const std::vector<std::string> ranks = comm.all_gather_text(json_text(facts));
    const Json first = parse_json_object(ranks[0], "rank 0");
    for (size_t rank = 1; rank < ranks.size(); rank++) {
        const Json other = parse_json_object(ranks[rank], "a rank");
        // Backwards: different data say more than different options, whose names begin with a dash.
        for (auto field = first.members.rbegin(); field != first.members.rend(); ++field) {
            const std::string name = field->first, here = json_text(field->second),
                              there = other.contains(name) ? json_text(other[name]) : "nothing";
            ENSURE(there == here, "rank %zu differs from rank 0: %s %s there, %s on rank 0", rank, name.c_str(),
                   there.c_str(), here.c_str());
        }
    }
}

std::string differing_rounding(Comm& comm) {
    const char* self = "/proc/self/exe";
    const std::vector<std::string> isas = comm.all_gather_text(device_info().cpu_isa),
                                   builds = comm.all_gather_text(path_exists(self) ? hex(checksum_file(self).xxh3)
                                                                                   : "");  // "": not Linux
    for (size_t rank = 1; rank < isas.size(); rank++) {
        if (isas[rank] != isas[0])
            return format("rank %zu has CPU_ISA=%s, rank 0 has %s", rank, isas[rank].c_str(), isas[0].c_str());
        if (builds[rank] != builds[0]) return format("rank %zu runs another build of the sources than rank 0", rank);
    }
    return "";
}
