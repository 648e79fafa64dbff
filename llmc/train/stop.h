// stop.h: what asks a run to stop: the signals SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGXCPU, and --max-time.
//
// After the first signal, training leaves its step between two micro-steps, saves, and ends with EXIT_PREEMPTED. A
// second signal ends the process at once. SIGUSR1 is a scheduler's notice that SIGTERM will follow, and Linux repeats
// SIGXCPU each second (ulimit -t), so these two do not count as a second. A signal that the caller ignores remains
// ignored: nohup ignores SIGHUP, and a shell script ignores SIGINT in commands that it starts with &.
#pragma once

// Until stop_on_signals is called, a signal ends the process, which has nothing to save yet. announce: print a line
// about this on stderr; set it on one rank only.
void end_on_signals(bool announce);
// Handles the signals from now on. announce: print a line on stderr when the run stops, with the signal and its sender;
// set it on rank 0 only.
void stop_on_signals(bool announce);
// Prints nothing about later signals: mpirun sends SIGTERM if another rank fails, when this rank has already saved.
void stop_quietly();
// From this time on (seconds_now()), the run is asked to stop, as by a first signal that does not count as one of two.
// A later call replaces the time. Call it on one rank only: the ranks' votes tell the others.
void stop_at(double time);
bool stop_requested();
// What asked this process to stop: "SIGTERM", "--max-time"; "" before a request.
const char* stop_reason();

// seconds_now() when the command started: this process, or the one that started it as a rank with this environment
// variable. A rank that is a fork has the value of its parent.
double command_start();
inline constexpr const char* COMMAND_START = "TRAIN_GPT2_STARTED";
