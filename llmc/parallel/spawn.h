// spawn.h: --ranks N|all starts the ranks of a run on this machine.
//
// CPU ranks are started by mpirun, a child process. GPU ranks are child processes with the variables that torchrun
// sets. If one fails, the others get SIGTERM and in ten seconds SIGKILL. This process passes signals on to all; mpirun
// gets SIGUSR1, which it passes on, then the signal. On Linux ranks get SIGTERM if this process is killed.
#pragma once

// ranks: -1 is one for each visible GPU. Returns when all ranks have ended: the exit code of the rank that failed
// first, else EXIT_PREEMPTED if one has stopped. Call it before any thread exists.
int spawn_ranks(int ranks, char** argv);
// Does the same for ranks that are child processes, on any device.
int spawn_processes(int count, char** argv);
