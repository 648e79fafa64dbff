// test_part_channel.cpp: tests the transfer of the ranks' parts of a checkpoint to rank 0. The ranks are threads.
#include <doctest/doctest.h>

#include <atomic>
#include <mutex>

#include "base/common.h"
#include "base/files.h"
#include "base/host.h"
#include "parallel/part_channel.h"
#include "support/refusal.h"
#include "support/thread_comm.h"

// The part of a rank in a save: more than a piece, so that it is sent and taken in several.
static std::string part_of(int rank, int64_t save, size_t bytes = 9 << 20) {
    std::string part(bytes, 0);
    for (size_t i = 0; i < bytes; i++) part[i] = char(i * 31 + size_t(rank) * 7 + size_t(save));
    return part;
}

static void send(PartChannel& channel, int64_t save, const std::string& part) {
    channel.send(save, part.data(), int64_t(part.size()));
}

// Receives the parts of ranks 1, 2, ... in one save.
static std::map<int, std::string> receive(PartChannel& channel, int64_t save, const std::map<int, int64_t>& sizes) {
    std::map<int, std::string> parts;
    channel.receive(save, sizes, [&](int rank, int64_t at, const char* bytes, int64_t count) {
        CHECK(at == int64_t(parts[rank].size()));
        parts[rank].append(bytes, size_t(count));
    });
    return parts;
}

// Connects to the channel, and sends these bytes.
static Socket call(int port, const std::string& bytes) {
    std::string reason;
    Socket socket;
    REQUIRE(connect_to(find_addresses("127.0.0.1", port, reason).at(0), seconds_now() + 5, socket) == "");
    REQUIRE(send_all(socket, bytes, seconds_now() + 5));
    return socket;
}

// What a channel's header would be if somebody guessed everything but the secret.
static std::string forged_header() {
    std::string header = "GPT2PART" + std::string(16, 'x');
    for (const int64_t number : {1, 1}) header.append(reinterpret_cast<const char*>(&number), sizeof number);
    return header;
}

TEST_CASE("rank 0 receives the parts of all ranks, save after save") {
    const int64_t size = int64_t(part_of(1, 1).size());
    run_ranks(4, [&](Comm& comm) {
        PartChannel channel;
        CHECK(channel.open(comm) == "");
        for (int64_t save = 1; save <= 3; save++) {
            if (comm.rank > 0) send(channel, save, part_of(comm.rank, save));
            if (comm.rank > 0) continue;
            const std::map<int, std::string> parts = receive(channel, save, {{1, size}, {2, size}, {3, size}});
            for (int rank = 1; rank < 4; rank++) CHECK(parts.at(rank) == part_of(rank, save));
        }
    });
}

// A rank may begin the next save while rank 0 still waits for another rank's part of this one.
TEST_CASE("a part of the next save is kept until that save") {
    run_ranks(3, [&](Comm& comm) {
        PartChannel channel;
        CHECK(channel.open(comm) == "");
        if (comm.rank == 1) {
            send(channel, 1, part_of(1, 1, 1000));
            send(channel, 2, part_of(1, 2, 1000));
        }
        comm.all_gather_text("rank 1 has sent both");
        if (comm.rank == 2)
            for (int64_t save : {1, 2}) send(channel, save, part_of(2, save, 1000));
        if (comm.rank == 0)
            for (int64_t save : {1, 2}) {
                const std::map<int, std::string> parts = receive(channel, save, {{1, 1000}, {2, 1000}});
                for (int rank : {1, 2}) CHECK(parts.at(rank) == part_of(rank, save, 1000));
            }
    });
}

TEST_CASE("after a save is given up, rank 0 drops its part, and the rank that sends it does not wait") {
    run_ranks(2, [&](Comm& comm) {
        PartChannel channel;
        CHECK(channel.open(comm) == "");
        std::atomic<bool> returned = false;
        std::thread given_up;
        if (comm.rank == 1) {
            given_up = std::thread([&] {
                send(channel, 1, part_of(1, 1, 64 << 20));  // more than sockets hold
                returned = true;
            });
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            CHECK_FALSE(returned);
        }
        comm.all_gather_text("rank 1 is sending");
        if (comm.rank == 0) {
            channel.silence = 0.3;
            CHECK(refusal([&] {
                      receive(channel, 2, {{1, 1000}});
                  }) == "74 rank 1 has sent nothing of its part for 0.3 s");
        }
        if (comm.rank == 1) {
            for (int i = 0; i < 100 && !returned; i++) std::this_thread::sleep_for(std::chrono::milliseconds(50));
            CHECK(returned);
            channel.give_up();
            given_up.join();
        }
        comm.all_gather_text("rank 1 has returned");
    });
}

