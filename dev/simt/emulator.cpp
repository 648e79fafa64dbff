// emulator.cpp: settings, reports, fibers, and the scheduler that runs the threads of a block and the blocks of a grid.
// See emulator.h. internal.h says why this file is compiled without sanitizers.
//
// If no thread of a block is ready but some are live, the block is deadlocked. This file does not allocate while fibers
// run, because sanitizers intercept operator new.
#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "the emulator switches stacks for x86-64 only"
#endif

// Switches stacks: pushes the callee-saved registers, stores rsp in *save, loads rsp from `load`, pops the registers
// there and returns there.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
constexpr int SAVED_REGISTERS = 6;

uint3 threadIdx{}, blockIdx{};
dim3 blockDim, gridDim;

namespace simt {

// Ends the program, so that a misspelt value is not taken for the default.
[[noreturn]] static void refuse(const char* variable) {
    fprintf(stderr, "emulator: %s=%s is not known\n", variable, getenv(variable));
    exit(2);
}

// The index of the environment variable's value among the words, without a value 0. The last word may have a seed, as
// SIMT_ORDER=random:7.
static int word_of(const char* variable, const std::vector<std::string>& words, uint64_t* seed = nullptr) {
    const char* text = getenv(variable);
    if (!text) return 0;
    for (size_t i = 0; i < words.size(); i++)
        if (text == words[i]) return int(i);
    const std::string with_seed = words.back() + ":";
    if (!seed || strncmp(text, with_seed.c_str(), with_seed.size()) != 0) refuse(variable);
    *seed = strtoull(text + with_seed.size(), nullptr, 10);
    return int(words.size()) - 1;
}

// A number of at least 1.
static int64_t number_of(const char* variable, int64_t otherwise) {
    const char* text = getenv(variable);
    if (!text) return otherwise;
    char* end = nullptr;
    const int64_t number = strtoll(text, &end, 10);
    if (*end || number < 1) refuse(variable);
    return number;
}

static Config config_from_environment() {
    Config c;
    c.gpus = int(number_of("SIMT_DEVICES", c.gpus));
    c.compute_capability = int(number_of("SIMT_ARCH", c.compute_capability));
    if (gpu_limits(c.compute_capability).capability != c.compute_capability) refuse("SIMT_ARCH");
    c.order = Order(word_of("SIMT_ORDER", {"forward", "reverse", "random"}, &c.order_seed));
    c.async = Async(word_of("SIMT_ASYNC", {"late", "early", "random"}, &c.async_seed));
    const char* fails = getenv("SIMT_FAIL");
    c.fail_in_capture = fails && strcmp(fails, "capture") == 0;
    if (!c.fail_in_capture) c.fail_at = number_of("SIMT_FAIL", c.fail_at);
    c.deferred_streams = word_of("SIMT_STREAMS", {"now", "deferred"}, &c.stream_seed) == 1;
    c.gpu_math = word_of("SIMT_MATH", {"exact", "gpu"}) == 1;
#ifndef SIMT_FUSED
    if (c.gpu_math) fprintf(stderr, "emulator: SIMT_MATH=gpu needs programs that `make emulator MATH=gpu` has built\n");
    if (c.gpu_math) exit(2);
#endif
    if (c.gpu_math) fprintf(stderr, "arithmetic: gpu\n");
    return c;
}

Config config = config_from_environment();

constexpr size_t PAGE = 4096;
constexpr size_t STACK_BYTES = 256 << 10;

Block* running = nullptr;
// Reports.

static void print_waiting_threads(const Block& b) {
    constexpr int max_places = 4;
    Site places[max_places];
    int waiting = 0, shown = 0;
    for (int i = 0; i < b.num_threads; i++) {
        const Thread& t = b.threads[size_t(i)];
        if (t.state != State::at_warp_operation && t.state != State::at_barrier && t.state != State::blocked) continue;
        waiting++;
        bool new_place = shown < max_places;
        for (int k = 0; k < shown; k++) new_place = new_place && places[k].line != t.site.line;
        if (!new_place) continue;
        places[shown++] = t.site;
        fprintf(stderr, "    thread (%u, %u, %u) waits %s at %s:%d\n", t.index.x, t.index.y, t.index.z,
                t.state == State::at_barrier ? "for its block"
                : t.state == State::blocked  ? t.waits
                                             : "for its warp",
                t.site.file, t.site.line);
    }
    if (waiting) fprintf(stderr, "    %d threads wait\n", waiting);
}

void report(const char* what, Site site) {
    static const char *const orders[] = {"forward", "reverse", "random"}, *const asyncs[] = {"late", "early", "random"};
    fflush(stdout);
    fprintf(stderr, "emulator: %s\n    at %s:%d\n", what, site.file, site.line);
    if (running) {
        const Block& leader = *running->leader;
        fprintf(stderr, "    block (%u, %u, %u), thread (%u, %u, %u) of the launch at %s:%d\n", blockIdx.x, blockIdx.y,
                blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, leader.launch.file, leader.launch.line);
        for (int i = 0; i < leader.blocks; i++) {
            const Block& b = *leader.cluster[size_t(i)];
            if (leader.blocks > 1) fprintf(stderr, "    block (%u, %u, %u)\n", b.index.x, b.index.y, b.index.z);
            print_waiting_threads(b);
            if (b.uses_engines) print_engines(b);
        }
    }
    fprintf(stderr, "    order %s, order seed %llu, async %s, async seed %llu, streams %s, stream seed %llu\n",
            orders[int(config.order)], static_cast<unsigned long long>(config.order_seed), asyncs[int(config.async)],
            static_cast<unsigned long long>(config.async_seed), config.deferred_streams ? "deferred" : "now",
            static_cast<unsigned long long>(config.stream_seed));
    abort();
}

// Scheduling.

unsigned next_random(uint64_t& x) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return unsigned(x * 0x2545f4914f6cdd1dull >> 32);
}

