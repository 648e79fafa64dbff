// test_local_ranks.cpp: tests the supervisor of the processes that --gpus starts, with small functions as ranks: exit
// codes, signals, output, a rank that does not end, and a supervisor that is killed.
#include "parallel/local_ranks.h"

#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/common.h"
#include "support/temporary.h"

namespace {
// The exit code of a supervisor that runs in its own process, and the output of the supervisor and its ranks.
struct Result {
    int exit_code = 0;
    std::string out, err, failure;
    double seconds = 0;
};
}  // namespace

static constexpr LastSeconds LAST = {.rank = 3, .stopped = 1, .program = 4};

static pid_t start_supervisor(const TemporaryDirectory& dir, const LocalRanks& ranks) {
    fflush(nullptr);
    const pid_t pid = fork();
    if (pid != 0) return pid;
    for (const auto& [name, fd] : {std::pair("out", 1), {"err", 2}})
        dup2(open((dir / name).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), fd);
    Supervisor supervisor;
    const Outcome outcome = supervisor.run(ranks);
    write_bytes(dir / "failure", outcome.failure);
    _exit(outcome.exit_code);
}

// Runs a supervisor in a child process. While the ranks run, calls `then` with the supervisor's process id.
static Result supervise(LocalRanks ranks, int count, const std::function<void(pid_t)>& then = {}) {
    const TemporaryDirectory dir;
    ranks.count = count;
    const double start = seconds_now();
    const pid_t pid = start_supervisor(dir, ranks);
    if (then) then(pid);
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status));
    return {WEXITSTATUS(status), read_bytes(dir / "out"), read_bytes(dir / "err"), read_bytes(dir / "failure"),
            seconds_now() - start};
}

static LocalRanks running(const std::function<int(int)>& run) {
    LocalRanks ranks;
    ranks.last = LAST;
    ranks.run = [run](int index) -> int {
        const int code = run(index);
        fflush(nullptr);
        _exit(code);  // not exit(): the test program would run its own handlers
    };
    return ranks;
}

static bool runs(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string stat;
    return std::getline(file, stat) && stat.compare(stat.rfind(')'), 3, ") Z") != 0;
}

static void wait_until_file_has(const std::string& path, size_t bytes) {
    for (int i = 0; i < 1000 && read_bytes(path).size() < bytes; i++) usleep(10000);
}

TEST_CASE("the exit code is that of the rank that failed first") {
    CHECK(supervise(running([](int) { return 0; }), 3).exit_code == 0);
    CHECK(supervise(running([](int) { return EXIT_PREEMPTED; }), 2).exit_code == EXIT_PREEMPTED);
    const Result failed = supervise(running([](int index) {
                                        usleep(index == 1 ? 0 : 300000);
                                        return index == 1 ? EXIT_BAD_DATA : EXIT_INTERNAL;
                                    }),
                                    3);
    CHECK(failed.exit_code == EXIT_BAD_DATA);
    CHECK(failed.failure == "rank 1 ended with exit code 65");
    CHECK(failed.err == "");
}

TEST_CASE("a message names a rank that is killed") {
    LocalRanks ranks = running([](int index) { return index == 1 ? raise(SIGKILL) : (usleep(300000), EXIT_INTERNAL); });
    ranks.first_rank = 4;
    const Result killed = supervise(ranks, 2);
    CHECK(killed.exit_code == 128 + SIGKILL);
    CHECK(killed.err == "error: rank 5 was ended by signal 9 (Killed; out of memory?)\n");
}

