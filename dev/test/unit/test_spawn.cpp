// test_spawn.cpp: tests --ranks N for ranks that are child processes: their variables, exit codes, a rank that ignores
// SIGTERM, and a signal to the parent. The ranks are shell commands. test_gpus.py kills a rank and the parent, and
// test_ranks_option.py tests ranks by mpirun.
#include "parallel/launch.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <tuple>

#include "base/common.h"
#include "base/files.h"
#include "parallel/rendezvous.h"
#include "support/temporary.h"

// Starts a process that spawns 3 ranks, each of which runs the shell command.
static pid_t start(const std::string& command) {
    const pid_t pid = fork();
    if (pid > 0) return pid;
    std::string words[] = {"sh", "-c", command};
    char* argv[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    _exit(spawn_processes(3, argv));
}

static int end_of(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static int ended(const std::string& command) { return end_of(start(command)); }

TEST_CASE("ranks have torchrun's variables, and the same secret") {
    const TemporaryDirectory dir;
    CHECK(ended("echo $TRAIN_GPT2_SECRET >" + (dir / "secret") + "$RANK") == 0);
    const std::string secret = read_bytes(dir / "secret0");
    CHECK(secret.size() == 1 + make_secret().size());  // none without libcrypto
    for (const char* rank : {"1", "2"}) CHECK(read_bytes((dir / "secret") + rank) == secret);
    CHECK(ended("echo $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR >" + (dir / "rank") + "$RANK") == 0);
    for (const char* rank : {"0", "1", "2"})
        CHECK(read_bytes((dir / "rank") + rank) == std::string(rank) + " 3 3 127.0.0.1\n");
}

TEST_CASE("the exit code is that of the rank that failed first, else 75 if one has stopped") {
    CHECK(ended("[ $RANK != 1 ] || exit 65; exec sleep 60") == 65);
    CHECK(ended("[ $RANK != 2 ] || kill -9 $$; exec sleep 60") == 137);
    CHECK(ended("[ $RANK != 1 ] || exit 75; exit 0") == EXIT_PREEMPTED);
    CHECK(ended("[ $RANK != 1 ] || exit 75; sleep 0.3; [ $RANK != 0 ] || exit 1; exit 75") == 1);
}

TEST_CASE("after another rank has failed a rank has seconds to end at SIGTERM, and is killed if it ignores it") {
    const TemporaryDirectory dir;
    CHECK(ended("cd " + (dir / "") +
                " && case $RANK in 0) trap 'sleep 3; echo >saved; exit 75' TERM ;; 1) sleep 0.5; exit 65 ;; "
                "2) trap '' TERM ;; esac; while :; do sleep 0.1; done") == 65);
    CHECK(path_exists(dir / "saved"));
}

TEST_CASE("signals are passed on to all ranks, but not one that the caller ignores") {
    for (const auto& [sent, ignored, code] : {std::tuple(SIGTERM, false, 75),
                                              {SIGINT, false, 75},
                                              {SIGUSR1, false, 75},
                                              {SIGUSR2, false, 75},
                                              {SIGXCPU, false, 75},
                                              {SIGHUP, false, 76},
                                              {SIGHUP, true, 75}}) {
        const int number = sent;
        CAPTURE(number);
        const TemporaryDirectory dir;
        const auto before = signal(number, ignored ? SIG_IGN : SIG_DFL);
        const pid_t pid = start("trap 'exit 75' TERM INT USR1 USR2 XCPU; trap 'exit 76' HUP; : >" + (dir / "rank") +
                                "$RANK; while :; do sleep 0.02; done");
        signal(number, before);
        for (const char* rank : {"0", "1", "2"})
            for (int i = 0; i < 500 && access(((dir / "rank") + rank).c_str(), F_OK) != 0; i++) usleep(20000);
        kill(pid, number);
        if (ignored) kill(pid, SIGTERM);
        CHECK(end_of(pid) == code);
    }
}
