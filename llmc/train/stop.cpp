#include "train/stop.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/common.h"

// Atomic, because two signals can run the handler in two threads at the same time.
static std::atomic<bool> requested, next_signal_ends;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may use lock-free atomics only");
static std::atomic<double> stop_time = std::numeric_limits<double>::infinity();
static bool prints_lines, stderr_is_terminal;
static std::atomic<const char*> reason = "";

static double find_command_start() {
    const char* of_parent = getenv(COMMAND_START);
    return of_parent ? atof(of_parent) : seconds_now();
}
static const double started = find_command_start();  // before main

// Writes a line that begins with a newline, which ends a live line; only a terminal needs this newline. A signal
// handler may not call printf.
static void write_line(std::string_view text) {
    if (!stderr_is_terminal) text.remove_prefix(1);
    [[maybe_unused]] const ssize_t written = write(2, text.data(), text.size());
}

static const char* signal_name(int number) {
    switch (number) {
        case SIGINT:
            return "SIGINT";
        case SIGTERM:
            return "SIGTERM";
        case SIGHUP:
            return "SIGHUP";
        case SIGUSR1:
            return "SIGUSR1";
        default:
            return "SIGXCPU";
    }
}

namespace {
// A line that a signal handler may make: it allocates no memory.
struct Line {
    char text[400] = "\n";
    size_t size = 1;

    void add(const char* more) {
        const size_t bytes = std::min(strlen(more), sizeof text - 1 - size);
        memcpy(text + size, more, bytes);
        size += bytes;
    }
    // The text of a small file, up to its first newline or control character.
    void add_file(const char* path) {
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        char content[64] = "";
        const ssize_t got = fd < 0 ? 0 : read(fd, content, sizeof content - 1);
        if (fd >= 0) close(fd);
        content[std::max<ssize_t>(got, 0)] = 0;
        for (char* c = content; *c; c++)
            if (*c < ' ' || *c > '~') *c = 0;
        add(content);
    }
};
}  // namespace

// Adds " from mpirun" if the sender of a signal is known and still exists. mpirun passes the others on, but not
// SIGTERM.
static void add_sender(Line& line, int number, const siginfo_t& info) {
    if (info.si_code != SI_USER || info.si_pid <= 0) return;
    char path[32] = "/proc/", digits[12] = "";
    int n = 0;
    for (pid_t rest = info.si_pid; rest > 0; rest /= 10) digits[n++] = char('0' + rest % 10);
    size_t at = strlen(path);
    while (n > 0) path[at++] = digits[--n];
    memcpy(path + at, "/comm", sizeof "/comm");
    if (access(path, R_OK) != 0) return;
    line.add(" from ");
    const size_t name = line.size;
    line.add_file(path);
    for (const char* launcher : {"mpirun", "prterun", "orted", "prted"})
        if (number == SIGTERM && strcmp(line.text + name, launcher) == 0) line.add(", as when another rank has ended");
}

// Slurm sends SIGTERM after a SIGUSR1, and Linux repeats SIGXCPU each second, so neither counts as one of two signals.
static bool is_only_warning(int number) { return number == SIGUSR1 || number == SIGXCPU; }

static void on_signal(int number, siginfo_t* info, void*) {
    const int saved_errno = errno;
    const bool first_request = !requested.exchange(true);
    if (first_request) reason = signal_name(number);
    if (!is_only_warning(number) && next_signal_ends.exchange(true)) {
        write_line("\nended by a second signal: the steps since the last checkpoint are lost\n");
        signal(number, SIG_DFL);
        raise(number);  // delivered when this function returns
    } else if (first_request && prints_lines) {
        Line line;
        line.add("stopping: ");
        line.add(signal_name(number));
        add_sender(line, number, *info);
        line.add(
            "; the step is abandoned after this micro-step, to save the steps before it; a second signal ends the run "
            "at once\n");
        write_line(line.text);
    }
    errno = saved_errno;
}

static void on_early_signal(int number, siginfo_t*, void*) {
    if (requested.exchange(true)) return;  // another thread handles the first of two signals, and ends the process
    if (prints_lines) write_line("\nended by a signal before the first step: nothing is lost\n");
    signal(number, SIG_DFL);
    raise(number);  // delivered when this function returns
}

static void handle_signals(void (*handler)(int, siginfo_t*, void*), bool announce) {
    prints_lines = announce;
    stderr_is_terminal = isatty(2);
    struct sigaction action = {}, before = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU}) {
        sigaction(number, nullptr, &before);
        if (before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);
    }
}

void end_on_signals(bool announce) { handle_signals(on_early_signal, announce); }

void stop_on_signals(bool announce) { handle_signals(on_signal, announce); }

void stop_quietly() { prints_lines = false; }

void stop_at(double time) { stop_time = time; }

bool stop_requested() {
    if (!requested && seconds_now() >= stop_time && !requested.exchange(true)) {
        reason = "--max-time";
        if (prints_lines) write_line("\nstopping: --max-time has passed, apart from the time for a last save\n");
    }
    return requested;
}

const char* stop_reason() { return reason; }

double command_start() { return started; }
