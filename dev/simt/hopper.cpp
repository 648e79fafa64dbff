// hopper.cpp: a model of Hopper's asynchronous instructions (sm_90a) on a CPU: wgmma with its descriptors and swizzles,
// TMA copies with tensor maps and multicast, mbarriers, clusters, named barriers, setmaxnreg and the async proxy.
//
// Such kernels are hard to debug on a GPU, because most mistakes show only as rare wrong numbers. Here a kernel runs as
// ordinary C++, and each rule that it breaks ends the program with a sentence that names the rule and the line:
//   proxies      wgmma and TMA stores read what threads have written only after each writer's fence_proxy_async.
//   phases       who reads what TMA has written must have waited for that phase of its mbarrier. A thread waits once
//                for each phase, since a parity cannot tell a phase from the one before the last.
//   overwriting  nobody writes operands of a pending wgmma or the source of a pending store, or what TMA still writes.
//   registers    accumulators belong to wgmma until its wait: they are NaN meanwhile. wgmma_fence must follow each
//                change by the thread. setmaxnreg takes registers from a pool that others must have filled.
//   descriptors  operands begin where their swizzle repeats, lie in shared memory that something has written, and have
//                the rows and columns of a TMA load in order.
//   ends         threads wait for their products and stores; blocks of a cluster outlive arrivals at their mbarriers.
// A deadlock prints what each mbarrier still expects. Other wrong offsets give wrong numbers, as on a GPU.
//
// The copies and products run late (when somebody waits for them), early (at once) or at random (SIMT_ASYNC). Late
// finds the most, for example memory that is reused too early. To ThreadSanitizer each engine (the TMA unit of a block,
// the tensor core of a warpgroup) is a thread: an instruction releases to it, it releases the mbarrier or the wait. So
// it reports races between copies and threads, with both lines. Wrappers show the emulator only some of a kernel's
// stores; a build with SANITIZE=stores (clang) shows it all loads and stores.
//
// Not modelled: weaker ordering of memory than these rules, convergence within a warp at `.aligned` instructions, time.
//
// This file allocates nothing while fibers run, and no sanitizer sees its accesses (internal.h).
#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

