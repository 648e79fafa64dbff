// nccl.cpp: the emulator's NCCL: collectives between processes of one machine. Compiled without sanitizers, like
// emulator.cpp.
//
// The topology is a star: every rank sends to rank 0, which adds in rank order and sends the results back. The ranks
// are connected by abstract Unix-domain sockets, whose name is the unique id. Network namespaces do not share these, so
// with SIMT_NCCL_FOLDER=DIR the sockets are files in DIR, which ranks in several namespaces can reach. There is no
// background thread: a collective makes progress when its stream is stepped (simt::enqueue_work), everything else
// when ncclCommGetAsyncError is called.
#include "nccl.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/types.h"
#include "internal.h"

using simt::Site;

namespace {

constexpr int MIN_POLLS = 3;  // polls until a call that returned ncclInProgress has completed
// The first call of each kind takes CONNECTION_BYTES of device memory, and the first with LARGE_BYTES takes them again.
constexpr size_t LARGE_BYTES = 1 << 20, CONNECTION_BYTES = 64 << 20;
constexpr uint64_t DELAYED_EVERY = 3;  // one of this many collectives returns ncclInProgress
constexpr int DEFAULT_CTAS = 4;        // thread blocks of a collective
constexpr float COLLECTIVE_MS = 1;     // duration of a collective with DEFAULT_CTAS, on the stream's clock

enum Kind : uint32_t { hello, welcome, goodbye, all_reduce, reduce_scatter, all_gather, broadcast, split };
const char* const kind_names[] = {"hello",         "welcome",           "ncclCommFinalize",
                                  "ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                  "ncclBroadcast", "ncclCommSplit"};

// The header of each message. In a hello, count is the number of ranks and root is the sender's rank.
struct Header {
    Kind kind;
    uint32_t type = 0;
    int32_t root = 0;
    uint64_t count = 0, number = 0, bytes = 0;  // bytes: length of the payload that follows
};

struct Link {
    int fd = -1;
    std::string in, out;
    bool closed = false;

    void send(Header header, const std::string& payload) {
        header.bytes = payload.size();
        out.append(reinterpret_cast<const char*>(&header), sizeof(header)).append(payload);
    }

    // Sends and receives as much as is possible without blocking.
    void pump() {
        if (closed) return;
        ssize_t n = 1;
        while (!out.empty() && n > 0) {
            n = ::send(fd, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n > 0) out.erase(0, size_t(n));
        }
        closed = n < 0 && errno != EAGAIN;
        char buffer[1 << 16];
        while ((n = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0) in.append(buffer, size_t(n));
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

// SIMT_NCCL=deaf: NCCL does not notice that a rank has ended. The real one does not if GPUs write to each other's
// memory.
const bool ignore_lost_ranks = getenv("SIMT_NCCL") && strcmp(getenv("SIMT_NCCL"), "deaf") == 0;

// ncclCommGetAsyncError may be called by another thread than the one whose launch blocks.
std::recursive_mutex in_progress;

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

// The listening sockets of unique ids that no communicator uses yet, by name.
std::map<std::string, int>& listeners() {
    static auto* const all = new std::map<std::string, int>;
    return *all;
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const char* folder = getenv("SIMT_NCCL_FOLDER");
    const std::string path = folder ? std::string(folder) + "/" + name : std::string(1, '\0') + name;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    length = socklen_t(offsetof(sockaddr_un, sun_path) + path.size());
    return address;
}

// A message of a rank in ncclCommSplit. `name` is that of a socket on which it listens: the group's rank 0 needs one.
struct SplitRequest {
    int32_t color, key, rank;
    char name[64];
};

int new_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

}  // namespace

struct ncclComm {
    enum State { joining, ready, finalizing, finalized, aborted } state = joining;
    int rank = 0, ranks = 1, ctas = DEFAULT_CTAS;
    std::string name;
    int listener = -1;
    std::vector<Link> links;      // on rank 0: one to each rank; on other ranks: one to rank 0
    std::vector<Link> new_links;  // on rank 0: connections whose hello has not arrived yet
    ncclResult_t error = ncclSuccess;
    std::string reason;
    int polls = 0;                          // polls since the last call that returned ncclInProgress
    std::function<void()> delayed;          // queues the collective that returned ncclInProgress; null if there is none
    uint64_t issued = 0, done = 0;          // collectives
    uint64_t goodbyes = 0;                  // goodbyes received
    bool connected[broadcast + 1][2] = {};  // by kind, for small and for large buffers
    bool sent_goodbye = false;              // whether this rank has sent its goodbye
    ncclComm_t parent = nullptr;            // the communicator that was split into this one

    // A call of ncclCommSplit that is not complete.
    struct Split {
        SplitRequest own;
        int listener;
        ncclComm_t* group;
        int ctas;
        std::map<int, SplitRequest> requests;  // on rank 0: by rank
    };
    std::unique_ptr<Split> splitting;

    ~ncclComm() {
        for (const Link& link : links) close(link.fd);
        for (const Link& link : new_links) close(link.fd);
        if (listener >= 0) close(listener);
    }

    Link& link_to(int r) { return rank == 0 ? links[size_t(r)] : links[0]; }
    bool flushed() const {
        for (const Link& link : links)
            if (!link.out.empty()) return false;
        return true;
    }

    void report_lost_rank(const std::string& why) {
        if (error != ncclSuccess) return;
        error = ncclRemoteError;
        reason = why;
    }

    void pump() {
        for (size_t i = 0; i < links.size(); i++) {
            if (links[i].fd < 0) continue;
            links[i].pump();
            const bool over = state == finalized || (state == finalizing && !links[i].in.empty());
            if (links[i].closed && !over && !ignore_lost_ranks)
                report_lost_rank("connection closed by rank " + std::to_string(rank == 0 ? i : 0));
        }
    }

    void join(Site site);
    void accept_ranks(Site site);
    void finalize();
    bool gather_requests(Site site);
    void make_group();
};

// Rank 0: accepts connections, reads each rank's hello, and sends a welcome to all ranks when all have connected.
void ncclComm::accept_ranks(Site site) {
    for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        new_links.emplace_back();
        new_links.back().fd = fd;
    }
    Header header;
    std::string none;
    for (Link& link : new_links) {
        if (link.fd < 0) continue;
        link.pump();
        if (!link.take(header, none)) continue;
        if (header.count != uint64_t(ranks))
            simt::report("ncclCommInitRankConfig: ranks disagree on the number of ranks", site);
        if (header.root <= 0 || header.root >= ranks || links[size_t(header.root)].fd >= 0)
            simt::report("ncclCommInitRankConfig: two ranks have the same number", site);
        std::swap(links[size_t(header.root)], link);
    }
    for (int r = 1; r < ranks; r++)
        if (links[size_t(r)].fd < 0) return;
    for (int r = 1; r < ranks; r++) links[size_t(r)].send({.kind = welcome}, "");
    state = ready;
}

void ncclComm::join(Site site) {
    if (rank == 0) return accept_ranks(site);
    Link& link = links[0];
    if (link.fd < 0) {
        const int fd = new_socket();
        socklen_t length = 0;
        const sockaddr_un address = address_of(name, length);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
            if (errno != EAGAIN) {
                error = ncclSystemError;
                reason = "no rank listens on this id";
            }
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

// ncclCommFinalize: waits until all ranks have called it.
void ncclComm::finalize() {
    if (rank > 0 && !sent_goodbye) links[0].send({.kind = goodbye}, "");
    sent_goodbye = true;
    pump();
    Header header;
    std::string none;
    for (Link& link : links) {
        if (link.fd < 0 || !link.take(header, none)) continue;
        if (header.kind != goodbye)
            simt::report("ncclCommFinalize while another rank still calls a collective", {__FILE__, __LINE__});
        goodbyes++;
    }
    if (goodbyes < (rank == 0 ? uint64_t(ranks) - 1 : 1)) return;
    for (int r = 1; r < ranks && rank == 0; r++) links[size_t(r)].send({.kind = goodbye}, "");
    state = finalized;
    for (int tries = 0; rank == 0 && !flushed() && tries < 1000; tries++) {
        usleep(100);
        pump();
    }
}

namespace {

std::map<ncclComm_t, std::shared_ptr<ncclComm>>& communicators() {
    static auto* const all = new std::map<ncclComm_t, std::shared_ptr<ncclComm>>;
    return *all;
}

ncclComm& known(ncclComm_t comm, const char* call, Site site) {
    if (!communicators().contains(comm))
        simt::report((std::string(call) + " of a communicator that does not exist").c_str(), site);
    return *comm;
}

std::string new_name() {
    std::random_device random;
    char name[64];
    snprintf(name, sizeof(name), "simt-nccl-%d-%08x%08x", int(getpid()), random(), random());
    return name;
}

// A socket that listens on a name; negative: an error.
int listen_on(const std::string& name) {
    socklen_t length = 0;
    const sockaddr_un address = address_of(name, length);
    const int fd = new_socket();
    return fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&address), length) || listen(fd, 128) ? -1 : fd;
}

int groups_begun = 0;  // calls of ncclGroupStart without ncclGroupEnd

// This rank's part in a collective.
struct Collective {
    std::shared_ptr<ncclComm> comm;
    Header header;
    const char* from;
    char* to;
    size_t from_bytes, to_bytes;
    Site site;
    bool started = false, combined = false;
    std::vector<std::string> parts;  // rank 0: each rank's data
    std::vector<bool> arrived;

    bool attempt();
    bool combine();
    void compare(int r, const Header& other) const;
    std::string own() const;
    std::string result_for(int r, const std::string& result) const;
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
    simt::copy_uninstrumented(bytes.data(), from, from_bytes);
    return bytes;
}

std::string Collective::result_for(int r, const std::string& result) const {
    return header.kind == reduce_scatter ? result.substr(size_t(r) * to_bytes, to_bytes) : result;
}

// Rank 0: computes the result from the data of all ranks and sends it to them.
bool Collective::combine() {
    std::string result = header.kind == broadcast ? parts[size_t(header.root)] : parts[0];
    for (int r = 1; r < comm->ranks; r++) {
        const std::string& part = parts[size_t(r)];
        if (header.kind == all_gather) result += part;
        if (header.kind != all_reduce && header.kind != reduce_scatter) continue;
        if (header.type == ncclFloat) add<float>(result, part);
        if (header.type == ncclBfloat16) add<bf16>(result, part);
    }
    for (int r = 1; r < comm->ranks; r++) comm->link_to(r).send(header, result_for(r, result));
    simt::copy_uninstrumented(to, result_for(0, result).data(), to_bytes);
    return combined = true;
}

bool Collective::attempt() {
    const std::lock_guard lock(in_progress);
    if (comm->state == ncclComm::aborted) return true;
    if (comm->error != ncclSuccess) return false;
    const bool first = !std::exchange(started, true);
    if (first && comm->rank > 0) comm->link_to(0).send(header, own());
    if (first && comm->rank == 0) {
        parts.resize(size_t(comm->ranks));
        arrived.resize(size_t(comm->ranks));
        parts[0] = own();
        arrived[0] = true;
    }
    comm->pump();
    Header other;
    if (comm->rank > 0) {
        std::string result;
        if (!comm->link_to(0).take(other, result)) return false;
        simt::copy_uninstrumented(to, result.data(), to_bytes);
        comm->done++;
        return true;
    }
    bool all = true;
    for (int r = 1; r < comm->ranks; r++) {
        const size_t i = size_t(r);
        if (!arrived[i] && comm->link_to(r).take(other, parts[i])) {
            arrived[i] = true;
            compare(r, other);
        }
        all = all && arrived[i];
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

// Reports pointers that are not in device memory, and an output that overlaps the input but is not exactly in place.
void check_memory(const Collective& c, Site site) {
    const std::string name = kind_names[c.header.kind];
    const bool reads = c.header.kind != broadcast || c.header.root == c.comm->rank;
    const std::string outside = name + ": a pointer that is not in device memory";
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
    if (c.delayed || c.splitting)
        simt::report("a call before ncclCommGetAsyncError reported the end of the previous call", site);
    if (c.error != ncclSuccess) return c.error;
    if (type != ncclInt8 && type != ncclFloat && type != ncclBfloat16) return ncclInvalidArgument;
    if (root < 0 || root >= c.ranks) return ncclInvalidArgument;
    const size_t once = count * size_of(type), all = once * size_t(c.ranks);
    bool& connected = c.connected[kind][once >= LARGE_BYTES];
    if (!connected) simt::take_device_memory(CONNECTION_BYTES);
    connected = true;
    auto job = std::make_shared<Collective>();
    job->comm = communicators().at(comm);
    job->header = {.kind = kind, .type = uint32_t(type), .root = root, .count = count, .number = c.issued++};
    job->from = static_cast<const char*>(from);
    job->to = static_cast<char*>(to);
    job->from_bytes = kind == reduce_scatter ? all : once;
    job->to_bytes = kind == all_gather ? all : once;
    job->site = site;
    if (count > 0) check_memory(*job, site);
    const auto annotate = [job] {
        if (__tsan_read_range) __tsan_read_range(const_cast<char*>(job->from), job->from_bytes);
        if (__tsan_write_range) __tsan_write_range(job->to, job->to_bytes);
    };
    const float ms = COLLECTIVE_MS * float(DEFAULT_CTAS) / float(c.ctas);
    const auto queue = [=] { simt::enqueue_work(annotate, ms, stream, [job] { return job->attempt(); }); };
    if (c.issued % DELAYED_EVERY != 1) {
        queue();
        return ncclSuccess;
    }
    c.delayed = queue;
    c.polls = 0;
    return ncclInProgress;
}

__attribute__((destructor)) void report_communicators_left() {
    if (communicators().empty()) return;
    fprintf(stderr, "emulator: leak of %zu NCCL communicators\n", communicators().size());
    fflush(nullptr);
    _exit(1);
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    const std::string name = new_name();
    *id = {};
    name.copy(id->internal, sizeof(id->internal) - 1);
    const int fd = listen_on(name);
    if (fd < 0) return ncclSystemError;
    listeners()[name] = fd;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    static const char* const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return texts[result];
}

const char* ncclGetLastError(ncclComm_t comm) { return comm ? comm->reason.c_str() : ""; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config,
                                    Site site) {
    if (!config || config->blocking != 0)
        simt::report("ncclCommInitRankConfig: the emulator supports only blocking = 0", site);
    if (ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    auto made = std::make_shared<ncclComm>();
    made->rank = rank;
    made->ranks = ranks;
    if (config->minCTAs > config->maxCTAs) return ncclInvalidArgument;
    if (config->maxCTAs > 0) made->ctas = config->maxCTAs;
    made->name = id.internal;
    made->links.resize(size_t(rank == 0 ? ranks : 1));
    if (rank == 0) {
        const auto found = listeners().find(made->name);
        if (found == listeners().end())
            simt::report("ncclCommInitRankConfig: the unique id of rank 0 is from another process", site);
        made->listener = found->second;
        listeners().erase(found);
    }
    *comm = made.get();
    communicators()[made.get()] = made;
    return ncclInProgress;
}

// Collects the requests of all ranks on rank 0, which sends them to all. Returns whether this rank has them.
bool ncclComm::gather_requests(Site site) {
    pump();
    Header header;
    std::string payload;
    if (rank > 0) {
        if (!link_to(0).take(header, payload)) return false;
        for (size_t at = 0; at < payload.size(); at += sizeof(SplitRequest)) {
            SplitRequest request;
            memcpy(&request, payload.data() + at, sizeof request);
            splitting->requests[request.rank] = request;
        }
        return true;
    }
    for (int r = 1; r < ranks; r++) {
        if (splitting->requests.contains(r) || !link_to(r).take(header, payload)) continue;
        if (header.kind != split) simt::report("ncclCommSplit while another rank calls a collective", site);
        memcpy(&splitting->requests[r], payload.data(), sizeof(SplitRequest));
    }
    if (int(splitting->requests.size()) < ranks) return false;
    std::string all;
    for (const auto& [r, request] : splitting->requests)
        all.append(reinterpret_cast<const char*>(&request), sizeof request);
    for (int r = 1; r < ranks; r++) link_to(r).send({.kind = split}, all);
    pump();
    return true;
}

// Makes the communicator of the ranks with this rank's color, in the order of their keys. Its rank 0 listens, and the
// others connect, as in ncclCommInitRankConfig.
void ncclComm::make_group() {
    const std::unique_ptr<Split> done_split = std::move(splitting);
    std::vector<SplitRequest> members;
    for (const auto& [r, request] : done_split->requests)
        if (request.color == done_split->own.color) members.push_back(request);
    std::stable_sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    *done_split->group = nullptr;
    if (done_split->own.color == NCCL_SPLIT_NOCOLOR) {
        close(done_split->listener);
        return;
    }
    auto made = std::make_shared<ncclComm>();
    made->parent = this;
    made->ranks = int(members.size());
    made->ctas = done_split->ctas;
    while (members[size_t(made->rank)].rank != rank) made->rank++;
    made->name = members[0].name;
    made->links.resize(size_t(made->rank == 0 ? made->ranks : 1));
    if (made->rank == 0)
        made->listener = done_split->listener;
    else
        close(done_split->listener);
    *done_split->group = made.get();
    communicators()[made.get()] = made;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* group, ncclConfig_t* config, Site site) {
    ncclComm& c = known(comm, "ncclCommSplit", site);
    if (!config || config->blocking != 0) simt::report("ncclCommSplit: the emulator supports only blocking = 0", site);
    if (c.state != ncclComm::ready) simt::report("ncclCommSplit of a communicator that is not ready", site);
    if (c.delayed || c.splitting || c.done != c.issued)
        simt::report("ncclCommSplit before all calls and collectives are done", site);
    if (c.error != ncclSuccess) return c.error;
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return ncclInvalidArgument;
    SplitRequest own = {.color = color, .key = key, .rank = c.rank, .name = ""};
    const std::string name = new_name();
    name.copy(own.name, sizeof(own.name) - 1);
    const int listener = listen_on(name);
    if (listener < 0) return ncclSystemError;
    const int ctas = config->maxCTAs > 0 ? config->maxCTAs : c.ctas;
    c.splitting.reset(new ncclComm::Split{own, listener, group, ctas, {}});
    if (c.rank == 0)
        c.splitting->requests[0] = own;
    else
        c.link_to(0).send({.kind = split}, std::string(reinterpret_cast<const char*>(&own), sizeof own));
    c.polls = 0;
    return ncclSuccess;  // as NCCL does, although the communicator is not ready
}

ncclResult_t ncclGroupStart() {
    groups_begun++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return groups_begun-- > 0 ? ncclSuccess : ncclInvalidUsage; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state, Site site) {
    const std::lock_guard lock(in_progress);
    ncclComm& c = known(comm, "ncclCommGetAsyncError", site);
    c.polls++;
    if (c.error == ncclSuccess && c.state == ncclComm::ready) c.pump();
    if (c.error == ncclSuccess && c.state == ncclComm::joining) c.join(site);
    if (c.error == ncclSuccess && c.state == ncclComm::finalizing) c.finalize();
    if (c.error == ncclSuccess && c.splitting && c.gather_requests(site)) c.make_group();
    *state = c.error;
    if (c.error != ncclSuccess) return ncclSuccess;
    if (c.splitting || c.state == ncclComm::joining || c.state == ncclComm::finalizing || c.polls < MIN_POLLS)
        *state = ncclInProgress;
    else if (c.delayed)
        std::exchange(c.delayed, nullptr)();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm, Site site) {
    ncclComm& c = known(comm, "ncclCommFinalize", site);
    if (c.state != ncclComm::ready)
        simt::report("ncclCommFinalize of a communicator that is not ready, or twice", site);
    for (const auto& [other, owned] : communicators())
        if (owned->parent == comm) simt::report("ncclCommFinalize of a communicator before its groups", site);
    if (c.delayed || c.done != c.issued) simt::report("ncclCommFinalize before all collectives are done", site);
    c.state = ncclComm::finalizing;
    c.polls = 0;
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm, Site site) {
    ncclComm& c = known(comm, "ncclCommDestroy", site);
    if (c.error == ncclSuccess && (c.state != ncclComm::finalized || c.polls < MIN_POLLS))
        simt::report("ncclCommDestroy of a communicator that is not finalized", site);
    communicators().erase(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm, Site site) {
    known(comm, "ncclCommAbort", site).state = ncclComm::aborted;
    for (const auto& [other, owned] : communicators())
        if (groups_begun == 0 && owned->state != ncclComm::aborted && owned->done != owned->issued)
            simt::report("ncclCommAbort outside an NCCL group: a collective of another communicator is pending", site);
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
