#include "base/host.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>
#include <sys/resource.h>
#if defined(__linux__)
#include <malloc.h>
#endif

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <latch>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "base/print.h"

int openmp_threads() {
    int threads = 1;
#pragma omp parallel
#pragma omp single
    threads = omp_get_num_threads();
    return threads;
}

void check_threads(int threads) {
    constexpr int most = 4096;
    const char* wanted = getenv("OMP_NUM_THREADS");  // libgomp takes 4294967297 as 1
    ENSURE(threads <= most && (!wanted || std::strtol(wanted, nullptr, 10) <= most),
           "OMP_NUM_THREADS=%s is more than %d threads; set it to the number of cores",
           wanted ? wanted : std::to_string(threads).c_str(), most);
    std::vector<std::thread> others;
    std::latch end(1);
    try {
        while (int(others.size()) + 1 < threads) others.emplace_back([&] { end.wait(); });
    } catch (const std::system_error&) {  // the number that could be started is reported below
    }
    end.count_down();
    for (std::thread& thread : others) thread.join();
    const int can = int(others.size()) + 1;
    ENSURE(can == threads,
           "%d threads are wanted, and %d can be started (ulimit -u, ulimit -v); set OMP_NUM_THREADS=%d", threads, can,
           can);
}

#if defined(__linux__)
static cpu_set_t cores_at_start() {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores)) CPU_ZERO(&cores);  // more cores than a cpu_set_t has: no binding
    return cores;
}
static const cpu_set_t process_cores = cores_at_start();

static constexpr const char* BINDING[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"};

void bind_threads() {
    if (std::ranges::any_of(BINDING, getenv)) return;
    if (openmp_threads() != CPU_COUNT(&process_cores)) return;
#pragma omp parallel
    {
        int core = 0;
        for (int before = omp_get_thread_num(); before > 0 || !CPU_ISSET(core, &process_cores); core++)
            before -= CPU_ISSET(core, &process_cores) ? 1 : 0;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        sched_setaffinity(0, sizeof one, &one);
    }
}

void yield_to_training() {
    if (CPU_COUNT(&process_cores)) sched_setaffinity(0, sizeof process_cores, &process_cores);
    setpriority(PRIO_PROCESS, id_t(gettid()), 10);
}

// OpenMP has bound this thread to the first of its places.
void unbind() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int place = 0; place < omp_get_num_places(); place++) {
        std::vector<int> ids(size_t(omp_get_place_num_procs(place)));
        omp_get_place_proc_ids(place, ids.data());
        for (const int id : ids) CPU_SET(id, &cores);
    }
    if (CPU_COUNT(&cores)) sched_setaffinity(0, sizeof cores, &cores);
    for (const char* setting : BINDING) unsetenv(setting);
}

// omp_get_num_procs counts the cores of the calling thread, to which bind_threads leaves one.
static int cores_of_process() { return std::max(CPU_COUNT(&process_cores), omp_get_num_procs()); }

// glibc reserves 64 MiB of addresses for each thread that allocates. Under `ulimit -v` all threads share one heap.
__attribute__((constructor)) static void limit_heaps() {
    if (address_space().limit < INT64_MAX) mallopt(M_ARENA_MAX, 1);
}
#else
static int cores_of_process() { return omp_get_num_procs(); }
void bind_threads() {}
void yield_to_training() {}
void unbind() {}
#endif

double cores_available() { return std::min(double(cores_of_process()), cpu_quota()); }

// Whether OMP_NUM_THREADS has what libgomp takes: numbers above 0 with commas between them. It ignores another value,
// and says so.
static bool has_thread_count() {
    const char* value = getenv("OMP_NUM_THREADS");
    for (char* end; value && std::strtol(value, &end, 10) > 0; value = end + 1) {
        while (std::isspace(uint8_t(*end))) end++;
        if (*end != ',') return !*end;
    }
    return false;
}

// CPU ranks of a host share its cores, unless mpirun has bound each rank to cores of its own. They share a CPU quota.
ThreadChoice choose_threads(int ranks) {
    const int most = omp_get_max_threads(), cores = int(sysconf(_SC_NPROCESSORS_ONLN)), own = cores_of_process();
    if (has_thread_count()) return {most, "OMP_NUM_THREADS"};
    const std::string shared = ranks > 1 ? format(", shared by %d ranks", ranks) : "";
    ThreadChoice choice = {std::max(1, cores / std::max(1, ranks)), counted(cores, "core") + shared};
    if (own < cores) choice = {own, format("bound to %d of %d cores", own, cores)};
    const double quota = cpu_quota(), part = std::max(1.0, std::floor(std::ceil(quota) / std::max(1, ranks)));
    if (part < choice.threads) choice = {int(part), format("a CPU quota of %g of %d cores", quota, cores) + shared};
    if (most < choice.threads) choice = {most, "OpenMP's variables"};
    return choice;
}

