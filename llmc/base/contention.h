// contention.h: uses fewer OpenMP threads while other programs occupy the cores.
//
// Each parallel region waits for its slowest thread. A thread that shares its core with another program is descheduled
// for a few ms at a time, so regions that take less than a time slice run at the speed of that thread. While a program
// occupied one of two cores, `generate` took 3 times as long as alone; on one thread it takes less time.
#pragma once
#include <vector>

class ContentionGuard {
  public:
    // Observes the threads of a parallel region. Where the system does not say how long a thread waits for a core
    // (/proc/thread-self/schedstat of Linux), nothing is ever changed.
    ContentionGuard();
    ~ContentionGuard();  // uses all threads again
    ContentionGuard(const ContentionGuard&) = delete;
    ContentionGuard& operator=(const ContentionGuard&) = delete;

    // Call it after each unit of work: a token, a step, a batch. It looks, every 20 ms at most, how long the threads
    // waited for a core. The next 0.3 s, and at least 6 units, then have one thread less for each core that was lost
    // (omp_set_num_threads). If that was slower, which it can be where regions take longer than a time slice, all
    // threads are used for 3 s.
    void adapt();
    void restart();  // uses all threads again, and counts from now on

  private:
    double take_delay();
    struct Thread {
        int schedstat;  // file descriptor, or -1
        double delay;   // seconds that the thread has waited for a core
    };
    std::vector<Thread> threads;
    double window_begin;       // the time since which calls are counted
    int calls = 0;             // calls of adapt
    bool uses_all = true;      // whether all threads are in use
    double rate_of_all = 0.0;  // calls per second when all threads were in use last
    double try_fewer_at = 0.0;
};
