// child_process.h: runs the current test case again in a new process of the same program (fork and exec). In a merely
// forked process, ThreadSanitizer would ignore the host's accesses.
#pragma once
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

struct Ending {
    int status = 0;  // the exit status, or 128 + the signal
    std::string output;
};

// A doctest filter. A comma would end the filter, so it becomes a wildcard.
inline std::string this_test_case() {
    std::string name = doctest::getContextOptions()->currentTest->m_name;
    std::replace(name.begin(), name.end(), ',', '*');
    return name;
}

// In a child runs f, if f is what the child was started for, and ends the process. Returns the number of this call in
// its test case, by which a child finds it; -1 in a child that runs another call.
inline int run_in_child(const std::function<void()>& f) {
    static std::map<std::string, int> calls_of;
    const int call = calls_of[this_test_case()]++;
    const char* wanted = getenv("TEST_CALL");
    if (!wanted) return call;
    if (atoi(wanted) != call) return -1;
    signal(SIGABRT, SIG_DFL);  // removes doctest's handler
    alarm(60);
    f();
    exit(0);
}

class Child {
    pid_t process = -1;
    int output = -1;

  public:
    Child(int call, const std::map<std::string, std::string>& variables) {
        int ends[2];
        REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
        process = fork();
        REQUIRE(process >= 0);
        if (process == 0) {
            dup2(ends[1], 1);
            dup2(ends[1], 2);
            setenv("TEST_CALL", std::to_string(call).c_str(), 1);
            for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
            execl("/proc/self/exe", "test", ("--test-case=" + this_test_case()).c_str(), nullptr);
            _exit(127);
        }
        close(ends[1]);
        output = ends[0];
    }

    Ending wait() const {
        Ending e;
        char buffer[4096];
        for (ssize_t n; (n = read(output, buffer, sizeof(buffer))) > 0;) e.output.append(buffer, size_t(n));
        close(output);
        waitpid(process, &e.status, 0);
        e.status = WIFSIGNALED(e.status) ? 128 + WTERMSIG(e.status) : WEXITSTATUS(e.status);
        return e;
    }
};
