#include "parallel/rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <random>
#include <utility>

#include "base/common.h"
#include "base/host.h"
#include "base/socket.h"

static constexpr double SILENCE = 5;  // seconds within which a connection must send its hello
static constexpr double GRACE = 1;    // seconds in which late ranks still receive the reason of a failure
static constexpr double CONNECT = 2;  // seconds for a connect; a firewall may drop packets without an answer

// Makes a text valid for Answer::text: one line of at most MAX_TEXT bytes.
static std::string one_line(const std::string& text) {
    std::string line = text.substr(0, MAX_TEXT);
    for (char& c : line)
        if (uint8_t(c) < ' ' || c == 0x7f) c = ' ';
    return line;
}

static std::vector<int> rendezvous_ports(const Launch& launch) {
    if (launch.launcher != "torchrun") return {launch.master_port};
    std::vector<int> ports;
    for (int port = launch.master_port + 1; port <= launch.master_port + WINDOW && port <= 65535; port++)
        ports.push_back(port);
    ENSURE(!ports.empty(), "MASTER_PORT=%d has no port above it, where rank 0 could listen", launch.master_port);
    return ports;
}

std::string rendezvous_address(const Launch& launch) {
    const std::vector<int> ports = rendezvous_ports(launch);
    const std::string first = place_name(launch.master_addr, ports.front());
    return ports.size() == 1 ? first : first + format("-%d", ports.back());
}

// The restart count that all ranks agree on. torchrun's agents on several hosts count separately, so with
// several agents this count is 0.
static uint32_t attempt_of_all(const Launch& launch) {
    const bool several_agents = launch.launcher == "torchrun" && launch.local_world_size != launch.world_size;
    return several_agents ? 0 : uint32_t(launch.attempt);
}

// ---- rank 0

namespace {
struct Peer {
    Socket socket;
    std::string from;      // address, for messages
    double since;          // time of the connection
    std::string received;  // bytes of its hello so far
    int rank = -1;         // -1: unknown before its hello
    uint64_t process = 0;
    bool gone = false;
};

struct Server {
    const Launch& launch;
    double timeout, deadline;
    Socket listener;
    std::vector<Peer> peers;              // in the order of connection
    std::vector<std::string> rank_infos;  // of each rank
    std::vector<bool> connected;
    std::string contradiction;  // not empty: how the ranks contradict each other
    int dropped = 0;            // number of dropped connections
    std::string drop_note;      // why the last connection was dropped
};
}  // namespace

int open_local_listener(int& port) {
    std::string reason = "no address";
    for (const Address& address : find_addresses("127.0.0.1", 0, reason)) {
        Socket listener;
        const int error = listen_at(address, 128, listener);
        reason = reason_of(error);
        if (error != 0) continue;
        port = port_of(listener);
        return std::exchange(listener.fd, -1);
    }
    fail(EXIT_INTERNAL, "cannot open a port of 127.0.0.1 for the rendezvous of the ranks: %s", reason.c_str());
}

static Socket open_listener(const Launch& launch) {
    if (launch.listener >= 0) return Socket(launch.listener);
    // A name of this host may resolve to 127.0.1.1 here and to another address elsewhere, so rank 0 listens on all
    // interfaces, except for names that are always local.
    const std::string& host = launch.master_addr;
    const bool local = host == "localhost" || host.starts_with("127.") || host == "::1";
    std::string reason = "no address";
    for (int port : rendezvous_ports(launch))
        for (const Address& address : find_addresses(local ? host : "", port, reason)) {
            Socket listener;
            const int error = listen_at(address, std::max(launch.world_size, 128), listener);
            if (error == 0) return listener;
            reason = reason_of(error);
            if (error == EADDRINUSE) break;
        }
    fail(EXIT_INTERNAL, "rank 0 cannot listen on %s: %s; was it started twice? If not, give another port",
         rendezvous_address(launch).c_str(), reason.c_str());
}

