// nccl.cpp: NCCL's collectives between processes of one machine, for the emulator. Compiled like emulator.cpp.
//
// Ranks are a star: all send to rank 0, which adds in the order of ranks and sends back, over Unix-domain sockets of
// the abstract kind, whose name is the unique id. There is no thread: a collective moves when its stream is stepped
// (simt::enqueue_outside), the rest when ncclCommGetAsyncError is called.
#include "nccl.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "internal.h"

using simt::Site;

namespace {

constexpr int ASKED_AT_LEAST = 3;   // times, before a call that answered ncclInProgress is done
constexpr uint64_t SLOW_EVERY = 3;  // of so many collectives one answers that
constexpr float COLLECTIVE_MS = 1;  // on the stream's clock

enum Kind : uint32_t { hello, welcome, goodbye, all_reduce, reduce_scatter, all_gather, broadcast };
const char* const kind_names[] = {
    "hello", "welcome", "ncclCommFinalize", "ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast"};

// In front of each message. Of a hello, count is the number of ranks and root the sender.
struct Header {
    Kind kind;
    uint32_t type = 0;
    int32_t root = 0;
    uint64_t count = 0, number = 0, bytes = 0;  // bytes: that follow
};

struct Link {
    int fd = -1;
    std::string in, out;
    bool closed = false;

    void send(Header header, const std::string& payload) {
        header.bytes = payload.size();
        out.append(reinterpret_cast<const char*>(&header), sizeof(header)).append(payload);
    }

    // Moves what can be moved now.
    void pump() {
        if (closed) return;
        ssize_t n = 1;
        while (!out.empty() && n > 0) {
            n = ::send(fd, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n > 0) out.erase(0, size_t(n));
        }
        closed = n < 0 && errno != EAGAIN;
        char piece[1 << 16];
        while ((n = recv(fd, piece, sizeof(piece), MSG_DONTWAIT)) > 0) in.append(piece, size_t(n));
        closed = closed || n == 0 || errno != EAGAIN;
    }

    bool take(Header& header, std::string& payload) {
        if (in.size() < sizeof(header)) return false;
        in.copy(reinterpret_cast<char*>(&header), sizeof(header));
        if (in.size() < sizeof(header) + header.bytes) return false;
        payload = in.substr(sizeof(header), header.bytes);
        in.erase(0, sizeof(header) + header.bytes);
        return true;
    }
};

// SIMT_NCCL=deaf: nobody notices that a rank is gone, as between GPUs that write to each other's memory.
const bool deaf = getenv("SIMT_NCCL") && strcmp(getenv("SIMT_NCCL"), "deaf") == 0;

size_t size_of(uint32_t type) { return type == ncclFloat ? 4 : type == ncclBfloat16 ? 2 : 1; }

template <class T>
void add(std::string& sums, const std::string& more) {
    for (size_t at = 0; at < sums.size(); at += sizeof(T)) {
        T a, b;
        memcpy(&a, sums.data() + at, sizeof(T));
        memcpy(&b, more.data() + at, sizeof(T));
        a = T(float(a) + float(b));
        memcpy(sums.data() + at, &a, sizeof(T));
    }
}

// Sockets by name, of ids that no communicator was made with yet.
std::map<std::string, int>& listeners() {
    static auto* const all = new std::map<std::string, int>;
    return *all;
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path + 1, sizeof(address.sun_path) - 2);
    length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

int new_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

}  // namespace

struct ncclComm {
    enum State { joining, ready, finalizing, finalized, aborted } state = joining;
    int rank = 0, ranks = 1;
    std::string name;
    int listener = -1;
    std::vector<Link> links, strangers;  // rank 0: to each rank; others: to rank 0 alone. Strangers have said no hello
    ncclResult_t error = ncclSuccess;
    std::string reason;
    int asked = 0;                            // since the last call that answered ncclInProgress
    std::function<void()> slow;               // a collective that is not queued yet
    uint64_t issued = 0, done = 0, byes = 0;  // collectives; ranks that finalize
    bool said_bye = false;

    ~ncclComm() {
        for (const Link& link : links) close(link.fd);
        for (const Link& link : strangers) close(link.fd);
        if (listener >= 0) close(listener);
    }

    Link& link_to(int r) { return rank == 0 ? links[size_t(r)] : links[0]; }
    bool flushed() const {
        for (const Link& link : links)
            if (!link.out.empty()) return false;
        return true;
    }

