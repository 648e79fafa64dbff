// test_rendezvous.cpp: tests the TCP rendezvous. Ranks are threads that connect over 127.0.0.1, among foreign
// connections, late ranks and ranks of other runs. The tests check each rank's result or error message, and that no
// rank waits for long.
#include "parallel/rendezvous.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "support/skip.h"

static void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

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
    for (;; next += WINDOW + 1) {
        std::vector<int> sockets;
        for (int port = next; port <= next + WINDOW; port++) sockets.push_back(occupy(port));
        bool free = true;
        for (int fd : sockets) {
            free = free && fd >= 0;
            if (fd >= 0) close(fd);
        }
        if (!free) continue;
        next += WINDOW + 1;
        return next - WINDOW - 1;
    }
}

// Connects to the port as soon as a rank listens there, and sends these bytes.
static int stranger(int port, const std::string& bytes) {
    const sockaddr_in address = local_address(port);
    for (int tries = 0; tries < 500; tries++) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
            send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            return fd;
        }
        close(fd);
        sleep_for(0.01);
    }
    return -1;
}

// Whether the other side closes the connection within the time. Ignores the data that it sends before.
static bool is_dropped(int fd, double seconds) {
    const timeval limit = {time_t(seconds), suseconds_t(1e6 * (seconds - double(time_t(seconds))))};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    char buffer[256];
    ssize_t got;
    do got = recv(fd, buffer, sizeof(buffer), 0);
    while (got > 0);
    return got == 0 || errno == ECONNRESET;
}

// ---- ranks

struct Outcome {
    Rendezvous result;
    std::string error;
    int code = 0;
    double seconds = 0;
};

static Launch rank_of(int rank, int world_size, int port, const char* launcher = "options") {
    Launch launch;
    launch.launcher = launcher;
    launch.rank = rank, launch.world_size = world_size, launch.local_rank = rank;
    launch.local_world_size = world_size;
    launch.master_addr = "127.0.0.1", launch.master_port = port;
    launch.run_id = "a";
    return launch;
}

static Outcome attend(const Launch& launch, double timeout, const std::string& nccl_id = "nccl_id") {
    Outcome outcome;
    const double start = seconds_now();
    try {
        outcome.result = rendezvous(
            launch, "rank_info " + std::to_string(launch.rank), [&] { return nccl_id; }, timeout);
    } catch (const Error& error) {
        outcome.error = error.what(), outcome.code = error.exit_code;
    }
    outcome.seconds = seconds_now() - start;
    return outcome;
}

// Runs each launch in a thread of its own. The first starts after `first_late` seconds.
static std::vector<Outcome> attend_all(const std::vector<Launch>& launches, double timeout, double first_late = 0,
                                       const std::string& nccl_id = "nccl_id") {
    std::vector<Outcome> outcomes(launches.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < launches.size(); i++)
        threads.emplace_back([&, i] {
            if (i == 0) sleep_for(first_late);
            outcomes[i] = attend(launches[i], timeout, nccl_id);
        });
    for (std::thread& thread : threads) thread.join();
    return outcomes;
}

static std::vector<Launch> ranks(int world_size, int port, const char* launcher = "options") {
    std::vector<Launch> launches;
    for (int rank = 0; rank < world_size; rank++) launches.push_back(rank_of(rank, world_size, port, launcher));
    return launches;
}

static void expect_rendezvous(const std::vector<Outcome>& outcomes, const std::string& nccl_id = "nccl_id") {
    for (const Outcome& outcome : outcomes) {
        CHECK(outcome.error == "");
        REQUIRE(outcome.result.rank_infos.size() == outcomes.size());
        for (size_t i = 0; i < outcomes.size(); i++)
            CHECK(outcome.result.rank_infos[i] == "rank_info " + std::to_string(i));
        CHECK(outcome.result.nccl_id == nccl_id);
    }
}

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Every rank must fail soon, with the same message.
static void expect_refusal(const std::vector<Outcome>& outcomes, const std::string& part) {
    for (const Outcome& outcome : outcomes) {
        CHECK(outcome.code == EXIT_USAGE);
        CHECK(outcome.error == outcomes[0].error);
        CHECK(outcome.seconds < 4);
    }
    CHECK_MESSAGE(contains(outcomes[0].error, part), outcomes[0].error << " instead of " << part);
}