namespace simt {

constexpr int MAX_BARRIERS = 64, NAMED_BARRIERS = 16, MAX_WARPGROUPS = 8, MAX_TRANSFERS = 512;
constexpr int MAX_PRODUCTS = 64, MAX_ACCUMULATORS = 16, MAX_WGMMA_GROUPS = 64;
constexpr size_t CHUNK = 16, CHUNKS = SHARED_BYTES / CHUNK;

// What is known about 16 bytes of shared memory.
struct Chunk {
    enum Writer : uint8_t { nobody, thread, copy } writer;
    uint8_t barrier;            // of the copy
    uint16_t number;            // of the thread
    uint16_t readers, writers;  // pending operations
    int phase;                  // of the barrier
    uint64_t time;              // of the write
    // The place in TMA's box, and the box: rows, and columns of 16 bytes. No columns: not by TMA, or without a box.
    uint16_t row, rows, column, columns;
    Site site;  // of the write
};

struct Barrier {
    const uint64_t* at;
    Site site;
    int count, pending, phase, thread;  // thread: which has initialised it
    bool fenced;                        // for the async proxy and the cluster
    int64_t bytes;                      // that this phase still waits for
    char edge[2];                       // of even and odd phases
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
    int64_t last, fences;  // the last product; the thread's fences when it got them back
    float values[128], returned[128];
};

struct ThreadState {
    int registers, num_accumulators;
    uint64_t fence_time;
    int64_t fences, issued, waited, groups, group_end[MAX_WGMMA_GROUPS];  // of wgmma
    int64_t store_groups, stores_waited, last_store;                      // last_store: its group + 1
    int seen[MAX_BARRIERS];                                               // last phase waited for, + 2
    char read_edge, write_edge;                                           // of stores
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

// What a CUtensorMap is here. Dimensions that it does not have are of size 1.
struct TensorMap {
    char* base;
    int64_t sizes[3], strides[3];  // strides in bytes; the first is the element's
    int box[3], swizzle, rank;
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
    int64_t address;   // of the box in shared memory
    Barrier* barrier;  // of a load
    Site site;
    void* place;
    char edge;
};

struct Engines {
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
};

static uint64_t now = 0;  // counts stores and fences
static bool sees_stores = false;

// Reports.

// The site of a store that SANITIZE=stores has shown: line -1, and the address in the program as `file`.
static Site resolved(Site site) {
    static char text[512];
    Dl_info program;
    if (site.line != -1 || !dladdr(site.file, &program)) return site;
    snprintf(text, sizeof(text), "addr2line -e /proc/%d/exe %#zx", int(getpid()),
             size_t(site.file - static_cast<const char*>(program.dli_fbase)) - 1);
    FILE* output = popen(text, "r");
    if (!output || !fgets(text, sizeof(text), output)) return {"an unknown place", 0};
    pclose(output);
    char* colon = strrchr(text, ':');
    if (colon) *colon = 0;
    return {text, colon ? atoi(colon + 1) : 0};
}

template <class... T>
[[noreturn]] static void report_with(Site site, const char* format, T... values) {
    static char text[1024];
    snprintf(text, sizeof(text), format, values...);
    report(text, resolved(site));
}

// Access to the state.

static void create_engines(Block& b) {
    b.engines = reinterpret_cast<Engines*>(map_memory(sizeof(Engines)));
    for (int i = 0; i < MAX_TRANSFERS; i++) b.engines->pending[i] = &b.engines->transfers[i];
}

void prepare_engines(Block& b) {
    if (sees_stores && !b.engines) create_engines(b);
}

static void clear_engines(Block& b) {
    Engines& e = *b.engines;
    e.num_barriers = e.num_transfers = 0;
    e.registers = 0;
    fill(&e.cluster, 0, sizeof(e.cluster) + sizeof(e.named));
    fill(e.chunks, 0, sizeof(e.chunks));
    for (Warpgroup& g : e.groups) g.begun = g.issued = g.executed = 0;
    const int known = b.leader->call->registers, registers = known ? known : std::min(248, 8192 / b.num_threads * 8);
    for (int i = 0; i < b.num_threads; i++) {
        fill(&e.threads[i], 0, offsetof(ThreadState, accumulators));
        e.threads[i].registers = registers;
    }
}

void reset_engines(Block& b) {
    b.uses_engines = false;
    if (sees_stores) clear_engines(b);  // to see a block's first stores
}

static void start_engines(Block& b) {
    if (!b.engines) create_engines(b);
    if (!sees_stores) clear_engines(b);
    b.uses_engines = true;
    if (!detects_races() || b.engines->tsan_fiber[0]) return;
    const auto create = [](void*(&fibers)[2], const char* name) {
        for (void*& fiber : fibers) __tsan_set_fiber_name(fiber = __tsan_create_fiber(0), name);
    };
    create(b.engines->tsan_fiber, "TMA");
    for (Warpgroup& g : b.engines->groups) create(g.tsan_fiber, "tensor core");
}

// The running block. The first use of an engine starts those of its cluster.
static Block& block_with_engines() {
    Block& b = *running;
    if (b.uses_engines) return b;
    for (int i = 0; i < b.blocks; i++) start_engines(*b.leader->cluster[size_t(i)]);
    return b;
}

static int number(const Thread& t) { return t.warp * 32 + t.lane; }
static ThreadState& state(const Thread& t) { return t.block->engines->threads[number(t)]; }

// Runs f as an engine, which to ThreadSanitizer was called at `place` of the kernel.
template <class F>
static void as_engine(const Block& b, void* const (&fibers)[2], void* place, F f) {
    if (!detects_races()) return f();
    void* before = __tsan_get_current_fiber();
    switch_tsan_fiber(fibers[b.leader->parity]);
    __tsan_func_entry(place);
    f();
    __tsan_func_exit();
    switch_tsan_fiber(before);
}

// Shared memory. An address counts bytes from the end of the static variables.

static char* pointer(const Block& b, int64_t address) { return b.shared + STATIC_BYTES + address; }
static int64_t address_of(const Block& b, const void* p, int64_t bytes, Site site) {
    const char* at = static_cast<const char*>(p);
    if (at < b.dynamic || at + bytes > b.dynamic + b.dynamic_bytes)
        report("an asynchronous instruction needs an address in dynamic shared memory", site);
    return at - pointer(b, 0);
}
uint32_t shared_address(const void* p, Site site) { return uint32_t(address_of(*running, p, 1, site)); }

static Chunk& chunk_at(const Block& b, const void* p) {
    return b.engines->chunks[size_t(static_cast<const char*>(p) - b.shared) / CHUNK];
}

// width: bytes of a row of the swizzle, 16 for none. Exchanges 16-byte chunks within rows.
static int64_t swizzled(int64_t address, int width) { return address ^ ((address >> 7 & (width / 16 - 1)) << 4); }

static bool has_waited(const Block& b, int warp, const Chunk& c) {
    for (int lane = 0; lane < 32; lane++)
        if (b.engines->threads[warp * 32 + lane].seen[c.barrier] >= c.phase + 2) return true;
    return false;
}

// Reports a read of a chunk by `who` if not all its warps may read it.
static void check_read(const Block& b, const void* p, const char* who, bool by_async, int first_warp, int warps,
                       Site site) {
    const Chunk& c = chunk_at(b, p);
    const Site from = c.site;
    if (c.writers)
        report_with(site, "%s reads shared memory that a TMA load still writes: it needs mbarrier_wait", who);
    if (c.writer == Chunk::nobody && sees_stores)
        report_with(site, "%s reads shared memory that nothing has written", who);
    if (by_async && c.writer == Chunk::thread && b.engines->threads[c.number].fence_time < c.time) {
        const Site store = resolved(from);
        report_with(site, "%s reads what thread %d has written at %s:%d without fence_proxy_async", who, c.number,
                    store.file, store.line);
    }
    for (int w = first_warp; w < first_warp + warps && c.writer == Chunk::copy; w++)
        if (!has_waited(b, w, c))
            report_with(site,
                        "%s reads what TMA has written (load at %s:%d), but warp %d has not waited for phase %d of "
                        "its mbarrier",
                        who, from.file, from.line, w, c.phase);
}

template <class F>
static void for_operands(const Product& p, F f);
static bool reads(const Block& b, const Product& p, const char* chunk) {
    bool found = false;
    for_operands(p, [&](int64_t address) { found = found || pointer(b, address) == chunk; });
    return found;
}

// Reports a write to the chunk while a copy or product is pending that reads or writes it.
static void check_write(const Block& b, const void* p, const char* who, Site site) {
    const Chunk& c = chunk_at(b, p);
    if (c.writers) report_with(site, "%s writes shared memory that a TMA load still writes", who);
    if (!c.readers) return;
    const char* chunk = b.shared + size_t(static_cast<const char*>(p) - b.shared) / CHUNK * CHUNK;
    for (const Warpgroup& g : b.engines->groups)
        for (int64_t k = g.executed; k < g.issued; k++)
            if (const Product& product = g.products[k % MAX_PRODUCTS]; reads(b, product, chunk))
                report_with(site, "%s overwrites an operand of the wgmma at %s:%d, which was not waited for", who,
                            product.site.file, product.site.line);
    report_with(site, "%s overwrites shared memory that a bulk store still reads: it needs store_wait_read", who);
}

static void note_store(Block& b, const void* p, Site site) {
    Chunk& c = chunk_at(b, p);
    check_write(b, p, "a thread", site);
    c.writer = Chunk::thread;
    c.number = uint16_t(number(*b.current));
    c.time = ++now;
    c.site = site;
}

// Not memcpy, which sanitizers see.
static void copy_plain(void* to, const void* from, size_t bytes) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}
// With what MemorySanitizer knows.
static void copy(void* to, const void* from, size_t bytes) {
    if (__msan_memcpy)
        __msan_memcpy(to, from, bytes);
    else
        copy_plain(to, from, bytes);
}

// Barriers.

static Barrier& barrier_at(const Block& b, const uint64_t* at, Site site) {
    Engines& e = *b.engines;
    for (int i = 0; i < e.num_barriers; i++)
        if (e.barriers[i].at == at) {
            if (__tsan_read_range) __tsan_read_range(const_cast<uint64_t*>(at), 8);  // a race with mbarrier_init
            return e.barriers[i];
        }
    report("an mbarrier that was not initialised", site);
}

void mbarrier_init(uint64_t* at, uint32_t arrivals, Site site) {
    Block& b = block_with_engines();
    Engines& e = *b.engines;
    if (!is_shared(at, 8)) report("an mbarrier must be in shared memory", site);
    check_aligned(at, 8, "a misaligned mbarrier", site);
    if (arrivals < 1 || arrivals >= 1 << 20) report("an mbarrier needs 1 to 2^20 - 1 arrivals", site);
    int i = 0;
    while (i < e.num_barriers && e.barriers[i].at != at) i++;
    if (i == MAX_BARRIERS) report("more mbarriers than the emulator has room for", site);
    e.num_barriers = std::max(e.num_barriers, i + 1);
    if (__tsan_write_range) __tsan_write_range(at, 8);
    e.barriers[i] = {at, site, int(arrivals), int(arrivals), 0, number(*b.current), false, 0, {}};
}

void fence_barrier_init() {
    Block& b = block_with_engines();
    for (Barrier& bar : b.engines->barriers) bar.fenced = bar.fenced || bar.thread == number(*b.current);
}

// Completes the phase if everything has arrived.
static void settle(Block& b, Barrier& bar, Site site) {
    if (bar.pending < 0) report("more arrivals at an mbarrier than its phase expects", site);
    if (bar.pending || bar.bytes) return;
    bar.phase++;
    bar.pending = bar.count;
    wake(b, &bar);
}

void mbarrier_arrive(uint64_t* at, int block, uint32_t bytes, Site site) {
    Block& b = block_with_engines();
    if (block < 0 || block >= b.blocks)
        report("an arrival at an mbarrier of a block that the cluster does not have", site);
    Block& other = *b.leader->cluster[size_t(block)];
    if (!other.live) report("an arrival at an mbarrier of a block of the cluster that has ended", site);
    const auto offset = reinterpret_cast<char*>(at) - b.shared;
    Barrier& bar = barrier_at(other, reinterpret_cast<uint64_t*>(other.shared + offset), site);
    if (&other != &b && !bar.fenced)
        report("an arrival from another block at an mbarrier without fence_mbarrier_init", site);
    bar.bytes += bytes;
    bar.pending--;
    release(&bar.edge[bar.phase & 1]);
    settle(other, bar, site);
}

void mbarrier_wait(uint64_t* at, uint32_t parity, Site site) {
    Block& b = block_with_engines();
    Barrier& bar = barrier_at(b, at, site);
    const int before = bar.phase;
    while (uint32_t(bar.phase & 1) == (parity & 1)) {
        block_until_woken(&bar, "at an mbarrier", site);
        if (bar.phase > before + 1)
            report("a phase of an mbarrier has passed while a thread waited for the one before", site);
    }
    int& seen = state(*b.current).seen[&bar - b.engines->barriers];
    if (bar.phase + 1 <= seen)
        report_with(site, "a thread waits for phase %d of an mbarrier, which it has already waited for: wrong parity",
                    bar.phase - 1);
    seen = bar.phase + 1;
    acquire(&bar.edge[(bar.phase - 1) & 1]);
}

static void arrive(Block& b, NamedBarrier& n, int threads, bool waits, const char* what, Site site) {
    const int64_t generation = n.generation;
    release(&n.edge[generation & 1]);
    if (++n.arrived >= threads) {
        n.arrived = 0;
        n.generation++;
        wake(b, &n);
    }
    while (waits && n.generation == generation) block_until_woken(&n, what, site);
    if (waits) acquire(&n.edge[generation & 1]);
}

void named_barrier(int id, int threads, bool waits, Site site) {
    Block& b = block_with_engines();
    if (id < 1 || id >= NAMED_BARRIERS) report("named barriers have the numbers 1 to 15", site);
    NamedBarrier& n = b.engines->named[id];
    if (n.arrived && n.threads != threads)
        report("threads meet at a named barrier with different numbers of threads", site);
    if (threads % 32 || threads < 32 || threads > b.num_threads)
        report("a named barrier needs whole warps, and no more than the block has", site);
    n.threads = threads;
    arrive(b, n, threads, waits, "at a named barrier", site);
}

static int live_threads(const Block& leader) {
    int live = 0;
    for (int i = 0; i < leader.blocks; i++) live += leader.cluster[size_t(i)]->live;
    return live;
}

int cluster_rank() { return running->rank; }
void cluster_barrier(Site site) {
    Block &b = block_with_engines(), &leader = *b.leader;
    arrive(leader, leader.engines->cluster, live_threads(leader), true, "for its cluster", site);
}

void set_registers(int registers, bool more, Site site) {
    Block& b = block_with_engines();
    int& mine = state(*b.current).registers;
    int64_t& pool = b.engines->registers;
    if (more ? registers < mine : registers > mine)
        report_with(site, "setmaxnreg.%s to %d registers, but the warp has %d", more ? "inc" : "dec", registers, mine);
    while (pool < registers - mine) block_until_woken(&pool, "for registers that others give back", site);
    pool -= registers - mine;
    mine = registers;
    if (!more) wake(b, &pool);
}

void fence_proxy() {
    Block& b = block_with_engines();
    state(*b.current).fence_time = ++now;
    fence_barrier_init();
}

// TMA.

// Calls f(global, shared, skip, bytes) for each 16 bytes of the box. The `bytes` after the first `skip` are of the
// tensor.
template <class F>
static void for_parts(const Transfer& t, const Block& b, F f) {
    const TensorMap& m = t.map;
    const int64_t element = m.strides[0];
    int64_t linear = t.address;
    for (int z = 0; z < m.box[2]; z++)
        for (int y = 0; y < m.box[1]; y++)
            for (int64_t i = 0; i < m.row_bytes(); i += 16, linear += 16) {
                const int64_t cx = t.from.x + i / element, cy = t.from.y + y, cz = t.from.z + z;
                const bool row = cy >= 0 && cy < m.sizes[1] && cz >= 0 && cz < m.sizes[2];
                const int64_t first = std::max<int64_t>(cx, 0), end = std::min(cx + 16 / element, m.sizes[0]);
                char* to = pointer(b, m.swizzle > 16 ? swizzled(linear, m.swizzle) : linear);
                if (!row || first >= end)
                    f(nullptr, to, 0, 0);
                else
                    f(m.base + first * element + cy * m.strides[1] + cz * m.strides[2], to, (first - cx) * element,
                      (end - first) * element);
            }
}

static void load(Transfer& t, Block& b) {
    Barrier& bar = *t.barrier;
    const int columns = int(t.map.row_bytes() / 16);
    const uint64_t time = ++now;
    int part = 0;
    for_parts(t, b, [&](char* global, char* shared, int64_t skip, int64_t bytes) {
        Chunk& c = chunk_at(b, shared);
        if (bytes < 16) {
            fill(shared, 0, 16);
            if (__msan_unpoison) __msan_unpoison(shared, 16);
        }
        if (global) {
            check_device_range(global, size_t(bytes), "a tensor map of memory that is not the device's", t.site);
            if (__tsan_read_range) __tsan_read_range(global, size_t(bytes));
            copy(shared + skip, global, size_t(bytes));
        }
        if (__tsan_write_range) __tsan_write_range(shared, 16);
        c.writers--;
        c.writer = Chunk::copy;
        c.barrier = uint8_t(&bar - b.engines->barriers);
        c.phase = bar.phase;
        c.site = t.site;
        c.time = time;
        c.row = uint16_t(part / columns);
        c.rows = uint16_t(t.map.box[1]);
        c.column = uint16_t(part++ % columns);
        c.columns = t.map.rank ? uint16_t(columns) : 0;
    });
    bar.bytes -= t.map.bytes();
    release(&bar.edge[bar.phase & 1]);
}

static void store(Transfer& t, Block& b) {
    ThreadState& s = state(*t.thread);
    for_parts(t, b, [&](char*, char* shared, int64_t, int64_t) {
        chunk_at(b, shared).readers--;
        if (__tsan_read_range) __tsan_read_range(shared, 16);
    });
    release(&s.read_edge);
    for_parts(t, b, [&](char* global, char* shared, int64_t skip, int64_t bytes) {
        if (!global) return;
        check_device_range(global, size_t(bytes), "a tensor map of memory that is not the device's", t.site);
        if (__tsan_write_range) __tsan_write_range(global, size_t(bytes));
        copy(global, shared + skip, size_t(bytes));
    });
    release(&s.write_edge);
}

// Executes the pending transfer number i of the block.
static void execute_transfer(Block& b, int i) {
    Engines& e = *b.engines;
    Transfer& t = *e.pending[i];
    as_engine(b, e.tsan_fiber, t.place, [&] {
        acquire(&t.edge);
        t.is_store ? store(t, b) : load(t, b);
        release(&b.leader->end_edge);
    });
    std::swap(e.pending[i], e.pending[--e.num_transfers]);
    if (!t.is_store) settle(b, *t.barrier, t.site);
}

static void begin_transfer(Block& b, const Transfer& given) {
    Engines& e = *b.engines;
    if (e.num_transfers == MAX_TRANSFERS) report("more pending TMA copies than the emulator has room for", given.site);
    Transfer& t = *e.pending[e.num_transfers++];
    copy_plain(&t, &given, sizeof(t));
    release(&t.edge);
    for_parts(t, b, [&](char*, char* shared, int64_t, int64_t) {
        if (!t.is_store) check_write(b, shared, "a TMA load", t.site);
        if (t.is_store) check_read(b, shared, "a bulk store", true, t.thread->warp, 1, t.site);
        (t.is_store ? chunk_at(b, shared).readers : chunk_at(b, shared).writers)++;
    });
    if (config.async == Async::early) execute_transfer(b, e.num_transfers - 1);
}

static Transfer transfer(const TensorMap& map, Box from, const void* shared, Site site, void* place) {
    Block& b = block_with_engines();
    const int64_t align = map.rank ? 128 : 16;
    const int64_t address = address_of(b, shared, map.bytes(), site);
    if (address % align)
        report_with(site, "a TMA copy needs shared memory that is aligned to %d bytes, not %d", int(align),
                    int(address & -address));
    if (map.swizzle > 16 && map.row_bytes() != map.swizzle)
        report_with(site, "a box with rows of %d bytes, with a swizzle of %d: the emulator does not know this",
                    int(map.row_bytes()), map.swizzle);
    return {false, b.current, 0, map, from, address, nullptr, site, place, 0};
}

static void begin_load(Transfer t, uint64_t* barrier, unsigned blocks) {
    Block& b = *running;
    if (!blocks || blocks >> b.blocks) report("a TMA load for a block that the cluster does not have", t.site);
    const auto offset = reinterpret_cast<char*>(barrier) - b.shared;
    for (int i = 0; i < b.blocks; i++) {
        if (!(blocks >> i & 1)) continue;
        Block& other = *b.leader->cluster[size_t(i)];
        if (!other.live) report("a TMA load for a block that has ended", t.site);
        t.barrier = &barrier_at(other, reinterpret_cast<uint64_t*>(other.shared + offset), t.site);
        if (!t.barrier->fenced) report("a TMA load signals an mbarrier without fence_mbarrier_init", t.site);
        begin_transfer(other, t);
    }
}

static void begin_store(Transfer t) {
    ThreadState& s = state(*t.thread);
    t.is_store = true;
    t.group = s.store_groups;
    s.last_store = t.group + 1;
    begin_transfer(*running, t);
}

static TensorMap contiguous(const void* p, uint32_t bytes, Site site) {
    check_aligned(p, 16, "a bulk copy needs global memory that is aligned to 16 bytes", site);
    if (!bytes || bytes % 16) report("a bulk copy needs a multiple of 16 bytes", site);
    return {static_cast<char*>(const_cast<void*>(p)), {bytes, 1, 1}, {1, 0, 0}, {int(bytes), 1, 1}, 16, 0};
}
static const TensorMap& decoded(const CUtensorMap* map) { return *reinterpret_cast<const TensorMap*>(map); }

void tensor_load(void* to, const CUtensorMap* map, Box from, uint64_t* barrier, unsigned blocks, Site site) {
    begin_load(transfer(decoded(map), from, to, site, __builtin_return_address(0)), barrier,
               blocks ? blocks : 1u << running->rank);
}
void tensor_store(const CUtensorMap* map, const void* from, Box to, Site site) {
    begin_store(transfer(decoded(map), to, from, site, __builtin_return_address(0)));
}
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, Site site) {
    begin_load(transfer(contiguous(from, bytes, site), {}, to, site, __builtin_return_address(0)), barrier,
               1u << running->rank);
}
void bulk_store(void* to, const void* from, uint32_t bytes, Site site) {
    begin_store(transfer(contiguous(to, bytes, site), {}, from, site, __builtin_return_address(0)));
}

