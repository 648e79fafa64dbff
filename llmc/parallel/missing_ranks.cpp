#include "parallel/missing_ranks.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include "base/common.h"
#include "base/host.h"

namespace fs = std::filesystem;

static constexpr size_t MOST_NAMED = 8;  // ranks in one message

// Content of a file of a process. Empty if the process has ended, or belongs to another user.
static std::string content_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::string content;
    char buffer[4096];
    // A process that ends meanwhile is an error of read, which read() keeps to itself and a stream iterator throws.
    while (file.read(buffer, sizeof buffer), file.gcount() > 0) content.append(buffer, size_t(file.gcount()));
    return content;
}

static std::string target_of(const fs::path& link) {
    std::error_code error;
    return fs::read_symlink(link, error).string();
}

static std::vector<fs::path> entries_of(const fs::path& dir) {
    std::vector<fs::path> entries;
    std::error_code error;
    for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error))
        entries.push_back(entry->path());
    return entries;
}

// Returns -1 if the text is not a number.
static int number_of(const std::string& text) {
    int number = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() ? number : -1;
}

// Reads a variable from the format of /proc/PID/environ: NAME=value strings, each ended by a zero.
static std::string variable(const std::string& environment, const std::string& name) {
    const std::string all = '\0' + environment, wanted = '\0' + name + '=';
    const size_t at = all.find(wanted);
    return at == std::string::npos ? "" : std::string(all.c_str() + at + wanted.size());
}

static bool waits(const fs::path& process) {
    for (const fs::path& thread : entries_of(process / "task"))
        if (content_of(thread / "comm") == std::string(WAITING_THREAD) + "\n") return true;
    return false;
}

// The state of a process, as in /proc/PID/stat: R, S, D, T, ...; '?': the process has ended.
static char state_of(const fs::path& process) {
    const std::string stat = content_of(process / "stat");
    const size_t name_end = stat.rfind(") ");
    return name_end == std::string::npos ? '?' : stat[name_end + 2];
}

// Why a process does not wait in MPI_Init; empty if it waits there.
static std::string why_not_waiting(const fs::path& process, const std::string& own_program, const std::string& host) {
    const std::string who = "process " + process.filename().string() + " on " + host;
    const char state = state_of(process);
    if (state == 'T' || state == 't') return who + " is stopped";
    if (waits(process)) return "";
    const std::string program = target_of(process / "exe");
    if (!program.empty() && program != own_program) return who + " runs " + program;
    return who + (state == 'D' ? " waits for a disk or a file system" : " has not called MPI_Init yet");
}

// For each rank of this host that has a process: why it does not wait, as why_not_waiting() returns.
static std::map<int, std::string> ranks_here(const Launch& launch, const std::string& job, const std::string& proc) {
    const std::string host = host_name(), network = target_of(fs::path(proc) / "self/ns/net"),
                      own_program = target_of(fs::path(proc) / "self/exe");
    std::map<int, std::string> local_ranks;
    for (const fs::path& process : entries_of(proc)) {
        if (number_of(process.filename()) < 0) continue;
        const std::string environment = content_of(process / "environ");
        if (variable(environment, "PMIX_NAMESPACE") != job || target_of(process / "ns/net") != network) continue;
        const int rank = number_of(variable(environment, "PMIX_RANK"));
        if (rank < 0 || rank >= launch.world_size) continue;
        const std::string reason = why_not_waiting(process, own_program, host);
        // A rank may be several processes: a script, and the program that it waits for.
        const auto [entry, first] = local_ranks.try_emplace(rank, reason);
        if (!first && !entry->second.empty()) entry->second = reason;
    }
    return local_ranks;
}

MissingRanks find_missing_ranks(const Launch& launch, const std::string& job, const std::string& proc) {
    const std::string host = host_name();
    const std::map<int, std::string> local_ranks = ranks_here(launch, job, proc);
    std::vector<std::string> missing;
    int first = launch.rank;  // lowest rank on this host that waits in MPI_Init
    for (const auto& [rank, reason] : local_ranks) {
        if (reason.empty()) first = std::min(first, rank);
        if (!reason.empty()) missing.push_back(format("rank %d (%s)", rank, reason.c_str()));
    }
    const int absent = launch.local_world_size - int(local_ranks.size());  // negative if local_world_size is unknown
    for (int rank = 0; absent > 0 && launch.local_world_size == launch.world_size && rank < launch.world_size; rank++)
        if (!local_ranks.contains(rank)) missing.push_back(format("rank %d (no process on %s)", rank, host.c_str()));
    if (absent > 0 && launch.local_world_size < launch.world_size)
        missing.push_back(
            format("%d of the %d ranks on %s (no process)", absent, launch.local_world_size, host.c_str()));

    MissingRanks result;
    result.found = !missing.empty();
    result.reports = launch.rank == first;
    for (size_t i = 0; i < std::min(missing.size(), MOST_NAMED); i++) result.text += (i ? ", " : "") + missing[i];
    if (missing.size() > MOST_NAMED) result.text += format(" and %zu more", missing.size() - MOST_NAMED);
    if (!result.found && launch.local_world_size == launch.world_size)
        result.text = format("MPI_Init, which all %d ranks on %s have called", launch.world_size, host.c_str());
    else if (!result.found)
        result.text =
            format("ranks on other hosts (the %zu on %s have called MPI_Init)", local_ranks.size(), host.c_str());
    return result;
}
