// local_ranks.h: starts ranks of this machine as child processes, and supervises them until all have ended.
//
// A rank is a fork of this process without exec, so call this before any thread, OpenMP region, device call or MPI. If
// a rank fails, the others have LastSeconds::rank to end by themselves. Then they are killed. A rank that is stopped by
// a signal has LastSeconds::stopped, or no time if a watchdog has ended the rank that failed. A stopped rank is also
// killed if all others have ended without a failure (on Linux), because its own watchdog is stopped with it. If this
// process is killed, the ranks are killed, too (on Linux).
//
// Signals: SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask all ranks to stop. For each of these signals the ranks receive
// SIGUSR1. A Ctrl-C has already sent them SIGINT, because they are in the same process group, and a second SIGINT would
// end them at once (train/stop.h). A second SIGINT, SIGTERM or SIGHUP ends them.
#pragma once
#include <csignal>
#include <functional>
#include <string>
#include <string_view>

constexpr int MAX_LOCAL_RANKS = 256;
// A rank prints a line that begins so when it has a request to stop (train/stop.cpp). The request is then not repeated.
inline constexpr std::string_view STOPPING = "stopping: ";
// The sentence of a watchdog (parallel/watchdog.h) begins so, after the name of the rank. One rank says it for all, and
// it has a deadline, so it is not kept until the other ranks have printed their errors.
inline constexpr std::string_view NO_PROGRESS = "no progress for ";

// How many seconds a process has to end by itself before it is killed.
struct LastSeconds {
    double rank = 8;      // after another rank has failed; by NCCL a rank notices this within 6 s (cuda/comm_nccl.cpp)
    double stopped = 1;   // the same for a rank that is stopped by a signal
    double program = 20;  // after the last rank of the program has ended; enough for a busy machine
};

struct LocalRanks {
    int count = 1;
    int first_rank = 0;             // the others of this machine follow it
    std::function<int(int)> run;    // called in the process of the i-th rank of this machine; returns its exit code
    std::function<void()> started;  // called in this process when all ranks have been started
    int end_signal = SIGKILL;       // sent before SIGKILL to a rank that must end
    bool own_group = false;         // in its own process group, so that the terminal's signals do not end the rank
    std::string program = "";       // not empty: the only process is this program, which starts the ranks
    int ranks_of_program = 1;       // that it starts, as its child processes
    // Returns the advice that ends the error about a rank that a signal has ended; "" if there is none.
    std::function<std::string()> advice = {};
    LastSeconds last = {};          // tests give shorter times
    bool stdout_is_result = false;  // if the ranks' stdout cannot be written, they are ended: EXIT_IO
};

struct Outcome {
    int exit_code = 0;    // of the rank that failed first, or 128 + its signal; else EXIT_PREEMPTED if a rank stopped
    int request = 0;      // the first signal that asked the ranks to stop; 0: none
    std::string failure;  // "rank 1 ended with exit code 1"; empty if no rank failed
};

// Handles this process's signals while it exists. A signal that the caller ignores remains ignored.
struct Supervisor {
    Supervisor();
    ~Supervisor();
    Supervisor(const Supervisor&) = delete;

    // Starts the ranks and returns when all have ended. The first rank keeps stdout and stderr, but a program's pass
    // through this process: mpirun crashes if stdout is a pipe that is closed. The lines of the others are printed
    // whole and with their rank. An error that several ranks print is printed once, with their numbers.
    Outcome run(const LocalRanks& ranks);
    // Waits; returns false at once if a signal asks to stop, or has asked.
    bool pause(double seconds);
    int request() const;  // the first signal that asked to stop; 0: none
};

// Call it in a rank's process before the rank prints its error: the first rank's stderr then passes through the
// supervisor, too, which compares the errors of all ranks. Does nothing in other processes.
void send_errors_to_supervisor();

// Calls a function in a child process, and returns its result or throws its Error. Use it for calls of a device,
// because a process that has used a device must not fork ranks.
int call_in_child(const std::function<int()>& function);