// The warp to look at first in random order. Where warpgroups wait for each other by the instructions of Hopper, one of
// them is preferred for some time: some bugs show only if it runs ahead.
static int random_warp(Block& leader, int warps) {
    if (!leader.uses_engines) return int(next_random(leader.random_state) % unsigned(warps));
    if (leader.picks++ % 4096 == 0) {
        const unsigned group = next_random(leader.random_state) % unsigned(2 * ((warps + 3) / 4));
        leader.preferred = int(group) * 4 < warps ? int(group) * 4 : -1;
    }
    const unsigned random = next_random(leader.random_state);
    if (leader.preferred >= 0 && random % 8) return (leader.preferred + int(random >> 8) % 4) % warps;
    return int((random >> 8) % unsigned(warps));
}

// The thread to run next: one of the current warp if any of its lanes is ready, else one of the next warp. With
// Order::random the warp is random too. Null if no thread is ready.
static Thread* pick_ready(Block& leader) {
    const int warps = int(leader.all_warps.size());
    const bool forward = config.order != Order::reverse, random = config.order == Order::random;
    if (random) leader.current_warp = random_warp(leader, warps);
    for (int i = 0; i < warps; i++) {
        const Warp& w = *leader.all_warps[size_t(leader.current_warp)];
        if (w.ready) {
            const int rotation = random ? int(next_random(leader.random_state) % 32) : 0;
            const int lane =
                forward ? std::countr_zero(std::rotr(w.ready, rotation)) + rotation : 31 - std::countl_zero(w.ready);
            return w.lanes + lane % 32;
        }
        leader.current_warp = (leader.current_warp + (forward ? 1 : warps - 1)) % warps;
    }
    return nullptr;
}

static Thread* pick(Block& leader) {
    if (!leader.uses_engines) return pick_ready(leader);
    run_engines_at_random(leader);
    for (;;) {
        Thread* t = pick_ready(leader);
        if (t || !run_engines_if_all_wait(leader)) return t;
    }
}

// Fibers.

char* map_memory(size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) report("mmap failed", {__FILE__, __LINE__});
    return static_cast<char*>(p);
}

static char* new_stack() {
    char* p = map_memory(PAGE + STACK_BYTES);
    mprotect(p, PAGE, PROT_NONE);  // a stack overflow faults
    return p + PAGE;
}

static void fiber_main();

static void prepare_stack(Block& leader, Thread& t) {
    if (detects_races()) {
        t.stack = t.tsan_stack[leader.parity];
    } else if (leader.free_stacks.empty()) {
        t.stack = new_stack();
    } else {
        t.stack = leader.free_stacks.back();
        leader.free_stacks.pop_back();
    }
    // Different offsets spread the hot ends of the stacks over the sets of the cache.
    const size_t stagger = size_t(&t - t.block->threads.data()) * 64 % 2048;
    void** sp = reinterpret_cast<void**>(t.stack + STACK_BYTES - stagger);
    *--sp = nullptr;  // makes rsp 16 n + 8 on entry, as after a call
    *--sp = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < SAVED_REGISTERS; i++) *--sp = nullptr;
    t.stack_pointer = sp;
}

static void enter(Thread& t) {
    running = t.block;
    running->current = &t;
    t.state = State::ready;
    threadIdx = t.index;
    blockIdx = running->index;
}

