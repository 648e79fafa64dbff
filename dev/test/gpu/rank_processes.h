// rank_processes.h: ranks of a test case, each a new process that runs the same program with its own GPU in the
// emulator.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "gpu/child_process.h"
#include "gpu/on_gpu.h"
#include "parallel/launch.h"

struct Ranks {
    int number = 2;
    const char* streams = "now";  // SIMT_STREAMS of every rank
};

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

// Runs body(launch) as each of the ranks, and returns how they end; in a child, nothing.
inline std::vector<Ending> run_ranks(const Ranks& ranks, const std::function<void(const Launch&)>& body) {
    const int call = run_in_child([&] {
        Launch launch;
        launch.launcher = "test";
        launch.master_addr = "127.0.0.1";
        launch.rank = atoi(getenv("TEST_RANK"));
        launch.world_size = ranks.number;
        launch.master_port = atoi(getenv("TEST_PORT"));
        try {
            device_init(launch.rank, 1);
            body(launch);
        } catch (const Error& error) {
            fprintf(stderr, "error: %s\n", error.what());
            fflush(nullptr);
            _exit(error.exit_code);
        }
    });
    if (call < 0) return {};
    const std::string port = std::to_string(free_port()), number = std::to_string(ranks.number);
    std::vector<Child> children;
    for (int r = 0; r < ranks.number; r++)
        children.emplace_back(call, std::map<std::string, std::string>{{"TEST_RANK", std::to_string(r)},
                                                                       {"TEST_PORT", port},
                                                                       {"SIMT_DEVICES", number},
                                                                       {"SIMT_STREAMS", ranks.streams}});
    std::vector<Ending> endings;
    for (const Child& child : children) endings.push_back(child.wait());
    return endings;
}

inline void expect_success(const std::vector<Ending>& endings) {
    for (size_t r = 0; r < endings.size(); r++)
        CHECK_MESSAGE(endings[r].status == 0, "rank " << r << ": " << endings[r].status << " " << endings[r].output);
}
