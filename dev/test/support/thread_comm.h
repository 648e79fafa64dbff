// thread_comm.h: ranks that are threads of a test. They can exchange texts, and nothing else.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel/comm.h"

struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::string> texts, last;
    int arrived = 0;
    int64_t rounds = 0;
};

struct ThreadComm : Comm {
    Meeting& meeting;

    ThreadComm(Meeting& meeting, int own_rank, int size) : meeting(meeting) {
        rank = own_rank;
        world_size = size;
    }
    std::vector<std::string> all_gather_text(const std::string& text) override {
        std::unique_lock lock(meeting.mutex);
        meeting.texts.resize(size_t(world_size));
        meeting.texts[size_t(rank)] = text;
        const int64_t round = meeting.rounds;
        if (++meeting.arrived == world_size) {
            meeting.arrived = 0;
            meeting.last = meeting.texts;
            meeting.rounds++;
            meeting.changed.notify_all();
        }
        meeting.changed.wait(lock, [&] { return meeting.rounds > round; });
        return meeting.last;
    }
};

// Calls f(comm) in a thread for each rank.
inline void run_ranks(int world_size, const std::function<void(Comm& comm)>& f) {
    Meeting meeting;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; rank++)
        threads.emplace_back([&, rank] {
            ThreadComm comm(meeting, rank, world_size);
            f(comm);
        });
    for (std::thread& thread : threads) thread.join();
}
