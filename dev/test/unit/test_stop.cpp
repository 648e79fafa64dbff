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

static void wait_for_file(const std::string& path) {
    for (int i = 0; i < 10'000 && access(path.c_str(), F_OK) != 0; i++) usleep(1000);
}

// Returns the wait status of stoppable_process after these signals, sent with this pause between them.
static int status_after(const std::vector<int>& signals, const std::string& said, double pause, double saving) {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const pid_t child = fork();
    if (child == 0) stoppable_process(said, ready, saving);
    wait_for_file(ready);
    for (size_t i = 0; i < signals.size(); i++) {
        if (i > 0) usleep(useconds_t(1e6 * pause));
        kill(child, signals[i]);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}

TEST_CASE_FIXTURE(DefaultSignals, "SIGTERM, SIGINT and SIGUSR1 ask to stop, with a line") {
    const TemporaryDirectory dir;
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) {
        CAPTURE(number);
        CHECK(status_after({number}, dir / "said", 0.0, 0.0) == 0);
        CHECK(read_bytes(dir / "said").starts_with("\nstopping: "));
    }
}

TEST_CASE_FIXTURE(DefaultSignals, "two signals at the same time are one request") {
    const TemporaryDirectory dir;
    for (int i = 0; i < 20; i++) CHECK(status_after({SIGINT, SIGTERM}, dir / "said", 0.0, 0.05) == 0);
}

TEST_CASE_FIXTURE(DefaultSignals, "a second signal ends the process by that signal") {
    const TemporaryDirectory dir;
    const int status = status_after({SIGUSR1, SIGTERM}, dir / "said", 1.1, 60.0);
    REQUIRE(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGTERM);
    CHECK(read_bytes(dir / "said").find("\nended by a second signal: the steps since the last") != std::string::npos);
}

TEST_CASE_FIXTURE(DefaultSignals, "a signal that the caller ignores does not stop the run") {
    const TemporaryDirectory dir;
    const auto before = signal(SIGINT, SIG_IGN);
    const int status = status_after({SIGINT, SIGTERM}, dir / "said", 1.1, 0.0);  // a second one would end it
    signal(SIGINT, before);
    CHECK(status == 0);
}
