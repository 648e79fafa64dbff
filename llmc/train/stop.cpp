#include "train/stop.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

static volatile std::sig_atomic_t requested = 0, next_signal_ends = 0;
static bool prints_lines, stderr_is_terminal;

// Writes a line that begins with a newline, which ends a live line; only a terminal needs it. A signal handler may not
// call printf.
static void write_in_handler(std::string_view text) {
    if (!stderr_is_terminal) text.remove_prefix(1);
    [[maybe_unused]] const ssize_t written = write(2, text.data(), text.size());
}

// Slurm sends SIGTERM after a SIGUSR1, and Linux repeats SIGXCPU each second, so neither counts as one of two signals.
static bool is_only_warning(int number) { return number == SIGUSR1 || number == SIGXCPU; }

static void on_signal(int number) {
    const int saved_errno = errno;
    if (next_signal_ends && !is_only_warning(number)) {
        write_in_handler("\nended by a second signal: the steps since the last checkpoint are lost\n");
        signal(number, SIG_DFL);
        raise(number);  // delivered when this function returns
    } else if (!requested && prints_lines) {
        write_in_handler(
            "\nstopping: the step is abandoned after this micro-step, to save the steps before it; a second signal "
            "ends "
            "the run at once\n");
    }
    requested = 1;
    next_signal_ends = next_signal_ends || !is_only_warning(number);
    errno = saved_errno;
}

void stop_on_signals(bool announce) {
    prints_lines = announce;
    stderr_is_terminal = isatty(2);
    struct sigaction action = {}, before = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGXCPU}) sigaction(number, &action, nullptr);
    sigaction(SIGHUP, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // nohup ignores it
}

void stop_quietly() { prints_lines = false; }

bool stop_requested() { return requested; }