void store_commit() { state(*block_with_engines().current).store_groups++; }
void store_wait(int groups_kept, bool only_read) {
    Block& b = block_with_engines();
    ThreadState& s = state(*b.current);
    const int64_t end = s.store_groups - groups_kept;
    for (int i = 0; i < b.engines->num_transfers;) {
        const Transfer& t = *b.engines->pending[i];
        if (t.is_store && t.thread == b.current && t.group < end)
            execute_transfer(b, i);
        else
            i++;
    }
    s.stores_waited = std::max(s.stores_waited, end);
    acquire(&s.read_edge);
    if (!only_read) acquire(&s.write_edge);
}

// wgmma.

struct Descriptor {
    int64_t start, leading, stride;
    int width;  // bytes of a row of the swizzle
    explicit Descriptor(uint64_t d)
        : start(int64_t(d & 0x3fff) << 4),
          leading(int64_t(d >> 16 & 0x3fff) << 4),
          stride(int64_t(d >> 32 & 0x3fff) << 4),
          width(d >> 62 ? 256 >> (d >> 62) : 16) {}
};

// The canonical layouts of the PTX ISA. Groups of 8 outer elements (or of a row's width, if transposed) are `stride` or
// `leading` bytes apart.
int64_t operand_address(uint64_t descriptor, int outer, int k, bool transposed) {
    const Descriptor d(descriptor);
    const int columns = d.width / 2;
    int64_t at = d.start;
    if (d.width == 16)
        at += transposed ? outer % 8 * 2 + outer / 8 * d.stride + k % 8 * 16 + k / 8 * d.leading
                         : outer % 8 * 16 + outer / 8 * d.stride + k % 8 * 2 + k / 8 * d.leading;
    else
        at += transposed ? outer % columns * 2 + outer / columns * d.leading + k % 8 * d.width + k / 8 * d.stride
                         : outer % 8 * d.width + outer / 8 * d.stride + k * 2;
    return swizzled(at, d.width);
}

