// test_rendezvous.cpp: tests how ranks get NCCL's id by TCP. Ranks are threads that connect over 127.0.0.1, among
// foreign connections, late ranks and ranks of other runs.
#include "parallel/rendezvous.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/common.h"
#include "support/refusal.h"
#include "support/skip.h"

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

// Returns the first of 400 ports that no other process of these tests uses: it holds the port before them.
static int own_ports() {
    int port = 20000;
    while (port < 32000 && occupy(port) < 0) port += 400;
    return port + 1;
}

// A free port with WINDOW free ports above it, below the range of ephemeral ports.
static int free_ports() {
    static int next = own_ports();
    for (int free = 0; free <= WINDOW; next++) {
        const int fd = occupy(next);
        free = fd < 0 ? 0 : free + 1;
        if (fd >= 0) close(fd);
    }
    return next - WINDOW - 1;
}

// Connects to the port as soon as a rank listens there.
static int connect_to(int port) {
    const sockaddr_in address = local_address(port);
    for (;;) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        const timeval limit = {15, 0};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
        close(fd);
        usleep(10000);
    }
}

// Returns what the other side sends before it ends the connection, within 15 s, or before `most` bytes.
static std::string all_from(int fd, size_t most = 1000) {
    std::string all(most, 0);
    const ssize_t got = recv(fd, all.data(), most, MSG_WAITALL);
    CHECK((got >= 0 || errno == ECONNRESET));
    return all.substr(0, size_t(std::max<ssize_t>(0, got)));
}

static void send_to(int fd, const std::string& bytes) { send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

// ---- ranks

// The ranks of a run.
static std::vector<Launch> ranks(int world_size, int port, const char* launcher = "srun",
                                 const std::string& secret = "") {
    std::vector<Launch> launches(static_cast<size_t>(world_size));
    for (int rank = 0; rank < world_size; rank++) {
        Launch& launch = launches[size_t(rank)];
        launch.launcher = launcher;
        launch.rank = rank, launch.world_size = world_size, launch.local_world_size = world_size;
        launch.master_addr = "127.0.0.1", launch.master_port = port;
        launch.run_id = "a", launch.secret = secret;
    }
    return launches;
}

static std::string new_id() {
    std::string id;  // any bytes
    for (int i = 0; i < NCCL_ID_BYTES; i++) id += char(2 * i);
    return id;
}

// Returns the id that a rank gets, or exit code and message of its error.
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

// Expects each of these errors of the launches. A rank may come too late on a busy machine: longer timeouts follow.
static void expect_errors(const std::vector<Launch>& launches,
                          const std::vector<std::pair<size_t, std::string>>& errors) {
    std::vector<std::string> outcomes;
    const auto is_found = [&](const auto& error) {
        return outcomes[error.first].find(error.second) != std::string::npos;
    };
    for (const double timeout : {0.5, 4.0, 16.0}) {
        outcomes = attend_all(launches, timeout);
        if (std::all_of(errors.begin(), errors.end(), is_found)) break;
    }
    for (const auto& [launch, error] : errors) expect_error(outcomes[launch], error);
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

TEST_CASE("strangers, of whom most are silent, get a random number and no word, and the ranks join") {
    for (const std::string& secret : {std::string(), make_secret()}) {
        const int port = free_ports();
        const std::vector<Launch> all = ranks(3, port, "srun", secret);
        std::thread rank_0([&] { CHECK(attend(all[0], 40) == new_id()); });
        std::vector<int> strangers, silent(200);
        const std::string zeros(8 + 32 + 32, 0);  // a hello with a wrong proof
        for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("PGT2"), zeros, zeros}) {
            strangers.push_back(connect_to(port));
            send_to(strangers.back(), bytes);
        }
        for (int& fd : silent) fd = connect_to(port);
        expect_id(attend_all({all[2], all[1]}, 40));
        rank_0.join();
        std::vector<std::string> answers;
        for (const int fd : strangers) {
            answers.push_back(all_from(fd));
            CHECK(answers.back().size() == 32);
            close(fd);
        }
        CHECK(answers[2] != answers[3]);
        for (const int fd : silent) close(fd);
    }
}

TEST_CASE("rank 0 at a loopback address listens at no other") {
    const int port = free_ports();
    std::thread rank_0([&] { expect_error(attend(ranks(2, port)[0], 1), "for ranks 1"); });
    close(connect_to(port));
    sockaddr_in other = local_address(port);
    other.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&other), sizeof(other)) != 0);
    close(fd);
    rank_0.join();
}

