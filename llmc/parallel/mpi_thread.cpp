#include "parallel/mpi_thread.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <filesystem>

#include "base/common.h"
#include "base/host.h"
#include "base/print.h"

namespace {

constexpr std::chrono::milliseconds LAUNCHER_CHECKS(300);
constexpr double PROMPT_SECONDS = 2e-3;  // after this time without a message the thread sleeps between tests

// TCP gives up on a host after 15 minutes without an answer. limit_silence makes the connections of this process give
// up after 10 s: Open MPI then aborts the run and names the host. With Open MPI 4 mpirun should notice before, by the
// options of docs/distributed.md: once it has sent a message to the lost host, it waits 15 minutes. With Open MPI 5 it
// must notice later, as it does by default: it would end with exit code 0.
constexpr int SILENT_SECONDS = 10;

void limit_silence() {
#if defined(__linux__)
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
        const int fd = atoi(entry.path().filename().c_str()), on = 1, probe_seconds = SILENT_SECONDS / 3;
        const unsigned silent_ms = SILENT_SECONDS * 1000;
        sockaddr_storage peer;
        socklen_t size = sizeof peer;
        if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
        if (peer.ss_family != AF_INET && peer.ss_family != AF_INET6) continue;
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof silent_ms);
        // Keep-alive probes, for connections on which only the other side sends.
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_seconds, sizeof probe_seconds);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_seconds, sizeof probe_seconds);
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    }
#endif
}

}  // namespace

[[noreturn]] void fail_of_mpi(const char* call, const char* file, int line, int error) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(error, text, &length);
    fail(EXIT_INTERNAL, "%s at %s:%d: %s", call, file, line, text);
}

void name_this_thread([[maybe_unused]] const char* name) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#endif
}

void finish(MPI_Request* requests, int count, bool prompt) {
    int done = 0;
    const double start = prompt ? seconds_now() : 0.0;
    for (int tries = 0;;) {
        MPI_CHECK(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE));
        if (done) return;
        if (prompt && seconds_now() - start < PROMPT_SECONDS)
            sched_yield();
        else if (++tries > 20)
            std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 100)));
    }
}

// Ends this process within LAUNCHER_CHECKS after its parent has ended: mpirun, its daemon on another host, or a script
// between them and this process. Open MPI itself ends a rank a second or more later, and until then a new run finds
// the output in use. PR_SET_PDEATHSIG would also act when only the thread ends that started this process, and daemons
// may start many ranks by several threads.
struct LauncherWatch {
    const pid_t launcher = getppid();
    std::mutex mutex;
    std::condition_variable changed;
    bool ending = false;
    std::thread thread;

    LauncherWatch() {
        thread = std::thread([this] { work(); });
    }
    LauncherWatch(const LauncherWatch&) = delete;
    ~LauncherWatch() {
        {
            const std::lock_guard lock(mutex);
            ending = true;
        }
        changed.notify_all();
        thread.join();
    }

    void work() {
        std::unique_lock lock(mutex);
        while (!changed.wait_for(lock, LAUNCHER_CHECKS, [this] { return ending; })) {
            if (getppid() == launcher) continue;
            print_message(format("error: the process %d, which started this rank on %s, has ended", int(launcher),
                                 host_name().c_str()));
            _exit(EXIT_INTERNAL);
        }
    }
};

MpiThread::MpiThread() : watch(std::make_unique<LauncherWatch>()) {
    thread = std::thread([this] { work(); });
}

MpiThread::~MpiThread() {
    post(nullptr);
    thread.join();
}

void MpiThread::work() {
    for (;;) {
        std::function<void()> job;
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return !jobs.empty(); });
            job = std::move(jobs.front());
            jobs.pop_front();
        }
        if (!job) return;
        try {
            if (!error) job();
        } catch (...) {
            error = std::current_exception();
        }
        {
            const std::lock_guard lock(mutex);
            done++;
        }
        changed.notify_all();
        // Called after jobs 1, 2, 4, 8, ..., because ranks connect when they first send to each other, in the
        // first steps.
        if (std::has_single_bit(uint64_t(done))) limit_silence();
    }
}

MpiThread::Ticket MpiThread::post(std::function<void()> job) {
    const std::lock_guard lock(mutex);
    jobs.push_back(std::move(job));
    changed.notify_all();
    return ++posted;
}

// Waits in slices of time. If a slice takes far longer, this process was stopped or had no core; that time does not
// count as a wait for other ranks.
void MpiThread::wait_for(Ticket ticket) {
    constexpr double slice = 0.05;
    for (bool finished = false; !finished;) {
        const double begin = seconds_now();
        finished = wait_for(ticket, slice);
        const double late = seconds_now() - begin - slice;
        if (late > slice) stopped_seconds += late;
    }
    if (error) std::rethrow_exception(error);
}

bool MpiThread::wait_for(Ticket ticket, double seconds) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done >= ticket; });
}