// Switches from the running context to thread t, or to the host if t is null. fake_stack: null if the running context
// will never be resumed.
static void jump(Block& leader, void** stack_pointer, void** fake_stack, Thread* t) {
    if (t && t->state == State::fresh) prepare_stack(leader, *t);
    void* to = t ? t->stack_pointer : leader.host_stack_pointer;
    const void* bottom = t ? t->stack : leader.host_bottom;
    const size_t size = t ? STACK_BYTES : leader.host_size;
    if (t) enter(*t);
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake_stack, bottom, size);
    if (__msan_start_switch_fiber) __msan_start_switch_fiber(bottom, size);
    switch_tsan_fiber(t ? t->tsan_fiber[leader.parity] : leader.host_tsan_fiber);
    simt_switch(stack_pointer, to);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(fake_stack ? *fake_stack : nullptr, nullptr, nullptr);
    if (__msan_finish_switch_fiber) __msan_finish_switch_fiber(nullptr, nullptr);
}

void yield(Block& b) {
    Thread& self = *b.current;
    Thread* next = pick(*b.leader);
    if (next == &self)
        self.state = State::ready;
    else
        jump(*b.leader, &self.stack_pointer, &self.fake_stack, next);
}

void block_until_woken(const void* key, const char* what, Site site) {
    Block& b = *running;
    Thread& self = *b.current;
    Warp& w = b.warps[size_t(self.warp)];
    self.site = site;
    self.key = key;
    self.waits = what;
    self.state = State::blocked;
    w.ready &= ~lane_bit(self.lane);
    w.blocked |= lane_bit(self.lane);
    yield(b);
}

void wake(Block& b, const void* key) {
    for (Warp* w : b.leader->all_warps)
        for_each_lane(w->blocked, [&](int lane) {
            if (w->lanes[lane].key != key) return;
            w->blocked &= ~lane_bit(lane);
            w->ready |= lane_bit(lane);
        });
}

// Ends a thread. Reports a bug if another thread waits for it.
static void retire(Block& b, Thread& self) {
    if (self.num_copies) report("a thread ends with cp.async copies that it never waited for", self.site);
    if (b.uses_engines) check_engines_at_end(self);
    if (b.arrived) report("a thread ends while other threads of its block wait in __syncthreads", b.barrier);
    Warp& w = b.warps[size_t(self.warp)];
    for_each_lane(w.waiting, [&](int lane) {
        const Thread& t = b.at(self.warp, lane);
        if (t.mask & lane_bit(self.lane)) report("a lane ends while a warp operation waits for it", t.site);
    });
    self.state = State::done;
    w.live &= ~lane_bit(self.lane);
    w.ready &= w.live;
    b.live--;
}

static void fiber_main() {
    Block& leader = *running->leader;
    const void* old_bottom = nullptr;
    size_t old_size = 0;
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &old_bottom, &old_size);
    if (__msan_finish_switch_fiber) __msan_finish_switch_fiber(&old_bottom, &old_size);
    if (!leader.host_bottom) {  // the host started the first fiber, so the old stack is the host's
        leader.host_bottom = old_bottom;
        leader.host_size = old_size;
    }
    for (;;) {
        Thread& self = *running->current;
        acquire(&leader.start_edge);
        leader.call->run();
        release(&leader.end_edge);
        retire(*self.block, self);
        Thread* next = pick(leader);
        if (next && next->state == State::fresh && !detects_races()) {  // runs on this stack, without a switch
            next->stack = self.stack;
            enter(*next);
            continue;
        }
        if (!detects_races()) leader.free_stacks.push_back(self.stack);
        jump(leader, &self.stack_pointer, nullptr, next);
    }
}

// MemorySanitizer calls __msan_default_options at start. It shall check kernels and device memory, which the emulator
// poisons. It shall not check host memory: libstdc++ is not instrumented, so memory that it writes would be reported as
// uninitialised. Therefore the heap is not poisoned, and only the stacks of fibers are. (--wrap in mk/sanitize.mk
// redirects calls of __msan_poison_stack to the function below.)
extern "C" const char* __msan_default_options() { return "poison_in_malloc=0:poison_in_free=0"; }
extern "C" __attribute__((weak)) void __real___msan_poison_stack(void* p, size_t bytes);
extern "C" void __wrap___msan_poison_stack(void* p, size_t bytes) {
    if (running) __real___msan_poison_stack(p, bytes);
}

