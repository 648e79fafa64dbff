#include "parallel/part_channel.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <sstream>
#include <thread>

#include "base/common.h"
#include "base/host.h"

static constexpr double HEADER_SECONDS = 5;   // within which a connection must send its header
static constexpr double CONNECT_SECONDS = 2;  // a firewall may drop packets without an answer
static constexpr double SLICE = 0.1;          // seconds between two looks at a request to end
static constexpr int64_t PIECE = 4 << 20;     // bytes

// ---- rank 0 listens, and the others find it

// Returns "PORT SECRET ADDRESS ...", or "- " and why there is no port.
std::string PartChannel::listen(bool one_host, int world_size) {
    most_callers = size_t(world_size) + 64;
    std::string reason = "no address";
    for (const Address& address : find_addresses(one_host ? "127.0.0.1" : "", 0, reason)) {
        const int error = listen_at(address, int(most_callers), listener);
        if (error == 0) break;
        reason = reason_of(error);
    }
    if (listener.fd < 0) return "- " + reason;
    port = port_of(listener);
    std::random_device random;
    std::string place = std::to_string(port);
    for (size_t i = 0; i < sizeof own.secret; i += sizeof(uint32_t)) {
        const uint32_t number = random();
        std::memcpy(own.secret + i, &number, sizeof number);
        place += format(i == 0 ? " %08x" : "%08x", number);
    }
    if (one_host) return place + " 127.0.0.1";
    for (const std::string& address : addresses_of_this_host()) place += " " + address;
    return place;
}

// Returns an empty string if rank 0 answers, else why not.
std::string PartChannel::say_hello(const Address& address, double until) {
    Socket socket;
    if (const std::string why = connect_to(address, until, socket); !why.empty()) return why;
    own.save = HELLO;
    char answer = 0;
    if (!send_all(socket, {reinterpret_cast<const char*>(&own), sizeof own}, until)) return "the connection was lost";
    if (!wait_for_socket(socket.fd, POLLIN, until + HEADER_SECONDS)) return "no answer";
    if (recv(socket.fd, &answer, 1, 0) != 1) return "the connection was closed without an answer";
    rank_0 = address;
    return "";
}

// Tries all addresses of rank 0. Returns why none of them answers; empty: one does.
std::string PartChannel::find_way(const std::string& place, bool same_host, int rank) {
    std::istringstream words(place);
    std::string secret, name, why = "it has no address that other hosts can use";
    words >> port >> secret;
    own.rank = rank;
    for (size_t i = 0; i < sizeof own.secret; i += sizeof(uint32_t)) {
        const uint32_t number = uint32_t(std::stoul(secret.substr(2 * i, 8), nullptr, 16));
        std::memcpy(own.secret + i, &number, sizeof number);
    }
    std::vector<std::string> names;
    if (same_host) names.push_back("127.0.0.1");
    while (words >> name) names.push_back(name);
    for (const std::string& host : names) {
        std::string reason;
        for (const Address& address : find_addresses(host, port, reason)) {
            reason = say_hello(address, seconds_now() + CONNECT_SECONDS);
            if (reason.empty()) return "";
        }
        why = place_name(host, port) + ": " + reason;
    }
    return why;
}

void PartChannel::answer_hellos(const std::atomic<bool>& ends) {
    while (!ends) {
        wait_for_arrivals(seconds_now() + SLICE);
        for (const Arrival& arrival : arrivals)
            if (arrival.save == HELLO) send_all(arrival.socket, "y", seconds_now());
        std::erase_if(arrivals, [](const Arrival& arrival) { return arrival.save == HELLO; });
    }
}

std::string PartChannel::open(Comm& comm) {
    const std::vector<std::string> hosts = comm.all_gather_text(host_id());
    const bool one_host = std::count(hosts.begin(), hosts.end(), hosts[0]) == comm.world_size;
    const std::string place = comm.all_gather_text(comm.rank == 0 ? listen(one_host, comm.world_size) : "")[0];
    if (place.starts_with("- ")) return "rank 0 cannot open a port: " + place.substr(2);
    std::atomic<bool> all_are_done = false;
    std::thread answers;
    if (comm.rank == 0) answers = std::thread([&] { answer_hellos(all_are_done); });
    std::string why;
    if (comm.rank > 0) why = find_way(place, hosts[size_t(comm.rank)] == hosts[0], comm.rank);
    if (!why.empty())
        why = format("rank %d on %s cannot connect to rank 0 (%s)", comm.rank, host_name().c_str(), why.c_str());
    const std::vector<std::string> all = comm.all_gather_text(why);
    all_are_done = true;
    if (answers.joinable()) answers.join();
    const auto first = std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
    return first == all.end() ? "" : *first;
}

// ---- rank 0 receives

// Accepts the connections that are waiting. If rank 0 has too many connections without a header, or no file descriptor
// is left, it closes the oldest of them.
void PartChannel::accept_callers() {
    for (;;) {
        Socket socket;
        std::string from;
        const int error = accept_from(listener, socket, from);
        const bool no_room = error == EMFILE || error == ENFILE;
        if (!callers.empty() && (no_room || callers.size() >= most_callers)) callers.erase(callers.begin());
        if (no_room) std::this_thread::sleep_for(std::chrono::duration<double>(SLICE));
        if (error != 0) return;
        callers.push_back({std::move(socket), seconds_now() + HEADER_SECONDS});
    }
}

