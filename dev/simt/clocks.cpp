// clocks.cpp: the order of stores and loads of shared memory by different warps, in a build that shows the emulator all
// of them (SANITIZE=stores).
//
// A clock says for each warp of the cluster up to which time its stores come before what happens now. Warps, engines
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

static LastStore& last_store(const Block& b, const void* p) {
    return b.engines->stores[static_cast<const char*>(p) - b.shared];
}

void note_last_store(const Block& b, const void* p, size_t bytes, Site site) {
    for (size_t i = 0; i < bytes; i++) last_store(b, static_cast<const char*>(p) + i) = {now, site, number(*b.current)};
}

// Lanes of one warp share a clock, so an order among them is not checked.
void check_last_store(const Block& b, const void* p, size_t bytes, Site site) {
    const int warp = b.current->warp;
    const Clock& own = clock_of(b, warp);
    for (size_t i = 0; i < bytes; i++) {
        const LastStore& store = last_store(b, static_cast<const char*>(p) + i);
        const int writer = store.thread / 32;
        if (store.time <= b.engines->start || writer == warp || own[place(b, writer)] >= store.time) continue;
        const Site from = resolved(store.site);
        report_with(site,
                    "a thread reads what thread %d of another warp has written at %s:%d, and no barrier orders them: "
                    "it needs __syncthreads, a named barrier or mbarrier_wait",
                    store.thread, from.file, from.line);
    }
}

}  // namespace simt