std::string describe_threads(int ranks) {
    const ThreadChoice choice = choose_threads(ranks);
    const int threads = openmp_threads();
    return format("%d: ", threads) + (threads < choice.threads ? "OpenMP's variables" : choice.limit);
}

// Limits how long a waiting thread spins before it sleeps: 4000 turns of libgomp, 100 us on an AMD EPYC. libgomp's
// default is 8 ms there, libomp's 200 ms. A thread that spins until a descheduled thread returns wastes its core:
// beside one busy thread on two cores, training then takes 2 times as long as alone, and with this limit 1.5 times.
// libgomp reads its environment in its constructor, which runs after this one if libgomp is linked statically
// (mk/find.mk), and libomp at the first parallel region. Settings of the user take precedence.
__attribute__((constructor(101))) static void prepare_openmp() {
    if (const char* threads = getenv("OMP_NUM_THREADS"); threads && !*threads) unsetenv("OMP_NUM_THREADS");
    if (getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "4000", 0);
    // In ms, the smallest value that every version of libomp accepts.
    if (!getenv("KMP_LIBRARY")) setenv("KMP_BLOCKTIME", "1", 0);
}

// ---- memory

// Returns the number after `name` in a file such as /proc/meminfo, `otherwise` if there is none. name "": in line 1.
static int64_t number_in(const std::string& path, const std::string& name, int64_t otherwise) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        int64_t value;
        if (line.starts_with(name)) return std::istringstream(line.substr(name.size())) >> value ? value : otherwise;
    }
    return otherwise;
}

// Returns the limit of one control group's folder. File cache counts as available: the kernel drops it before it kills.
static MemoryLimit limit_in(const std::string& folder, bool version_2) {
    int64_t limit = number_in(folder + (version_2 ? "memory.max" : "memory.limit_in_bytes"), "", INT64_MAX);
    if (version_2)
        limit = std::min(limit, number_in(folder + "memory.high", "", INT64_MAX));  // the kernel throttles above it
    if (limit > INT64_MAX / 2) return {};  // version 1 has a large number for no limit
    const std::string stat = folder + "memory.stat", all = version_2 ? "" : "total_";
    const int64_t cache = number_in(stat, all + "active_file ", 0) + number_in(stat, all + "inactive_file ", 0);
    const int64_t used = number_in(folder + (version_2 ? "memory.current" : "memory.usage_in_bytes"), "", 0);
    return {limit, limit - used + cache};
}

// Returns the folders of this process's control group with the controller and of its parents, and whether each is of
// version 2. Lines of /proc/self/cgroup: "0::/a/b" (version 2), "9:memory:/a/b" or "9:cpu,memory:/a/b" (version 1).
static std::vector<std::pair<std::string, bool>> groups_with(const std::string& controller, const std::string& root) {
    std::ifstream file(root + "/proc/self/cgroup");
    std::vector<std::pair<std::string, bool>> groups;
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = format(",%s,", line.substr(first + 1, second - first - 1).c_str());
        const bool version_2 = controllers == ",,";
        if (!version_2 && controllers.find("," + controller + ",") == std::string::npos) continue;
        const std::string mount = root + "/sys/fs/cgroup" + (version_2 ? "" : "/" + controller);
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            while (!path.empty() && path.back() == '/') path.pop_back();
            groups.push_back({mount + path + "/", version_2});
            if (path.empty()) break;
        }
    }
    return groups;
}

MemoryLimit control_groups(const std::string& root) {
    MemoryLimit least;
    for (const auto& [folder, version_2] : groups_with("memory", root)) {
        const MemoryLimit here = limit_in(folder, version_2);
        least = {std::min(least.limit, here.limit), std::min(least.left, here.left)};
    }
    return least;
}

// cpu.max has "max 100000" or "150000 100000", in microseconds. In version 1 the quota is -1 for none.
double cpu_quota(const std::string& root) {
    double least = INFINITY;
    for (const auto& [folder, version_2] : groups_with("cpu", root)) {
        double quota = 0.0, period = 0.0;
        std::ifstream file(folder + (version_2 ? "cpu.max" : "cpu.cfs_quota_us"));
        file >> quota;
        if (!version_2) file = std::ifstream(folder + "cpu.cfs_period_us");
        file >> period;
        if (quota > 0.0 && period > 0.0) least = std::min(least, quota / period);
    }
    return least;
}

MemoryLimit address_space() {
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return {int64_t(limit.rlim_cur), int64_t(limit.rlim_cur) - pages * sysconf(_SC_PAGESIZE)};
}

int64_t host_bytes_left(int processes) {
    const int64_t machine = 1024 * number_in("/proc/meminfo", "MemAvailable:", INT64_MAX / 1024);
    const int64_t part = std::min(machine, control_groups().left) / processes;
    return part - std::min<int64_t>(128 << 20, part / 4);
}

int64_t host_bytes_free(int processes) {
    constexpr int64_t stacks = 20 << 20;  // two threads, which load data and write checkpoints, need them
    return std::max<int64_t>(0, std::min(host_bytes_left(processes), address_space().left - stacks));
}