// Blocks, clusters and grids. The clusters of a grid run one after another; without clusters its blocks do.
static void start_block(Block& b, uint3 index) {
    const int threads = b.num_threads, warps = int(b.warps.size());
    for (int w = 0; w < warps; w++) {
        const int lanes = threads - w * 32;
        const unsigned all = lanes >= 32 ? ~0u : lane_bit(lanes) - 1;
        b.warps[size_t(w)] = {.live = all, .ready = all, .lanes = &b.at(w, 0)};
    }
    for (Thread& t : b.threads) {
        t.state = State::fresh;
        t.num_copies = 0;
        t.num_groups = 0;
    }
    b.index = index;
    b.live = threads;
    b.arrived = 0;
    reset_shared_memory(b);
    reset_engines(b);
}

static void run_cluster(Block& leader, uint3 first) {
    for (int i = 0; i < leader.blocks; i++)
        start_block(*leader.cluster[size_t(i)], {first.x + unsigned(i), first.y, first.z});
    leader.current_warp = config.order == Order::reverse ? int(leader.all_warps.size()) - 1 : 0;
    leader.parity ^= 1;
    release(&leader.start_edge);
    jump(leader, &leader.host_stack_pointer, &leader.host_fake_stack, pick(leader));
    for (int i = 0; i < leader.blocks; i++) {
        Block& b = *leader.cluster[size_t(i)];
        if (b.live) report("deadlock: every live thread waits", b.arrived ? b.barrier : running->current->site);
    }
    for (int i = 0; i < leader.blocks; i++) {
        check_engines(*leader.cluster[size_t(i)]);
        check_red_zones(*leader.cluster[size_t(i)]);
    }
}

Block* create_block() { return new Block; }

static void prepare_threads(Block& b, dim3 size) {
    const size_t count = size_t(size.x) * size.y * size.z;
    b.threads.resize(std::max(count, b.threads.size()));
    b.num_threads = int(count);
    b.warps.resize((count + 31) / 32);
    for (unsigned i = 0; i < count; i++) {
        Thread& t = b.threads[i];
        t.block = &b;
        t.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        t.warp = int(i / 32);
        t.lane = int(i % 32);
        for (int p = 0; p < 2 && detects_races() && !t.tsan_stack[p]; p++) {
            t.tsan_stack[p] = new_stack();
            t.tsan_fiber[p] = __tsan_create_fiber(0);
            __tsan_set_fiber_name(t.tsan_fiber[p], "CUDA thread");
        }
    }
    prepare_engines(b);
}

static void prepare_cluster(Block& leader, int blocks, dim3 size, int64_t shared_bytes, int64_t max_dynamic) {
    leader.blocks = blocks;
    leader.all_warps.clear();
    leader.free_stacks.reserve(size_t(1024 * blocks));
    while (int(leader.cluster.size()) < blocks) leader.cluster.push_back(create_block());
    for (int i = 0; i < blocks; i++) {
        Block& b = *leader.cluster[size_t(i)];
        b.leader = &leader;
        b.blocks = blocks;
        b.rank = i;
        b.launch = leader.launch;
        prepare_threads(b, size);
        allocate_shared_memory(b, shared_bytes, max_dynamic);
        for (Warp& w : b.warps) leader.all_warps.push_back(&w);
    }
}

void run_grid(Block* block, Call* call, dim3 grid, dim3 size, int64_t shared_bytes, int64_t max_dynamic, Site launch) {
    Block& leader = *block;
    leader.call = call;
    leader.launch = launch;
    leader.current = nullptr;
    prepare_cluster(leader, call->cluster, size, shared_bytes, max_dynamic);
    leader.random_state = config.order_seed * 0x9e3779b97f4a7c15ull | 1;
    leader.picks = 0;
    leader.preferred = -1;
    leader.async_random = config.async_seed * 0x9e3779b97f4a7c15ull | 1;
    leader.host_tsan_fiber = detects_races() ? __tsan_get_current_fiber() : nullptr;
    blockDim = size;
    gridDim = grid;
    running = &leader;
    const unsigned columns = grid.x / unsigned(call->cluster);
    const uint64_t layer = uint64_t(columns) * grid.y, clusters = layer * grid.z;
    for (uint64_t i = 0; i < clusters; i++) {
        const uint64_t j = config.order == Order::forward ? i : clusters - 1 - i;
        const unsigned x = unsigned(j % columns) * unsigned(call->cluster);
        run_cluster(leader, {x, unsigned(j / columns % grid.y), unsigned(j / layer)});
    }
    running = nullptr;
    acquire(&leader.end_edge);  // once for the grid, because its blocks are not ordered among themselves
}

}  // namespace simt
