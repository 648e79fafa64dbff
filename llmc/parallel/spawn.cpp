#include "parallel/launch.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#endif

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "base/files.h"
#include "base/host.h"
#include "base/print.h"
#include "base/signals.h"
#include "parallel/comm.h"
#include "parallel/rendezvous.h"

static constexpr unsigned SECONDS_TO_END = 10;  // time from the failure of a rank until the others are killed

static void become_rank(int rank, int world_size, int port, char** argv) {
    for (const auto& [name, value] : {std::pair("RANK", rank),
                                      {"LOCAL_RANK", rank},
                                      {"WORLD_SIZE", world_size},
                                      {"LOCAL_WORLD_SIZE", world_size},
                                      {"MASTER_PORT", port}})
        setenv(name, std::to_string(value).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    unbind();
    execvp(argv[0], argv);
    print_message(format("error: rank %d: %s cannot be started: %s", rank, argv[0], strerror(errno)));
}

// Gives this process a network of its own, which has only loopback: mpirun listens on all addresses, and a byte sent to
// Open MPI 4's stops it until the connection ends. As a user this takes a user namespace with the same user.
static void hide_mpirun() {
#ifdef __linux__
    const std::string map = format("%d %d 1", int(geteuid()), int(geteuid()));
    const bool as_root = unshare(CLONE_NEWNET) == 0;
    if (!as_root && unshare(CLONE_NEWUSER) == 0) std::ofstream("/proc/self/uid_map") << map;
    if (as_root || unshare(CLONE_NEWNET) == 0) {
        ifreq loopback = {};
        strcpy(loopback.ifr_name, "lo");
        loopback.ifr_flags = IFF_UP;
        ioctl(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), SIOCSIFFLAGS, &loopback);
        return;
    }
#endif
    print_message("warning: mpirun listens on all addresses, for want of a network namespace: trusted networks only");
}

// At SIGTERM, SIGINT and SIGHUP mpirun kills the ranks within 2 s (Open MPI 4) or 0.5 s (Open MPI 5), too early for a
// save. systemd and Slurm send such a signal to every process of a job, so mpirun starts with these blocked, which does
// not block them in its ranks. It forwards SIGUSR1 at once, also when the process that supervises it is killed.
static constexpr int MPIRUN_KILLS_AT[] = {SIGINT, SIGTERM, SIGHUP};

static void block_in_mpirun() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int number : MPIRUN_KILLS_AT) sigaddset(&signals, number);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    signal(SIGUSR1, SIG_DFL);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGUSR1);
#endif
}

static void become_mpirun(int count, char** argv) {
    const std::string number = std::to_string(count);
    std::vector<const char*> words = {"mpirun", "-np", number.c_str()};
    for (char** word = argv; *word; word++) words.push_back(*word);
    words.push_back(nullptr);
    // Variables of Open MPI 4 and 5: ranks are not bound to cores, may be more than the cores, stay on this machine if
    // a scheduler has granted several, and exchange data by shared memory. Without a remote shell, no ssh is needed.
    for (const auto& [name, value] : {std::pair("OMPI_MCA_hwloc_base_binding_policy", "none"),
                                      {"PRTE_MCA_hwloc_default_binding_policy", "none"},
                                      {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                      {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
                                      {"OMPI_MCA_ras", "^slurm,tm,lsf,gridengine,alps"},
                                      {"PRTE_MCA_ras", "^slurm,pbs,lsf,gridengine"},
                                      {"OMPI_MCA_plm_rsh_agent", ""},
                                      {"OMPI_MCA_pml", "ob1"},
                                      {"OMPI_MCA_btl", "^tcp,openib,ofi,uct,usnic"}})
        setenv(name, value, 0);
    if (geteuid() == 0)
        for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) setenv(name, "1", 0);
    if (!getpwuid(geteuid())) setenv("HOME", "/", 0);  // if both are missing, the PMIx of Open MPI 4 crashes
    setenv("TRAIN_GPT2_SAVES", format("%s:%d", host_name().c_str(), int(getppid())).c_str(), 1);
    unbind();
    hide_mpirun();
    block_in_mpirun();
    execvp(words[0], const_cast<char**>(words.data()));
    print_message(format("error: --ranks %d needs mpirun: %s; apt-get install openmpi-bin", count, strerror(errno)));
}

// Starts a process, in which `become` executes a program. The ranks have a process group of their own, so that Ctrl-C
// reaches them once, through this process.
static pid_t start(pid_t group, const sigset_t& signals, const std::function<void()>& become) {
    const pid_t parent = getpid(), pid = fork();
    if (pid < 0) fail(EXIT_INTERNAL, "no process can be started for a rank: %s", strerror(errno));
    setpgid(pid, group ? group : pid);
    if (pid > 0) return pid;
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGTERM);
#endif
    if (getppid() != parent) _exit(EXIT_INTERNAL);
    sigprocmask(SIG_UNBLOCK, &signals, nullptr);
    become();
    _exit(EXIT_USAGE);
}

// Blocks the signals that `supervise` waits for. A signal that the caller ignores is left out, as SIGHUP by nohup.
static sigset_t block_signals() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int number : STOP_SIGNALS)
        if (!is_ignored(number)) sigaddset(&signals, number);
    for (int number : {SIGCHLD, SIGALRM, SIGURG}) {
        signal(number, [](int) {});  // an ignored SIGCHLD would not arrive
        sigaddset(&signals, number);
    }
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    return signals;
}