TEST_CASE("a signal that has ended a program's rank is named, and the rank if mpirun says which") {
    const std::string rule = std::string(74, '-') + "\n", zero(1, '\0');
    const std::string ends =
        rule + "Primary job  terminated normally, but 1 process returned\na non-zero exit code.\n" + rule;
    const std::string lost =
        rule + "mpirun noticed that process rank 12 with PID 0 on node h exited on signal 9 (Killed).\n" + rule;
    const std::string lost_notice =
        "[h:4711] [[4175,0],0] ORTE_ERROR_LOG: Out of resource in file ../../../orte/util/show_help.c at line 501\n";
    const std::string other = "[h:4711] [[4175,0],0] ORTE_ERROR_LOG: Unreachable in file oob_base.c at line 7\n";
    const std::string slots = rule + "There are not enough slots available in the system.\n" + rule;
    for (const auto& [notice, rank, rest] :
         {std::tuple<std::string, const char*, std::string>("", "a rank", ""),
          {ends, "a rank", ""},
          {"a\nmpirun: Forwarding signal 10 to job\n" + ends + lost + zero + "b\n", "rank 12", "a\nb\n"},
          {slots + lost, "rank 12", slots},
          {lost_notice + other, "a rank", other},
          {rule + "never ended\n", "a rank", rule + "never ended\n"}}) {
        LocalRanks ranks = running([notice = notice](int) {
            return write(2, notice.data(), notice.size()) == ssize_t(notice.size()) ? 128 + SIGKILL : 1;
        });
        ranks.program = "mpirun";
        ranks.advice = [] { return "try again"; };
        const Result killed = supervise(ranks, 1);
        CHECK(killed.exit_code == 128 + SIGKILL);
        CHECK(killed.failure == format("%s was ended by signal 9 (Killed; out of memory?)", rank));
        const std::string error = "error: " + killed.failure + "; try again\n";
        CHECK((killed.err == error + rest || killed.err == rest + error));
    }
}

TEST_CASE("a line of dashes on a program's stdout is text") {
    const std::string text = std::string(74, '-') + "\nPrimary job\n" + std::string(74, '-') + "\n";
    LocalRanks ranks = running([text](int) { return write(1, text.data(), text.size()) < 0; });
    ranks.program = "mpirun";
    CHECK(supervise(ranks, 1).out == text);
}

// The first rank fails. The others ignore requests to end: `stopped` of them stop, the rest sleeps.
static Result run_after_failure(int count, int stopped) {
    return supervise(running([stopped](int index) {
                         if (index == 0) return EXIT_BAD_DATA + 0;
                         signal(SIGTERM, SIG_IGN);
                         if (index <= stopped) raise(SIGSTOP);
                         sleep(60);
                         return 0;
                     }),
                     count);
}

TEST_CASE("a rank that does not end after another rank's failure is killed") {
    const Result result = run_after_failure(3, 1);
    CHECK(result.exit_code == EXIT_BAD_DATA);
    CHECK(result.seconds > LAST.rank - 0.1);
    CHECK(result.seconds < LAST.rank + 5);
    CHECK(result.err == format("warning: rank 1 is stopped, and is killed\n"
                               "warning: rank 2 did not end within %g s, and is killed\n",
                               LAST.rank));
}

TEST_CASE("a stopped rank is killed soon after another rank's failure") {
    const Result result = run_after_failure(2, 1);
    CHECK(result.exit_code == EXIT_BAD_DATA);
    CHECK(result.seconds > LAST.stopped - 0.1);
    CHECK(result.seconds < LAST.stopped + 3);
    CHECK(result.err == "warning: rank 1 is stopped, and is killed\n");
}

TEST_CASE("a stopped rank is killed at once after a watchdog has ended another rank") {
    const Result result = supervise(running([](int index) {
                                        if (index == 1) raise(SIGSTOP);
                                        usleep(300000);  // until the other rank is stopped
                                        return int(EXIT_WATCHDOG);
                                    }),
                                    2);
    CHECK(result.exit_code == EXIT_WATCHDOG);
    CHECK(result.seconds < LAST.stopped);
    CHECK(result.err == "warning: rank 1 is stopped, and is killed\n");
}

// Its own watchdog is stopped, too, and no other rank waits for it.
TEST_CASE("a rank that is stopped when all others have ended is killed") {
    const auto rank = [](int index) {
        if (index == 1) raise(SIGSTOP);
        return 0;
    };
    LocalRanks program = running([rank](int) {
        for (int index = 0; index < 2; index++)
            if (fork() == 0) _exit(rank(index));
        while (wait(nullptr) > 0) continue;
        return 128 + SIGKILL;  // as mpirun, when a rank is killed
    });
    program.program = "mpirun";
    program.ranks_of_program = 2;
    for (const Result& result : {supervise(running(rank), 2), supervise(program, 1)}) {
        CHECK(result.exit_code == EXIT_WATCHDOG);
        CHECK(result.failure == "1 rank is stopped and cannot end, and all others have ended");
        CHECK(result.err == "error: " + result.failure + "; it is killed\n");
        CHECK(result.seconds > LAST.rank - 0.1);
        CHECK(result.seconds < LAST.rank + 4);
    }
}

