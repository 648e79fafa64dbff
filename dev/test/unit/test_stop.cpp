// test_stop.cpp: tests the signals that ask a run to stop, sent to a process with several threads.
#include "train/stop.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <vector>

#include "support/temporary.h"

// nohup and shell scripts start a test with ignored signals, which stop.h does not handle.
struct DefaultSignals {
    DefaultSignals() {
        for (int number : {SIGINT, SIGTERM, SIGUSR1}) signal(number, SIG_DFL);
    }
};

// Waits until a signal asks it to stop, then takes `saving` seconds, and ends with status 0.
[[noreturn]] static void stoppable_process(const std::string& said, const std::string& ready, double saving) {
    dup2(open(said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    stop_on_signals(true);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++)
        threads.emplace_back([] {
            while (!stop_requested()) usleep(100);
        });
    close(open(ready.c_str(), O_WRONLY | O_CREAT, 0600));
    while (!stop_requested()) usleep(100);
    usleep(useconds_t(1e6 * saving));
    _exit(0);
}

struct Ended {
    int status;
    std::string said;
};

// Runs stoppable_process and sends it these signals, with this pause between them.
static Ended after(const std::vector<int>& signals, double pause = 0.0, double saving = 0.0) {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const pid_t child = fork();
    if (child == 0) stoppable_process(dir / "said", ready, saving);
    for (int i = 0; i < 10'000 && access(ready.c_str(), F_OK) != 0; i++) usleep(1000);
    for (size_t i = 0; i < signals.size(); i++) {
        if (i > 0) usleep(useconds_t(1e6 * pause));
        kill(child, signals[i]);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return {status, read_bytes(dir / "said")};
}

TEST_CASE_FIXTURE(DefaultSignals, "SIGTERM, SIGINT and SIGUSR1 ask to stop, with a line") {
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) {
        CAPTURE(number);
        const Ended ended = after({number});
        CHECK(ended.status == 0);
        CHECK(ended.said.starts_with("\nstopping: "));
    }
}

TEST_CASE_FIXTURE(DefaultSignals, "two signals at the same time are one request") {
    for (int i = 0; i < 10; i++) CHECK(after({SIGINT, SIGTERM}, 0.0, 0.05).status == 0);
}

TEST_CASE_FIXTURE(DefaultSignals, "a second signal ends the process by that signal") {
    const Ended ended = after({SIGUSR1, SIGTERM}, 1.1, 60.0);
    REQUIRE(WIFSIGNALED(ended.status));
    CHECK(WTERMSIG(ended.status) == SIGTERM);
    CHECK(ended.said.find("\nended by a second signal: the steps since the last") != std::string::npos);
}