    void lose(const std::string& why) {
        if (error == ncclSuccess) error = ncclRemoteError, reason = why;
    }

    void pump() {
        for (size_t i = 0; i < links.size(); i++) {
            if (links[i].fd < 0) continue;
            links[i].pump();
            const bool over = state == finalized || (state == finalizing && !links[i].in.empty());
            if (links[i].closed && !over && !deaf)
                lose("connection closed by rank " + std::to_string(rank == 0 ? i : 0));
        }
    }

    void join(Site site);
    void meet(Site site);
    void say_goodbye();
};

// Rank 0: lets ranks in as they come, and tells all when the last one has.
void ncclComm::meet(Site site) {
    for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        strangers.emplace_back();
        strangers.back().fd = fd;
    }
    Header header;
    std::string none;
    for (Link& stranger : strangers) {
        if (stranger.fd < 0) continue;
        stranger.pump();
        if (!stranger.take(header, none)) continue;
        if (header.count != uint64_t(ranks)) simt::report("ncclCommInitRankConfig: ranks disagree on how many", site);
        if (header.root <= 0 || header.root >= ranks || links[size_t(header.root)].fd >= 0)
            simt::report("ncclCommInitRankConfig: two ranks have one number", site);
        std::swap(links[size_t(header.root)], stranger);
    }
    for (int r = 1; r < ranks; r++)
        if (links[size_t(r)].fd < 0) return;
    for (int r = 1; r < ranks; r++) links[size_t(r)].send({.kind = welcome}, "");
    state = ready;
}

void ncclComm::join(Site site) {
    if (rank == 0) return meet(site);
    Link& link = links[0];
    if (link.fd < 0) {
        const int fd = new_socket();
        socklen_t length = 0;
        const sockaddr_un address = address_of(name, length);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
            if (errno != EAGAIN) error = ncclSystemError, reason = "nobody listens there";
            close(fd);
            return;
        }
        link.fd = fd;
        link.send({.kind = hello, .root = rank, .count = uint64_t(ranks)}, "");
    }
    pump();
    Header header;
    std::string none;
    if (link.take(header, none)) state = ready;
}

// All have finalized before any of them goes.
void ncclComm::say_goodbye() {
    if (rank > 0 && !said_bye) links[0].send({.kind = goodbye}, "");
    said_bye = true;
    pump();
    Header header;
    std::string none;
    for (Link& link : links) {
        if (link.fd < 0 || !link.take(header, none)) continue;
        if (header.kind != goodbye)
            simt::report("ncclCommFinalize, while another rank still calls", {__FILE__, __LINE__});
        byes++;
    }
    if (byes < (rank == 0 ? uint64_t(ranks) - 1 : 1)) return;
    for (int r = 1; r < ranks && rank == 0; r++) links[size_t(r)].send({.kind = goodbye}, "");
    state = finalized;
    for (int tries = 0; rank == 0 && !flushed() && tries < 1000; tries++) usleep(100), pump();
}

namespace {

std::map<ncclComm_t, std::shared_ptr<ncclComm>>& communicators() {
    static auto* const all = new std::map<ncclComm_t, std::shared_ptr<ncclComm>>;
    return *all;
}

ncclComm& known(ncclComm_t comm, const char* call, Site site) {
    if (!communicators().contains(comm)) simt::report((std::string(call) + " of no communicator").c_str(), site);
    return *comm;
}

// A collective on this rank.
struct Collective {
    std::shared_ptr<ncclComm> comm;
    Header header;
    const char* from;
    char* to;
    size_t from_bytes, to_bytes;
    Site site;
    bool started = false, combined = false;
    std::vector<std::string> parts;  // rank 0: what each rank sent
    std::vector<bool> came;