TEST_CASE("all ranks get the same rank_infos and nccl_id") {
    for (int world_size : {1, 2, 5})
        for (const char* launcher : {"options", "srun", "torchrun"})
            expect_rendezvous(attend_all(ranks(world_size, free_ports(), launcher), 20));
}

TEST_CASE("the address may be a name, IPv6, or the host's own name") {
    for (std::string host : {std::string("localhost"), std::string("::1"), host_name()}) {
        if (host == "::1" && access("/proc/net/if_inet6", F_OK) != 0) {
            skip_part(host, "this machine has no IPv6");
            continue;
        }
        const int port = free_ports();
        std::vector<Launch> launches = ranks(2, port);
        for (Launch& launch : launches) launch.master_addr = host;
        CAPTURE(host);
        const std::vector<Outcome> outcomes = attend_all(launches, 2);
        if (host == host_name() && contains(outcomes[1].error, "Name or service not known"))
            skip_part(host, "this host does not know its own name");
        else
            expect_rendezvous(outcomes);
    }
}

TEST_CASE("the nccl_id may have any bytes up to its largest size, and rank_infos any size") {
    std::string nccl_id(MAX_NCCL_ID, '\0');
    for (size_t i = 0; i < nccl_id.size(); i++) nccl_id[i] = char(i * 7);
    expect_rendezvous(attend_all(ranks(2, free_ports()), 20, 0, nccl_id), nccl_id);
    expect_rendezvous(attend_all(ranks(2, free_ports()), 20, 0, ""), "");
    const std::vector<Outcome> outcomes = attend_all(ranks(2, free_ports()), 20, 0, nccl_id + "x");
    CHECK(outcomes[0].error ==
          "internal error: an NCCL id has 4097 bytes; at most 4096 are supported; please report it");
    CHECK(outcomes[1].error ==
          "rank 0: internal error: an NCCL id has 4097 bytes; at most 4096 are supported; please report it");

    const int port = free_ports();
    const std::string rank_info(MAX_RANK_INFO, '\xff');
    Rendezvous of_guest;
    std::thread peer([&] { of_guest = rendezvous(rank_of(1, 2, port), rank_info, nullptr, 20); });
    const Rendezvous of_host = rendezvous(
        rank_of(0, 2, port), "", [] { return "x"; }, 20);
    peer.join();
    CHECK(of_host.rank_infos == std::vector<std::string>{"", rank_info});
    CHECK(of_guest.rank_infos == of_host.rank_infos);
    CHECK_THROWS_WITH_AS(rendezvous(rank_of(1, 2, port), rank_info + "x", nullptr, 20),
                         "internal error: a rank_info has 4097 bytes; at most 4096 are supported; please report it",
                         Error);
}

TEST_CASE("the nccl_id is made once, after all ranks have connected, and a failure reaches all ranks") {
    const int port = free_ports();
    std::vector<std::string> order;
    std::thread peer([&] {
        sleep_for(0.1);
        order.push_back("peer");
        CHECK_THROWS_WITH_AS(rendezvous(rank_of(1, 2, port), "", nullptr, 20), "rank 0: no id today", Error);
    });
    const auto nccl_id = [&]() -> std::string {
        order.push_back("nccl_id");
        fail(EXIT_IO, "no id\ntoday");
    };
    CHECK_THROWS_WITH_AS(rendezvous(rank_of(0, 2, port), "", nccl_id, 20), "no id\ntoday", Error);
    peer.join();
    CHECK(order == std::vector<std::string>{"peer", "nccl_id"});
}

TEST_CASE("rank 0 may start last") { expect_rendezvous(attend_all(ranks(3, free_ports()), 20, 0.3)); }

TEST_CASE("if the port is in use, rank 0 takes the next one under torchrun, and fails otherwise") {
    const int port = free_ports();
    const int agent = occupy(port), other = occupy(port + 1);
    expect_rendezvous(attend_all({rank_of(0, 1, port, "torchrun")}, 1));
    const Outcome outcome = attend(rank_of(0, 2, port), 1);
    CHECK(outcome.code == EXIT_INTERNAL);
    CHECK(outcome.error == format("rank 0 cannot listen on 127.0.0.1:%d: Address already in use; was it started twice? "
                                  "If not, give another port",
                                  port));
    close(other);
    Outcome first;
    std::thread host([&] { first = attend(rank_of(0, 2, port + 1), 0.25); });
    sleep_for(0.1);
    CHECK(contains(attend(rank_of(0, 2, port + 1), 0.4).error, "was it started twice?"));  // the port is not shared
    host.join();
    CHECK(contains(first.error, "rank 1 of 2 did not connect to "));
    // The listener on the first port closes each connection at once.
    const int rude = occupy(port + 1);
    std::thread closes([&] {
        for (int fd; (fd = accept(rude, nullptr, nullptr)) >= 0;) close(fd);
    });
    expect_rendezvous(attend_all(ranks(2, port, "torchrun"), 20, 0.2));
    shutdown(rude, SHUT_RDWR);
    closes.join();
    close(rude);
    close(agent);
}

