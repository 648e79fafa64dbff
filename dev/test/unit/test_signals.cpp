// test_signals.cpp: tests the signals that ask a run to stop, sent to a process with several threads. test_resume.py
// sends them to a run.
#include "base/signals.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/temporary.h"

// Waits until a signal asks it to stop, then takes `saving` seconds, and ends with status 0.
[[noreturn]] static void stoppable_process(const std::string& said, const std::string& ready, double saving) {
    dup2(creat(said.c_str(), 0600), 2);
    for (int number : STOP_SIGNALS) signal(number, SIG_DFL);  // nohup starts a test with ignored signals
    stop_on_signals(true);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++)
        threads.emplace_back([] {
            while (!stop_requested()) usleep(100);
        });
    close(creat(ready.c_str(), 0600));
    while (!stop_requested()) usleep(100);
    usleep(useconds_t(1e6 * saving));
    _exit(0);
}

// Runs stoppable_process and sends it two signals, with this pause between them. Returns its status and what it says.
static std::pair<int, std::string> after(int first, int second, double pause, double saving) {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const pid_t child = fork();
    if (child == 0) stoppable_process(dir / "said", ready, saving);
    for (int i = 0; i < 10'000 && access(ready.c_str(), F_OK) != 0; i++) usleep(1000);
    kill(child, first);
    usleep(useconds_t(1e6 * pause));
    kill(child, second);
    int status = 0;
    waitpid(child, &status, 0);
    return {status, read_bytes(dir / "said")};
}

TEST_CASE("two signals at the same time are one request, with a line") {
    for (int i = 0; i < 10; i++) {
        const auto [status, said] = after(SIGINT, SIGTERM, 0.0, 0.05);
        CHECK(status == 0);
        CHECK(said.starts_with("\nstopping: "));
    }
}

TEST_CASE("a second signal ends the process by that signal") {
    const auto [status, said] = after(SIGUSR1, SIGTERM, 1.1, 60.0);
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM));
    CHECK(said.find("\nended by a second signal: the steps since the last") != std::string::npos);
}

TEST_CASE("the SIGTERM that a job of Slurm gets when its time is up leaves time for the save") {
    for (const int first : {SIGUSR1, SIGTERM}) {
        setenv("SLURM_JOB_ID", "1234", 1);
        const auto [status, said] = after(first, SIGTERM, 1.1, 1.5);
        unsetenv("SLURM_JOB_ID");
        CHECK(status == 0);
        CHECK(said.find("ended by a second signal") == std::string::npos);
    }
}

TEST_CASE("a limit of CPU time, which sends its signal each second, leaves time for the save") {
    const auto [status, said] = after(SIGHUP, SIGXCPU, 1.1, 1.5);
    CHECK(status == 0);
    CHECK(said.find("ended by a second signal") == std::string::npos);
}
