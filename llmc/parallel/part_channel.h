// part_channel.h: brings the ranks' parts of a checkpoint to rank 0 by TCP, in threads, while training goes on.
//
// All ranks must make the collectives of comm.h in the same order, so a transfer among them would delay training. These
// connections are independent of them.
//
// Rank 0 listens on a free port: of 127.0.0.1 if all ranks are on its host, else of all interfaces. For each save every
// other rank that has a part connects, and sends a header and its part. The header holds a random secret that rank 0
// gave to all ranks by a collective; rank 0 drops a connection with another header, or without a whole one within 5 s.
// Rank 0 takes the parts in the order in which they come, one after the other.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/socket.h"
#include "parallel/comm.h"

struct PartChannel {
    double silence = 60;  // seconds without a byte after which rank 0 gives up; a cut cable ends the run before that

    // Called by all ranks. Rank 0 listens, and every other rank connects once. Returns why a rank cannot, the same text
    // on all ranks. Empty: all can.
    std::string open(Comm& comm);

    // Called by a thread of rank 0. save: a number that grows from save to save, and is the same on all ranks. sizes:
    // the bytes that each rank sends. Calls take(rank, at, bytes, count) with consecutive pieces of a part: bytes at ..
    // at + count. Throws (EXIT_IO) if a rank sends nothing, or less.
    using Take = std::function<void(int rank, int64_t at, const char* bytes, int64_t count)>;
    void receive(int64_t save, const std::map<int, int64_t>& sizes, const Take& take);

    // Called by a thread of another rank. Throws (EXIT_IO) if it cannot connect. If the connection ends early, rank 0
    // reports it, and this rank does not.
    void send(int64_t save, const char* part, int64_t count);
    // Makes `send` return soon, also if rank 0 does not take the part.
    void give_up() { given_up = true; }

    int port = 0;  // of rank 0

  private:
    // What a connection begins with.
    struct Header {
        char magic[8] = {'G', 'P', 'T', '2', 'P', 'A', 'R', 'T'};
        char secret[16] = {};
        int64_t rank = 0, save = 0;  // save: its number, or HELLO
    };
    // A connection whose header is not yet complete.
    struct Caller {
        Socket socket;
        double until;
        std::string received = {};
        bool gone = false;
    };
    struct Arrival {
        Socket socket;
        int rank = -1;
        int64_t save = 0;
    };
    static constexpr int64_t HELLO = -1;

    std::string listen(bool one_host, int world_size);
    std::string find_way(const std::string& place, bool same_host, int rank);
    std::string say_hello(const Address& address, double until);
    void answer_hellos(const std::atomic<bool>& ends);
    void wait_for_arrivals(double until);
    void read_header(Caller& caller);
    void accept_callers();
    Arrival next_part(int64_t save, int missing_rank);
    void take_part(const Arrival& arrival, int64_t size, const Take& take) const;

    Socket listener;              // of rank 0
    std::vector<Caller> callers;  // of rank 0
    size_t most_callers = 0;
    // Connections that rank 0 has not yet used, also of the next save: a rank may begin it while rank 0 still receives
    // this one.
    std::vector<Arrival> arrivals;
    Address rank_0;  // how another rank reaches it
    Header own;
    std::atomic<bool> given_up = false;
};
