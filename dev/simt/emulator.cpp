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

// Whether the environment variable has its second value, which may have a seed (SIMT_ORDER=random:7). Refuses unknown
// values, so that a misspelt one is not taken for the default.
static bool setting(const char* variable, const char* first, const char* second, uint64_t* seed) {
    const char* text = getenv(variable);
    if (!text || strcmp(text, first) == 0) return false;
    const size_t length = strlen(second);
    if (strncmp(text, second, length) == 0 && (!text[length] || (seed && text[length] == ':'))) {
        if (text[length]) *seed = strtoull(text + length + 1, nullptr, 10);
        return true;
    }
    if (strcmp(variable, "SIMT_ORDER") == 0 && strcmp(text, "reverse") == 0) return false;
    fprintf(stderr, "emulator: %s=%s is not known\n", variable, text);
    exit(2);
}

static void read_devices(Config& c) {
    const char* text = getenv("SIMT_DEVICES");
    if (!text) return;
    char* end = nullptr;
    c.gpus = int(strtol(text, &end, 10));
    if (!*end && c.gpus > 0) return;
    fprintf(stderr, "emulator: SIMT_DEVICES=%s is not known\n", text);
    exit(2);
}

static void read_architecture(Config& c) {
    const char* text = getenv("SIMT_ARCH");
    if (!text) return;
    char* end = nullptr;
    c.compute_capability = int(strtol(text, &end, 10));
    if (!*end && gpu_limits(c.compute_capability).capability == c.compute_capability) return;
    fprintf(stderr, "emulator: SIMT_ARCH=%s is not known\n", text);
    exit(2);
}

static void read_failure(Config& c) {
    const char* text = getenv("SIMT_FAIL");
    if (!text) return;
    char* end = nullptr;
    c.fail_in_capture = strcmp(text, "capture") == 0;
    c.fail_at = c.fail_in_capture ? 0 : strtoll(text, &end, 10);
    if (c.fail_in_capture || (*text && !*end && c.fail_at > 0)) return;
    fprintf(stderr, "emulator: SIMT_FAIL=%s is not known\n", text);
    exit(2);
}

static Config config_from_environment() {
    Config c;
    read_devices(c);
    read_architecture(c);
    const char* order = getenv("SIMT_ORDER");
    if (setting("SIMT_ORDER", "forward", "random", &c.order_seed)) c.order = Order::random;
    if (order && strcmp(order, "reverse") == 0) c.order = Order::reverse;
    read_failure(c);
    c.eager_cp_async = setting("SIMT_CP_ASYNC", "lazy", "eager", nullptr);
    c.deferred_streams = setting("SIMT_STREAMS", "now", "deferred", &c.stream_seed);
    c.gpu_math = setting("SIMT_MATH", "exact", "gpu", nullptr);
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
        if (t.state != State::at_warp_operation && t.state != State::at_barrier) continue;
        waiting++;
        bool new_place = shown < max_places;
        for (int k = 0; k < shown; k++) new_place = new_place && places[k].line != t.site.line;
        if (!new_place) continue;
        places[shown++] = t.site;
        fprintf(stderr, "    thread (%u, %u, %u) waits %s at %s:%d\n", t.index.x, t.index.y, t.index.z,
                t.state == State::at_barrier ? "for its block" : "for its warp", t.site.file, t.site.line);
    }
    if (waiting) fprintf(stderr, "    %d threads wait\n", waiting);
}

void report(const char* what, Site site) {
    static const char* const orders[] = {"forward", "reverse", "random"};
    fflush(stdout);
    fprintf(stderr, "emulator: %s\n    at %s:%d\n", what, site.file, site.line);
    if (running) {
        fprintf(stderr, "    block (%u, %u, %u), thread (%u, %u, %u) of the launch at %s:%d\n", blockIdx.x, blockIdx.y,
                blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, running->launch.file, running->launch.line);
        print_waiting_threads(*running);
    }
    fprintf(stderr, "    order %s, order seed %llu, cp.async %s, streams %s, stream seed %llu\n",
            orders[int(config.order)], static_cast<unsigned long long>(config.order_seed),
            config.eager_cp_async ? "eager" : "lazy", config.deferred_streams ? "deferred" : "now",
            static_cast<unsigned long long>(config.stream_seed));
    abort();
}

// Scheduling.

static unsigned next_random(Block& b) {
    uint64_t& x = b.random_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return unsigned(x * 0x2545f4914f6cdd1dull >> 32);
}

// The thread to run next: one of the current warp if any of its lanes is ready, else one of the next warp. With
// Order::random the warp is random too. Null if no thread is ready.
static Thread* pick(Block& b) {
    const int warps = int(b.warps.size());
    const bool forward = config.order != Order::reverse, random = config.order == Order::random;
    if (random) b.current_warp = int(next_random(b) % unsigned(warps));
    for (int i = 0; i < warps; i++) {
        const unsigned ready = b.warps[size_t(b.current_warp)].ready;
        if (ready) {
            const int rotation = random ? int(next_random(b) % 32) : 0;
            const int lane =
                forward ? std::countr_zero(std::rotr(ready, rotation)) + rotation : 31 - std::countl_zero(ready);
            return &b.at(b.current_warp, lane % 32);
        }
        b.current_warp = (b.current_warp + (forward ? 1 : warps - 1)) % warps;
    }
    return nullptr;
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

static void prepare_stack(Block& b, Thread& t) {
    if (detects_races()) {
        t.stack = t.tsan_stack[b.parity];
    } else if (b.free_stacks.empty()) {
        t.stack = new_stack();
    } else {
        t.stack = b.free_stacks.back();
        b.free_stacks.pop_back();
    }
    // Different offsets spread the hot ends of the stacks over the sets of the cache.
    const size_t stagger = size_t(&t - b.threads.data()) * 64 % 2048;
    void** sp = reinterpret_cast<void**>(t.stack + STACK_BYTES - stagger);
    *--sp = nullptr;  // makes rsp 16 n + 8 on entry, as after a call
    *--sp = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < SAVED_REGISTERS; i++) *--sp = nullptr;
    t.stack_pointer = sp;
}