TEST_CASE("a program that does not end after its ranks is killed") {
    LocalRanks ranks = running([](int) {
        for (int index = 0; index < 2; index++)
            if (fork() == 0) _exit(int(usleep(1500000)));  // until the supervisor has seen it
        for (;;) pause();
        return 0;
    });
    ranks.program = "mpirun";
    ranks.ranks_of_program = 2;
    const Result result = supervise(ranks, 1);
    CHECK(result.exit_code == EXIT_INTERNAL);
    CHECK(result.failure == "mpirun has not ended within 4 s after its ranks");
    CHECK(result.err == "error: " + result.failure + "; it is killed\n");
    CHECK(result.seconds < LAST.program + 6);
}

TEST_CASE("ranks that are all stopped for a while are not killed") {
    LocalRanks ranks = running([](int) {
        const pid_t own = getpid();
        if (fork() == 0) {  // lets the rank go on
            sleep(int(LAST.rank) + 3);
            kill(own, SIGCONT);
            _exit(0);
        }
        raise(SIGSTOP);
        return 0;
    });
    const Result result = supervise(ranks, 2);
    CHECK(result.exit_code == 0);
    CHECK(result.err == "");
}

TEST_CASE("lines of other ranks are whole and name their rank") {
    const Result result = supervise(running([](int index) {
                                        if (index == 0) return printf("the first rank\n"), 0;
                                        for (const char* part : {"one ", "line\nno ", "newline"})
                                            if (write(1, part, strlen(part)) > 0) usleep(20000);
                                        fprintf(stderr, "about rank %d0\n", index);
                                        return 0;
                                    }),
                                    3);
    for (const char* line : {"the first rank\n", "rank 1: one line\n", "rank 2: one line\n", "rank 1: no newline\n",
                             "rank 2: no newline\n"})
        CHECK(result.out.find(line) != std::string::npos);
    CHECK(result.err.find("rank 1: about rank 10\n") != std::string::npos);
}

// The errors of ranks that each print the text of their number.
static std::string errors_of(const std::vector<const char*>& texts) {
    const auto run = [&](int index) {
        send_errors_to_supervisor();
        fprintf(stderr, "error: rank %d on h: %s\n", index, texts[size_t(index)]);
        return int(EXIT_USAGE);
    };
    std::string lines = supervise(running(run), int(texts.size())).err;
    std::vector<std::string> sorted;  // errors of different ranks come in any order
    for (size_t end; (end = lines.find('\n')) != lines.npos; lines.erase(0, end + 1))
        sorted.push_back(lines.substr(0, end + 1));
    std::sort(sorted.begin(), sorted.end());
    for (const std::string& line : sorted) lines += line;
    return lines;
}

TEST_CASE("each error is printed once, with the ranks that have printed it; rank 0 is one of them") {
    CHECK(errors_of({"A", "A"}) == "error: ranks 0 and 1 on h: A\n");
    CHECK(errors_of({"A", "B", "B"}) == "error: rank 0 on h: A\nerror: ranks 1 and 2 on h: B\n");
    CHECK(errors_of({"A", "A", "B", "A", "A", "A"}) == "error: rank 2 on h: B\nerror: ranks 0, 1 and 3 to 5 on h: A\n");
}

TEST_CASE("an error of several lines is printed once, with its lines in their order") {
    const auto run = [](int index) {
        send_errors_to_supervisor();
        fprintf(stderr, "error: rank %d on h: none is intact:\n  A\n  B\n%s", index, index == 1 ? "rank 1: C\n" : "");
        return int(EXIT_BAD_DATA);
    };
    CHECK(supervise(running(run), 3).err == "rank 1: C\nerror: ranks 0 to 2 on h: none is intact:\n  A\n  B\n");
}

