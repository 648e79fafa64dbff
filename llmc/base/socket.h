// socket.h: TCP sockets that never block: each wait has an end, a time of seconds_now().
#pragma once
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#ifndef MSG_NOSIGNAL
constexpr int MSG_NOSIGNAL = 0;  // macOS has a socket option instead: SO_NOSIGPIPE
#endif

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
};

struct Address {
    sockaddr_storage storage = {};
    socklen_t length = 0;
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string reason_of(int error);                           // of an errno
std::string place_name(const std::string& host, int port);  // "h0:29500"
bool is_full_or_empty(int error);                           // the errno of a call that would have waited
int milliseconds_until(double time);                        // for poll, rounded up: 0 only once that time has come
bool wait_for_socket(int fd, short events, double until);   // false: the time has come, and it is not ready

// Returns the addresses of a host; for an empty host, the wildcard addresses to listen on. If the host has no
// address, returns an empty list and sets the reason.
std::vector<Address> find_addresses(const std::string& host, int port, std::string& reason);
// The numeric addresses of this host's interfaces, without those that other hosts cannot use.
std::vector<std::string> addresses_of_this_host();

// Returns 0, or errno (EADDRINUSE or another). SO_REUSEADDR permits a port with old connections of a finished run, but
// not one with a listener.
int listen_at(const Address& address, int backlog, Socket& out);
int port_of(const Socket& listener);
// Takes a connection that is waiting. Returns 0 and the peer's address in text, or errno.
int accept_from(const Socket& listener, Socket& out, std::string& from);
// Returns an empty string when connected, else the reason.
std::string connect_to(const Address& address, double until, Socket& out);
// Sends all bytes; waits until `until` while the send buffer is full.
bool send_all(const Socket& socket, std::string_view bytes, double until);
