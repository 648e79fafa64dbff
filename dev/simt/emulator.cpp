// emulator.cpp: fibers, the scheduler of a block, warp operations, shared memory. See emulator.h; internal.h says why
// this file is compiled without sanitizers.
//
// A warp has three sets of lanes: live, ready, waiting. A lane that reaches a warp operation puts a slot on its stack
// and waits. The last lane of the mask computes the results of all and makes all lanes ready. If no thread is ready but
// some are live, the block is deadlocked. This file does not allocate while fibers run, because sanitizers intercept
// operator new.
#include "internal.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <vector>

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

// Whether the environment variable has its second value, with an optional seed (SIMT_ORDER=random:7). Refuses unknown
// values, so that a misspelt one does not count as the default.
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
    if (*end == ':') c.first_gpu = int(strtol(end + 1, &end, 10));
    if (!*end && c.gpus > 0 && c.first_gpu >= 0) return;
    fprintf(stderr, "emulator: SIMT_DEVICES=%s is not known\n", text);
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
    const char* order = getenv("SIMT_ORDER");
    if (setting("SIMT_ORDER", "forward", "random", &c.order_seed)) c.order = Order::random;
    if (order && strcmp(order, "reverse") == 0) c.order = Order::reverse;
    read_failure(c);
    c.eager_cp_async = setting("SIMT_CP_ASYNC", "lazy", "eager", nullptr);
    c.deferred_streams = setting("SIMT_STREAMS", "now", "deferred", &c.stream_seed);
    return c;
}

Config config = config_from_environment();

constexpr size_t PAGE = 4096;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t STATIC_BYTES = 64 << 10;   // memory for static shared variables, with red zones between them
constexpr size_t DEFAULT_LIMIT = 48 << 10;  // static and dynamic shared memory of a kernel that has not opted in
constexpr size_t BLOCK_LIMIT = 227 << 10;   // static and dynamic shared memory of a block on sm_90
constexpr size_t SHARED_BYTES = STATIC_BYTES + (256 << 10);
constexpr size_t RED_ZONE = 32;
constexpr int MAX_STATICS = 64, MAX_COPIES = 256, MAX_GROUPS = 16;

enum class State : uint8_t { fresh, ready, at_warp_operation, at_barrier, done };
enum class Op : uint8_t { barrier, shuffle, ballot, match, mma, ldmatrix };

// A lane's operands of a warp operation, and its result.
struct Slot {
    Op op;
    uint64_t bits[2] = {};                      // shuffle, match: the value; ballot: the vote; ldmatrix: the row
    uint64_t result = 0;                        // shuffle, ballot, match
    int source_lane = 0;                        // shuffle
    const uint32_t *a = nullptr, *b = nullptr;  // mma
    float* acc = nullptr;                       // mma
    uint32_t* registers = nullptr;              // ldmatrix
    bool transpose = false;                     // ldmatrix
};

struct Thread {
    uint3 index{};
    int warp = 0, lane = 0;
    State state = State::fresh;
    Site site{};  // the last operation in which the thread could have waited
    unsigned mask = 0;
    Slot* slot = nullptr;

    void* stack_pointer = nullptr;
    char* stack = nullptr;
    void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber is not running
    // Even and odd blocks use different ThreadSanitizer fibers and stacks, so that ThreadSanitizer does not see
    // consecutive blocks as ordered.
    void* tsan_fiber[2] = {};
    char* tsan_stack[2] = {};

    Copy copies[MAX_COPIES];  // pending cp.async copies, oldest first
    int num_copies = 0, num_groups = 0, group_end[MAX_GROUPS];
};

struct Warp {
    unsigned live = 0, ready = 0, waiting = 0;
    char edge = 0;
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
    int current_warp = 0, live = 0;
    uint64_t random_state = 1;
    int parity = 0;
    Call* call = nullptr;
    Site launch{};

    // The host context, which runs the grid.
    void* host_stack_pointer = nullptr;
    void* host_fake_stack = nullptr;
    const void* host_bottom = nullptr;
    size_t host_size = 0;
    void* host_tsan_fiber = nullptr;

    // __syncthreads. Consecutive barriers use different edges; otherwise a thread that arrives at the next barrier
    // would be ordered before a thread that leaves this one late.
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

static Block* running = nullptr;
static char fence_edge;

static unsigned lane_bit(int lane) { return 1u << lane; }

template <class F>
static void for_each_lane(unsigned mask, F f) {
    for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
}

char* map_memory(size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) report("mmap failed", {__FILE__, __LINE__});
    return static_cast<char*>(p);
}

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

