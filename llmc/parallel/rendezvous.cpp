#include "parallel/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <xxhash.h>
#ifdef USE_LIBCRYPTO
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/print.h"

static constexpr double CONNECT_SECONDS = 5;  // time for a connect, and for each of rank 0's first two messages
static constexpr int WINDOW = 16;             // ports that rank 0 tries under torchrun
static constexpr size_t MOST_GUESTS = 128;    // connections without a hello

using Bytes32 = std::array<uint8_t, 32>;

static Bytes32 random_bytes() {
    Bytes32 out;
    INVARIANT(getentropy(out.data(), out.size()) == 0, "getentropy: %s", strerror(errno));
    return out;
}

// Returns HMAC-SHA256(secret, text), or, without a secret, a hash that anyone can compute.
static Bytes32 prove([[maybe_unused]] const std::string& secret, const std::string& text) {
    Bytes32 out = {};
    const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
#ifdef USE_LIBCRYPTO
    if (!secret.empty()) {
        INVARIANT(HMAC(EVP_sha256(), secret.data(), int(secret.size()), bytes, text.size(), out.data(), nullptr),
                  "libcrypto has refused HMAC-SHA256");
        return out;
    }
#endif
    const XXH64_hash_t hash = XXH3_64bits(bytes, text.size());
    std::memcpy(out.data(), &hash, sizeof hash);
    return out;
}

namespace {
// A connection begins with 32 random bytes of rank 0. The rank sends a Hello. Rank 0 answers with its own, in which
// rank is the accepted one, or 0, and sends the id when all ranks have come.
struct Hello {
    uint32_t world_size = 0, rank = 0;
    Bytes32 nonce = random_bytes();
};
using Id = std::array<char, NCCL_ID_BYTES>;

struct Socket {
    int fd = -1;
    std::string text;  // the run, and all messages so far
    explicit Socket(int fd = -1) : fd(fd) {}
    Socket(Socket&& other) noexcept { *this = std::move(other); }
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd, other.fd);
        std::swap(text, other.text);
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
    // The proof that follows a message is of all messages so far, so that it fits no other place.
    bool write_proved(const std::string& secret, const auto& message) {
        const char* bytes = reinterpret_cast<const char*>(&message);
        const Bytes32 proof = prove(secret, text.append(bytes, sizeof message));
        const std::string all = std::string(bytes, sizeof message).append(proof.begin(), proof.end());
        return write(all.data(), all.size());
    }
    bool read_proved(const std::string& secret, auto& message) {
        Bytes32 proof;
        if (!read(&message, sizeof message) || !read(&proof, sizeof proof)) return false;
        return proof == prove(secret, text.append(reinterpret_cast<const char*>(&message), sizeof message));
    }
    bool is_open() const {  // whether the other side has not closed it
        char byte;
        return fd >= 0 && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }
};
}  // namespace

// Begins the text of a connection.
static std::string first_text(const Launch& launch, const Bytes32& greeting) {
    // torchrun's agents on several hosts count their restarts separately.
    const bool several_agents = launch.launcher == "torchrun" && launch.local_world_size != launch.world_size;
    return format("%d %d %s ", launch.master_port, several_agents ? 0 : launch.attempt, launch.run_id.c_str())
        .append(greeting.begin(), greeting.end());
}

// Encrypts or decrypts the id of a connection with this text.
static void encrypt(const std::string& secret, const std::string& text, Id& id) {
    Bytes32 key = {};
    for (size_t i = 0; i < id.size(); i++) {
        if (i % key.size() == 0) key = prove(secret, text + format("key %zu", i));
        id[i] ^= char(key[i % key.size()]);
    }
}

// Returns the ports on which rank 0 may listen.
static std::vector<int> ports_of(const Launch& launch) {
    if (launch.launcher != "torchrun") return {launch.master_port};
    std::vector<int> ports(WINDOW);
    std::iota(ports.begin(), ports.end(), launch.master_port + 1);
    return ports;
}

