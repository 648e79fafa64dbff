// watchdog.h: ends this rank if it makes no progress for --timeout seconds.
//
// A rank that dies is noticed by its launcher, by NCCL or by MPI. A rank that hangs is not: all others wait for it in a
// collective. Then each rank that is alive prints where it is, and ends with EXIT_WATCHDOG. The rank to look at prints
// no line, or another place than the others.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>

struct Watchdog {
    static constexpr double LOOK = 0.5;        // seconds between two looks at the progress
    static constexpr double LAST_WORDS = 3.0;  // seconds from this rank's line to its end, in which others print theirs

    Watchdog(double timeout, int rank, int world_size);  // timeout 0: never
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;

    // Progress of the training thread. what: a string of static duration, "micro-step".
    void reached(const char* new_what, int64_t new_number = -1) {
        what = new_what;
        number = new_number;
        progress++;
    }
    // Any thread: a collective begins, or has ended.
    void collective_begins() { begun++, progress++; }
    void collective_ended() { ended++, progress++; }
    // Calls `call` at each look, in the watchdog's thread; null: nothing. On return no earlier call is running.
    void at_each_look(std::function<void()> call);
    std::atomic<int64_t> step = -1;  // number of the current step; -1: before the first
    std::string where() const;       // "step 41, micro-step 3, in collective 812"

  private:
    void watch();
    [[noreturn]] void expire(double waited) const;

    const double timeout;
    const int rank, world_size;
    std::atomic<const char*> what = "the start";
    std::atomic<int64_t> number = -1, progress = 0, begun = 0, ended = 0;
    std::mutex mutex;
    std::function<void()> look = nullptr;  // at_each_look
    std::promise<void> end;                // tells the thread to end
    std::thread thread;
};
