// test_watchdog.cpp: tests when the watchdog ends a process. test_watchdog.py has ranks that hang, and what they print.
#include "parallel/watchdog.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "base/common.h"

static void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Runs the function in a child process, which then ends with exit code 0.
static pid_t start(const std::function<void()>& function) {
    const pid_t pid = fork();
    if (pid > 0) return pid;
    function();
    _exit(0);
}

static int end_of(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_CASE("only a process without progress ends; time in which it was stopped does not count") {
    const pid_t unread = start([] {
        int ends[2];
        if (pipe(ends) != 0 || fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0) _exit(1);
        while (write(ends[1], "x", 1) == 1) {
        }
        if (fcntl(ends[1], F_SETFL, 0) != 0) _exit(1);
        dup2(ends[1], 2);  // nobody reads what the watchdog says
        alarm(30);
        Watchdog watchdog(1.0, 0, 1);
        sleep_for(60);
    });
    const pid_t hangs = start([] {
        Watchdog watchdog(1.0, 0, 1);
        sleep_for(60);
    });
    const pid_t trains = start([] {
        Watchdog watchdog(1.0, 0, 2), never(0.0, 0, 1);
        for (int i = 0; i < 6; i++) {
            watchdog.reached("micro-step", 0);
            sleep_for(0.4);
        }
    });
    const pid_t sums = start([] {
        Watchdog watchdog(1.0, 0, 2);
        for (int i = 0; i < 3; i++) {
            watchdog.collective_begins();
            sleep_for(0.6);
            watchdog.collective_ended();
            sleep_for(0.6);
        }
    });
    const pid_t stopped = start([] {
        Watchdog watchdog(2.5, 0, 1);
        for (int i = 0; i < 5; i++) sleep_for(0.2);
    });
    sleep_for(0.7);
    kill(stopped, SIGSTOP);
    CHECK(end_of(hangs) == EXIT_WATCHDOG);
    CHECK(end_of(unread) == EXIT_WATCHDOG);
    CHECK(end_of(trains) == 0);
    CHECK(end_of(sums) == 0);
    kill(stopped, SIGCONT);
    CHECK(end_of(stopped) == 0);
}
