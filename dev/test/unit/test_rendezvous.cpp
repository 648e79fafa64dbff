// test_rendezvous.cpp: tests how ranks get NCCL's id by TCP. Ranks are threads that connect over 127.0.0.1, among
// foreign connections, late ranks and ranks of other runs.
#include "parallel/rendezvous.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/common.h"
#include "support/refusal.h"

constexpr int WINDOW = 16;  // ports above master_port, under torchrun

// ---- plain sockets of the test

static sockaddr_in local_address(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET, address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

// Listens on the port and never answers. Returns -1 if the port is taken.
static int occupy(int port) {
    const sockaddr_in address = local_address(port);
    const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 && listen(fd, 8) == 0) return fd;
    close(fd);
    return -1;
}

// A free port with WINDOW free ports above it, below the range of ephemeral ports.
static int free_ports() {
    static int next = 20000 + getpid() % 500 * 20;
    for (int free = 0; free <= WINDOW; next++) {
        const int fd = occupy(next);
        free = fd < 0 ? 0 : free + 1;
        if (fd >= 0) close(fd);
    }
    return next - WINDOW - 1;
}

// Connects to the port as soon as a rank listens there, and sends these bytes. Returns whether the other side closes
// the connection within 15 s, after any data.
static bool is_dropped(int port, const std::string& bytes) {
    const sockaddr_in address = local_address(port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
        close(fd);
        usleep(10000);
        fd = socket(AF_INET, SOCK_STREAM, 0);
    }
    send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    const timeval limit = {15, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    char buffer[256];
    ssize_t got;
    do got = recv(fd, buffer, sizeof(buffer), 0);
    while (got > 0);
    const bool dropped = got == 0 || errno == ECONNRESET;
    close(fd);
    return dropped;
}

// ---- ranks

// The ranks of a run.
static std::vector<Launch> ranks(int world_size, int port, const char* launcher = "srun") {
    std::vector<Launch> launches(static_cast<size_t>(world_size));
    for (int rank = 0; rank < world_size; rank++) {
        Launch& launch = launches[size_t(rank)];
        launch.launcher = launcher;
        launch.rank = rank, launch.world_size = world_size, launch.local_world_size = world_size;
        launch.master_addr = "127.0.0.1", launch.master_port = port;
        launch.run_id = "a";
    }
    return launches;
}

static std::string new_id() {
    std::string id;  // of any bytes
    for (int i = 0; i < NCCL_ID_BYTES; i++) id += char(2 * i);
    return id;
}

// What a rank gets: the id, or exit code and message of its error.
static std::string attend(const Launch& launch, double timeout) {
    std::string got;
    const std::string error = refusal([&] { got = share_nccl_id(launch, new_id, timeout); });
    return error + got;
}

// Runs each launch in a thread of its own. The first starts after `first_late` seconds.
static std::vector<std::string> attend_all(const std::vector<Launch>& launches, double timeout, double first_late = 0) {
    std::vector<std::string> outcomes(launches.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < launches.size(); i++)
        threads.emplace_back([&, i] {
            if (i == 0) std::this_thread::sleep_for(std::chrono::duration<double>(first_late));
            outcomes[i] = attend(launches[i], timeout);
        });
    for (std::thread& thread : threads) thread.join();
    return outcomes;
}

static void expect_id(const std::vector<std::string>& outcomes) {
    for (const std::string& outcome : outcomes) CHECK(outcome == new_id());
}

static void expect_error(const std::string& outcome, const std::string& part) {
    CHECK_MESSAGE(outcome.find(part) != std::string::npos, outcome << " instead of " << part);
}

TEST_CASE("all ranks get rank 0's id, also if its address is a name and it starts last") {
    for (int world_size : {1, 5}) expect_id(attend_all(ranks(world_size, free_ports()), 20));
    std::vector<Launch> launches = ranks(3, free_ports(), "torchrun");
    for (Launch& launch : launches) launch.master_addr = "localhost";
    expect_id(attend_all(launches, 20, 0.3));
}

TEST_CASE("if the port is in use, rank 0 takes the next one under torchrun, and fails otherwise") {
    const int port = free_ports(), fd = occupy(port);
    expect_id(attend_all(ranks(2, port, "torchrun"), 20));
    expect_error(attend(ranks(2, port)[0], 2), "1 rank 0 cannot listen on port ");
    close(fd);
}

TEST_CASE("foreign and silent connections are closed, and the ranks join") {
    const int port = free_ports();
    std::vector<std::thread> strangers;
    for (const char* bytes : {"GET / HTTP/1.1\r\nHost: h0\r\n\r\n", "PGT2"})
        strangers.emplace_back([=] { CHECK(is_dropped(port, bytes)); });
    expect_id(attend_all({ranks(3, port)[2], ranks(3, port)[0], ranks(3, port)[1]}, 40, 1));
    for (std::thread& thread : strangers) thread.join();
}

TEST_CASE("ranks of other runs and attempts in the same ports are ignored") {
    const int port = free_ports();
    std::vector<Launch> launches;
    for (const auto& [run_id, attempt] : {std::pair("a", 0), std::pair("b", 0), std::pair("a", 1)})
        for (Launch launch : ranks(2, port, "torchrun")) {
            launch.run_id = run_id, launch.attempt = attempt;
            launches.push_back(launch);
        }
    expect_id(attend_all(launches, 30));
}

TEST_CASE("ranks that contradict each other are refused") {
    int port = free_ports();
    std::vector<std::string> outcomes = attend_all({ranks(2, port)[0], ranks(3, port)[1]}, 2);
    expect_error(outcomes[0], "2 rank 1 is one of 3 ranks, and rank 0 is one of 2");
    port = free_ports();
    outcomes = attend_all({ranks(3, port)[0], ranks(3, port)[1], ranks(3, port)[1]}, 2);
    expect_error(outcomes[0], "2 two processes say that they are rank 1 of 3: start each rank once");
    for (int i : {1, 2}) CHECK(outcomes[size_t(i)].starts_with("1 "));  // they end too
}

TEST_CASE("after the timeout rank 0 names the ranks that did not come, and the others end with it") {
    const int port = free_ports();
    const std::vector<std::string> outcomes = attend_all({ranks(4, port)[0], ranks(4, port)[2]}, 1);
    expect_error(outcomes[0], "1 rank 0 has waited 1 s at 127.0.0.1:");
    expect_error(outcomes[0], "for ranks 1, 3");
    expect_error(outcomes[1], "has ended before all ranks had joined");
}

TEST_CASE("a rank that finds no rank 0 names the address and the error") {
    const std::string outcome = attend(ranks(2, free_ports())[1], 1);
    expect_error(outcome, "1 rank 1 could not join rank 0 at 127.0.0.1:");
    expect_error(outcome, "Connection refused");
    Launch nowhere = ranks(2, 29500)[1];
    nowhere.master_addr = "";
    expect_error(attend(nowhere, 1), "2 rank 1 of 2 (srun) has no address of rank 0");
}