// Calls f(address, outer, k) for each 16 bytes: 8 values of k, or 8 outer elements if transposed.
template <class F>
static void for_chunks(uint64_t descriptor, int outer, bool transposed, F f) {
    for (int o = 0; o < outer; o += transposed ? 8 : 1)
        for (int k = 0; k < 16; k += transposed ? 1 : 8) f(operand_address(descriptor, o, k, transposed), o, k);
}
template <class F>
static void for_operands(const Product& p, F f) {
    const auto address_only = [&](int64_t address, int, int) { f(address); };
    if (!p.w.registers) for_chunks(p.w.a, 64, p.w.transposed_a, address_only);
    for_chunks(p.w.b, p.w.n, p.w.transposed_b, address_only);
}

static void check_descriptor(const Block& b, uint64_t descriptor, int outer, bool transposed, Site site) {
    const Descriptor d(descriptor);
    if (descriptor >> 49 & 7 || (d.start >> 7 & (d.width / 16 - 1)))
        report_with(site,
                    "a wgmma descriptor with swizzle of %d bytes must begin at a multiple of %d, without base offset",
                    d.width, d.width * 8);
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int, int) {
        const char* p = pointer(b, address);
        if (p < b.dynamic || p + 16 > b.dynamic + b.dynamic_bytes)
            report("a wgmma descriptor reaches outside of dynamic shared memory", site);
    });
}

