// clocks.cpp: the order of loads and stores of shared memory by different warps, in a build that shows the emulator all
// of them (SANITIZE=stores).
//
// A clock says for each warp of the cluster up to which time its accesses come before what happens now. Warps, engines
// and the addresses of happens-before edges have one each. A release adds the warp's clock to the edge's, an acquire
// the edge's to the warp's. Times only grow, so clocks need no reset when a block ends.
#include "engines.h"

#include <array>
#include <unordered_map>

namespace simt {

constexpr size_t MAX_CLUSTER_WARPS = 8 * 32;
using Clock = std::array<uint64_t, MAX_CLUSTER_WARPS>;

const void* running_engine = nullptr;

static Clock& clock_of(const void* owner) {
    static std::unordered_map<const void*, Clock> clocks;
    return clocks[owner];
}
static size_t place(const Block& b, int warp) { return size_t(b.rank) * b.warps.size() + size_t(warp); }
static Clock& clock_of(const Block& b, int warp) { return clock_of(&b.warps[size_t(warp)]); }

void pass_clock(void* edge, bool acquires) {
    if (!running || !running->current) return;
    const Block& b = *running;
    const int warp = b.current->warp;
    Clock &own = running_engine ? clock_of(running_engine) : clock_of(b, warp), &other = clock_of(edge);
    if (!running_engine) own[place(b, warp)] = now;
    Clock &to = acquires ? own : other, &from = acquires ? other : own;
    for (size_t i = 0; i < b.leader->all_warps.size(); i++) to[i] = std::max(to[i], from[i]);
}

// Lanes of one warp share a clock, so an order among them is not checked.
static void check_order(const Block& b, const Access& before, const char* does, const char* did, Site site) {
    const int warp = b.current->warp, other = before.thread / 32;
    if (before.time <= b.engines->start || other == warp) return;
    if (clock_of(b, warp)[place(b, other)] >= before.time) return;
    const Site from = resolved(before.site);
    report_with(site,
                "a thread %s what thread %d of another warp has %s at %s:%d, and no barrier orders them: it needs "
                "__syncthreads, a named barrier or mbarrier_wait",
                does, before.thread, did, from.file, from.line);
}

void note_access(Block& b, const void* p, size_t bytes, bool is_store, Site site) {
    Engines& e = *b.engines;
    const size_t first = size_t(static_cast<const char*>(p) - b.shared);
    for (size_t i = first; i < first + bytes; i++) {
        check_order(b, e.stores[i], is_store ? "overwrites" : "reads", "written", site);
        if (is_store) check_order(b, e.loads[i], "overwrites", "read", site);
        (is_store ? e.stores : e.loads)[i] = {now, site, number(*b.current)};
    }
}

}  // namespace simt
