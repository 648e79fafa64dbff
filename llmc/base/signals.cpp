#include "base/signals.h"

#include <unistd.h>

#include "base/common.h"

bool is_ignored(int number) {
    struct sigaction action = {};
    return sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

bool is_second_request(int number, double first) { return number != SIGXCPU && seconds_now() - first >= 1.0; }

void end_by_signal(int number) {
    if (getpid() == 1) _exit(128 + number);  // the kernel would not end it
    signal(number, SIG_DFL);
    raise(number);  // delivered when the handler returns
}

void handle_signals_of_process_1() {
    if (getpid() != 1) return;
    for (const int number : STOP_SIGNALS)
        if (!is_ignored(number)) signal(number, end_by_signal);
}