// Calls use(socket, address) with new sockets for the host's addresses until it is true. Returns that, or sets reason.
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

static bool is_local(const std::string& host) {
    return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// A name of this host may resolve to 127.0.1.1 here and to another address elsewhere, so rank 0 listens on all
// interfaces, unless its address is loopback. [::] accepts IPv4 too; 0.0.0.0 is for a kernel without IPv6.
static Socket listen_for_ranks(const Launch& launch) {
    std::string reason;
    std::vector<std::string> hosts = {"::", "0.0.0.0"};
    if (is_local(launch.master_addr)) hosts = {launch.master_addr};
    for (const int port : ports_of(launch))
        for (const std::string& any : hosts) {
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

// Takes the hello of a guest, which becomes a rank, or sets the reason why not. A rank that contradicts rank 0 gets the
// answer, and ends. Rank 0 waits on, because without a secret anyone may have sent the hello.
static void take_hello(const Launch& launch, Socket& guest, std::vector<Socket>& ranks, std::string& reason) {
    Hello hello, answer = {uint32_t(ranks.size())};
    reason = "; a stranger came, or a rank with another TRAIN_GPT2_SECRET, run or attempt";
    if (!guest.read_proved(launch.secret, hello)) return;
    const bool fits = hello.world_size == answer.world_size && hello.rank < ranks.size();
    if (fits && !ranks[hello.rank].is_open()) answer.rank = hello.rank;
    reason = answer.rank > 0 ? "" : format("; it has refused rank %u of %u", hello.rank, hello.world_size);
    if (guest.write_proved(launch.secret, answer) && answer.rank > 0) ranks[answer.rank] = std::move(guest);
}

// Greets a connection and takes hellos. A guest that is silent delays no other. The oldest makes room for a new one.
static void serve_guests(const Launch& launch, const Socket& listener, double deadline, std::vector<Socket>& guests,
                         std::vector<Socket>& ranks, std::string& reason) {
    std::vector<pollfd> ready = {{listener.fd, POLLIN, 0}};
    for (const Socket& guest : guests) ready.push_back({guest.fd, POLLIN, 0});
    poll(ready.data(), nfds_t(ready.size()), std::max(0, int(1000 * (deadline - seconds_now()))));
    for (size_t i = guests.size(); i-- > 0;) {
        if (!ready[i + 1].revents) continue;
        take_hello(launch, guests[i], ranks, reason);
        guests.erase(guests.begin() + long(i));
    }
    Socket guest(ready[0].revents ? accept(listener.fd, nullptr, nullptr) : -1);
    if (guest.fd < 0) return;
    const Bytes32 greeting = random_bytes();
    const int whole = sizeof(Hello) + sizeof(Bytes32);  // poll waits for a whole hello, or for the end
    setsockopt(guest.fd, SOL_SOCKET, SO_RCVLOWAT, &whole, sizeof whole);
    guest.set_timeout(CONNECT_SECONDS);
    guest.text = first_text(launch, greeting);
    if (guest.write(greeting.data(), greeting.size())) guests.push_back(std::move(guest));
    if (guests.size() > MOST_GUESTS) guests.erase(guests.begin());
}

static std::string serve(const Launch& launch, const std::function<std::string()>& new_id, double timeout) {
    if (launch.secret.empty() && !is_local(launch.master_addr))
        print_message("warning: without TRAIN_GPT2_SECRET rank 0 takes any process for a rank: trusted networks only");
    const Socket listener = listen_for_ranks(launch);
    std::vector<Socket> guests;                            // connections that have sent no hello yet
    std::vector<Socket> ranks(size_t(launch.world_size));  // connection of each rank but 0
    const double deadline = seconds_now() + timeout;
    std::string reason;
    // A rank that waited too long has closed its connection, and comes again.
    for (std::string missing; !(missing = list_missing(ranks)).empty();) {
        serve_guests(launch, listener, deadline, guests, ranks, reason);
        if (seconds_now() >= deadline)
            fail(EXIT_INTERNAL,
                 "rank 0 has waited %g s at %s:%d for ranks %s; were they started, and can they reach this host?%s",
                 timeout, launch.master_addr.c_str(), launch.master_port, missing.c_str(), reason.c_str());
    }
    const std::string id = new_id();
    INVARIANT(id.size() == size_t(NCCL_ID_BYTES), "the id of NCCL has %zu bytes", id.size());
    for (size_t rank = 1; rank < ranks.size(); rank++) {
        Id message;
        id.copy(message.data(), id.size());
        encrypt(launch.secret, ranks[rank].text, message);
        if (!ranks[rank].write_proved(launch.secret, message))
            fail(EXIT_INTERNAL, "rank %zu has disconnected before all ranks had joined", rank);
    }
    return id;
}

// ---- the other ranks

// Says hello to a process that listens. Returns whether it is rank 0.
static bool is_rank_0(const Launch& launch, Socket& socket) {
    Bytes32 greeting;
    Hello hello = {uint32_t(launch.world_size), uint32_t(launch.rank)}, answer;
    if (!socket.read(&greeting, sizeof greeting)) return false;
    socket.text = first_text(launch, greeting);
    if (!socket.write_proved(launch.secret, hello) || !socket.read_proved(launch.secret, answer)) return false;
    ENSURE(answer.rank == hello.rank,
           "rank 0, of %u ranks, refuses rank %u of %u: start each rank once, and all with the same number of ranks",
           answer.world_size, hello.rank, hello.world_size);
    return true;
}

static std::string join(const Launch& launch, double timeout) {
    const double deadline = seconds_now() + timeout;
    std::string reason = "no address", stranger;
    const auto connects = [](const Socket& socket, const addrinfo& address) {
        socket.set_timeout(CONNECT_SECONDS);
        return connect(socket.fd, address.ai_addr, address.ai_addrlen) == 0;
    };
    while (seconds_now() < deadline) {
        for (const int port : ports_of(launch)) {
            Socket socket = first_socket(launch.master_addr, port, reason, connects);
            if (socket.fd < 0) continue;
            stranger = "a process there has another TRAIN_GPT2_SECRET, run or attempt";
            if (!is_rank_0(launch, socket)) continue;
            socket.set_timeout(timeout + CONNECT_SECONDS);  // rank 0 knows which ranks are missing, and reports them
            const std::string text = socket.text;
            Id id;
            if (!socket.read_proved(launch.secret, id))
                fail(EXIT_INTERNAL, "rank 0 at %s:%d has ended before all ranks had joined", launch.master_addr.c_str(),
                     port);
            encrypt(launch.secret, text, id);
            return {id.data(), id.size()};
        }
        usleep(300000);
    }
    fail(EXIT_INTERNAL, "rank %d could not join rank 0 at %s:%d within %g s (%s); is rank 0 running there?",
         launch.rank, launch.master_addr.c_str(), launch.master_port, timeout,
         (stranger.empty() ? reason : stranger).c_str());
}

std::string make_secret() {
    std::string secret;
#ifdef USE_LIBCRYPTO
    for (const uint8_t byte : random_bytes()) secret += format("%02x", byte);
#endif
    return secret;
}

std::string share_nccl_id(const Launch& launch, const std::function<std::string()>& new_id, double timeout_seconds) {
    if (launch.world_size == 1) return new_id();
    ENSURE(!launch.master_addr.empty() && launch.master_port > 0,
           "rank %d of %d (%s) has no address of rank 0; set MASTER_ADDR and MASTER_PORT", launch.rank,
           launch.world_size, launch.launcher.c_str());
    ENSURE(launch.secret.empty() || !make_secret().empty(),
           "TRAIN_GPT2_SECRET needs libcrypto, which this build lacks: apt-get install libssl-dev, and run make");
    return launch.rank == 0 ? serve(launch, new_id, timeout_seconds) : join(launch, timeout_seconds);
}
