// hopper.cpp: a model of Hopper's asynchronous instructions (sm_90a) on a CPU: wgmma with its descriptors and swizzles,
// TMA copies with tensor maps and multicast, mbarriers, clusters, named barriers, setmaxnreg and the async proxy.
//
// Such kernels are hard to debug on a GPU, because most mistakes show only as rare wrong numbers. Here a kernel runs as
// ordinary C++, and each rule that it breaks ends the program with a sentence that names the rule and the line:
//   proxies      wgmma and TMA stores read what threads have written only after each writer's fence_proxy_async.
//   phases       who reads what TMA has written must have waited for that phase of its mbarrier. A thread waits once
//                for each phase, since a parity cannot tell a phase from the one before the last.
//   order        a barrier is between accesses of shared memory by threads of two warps, of which one is a store
//                (SANITIZE=stores).
//   overwriting  nobody writes operands of a pending wgmma or the source of a pending store, or what TMA still writes.
//   registers    accumulators belong to wgmma until its wait: they are a NaN meanwhile, which pack_bf16 reports.
//                wgmma_fence must follow each change by the thread. setmaxnreg takes registers from a pool that others
//                must have filled.
//   descriptors  operands begin where their swizzle repeats, lie in shared memory that something has written, and have
//                the rows and columns of a TMA load in order. Products that add to the same accumulators read the
//                same rows of one load.
//   swizzles     what stmatrix has written is read with the swizzle with which its addresses were computed.
//   ends         threads wait for their products and stores; blocks of a cluster outlive arrivals at their mbarriers.
// A deadlock prints what each mbarrier still expects. Other wrong offsets give wrong numbers, as on a GPU.
//
// The copies and products run late (when somebody waits for them), early (at once) or at random (SIMT_ASYNC). Late
// finds the most, for example memory that is reused too early. To ThreadSanitizer each engine (the TMA unit of a block,
// the tensor core of a warpgroup) is a thread: an instruction releases to it, it releases the mbarrier or the wait. So
// it reports races between copies and threads, with both lines. Wrappers show the emulator only some of a kernel's
// stores; a build with SANITIZE=stores (clang) shows it all loads and stores, and then it also checks the order of
// kernels without these instructions (clocks.cpp).
//
// Not modelled: weaker ordering of memory than these rules, convergence within a warp at `.aligned` instructions, time.
#include "engines.h"

namespace simt {

uint64_t now = 0;
bool sees_stores = false;

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
    e.start = ++now;
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

Block& block_with_engines() {
    Block& b = *running;
    if (b.uses_engines) return b;
    for (int i = 0; i < b.blocks; i++) start_engines(*b.leader->cluster[size_t(i)]);
    return b;
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