// Scheduling: the next thread stays in the current warp while one of its lanes is ready, then comes from the next warp
// (with Order::random, from a random warp). Null if no thread is ready.

static unsigned next_random(Block& b) {
    uint64_t& x = b.random_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return unsigned(x * 0x2545f4914f6cdd1dull >> 32);
}

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

static void yield(Block& b) {
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
    if (b.arrived) report("a thread ends while others of its block wait in __syncthreads", b.barrier);
    Warp& w = b.warps[size_t(self.warp)];
    for_each_lane(w.waiting, [&](int lane) {
        const Thread& t = b.at(self.warp, lane);
        if (t.mask & lane_bit(self.lane)) report("a lane ends that a warp operation waits for", t.site);
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

// MemorySanitizer calls __msan_default_options at start. It is to check kernels and device memory, which the emulator
// poisons. It does not check host memory, because libstdc++ is not instrumented and its writes would all be reported.
// The heap is therefore not poisoned, and of the stacks only those of fibers (--wrap in the Makefile redirects the call
// to the function below).
extern "C" const char* __msan_default_options() { return "poison_in_malloc=0:poison_in_free=0"; }
extern "C" __attribute__((weak)) void __real___msan_poison_stack(void* p, size_t bytes);
extern "C" void __wrap___msan_poison_stack(void* p, size_t bytes) {
    if (running) __real___msan_poison_stack(p, bytes);
}

// Warp operations.

static float widened(uint32_t pair, int half) { return std::bit_cast<float>(half ? pair & 0xffff0000u : pair << 16); }

static void compute_mma(Slot** slots) {
    float A[16][16], B[16][8], D[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Slot& s = *slots[lane];
        const int g = lane / 4, t = lane % 4 * 2;
        for (int h = 0; h < 2; h++) {
            A[g][t + h] = widened(s.a[0], h);
            A[g + 8][t + h] = widened(s.a[1], h);
            A[g][t + 8 + h] = widened(s.a[2], h);
            A[g + 8][t + 8 + h] = widened(s.a[3], h);
            B[t + h][g] = widened(s.b[0], h);
            B[t + 8 + h][g] = widened(s.b[1], h);
            D[g][t + h] = s.acc[h];
            D[g + 8][t + h] = s.acc[2 + h];
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4 * 2;
        for (int h = 0; h < 2; h++) {
            slots[lane]->acc[h] = D[g][t + h];
            slots[lane]->acc[2 + h] = D[g + 8][t + h];
        }
    }
}

static void compute_ldmatrix(Slot** slots) {
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4 * 2;
        for (int j = 0; j < 4; j++) {
            uint32_t pair = 0;
            for (int h = 0; h < 2; h++) {
                const int row = slots[lane]->transpose ? t + h : g, column = slots[lane]->transpose ? g : t + h;
                const uint64_t four = slots[j * 8 + row]->bits[column / 4];
                pair |= uint32_t(four >> (column % 4 * 16) & 0xffff) << (16 * h);
            }
            slots[lane]->registers[j] = pair;
        }
    }
}

static void compute(Op op, Slot** slots, unsigned lanes, Site site) {
    if ((op == Op::mma || op == Op::ldmatrix) && lanes != ~0u) report("a tensor-core operation needs 32 lanes", site);
    if (op == Op::mma) compute_mma(slots);
    if (op == Op::ldmatrix) compute_ldmatrix(slots);
    if (op == Op::shuffle)
        for_each_lane(lanes, [&](int lane) {
            const int source = slots[lane]->source_lane;
            if (source < 0 || source > 31 || !slots[source])
                report("a shuffle reads a lane that does not take part", site);
            slots[lane]->result = slots[source]->bits[0];
        });
    if (op == Op::ballot || op == Op::match)
        for_each_lane(lanes, [&](int lane) {
            const uint64_t value = op == Op::ballot ? 1 : slots[lane]->bits[0];
            for_each_lane(lanes, [&](int other) {
                if (slots[other]->bits[0] == value) slots[lane]->result |= lane_bit(other);
            });
        });
}

// Returns when all lanes of the mask have called it. Shuffles and votes create no happens-before edge, because in CUDA
// they do not order memory accesses.
static void warp_operation(unsigned mask, Slot& slot, Site site) {
    Block& b = *running;
    Thread& self = *b.current;
    Warp& w = b.warps[size_t(self.warp)];
    self.site = site;
    if (!(mask & lane_bit(self.lane))) report("the calling lane is not in its own mask", site);
    if (mask & ~w.live) report("the mask names a lane that has ended or does not exist", site);
    self.mask = mask;
    self.slot = &slot;
    self.state = State::at_warp_operation;
    w.waiting |= lane_bit(self.lane);
    w.ready &= ~lane_bit(self.lane);
    if ((w.waiting & mask) == mask) {
        Slot* slots[32] = {};
        for_each_lane(mask, [&](int lane) {
            const Thread& t = b.at(self.warp, lane);
            if (t.slot->op != slot.op || t.mask != mask || t.site.line != site.line)
                report("lanes of one mask meet in different warp operations", site);
            slots[lane] = t.slot;
        });
        compute(slot.op, slots, mask, site);
        w.waiting &= ~mask;
        w.ready |= mask;
    }
    yield(b);
}

void warp_barrier(unsigned mask, Site site) {
    char* edge = &running->warps[size_t(running->current->warp)].edge;
    Slot slot{.op = Op::barrier};
    release(edge);
    warp_operation(mask, slot, site);
    acquire(edge);
}

uint64_t shuffle(unsigned mask, uint64_t bits, int source_lane, Site site) {
    Slot slot{.op = Op::shuffle, .bits = {bits}, .source_lane = source_lane};
    warp_operation(mask, slot, site);
    return slot.result;
}

unsigned ballot(unsigned mask, bool vote, Site site) {
    Slot slot{.op = Op::ballot, .bits = {vote}};
    warp_operation(mask, slot, site);
    return unsigned(slot.result);
}

unsigned match(unsigned mask, uint64_t bits, Site site) {
    Slot slot{.op = Op::match, .bits = {bits}};
    warp_operation(mask, slot, site);
    return unsigned(slot.result);
}

void mma(float* acc, const uint32_t* a, const uint32_t* b, Site site) {
    Slot slot{.op = Op::mma, .a = a, .b = b, .acc = acc};
    warp_operation(~0u, slot, site);
}

void ldmatrix(uint32_t* registers, bool transpose, uint64_t low, uint64_t high, Site site) {
    Slot slot{.op = Op::ldmatrix, .bits = {low, high}, .registers = registers, .transpose = transpose};
    warp_operation(~0u, slot, site);
}

int lane() { return running->current->lane; }

int block_barrier(bool vote, Site site) {
    Block& b = *running;
    Thread& self = *b.current;
    self.site = site;
    if (b.live != b.num_threads) report("__syncthreads after a thread of the block has ended", site);
    if (b.arrived && (b.barrier.line != site.line || strcmp(b.barrier.file, site.file) != 0))
        report("threads of one block meet in different __syncthreads", site);
    b.barrier = site;
    b.votes += vote;
    self.state = State::at_barrier;
    b.warps[size_t(self.warp)].ready &= ~lane_bit(self.lane);
    char* edge = &b.barrier_edge[b.phase];
    release(edge);
    if (++b.arrived == b.num_threads) {
        b.result = b.votes;
        b.arrived = b.votes = 0;
        b.phase ^= 1;
        for (Warp& w : b.warps) w.ready = w.live;
    }
    yield(b);
    acquire(edge);
    return b.result;
}

// ThreadSanitizer does not know fences. All fences release one edge, which atomics acquire.
void fence() {
    release(&fence_edge);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}
void acquire_fences() { acquire(&fence_edge); }

// Shared memory, with red zones, and with no better alignment than CUDA guarantees.

// A kernel's static variables count, so the check is repeated for each of them.
static void check_shared_bytes(const Block& b) {
    if (b.static_bytes > DEFAULT_LIMIT) report("more static shared memory than the 48 KiB of a kernel", b.launch);
    if (b.dynamic_bytes > std::max(DEFAULT_LIMIT - b.static_bytes, b.max_dynamic))
        report("static and dynamic shared memory above 48 KiB, without cudaFuncSetAttribute", b.launch);
    if (b.static_bytes + b.dynamic_bytes > BLOCK_LIMIT)
        report("more static and dynamic shared memory than the 227 KiB of a block", b.launch);
}

void* shared_variable(const void* key, const char* name, size_t bytes, size_t align) {
    Block& b = *running;
    for (int i = 0; i < b.num_statics; i++)
        if (b.statics[i].key == key) return b.statics[i].address;
    const size_t start = (b.static_end + RED_ZONE + 15) / 16 * 16 + (align < 16 ? align : 0);
    b.static_bytes += bytes;
    check_shared_bytes(b);
    if (start + bytes + RED_ZONE > STATIC_BYTES || b.num_statics == MAX_STATICS)
        report("more static shared variables than the emulator has room for", {name, 0});
    char* p = b.shared + start;
    b.static_end = start + bytes;
    unpoison(p, bytes);
    fill(p, uninitialized, bytes);
    mark_uninitialized(p, bytes);
    b.statics[b.num_statics++] = {key, name, p, bytes};
    return p;
}

void* dynamic_shared_memory() { return running->dynamic; }

bool is_shared(const void* address, size_t bytes) {
    const char *p = static_cast<const char*>(address), *shared = running->shared, *dynamic = running->dynamic;
    return (p >= dynamic && p + bytes <= dynamic + running->dynamic_bytes) ||
           (p >= shared && p + bytes <= shared + running->static_end);
}

static void reset_shared_memory(Block& b) {
    b.num_statics = 0;
    b.static_end = b.static_bytes = 0;
    if (detects_races()) {  // a new mapping makes ThreadSanitizer forget the previous block's accesses, without an edge
        constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap(b.shared, SHARED_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    }
    poison(b.shared, SHARED_BYTES);
    unpoison(b.dynamic, b.dynamic_bytes);
    fill(b.shared, red_zone_byte, b.dynamic + b.dynamic_bytes + RED_ZONE - b.shared);
    fill(b.dynamic, uninitialized, b.dynamic_bytes);
    mark_uninitialized(b.dynamic, b.dynamic_bytes);
}

// For builds without AddressSanitizer. (AddressSanitizer reports the line of the access.)
static void check_red_zones(const Block& b) {
    for (int i = 0; i < b.num_statics; i++) {
        const SharedVariable& v = b.statics[i];
        if (!red_zone_is_intact(v.address - RED_ZONE, RED_ZONE) || !red_zone_is_intact(v.address + v.bytes, RED_ZONE))
            report("a block wrote around its shared variable", {v.name, 0});
    }
    if (!red_zone_is_intact(b.dynamic + b.dynamic_bytes, RED_ZONE) ||
        !red_zone_is_intact(b.dynamic - RED_ZONE, RED_ZONE))
        report("a block wrote around its dynamic shared memory", b.launch);
}

// cp.async.

void cp_async_begin(Copy copy, Site site) {
    Thread& t = *running->current;
    t.site = site;
    if (t.num_copies == MAX_COPIES) report("too many cp.async copies under way", site);
    t.copies[t.num_copies++] = copy;
}

void cp_async_commit() {
    Thread& t = *running->current;
    if (t.num_groups == MAX_GROUPS) report("too many cp.async groups under way", t.site);
    t.group_end[t.num_groups++] = t.num_copies;
}

// Keeps the compiler from replacing a loop by memmove, which ThreadSanitizer intercepts even in this file.
static void keep_loop() { asm volatile("" ::: "memory"); }

bool cp_async_next(int groups_kept, Copy* copy) {
    Thread& t = *running->current;
    while (t.num_groups > groups_kept && t.group_end[0] == 0) {  // the oldest group is complete
        t.num_groups--;
        for (int i = 0; i < t.num_groups; i++, keep_loop()) t.group_end[i] = t.group_end[i + 1];
    }
    if (t.num_groups <= groups_kept) return false;
    *copy = t.copies[0];
    t.num_copies--;
    for (int i = 0; i < t.num_copies; i++, keep_loop()) t.copies[i] = t.copies[i + 1];
    for (int i = 0; i < t.num_groups; i++) t.group_end[i]--;
    return true;
}

// Running a block, and a grid: one block after another.

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
    if (b.live) report("deadlock: every thread that lives waits", b.barrier);
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
    const uint64_t threads = uint64_t(size.x) * size.y * size.z;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || threads < 1 || threads > 1024 ||
        size.z > 64 || shared_bytes < 0 || shared_bytes > int64_t(BLOCK_LIMIT))
        report("a launch with a grid, block or shared memory that no GPU has", launch);
    prepare_threads(b, size);
    if (!b.shared) b.shared = map_memory(SHARED_BYTES);
    b.dynamic = b.shared + STATIC_BYTES + 16;  // aligned to 16 bytes, but not to 32
    b.dynamic_bytes = size_t(shared_bytes);
    b.max_dynamic = size_t(max_dynamic);
    b.static_bytes = 0;
    b.call = call;
    b.launch = launch;
    check_shared_bytes(b);
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
