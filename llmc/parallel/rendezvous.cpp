#include "parallel/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/common.h"

static constexpr double HELLO_SECONDS = 2;    // time in which a connection must send its hello
static constexpr double CONNECT_SECONDS = 5;  // time for a connect, and for rank 0's first answer
static constexpr int WINDOW = 16;             // ports that rank 0 tries under torchrun
// Two magics: on one host a socket can connect to itself, and would take its own hello for an answer.
static constexpr uint64_t HELLO = 0x2056445232545047, ANSWER = 0x204d454d32545047;

namespace {
struct Hello {
    uint64_t magic = HELLO;
    uint64_t run = 0;  // hash of what the ranks of this attempt have in common
    uint32_t world_size = 0, rank = 0;
};

struct Socket {
    int fd = -1;
    explicit Socket(int fd = -1) : fd(fd) {}
    Socket(Socket&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd, other.fd);
        return *this;
    }
    ~Socket() {
        if (fd >= 0) close(fd);
    }

    void set_timeout(double seconds) const {
        timeval time = {};
        time.tv_sec = time_t(std::ceil(std::max(1.0, seconds)));
        for (int which : {SO_RCVTIMEO, SO_SNDTIMEO}) setsockopt(fd, SOL_SOCKET, which, &time, sizeof time);
    }
    bool read(void* to, size_t bytes) const { return recv(fd, to, bytes, MSG_WAITALL) == ssize_t(bytes); }
    bool write(const void* from, size_t bytes) const { return send(fd, from, bytes, MSG_NOSIGNAL) == ssize_t(bytes); }
    bool is_open() const {  // whether the other side has not closed it
        char byte;
        return fd >= 0 && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }
};
}  // namespace

static Hello hello_of(const Launch& launch) {
    // torchrun's agents on several hosts count their restarts separately.
    const bool several_agents = launch.launcher == "torchrun" && launch.local_world_size != launch.world_size;
    const std::string run =
        format("%d %d %s", launch.master_port, several_agents ? 0 : launch.attempt, launch.run_id.c_str());
    return {HELLO, XXH3_64bits(run.data(), run.size()), uint32_t(launch.world_size), uint32_t(launch.rank)};
}

// Returns the ports on which rank 0 may listen.
static std::vector<int> ports_of(const Launch& launch) {
    if (launch.launcher != "torchrun") return {launch.master_port};
    std::vector<int> ports(WINDOW);
    std::iota(ports.begin(), ports.end(), launch.master_port + 1);
    return ports;
}

// Calls use(socket, address) for a new socket of each address of the host, until one returns true. Returns that socket,
// or sets the reason.
template <class Use>
static Socket first_socket(const std::string& host, int port, std::string& reason, const Use& use) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error != 0) reason = gai_strerror(error);
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(error ? nullptr : found, freeaddrinfo);
    for (const addrinfo* address = list.get(); address; address = address->ai_next) {
        Socket socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (socket.fd >= 0 && use(socket, *address)) return socket;
        reason = strerror(errno);
    }
    return Socket();
}

// ---- rank 0

