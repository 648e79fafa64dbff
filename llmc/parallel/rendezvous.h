// rendezvous.h: the ranks of a run meet once, by TCP: each says who it is, and takes home what all said and a nccl_id
// of rank 0 (NCCL's id). Nothing of the training goes this way.
//
// Rank 0 listens: on master_port, or under torchrun, whose agent may own that one, on the first free port of the
// WINDOW above it. The others try until they are let in; nobody gets an answer before all are there. Whoever speaks
// another language, too long or not at all for 5 s is sent away, and rank 0 goes on listening.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/launch.h"

struct Rendezvous {
    std::vector<std::string> rank_infos;  // of every rank, in their order
    std::string nccl_id;                  // whoever has NCCL's id and reaches its port can join: not for a log
};

constexpr int MAX_RANK_INFO = 4096;  // bytes
constexpr int MAX_NCCL_ID = 4096;

// Called by every rank; returns the same to all of them when all have come. rank_info: what this rank says of itself.
// nccl_id: called in rank 0 only, once all are there. Ranks that cannot belong together (EXIT_USAGE), a rank that has
// not come in time and what the network does (EXIT_INTERNAL) end it with the same sentence on both sides, if they can
// still talk. Under torchrun a process of another run or attempt in the window is nobody's mistake, and is passed by.
Rendezvous rendezvous(const Launch& launch, const std::string& rank_info, const std::function<std::string()>& nccl_id,
                      double timeout_seconds);

// Where the ranks of this launch would meet: "h0:29500", or "h0:29501-29516".
std::string rendezvous_address(const Launch& launch);

// ---- the messages
//
// All numbers little-endian. A frame is a magic of 8 bytes, uint32 version, uint32 length of the body, and the body.
constexpr int WINDOW = 16;  // ports
constexpr uint32_t RENDEZVOUS_VERSION = 1;
constexpr int MAX_TEXT = 1024;

// From a rank to rank 0, "GPT2RDZV". Body: world_size, rank, attempt, port (uint32), process (uint64), the lengths of
// run_id and rank_info (uint32), then both.
struct Hello {
    uint32_t world_size = 0, rank = 0, attempt = 0;
    uint32_t port = 0;     // master_port, which separates torchrun's runs whose ids are all "none"
    uint64_t process = 0;  // random: a rank that connects again replaces its lost connection, another one is refused
    std::string run_id, rank_info;
};

enum class Status : uint32_t {
    waiting,  // "you are in": at once, so that a stranger on the port is recognized
    welcome,  // all are there: rank_infos and nccl_id
    refused,  // text says why these ranks cannot belong together
    failed,   // text says what went wrong at rank 0
    other,    // this is the meeting of another run
};

// From rank 0 to a rank, "GPT2MEET". Body: status, the lengths of text and nccl_id, the number of rank_infos (uint32),
// text, nccl_id, and each rank_info after its length (uint32).
struct Answer {
    Status status = Status::waiting;
    std::string text;  // one line
    std::string nccl_id;
    std::vector<std::string> rank_infos;
};

enum class Parsed { more, whole, garbage, other_version };  // more: a beginning, as far as it goes

std::string encode(const Hello& hello);
std::string encode(const Answer& answer);
// A hello that is followed by more is garbage: nobody may send that.
Parsed parse_hello(std::string_view bytes, Hello& hello);
// The first answer in these bytes, and how many of them it has; as rank 0 of world_size ranks may give it.
Parsed parse_answer(std::string_view bytes, int world_size, Answer& answer, size_t& used);