TEST_CASE("an error is printed soon although other ranks do not end") {
    const TemporaryDirectory dir;
    const pid_t pid = start_supervisor(dir, [] {
        LocalRanks ranks = running([](int index) {
            if (index == 1) fprintf(stderr, "error: rank 1 on h: A\n");
            for (;;) pause();
            return 0;
        });
        ranks.count = 2;
        return ranks;
    }());
    const std::string expected = "error: rank 1 on h: A\n";
    wait_until_file_has(dir / "err", expected.size());
    CHECK(read_bytes(dir / "err") == expected);
    kill(pid, SIGKILL);  // and the ranks with it
    waitpid(pid, nullptr, 0);
}

// Prints lines as mpirun does, then runs for two more seconds. Returns the seconds until the first line is passed on.
static double seconds_until_printed(const std::string& lines, std::string& all) {
    const TemporaryDirectory dir;
    LocalRanks ranks = running([lines](int) {
        if (write(2, lines.data(), lines.size()) < 0) return 1;
        sleep(2);
        return 0;
    });
    ranks.program = "mpirun";
    const double begin = seconds_now();
    const pid_t pid = start_supervisor(dir, ranks);
    wait_until_file_has(dir / "err", 1);
    const double seconds = seconds_now() - begin;
    waitpid(pid, nullptr, 0);
    all = read_bytes(dir / "err");
    return seconds;
}

TEST_CASE("the sentence of a watchdog is printed at once, and not again for another rank") {
    std::string all;
    const std::string hangs = " on h: no progress for 5 s (--timeout): step 41, micro-step 0, in collective 8\n";
    CHECK(seconds_until_printed("error: rank 0" + hangs + "error: rank 1" + hangs, all) < 0.7);
    CHECK((all == "error: rank 0" + hangs || all == "error: ranks 0 and 1" + hangs));
    CHECK(seconds_until_printed("error: rank 0 on h: A\n", all) > 0.9);
}

TEST_CASE("zero bytes in a program's output are left out, so that an error after one is found again") {
    LocalRanks ranks = running([](int) {
        const std::string_view text("error: rank 1: the same\n---\n\0error: rank 0: the same\n", 53);
        return write(1, text.data(), text.size()) == ssize_t(text.size()) ? 0 : 1;
    });
    ranks.program = "mpirun";
    const Result result = supervise(ranks, 1);
    CHECK(result.exit_code == 0);
    CHECK(result.out == "---\nerror: ranks 0 and 1: the same\n");
}

TEST_CASE("an error in a program's stderr is found, also if it follows text on the same line") {
    LocalRanks ranks = running([](int) {
        for (const std::string part :
             {"the text", "error: rank 1: A\nerror: ra", "nk 0: A\nmore", "error: rank 2: B\n"})
            if (write(2, part.data(), part.size()) > 0) usleep(20000);
        return 0;
    });
    ranks.program = "mpirun";
    CHECK(supervise(ranks, 1).err == "the text\nmore\nerror: ranks 0 and 1: A\nerror: rank 2: B\n");
}

TEST_CASE("a program's output passes through as it is, but an error of several ranks once") {
    LocalRanks ranks = running([](int) {
        for (const char* part :
             {"step 1\nst", "ep 2\n", "error: rank 1 on h: the same\nerror: rank 10 on h: the same\n",
              "error: another\n", "live\r"})
            if (write(1, part, strlen(part)) > 0) usleep(20000);
        usleep(100000);
        return 0;
    });
    ranks.program = "mpirun";
    const Result result = supervise(ranks, 1);
    CHECK(result.out == "step 1\nstep 2\nerror: another\nlive\rerror: ranks 1 and 10 on h: the same\n");
    CHECK(result.err == "");
}

// writes: a rank that writes more than a pipe holds.
static LocalRanks writes(const std::string& ready, bool ends) {
    LocalRanks ranks = running([=](int) {
        signal(SIGUSR1, [](int) { _exit(EXIT_PREEMPTED); });
        for (int i = 0; i < 20000; i++) printf("a line of 20 bytes.\n");
        fflush(stdout);
        std::ofstream(ready) << "x" << std::flush;
        while (!ends) pause();
        return 0;
    });
    ranks.program = "mpirun";
    ranks.count = 1;
    return ranks;
}

