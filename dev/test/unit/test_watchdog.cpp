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

namespace {
struct Result {
    int exit_code;  // 128 + signal of a killed process
    double seconds;
    std::string err;
};
}  // namespace

// Runs the function in a child process, which then ends with exit code 0. meanwhile: called here with its pid.
static Result run_child(const std::function<void()>& function, const std::function<void(pid_t)>& meanwhile = {}) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const double begin = seconds_now();
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        function();
        _exit(0);
    }
    close(ends[1]);
    if (meanwhile) meanwhile(child);
    Result result;
    char buffer[1024];
    for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;) result.err.append(buffer, size_t(got));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    result.seconds = seconds_now() - begin;
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
}

TEST_CASE("where: the step, the place and the collectives of this rank") {
    Watchdog alone(0.0, 0, 1);
    CHECK(alone.where() == "the start");
    alone.step = 41;
    alone.reached("micro-step", 3);
    CHECK(alone.where() == "step 41, micro-step 3");

    Watchdog rank(0.0, 1, 4);
    CHECK(rank.where() == "the start, after 0 collectives");
    rank.step = 41;
    rank.reached("micro-step", 3);
    rank.collective_begins();
    rank.collective_ended();
    CHECK(rank.where() == "step 41, micro-step 3, after 1 collectives");
    rank.collective_begins();
    CHECK(rank.where() == "step 41, micro-step 3, in collective 2");
    rank.reached("results of a step");
    CHECK(rank.where() == "step 41, results of a step, in collective 2");
}

TEST_CASE("a rank without progress says where it is, waits for the lines of the others, and ends") {
    const Result result = run_child([] {
        Watchdog watchdog(1.0, 2, 4);
        watchdog.step = 7;
        watchdog.reached("micro-step", 1);
        watchdog.collective_begins();
        sleep_for(60);
    });
    CHECK(result.exit_code == EXIT_WATCHDOG);
    CHECK(result.err == "error: rank 2 on " + host_name() +
                            ": no progress for 1 s (--timeout): step 7, micro-step 1, in collective 1; look at the "
                            "ranks that print no such line, or another place\n");
    CHECK(result.seconds >= 1.0 + Watchdog::LAST_WORDS);
    CHECK(result.seconds < 10.0);  // --timeout plus 10 s is promised, also for the launcher's part of it
}

TEST_CASE("a single process without progress ends at once") {
    const Result result = run_child([] {
        Watchdog watchdog(1.0, 0, 1);
        sleep_for(60);
    });
    CHECK(result.exit_code == EXIT_WATCHDOG);
    CHECK(result.err == "error: no progress for 1 s (--timeout): the start\n");
}

TEST_CASE("progress of the training thread or of a collective keeps a rank alive, and --timeout 0 always does") {
    const Result progress = run_child([] {
        Watchdog watchdog(1.0, 0, 2);
        for (int i = 0; i < 5; i++) {
            watchdog.reached("micro-step", 0);
            sleep_for(0.4);
        }
        for (int i = 0; i < 3; i++) {
            watchdog.collective_begins();
            sleep_for(0.4);
            watchdog.collective_ended();
            sleep_for(0.4);
        }
    });
    CHECK(progress.exit_code == 0);
    CHECK(progress.err.empty());
    const Result never = run_child([] {
        Watchdog watchdog(0.0, 0, 1);
        sleep_for(1.5);
    });
    CHECK(never.exit_code == 0);
}

TEST_CASE("time in which the process was stopped does not count") {
    const Result result = run_child(
        [] {
            Watchdog watchdog(3.0, 0, 1);
            for (int i = 0; i < 8; i++) {
                watchdog.reached("micro-step", i);
                sleep_for(0.2);
            }
        },
        [](pid_t child) {
            sleep_for(0.5);
            kill(child, SIGSTOP);
            sleep_for(4.0);
            kill(child, SIGCONT);
        });
    CHECK(result.exit_code == 0);
    CHECK(result.err.empty());
}