TEST_CASE("foreign connections are dropped, and the rendezvous succeeds") {
    const int port = free_ports();
    std::vector<Outcome> outcomes;
    std::thread joining([&] {
        std::vector<Launch> launches = ranks(3, port);
        std::vector<std::thread> late;
        outcomes.resize(3);
        for (size_t i = 0; i < 3; i++)
            late.emplace_back([&, i] {
                if (i > 0) sleep_for(0.25);
                outcomes[i] = attend(launches[i], 20);
            });
        for (std::thread& thread : late) thread.join();
    });
    const std::string hello = encode(Hello{3, 1, 0, uint32_t(port), 1, "a", "rank_info"});
    std::string too_long = hello, other_version = hello;
    too_long[12] = too_long[13] = too_long[14] = '\x7f';
    other_version[8] = 2;
    const int silent = stranger(port, ""), half = stranger(port, hello.substr(0, 30));
    for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), too_long, other_version, hello + "x",
                                     encode(Answer{}), std::string(100'000, 'G')}) {
        const int fd = stranger(port, bytes);
        CHECK(is_dropped(fd, 3));
        close(fd);
    }
    close(stranger(port, ""));
    joining.join();
    expect_rendezvous(outcomes);
    for (const Outcome& outcome : outcomes) CHECK(outcome.seconds < 4);  // no rank waited for a silent connection
    close(silent), close(half);
}

TEST_CASE("after 5 s without a whole message rank 0 drops a connection, and a rank tries the next port") {
    const int port = free_ports();
    const int mute = occupy(port + 1);
    double dropped_after = 0;
    std::thread half([&] {
        const double start = seconds_now();
        const int fd = stranger(port + 2, encode(Hello{2, 1, 0, uint32_t(port), 1, "a", ""}).substr(0, 20));
        sleep_for(2);
        send(fd, "x", 1, MSG_NOSIGNAL);  // single bytes do not extend the limit
        if (is_dropped(fd, 8)) dropped_after = seconds_now() - start;
        close(fd);
    });
    std::vector<Outcome> outcomes(2);
    std::thread host([&] { outcomes[0] = attend(rank_of(0, 2, port, "torchrun"), 30); });
    sleep_for(0.3);  // so that rank 0 drops the foreign connection before the rendezvous ends, which closes all
    outcomes[1] = attend(rank_of(1, 2, port, "torchrun"), 30);
    host.join();
    half.join();
    expect_rendezvous(outcomes);
    CHECK(outcomes[1].seconds > 4.9);
    CHECK(dropped_after > 4.9);
    CHECK(dropped_after < 6.5);  // it would be 7 s if the byte after 2 s restarted the limit
    close(mute);
}

TEST_CASE("ranks that contradict each other fail with the same message, and so do the waiting ranks") {
    const auto with_guest = [](auto&& change) {
        std::vector<Launch> launches = ranks(3, free_ports());
        change(launches[2]);
        return attend_all(launches, 20);
    };
    expect_refusal(with_guest([](Launch& launch) { launch.rank = 1; }),
                   "two processes say that they are rank 1 of 3, on 127.0.0.1 and 127.0.0.1: start each rank once");
    expect_refusal(with_guest([](Launch& launch) { launch.world_size = 4; }),
                   "rank 2 (127.0.0.1) is one of 4 ranks, rank 0 one of 3: start all with the same world size");
    expect_refusal(with_guest([](Launch& launch) { launch.run_id = "b"; }),
                   "rank 2 (127.0.0.1) is of run 'b', rank 0 of run 'a': give all ranks the same run id");
    expect_refusal(with_guest([](Launch& launch) { launch.attempt = 1; }),
                   "rank 2 (127.0.0.1) is in attempt 1, rank 0 in attempt 0");
    // A rank that comes after the failure gets the message too.
    std::vector<Launch> launches = ranks(3, free_ports());
    launches[2].world_size = 4;
    std::swap(launches[0], launches[1]);
    expect_refusal(attend_all(launches, 20, 0.3), "is one of 4 ranks, rank 0 one of 3");
}

