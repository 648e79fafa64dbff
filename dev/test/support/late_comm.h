// late_comm.h: collectives between processes of a test that run as late as comm.h permits: when a rank waits for them.
//
// A real collective may run at any time between its call and the wait. LateComm chooses the worst: it reads its input
// at the wait, so that an input which was overwritten too early gives wrong sums, and a gather fills the memory that it
// will overwrite with NaN at the call, so that weights which are read too early give NaN. A reduce-scatter leaves NaN
// in the other shards, whose values are undefined.
#pragma once
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "base/common.h"
#include "parallel/comm.h"
#include "support/temporary.h"

// Memory that the ranks share. A rank waits in the kernel: ranks that poll take minutes on a busy machine.
struct LateMeeting {
    static constexpr int64_t CAPACITY = 1 << 22;  // bytes of a rank's buffer in a collective
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int arrived = 0, round = 0;
    char buffers[4][CAPACITY];

    LateMeeting() {
        pthread_mutexattr_t for_mutex;
        pthread_mutexattr_init(&for_mutex);
        pthread_mutexattr_setpshared(&for_mutex, PTHREAD_PROCESS_SHARED);
        pthread_mutex_init(&mutex, &for_mutex);
        pthread_condattr_t for_changed;
        pthread_condattr_init(&for_changed);
        pthread_condattr_setpshared(&for_changed, PTHREAD_PROCESS_SHARED);
        pthread_cond_init(&changed, &for_changed);
    }
};

struct LateComm : Comm {
    struct Job {
        void* x;
        int64_t bytes;
        std::function<void(char* x, int64_t bytes)> run;
    };
    LateMeeting& meeting;
    std::deque<Job> jobs;
    Ticket queued = 0, done = 0;

    LateComm(LateMeeting& meeting, int own_rank, int ranks) : meeting(meeting) {
        rank = own_rank;
        world_size = ranks;
        shard_index = (rank + 1) % ranks;  // not the rank, so that a test finds where one is taken for the other
    }

    void meet() {
        pthread_mutex_lock(&meeting.mutex);
        const int round = meeting.round;
        if (++meeting.arrived == world_size) {
            meeting.arrived = 0;
            meeting.round++;
            pthread_cond_broadcast(&meeting.changed);
        }
        while (meeting.round == round) pthread_cond_wait(&meeting.changed, &meeting.mutex);
        pthread_mutex_unlock(&meeting.mutex);
    }

    // Calls f with the buffers of all ranks, by rank. Each rank's buffer is what its x holds now.
    template <class F>
    void exchange(const char* x, int64_t bytes, const F& f) {
        INVARIANT(bytes <= LateMeeting::CAPACITY, "a test's collective of %lld bytes", static_cast<long long>(bytes));
        std::memcpy(meeting.buffers[rank], x, size_t(bytes));
        meet();
        f();
        meet();
    }

    static void poison(char* x, int64_t bytes) { std::memset(x, 0xff, size_t(bytes)); }
    void poison_other_shards(char* x, int64_t bytes) const {
        const int64_t own = bytes / world_size;
        poison(x, shard_index * own);
        poison(x + (shard_index + 1) * own, bytes - (shard_index + 1) * own);
    }
    const float* floats(int r) const { return reinterpret_cast<const float*>(meeting.buffers[r]); }
    // The sum over ranks first .. first + count as a balanced tree (gradients.h).
    float sum(int64_t i, int first, int count) const {
        if (count == 1) return floats(first)[i];
        return sum(i, first, count / 2) + sum(i, first + count / 2, count / 2);
    }

    Ticket queue(void* x, int64_t bytes, int64_t sent, std::function<void(char*, int64_t)> run) {
        calls++;
        bytes_sent += sent;
        jobs.push_back({x, bytes, std::move(run)});
        return ++queued;
    }
    int64_t share(int64_t bytes) const { return bytes / world_size * (world_size - 1); }

    Ticket all_reduce(float* x, int64_t count, GradDtype, Stream) override {
        return queue(x, count * 4, 2 * share(count * 4), [this](char* to, int64_t bytes) {
            exchange(to, bytes, [&] {
                for (int64_t i = 0; i < bytes / 4; i++) reinterpret_cast<float*>(to)[i] = sum(i, 0, world_size);
            });
        });
    }
    Ticket reduce_scatter(float* x, int64_t count, GradDtype, Stream) override {
        return queue(x, count * 4, share(count * 4), [this](char* to, int64_t bytes) {
            exchange(to, bytes, [&] {
                const int64_t own = bytes / 4 / world_size;
                for (int64_t i = shard_index * own; i < (shard_index + 1) * own; i++)
                    reinterpret_cast<float*>(to)[i] = sum(i, 0, world_size);
            });
            poison_other_shards(to, bytes);
        });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream) override {
        poison_other_shards(static_cast<char*>(x), bytes);
        return queue(x, bytes, share(bytes), [this](char* to, int64_t bytes) {
            exchange(to, bytes, [&] {
                const int64_t own = bytes / world_size;
                for (int r = 0; r < world_size; r++) {
                    const int64_t at = (r + 1) % world_size * own;
                    std::memcpy(to + at, meeting.buffers[r] + at, size_t(own));
                }
            });
        });
    }
    Ticket broadcast(void* x, int64_t bytes, int from, Stream) override {
        if (shard_index != from) poison(static_cast<char*>(x), bytes);
        return queue(x, bytes, 0, [this, from](char* to, int64_t bytes) {
            const int root = (from + world_size - 1) % world_size;
            exchange(to, bytes, [&] { std::memcpy(to, meeting.buffers[root], size_t(bytes)); });
        });
    }
    void wait(Ticket ticket, Stream) override {
        for (; done < ticket; done++) {
            const Job job = std::move(jobs.front());
            jobs.pop_front();
            job.run(static_cast<char*>(job.x), job.bytes);
        }
    }
};

// Runs f as `ranks` processes, at most 4, and returns the result of each; an empty one if the process failed. The
// process that calls it must not have used OpenMP, whose threads a fork does not copy.
inline std::vector<std::string> run_late_ranks(int ranks, const std::function<std::string(Comm&)>& f) {
    const TemporaryDirectory dir;
    void* const memory = mmap(nullptr, sizeof(LateMeeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    LateMeeting& meeting = *new (memory) LateMeeting;
    std::vector<pid_t> processes;
    fflush(nullptr);
    for (int rank = 0; rank < ranks; rank++) {
        processes.push_back(fork());
        if (processes.back() != 0) continue;
        alarm(120);  // ends a rank that waits for one that has ended
        int code = 0;
        try {
            LateComm late(meeting, rank, ranks);
            Comm alone;
            write_bytes(dir / std::to_string(rank), f(ranks == 1 ? alone : late));
        } catch (const std::exception& error) {
            fprintf(stderr, "rank %d: %s\n", rank, error.what());
            code = EXIT_INTERNAL;
        }
        fflush(nullptr);
        _exit(code);
    }
    std::vector<std::string> results;
    for (int rank = 0; rank < ranks; rank++) {
        int status = 0;
        waitpid(processes[size_t(rank)], &status, 0);
        results.push_back(status == 0 ? read_bytes(dir / std::to_string(rank)) : "");
    }
    munmap(memory, sizeof(LateMeeting));
    return results;
}