static void enter(Block& b, Thread& t) {
    b.current = &t;
    t.state = State::ready;
    threadIdx = t.index;
}

// Switches from the running context to thread t, or to the host if t is null. fake_stack: null if the running context
// will never be resumed.
static void jump(Block& b, void** stack_pointer, void** fake_stack, Thread* t) {
    if (t && t->state == State::fresh) prepare_stack(b, *t);
    void* to = t ? t->stack_pointer : b.host_stack_pointer;
    const void* bottom = t ? t->stack : b.host_bottom;
    const size_t size = t ? STACK_BYTES : b.host_size;
    if (t) enter(b, *t);
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake_stack, bottom, size);
    if (__msan_start_switch_fiber) __msan_start_switch_fiber(bottom, size);
    switch_tsan_fiber(t ? t->tsan_fiber[b.parity] : b.host_tsan_fiber);
    simt_switch(stack_pointer, to);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(fake_stack ? *fake_stack : nullptr, nullptr, nullptr);
    if (__msan_finish_switch_fiber) __msan_finish_switch_fiber(nullptr, nullptr);
}

void yield(Block& b) {
    Thread& self = *b.current;
    Thread* next = pick(b);
    if (next == &self)
        self.state = State::ready;
    else
        jump(b, &self.stack_pointer, &self.fake_stack, next);
}

// Ends a thread. Reports a bug if another thread waits for it.
static void retire(Block& b, Thread& self) {
    if (self.num_copies) report("a thread ends with cp.async copies that it never waited for", self.site);
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
    Block& b = *running;
    const void* old_bottom = nullptr;
    size_t old_size = 0;
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &old_bottom, &old_size);
    if (__msan_finish_switch_fiber) __msan_finish_switch_fiber(&old_bottom, &old_size);
    if (!b.host_bottom) {  // the host started the first fiber, so the old stack is the host's
        b.host_bottom = old_bottom;
        b.host_size = old_size;
    }
    for (;;) {
        Thread& self = *b.current;
        acquire(&b.start_edge);
        b.call->run();
        release(&b.end_edge);
        retire(b, self);
        Thread* next = pick(b);
        if (next && next->state == State::fresh && !detects_races()) {  // runs on this stack, without a switch
            next->stack = self.stack;
            enter(b, *next);
            continue;
        }
        if (!detects_races()) b.free_stacks.push_back(self.stack);
        jump(b, &self.stack_pointer, nullptr, next);
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

// Blocks and grids. The blocks of a grid run one after another.
static void run_block(Block& b, uint3 index) {
    const int threads = b.num_threads, warps = int(b.warps.size());
    for (int w = 0; w < warps; w++) {
        const int lanes = threads - w * 32;
        const unsigned all = lanes >= 32 ? ~0u : lane_bit(lanes) - 1;
        b.warps[size_t(w)] = {.live = all, .ready = all};
    }
    for (Thread& t : b.threads) {
        t.state = State::fresh;
        t.num_copies = 0;
        t.num_groups = 0;
    }
    blockIdx = index;
    b.live = threads;
    b.arrived = b.votes = 0;
    b.current_warp = config.order == Order::reverse ? warps - 1 : 0;
    b.parity ^= 1;
    reset_shared_memory(b);
    release(&b.start_edge);
    jump(b, &b.host_stack_pointer, &b.host_fake_stack, pick(b));
    if (b.live) report("deadlock: every live thread waits", b.barrier);
    check_red_zones(b);
}

Block* create_block() { return new Block; }

static void prepare_threads(Block& b, dim3 size) {
    const size_t count = size_t(size.x) * size.y * size.z;
    b.threads.resize(std::max(count, b.threads.size()));
    b.num_threads = int(count);
    b.warps.resize((count + 31) / 32);
    b.free_stacks.reserve(1024);
    for (unsigned i = 0; i < count; i++) {
        Thread& t = b.threads[i];
        t.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        t.warp = int(i / 32);
        t.lane = int(i % 32);
        for (int p = 0; p < 2 && detects_races() && !t.tsan_stack[p]; p++) {
            t.tsan_stack[p] = new_stack();
            t.tsan_fiber[p] = __tsan_create_fiber(0);
            __tsan_set_fiber_name(t.tsan_fiber[p], "CUDA thread");
        }
    }
}

void run_grid(Block* block, Call* call, dim3 grid, dim3 size, int64_t shared_bytes, int64_t max_dynamic, Site launch) {
    Block& b = *block;
    prepare_threads(b, size);
    b.call = call;
    b.launch = launch;
    allocate_shared_memory(b, shared_bytes, max_dynamic);
    b.random_state = config.order_seed * 0x9e3779b97f4a7c15ull | 1;
    b.host_tsan_fiber = detects_races() ? __tsan_get_current_fiber() : nullptr;
    blockDim = size;
    gridDim = grid;
    running = &b;
    const uint64_t layer = uint64_t(grid.x) * grid.y, blocks = layer * grid.z;
    for (uint64_t i = 0; i < blocks; i++) {
        const uint64_t j = config.order == Order::forward ? i : blocks - 1 - i;
        run_block(b, {unsigned(j % grid.x), unsigned(j / grid.x % grid.y), unsigned(j / layer)});
    }
    running = nullptr;
    acquire(&b.end_edge);  // once for the grid, because its blocks are not ordered among themselves
}

}  // namespace simt
