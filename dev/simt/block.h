// block.h: the state of a running block, shared by emulator.cpp (fibers and scheduler), warp.cpp (warp operations and
// barriers), shared_memory.cpp (shared memory and cp.async) and the files of engines.h (asynchronous instructions).
#pragma once
#include "internal.h"

#include <bit>
#include <vector>

namespace simt {

constexpr int MAX_STATICS = 64, MAX_COPIES = 256, MAX_GROUPS = 16;

enum class State : uint8_t { fresh, ready, at_warp_operation, at_barrier, blocked, done };

struct Slot;  // a lane's operands of a warp operation (warp.cpp)
struct Block;
struct Engines;  // a block's asynchronous instructions (engines.h)

struct Thread {
    Block* block = nullptr;
    uint3 index{};
    int warp = 0, lane = 0;
    State state = State::fresh;
    Site site{};        // the last operation in which the thread could have waited
    unsigned mask = 0;  // lanes of the warp operation in which the thread waits
    Slot* slot = nullptr;
    const void* key = nullptr;  // the thread is blocked until wake(key) (block_until)
    const char* waits = "";     // for what
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    void* fake_stack = nullptr;  // AddressSanitizer's fake stack of this fiber, while the fiber is not running
    // Even and odd blocks use different ThreadSanitizer fibers and stacks, so that ThreadSanitizer does not see
    // consecutive blocks as ordered.
    void* tsan_fiber[2] = {};
    char* tsan_stack[2] = {};

    Copy copies[MAX_COPIES];  // pending cp.async copies, oldest first
    int num_copies = 0, num_groups = 0, group_end[MAX_GROUPS];
};

struct Warp {
    unsigned live = 0, ready = 0, waiting = 0, blocked = 0;  // sets of lanes, one bit per lane
    char edge = 0;                                           // the happens-before edge of __syncwarp
    Thread* lanes = nullptr;
};

struct SharedVariable {
    const void* key;
    const char* name;
    char* address;
    size_t bytes;
};

// The blocks of a cluster run together. The first one leads: the scheduler uses its members up to the host context.
struct Block {
    Block* leader = this;
    std::vector<Block*> cluster = {this};  // the leader's; grows to the largest cluster
    std::vector<Warp*> all_warps;          // all warps of the cluster
    int blocks = 1, rank = 0;              // size of the cluster, and the place in it
    uint3 index{};
    Engines* engines = nullptr;  // null until a kernel has needed them
    bool uses_engines = false;   // this block

    std::vector<Thread> threads;  // num_threads are in use; the vector never shrinks, to keep fibers and stacks
    int num_threads = 0;
    std::vector<Warp> warps;
    std::vector<char*> free_stacks;
    Thread* current = nullptr;
    int current_warp = 0;
    int live = 0;  // threads that have not ended
    uint64_t random_state = 1, async_random = 1, picks = 0;
    int preferred = -1;  // the first warp of the warpgroup that random order prefers
    int parity = 0;      // 0 in even blocks, 1 in odd blocks
    Call* call = nullptr;
    Site launch{};

    // The host context, which runs the grid.
    void* host_stack_pointer = nullptr;
    void* host_fake_stack = nullptr;
    const void* host_bottom = nullptr;
    size_t host_size = 0;
    void* host_tsan_fiber = nullptr;

    // State of __syncthreads. Consecutive barriers use different edges. With a single edge, a thread that arrives at
    // the next barrier would be ordered before a thread that leaves this one late.
    int arrived = 0;
    unsigned phase = 0;
    Site barrier{};
    char start_edge = 0, end_edge = 0, barrier_edge[2] = {};

    char* shared = nullptr;  // static variables, then dynamic memory
    char* dynamic = nullptr;
    size_t dynamic_align = 16;
    size_t dynamic_bytes = 0, max_dynamic = 0, static_end = 0, static_bytes = 0;
    SharedVariable statics[MAX_STATICS];
    int num_statics = 0;

    Thread& at(int warp, int lane) { return threads[size_t(warp * 32 + lane)]; }
};

extern Block* running;  // null while no kernel runs

// Runs other threads until this one is ready again.
void yield(Block& b);
unsigned next_random(uint64_t& state);

// Gives the calling lane the row of a matrix that it stores (warp.cpp).
void stmatrix(const uint32_t* registers, uint64_t (&row)[2], Site site);

// Blocks the thread until wake(b, key) of any block of the cluster.
void block_until_woken(const void* key, const char* what, Site site);
void wake(Block& b, const void* key);  // in all blocks of the cluster

// The engines of asynchronous copies and products (hopper.cpp). prepare_engines is called by the host.
void prepare_engines(Block& b);
void reset_engines(Block& b);
void check_engines_at_end(const Thread& t);
void check_engines(Block& b);  // once all threads have ended
void print_engines(const Block& b);
void run_engines_at_random(Block& leader);
bool run_engines_if_all_wait(Block& leader);  // false: nothing was pending

constexpr size_t STATIC_BYTES = 64 << 10;  // memory for static shared variables, with red zones between them
constexpr size_t SHARED_BYTES = STATIC_BYTES + (256 << 10);
// The shared memory of a block. check_red_zones reports writes out of bounds of its variables.
void allocate_shared_memory(Block& b, int64_t dynamic_bytes, int64_t max_dynamic);
void reset_shared_memory(Block& b);
void check_red_zones(const Block& b);

inline unsigned lane_bit(int lane) { return 1u << lane; }

template <class F>
void for_each_lane(unsigned mask, F f) {
    for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
}

}  // namespace simt
