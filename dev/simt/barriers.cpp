// barriers.cpp: mbarriers with their phases, named barriers, clusters, setmaxnreg's pool of registers and the proxy
// fence.
#include "engines.h"

namespace simt {

Barrier& barrier_at(const Block& b, const uint64_t* at, Site site) {
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

void settle(Block& b, Barrier& bar, Site site) {
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

int live_threads(const Block& leader) {
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

}  // namespace simt