// A caller whose header is complete and right becomes an arrival.
void PartChannel::read_header(Caller& caller) {
    char bytes[sizeof(Header)];
    const ssize_t got = recv(caller.socket.fd, bytes, sizeof bytes - caller.received.size(), 0);
    if (got < 0 && is_full_or_empty(errno)) return;
    if (got > 0) caller.received.append(bytes, size_t(got));
    caller.gone = got <= 0 || caller.received.size() == sizeof(Header);
    if (caller.received.size() < sizeof(Header)) return;
    Header header;
    std::memcpy(&header, caller.received.data(), sizeof header);
    if (std::memcmp(header.magic, own.magic, sizeof own.magic) == 0 &&
        std::memcmp(header.secret, own.secret, sizeof own.secret) == 0)
        arrivals.push_back({std::move(caller.socket), int(header.rank), header.save});
}

// Waits for an arrival or, if none comes, until this time.
void PartChannel::wait_for_arrivals(double until) {
    const size_t before = arrivals.size();
    do {
        std::vector<pollfd> sockets = {{listener.fd, POLLIN, 0}};
        double wake = until;
        for (const Caller& caller : callers) {
            sockets.push_back({caller.socket.fd, POLLIN, 0});
            wake = std::min(wake, caller.until);
        }
        if (poll(sockets.data(), sockets.size(), milliseconds_until(wake)) < 0) continue;
        for (size_t i = 0; i < callers.size(); i++)
            if (sockets[i + 1].revents != 0)
                read_header(callers[i]);
            else
                callers[i].gone = callers[i].until < seconds_now();
        std::erase_if(callers, [](const Caller& caller) { return caller.gone; });
        if (sockets[0].revents != 0) accept_callers();
    } while (arrivals.size() == before && seconds_now() < until);
}

void PartChannel::take_part(const Arrival& arrival, int64_t size, const Take& take) const {
    std::vector<char> piece(size_t(std::min(PIECE, size)));
    for (int64_t at = 0, have = 0; at < size;) {
        const int64_t count = std::min(PIECE, size - at);
        const ssize_t got = recv(arrival.socket.fd, piece.data() + have, size_t(count - have), 0);
        const bool waits = got < 0 && is_full_or_empty(errno);
        const bool silent = waits && !wait_for_socket(arrival.socket.fd, POLLIN, seconds_now() + silence);
        if (silent || (got <= 0 && !waits))
            fail(EXIT_IO, "rank %d has sent %s of the %s of its part, and then %s", arrival.rank,
                 human_bytes(at + have).c_str(), human_bytes(size).c_str(),
                 silent ? format("nothing for %g s", silence).c_str() : "the connection ended");
        have += waits ? 0 : got;
        if (have < count) continue;
        take(arrival.rank, at, piece.data(), count);
        at += count;
        have = 0;
    }
}

// Returns the next connection of this save, and closes those of earlier ones, which were given up.
PartChannel::Arrival PartChannel::next_part(int64_t save, int missing_rank) {
    for (const double until = seconds_now() + silence;;) {
        std::erase_if(arrivals, [&](const Arrival& arrival) { return arrival.save < save; });
        const auto found = std::find_if(arrivals.begin(), arrivals.end(),
                                        [&](const Arrival& arrival) { return arrival.save == save; });
        if (found != arrivals.end()) {
            Arrival arrival = std::move(*found);
            arrivals.erase(found);
            return arrival;
        }
        if (seconds_now() >= until)
            fail(EXIT_IO, "rank %d has sent nothing of its part for %g s", missing_rank, silence);
        wait_for_arrivals(until);
    }
}

void PartChannel::receive(int64_t save, const std::map<int, int64_t>& sizes, const Take& take) {
    std::map<int, int64_t> missing = sizes;
    while (!missing.empty()) {
        const Arrival arrival = next_part(save, missing.begin()->first);
        const auto part = missing.find(arrival.rank);
        if (part == missing.end()) continue;
        take_part(arrival, part->second, take);
        missing.erase(part);
    }
}

// ---- the others send

void PartChannel::send(int64_t save, const char* part, int64_t count) {
    Socket socket;
    if (const std::string why = connect_to(rank_0, seconds_now() + silence, socket); !why.empty())
        fail(EXIT_IO, "no connection to port %d of rank 0: %s", port, why.c_str());
    own.save = save;
    send_all(socket, {reinterpret_cast<const char*>(&own), sizeof own}, seconds_now() + silence);
    // Rank 0 may first have to write the save before, which may take long, so there is no limit of time.
    for (int64_t sent = 0; sent < count && !given_up;) {
        const ssize_t put = ::send(socket.fd, part + sent, size_t(std::min(PIECE, count - sent)), MSG_NOSIGNAL);
        if (put > 0) sent += put;
        if (put >= 0 || (is_full_or_empty(errno) && (wait_for_socket(socket.fd, POLLOUT, seconds_now() + SLICE), true)))
            continue;
        return;
    }
}