TEST_CASE("a program can write and be stopped although nobody reads what the supervisor writes") {
    for (const bool closed : {true, false}) {
        const TemporaryDirectory dir;
        int ends[2];
        REQUIRE(pipe(ends) == 0);
        const pid_t pid = fork();
        if (pid == 0) {
            signal(SIGPIPE, SIG_IGN);
            dup2(ends[1], 1);
            dup2(open((dir / "err").c_str(), O_WRONLY | O_CREAT, 0600), 2);
            close(ends[1]);
            if (closed) close(ends[0]);
            Supervisor supervisor;
            _exit(supervisor.run(writes(dir / "ready", closed)).exit_code);
        }
        close(ends[1]);
        if (closed) close(ends[0]);
        wait_until_file_has(dir / "ready", 1);
        usleep(100000);
        if (!closed) kill(pid, SIGTERM);
        int status = 0;
        for (int i = 0; i < 1000 && waitpid(pid, &status, WNOHANG) == 0; i++) usleep(10000);
        kill(pid, SIGKILL);
        if (!closed) close(ends[0]);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == (closed ? 0 : int(EXIT_PREEMPTED)));
        CHECK(read_bytes(dir / "err") ==
              (closed ? "warning: cannot write to stdout: Broken pipe; the run continues without it\n" : ""));
    }
}

TEST_CASE("a signal asks every rank to stop with SIGUSR1; a second one ends them") {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const auto wait_for_signal = [ready](bool stops) {
        return running([=](int index) {
            sigset_t set;
            sigemptyset(&set);
            sigaddset(&set, SIGUSR1);
            sigprocmask(SIG_BLOCK, &set, nullptr);
            std::ofstream(ready, std::ios::app) << "x" << std::flush;
            int number = 0;
            sigwait(&set, &number);
            while (!stops) pause();
            return index >= 0 && number == SIGUSR1 ? int(EXIT_PREEMPTED) : int(EXIT_INTERNAL);
        });
    };
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
        const Result result = supervise(wait_for_signal(true), 3, [&](pid_t pid) {
            wait_until_file_has(ready, 3);
            kill(pid, number);
        });
        CHECK(result.exit_code == EXIT_PREEMPTED);
        unlink(ready.c_str());
    }
    const Result twice = supervise(wait_for_signal(false), 2, [&](pid_t pid) {
        wait_until_file_has(ready, 2);
        kill(pid, SIGTERM);
        usleep(100000);
        kill(pid, SIGTERM);  // the same request
        usleep(700000);
        CHECK(runs(pid));
        kill(pid, SIGTERM);
    });
    CHECK(twice.exit_code == 128 + SIGTERM);
    CHECK(twice.err == "ended by a second signal: the steps since the last checkpoint are lost\n");
}

TEST_CASE("after a second signal the exit code is that of a signal, also if a program such as mpirun ends with 1") {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    LocalRanks ranks = running([ready](int) {
        signal(SIGUSR1, SIG_IGN);
        signal(SIGTERM, [](int) { _exit(EXIT_INTERNAL); });
        std::ofstream(ready) << "x" << std::flush;
        for (;;) pause();
        return 0;
    });
    ranks.end_signal = SIGTERM;
    const Result result = supervise(ranks, 1, [&](pid_t pid) {
        wait_until_file_has(ready, 1);
        kill(pid, SIGINT);
        usleep(700000);
        kill(pid, SIGINT);
    });
    CHECK(result.exit_code == 128 + SIGINT);
}

TEST_CASE("a request to stop that is lost is repeated") {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const Result result = supervise(running([=](int) {
                                        signal(SIGUSR1, SIG_IGN);  // as an mpirun that has no ranks yet
                                        std::ofstream(ready) << "x" << std::flush;
                                        usleep(800000);
                                        signal(SIGUSR1, [](int) { _exit(EXIT_PREEMPTED); });
                                        sleep(20);
                                        return 0;
                                    }),
                                    1, [&](pid_t pid) {
                                        wait_until_file_has(ready, 1);
                                        kill(pid, SIGTERM);
                                    });
    CHECK(result.exit_code == EXIT_PREEMPTED);
    CHECK(result.seconds < 10);
}

