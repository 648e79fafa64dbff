// block.h: the state of a running block, shared by emulator.cpp (fibers and scheduler), warp.cpp (warp operations and
// barriers) and shared_memory.cpp (shared memory and cp.async).
#pragma once
#include "internal.h"

#include <bit>
#include <vector>

namespace simt {

constexpr int MAX_STATICS = 64, MAX_COPIES = 256, MAX_GROUPS = 16;

enum class State : uint8_t { fresh, ready, at_warp_operation, at_barrier, done };

struct Slot;  // a lane's operands of a warp operation (warp.cpp)

struct Thread {
    uint3 index{};
    int warp = 0, lane = 0;
    State state = State::fresh;
    Site site{};        // the last operation in which the thread could have waited
    unsigned mask = 0;  // lanes of the warp operation in which the thread waits
    Slot* slot = nullptr;
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
    unsigned live = 0, ready = 0, waiting = 0;  // sets of lanes, one bit per lane
    char edge = 0;                              // the happens-before edge of __syncwarp
};

struct SharedVariable {
    const void* key;
    const char* name;
    char* address;
    size_t bytes;
};

struct Block {
    std::vector<Thread> threads;  // num_threads are in use; the vector never shrinks, to keep fibers and stacks
    int num_threads = 0;
    std::vector<Warp> warps;
    std::vector<char*> free_stacks;
    Thread* current = nullptr;
    int current_warp = 0;
    int live = 0;  // threads that have not ended
    uint64_t random_state = 1;
    int parity = 0;  // 0 in even blocks, 1 in odd blocks
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
    int arrived = 0, votes = 0, result = 0;
    unsigned phase = 0;
    Site barrier{};
    char start_edge = 0, end_edge = 0, barrier_edge[2] = {};

    char* shared = nullptr;  // static variables, then dynamic memory
    char* dynamic = nullptr;
    size_t dynamic_bytes = 0, max_dynamic = 0, static_end = 0, static_bytes = 0;
    SharedVariable statics[MAX_STATICS];
    int num_statics = 0;

    Thread& at(int warp, int lane) { return threads[size_t(warp * 32 + lane)]; }
};

extern Block* running;  // null while no kernel runs

// Runs other threads until this one is ready again.
void yield(Block& b);

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