TEST_CASE("under torchrun other runs and attempts in the same ports are ignored") {
    const int port = free_ports();
    std::vector<Launch> launches = ranks(2, port, "torchrun");
    for (Launch launch : ranks(2, port, "torchrun")) launch.run_id = "b", launches.push_back(launch);
    for (Launch launch : ranks(2, port, "torchrun")) launch.attempt = 1, launches.push_back(launch);
    const std::vector<Outcome> outcomes = attend_all(launches, 20);
    for (size_t i = 0; i < outcomes.size(); i += 2) expect_rendezvous({outcomes[i], outcomes[i + 1]});
    // Another run with the same id, whose window of ports begins one port lower. Its rank 0 listens on the first port
    // of this run.
    const int taken = occupy(port);
    std::vector<Outcome> others(2);
    std::thread host([&] { others[0] = attend(rank_of(0, 2, port - 1, "torchrun"), 20, "theirs"); });
    sleep_for(0.05);
    expect_rendezvous(attend_all(ranks(2, port, "torchrun"), 20));
    close(taken);
    others[1] = attend(rank_of(1, 2, port - 1, "torchrun"), 20);
    host.join();
    expect_rendezvous(others, "theirs");
    // Each torchrun agent counts its own restarts.
    launches = ranks(2, free_ports(), "torchrun");
    for (Launch& launch : launches) launch.local_world_size = 1, launch.attempt = launch.rank;
    expect_rendezvous(attend_all(launches, 20));
}

TEST_CASE("a restarted process replaces the one that left") {
    const int port = free_ports();
    std::vector<Outcome> outcomes(3);
    std::thread host([&] { outcomes[0] = attend(rank_of(0, 3, port), 20); });
    const int left = stranger(port, encode(Hello{3, 1, 0, uint32_t(port), 1, "a", "rank_info of the first"}));
    char in[16];
    CHECK(recv(left, in, sizeof(in), MSG_WAITALL) == 16);  // rank 0 accepted it
    close(left);
    // The same process again, while rank 0 still holds its first connection.
    const int lost = stranger(port, encode(Hello{3, 2, 0, uint32_t(port), 2, "a", "rank_info"}));
    const int again = stranger(port, encode(Hello{3, 2, 0, uint32_t(port), 2, "a", "rank_info 2"}));
    CHECK(is_dropped(lost, 3));
    outcomes[1] = attend(rank_of(1, 3, port), 20);
    host.join();
    CHECK(outcomes[0].error == "");
    CHECK(outcomes[0].result.rank_infos == std::vector<std::string>{"rank_info 0", "rank_info 1", "rank_info 2"});
    CHECK(outcomes[1].result.rank_infos == outcomes[0].result.rank_infos);
    close(lost), close(again);
}

TEST_CASE("every rank names the ranks that did not come, after the timeout") {
    const int port = free_ports();
    std::vector<Launch> launches = ranks(8, port);
    launches = {launches[0], launches[1], launches[4]};
    for (const Outcome& outcome : attend_all(launches, 0.5)) {
        CHECK(outcome.code == EXIT_INTERNAL);
        CHECK(outcome.error ==
              format("ranks 2-3, 5-7 of 8 did not connect to 127.0.0.1:%d within 0.5 s; are they running, and "
                     "can they reach it?",
                     port));
        CHECK(outcome.seconds > 0.45);
        CHECK(outcome.seconds < 3);
    }
    Outcome outcome;
    std::thread host([&] { outcome = attend(rank_of(0, 2, port), 0.2); });
    const int fd = stranger(port, "GET /");
    host.join();
    CHECK(contains(outcome.error, "within 0.2 s; are they running"));
    CHECK(contains(outcome.error, "(1 other connections; the last: 127.0.0.1 did not send a rank's hello)"));
    close(fd);
}

