// mpi_thread.h: the thread that makes all MPI calls of a rank, in the order of the calls, so that the training thread
// can continue. The thread sleeps while it waits: Open MPI would spin on the core that training needs. While training
// itself waits for activations, the thread tests for messages without pause.
#pragma once

#define OMPI_SKIP_MPICXX 1  // no C++ bindings: MPI has removed them
#include <mpi.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel/comm.h"

#define MPI_CHECK(call)                                                                                    \
    do {                                                                                                   \
        if (const int error = (call); error != MPI_SUCCESS) fail_of_mpi(#call, __FILE__, __LINE__, error); \
    } while (0)

[[noreturn]] void fail_of_mpi(const char* call, const char* file, int line, int error);

// Waits until the requests are done. The thread sleeps between tests, to leave the core to training. With `prompt` it
// first tests for a few milliseconds and only yields to threads that can run.
void finish(MPI_Request* requests, int count, bool prompt = false);

// Sets the thread name that /proc shows.
void name_this_thread(const char* name);

struct LauncherWatch;

// The thread and its queue of jobs.
struct MpiThread {
    using Ticket = Comm::Ticket;

    std::mutex mutex;  // guards jobs, posted and done
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    Ticket posted = 0, done = 0;
    std::exception_ptr error;      // of the first job that failed; the jobs after it are not run
    double stopped_seconds = 0.0;  // time in which this process was not running while the training thread waited
    std::thread thread;
    std::unique_ptr<LauncherWatch> watch;

    // Memory for messages; used by jobs, which run one after the other.
    std::vector<char> outgoing, incoming[2];
    std::vector<float> sums;

    MpiThread();
    MpiThread(const MpiThread&) = delete;
    ~MpiThread();

    Ticket post(std::function<void()> job);

    // Returns when the job is done. Throws the error of the first job that failed.
    void wait_for(Ticket ticket);
    // Returns whether the job was done within the time.
    bool wait_for(Ticket ticket, double seconds);

    template <class Job>
    void run(const Job& job) {
        wait_for(post(job));
    }

  private:
    void work();
};