TEST_CASE("a request to stop is not repeated when a rank has said that it stops") {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    LocalRanks ranks = running([=](int) {
        signal(SIGUSR1, [](int) {
            signal(SIGUSR1, SIG_DFL);  // as an mpirun that is about to end
            const std::string line = std::string(STOPPING) + "the step is abandoned\n";
            if (write(2, line.data(), line.size()) < 0) _exit(EXIT_IO);
        });
        std::ofstream(ready) << "x" << std::flush;
        for (const double end = seconds_now() + 2.5; seconds_now() < end;) usleep(100000);
        return int(EXIT_PREEMPTED);
    });
    ranks.program = "mpirun";
    const Result result = supervise(ranks, 1, [&](pid_t pid) {
        wait_until_file_has(ready, 1);
        kill(pid, SIGTERM);
    });
    CHECK(result.exit_code == EXIT_PREEMPTED);
}

TEST_CASE("ranks are refused if pselect could not wait for their output") {
    std::vector<int> files;
    for (int file = 0; file >= 0 && file < FD_SETSIZE;) files.push_back(file = open("/dev/null", O_RDONLY));
    LocalRanks ranks = running([](int) { return 0; });
    ranks.program = "mpirun";
    {
        Supervisor supervisor;
        CHECK_THROWS_WITH_AS(supervisor.run(ranks), doctest::Contains("rank 0 cannot be started: "), Error);
    }
    for (int file : files)
        if (file > 2) close(file);
}

TEST_CASE("an ignored signal remains ignored, in the ranks too") {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    signal(SIGHUP, SIG_IGN);
    const Result result = supervise(running([=](int) {
                                        struct sigaction action;
                                        sigaction(SIGHUP, nullptr, &action);
                                        std::ofstream(ready, std::ios::app) << "x" << std::flush;
                                        usleep(300000);
                                        return action.sa_handler == SIG_IGN ? 0 : 1;
                                    }),
                                    2, [&](pid_t pid) {
                                        wait_until_file_has(ready, 2);
                                        kill(pid, SIGHUP);
                                    });
    signal(SIGHUP, SIG_DFL);
    CHECK(result.exit_code == 0);
}

#ifdef __linux__
TEST_CASE("no rank is left if the supervisor is killed") {
    const TemporaryDirectory dir;
    const std::string ready = dir / "ready";
    const pid_t supervisor = start_supervisor(dir, [&] {
        LocalRanks ranks = running([ready](int) {
            std::ofstream(ready, std::ios::app) << format("%9d\n", int(getpid())) << std::flush;
            for (;;) pause();
            return 0;
        });
        ranks.count = 2;
        return ranks;
    }());
    wait_until_file_has(ready, 20);
    kill(supervisor, SIGKILL);
    waitpid(supervisor, nullptr, 0);
    std::ifstream pids(ready);
    int count = 0;
    for (pid_t pid; pids >> pid; count++) {
        for (int i = 0; i < 500 && runs(pid); i++) usleep(10000);
        CHECK(!runs(pid));
    }
    CHECK(count == 2);
}
#endif

TEST_CASE("a pause ends at a signal") {
    Supervisor supervisor;
    double start = seconds_now();
    CHECK(supervisor.pause(0.2));
    CHECK(seconds_now() - start >= 0.2);
    raise(SIGTERM);  // blocked until the pause
    start = seconds_now();
    CHECK(!supervisor.pause(30));
    CHECK(seconds_now() - start < 10);
    CHECK(supervisor.request() == SIGTERM);
}

TEST_CASE("call_in_child returns the result or the error of the other process") {
    const pid_t own = getpid();
    CHECK(call_in_child([own] { return getpid() == own ? -1 : 8; }) == 8);
    try {
        call_in_child([]() -> int { fail(EXIT_BAD_DATA, "no GPU"); });
        CHECK(false);
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_BAD_DATA);
        CHECK(error.what() == std::string("no GPU"));
    }
    CHECK_THROWS_WITH(call_in_child([] { return raise(SIGKILL); }),
                      "a helper process was ended by signal 9 (Killed; out of memory?)");
}