    bool attempt();
    bool combine();
    void compare(int r, const Header& other) const;
    std::string own() const;
    std::string result_for(int r, const std::string& whole) const;
};

std::string text_of(const Header& h) {
    return std::string(kind_names[h.kind]) + " number " + std::to_string(h.number) + " of " + std::to_string(h.count) +
           " elements of type " + std::to_string(h.type) + ", root " + std::to_string(h.root);
}

void Collective::compare(int r, const Header& other) const {
    if (text_of(other) == text_of(header)) return;
    const std::string text = "rank 0 calls " + text_of(header) + ", rank " + std::to_string(r) + " " + text_of(other);
    simt::report(text.c_str(), site);
}

std::string Collective::own() const {
    if (header.kind == broadcast && header.root != comm->rank) return "";
    std::string bytes(from_bytes, 0);
    simt::copy_unseen(bytes.data(), from, from_bytes);
    return bytes;
}

std::string Collective::result_for(int r, const std::string& whole) const {
    return header.kind == reduce_scatter ? whole.substr(size_t(r) * to_bytes, to_bytes) : whole;
}

// Rank 0, when all have come.
bool Collective::combine() {
    std::string whole = header.kind == broadcast ? parts[size_t(header.root)] : parts[0];
    for (int r = 1; r < comm->ranks; r++) {
        const std::string& part = parts[size_t(r)];
        if (header.kind == all_gather) whole += part;
        if (header.kind != all_reduce && header.kind != reduce_scatter) continue;
        if (header.type == ncclFloat) add<float>(whole, part);
        if (header.type == ncclBfloat16) add<bf16>(whole, part);
    }
    for (int r = 1; r < comm->ranks; r++) comm->link_to(r).send(header, result_for(r, whole));
    simt::copy_unseen(to, result_for(0, whole).data(), to_bytes);
    return combined = true;
}

bool Collective::attempt() {
    if (comm->state == ncclComm::aborted) return true;
    if (comm->error != ncclSuccess) return false;
    const bool first = !std::exchange(started, true);
    if (first && comm->rank > 0) comm->link_to(0).send(header, own());
    if (first && comm->rank == 0) {
        parts.resize(size_t(comm->ranks)), came.resize(size_t(comm->ranks));
        parts[0] = own(), came[0] = true;
    }
    comm->pump();
    Header other;
    if (comm->rank > 0) {
        std::string result;
        if (!comm->link_to(0).take(other, result)) return false;
        simt::copy_unseen(to, result.data(), to_bytes);
        comm->done++;
        return true;
    }
    bool all = true;
    for (int r = 1; r < comm->ranks; r++) {
        const size_t i = size_t(r);
        if (!came[i] && comm->link_to(r).take(other, parts[i])) came[i] = true, compare(r, other);
        all = all && came[i];
    }
    if (!combined && (!all || !combine())) return false;
    comm->pump();
    if (!comm->flushed()) return false;
    comm->done++;
    return true;
}

bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

// The sizes on this rank, and whether its pointers are apart or in place exactly.
void check_memory(const Collective& c, Site site) {
    const std::string name = kind_names[c.header.kind];
    const bool reads = c.header.kind != broadcast || c.header.root == c.comm->rank;
    const std::string outside = name + ": a pointer that is not the device's";
    if (reads) simt::check_device_range(c.from, c.from_bytes, outside.c_str(), site);
    simt::check_device_range(c.to, c.to_bytes, outside.c_str(), site);
    if (!reads || !overlap(c.from, c.from_bytes, c.to, c.to_bytes)) return;
    const size_t rank = size_t(c.comm->rank);
    const bool exact = c.header.kind == reduce_scatter ? c.to == c.from + rank * c.to_bytes
                       : c.header.kind == all_gather   ? c.from == c.to + rank * c.from_bytes
                                                       : c.from == c.to;
    if (!exact) simt::report((name + ": its output overlaps its input, but not in place").c_str(), site);
}

ncclResult_t start(Kind kind, const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                   cudaStream_t stream, Site site) {
    ncclComm& c = known(comm, kind_names[kind], site);
    if (c.state != ncclComm::ready)
        simt::report((std::string(kind_names[kind]) + " of a communicator that is not ready").c_str(), site);
    if (c.slow) simt::report("a call before ncclCommGetAsyncError has said that the one before it is done", site);
    if (c.error != ncclSuccess) return c.error;
    if (type != ncclInt8 && type != ncclFloat && type != ncclBfloat16) return ncclInvalidArgument;
    if (root < 0 || root >= c.ranks) return ncclInvalidArgument;
    const size_t once = count * size_of(type), all = once * size_t(c.ranks);
    auto job = std::make_shared<Collective>();
    job->comm = communicators().at(comm);
    job->header = {.kind = kind, .type = uint32_t(type), .root = root, .count = count, .number = c.issued++};
    job->from = static_cast<const char*>(from), job->to = static_cast<char*>(to);
    job->from_bytes = kind == reduce_scatter ? all : once, job->to_bytes = kind == all_gather ? all : once;
    job->site = site;
    if (count > 0) check_memory(*job, site);
    const auto tell = [job] {
        if (__tsan_read_range) __tsan_read_range(const_cast<char*>(job->from), job->from_bytes);
        if (__tsan_write_range) __tsan_write_range(job->to, job->to_bytes);
    };
    const auto queue = [=] { simt::enqueue_outside([job] { return job->attempt(); }, tell, COLLECTIVE_MS, stream); };
    if (c.issued % SLOW_EVERY != 1) return queue(), ncclSuccess;
    c.slow = queue, c.asked = 0;
    return ncclInProgress;
}

__attribute__((destructor)) void report_communicators_left() {
    if (communicators().empty()) return;
    fprintf(stderr, "emulator: leak of %zu communicators of NCCL\n", communicators().size());
    fflush(nullptr);
    _exit(1);
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device random;
    char name[64];
    snprintf(name, sizeof(name), "simt-nccl-%d-%08x%08x", int(getpid()), random(), random());
    *id = {};
    std::string(name).copy(id->internal, sizeof(id->internal) - 1);
    socklen_t length = 0;
    const sockaddr_un address = address_of(name, length);
    const int fd = new_socket();
    if (fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&address), length) || listen(fd, 128))
        return ncclSystemError;
    listeners()[name] = fd;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess:
            return "no error";
        case ncclUnhandledCudaError:
            return "unhandled cuda error";
        case ncclSystemError:
            return "unhandled system error";
        case ncclInternalError:
            return "internal error";
        case ncclInvalidArgument:
            return "invalid argument";
        case ncclInvalidUsage:
            return "invalid usage";
        case ncclRemoteError:
            return "remote process exited or there was a network error";
        case ncclInProgress:
            return "NCCL operation in progress";
    }
    return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) { return comm ? comm->reason.c_str() : ""; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config,
                                    Site site) {
    if (!config || config->blocking != 0) simt::report("ncclCommInitRankConfig: only with blocking = 0", site);
    if (ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    auto made = std::make_shared<ncclComm>();
    made->rank = rank, made->ranks = ranks, made->name = id.internal;
    made->links.resize(size_t(rank == 0 ? ranks : 1));
    if (rank == 0) {
        const auto found = listeners().find(made->name);
        if (found == listeners().end()) simt::report("ncclCommInitRankConfig: rank 0 did not make the id", site);
        made->listener = found->second;
        listeners().erase(found);
    }
    *comm = made.get();
    communicators()[made.get()] = made;
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state, Site site) {
    ncclComm& c = known(comm, "ncclCommGetAsyncError", site);
    c.asked++;
    if (c.error == ncclSuccess && c.state == ncclComm::ready) c.pump();
    if (c.error == ncclSuccess && c.state == ncclComm::joining) c.join(site);
    if (c.error == ncclSuccess && c.state == ncclComm::finalizing) c.say_goodbye();
    *state = c.error;
    if (c.error != ncclSuccess) return ncclSuccess;
    if (c.state == ncclComm::joining || c.state == ncclComm::finalizing || c.asked < ASKED_AT_LEAST)
        *state = ncclInProgress;
    else if (c.slow)
        std::exchange(c.slow, nullptr)();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm, Site site) {
    ncclComm& c = known(comm, "ncclCommFinalize", site);
    if (c.state != ncclComm::ready)
        simt::report("ncclCommFinalize of a communicator that is not ready, or twice", site);
    if (c.slow || c.done != c.issued) simt::report("ncclCommFinalize before the collectives are done", site);
    c.state = ncclComm::finalizing, c.asked = 0;
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm, Site site) {
    ncclComm& c = known(comm, "ncclCommDestroy", site);
    if (c.error == ncclSuccess && (c.state != ncclComm::finalized || c.asked < ASKED_AT_LEAST))
        simt::report("ncclCommDestroy of a communicator that is not finalized", site);
    communicators().erase(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm, Site site) {
    known(comm, "ncclCommAbort", site).state = ncclComm::aborted;
    communicators().erase(comm);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream, Site site) {
    if (op != ncclSum || type == ncclInt8) return ncclInvalidArgument;
    return start(all_reduce, from, to, count, type, 0, comm, stream, site);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream, Site site) {
    if (op != ncclSum || type == ncclInt8) return ncclInvalidArgument;
    return start(reduce_scatter, from, to, count, type, 0, comm, stream, site);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream, Site site) {
    return start(all_gather, from, to, count, type, 0, comm, stream, site);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream, Site site) {
    return start(broadcast, from, to, count, type, root, comm, stream, site);
}
