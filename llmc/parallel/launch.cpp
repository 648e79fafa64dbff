#include "parallel/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <fstream>
#include <limits>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/host.h"
#include "base/terminal.h"

// ---- the environment

static constexpr int MAX_ATTEMPTS = 1000000;

namespace {
// The variables or options in which a launcher gives the rank and the world size.
struct Names {
    const char *launcher, *rank, *world_size, *local_rank, *local_world_size;
};
constexpr Names options_names = {"options", "--rank", "--world-size", "--local-rank", ""};
constexpr Names mpirun_names = {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names torchrun_names = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
// SLURM_NTASKS does not serve as world size: a batch script has it too, and under mpirun it differs from host to host.
constexpr Names srun_names = {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""};

struct Variables {
    const Environment& environment;

    std::string text(const char* name) const {
        const char* value = *name ? environment(name) : nullptr;
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

    int slurm_restarts() const { return number_or("SLURM_RESTART_COUNT", 0, MAX_ATTEMPTS, 0); }
    bool mpirun() const { return has(mpirun_names.world_size); }
    bool torchrun() const { return has("RANK") && has("WORLD_SIZE") && has("MASTER_ADDR"); }
    // The number of tasks of a Slurm step; 0 in a batch script, which is one process for any SLURM_NTASKS.
    int step_tasks() const { return has("SLURM_STEP_ID") ? number_or(srun_names.world_size, 1, MAX_RANKS, 0) : 0; }
};
}  // namespace

// A setting as the user or the launcher writes it: "--rank 3" or "RANK=3".
static std::string setting_text(const char* name, int value) {
    return format(name[0] == '-' ? "%s %d" : "%s=%d", name, value);
}

static void check_rank(const Names& names, int rank, int world_size) {
    ENSURE(rank < world_size, "%s, but %s: ranks are 0 to %d", setting_text(names.rank, rank).c_str(),
           setting_text(names.world_size, world_size).c_str(), world_size - 1);
}

// For a single process the local rank is known even if the launcher does not set it.
static void fill_local(Launch& launch) {
    if (launch.world_size == 1) launch.local_rank = 0, launch.local_world_size = 1;
}

static Launch read_numbers(const Names& names, const Variables& variables) {
    Launch launch;
    launch.launcher = names.launcher;
    launch.world_size = variables.number(names.world_size, 1, MAX_RANKS);
    launch.rank = variables.number(names.rank, 0, MAX_RANKS - 1);
    check_rank(names, launch.rank, launch.world_size);
    launch.local_world_size = variables.number_or(names.local_world_size, 1, launch.world_size, 0);
    const int local_ranks = launch.local_world_size ? launch.local_world_size : launch.world_size;
    launch.local_rank = variables.number_or(names.local_rank, 0, local_ranks - 1, -1);
    fill_local(launch);
    return launch;
}

// ---- each launcher

// Parses HOST:PORT.
static void read_rendezvous(Launch& launch, const std::string& text) {
    const size_t colon = text.rfind(':');
    std::string host = text.substr(0, colon);
    int port = 0;
    const char* end = text.data() + text.size();
    const bool whole = colon != std::string::npos && std::from_chars(text.data() + colon + 1, end, port).ptr == end;
    const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (brackets) host = host.substr(1, host.size() - 2);
    const bool named = !host.empty() && (brackets || host.find_first_of(":[]") == std::string::npos);
    ENSURE(whole && named && port >= 1 && port <= 65535,
           "--rendezvous '%s' is not HOST:PORT, as in h0:29500 or [fe80::1]:29500", text.c_str());
    launch.master_addr = host, launch.master_port = port;
}

static bool any_given(const LaunchOptions& options) {
    return options.rank >= 0 || options.world_size >= 0 || options.local_rank >= 0 || !options.rendezvous.empty() ||
           !options.run_id.empty();
}

static Launch from_options(const LaunchOptions& options, const Variables& variables) {
    ENSURE(options.rank >= 0 && options.world_size >= 0,
           "%s is missing: give --rank, --world-size and --rendezvous together, or none of them under mpirun, torchrun "
           "or srun",
           options.rank < 0 ? "--rank" : "--world-size");
    ENSURE(options.world_size >= 1 && options.world_size <= MAX_RANKS, "--world-size %d is not a number from 1 to %d",
           options.world_size, MAX_RANKS);
    check_rank(options_names, options.rank, options.world_size);
    ENSURE(options.local_rank < options.world_size, "--local-rank %d, but --world-size %d: local ranks are 0 to %d",
           options.local_rank, options.world_size, options.world_size - 1);
    ENSURE(options.world_size == 1 || !options.rendezvous.empty(),
           "--rendezvous HOST:PORT is missing: the address at which rank 0 of %d waits for the others",
           options.world_size);
    Launch launch;
    launch.launcher = options_names.launcher;
    launch.rank = options.rank, launch.world_size = options.world_size;
    launch.local_rank = options.local_rank, launch.local_world_size = 0;
    fill_local(launch);
    if (!options.rendezvous.empty()) read_rendezvous(launch, options.rendezvous);
    launch.run_id = options.run_id;
    launch.attempt = variables.slurm_restarts();
    launch.mpi = variables.mpirun();  // check_other_launchers compares mpirun's numbers
    return launch;
}

static Launch from_mpirun(const Variables& variables) {
    Launch launch = read_numbers(mpirun_names, variables);
    launch.mpi = true;
    launch.attempt = variables.slurm_restarts();
    launch.attempt += variables.number_or("TRAIN_GPT2_RESTARTS", 0, MAX_ATTEMPTS, 0);  // of --max-restarts
    launch.first_step = variables.number_or("TRAIN_GPT2_FIRST_STEP", 0, std::numeric_limits<int>::max(), -1);
    // The mpirun of Open MPI 5 is PRRTE's, which forgets the exit code when it loses the connection to a host.
    if (variables.has("PRTE_LAUNCHED") && launch.local_world_size > 0 && launch.local_world_size < launch.world_size)
        launch.note =
            "Open MPI 5's mpirun may end with exit code 0 when it loses a host: the log's last step says whether a run "
            "is complete";
    return launch;
}

// launch.mpi stays false: under torchrun MPI_Init would succeed, but as rank 0 of 1 in every process.
static Launch from_torchrun(const Variables& variables) {
    Launch launch = read_numbers(torchrun_names, variables);
    launch.master_addr = variables.text("MASTER_ADDR");
    launch.master_port = launch.world_size > 1 ? variables.number("MASTER_PORT", 1, 65535)
                                               : variables.number_or("MASTER_PORT", 1, 65535, 0);
    launch.run_id = variables.text("TORCHELASTIC_RUN_ID");
    launch.attempt = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0, MAX_ATTEMPTS, 0);
    return launch;
}

// A port that is unlikely to be the same for two job steps on one host, below the ephemeral ports of the system.
static int slurm_port(int64_t job, int64_t step) { return int(20000 + job % 1000 * 10 + step % 10); }

static Launch from_srun(const Variables& variables) {
    Launch launch = read_numbers(srun_names, variables);
    constexpr int most = std::numeric_limits<int>::max();
    const int job = variables.number_or("SLURM_JOB_ID", 0, most, 0), step = variables.number("SLURM_STEP_ID", 0, most);
    launch.run_id = format("%d.%d", job, step);
    launch.attempt = variables.slurm_restarts();
    // SLURM_LAUNCH_NODE_IPADDR is the host on which srun was called, which need not be rank 0's host.
    const std::string hosts = variables.text("SLURM_STEP_NODELIST");
    if (!hosts.empty()) launch.master_addr = first_host(hosts);
    launch.master_port = variables.number_or("MASTER_PORT", 1, 65535, slurm_port(job, step));
    // With --mpi=none or pmi2 MPI_Init of an Open MPI that is built for PMIx ends the process.
    launch.mpi = variables.has("PMIX_RANK");
    if (launch.mpi) {
        const int rank = variables.number("PMIX_RANK", 0, MAX_RANKS - 1);
        ENSURE(rank == launch.rank,
               "SLURM_PROCID=%d, but PMIX_RANK=%d: they come from two launchers; start with one of them", launch.rank,
               rank);
    }
    return launch;
}

// The launch of a process for which no launcher was found: a single process. Refuses an environment that shows that
// there are several processes.
static Launch single_process(const Variables& variables) {
    ENSURE(!variables.has("PMIX_RANK") || variables.step_tasks() == 1,
           "PMIX_RANK=%s, but nothing says how many ranks there are; start with Open MPI's mpirun, torchrun or srun",
           variables.text("PMIX_RANK").c_str());
    const int ranks = variables.number_or("PMI_SIZE", 1, MAX_RANKS, 1);
    ENSURE(ranks == 1,
           "this is one of %d processes (PMI_SIZE) of an mpirun that is not Open MPI's; start with Open MPI's mpirun, "
           "torchrun or srun",
           ranks);
    const int world_size = variables.has("RANK") ? variables.number_or("WORLD_SIZE", 1, MAX_RANKS, 1) : 1;
    ENSURE(world_size == 1, "RANK=%s and WORLD_SIZE=%d, but MASTER_ADDR is not set; torchrun sets all three",
           variables.text("RANK").c_str(), world_size);
    Launch launch;
    const int tasks = variables.number_or("SLURM_NTASKS", 1, MAX_RANKS, 1);
    if (tasks > 1 && variables.step_tasks() == 0)
        launch.note = format("SLURM_NTASKS=%d, but srun did not start this process", tasks);
    launch.attempt = variables.slurm_restarts();
    return launch;
}

// ---- choosing the launcher

// Two launchers that both set rank and world size must agree.
static void refuse_other_numbers(const Launch& launch, const Names& mine, const Names& other, const Launch& others) {
    if (launch.rank == others.rank && launch.world_size == others.world_size) return;
    const bool sizes = launch.world_size != others.world_size;
    const std::string ours =
        sizes ? setting_text(mine.world_size, launch.world_size)
              : setting_text(mine.rank, launch.rank) + " of " + setting_text(mine.world_size, launch.world_size);
    const std::string theirs =
        sizes ? setting_text(other.world_size, others.world_size) : setting_text(other.rank, others.rank);
    fail(EXIT_USAGE, "%s, but %s: %s and %s contradict each other; start with one of them, or with env -u %s -u %s",
         ours.c_str(), theirs.c_str(), mine.launcher, other.launcher, other.rank, other.world_size);
}

// Refuses fewer ranks than tasks, which would be copies of one run. More ranks are allowed: a task may be a script, or
// torchrun, that starts several ranks.
static void refuse_copies(const Launch& launch, const Names& mine, const char* name, int tasks) {
    ENSURE(launch.world_size >= tasks,
           "%s=%d, but %s: %d processes would be copies of the same run; start as many ranks as tasks, or with env -u "
           "%s",
           name, tasks, setting_text(mine.world_size, launch.world_size).c_str(), tasks, name);
}

// Refuses a launch that contradicts the variables of another launcher.
static void check_other_launchers(const Launch& launch, const Names& names, const Variables& variables) {
    const bool mpirun = variables.mpirun();
    if (mpirun && &names != &mpirun_names)
        refuse_other_numbers(launch, names, mpirun_names, read_numbers(mpirun_names, variables));
    if (variables.torchrun() && &names != &torchrun_names)
        refuse_other_numbers(launch, names, torchrun_names, read_numbers(torchrun_names, variables));
    if (mpirun) return;  // mpirun itself starts one Slurm task per host
    refuse_copies(launch, names, srun_names.world_size, variables.step_tasks());
    refuse_copies(launch, names, "PMI_SIZE", variables.number_or("PMI_SIZE", 1, MAX_RANKS, 1));
}

static void check_run_id(const std::string& run_id) {
    for (unsigned char c : run_id)
        ENSURE(c > ' ' && c < 0x7f,
               "the run id has the character 0x%02x; only printable ASCII without spaces is allowed", c);
    ENSURE(run_id.size() <= size_t(MAX_RUN_ID), "the run id has %zu characters; at most %d are allowed", run_id.size(),
           MAX_RUN_ID);
}

Launch find_launch(const LaunchOptions& options, const Environment& environment) {
    const Variables variables{environment};
    const Names* names = any_given(options)           ? &options_names
                         : variables.mpirun()         ? &mpirun_names
                         : variables.torchrun()       ? &torchrun_names
                         : variables.step_tasks() > 1 ? &srun_names
                                                      : nullptr;
    Launch launch = !names                     ? single_process(variables)
                    : names == &options_names  ? from_options(options, variables)
                    : names == &mpirun_names   ? from_mpirun(variables)
                    : names == &torchrun_names ? from_torchrun(variables)
                                               : from_srun(variables);
    if (names) check_other_launchers(launch, *names, variables);
    check_run_id(launch.run_id);
    launch.error_file = variables.text("TORCHELASTIC_ERROR_FILE");
    launch.join_seconds = options.join_seconds;
    return launch;
}

// ---- ranks that this process starts

std::vector<int> parse_gpus(const std::string& text, const std::function<int()>& count) {
    std::vector<int> gpus;
    const char *at = text.data(), *const end = at + text.size();
    bool valid = text == "all";
    for (bool more = !valid; more;) {
        int gpu = 0;
        const auto [next, error] = std::from_chars(at, end, gpu);
        valid = error == std::errc() && gpu >= 0 && (next == end || *next == ',');
        more = valid && next != end;
        at = next + more;
        gpus.push_back(gpu);
    }
    const bool is_number = valid && gpus.size() == 1;
    ENSURE(valid && !(is_number && gpus[0] == 0),
           "--gpus '%s' is neither all, nor a number of GPUs from 1, nor a list such as 0,2,3", text.c_str());
    for (size_t i = 0; i < gpus.size(); i++)
        ENSURE(std::find(gpus.begin(), gpus.begin() + long(i), gpus[i]) == gpus.begin() + long(i),
               "--gpus %s names GPU %d twice; each rank needs a GPU of its own", text.c_str(), gpus[i]);
    const int available = count();
    const char* there = available == 1 ? "there is" : "there are";
    if (is_number) ENSURE(gpus[0] <= available, "--gpus %s, but %s %d on this host", text.c_str(), there, available);
    for (int gpu : gpus)
        ENSURE(is_number || gpu < available, "--gpus %s, but %s %d on this host: GPU%s 0%s", text.c_str(), there,
               available, available == 1 ? "" : "s", available == 1 ? "" : format(" to %d", available - 1).c_str());
    if (!is_number && text != "all") return gpus;
    gpus.assign(size_t(is_number ? gpus[0] : available), 0);
    for (size_t i = 0; i < gpus.size(); i++) gpus[i] = int(i);
    return gpus;
}

std::vector<Launch> launch_gpus(const GpuOptions& options, const std::vector<int>& gpus, const LaunchOptions& others,
                                const Environment& environment) {
    ENSURE(others.rank < 0 && others.world_size < 0 && others.local_rank < 0,
           "--gpus starts all ranks and numbers them; leave out --rank, --world-size and --local-rank");
    const bool several = options.nnodes > 1;
    ENSURE(several || (options.node_rank <= 0 && options.rendezvous.empty()),
           "%s is for several machines; give --nnodes too, or leave it out",
           options.node_rank > 0 ? "--node-rank" : "--rendezvous");
    ENSURE(!several || (options.node_rank >= 0 && options.node_rank < options.nnodes),
           "--nnodes %d needs --node-rank, from 0 on the first machine to %d on the last", options.nnodes,
           options.nnodes - 1);
    ENSURE(
        !several || !options.rendezvous.empty(),
        "--nnodes %d needs --rendezvous HOST:PORT, the same on all machines: the first machine and a free port of it",
        options.nnodes);
    LaunchOptions single;
    single.join_seconds = others.join_seconds;
    Launch launch = find_launch(single, environment);
    ENSURE(launch.world_size == 1,
           "--gpus starts the ranks itself, but %s has started %d processes; leave out --gpus or %s",
           launch.launcher.c_str(), launch.world_size, launch.launcher.c_str());
    const int local = int(gpus.size());
    ENSURE(int64_t(local) * options.nnodes <= MAX_RANKS, "%d machines x %d GPUs are more than %d ranks", options.nnodes,
           local, MAX_RANKS);
    launch.launcher = "--gpus", launch.mpi = false, launch.note.clear();
    launch.world_size = local * options.nnodes, launch.local_world_size = local;
    launch.run_id = others.run_id;
    check_run_id(launch.run_id);
    launch.master_addr = "127.0.0.1", launch.master_port = 0;
    if (several) read_rendezvous(launch, options.rendezvous);
    std::vector<Launch> launches(size_t(local), launch);
    for (int i = 0; i < local; i++) {
        launches[size_t(i)].rank = std::max(0, options.node_rank) * local + i;
        launches[size_t(i)].local_rank = i;
        launches[size_t(i)].gpu = gpus[size_t(i)];
    }
    return launches;
}

std::string describe_launch(const Launch& launch) {
    std::string out = launch.launcher == "single" ? "single process" : launch.launcher;
    if (launch.launcher != "single") out += format(", rank %d of %d", launch.rank, launch.world_size);
    if (launch.launcher != "single" && launch.local_rank >= 0) {
        out += format(", local rank %d", launch.local_rank);
        if (launch.local_world_size > 0) out += format(" of %d", launch.local_world_size);
    }
    if (launch.gpu >= 0 && launch.gpu != launch.local_rank) out += format(", GPU %d", launch.gpu);
    out += " on " + host_name();
    if (launch.attempt > 0) out += format(", restart %d", launch.attempt);
    if (launch.launcher == "single" && !launch.note.empty()) out += " (" + launch.note + ")";
    return out;
}

// ---- lists of hosts

static constexpr size_t MAX_HOST_NAME = 253;  // characters, as in DNS

[[noreturn]] static void refuse_list(const std::string& list) {
    const std::string shown = list.size() > 100 ? list.substr(0, 100) + "..." : list;
    fail(EXIT_USAGE, "'%s' is not a list of hosts as in h[0-2,7],x12 with names of at most %zu characters",
         shown.c_str(), MAX_HOST_NAME);
}

// Splits a list at the commas that are not inside of brackets.
static std::vector<std::string> split_list(const std::string& list, const std::string& whole) {
    std::vector<std::string> parts(1);
    bool inside = false;
    for (char c : list) {
        if (c == '[' || c == ']') {
            if (inside == (c == '[')) refuse_list(whole);
            inside = !inside;
        }
        if (c == ',' && !inside)
            parts.emplace_back();
        else
            parts.back() += c;
    }
    if (inside) refuse_list(whole);
    for (const std::string& part : parts)
        if (part.empty()) refuse_list(whole);
    return parts;
}

static int host_number(const std::string& digits, const std::string& whole) {
    int number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    const bool whole_number = error == std::errc() && end == digits.data() + digits.size();
    if (!whole_number || digits[0] == '-' || digits.size() > 9) refuse_list(whole);
    return number;
}

// The first number of the text between two brackets, with its leading zeros: "007-012,020" -> 007.
static std::string first_number(const std::string& ranges, const std::string& whole) {
    std::string first;
    for (const std::string& range : split_list(ranges, whole)) {
        const size_t dash = range.find('-');
        const std::string from = range.substr(0, dash), to = dash == std::string::npos ? from : range.substr(dash + 1);
        if (host_number(to, whole) < host_number(from, whole)) refuse_list(whole);
        if (first.empty()) first = from;
    }
    return first;
}

// The first name of one part of a list: "h[0-2,7]" -> h0.
static std::string first_name(const std::string& part, const std::string& whole) {
    std::string name;
    for (size_t at = 0; at < part.size();) {
        const size_t open = std::min(part.find('[', at), part.size()), close = part.find(']', open);
        name += part.substr(at, open - at);
        if (open == part.size()) break;
        name += first_number(part.substr(open + 1, close - open - 1), whole);
        at = close + 1;
    }
    if (name.size() > MAX_HOST_NAME) refuse_list(whole);
    return name;
}

std::string first_host(const std::string& slurm_list) {
    std::string first;
    for (const std::string& part : split_list(slurm_list, slurm_list)) {
        const std::string name = first_name(part, slurm_list);
        if (first.empty()) first = name;
    }
    return first;
}

// ---- the reason of a failure

void write_error_text(const Launch& launch, const std::string& text) {
    if (launch.error_file.empty()) return;
    // "extraInfo" has no "py_callstack": torchrun would print it, even an empty one, instead of the message. torchrun
    // prints the message as it is.
    const nlohmann::json content = {
        {"message", {{"message", text}, {"extraInfo", {{"timestamp", std::to_string(time(nullptr))}}}}}};
    std::ofstream(launch.error_file) << content.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void write_error_file(const Launch& launch, const std::string& message) {
    write_error_text(launch, message_text(message));
}