TEST_CASE("a rank that finds no rank 0 names the addresses that it tried and their errors") {
    const int port = free_ports();
    std::vector<Launch> launches = {rank_of(1, 2, port), rank_of(1, 2, port, "torchrun"), rank_of(1, 2, port)};
    launches[2].master_addr = "no-such-host.invalid";
    const std::vector<Outcome> outcomes = attend_all(launches, 0.5);
    for (const Outcome& outcome : outcomes) CHECK(outcome.code == EXIT_INTERNAL);
    CHECK(outcomes[0].error == format("rank 1 could not join rank 0 at 127.0.0.1:%d within 0.5 s (127.0.0.1:%d: "
                                      "Connection refused); is rank 0 running there?",
                                      port, port));
    CHECK(contains(outcomes[1].error, format("at 127.0.0.1:%d-%d within 0.5 s", port + 1, port + WINDOW)));
    CHECK(contains(outcomes[2].error, format("at no-such-host.invalid:%d within 0.5 s (no-such-host.invalid: ", port)));
    CHECK(outcomes[0].seconds < 2);
    CHECK(outcomes[1].seconds < 2);
    Launch nowhere = rank_of(1, 2, 0, "mpirun");
    nowhere.master_addr = "";
    CHECK(attend(nowhere, 1).code == EXIT_USAGE);
    CHECK(contains(attend(nowhere, 1).error, "rank 1 of 2 (mpirun) has no address of rank 0"));
    CHECK(contains(attend(rank_of(0, 2, 65535, "torchrun"), 1).error, "MASTER_PORT=65535 has no port above it"));
}

// ---- messages

TEST_CASE("a message cut at any length is incomplete, and a message with a wrong header is refused") {
    const std::string hello = encode(Hello{5, 3, 2, 29500, 0x0123456789abcdef, "run", "{\"host\": 1}"});
    CHECK(hello.size() == 16 + 32 + 3 + 11);
    CHECK(hello.substr(0, 20) == std::string("GPT2RDZV\1\0\0\0\x2e\0\0\0\5\0\0\0", 20));
    Hello read;
    CHECK(parse_hello(hello, read) == Parsed::whole);
    CHECK(read.process == 0x0123456789abcdef);
    CHECK(read.rank == 3);
    CHECK(read.port == 29500);
    CHECK(read.rank_info == "{\"host\": 1}");
    for (size_t size = 0; size < hello.size(); size++) CHECK(parse_hello(hello.substr(0, size), read) == Parsed::more);
    const auto changed = [&](size_t at, char value) {
        std::string bytes = hello;
        bytes[at] = value;
        return parse_hello(bytes, read);
    };
    CHECK(changed(0, 'X') == Parsed::garbage);
    CHECK(changed(8, 9) == Parsed::other_version);
    CHECK(changed(12, 0x2d) == Parsed::garbage);  // a body one byte shorter than its parts
    CHECK(changed(15, 1) == Parsed::garbage);     // a body of 16 MiB
    CHECK(changed(20, 5) == Parsed::garbage);     // rank 5 of 5
    CHECK(changed(18, 2) == Parsed::garbage);     // 131077 ranks
    CHECK(changed(40, 4) == Parsed::garbage);     // a longer run id
    CHECK(changed(44, 10) == Parsed::garbage);    // a shorter rank_info
    CHECK(changed(48, '\n') == Parsed::garbage);  // a newline in the run id

    const std::string answer = encode(Answer{Status::welcome, "", std::string("\0\xff", 2), {"a", ""}});
    Answer got;
    size_t used = 0;
    CHECK(parse_answer(answer + "next", 2, got, used) == Parsed::whole);
    CHECK(used == answer.size());
    CHECK(got.nccl_id == std::string("\0\xff", 2));
    CHECK(got.rank_infos == std::vector<std::string>{"a", ""});
    for (size_t size = 0; size < answer.size(); size++)
        CHECK(parse_answer(answer.substr(0, size), 2, got, used) == Parsed::more);
    CHECK(parse_answer(answer, 3, got, used) == Parsed::garbage);  // a rank_info is missing
    CHECK(parse_answer(answer, 1, got, used) == Parsed::garbage);
    CHECK(parse_answer(encode(Answer{Status(5), "", "", {}}), 2, got, used) == Parsed::garbage);
    CHECK(parse_answer(encode(Answer{Status::refused, "a\nb", "", {}}), 2, got, used) == Parsed::garbage);
    CHECK(parse_answer(encode(Answer{Status::refused, "no", "", {}}), 2, got, used) == Parsed::whole);
    CHECK(parse_answer(hello, 5, got, used) == Parsed::garbage);
}