// What one TMA load has brought must be an operand's rows and columns in order. (If k of several columns are in a tile,
// the next columns are in the next tile, and a box of three dimensions may be several tiles.)
static void check_order(const Block& b, uint64_t descriptor, int outer, bool transposed, Site site) {
    const Chunk& first = chunk_at(b, pointer(b, operand_address(descriptor, 0, 0, transposed)));
    if (first.writer != Chunk::copy || !first.columns) return;
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int o, int k) {
        const Chunk& c = chunk_at(b, pointer(b, address));
        const int column = first.column + (transposed ? o : k) / 8;
        const int row = first.row + (transposed ? k : o) + column / first.columns * first.rows;
        if (c.writer != Chunk::copy || c.time != first.time) return;
        if (c.row != row || c.column != column % first.columns)
            report_with(site,
                        "wgmma reads row %d of the box of the TMA load at %s:%d as row %d: a descriptor has a wrong "
                        "offset, stride or swizzle",
                        c.row, c.site.file, c.site.line, row);
    });
}

static float widened(uint32_t pair, int half) { return std::bit_cast<float>(half ? pair & 0xffff0000u : pair << 16); }

// Puts an operand into matrix[outer][k], or [k][outer] if outer_stride is 1.
static void read_operand(const Block& b, uint64_t descriptor, int outer, bool transposed, float* matrix,
                         int outer_stride, int k_stride) {
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int o, int k) {
        const auto* pairs = reinterpret_cast<const uint32_t*>(pointer(b, address));
        for (int i = 0; i < 8; i++)
            matrix[(o + (transposed ? i : 0)) * outer_stride + (k + (transposed ? 0 : i)) * k_stride] =
                widened(pairs[i / 2], i % 2);
    });
}

