// test_spawn.cpp: tests --ranks N for ranks that are child processes: their variables, exit codes, a rank that is
// killed, one that ignores SIGTERM, a signal to the parent, and a parent that is killed. The ranks are shell commands.
// test_ranks_option.py tests ranks by mpirun.
#include "parallel/spawn.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "base/common.h"
#include "support/temporary.h"

static void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Starts a process that spawns `count` ranks, each of which runs the shell command.
static pid_t start(const std::string& command, int count = 3) {
    const pid_t pid = fork();
    if (pid > 0) return pid;
    signal(SIGTERM, SIG_DFL);  // doctest's handler would print a report if the signal came before exec
    std::string words[] = {"sh", "-c", command};
    char* argv[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    _exit(spawn_processes(count, argv));
}

static int end_of(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static int ended(const std::string& command) { return end_of(start(command)); }

static bool appears(const std::string& path) {
    for (int i = 0; i < 500 && access(path.c_str(), F_OK) != 0; i++) sleep_for(0.02);
    return access(path.c_str(), F_OK) == 0;
}

TEST_CASE("ranks have torchrun's variables") {
    const TemporaryDirectory dir;
    CHECK(ended("echo $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR >" + (dir / "rank") + "$RANK") == 0);
    for (const char* rank : {"0", "1", "2"})
        CHECK(read_bytes((dir / "rank") + rank) == std::string(rank) + " 3 3 127.0.0.1\n");
}

TEST_CASE("the exit code is that of the rank that failed first, else 75 if one has stopped") {
    CHECK(ended("exit 0") == 0);
    CHECK(ended("[ $RANK != 1 ] || exit 65; exec sleep 60") == 65);
    CHECK(ended("[ $RANK != 2 ] || kill -9 $$; exec sleep 60") == 137);
    CHECK(ended("[ $RANK != 1 ] || exit 75; exit 0") == EXIT_PREEMPTED);
    CHECK(ended("[ $RANK != 1 ] || exit 75; sleep 0.3; [ $RANK != 0 ] || exit 1; exit 75") == 1);
}

TEST_CASE("a rank that ignores SIGTERM is killed ten seconds after another rank has failed") {
    const double begin = seconds_now();
    CHECK(ended("[ $RANK != 1 ] || { sleep 0.5; exit 65; }; trap '' TERM; while :; do sleep 0.1; done") == 65);
    CHECK(seconds_now() - begin > 9);
    CHECK(seconds_now() - begin < 20);
}

TEST_CASE("signals are passed on to all ranks") {
    for (int number : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {
        CAPTURE(number);
        const TemporaryDirectory dir;
        signal(number, SIG_DFL);  // nohup lets a program ignore SIGHUP
        const pid_t pid =
            start("trap 'exit 75' TERM INT HUP USR1; : >" + (dir / "rank") + "$RANK; while :; do sleep 0.02; done");
        for (const char* rank : {"0", "1", "2"}) REQUIRE(appears((dir / "rank") + rank));
        kill(pid, number);
        CHECK(end_of(pid) == EXIT_PREEMPTED);
    }
}

TEST_CASE("a signal that the caller ignores is not passed on") {
    const TemporaryDirectory dir;
    const auto before = signal(SIGHUP, SIG_IGN);
    const pid_t pid = start(": >" + (dir / "rank") + "$RANK; sleep 1; exit 0");
    signal(SIGHUP, before);
    for (const char* rank : {"0", "1", "2"}) REQUIRE(appears((dir / "rank") + rank));
    kill(pid, SIGHUP);
    CHECK(end_of(pid) == 0);
}

#ifdef __linux__
TEST_CASE("if the parent is killed, the ranks get SIGTERM") {
    const TemporaryDirectory dir;
    const pid_t pid = start("trap ': >" + (dir / "ended") + "$RANK; exit' TERM; : >" + (dir / "rank") +
                            "$RANK; while :; do sleep 0.02; done");
    for (const char* rank : {"0", "1", "2"}) REQUIRE(appears((dir / "rank") + rank));
    kill(pid, SIGKILL);
    end_of(pid);
    for (const char* rank : {"0", "1", "2"}) CHECK(appears((dir / "ended") + rank));
}
#endif
