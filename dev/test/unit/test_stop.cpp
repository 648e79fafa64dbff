// test_stop.cpp: tests the signals that ask a run to stop, sent to a process with several threads.
#include "train/stop.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

#include "base/files.h"
#include "parallel/local_ranks.h"
#include "support/temporary.h"
#include "train/run.h"

// nohup and shell scripts start a test with ignored signals, which stop.h does not handle.
struct DefaultSignals {
    DefaultSignals() {
        for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU}) signal(number, SIG_DFL);
    }
};

// Changes the name by which the system knows this process.
static void rename_self(const std::string& name) { write_bytes("/proc/self/comm", name); }

// Runs until a signal asks it to stop, then ends with status 0 after a pause in which a second signal arrives.
[[noreturn]] static void stoppable_process(const std::string& said, const std::string& ready, void (*handle)(bool)) {
    dup2(open(said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    handle(true);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++)
        threads.emplace_back([] {
            while (!stop_requested())
                ;
        });
    close(open(ready.c_str(), O_WRONLY | O_CREAT, 0600));
    while (!stop_requested())
        ;
    usleep(200'000);  // on a busy machine a thread may not run for some 10 ms
    _exit(0);
}

// The wait status of stoppable_process after these signals. They are sent while the process is suspended, so they
// arrive at the same time.
static int status_after(std::initializer_list<int> signals, const std::string& said,
                        void (*handle)(bool) = stop_on_signals) {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const pid_t child = fork();
    if (child == 0) stoppable_process(said, ready, handle);
    for (int i = 0; i < 10'000 && access(ready.c_str(), F_OK) != 0; i++) usleep(1000);
    int status = 0;
    kill(child, SIGSTOP);
    waitpid(child, &status, WUNTRACED);
    for (int number : signals) kill(child, number);
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    return status;
}

TEST_CASE_FIXTURE(DefaultSignals, "two signals that two threads take at the same time end the run") {
    const TemporaryDirectory dir;
    for (int i = 0; i < 150; i++) {
        CAPTURE(i);
        const int status = status_after({SIGTERM, SIGINT}, dir / "said");
        REQUIRE(WIFSIGNALED(status));
        REQUIRE((WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGINT));
        REQUIRE(read_bytes(dir / "said").find("ended by a second signal") != std::string::npos);
    }
}

TEST_CASE_FIXTURE(DefaultSignals, "a signal before the first step ends the process by that signal, with a line") {
    const TemporaryDirectory dir;
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU}) {
        CAPTURE(number);
        const int status = status_after({number}, dir / "said", end_on_signals);
        REQUIRE(WIFSIGNALED(status));
        CHECK(WTERMSIG(status) == number);
        CHECK(read_bytes(dir / "said") == "ended by a signal before the first step: nothing is lost\n");
    }
    for (int i = 0; i < 150; i++) {  // two threads take two signals at the same time
        CAPTURE(i);
        const int status = status_after({SIGTERM, SIGINT}, dir / "said", end_on_signals);
        REQUIRE(WIFSIGNALED(status));
        REQUIRE(read_bytes(dir / "said") == "ended by a signal before the first step: nothing is lost\n");
    }
}

TEST_CASE_FIXTURE(DefaultSignals, "a signal that the caller ignores does not stop the run") {
    const TemporaryDirectory dir;
    for (int ignored : {SIGINT, SIGTERM, SIGHUP}) {
        CAPTURE(ignored);
        const auto before = signal(ignored, SIG_IGN);
        const int status = status_after({ignored, ignored == SIGTERM ? SIGINT : SIGTERM}, dir / "said");
        signal(ignored, before);
        REQUIRE(WIFEXITED(status));  // two signals that are not ignored would end it
        CHECK(WEXITSTATUS(status) == 0);
    }
}

TEST_CASE_FIXTURE(DefaultSignals, "after a scheduler's warning and one signal the run has time to save") {
    const TemporaryDirectory dir;
    for (int warning : {SIGUSR1, SIGXCPU})
        for (int i = 0; i < 5; i++) {
            const int status = status_after({warning, SIGTERM}, dir / "said");
            REQUIRE(WIFEXITED(status));
            CHECK(WEXITSTATUS(status) == 0);
            CHECK(read_bytes(dir / "said").starts_with(STOPPING));
        }
}

TEST_CASE_FIXTURE(DefaultSignals, "the line about a signal names it, and its sender if that still exists") {
    const TemporaryDirectory dir;
    rename_self("mpirun");
    status_after({SIGUSR1}, dir / "said");
    CHECK(read_bytes(dir / "said").starts_with("stopping: SIGUSR1 from mpirun; the step is abandoned"));
    status_after({SIGTERM}, dir / "said");
    rename_self("test_stop");
    CHECK(read_bytes(dir / "said").starts_with("stopping: SIGTERM from mpirun, as when another rank has ended; the"));
}

TEST_CASE_FIXTURE(DefaultSignals,
                  "a time that has passed asks to stop once, with a line, and a signal after it does not end the run") {
    const TemporaryDirectory dir;
    const std::string said = dir / "said";
    const pid_t child = fork();
    if (child == 0) {
        dup2(open(said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
        stop_on_signals(true);
        stop_at(seconds_now() + 3600.0);
        if (stop_requested() || stop_reason() != std::string()) _exit(1);
        stop_at(seconds_now());
        if (!stop_requested() || !stop_requested()) _exit(2);
        raise(SIGTERM);
        if (stop_reason() != std::string("--max-time")) _exit(4);
        stop_at(seconds_now() + 3600.0);
        _exit(stop_requested() ? 0 : 3);
    }
    int status = 0;
    waitpid(child, &status, 0);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(read_bytes(said) == "stopping: --max-time has passed, apart from the time for a last save\n");
}

TEST_CASE("--max-time leaves time for the last save, and for a save in flight") {
    CHECK(time_for_saves(3600.0, 0.0, false) == 5.0);
    CHECK(time_for_saves(20.0, 0.0, false) == 2.0);
    CHECK(time_for_saves(3600.0, 60.0, false) == 60.0);
    CHECK(time_for_saves(3600.0, 60.0, true) == 120.0);
    CHECK(time_for_saves(3600.0, 0.0, true) == 10.0);
}

TEST_CASE("the command started when its process did, or when the process did that started it as a rank") {
    CHECK(command_start() <= seconds_now());
    CHECK(command_start() > seconds_now() - 3600.0);
    const TemporaryDirectory dir;
    setenv(COMMAND_START, "12.5", 1);
    const std::string self = std::filesystem::canonical("/proc/self/exe").string();
    const std::string list = "'" + self + "' --no-skip --test-case='prints the start' >" + dir / "out";
    CHECK(system(list.c_str()) == 0);
    unsetenv(COMMAND_START);
    CHECK(read_bytes(dir / "out").find("command started at 12.500") != std::string::npos);
}

TEST_CASE("prints the start" * doctest::skip()) { printf("command started at %.3f\n", command_start()); }
