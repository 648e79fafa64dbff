#include "train/stop.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

static volatile std::sig_atomic_t requested = 0, insisted = 0;
static bool announces, behind_live_line;

static void say_in_handler(std::string_view text) {  // a signal handler may not call printf
    if (!behind_live_line) text.remove_prefix(1);
    [[maybe_unused]] const ssize_t written = write(2, text.data(), text.size());
}

static void on_signal(int number) {
    const int saved_errno = errno;
    if (insisted && number != SIGUSR1) {
        say_in_handler("\nended by a second signal: the steps since the last checkpoint are lost\n");
        signal(number, SIG_DFL);
        raise(number);  // comes when this function returns
    } else if (!requested && announces) {
        say_in_handler(
            "\nstopping: the step is given up after this micro-step, to save the steps before it; a second signal ends "
            "the run at once\n");
    }
    requested = 1;
    insisted = insisted || number != SIGUSR1;
    errno = saved_errno;
}

void stop_on_signals(bool announce) {
    announces = announce, behind_live_line = isatty(2);
    struct sigaction action = {}, before = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) sigaction(number, &action, nullptr);
    sigaction(SIGHUP, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // nohup ignores it
}

void stop_quietly() { announces = false; }

bool stop_requested() { return requested; }