// A name of this host may resolve to 127.0.1.1 here and to another address elsewhere, so rank 0 listens on all
// interfaces. [::] accepts IPv4 too; 0.0.0.0 is for a kernel without IPv6.
static Socket listen_for_ranks(const Launch& launch) {
    std::string reason;
    for (const int port : ports_of(launch))
        for (const char* any : {"::", "0.0.0.0"}) {
            Socket listener = first_socket(any, port, reason, [&](const Socket& socket, const addrinfo& address) {
                const int on = 1, off = 0;
                setsockopt(socket.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
                if (address.ai_family == AF_INET6) setsockopt(socket.fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
                return bind(socket.fd, address.ai_addr, address.ai_addrlen) == 0 &&
                       listen(socket.fd, std::max(launch.world_size, 128)) == 0 &&
                       fcntl(socket.fd, F_SETFL, O_NONBLOCK) == 0;  // accept: a connection may be gone again
            });
            if (listener.fd >= 0) return listener;
        }
    fail(EXIT_INTERNAL, "rank 0 cannot listen on port %d: %s; was it started twice? If not, give another MASTER_PORT",
         launch.master_port, reason.c_str());
}

static std::string list_missing(const std::vector<Socket>& ranks) {
    std::string list;
    for (size_t rank = 1; rank < ranks.size(); rank++)
        if (!ranks[rank].is_open()) list += format("%s%zu", list.empty() ? "" : ", ", rank);
    return list.size() < 100 ? list : list.substr(0, 100) + "...";
}

static std::string serve(const Launch& launch, const std::function<std::string()>& new_id, double timeout) {
    const Hello own = hello_of(launch);
    const Socket listener = listen_for_ranks(launch);
    std::vector<Socket> ranks(size_t(launch.world_size));  // connection of each rank but 0
    const double deadline = seconds_now() + timeout;
    // A rank that waited too long behind a silent connection has closed its own, and comes again.
    for (std::string missing; !(missing = list_missing(ranks)).empty();) {
        pollfd ready = {listener.fd, POLLIN, 0};
        poll(&ready, 1, std::max(0, int(1000 * (deadline - seconds_now()))));
        if (seconds_now() >= deadline)
            fail(EXIT_INTERNAL,
                 "rank 0 has waited %g s at %s:%d for ranks %s; were they started, and can they reach this host?",
                 timeout, launch.master_addr.c_str(), launch.master_port, missing.c_str());
        Socket socket(accept(listener.fd, nullptr, nullptr));
        if (socket.fd < 0) continue;
        socket.set_timeout(HELLO_SECONDS);
        Hello hello;
        if (!socket.read(&hello, sizeof hello) || hello.magic != HELLO || hello.run != own.run) continue;
        // Before the checks: if one fails, this rank ends, and the other one does not wait for it.
        if (!socket.write(&ANSWER, sizeof ANSWER)) continue;
        ENSURE(hello.world_size == own.world_size, "rank %u is one of %u ranks, and rank 0 is one of %u", hello.rank,
               hello.world_size, own.world_size);
        ENSURE(hello.rank > 0 && hello.rank < own.world_size && !ranks[hello.rank].is_open(),
               "two processes say that they are rank %u of %u: start each rank once", hello.rank, hello.world_size);
        ranks[hello.rank] = std::move(socket);
    }
    const std::string id = new_id();
    INVARIANT(id.size() == size_t(NCCL_ID_BYTES), "the id of NCCL has %zu bytes", id.size());
    for (size_t rank = 1; rank < ranks.size(); rank++)
        if (!ranks[rank].write(id.data(), id.size()))
            fail(EXIT_INTERNAL, "rank %zu has disconnected before all ranks had joined", rank);
    return id;
}

// ---- the other ranks

static std::string join(const Launch& launch, double timeout) {
    const Hello own = hello_of(launch);
    const double deadline = seconds_now() + timeout;
    std::string reason = "no address", id(size_t(NCCL_ID_BYTES), 0);
    const auto connects = [](const Socket& socket, const addrinfo& address) {
        socket.set_timeout(CONNECT_SECONDS);
        return connect(socket.fd, address.ai_addr, address.ai_addrlen) == 0;
    };
    while (seconds_now() < deadline) {
        for (const int port : ports_of(launch)) {
            const Socket socket = first_socket(launch.master_addr, port, reason, connects);
            uint64_t answer = 0;
            if (socket.fd < 0 || !socket.write(&own, sizeof own) || !socket.read(&answer, sizeof answer)) continue;
            if (answer != ANSWER) continue;
            socket.set_timeout(timeout + CONNECT_SECONDS);  // rank 0 knows which ranks are missing, and reports them
            if (socket.read(id.data(), id.size())) return id;
            fail(EXIT_INTERNAL, "rank 0 at %s:%d has ended before all ranks had joined", launch.master_addr.c_str(),
                 port);
        }
        usleep(300000);
    }
    fail(EXIT_INTERNAL, "rank %d could not join rank 0 at %s:%d within %g s (%s); is rank 0 running there?",
         launch.rank, launch.master_addr.c_str(), launch.master_port, timeout, reason.c_str());
}

std::string share_nccl_id(const Launch& launch, const std::function<std::string()>& new_id, double timeout_seconds) {
    if (launch.world_size == 1) return new_id();
    ENSURE(!launch.master_addr.empty() && launch.master_port > 0,
           "rank %d of %d (%s) has no address of rank 0; set MASTER_ADDR and MASTER_PORT", launch.rank,
           launch.world_size, launch.launcher.c_str());
    return launch.rank == 0 ? serve(launch, new_id, timeout_seconds) : join(launch, timeout_seconds);
}
