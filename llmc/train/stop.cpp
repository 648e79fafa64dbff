#include "train/stop.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <string_view>

#include "base/common.h"
#include "base/signals.h"

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