static void multiply(const Block& b, const Product& p, const ThreadState* threads) {
    static float A[64][16], B[16][256], D[64][256];
    const int n = p.w.n;
    for (int t = 0; t < 128 && p.w.registers; t++)
        for (int i = 0; i < 8; i++)
            A[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][t % 4 * 2 + i / 4 * 8 + i % 2] =
                widened(p.registers[t][i / 2], i % 2);
    if (!p.w.registers) read_operand(b, p.w.a, 64, p.w.transposed_a, A[0], 16, 1);
    read_operand(b, p.w.b, n, p.w.transposed_b, B[0], 1, 256);
    for (int m = 0; m < 64; m++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < n; j++) D[m][j] = (k ? D[m][j] : 0.0f) + A[m][k] * B[k][j];
    for (int t = 0; t < 128; t++) {
        float* values = const_cast<float*>(threads[t].accumulators[p.accumulators[t]].values);
        for (int i = 0; i < n / 2; i++) {
            const float x = D[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2];
            values[i] = p.w.accumulate ? values[i] + x : x;
        }
    }
}

static void execute_next_product(Block& b, Warpgroup& g) {
    const Product& p = g.products[g.executed % MAX_PRODUCTS];
    as_engine(b, g.tsan_fiber, p.place, [&] {
        acquire(&g.issue_edge);
        for_operands(p, [&](int64_t address) {
            char* shared = pointer(b, address);
            chunk_at(b, shared).readers--;
            if (__tsan_read_range) __tsan_read_range(shared, 16);
            if (__msan_test_shadow && __msan_test_shadow(shared, 16) >= 0)
                report("wgmma reads shared memory that is not initialised", p.site);
        });
        release(&g.done_edge);
    });
    multiply(b, p, &b.engines->threads[(&g - b.engines->groups) * 128]);
    g.executed++;
}

