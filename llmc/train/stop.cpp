#include "train/stop.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "base/common.h"

// Atomic, because two signals can run the handler in two threads at the same time.
static std::atomic<bool> requested, next_signal_ends;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may use lock-free atomics only");
static std::atomic<double> stop_time = std::numeric_limits<double>::infinity();
static bool prints_lines, stderr_is_terminal;

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

// Slurm sends SIGTERM after a SIGUSR1, and Linux repeats SIGXCPU each second, so neither counts as one of two signals.
static bool is_only_warning(int number) { return number == SIGUSR1 || number == SIGXCPU; }

static void on_signal(int number) {
    const int saved_errno = errno;
    const bool first_request = !requested.exchange(true);
    if (!is_only_warning(number) && next_signal_ends.exchange(true)) {
        write_line("\nended by a second signal: the steps since the last checkpoint are lost\n");
        signal(number, SIG_DFL);
        raise(number);  // delivered when this function returns
    } else if (first_request && prints_lines) {
        write_line(
            "\nstopping: the step is abandoned after this micro-step, to save the steps before it; a second signal "
            "ends the run at once\n");
    }
    errno = saved_errno;
}

static void on_early_signal(int number) {
    if (requested.exchange(true)) return;  // another thread handles the first of two signals, and ends the process
    if (prints_lines) write_line("\nended by a signal before the first step: nothing is lost\n");
    signal(number, SIG_DFL);
    raise(number);  // delivered when this function returns
}

static void handle_signals(void (*handler)(int), bool announce) {
    prints_lines = announce;
    stderr_is_terminal = isatty(2);
    struct sigaction action = {}, before = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
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
    if (!requested && seconds_now() >= stop_time && !requested.exchange(true) && prints_lines)
        write_line("\nstopping: --max-time has passed, apart from the time for a last save\n");
    return requested;
}

double command_start() { return started; }
