// stop.h: signals that ask a run to stop: SIGINT, SIGTERM, SIGUSR1 and SIGHUP.
//
// After the first, training leaves its step between two micro-steps, saves, and ends with EXIT_PREEMPTED. A second
// signal ends the process at once. SIGUSR1 is a scheduler's notice that SIGTERM will follow, so it does not count as a
// second.
#pragma once

// Takes the signals from now on. announce: says on stderr that the run is stopping, as one rank of all should.
void stop_on_signals(bool announce);
// No more announcements: mpirun sends SIGTERM when another rank fails, and this rank has saved already.
void stop_quietly();
bool stop_requested();