// The index of the thread's accumulators at d, which from now on belong to the product number `product`.
static uint8_t give_accumulators(ThreadState& s, float* d, int count, int64_t product, Site site) {
    int i = 0;
    while (i < s.num_accumulators && (s.accumulators[i].at != d || s.accumulators[i].count != count)) i++;
    if (i == s.num_accumulators) {
        for (int k = 0; k < i; k++)
            if (!s.accumulators[k].pending) i = k;  // forgotten: the variable may not exist any more
        if (s.num_accumulators < MAX_ACCUMULATORS) i = s.num_accumulators++;
        if (s.accumulators[i].pending && i < s.num_accumulators - 1)
            report("more pending accumulators than the emulator has room for", site);
        s.accumulators[i].at = d;
        s.accumulators[i].count = count;
        s.accumulators[i].pending = false;
        s.accumulators[i].fences = -1;
    }
    Accumulators& a = s.accumulators[i];
    a.last = product;
    if (a.pending) return uint8_t(i);
    bool changed = s.fences == 0;
    for (int k = 0; k < count && a.fences == s.fences; k++)
        changed = changed || std::bit_cast<uint32_t>(a.returned[k]) != std::bit_cast<uint32_t>(d[k]);
    if (changed) report("wgmma uses accumulators that the thread has changed, without wgmma_fence", site);
    copy_plain(a.values, d, size_t(count) * 4);
    fill(d, uninitialized, size_t(count) * 4);
    if (__msan_unpoison) __msan_unpoison(d, size_t(count) * 4);  // the product writes them
    a.pending = true;
    return uint8_t(i);
}

static bool same(const Wgmma& x, const Wgmma& y) {
    return x.n == y.n && x.transposed_a == y.transposed_a && x.transposed_b == y.transposed_b &&
           x.accumulate == y.accumulate && x.a == y.a && x.b == y.b && !x.registers == !y.registers;
}

static void begin_product(Block& b, Warpgroup& g, const Wgmma& w, Site site, void* place) {
    const int group = int(&g - b.engines->groups);
    if (b.num_threads < group * 128 + 128) report("wgmma needs a warpgroup of 128 threads", site);
    if (g.begun - g.executed == MAX_PRODUCTS) report("more pending wgmma than the emulator has room for", site);
    if (!w.registers) check_descriptor(b, w.a, 64, w.transposed_a, site);
    check_descriptor(b, w.b, w.n, w.transposed_b, site);
    Product& p = g.products[g.begun++ % MAX_PRODUCTS];
    p.w = w;
    p.threads = 0;
    p.site = site;
    p.place = place;
}

void wgmma_fence() { state(*block_with_engines().current).fences++; }

void wgmma(float* d, Wgmma w, Site site) {
    Block& b = block_with_engines();
    const int number_in_group = number(*b.current) % 128, group = b.current->warp / 4;
    ThreadState& s = state(*b.current);
    Warpgroup& g = b.engines->groups[group];
    if (s.issued == g.begun) begin_product(b, g, w, site, __builtin_return_address(0));
    Product& p = g.products[s.issued % MAX_PRODUCTS];
    if (!same(p.w, w) || p.site.line != site.line) report("threads of a warpgroup issue different wgmma", site);
    for (int i = 0; i < 4 && w.registers; i++) p.registers[number_in_group][i] = w.registers[i];
    p.accumulators[number_in_group] = give_accumulators(s, d, w.n / 2, s.issued, site);
    release(&g.issue_edge);
    s.issued++;
    if (++p.threads < 128) return;
    for_operands(p, [&](int64_t address) {
        check_read(b, pointer(b, address), "wgmma", true, group * 4, 4, site);
        chunk_at(b, pointer(b, address)).readers++;
    });
    if (!w.registers) check_order(b, w.a, 64, w.transposed_a, site);
    check_order(b, w.b, w.n, w.transposed_b, site);
    g.issued++;
    wake(b, &g);
    if (config.async == Async::early) execute_next_product(b, g);
}

void wgmma_commit() {
    ThreadState& s = state(*block_with_engines().current);
    s.group_end[s.groups++ % MAX_WGMMA_GROUPS] = s.issued;
}

void wgmma_wait(int groups_kept, Site site) {
    Block& b = block_with_engines();
    ThreadState& s = state(*b.current);
    Warpgroup& g = b.engines->groups[b.current->warp / 4];
    if (s.groups <= groups_kept) return;
    const int64_t end = s.group_end[(s.groups - groups_kept - 1) % MAX_WGMMA_GROUPS];
    while (g.issued < end) block_until_woken(&g, "for its warpgroup to issue wgmma", site);
    while (g.executed < end) execute_next_product(b, g);
    acquire(&g.done_edge);
    s.waited = end;
    for (int i = 0; i < s.num_accumulators; i++) {
        Accumulators& a = s.accumulators[i];
        if (!a.pending || a.last >= end) continue;
        copy_plain(a.at, a.values, size_t(a.count) * 4);
        copy_plain(a.returned, a.values, size_t(a.count) * 4);
        a.pending = false;
        a.fences = s.fences;
    }
}

void exchange_matrices(const uint32_t* registers, bool transpose, void* row, uint64_t (&out)[2], Site site) {
    Block& b = block_with_engines();
    check_aligned(row, 16, "stmatrix: a row is not 16-byte aligned", site);
    if (!is_shared(row, 16)) report("stmatrix: a row is not in shared memory", site);
    stmatrix(registers, transpose, out, site);
    note_store(b, row, site);
}

// When the engines run, and what they check at the end.

void run_engines_at_random(Block& leader) {
    if (config.async != Async::random || next_random(leader.async_random) % 64) return;
    Block& b = *leader.cluster[next_random(leader.async_random) % unsigned(leader.blocks)];
    const unsigned choice = next_random(leader.async_random) % unsigned(MAX_WARPGROUPS + b.engines->num_transfers);
    if (choice >= MAX_WARPGROUPS) return execute_transfer(b, int(choice) - MAX_WARPGROUPS);
    Warpgroup& g = b.engines->groups[choice];
    if (g.executed < g.issued) execute_next_product(b, g);
}

