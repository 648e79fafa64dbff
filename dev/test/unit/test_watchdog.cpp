// test_watchdog.cpp: tests what the watchdog prints, and when it ends a process.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "parallel/watchdog.h"
#include "support/test.h"

static void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

struct Child {
    pid_t pid;
    int messages;  // what it prints on stderr
};

// Runs the function in a child process, which then ends with exit code 0.
static Child start(const std::function<void()>& function) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 2);
        function();
        _exit(0);
    }
    close(ends[1]);
    return {pid, ends[0]};
}

// Waits until the process ends; returns its exit code and what it has printed.
static std::string end_of(const Child& child) {
    std::string text;
    char buffer[1024];
    for (ssize_t got; (got = read(child.messages, buffer, sizeof buffer)) > 0;) text.append(buffer, size_t(got));
    close(child.messages);
    int status = 0;
    waitpid(child.pid, &status, 0);
    return format("%d ", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)) + text;
}

TEST_CASE("where: the step, the place and the collectives of this rank") {
    Watchdog alone(0.0, 0, 1);
    CHECK(alone.where() == "the start");
    alone.step = 41;
    alone.reached("micro-step", 3);
    CHECK(alone.where() == "step 41, micro-step 3");

    Watchdog rank(0.0, 1, 4);
    CHECK(rank.where() == "the start, after 0 collectives");
    rank.collective_begins();
    rank.collective_ended();
    CHECK(rank.where() == "the start, after 1 collectives");
    rank.collective_begins();
    CHECK(rank.where() == "the start, in collective 2");
    rank.reached("results of a step");
    CHECK(rank.where() == "results of a step, in collective 2");
}

TEST_CASE("only a process without progress ends, and says where it is") {
    const double begin = seconds_now();
    const Child rank = start([] {  // waits for the lines of the others
        Watchdog watchdog(1.0, 2, 4);
        watchdog.step = 7;
        watchdog.reached("micro-step", 1);
        watchdog.collective_begins();
        sleep_for(60);
    });
    const Child single = start([] {
        Watchdog watchdog(1.0, 0, 1);
        sleep_for(60);
    });
    const Child trains = start([] {
        Watchdog watchdog(1.0, 0, 2), never(0.0, 0, 1);
        for (int i = 0; i < 6; i++) {
            watchdog.reached("micro-step", 0);
            sleep_for(0.4);
        }
    });
    const Child sums = start([] {
        Watchdog watchdog(1.0, 0, 2);
        for (int i = 0; i < 3; i++) {
            watchdog.collective_begins();
            sleep_for(0.6);
            watchdog.collective_ended();
            sleep_for(0.6);
        }
    });
    const Child stopped = start([] {  // time in which the process was stopped does not count
        Watchdog watchdog(2.5, 0, 1);
        for (int i = 0; i < 5; i++) sleep_for(0.2);
    });
    sleep_for(0.7);
    kill(stopped.pid, SIGSTOP);
    CHECK(end_of(single) == "124 error: no progress for 1 s (--timeout): the start\n");
    CHECK(end_of(trains) == "0 ");
    CHECK(end_of(sums) == "0 ");
    CHECK(end_of(rank) == "124 error: rank 2 on " + host_name() +
                              ": no progress for 1 s (--timeout): step 7, micro-step 1, in collective 1; look at the "
                              "ranks that print no such line, or another place\n");
    const double seconds = seconds_now() - begin;
    CHECK(seconds >= 1.0 + Watchdog::LAST_WORDS);
    CHECK(seconds < 10.0);  // --timeout plus 10 s is promised, also for the launcher's part of it
    kill(stopped.pid, SIGCONT);
    CHECK(end_of(stopped) == "0 ");
}
