// rank_processes.h: ranks of a test case, each a new process that runs the same program with its own GPU in the
// emulator.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "gpu/on_gpu.h"
#include "parallel/launch.h"

struct Ending {
    int status = 0;
    std::string output;
};

struct Ranks {
    int number = 2;
    const char* streams = "now";  // SIMT_STREAMS of every rank
};

// The name of the running test case as a doctest filter. A comma would end the filter, so it becomes a wildcard.
inline std::string this_test_case() {
    std::string name = doctest::getContextOptions()->currentTest->m_name;
    std::replace(name.begin(), name.end(), ',', '*');
    return name;
}

inline Ending read_all(pid_t child, int end) {
    Ending e;
    char buffer[4096];
    for (ssize_t n; (n = read(end, buffer, sizeof(buffer))) > 0;) e.output.append(buffer, size_t(n));
    close(end);
    waitpid(child, &e.status, 0);
    e.status = WIFSIGNALED(e.status) ? 128 + WTERMSIG(e.status) : WEXITSTATUS(e.status);
    return e;
}

// A free port below the range of ephemeral ports. Each call returns another one.
inline int free_port() {
    static int next = 11000 + getpid() % 8000;
    for (;;) {
        const int socket_fd = socket(AF_INET, SOCK_STREAM, 0), port = next++;
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(uint16_t(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const bool is_free = bind(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
        close(socket_fd);
        if (is_free) return port;
    }
}

// Runs body(launch) as each of the ranks, in new processes (fork and exec). In merely forked processes, ThreadSanitizer
// would ignore the host's accesses.
inline std::vector<Ending> run_ranks(const Ranks& ranks, const std::function<void(const Launch&)>& body) {
    static std::map<std::string, int> calls_of;  // by test case, because the new processes run only one test case
    const std::string test_case = this_test_case();
    const int call = calls_of[test_case]++;
    if (const char* wanted = getenv("TEST_COMM_CALL")) {
        if (atoi(wanted) != call) return {};
        signal(SIGABRT, SIG_DFL);  // removes doctest's handler
        alarm(60);
        Launch launch;
        launch.launcher = "test";
        launch.master_addr = "127.0.0.1";
        launch.rank = atoi(getenv("TEST_COMM_RANK"));
        launch.world_size = atoi(getenv("TEST_COMM_RANKS"));
        launch.master_port = atoi(getenv("TEST_COMM_PORT"));
        try {
            device_init(launch.rank, 1);
            body(launch);
        } catch (const Error& error) {
            fprintf(stderr, "error: %s\n", error.what());
            fflush(nullptr);
            _exit(error.exit_code);
        }
        exit(0);
    }
    const int port = free_port();
    std::vector<std::pair<pid_t, int>> children;
    for (int r = 0; r < ranks.number; r++) {
        int ends[2];
        REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            dup2(ends[1], 1);
            dup2(ends[1], 2);
            setenv("TEST_COMM_CALL", std::to_string(call).c_str(), 1);
            setenv("TEST_COMM_RANK", std::to_string(r).c_str(), 1);
            setenv("TEST_COMM_RANKS", std::to_string(ranks.number).c_str(), 1);
            setenv("TEST_COMM_PORT", std::to_string(port).c_str(), 1);
            setenv("SIMT_DEVICES", std::to_string(ranks.number).c_str(), 1);
            setenv("SIMT_STREAMS", ranks.streams, 1);
            execl("/proc/self/exe", "test_gpu_comm", ("--test-case=" + test_case).c_str(), nullptr);
            _exit(127);
        }
        close(ends[1]);
        children.push_back({child, ends[0]});
    }
    std::vector<Ending> endings;
    for (const auto& [child, end] : children) endings.push_back(read_all(child, end));
    return endings;
}

inline void expect_success(const std::vector<Ending>& endings) {
    for (size_t r = 0; r < endings.size(); r++)
        CHECK_MESSAGE(endings[r].status == 0, "rank " << r << ": " << endings[r].status << " " << endings[r].output);
}
