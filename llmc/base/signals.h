// signals.h: the signals that ask a process to stop.
#pragma once
#include <csignal>

// Sent by a terminal (SIGINT, SIGHUP when it is closed), by launchers (SIGTERM) and by schedulers as a notice.
constexpr int STOP_SIGNALS[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU};

// Returns whether the caller ignores the signal, as nohup does with SIGHUP. The process then leaves it ignored.
bool is_ignored(int number);

// Returns whether a signal now is another request to stop than the one at the time `first`: a terminal and a launcher
// may both pass on one Ctrl-C, and SIGXCPU comes again each second. Slurm sends SIGTERM when a job's time is up, even
// if it has sent another signal before, and kills the job only KillWait seconds (30) later.
bool is_second_request(int number, double first);

// Ends the process by this signal. A signal handler may call it, or be it.
void end_by_signal(int number);

// Call this early in main. Lets STOP_SIGNALS through that the caller has blocked. Process 1, as in a container, ignores
// signals that have no handler, so they get one.
void prepare_signals();

// Asks the run to stop at one of STOP_SIGNALS from now on, apart from those that the caller ignores, as nohup does with
// SIGHUP, and a shell script with SIGINT in commands that it starts with &. After the first signal, training leaves its
// step between two micro-steps, saves, and ends with EXIT_PREEMPTED. A second signal ends the process at once.
// announce: print a line on stderr at the first signal; set it on rank 0 only.
void stop_on_signals(bool announce);
bool stop_requested();