// Waits until all processes have ended: mpirun, or all ranks.
static int supervise(std::vector<pid_t> processes, bool mpirun, const sigset_t& signals) {
    const auto signal_all = [&](int number) {
        for (const pid_t pid : processes)
            if (pid > 0) kill(pid, number);
    };
    int exit_code = 0, replaced = 0, sent = 0;  // replaced: the signal in whose place mpirun got SIGUSR1
    // mpirun drops a signal that comes before its ranks exist, or hangs at its end (Open MPI 4.1.4). So the first one
    // waits until a rank asks for it by SIGURG.
    bool waits = mpirun;
    double first_signal = 0.0;
    for (size_t running = processes.size(); running > 0;) {
        int number = 0;
        sigwait(&signals, &number);
        if (number == SIGALRM) signal_all(SIGKILL);
        if (number == SIGURG && std::exchange(waits, false) && sent) signal_all(sent);
        if (std::ranges::count(STOP_SIGNALS, number)) {
            if (first_signal == 0.0) {
                first_signal = seconds_now();
            } else if (is_second_request(number, first_signal)) {
                waits = false;
                alarm(SECONDS_TO_END);  // SIGALRM then kills ranks that hang
            } else {
                continue;
            }
            const bool replace = mpirun && std::ranges::count(MPIRUN_KILLS_AT, number);
            if (replace) replaced = number;
            sent = replace ? SIGUSR1 : number;
            if (!waits) signal_all(sent);
        }
        std::vector<std::pair<size_t, int>> ended;
        for (size_t i = 0; i < processes.size(); i++) {
            int status = 0;
            if (processes[i] == 0 || waitpid(processes[i], &status, WNOHANG) <= 0) continue;
            ended.emplace_back(i, status);
            processes[i] = 0;
        }
        running -= ended.size();
        // The end of a rank by a signal is the cause of errors of others, which may have ended, too.
        std::stable_partition(ended.begin(), ended.end(), [](const auto& end) { return WIFSIGNALED(end.second); });
        for (const auto& [i, status] : ended) {
            int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            if (replaced && code == 128 + SIGUSR1) code = 128 + replaced;
            if (code == 0 || (exit_code != 0 && exit_code != EXIT_PREEMPTED)) continue;
            exit_code = code;
            if (code == EXIT_PREEMPTED) continue;
            rlimit stack = {};
            const bool is_small = mpirun && getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < 1 << 20;
            if (WIFSIGNALED(status))
                print_message(format("error: %s was ended by signal %d (%s)%s",
                                     mpirun ? "mpirun" : format("rank %zu", i).c_str(), WTERMSIG(status),
                                     strsignal(WTERMSIG(status)),
                                     is_small ? "; its stack may be too small: give ulimit -s 1024 or more" : ""));
            signal_all(SIGTERM);
            alarm(SECONDS_TO_END);
        }
    }
    return exit_code;
}

int spawn_processes(int count, char** argv) {
    const sigset_t signals = block_signals();
    const int port = 20000 + getpid() % 10000;  // rank 0 takes the first free port above it
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    if (const std::string secret = make_secret(); !secret.empty()) setenv("TRAIN_GPT2_SECRET", secret.c_str(), 0);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < count; rank++)
        ranks.push_back(start(rank == 0 ? 0 : ranks[0], signals, [&] { become_rank(rank, count, port, argv); }));
    return supervise(ranks, false, signals);
}

static int count_ranks(int ranks) {
    const bool cpu = device_memory_is_host();
    ENSURE(ranks > 0 || !cpu, "--ranks all takes every GPU, but this program is for the CPU: give a number of ranks");
    const int gpus = cpu ? 0 : device_count(), count = ranks < 0 ? gpus : ranks;
    ENSURE(cpu || count <= gpus, "--ranks %d, but there %s on this machine (CUDA_VISIBLE_DEVICES chooses them)", count,
           gpus == 1 ? "is 1 GPU" : format("are %d GPUs", gpus).c_str());
    ENSURE(cpu ? built_with_mpi() : built_with_nccl(),
           "--ranks needs %s, which this build lacks: apt-get install %s, and run make", cpu ? "MPI" : "NCCL",
           cpu ? "libopenmpi-dev" : "libnccl-dev");
    return count;
}

// Refuses a folder for temporary files in which mpirun can make none: its own messages do not name it.
static void check_temporary_folder() {
    const char* folder = "/tmp";
    for (const char* name : {"TMP", "TEMP", "TMPDIR", "OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"})
        if (const char* value = getenv(name)) folder = value;
    std::error_code ignored;
    std::filesystem::create_directories(folder, ignored);  // as mpirun does
    std::string path = std::string(folder) + "/train_gpt2_XXXXXX";
    if (!mkdtemp(path.data()))
        fail_errno(EXIT_CANNOT_CREATE, folder, "hold mpirun's files, for which TMPDIR may name another folder");
    rmdir(path.c_str());
}

// With too few open files mpirun hangs, or does not say so. It takes 27, and 4 to 4.5 for each rank (Open MPI 4.1.4).
static void allow_open_files(int ranks) {
    const rlim_t needed = 64 + 5 * rlim_t(ranks);
    rlimit files = {};
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= needed) return;
    files.rlim_cur = needed;
    ENSURE(setrlimit(RLIMIT_NOFILE, &files) == 0,
           "--ranks %d takes up to %d open files, but the hard limit is %d (ulimit -Hn): raise it, or give fewer ranks",
           ranks, int(needed), int(files.rlim_max));
}

int spawn_ranks(int ranks, char** argv, bool reads_stdin) {
    // Ranks cannot read the terminal, as a process group in the background. mpirun also reads what no rank asks for.
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0 && (!reads_stdin || isatty(0))) dup2(null, 0);
    const sigset_t signals = block_signals();  // before a driver of the device starts threads
    const int count = count_ranks(ranks);
    if (!device_memory_is_host()) return spawn_processes(count, argv);
    check_temporary_folder();
    allow_open_files(count);
    return supervise({start(0, signals, [&] { become_mpirun(count, argv); })}, true, signals);
}