TEST_CASE("a rank with another secret, or none, does not join, and the message says so") {
    const std::string secret = make_secret();
    if (secret.empty()) return skip_case("this build has no libcrypto");
    const int port = free_ports();
    const std::vector<Launch> own = ranks(4, port, "srun", secret), none = ranks(4, port);
    const std::string stranger = "a stranger came, or a rank with another TRAIN_GPT2_SECRET, run or attempt";
    const std::string other = "has another TRAIN_GPT2_SECRET, run or attempt";
    expect_errors({own[0], own[1], ranks(4, port, "srun", make_secret())[2], none[3]},
                  {{0, "for ranks 2, 3;"},
                   {0, stranger},
                   {2, "1 rank 2 could not join rank 0 at 127.0.0.1:"},
                   {2, other},
                   {3, "1 rank 3 could not join rank 0 at 127.0.0.1:"},
                   {3, other}});
}

TEST_CASE("a stranger between a rank and rank 0 cannot read the id, nor use again or send back what it has heard") {
    const std::string secret = make_secret();
    if (secret.empty()) return skip_case("this build has no libcrypto");
    const int port = free_ports(), listener = occupy(port + 1);  // rank 0 takes the next port
    const std::vector<Launch> all = ranks(4, port, "torchrun", secret);
    std::string heard;
    std::thread stranger([&] {
        const int first = accept(listener, nullptr, nullptr);  // poses as rank 0, and sends a hello back
        send_to(first, std::string(32, 'x'));
        send_to(first, all_from(first, 72));
        const int rank = accept(listener, nullptr, nullptr), rank_0 = connect_to(port + 2);  // passes all on
        close(listener);
        send_to(rank, all_from(rank_0, 32));
        const std::string hello = all_from(rank, 72);
        send_to(rank_0, hello);
        send_to(rank, all_from(rank_0, 72));
        const int again = connect_to(port + 2);
        send_to(again, hello);
        CHECK(all_from(again).size() == 32);
        std::thread last([&] { expect_id({attend(all[3], 30)}); });
        heard = all_from(rank_0, 128 + 32);
        send_to(rank, heard);
        last.join();
        for (const int fd : {first, rank, rank_0, again}) close(fd);
    });
    std::thread rank_2([&] {
        usleep(300000);
        expect_id({attend(all[2], 30)});
    });
    expect_id(attend_all({all[0], all[1]}, 30));
    stranger.join();
    rank_2.join();
    CHECK(heard.size() == 160);
    CHECK(heard.find(new_id().substr(0, 8)) == std::string::npos);
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

TEST_CASE("ranks that contradict rank 0 are refused, and it waits on for others") {
    for (const std::string& secret : {std::string(), make_secret()}) {
        int port = free_ports();
        expect_errors({ranks(2, port, "srun", secret)[0], ranks(3, port, "srun", secret)[1]},
                      {{0, "1 rank 0 has waited "},
                       {0, "it has refused rank 1 of 3"},
                       {1, "2 rank 0, of 2 ranks, refuses rank 1 of 3: start each rank once"}});
        port = free_ports();
        const std::vector<Launch> all = ranks(3, port, "srun", secret);
        std::atomic<int> ended = 0;
        std::string twice[2];
        std::vector<std::thread> threads;
        for (std::string& outcome : twice)
            threads.emplace_back([&] {
                outcome = attend(all[1], 20);
                ended++;
            });
        threads.emplace_back([&] {
            while (ended == 0) usleep(10000);
            expect_id({attend(all[2], 20)});
        });
        expect_id({attend(all[0], 20)});
        for (std::thread& thread : threads) thread.join();
        if (twice[0] != new_id()) std::swap(twice[0], twice[1]);
        expect_id({twice[0]});
        expect_error(twice[1], "2 rank 0, of 3 ranks, refuses rank 1 of 3: start each rank once");
    }
}

TEST_CASE("after the timeout rank 0 names the ranks that did not come, and the others end with it") {
    const int port = free_ports();
    expect_errors({ranks(4, port)[0], ranks(4, port)[2]}, {{0, "1 rank 0 has waited "},
                                                           {0, " s at 127.0.0.1:"},
                                                           {0, "for ranks 1, 3"},
                                                           {1, "has ended before all ranks had joined"}});
}

TEST_CASE("a rank that finds no rank 0 names the address and the error") {
    const std::string outcome = attend(ranks(2, free_ports())[1], 1);
    expect_error(outcome, "1 rank 1 could not join rank 0 at 127.0.0.1:");
    expect_error(outcome, "Connection refused");
    Launch nowhere = ranks(2, 29500)[1];
    nowhere.master_addr = "";
    expect_error(attend(nowhere, 1), "2 rank 1 of 2 (srun) has no address of rank 0");
}