TEST_CASE("strangers do not disturb: garbage, a forged header, part of a header, silence, many connections") {
    run_ranks(2, [&](Comm& comm) {
        PartChannel channel;
        CHECK(channel.open(comm) == "");
        std::vector<Socket> strangers;
        if (comm.rank == 1) {
            for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n" + std::string(100, 'x')),
                                             forged_header(), std::string("GPT2"), std::string()})
                strangers.push_back(call(channel.port, bytes));
            send(channel, 1, part_of(1, 1));
        }
        if (comm.rank == 0) CHECK(receive(channel, 1, {{1, 9 << 20}}).at(1) == part_of(1, 1));
        comm.all_gather_text("received");
        if (comm.rank == 1) {
            for (int i = 0; i < 200; i++) strangers.push_back(call(channel.port, ""));
            send(channel, 2, part_of(1, 2));
        }
        if (comm.rank == 0) {
            CHECK(receive(channel, 2, {{1, 9 << 20}}).at(1) == part_of(1, 2));
            const auto open_files = list_directory("/proc/self/fd").size();  // 200 belong to the strangers
            CHECK(open_files < 350);
        }
        comm.all_gather_text("strangers may leave");
    });
}

TEST_CASE("rank 0 says which rank sends nothing, too little, or stops in between") {
    run_ranks(3, [&](Comm& comm) {
        PartChannel channel;
        CHECK(channel.open(comm) == "");
        channel.silence = 0.3;
        const std::map<int, int64_t> sizes = {{1, 1000}, {2, 1000}};
        const auto fails = [&](int64_t save) { return refusal([&] { receive(channel, save, sizes); }); };
        if (comm.rank == 1) send(channel, 1, part_of(1, 1, 1000));
        if (comm.rank == 0) CHECK(fails(1) == "74 rank 2 has sent nothing of its part for 0.3 s");
        comm.all_gather_text("the first is over");
        if (comm.rank == 1) send(channel, 2, part_of(1, 2, 400));
        if (comm.rank == 0)
            CHECK(fails(2) == "74 rank 1 has sent 400 B of the 1000 B of its part, and then the connection ended");
        comm.all_gather_text("the second is over");
        for (int64_t save = 3; save <= 4; save++) {  // later saves are whole
            if (comm.rank > 0) send(channel, save, part_of(comm.rank, save, 1000));
            if (comm.rank == 0) CHECK(receive(channel, save, sizes).at(2) == part_of(2, save, 1000));
        }
    });
}

TEST_CASE("a rank that rank 0 does not listen to gives up when it is told to") {
    run_ranks(2, [&](Comm& comm) {
        PartChannel channel;
        CHECK(channel.open(comm) == "");
        if (comm.rank == 1) {
            std::thread thread([&] { send(channel, 1, part_of(1, 1, 64 << 20)); });  // more than sockets hold
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            channel.give_up();
            thread.join();
        }
        comm.all_gather_text("given up");
    });
}

TEST_CASE("a rank that cannot connect any more says so") {
    run_ranks(2, [&](Comm& comm) {
        auto channel = std::make_unique<PartChannel>();
        CHECK(channel->open(comm) == "");
        if (comm.rank == 0) channel.reset();
        comm.all_gather_text("rank 0 is gone");
        if (comm.rank == 1)
            CHECK(refusal([&] { send(*channel, 1, "part"); }) ==
                  format("74 no connection to port %d of rank 0: Connection refused", channel->port));
    });
}

// Replaces the port that rank 0 announces.
struct WrongPort : ThreadComm {
    using ThreadComm::ThreadComm;
    std::vector<std::string> all_gather_text(const std::string& text) override {
        std::vector<std::string> texts = ThreadComm::all_gather_text(text);
        const size_t space = texts[0].find(" ");
        if (rank > 0 && texts[0].ends_with("127.0.0.1")) texts[0] = "1" + texts[0].substr(space);
        return texts;
    }
};

TEST_CASE("all ranks learn which rank cannot connect, and why") {
    Meeting meeting;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; rank++)
        threads.emplace_back([&, rank] {
            WrongPort wrong(meeting, rank, 3);
            ThreadComm right(meeting, rank, 3);
            PartChannel channel;
            CHECK(channel.open(rank == 2 ? static_cast<Comm&>(wrong) : right) ==
                  "rank 2 on " + host_name() + " cannot connect to rank 0 (127.0.0.1:1: Connection refused)");
        });
    for (std::thread& thread : threads) thread.join();
}
