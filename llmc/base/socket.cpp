#include "base/socket.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>

#include "base/common.h"

std::string reason_of(int error) { return std::generic_category().message(error); }

std::string place_name(const std::string& host, int port) {
    return format(host.find(':') == std::string::npos ? "%s:%d" : "[%s]:%d", host.c_str(), port);
}

bool is_full_or_empty(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

int milliseconds_until(double time) { return int(std::ceil(1000 * std::clamp(time - seconds_now(), 0.0, 3600.0))); }

bool wait_for_socket(int fd, short events, double until) {
    for (;;) {
        pollfd ready = {fd, events, 0};
        const int count = poll(&ready, 1, milliseconds_until(until));
        if (count > 0) return true;
        if ((count == 0 || errno != EINTR) && seconds_now() >= until) return false;
    }
}

// Makes a socket non-blocking, and sets close-on-exec. macOS cannot set these flags when it creates a socket.
static Socket make_nonblocking(int fd) {
    if (fd < 0) return Socket(fd);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
#ifdef SO_NOSIGPIPE
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
    return Socket(fd);
}

std::vector<Address> find_addresses(const std::string& host, int port, std::string& reason) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = AF_UNSPEC, hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (host.empty() ? AI_PASSIVE : 0);
    const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error != 0) reason = error == EAI_SYSTEM ? reason_of(errno) : gai_strerror(error);
    std::vector<Address> addresses;
    for (const addrinfo* i = error ? nullptr : found; i; i = i->ai_next) {
        Address& address = addresses.emplace_back();
        memcpy(&address.storage, i->ai_addr, i->ai_addrlen);
        address.length = i->ai_addrlen;
    }
    if (error == 0) freeaddrinfo(found);
    // [::] accepts IPv4 too; 0.0.0.0 is for a kernel without IPv6.
    if (host.empty())
        std::stable_partition(addresses.begin(), addresses.end(),
                              [](const Address& a) { return a.storage.ss_family == AF_INET6; });
    return addresses;
}

static std::string numeric_name(const sockaddr* address, socklen_t length) {
    char name[NI_MAXHOST] = {};
    const int error = getnameinfo(address, length, name, sizeof(name), nullptr, 0, NI_NUMERICHOST);
    return error ? "an unknown address" : name;
}

std::vector<std::string> addresses_of_this_host() {
    std::vector<std::string> names;
    ifaddrs* first = nullptr;
    if (getifaddrs(&first) != 0) return names;
    for (const ifaddrs* i = first; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        const int family = i->ifa_addr->sa_family;
        if (family == AF_INET) names.push_back(numeric_name(i->ifa_addr, sizeof(sockaddr_in)));
        if (family != AF_INET6) continue;
        const auto* ipv6 = reinterpret_cast<const sockaddr_in6*>(i->ifa_addr);
        // A link-local address needs the name of an interface, which differs between hosts.
        if (!IN6_IS_ADDR_LINKLOCAL(&ipv6->sin6_addr)) names.push_back(numeric_name(i->ifa_addr, sizeof *ipv6));
    }
    freeifaddrs(first);
    return names;
}

int listen_at(const Address& address, int backlog, Socket& out) {
    Socket listener = make_nonblocking(socket(address.storage.ss_family, SOCK_STREAM, 0));
    if (listener.fd < 0) return errno;
    const int on = 1, off = 0;
    setsockopt(listener.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address.storage.ss_family == AF_INET6) setsockopt(listener.fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (bind(listener.fd, address.get(), address.length) != 0 || listen(listener.fd, backlog) != 0) return errno;
    out = std::move(listener);
    return 0;
}

int port_of(const Socket& listener) {
    Address own;
    own.length = sizeof own.storage;
    if (getsockname(listener.fd, reinterpret_cast<sockaddr*>(&own.storage), &own.length) != 0)
        fail(EXIT_INTERNAL, "the port of a socket is not known: %s", reason_of(errno).c_str());
    return ntohs(own.storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own.storage).sin6_port
                                                   : reinterpret_cast<const sockaddr_in&>(own.storage).sin_port);
}

int accept_from(const Socket& listener, Socket& out, std::string& from) {
    sockaddr_storage peer = {};
    socklen_t length = sizeof(peer);
    Socket socket = make_nonblocking(accept(listener.fd, reinterpret_cast<sockaddr*>(&peer), &length));
    if (socket.fd < 0) return errno;
    from = numeric_name(reinterpret_cast<const sockaddr*>(&peer), length);
    out = std::move(socket);
    return 0;
}

std::string connect_to(const Address& address, double until, Socket& out) {
    Socket socket = make_nonblocking(::socket(address.storage.ss_family, SOCK_STREAM, 0));
    if (socket.fd < 0) return reason_of(errno);
    int error = connect(socket.fd, address.get(), address.length) == 0 ? 0 : errno;
    if (error == EINPROGRESS || error == EINTR) {
        if (!wait_for_socket(socket.fd, POLLOUT, until)) return "no connection in time";
        socklen_t length = sizeof(error);
        getsockopt(socket.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error != 0) return reason_of(error);
    out = std::move(socket);
    return "";
}

bool send_all(const Socket& socket, std::string_view bytes, double until) {
    while (!bytes.empty()) {
        const ssize_t put = send(socket.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (put > 0) bytes.remove_prefix(size_t(put));
        if (put < 0 && !(is_full_or_empty(errno) && wait_for_socket(socket.fd, POLLOUT, until))) return false;
    }
    return true;
}
