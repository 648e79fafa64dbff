// stop.h: signals that ask a run to stop.
#pragma once

// Asks the run to stop at one of STOP_SIGNALS from now on, apart from those that the caller ignores, as nohup does with
// SIGHUP, and a shell script with SIGINT in commands that it starts with &. After the first signal, training leaves its
// step between two micro-steps, saves, and ends with EXIT_PREEMPTED. A second signal ends the process at once.
// announce: print a line on stderr at the first signal; set it on rank 0 only.
void stop_on_signals(bool announce);
bool stop_requested();
