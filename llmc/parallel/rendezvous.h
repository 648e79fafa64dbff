// rendezvous.h: one-shot TCP rendezvous before NCCL starts: every rank sends its rank_info to rank 0, and receives the
// rank_infos of all ranks and rank 0's NCCL id. No training data uses these connections.
//
// Rank 0 listens on master_port. Under torchrun, whose agent may own that port, it listens on the first free one of the
// WINDOW ports above it. The other ranks retry until rank 0 accepts them; no rank gets the result before all ranks have
// connected. Rank 0 drops a connection that sends anything but a valid hello, or no complete hello within 5 s, and
// continues to listen.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/launch.h"

struct Rendezvous {
    std::vector<std::string> rank_infos;  // of all ranks, in rank order
    std::string nccl_id;  // secret, never logged: a process with this id that reaches NCCL's port can join
};

constexpr int MAX_RANK_INFO = 4096;  // bytes
constexpr int MAX_NCCL_ID = 4096;

// Called by every rank; returns the same result to all when all have connected. rank_info: this rank's description of
// itself. nccl_id: called on rank 0 only, once all ranks have connected. Fails if ranks contradict each other
// (EXIT_USAGE), and if a rank is missing at the timeout or the network fails (EXIT_INTERNAL); both sides report the
// same message if they are still connected. Under torchrun, a process of another run or attempt in the port window is
// skipped, not an error.
Rendezvous rendezvous(const Launch& launch, const std::string& rank_info, const std::function<std::string()>& nccl_id,
                      double timeout_seconds);

// Opens a socket for rank 0 on a free port of 127.0.0.1, for Launch::listener. Sets the port.
int open_local_listener(int& port);

// The address at which rank 0 of this launch listens: "h0:29500", or "h0:29501-29516".
std::string rendezvous_address(const Launch& launch);

// ---- the messages
//
// All numbers are little-endian. A frame is a magic of 8 bytes, uint32 version, uint32 body length, and the body.
constexpr int WINDOW = 16;  // ports that rank 0 tries under torchrun
constexpr uint32_t RENDEZVOUS_VERSION = 1;
constexpr int MAX_TEXT = 1024;

// Message from a rank to rank 0, magic "GPT2RDZV". Body: world_size, rank, attempt, port (uint32), process (uint64),
// the lengths of run_id and rank_info (uint32), run_id, rank_info.
struct Hello {
    uint32_t world_size = 0, rank = 0, attempt = 0;
    uint32_t port = 0;     // master_port: distinguishes torchrun's runs, whose ids are all "none"
    uint64_t process = 0;  // random: the same process may reconnect; another process with this rank is refused
    std::string run_id, rank_info;
};

enum class Status : uint32_t {
    waiting,  // hello accepted; sent at once, so that the rank knows that rank 0 owns the port
    welcome,  // all ranks have connected: rank_infos and nccl_id follow
    refused,  // the ranks contradict each other: text says how
    failed,   // rank 0 failed: text says why
    other,    // this rank 0 belongs to another run
};

// Message from rank 0 to a rank, magic "GPT2MEET". Body: status, the lengths of text and nccl_id, the number of
// rank_infos (uint32), text, nccl_id, and each rank_info after its length (uint32).
struct Answer {
    Status status = Status::waiting;
    std::string text;  // one line
    std::string nccl_id;
    std::vector<std::string> rank_infos;
};

enum class Parsed { more, whole, garbage, other_version };  // more: a valid prefix, incomplete

std::string encode(const Hello& hello);
std::string encode(const Answer& answer);
// A hello that is followed by more bytes is garbage: no rank sends more.
Parsed parse_hello(std::string_view bytes, Hello& hello);
// Parses the first answer in these bytes; used: its length in bytes. world_size limits the lengths that are accepted.
Parsed parse_answer(std::string_view bytes, int world_size, Answer& answer, size_t& used);
