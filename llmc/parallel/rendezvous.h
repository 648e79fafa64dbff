// rendezvous.h: gives rank 0's NCCL id to all ranks by TCP, for ranks that MPI does not join.
//
// Rank 0 listens on master_port. Under torchrun, whose agent may own that port, it listens on the first free one of the
// 16 ports above it. It greets each connection with a random number. A rank says hello with its own, and proves the
// secret (Launch::secret) for both numbers and the name of the run. Then rank 0 proves it, too, and sends the id,
// encrypted, when all ranks have come. It closes any other connection without a word, and nothing that a stranger sends
// ends the start. Without a secret the proofs only tell runs and attempts apart.
#pragma once
#include <functional>
#include <string>

#include "parallel/launch.h"

constexpr int NCCL_ID_BYTES = 128;

// Every rank calls it. new_id makes the id, on rank 0 only. It is a secret that is never logged: who has it can join.
// Refuses a rank that contradicts rank 0 (EXIT_USAGE); fails if a rank is late or the network fails (EXIT_INTERNAL).
std::string share_nccl_id(const Launch& launch, const std::function<std::string()>& new_id, double timeout_seconds);
std::string make_secret();  // a random one; empty if this build has no libcrypto