// Sends a short answer. The answer fits the empty send buffer of the connection, so a failed send means that the peer
// is gone.
static void send_status(const Peer& peer, Status status, const std::string& text) {
    const std::string answer = encode(Answer{status, one_line(text), "", {}});
    (void)!send(peer.socket.fd, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void send_status_to_all(const Server& server, Status status, const std::string& text) {
    for (const Peer& peer : server.peers)
        if (peer.rank >= 0 && !peer.gone) send_status(peer, status, text);
}

static void drop(Server& server, Peer& peer, const std::string& why) {
    server.dropped++;
    server.drop_note = peer.from + " " + why;
    peer.gone = true;
}

// Makes all connected ranks, ranks that connect within GRACE, and rank 0 fail with the same message.
static void refuse_all(Server& server, const std::string& text) {
    server.contradiction = one_line(text);
    server.deadline = std::min(server.deadline, seconds_now() + GRACE);
    send_status_to_all(server, Status::refused, server.contradiction);
}

// Returns why this rank cannot belong to the run; empty if it can.
static std::string find_contradiction(const Server& server, const Peer& peer, const Hello& hello) {
    const Launch& launch = server.launch;
    const std::string who = format("rank %u (%s)", hello.rank, peer.from.c_str());
    if (hello.run_id != launch.run_id)
        return format("%s is of run '%s', rank 0 of run '%s': give all ranks the same run id, or each run its own port",
                      who.c_str(), hello.run_id.c_str(), launch.run_id.c_str());
    if (hello.attempt != attempt_of_all(launch))
        return format("%s is in attempt %u, rank 0 in attempt %u: is a process of an earlier attempt still running?",
                      who.c_str(), hello.attempt, attempt_of_all(launch));
    if (hello.world_size != uint32_t(launch.world_size))
        return format("%s is one of %u ranks, rank 0 one of %d: %s", who.c_str(), hello.world_size, launch.world_size,
                      launch.launcher == "--gpus" ? "give all machines the same --nnodes, and as many GPUs to each"
                                                  : "start all with the same world size");
    const char* twice = "two processes say that they are rank %u of %u, on %s and %s: start each rank once";
    if (hello.rank == 0) return format(twice, 0u, hello.world_size, host_name().c_str(), peer.from.c_str());
    for (const Peer& other : server.peers)
        if (other.rank == int(hello.rank) && !other.gone && other.process != hello.process)
            return format(twice, hello.rank, hello.world_size, other.from.c_str(), peer.from.c_str());
    return "";
}

// Handles a whole hello: accepts the peer, drops it as one of another run, or fails the rendezvous.
static void accept_hello(Server& server, Peer& peer, const Hello& hello) {
    const Launch& launch = server.launch;
    const bool mine = hello.port == uint32_t(launch.master_port) && hello.run_id == launch.run_id &&
                      hello.attempt == attempt_of_all(launch);
    if (launch.launcher == "torchrun" && !mine) {
        send_status(peer, Status::other,
                    format("this port belongs to another run or attempt: '%s'", launch.run_id.c_str()));
        return drop(server, peer, format("is of run '%s'", hello.run_id.c_str()));
    }
    if (server.contradiction.empty()) {
        const std::string found = find_contradiction(server, peer, hello);
        if (!found.empty()) refuse_all(server, found);
        for (Peer& other : server.peers)  // an earlier connection of the same process, which was lost
            if (other.rank == int(hello.rank) && server.contradiction.empty()) other.gone = true;
    }
    peer.rank = int(hello.rank);
    peer.process = hello.process;
    peer.received.clear();
    if (peer.rank < launch.world_size) {
        server.rank_infos[hello.rank] = hello.rank_info;
        server.connected[hello.rank] = true;
    }
    send_status(peer, server.contradiction.empty() ? Status::waiting : Status::refused, server.contradiction);
}

// Reads from a peer. If the connection of a rank ends, another process may take that rank.
static void read_from(Server& server, Peer& peer) {
    char buffer[8192];
    const ssize_t got = recv(peer.socket.fd, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (got < 0 && is_full_or_empty(errno)) return;
    if (peer.rank >= 0) {  // a rank sends nothing after its hello
        if (server.contradiction.empty()) server.connected[peer.rank] = false;
        peer.gone = true;
        return;
    }
    if (got <= 0) return drop(server, peer, "closed the connection without a hello");
    peer.received.append(buffer, size_t(got));
    Hello hello;
    switch (parse_hello(peer.received, hello)) {
        case Parsed::more:
            return;
        case Parsed::whole:
            return accept_hello(server, peer, hello);
        case Parsed::garbage:
            return drop(server, peer, "did not send a rank's hello");
        case Parsed::other_version:
            send_status(peer, Status::other, "");  // the answer's header holds this program's version
            return drop(server, peer, "is a rank of another version of this program");
    }
}

// Accepts new connections. Drops the oldest connection that has sent no hello if more than world_size + 64 connections
// have sent none, or if no file descriptors are left.
static void accept_peers(Server& server) {
    for (;;) {
        Socket socket;
        std::string from;
        const int error = accept_from(server.listener, socket, from);
        const bool no_room = error == EMFILE || error == ENFILE;
        if (error != 0 && !no_room) return;  // no connection is pending, or the connection was aborted
        const auto unknown = [](const Peer& peer) { return peer.rank < 0 && !peer.gone; };
        const auto count = std::count_if(server.peers.begin(), server.peers.end(), unknown);
        if (no_room && count == 0)
            fail(EXIT_INTERNAL, "rank 0 needs %d open files to connect to the other ranks: %s; raise ulimit -n",
                 server.launch.world_size, reason_of(error).c_str());
        if (no_room || count > server.launch.world_size + 64) {
            drop(server, *std::find_if(server.peers.begin(), server.peers.end(), unknown),
                 "sent no hello while other connections waited");
            std::erase_if(server.peers, [](const Peer& peer) { return peer.gone; });
        }
        if (!no_room) server.peers.push_back({std::move(socket), from, seconds_now(), "", -1, 0, false});
    }
}

// "rank 3", "ranks 1, 5-7"
static std::string list_missing_ranks(const Server& server) {
    std::string list;
    int count = 0;
    for (int first = 1, next; first < server.launch.world_size; first = next) {
        for (next = first; next < server.launch.world_size && !server.connected[next]; next++) count++;
        if (next > first)
            list += format(next > first + 1 ? "%s%d-%d" : "%s%d", list.empty() ? "" : ", ", first, next - 1);
        next++;  // skips the connected rank that ended the list
    }
    return (count == 1 ? "rank " : "ranks ") + list;
}

[[noreturn]] static void give_up(Server& server) {
    std::string text = format("%s of %d did not connect to %s within %g s; are they running, and can they reach it?",
                              list_missing_ranks(server).c_str(), server.launch.world_size,
                              rendezvous_address(server.launch).c_str(), server.timeout);
    if (server.dropped > 0)
        text += format(" (%d other connections; the last: %s)", server.dropped, server.drop_note.c_str());
    send_status_to_all(server, Status::failed, text);
    throw Error(EXIT_INTERNAL, one_line(text));
}

// Serves connections until every rank has connected.
static void gather(Server& server) {
    std::vector<pollfd> sockets;
    while (std::count(server.connected.begin(), server.connected.end(), false) > 0) {
        if (seconds_now() >= server.deadline && server.contradiction.empty()) give_up(server);
        if (seconds_now() >= server.deadline) break;
        double wake = server.deadline;
        sockets.assign(1, {server.listener.fd, POLLIN, 0});
        for (const Peer& peer : server.peers) {
            sockets.push_back({peer.socket.fd, POLLIN, 0});
            if (peer.rank < 0) wake = std::min(wake, peer.since + SILENCE);
        }
        if (poll(sockets.data(), sockets.size(), milliseconds_until(wake)) < 0) {
            if (errno == EINTR) continue;
            fail(EXIT_INTERNAL, "rank 0 cannot wait for %zu connections: %s", sockets.size(), reason_of(errno).c_str());
        }
        // In the order of connection: if a rank disconnected and connected again, the end of its first connection is
        // read before its new hello.
        for (size_t i = 0; i < server.peers.size(); i++) {
            Peer& peer = server.peers[i];
            if (sockets[i + 1].revents != 0 && !peer.gone) read_from(server, peer);
            if (peer.rank < 0 && !peer.gone && seconds_now() >= peer.since + SILENCE)
                drop(server, peer, format("sent no complete hello within %g s", SILENCE));
        }
        std::erase_if(server.peers, [](const Peer& peer) { return peer.gone; });
        if (sockets[0].revents != 0) accept_peers(server);
    }
    if (!server.contradiction.empty()) throw Error(EXIT_USAGE, server.contradiction);
}

// Sends the same answer to all ranks, one after the other. A rank that does not receive it ends the run.
static void answer_all(Server& server, const std::string& answer) {
    const double deadline = seconds_now() + std::max(server.timeout, SILENCE);
    for (Peer& peer : server.peers) {
        if (peer.rank >= 0 && !send_all(peer.socket, answer, deadline)) {
            const std::string text = format("rank %d (%s) connected, but disconnected before it received its answer",
                                            peer.rank, peer.from.c_str());
            send_status_to_all(server, Status::failed, text);
            throw Error(EXIT_INTERNAL, text);
        }
        peer.gone = true;  // this peer has its answer
    }
}

static Rendezvous serve_rendezvous(const Launch& launch, const std::string& rank_info,
                                   const std::function<std::string()>& nccl_id, double timeout) {
    Server server{launch, timeout, seconds_now() + timeout, open_listener(launch), {}, {}, {}, "", 0, ""};
    server.rank_infos.resize(size_t(launch.world_size));
    server.connected.resize(size_t(launch.world_size));
    server.rank_infos[0] = rank_info;
    server.connected[0] = true;
    gather(server);
    server.listener = Socket();
    Rendezvous result{server.rank_infos, ""};
    try {
        result.nccl_id = nccl_id();
        INVARIANT(result.nccl_id.size() <= size_t(MAX_NCCL_ID), "an NCCL id has %zu bytes; at most %d are supported",
                  result.nccl_id.size(), MAX_NCCL_ID);
    } catch (const std::exception& error) {
        send_status_to_all(server, Status::failed, format("rank 0: %s", error.what()));
        throw;
    }
    answer_all(server, encode(Answer{Status::welcome, "", result.nccl_id, result.rank_infos}));
    return result;
}

// ---- the other ranks

namespace {
// The most informative failure of one round of connection attempts.
struct Tries {
    std::string last;      // the failure; a failure after a connection takes precedence
    bool reached = false;  // the attempt of `last` was connected

    void add(const std::string& place, const std::string& why, bool connected) {
        if (!connected && reached) return;
        last = place + ": " + why;
        reached = connected;
    }
};
}  // namespace

// Reads the next answer. Returns an empty string, or the reason of a failure. received: bytes not parsed yet.
static std::string read_answer(const Socket& socket, int world_size, double until, std::string& received,
                               Answer& answer) {
    for (;;) {
        size_t used = 0;
        switch (parse_answer(received, world_size, answer, used)) {
            case Parsed::whole:
                received.erase(0, used);
                return "";
            case Parsed::garbage:
                return "the answer is not from rank 0";
            case Parsed::other_version:
                return "rank 0 runs another version of this program; run the same version on all hosts";
            case Parsed::more:
                break;
        }
        if (!wait_for_socket(socket.fd, POLLIN, until)) return "no answer";
        char buffer[16384];
        const ssize_t got = recv(socket.fd, buffer, sizeof(buffer), MSG_DONTWAIT);
        if (got == 0) return "the connection was closed without an answer";
        if (got < 0 && !is_full_or_empty(errno)) return reason_of(errno);
        if (got > 0) received.append(buffer, size_t(got));
    }
}

// Returns an empty string if the rendezvous succeeded, else the reason. Throws an error that rank 0 reports.
static std::string request_result(const Socket& socket, const Hello& hello, double timeout, double deadline,
                                  Rendezvous& result) {
    const int world_size = int(hello.world_size);
    const double answer_deadline = std::min(deadline, seconds_now() + SILENCE);
    if (!send_all(socket, encode(hello), answer_deadline)) return "the connection was lost";
    std::string received;
    Answer answer;
    std::string why = read_answer(socket, world_size, answer_deadline, received, answer);
    // From here on rank 0 decides how long to wait: it knows which ranks are missing, and reports them.
    if (why.empty() && answer.status == Status::waiting)
        why = read_answer(socket, world_size, seconds_now() + timeout + SILENCE, received, answer);
    if (!why.empty()) return why;
    switch (answer.status) {
        case Status::refused:
            throw Error(EXIT_USAGE, answer.text);
        case Status::failed:
            throw Error(EXIT_INTERNAL, answer.text);
        case Status::other:
            return answer.text;
        case Status::waiting:
            return "the answer is not from rank 0";
        case Status::welcome:
            break;
    }
    result = {std::move(answer.rank_infos), std::move(answer.nccl_id)};
    return "";
}

static Rendezvous join_rendezvous(const Launch& launch, const std::string& rank_info, double timeout) {
    std::random_device device;
    std::minstd_rand random(device());
    const Hello hello = {uint32_t(launch.world_size),
                         uint32_t(launch.rank),
                         attempt_of_all(launch),
                         uint32_t(launch.master_port),
                         uint64_t(device()) << 32 | device(),
                         launch.run_id,
                         rank_info};
    const double deadline = seconds_now() + timeout;
    for (double pause = 0.1;; pause = std::min(2.0, 1.5 * pause)) {
        Tries tries;
        for (int port : rendezvous_ports(launch)) {
            std::string reason;
            const std::vector<Address> addresses = find_addresses(launch.master_addr, port, reason);
            if (addresses.empty()) tries.add(launch.master_addr, reason, false);
            for (const Address& address : addresses) {
                Socket socket;
                std::string why = connect_to(address, std::min(deadline, seconds_now() + CONNECT), socket);
                const bool reached = why.empty();
                Rendezvous result;
                if (reached) why = request_result(socket, hello, timeout, deadline, result);
                if (why.empty()) return result;
                tries.add(place_name(launch.master_addr, port), why, reached);
            }
        }
        if (seconds_now() >= deadline)
            fail(EXIT_INTERNAL, "rank %d could not join rank 0 at %s within %g s (%s); is rank 0 running there?",
                 launch.rank, rendezvous_address(launch).c_str(), timeout, tries.last.c_str());
        // Random jitter, so that ranks do not retry at the same time.
        const double jitter = std::uniform_real_distribution<double>(0.5, 1.0)(random);
        const double rest = std::max(0.0, deadline - seconds_now());
        poll(nullptr, 0, int(std::ceil(1000 * std::min(rest, pause * jitter))));
    }
}

Rendezvous rendezvous(const Launch& launch, const std::string& rank_info, const std::function<std::string()>& nccl_id,
                      double timeout_seconds) {
    INVARIANT(rank_info.size() <= size_t(MAX_RANK_INFO), "a rank_info has %zu bytes; at most %d are supported",
              rank_info.size(), MAX_RANK_INFO);
    if (launch.world_size == 1) return {{rank_info}, nccl_id()};
    ENSURE(!launch.master_addr.empty() && launch.master_port > 0,
           "rank %d of %d (%s) has no address of rank 0; give --rank, --world-size and --rendezvous", launch.rank,
           launch.world_size, launch.launcher.c_str());
    return launch.rank == 0 ? serve_rendezvous(launch, rank_info, nccl_id, timeout_seconds)
                            : join_rendezvous(launch, rank_info, timeout_seconds);
}
