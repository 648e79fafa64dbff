// stop.h: signals that ask a run to stop: SIGTERM, SIGINT and SIGUSR1, which schedulers send as a notice.
//
// After the first signal, training leaves its step between two micro-steps, saves, and ends with EXIT_PREEMPTED. A
// second signal ends the process at once. Before stop_on_signals is called, and for other signals, the first one does.
#pragma once

// Handles the signals from now on, apart from those that the caller ignores, as a shell script does with SIGINT in
// commands that it starts with &. announce: print a line on stderr at the first signal; set it on rank 0 only.
void stop_on_signals(bool announce);
bool stop_requested();
