// engines.h: the state of Hopper's asynchronous instructions, shared by hopper.cpp (the rules, and when engines run),
// chunks.cpp (who has written what in shared memory), clocks.cpp, barriers.cpp, tma.cpp and wgmma.cpp.
//
// These files allocate nothing while fibers run, and no sanitizer sees their accesses (internal.h).
#pragma once
#include "block.h"

#include <algorithm>
#include <cstdio>

namespace simt {

constexpr int MAX_BARRIERS = 64, NAMED_BARRIERS = 16, MAX_WARPGROUPS = 8, MAX_TRANSFERS = 512;
constexpr int MAX_PRODUCTS = 64, MAX_ACCUMULATORS = 16, MAX_WGMMA_GROUPS = 64;
constexpr size_t CHUNK = 16, CHUNKS = SHARED_BYTES / CHUNK;

// State of 16 bytes of shared memory: the last write, and the operations that are pending.
struct Chunk {
    enum Writer : uint8_t { nobody, thread, copy } writer;
    uint8_t barrier;            // barrier of the copy
    uint16_t number;            // number of the thread
    uint16_t readers, writers;  // pending operations
    int phase;                  // phase of the barrier
    uint64_t time;              // time of the write
    // The place in TMA's box, and the box: rows, and columns of 16 bytes. No columns: not by TMA.
    uint16_t row, rows, column, columns;
    // By stmatrix: the chunk of its matrix's first row. Else 0.
    uint16_t first_row;
    Site site;  // source line of the write
};

struct Barrier {
    const uint64_t* at;
    Site site;
    int count, pending, phase, thread;  // thread: which has initialised it
    bool fenced;                        // for the async proxy and the cluster
    int64_t bytes;                      // that this phase still waits for
    char edge[2];                       // happens-before edges of even and odd phases
};

struct NamedBarrier {
    int arrived, threads;
    int64_t generation;
    char edge[2];
};

// Accumulators of a thread: the values while a wgmma owns them, and those that the last wait has given back.
struct Accumulators {
    float* at;
    int count;
    bool pending;
    int64_t last, before, fences;  // the last pending products, or -1; the thread's fences when it got them back
    float values[128], returned[128];
};

struct ThreadState {
    int registers, num_accumulators;
    uint64_t fence_time;
    int64_t fences, issued, waited, groups, group_end[MAX_WGMMA_GROUPS];  // counts of wgmma
    int64_t store_groups, stores_waited, last_store;                      // last_store: its group + 1
    int seen[MAX_BARRIERS];                                               // last phase waited for, + 2
    int matrices;                                                         // by stmatrix
    const void* rows[2];                                                  // given to even and odd ones
    char read_edge, write_edge;                                           // happens-before edges of stores
    Accumulators accumulators[MAX_ACCUMULATORS];
};

struct Product {
    Wgmma w;
    int threads;  // that have issued it
    Site site;
    void* place;  // in the kernel's code
    uint8_t accumulators[128];
    uint32_t registers[128][4];
};

struct Warpgroup {
    int64_t begun, issued, executed;  // products: by one thread, by all, done
    char issue_edge, done_edge;
    void* tsan_fiber[2];
    Product products[MAX_PRODUCTS];
};

// The emulator's CUtensorMap. Dimensions that it does not have are of size 1.
struct TensorMap {
    char* base;
    int64_t sizes[3], strides[3];  // strides in bytes; the first is the element's
    int box[3], swizzle;
    int64_t row_bytes() const { return box[0] * strides[0]; }
    int64_t bytes() const { return row_bytes() * box[1] * box[2]; }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

struct Transfer {
    bool is_store;
    Thread* thread;
    int64_t group;
    TensorMap map;
    Box from;
    int64_t address;   // address of the box in shared memory
    Barrier* barrier;  // barrier of a load
    Site site;
    void* place;
    char edge;
};

// The last load or store of a byte of shared memory that SANITIZE=stores has shown.
struct Access {
    uint64_t time;
    Site site;
    int thread;
};

struct Engines {
    uint64_t start;  // time at which the block has started
    int num_barriers, num_transfers;
    int64_t registers;  // in the pool of setmaxnreg
    void* tsan_fiber[2];
    NamedBarrier cluster, named[NAMED_BARRIERS];
    Barrier barriers[MAX_BARRIERS];
    Transfer* pending[MAX_TRANSFERS];  // the first num_transfers; then free ones
    Transfer transfers[MAX_TRANSFERS];
    Warpgroup groups[MAX_WARPGROUPS];
    ThreadState threads[1024];
    Chunk chunks[CHUNKS];
    Access loads[SHARED_BYTES], stores[SHARED_BYTES];
};

extern uint64_t now;                // counts accesses and fences
extern const void* running_engine;  // null: a thread runs

// The site of a store that SANITIZE=stores has shown: line -1, and the address in the program as `file`.
Site resolved(Site site);
template <class... T>
[[noreturn]] void report_with(Site site, const char* format, T... values) {
    static char text[1024];
    snprintf(text, sizeof(text), format, values...);
    report(text, resolved(site));
}

// The running block. The first use of an engine starts those of its cluster.
Block& block_with_engines();
inline int number(const Thread& t) { return t.warp * 32 + t.lane; }
inline ThreadState& state(const Thread& t) { return t.block->engines->threads[number(t)]; }

// Runs f as an engine, which to ThreadSanitizer was called at `place` of the kernel.
template <class F>
void as_engine(const Block& b, void* const (&fibers)[2], void* place, F f) {
    running_engine = fibers;
    void* before = detects_races() ? __tsan_get_current_fiber() : nullptr;
    switch_tsan_fiber(fibers[b.leader->parity]);
    if (__tsan_func_entry) __tsan_func_entry(place);
    f();
    if (__tsan_func_exit) __tsan_func_exit();
    switch_tsan_fiber(before);
    running_engine = nullptr;
}

// Shared memory (chunks.cpp). An address counts bytes from the end of the static variables.

inline char* pointer(const Block& b, int64_t address) { return b.shared + STATIC_BYTES + address; }
int64_t address_of(const Block& b, const void* p, int64_t bytes, Site site);
inline Chunk& chunk_at(const Block& b, const void* p) {
    return b.engines->chunks[size_t(static_cast<const char*>(p) - b.shared) / CHUNK];
}

// width: bytes of a row of the swizzle, 16 for none. Exchanges 16-byte chunks within rows.
inline int64_t swizzled(int64_t address, int width) { return address ^ ((address >> 7 & (width / 16 - 1)) << 4); }

// Reports a read of a chunk by `who` if not all its warps may read it.
void check_read(const Block& b, const void* p, const char* who, bool by_async, int first_warp, int warps, Site site);
// Reports an access that no barrier orders after one by another warp (clocks.cpp).
void note_access(Block& b, const void* p, size_t bytes, bool is_store, Site site);
// Reports a write to the chunk while a copy or product is pending that reads or writes it.
void check_write(const Block& b, const void* p, const char* who, Site site);
void note_store(Block& b, const void* p, size_t bytes, Site site);
// Reports a read of the chunk at an address if a matrix of stmatrix is not in one row or column of chunks there.
void check_matrix(const Block& b, int64_t address, int width, const char* who, Site site);
void copy_plain(void* to, const void* from, size_t bytes);  // not memcpy, which sanitizers see
void copy(void* to, const void* from, size_t bytes);        // with what MemorySanitizer knows

// barriers.cpp
Barrier& barrier_at(const Block& b, const uint64_t* at, Site site);
void settle(Block& b, Barrier& bar, Site site);  // completes the phase if everything has arrived
int live_threads(const Block& leader);

void execute_transfer(Block& b, int i);  // the pending transfer number i of the block (tma.cpp)

// wgmma.cpp
void execute_next_product(Block& b, Warpgroup& g);
bool reads(const Block& b, const Product& p, const char* chunk);

}  // namespace simt
