#include "base/signals.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string_view>

#include "base/common.h"

bool is_ignored(int number) {
    struct sigaction action = {};
    return sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

bool is_second_request(int number, double first) {
    // A signal handler may call getenv here: nothing changes the environment then.
    const bool repeats = number == SIGXCPU || (number == SIGTERM && getenv("SLURM_JOB_ID"));
    return !repeats && seconds_now() - first >= 1.0;
}

void end_by_signal(int number) {
    if (getpid() == 1) _exit(128 + number);  // the kernel would not end it
    signal(number, SIG_DFL);
    raise(number);  // delivered when the handler returns
}

void prepare_signals() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int number : STOP_SIGNALS) sigaddset(&signals, number);
    sigprocmask(SIG_UNBLOCK, &signals, nullptr);
    if (getpid() != 1) return;
    for (const int number : STOP_SIGNALS)
        if (!is_ignored(number)) signal(number, end_by_signal);
}

static std::atomic<double> first_signal = 0.0;  // seconds_now(); 0: there was none
static_assert(std::atomic<double>::is_always_lock_free, "a signal handler may use lock-free atomics only");
static bool announces;

static void write_line(std::string_view text) {  // a handler may not call printf
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

static void on_signal(int number) {
    const int saved_errno = errno;
    double first = 0.0;
    if (first_signal.compare_exchange_strong(first, seconds_now())) {
        if (announces)
            write_line(
                "\nstopping: the run leaves this step after a micro-step and saves; a second signal ends it at once\n");
    } else if (is_second_request(number, first)) {
        write_line("\nended by a second signal: the steps since the last checkpoint are lost\n");
        end_by_signal(number);
    }
    errno = saved_errno;
}

void stop_on_signals(bool announce) {
    announces = announce;
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (const int number : STOP_SIGNALS)
        if (!is_ignored(number)) sigaction(number, &action, nullptr);
}

bool stop_requested() { return first_signal != 0.0; }
