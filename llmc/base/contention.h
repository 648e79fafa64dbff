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

    // Looks, every 20 ms at most, how long the threads waited for a core. The following regions have one thread less
    // for each core that was lost (omp_set_num_threads), until all threads are tried again 0.3 s later.
    void adapt();

  private:
    struct Thread {
        int schedstat;  // file descriptor, or -1
        double delay;   // seconds that the thread has waited for a core
    };
    std::vector<Thread> threads;
    double last_look;
    double retry_at = 0.0;  // 0: all threads are in use
};