bool run_engines_if_all_wait(Block& leader) {
    const unsigned first = next_random(leader.async_random);
    for (int k = 0; k < leader.blocks; k++) {
        Block& b = *leader.cluster[(first + unsigned(k)) % unsigned(leader.blocks)];
        const int count = b.engines->num_transfers, start = int((first >> 8) % unsigned(std::max(count, 1)));
        for (int i = 0; i < count; i++) {
            const int transfer = (start + i) % count;
            if (b.engines->pending[transfer]->is_store) continue;
            execute_transfer(b, transfer);
            return true;
        }
    }
    return false;
}

void check_engines_at_end(const Thread& t) {
    const ThreadState& s = state(t);
    if (s.issued > s.waited) report("a thread ends with a wgmma that it has not waited for", t.site);
    if (s.last_store > s.stores_waited) report("a thread ends with a bulk store that it has not waited for", t.site);
    Block& leader = *t.block->leader;
    NamedBarrier* cluster = leader.engines ? &leader.engines->cluster : nullptr;
    if (!cluster || !cluster->arrived || cluster->arrived < live_threads(leader) - 1) return;
    cluster->arrived = 0;  // threads that have ended count as arrived
    cluster->generation++;
    wake(leader, cluster);
}

void check_engines(Block& b) {
    if (b.uses_engines && b.engines->num_transfers)
        report("a block ends before a TMA load to its shared memory", b.engines->pending[0]->site);
}

void print_engines(const Block& b) {
    const Engines& e = *b.engines;
    for (int i = 0; i < e.num_barriers; i++) {
        const Barrier& bar = e.barriers[i];
        if (bar.pending == bar.count && !bar.bytes) continue;
        fprintf(stderr, "    the mbarrier of %s:%d, number %d: phase %d needs %d of %d arrivals and %lld bytes%s\n",
                bar.site.file, bar.site.line, i, bar.phase, bar.pending, bar.count,
                static_cast<long long>(std::abs(bar.bytes)), bar.bytes < 0 ? " fewer than TMA has copied" : "");
    }
}

}  // namespace simt

// The driver's tensor maps. "CUDA Driver API", cuTensorMapEncodeTiled, has the limits.

static const char* wrong_map(const simt::TensorMap& m, int rank, const cuuint64_t* strides, const cuuint32_t* box,
                             const cuuint32_t* element_strides, int interleave) {
    if (rank < 1 || rank > 3 || interleave) return "the emulator knows ranks 1 to 3 without interleaving";
    if (!m.strides[0]) return "the emulator knows elements of uint8, bf16 and float";
    if (reinterpret_cast<uintptr_t>(m.base) % 16) return "the address must be a multiple of 16 bytes";
    for (int i = 0; i < rank; i++) {
        if (m.sizes[i] < 1 || m.sizes[i] > int64_t(1) << 32) return "sizes must be 1 to 2^32";
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >> 40)) return "strides must be multiples of 16 below 2^40";
        if (box[i] < 1 || box[i] > 256) return "the box must have 1 to 256 elements in each dimension";
        if (element_strides[i] != 1) return "the emulator knows element strides of 1";
    }
    if (m.row_bytes() % 16) return "the box must have rows of a multiple of 16 bytes";
    if (m.swizzle > 16 && m.row_bytes() > m.swizzle) return "the box must have rows no longer than the swizzle";
    return nullptr;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8      ? 1
                        : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                        : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32  ? 4
                                                                   : 0;
    simt::TensorMap m{static_cast<char*>(address), {1, 1, 1}, {element, 0, 0}, {1, 1, 1},
                      16 << int(swizzle),          int(rank)};
    for (unsigned i = 0; i < std::min(rank, 3u); i++) {
        m.sizes[i] = int64_t(sizes[i]);
        m.box[i] = int(box[i]);
        if (i) m.strides[i] = int64_t(strides[i - 1]);
    }
    const char* wrong = reinterpret_cast<uintptr_t>(map) % 64 ? "the tensor map must be aligned to 64 bytes" : nullptr;
    if (!wrong) wrong = wrong_map(m, int(rank), strides, box, element_strides, int(interleave));
    if (wrong) {
        fprintf(stderr, "emulator: cuTensorMapEncodeTiled: %s (CUDA_ERROR_INVALID_VALUE)\n", wrong);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(map, &m, sizeof(m));
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    const bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// With SANITIZE=stores the compiler calls these for each load and store.
#define SIMT_SEEN(bytes)                                                                                       \
    extern "C" void __sanitizer_cov_load##bytes(void* p) { simt::see(p, false, __builtin_return_address(0)); } \
    extern "C" void __sanitizer_cov_store##bytes(void* p) { simt::see(p, true, __builtin_return_address(0)); }
namespace simt {
static void see(const void* p, bool is_store, void* place) {
    sees_stores = true;
    if (!running || !running->engines || !is_shared(p, 1)) return;
    const Site site{static_cast<const char*>(place), -1};
    if (is_store) return note_store(*running, p, site);
    if (running->uses_engines) check_read(*running, p, "a thread", false, running->current->warp, 1, site);
}
}  // namespace simt
SIMT_SEEN(1)
SIMT_SEEN(2)
SIMT_SEEN(4)
SIMT_SEEN(8)
SIMT_SEEN(16)
