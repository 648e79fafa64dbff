// rendezvous.h: gives rank 0's NCCL id to all ranks by TCP, for ranks that MPI does not join.
//
// Rank 0 listens on master_port. Under torchrun, whose agent may own that port, it listens on the first free one of the
// 16 ports above it. Every other rank connects and sends a hello of fixed size. Rank 0 answers at once that it is rank
// 0, and with the id when all ranks have connected. It closes a connection that sends anything else, or nothing for 2
// seconds, and one of another run or attempt.
#pragma once
#include <functional>
#include <string>

#include "parallel/launch.h"

constexpr int NCCL_ID_BYTES = 128;

// Called by every rank. new_id: makes the id; called on rank 0 only. The id is a secret that is never logged: a process
// that has it can join the run. Fails if ranks contradict each other (EXIT_USAGE), and if a rank is missing at the
// timeout or the network fails (EXIT_INTERNAL).
std::string share_nccl_id(const Launch& launch, const std::function<std::string()>& new_id, double timeout_seconds);
