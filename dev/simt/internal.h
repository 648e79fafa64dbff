// internal.h: functions shared by the emulator's source files, and the sanitizers' hooks. emulator.cpp, warp.cpp,
// shared_memory.cpp and the files of engines.h run kernels; occupancy.cpp says which launches fit; cudart.cpp,
// streams.cpp and capture.cpp are the CUDA runtime; the others are CUDA's libraries.
//
// The hooks are weak symbols, null unless the program is linked with the sanitizer. The emulator's files are therefore
// compiled once, without -fsanitize, for all sanitizers. They must not be instrumented: AddressSanitizer would report
// the poison of stack frames that never return, and ThreadSanitizer the scheduler itself.
#pragma once
#include "emulator.h"

#include <functional>
#include <string>

extern "C" {
#define SIMT_HOOK __attribute__((weak))
SIMT_HOOK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
SIMT_HOOK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
SIMT_HOOK void __asan_poison_memory_region(const volatile void* p, size_t bytes);
SIMT_HOOK void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
SIMT_HOOK void* __tsan_get_current_fiber();
SIMT_HOOK void* __tsan_create_fiber(unsigned flags);
SIMT_HOOK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
SIMT_HOOK void __tsan_set_fiber_name(void* fiber, const char* name);
SIMT_HOOK void __tsan_acquire(void* address);
SIMT_HOOK void __tsan_release(void* address);
SIMT_HOOK void __tsan_read_range(void* p, unsigned long bytes);
SIMT_HOOK void __tsan_write_range(void* p, unsigned long bytes);
SIMT_HOOK void __tsan_func_entry(void* caller);
SIMT_HOOK void __tsan_func_exit();
SIMT_HOOK void __msan_poison(const volatile void* p, size_t bytes);
SIMT_HOOK void __msan_unpoison(const volatile void* p, size_t bytes);
SIMT_HOOK void* __msan_memcpy(void* to, const void* from, size_t bytes);
SIMT_HOOK intptr_t __msan_test_shadow(const volatile void* p, size_t bytes);
SIMT_HOOK void __msan_start_switch_fiber(const void* bottom, size_t size);
SIMT_HOOK void __msan_finish_switch_fiber(const void** old_bottom, size_t* old_size);
#undef SIMT_HOOK
}

namespace simt {

inline bool detects_races() { return __tsan_create_fiber != nullptr; }

extern bool sees_stores;                     // whether the build shows the emulator all loads and stores
void pass_clock(void* edge, bool acquires);  // clocks.cpp

// A happens-before edge: everything before a release of the address happens before everything after an acquire of it.
inline void acquire(void* address) {
    if (__tsan_acquire) __tsan_acquire(address);
    if (sees_stores) pass_clock(address, true);
}
inline void release(void* address) {
    if (__tsan_release) __tsan_release(address);
    if (sees_stores) pass_clock(address, false);
}
inline void switch_tsan_fiber(void* tsan_fiber) {
    constexpr unsigned no_edge = 1;  // the switch creates no happens-before edge
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(tsan_fiber, no_edge);
}

inline void poison(void* p, size_t bytes) {
    if (__asan_poison_memory_region) __asan_poison_memory_region(p, bytes);
}
inline void unpoison(void* p, size_t bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, bytes);
}
inline void mark_uninitialized(void* p, size_t bytes) {
    if (__msan_poison) __msan_poison(p, bytes);
}

// Not memset: the sanitizer intercepts it and would record a write of the running thread.
inline void fill(void* p, uint8_t value, size_t bytes) {
    asm volatile("rep stosb" : "+D"(p), "+c"(bytes) : "a"(value) : "memory");
}
constexpr uint8_t uninitialized = 0xff;  // a NaN in every floating-point format
constexpr uint8_t red_zone_byte = 0xa5;  // the contents of red zones
inline bool red_zone_is_intact(const char* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (uint8_t(p[i]) != red_zone_byte) return false;
    return true;
}

char* map_memory(size_t bytes);  // zeroed; pages take no memory until they are used

// Queues work that is not a kernel, for example a matmul of cuBLASLt. It takes `ms` milliseconds on the stream's clock.
// It must not access host memory that a sanitizer watches.
//
// Other processes may take part in the work. `attempt` is then called repeatedly, while the host and other streams
// continue, until it returns true. It runs as the host and may access device memory only by copy_uninstrumented, which
// no sanitizer sees. `work` then runs as the stream and reports these accesses to the sanitizers.
void enqueue_work(std::function<void()> work, float ms, struct CUstream_st* stream,
                  std::function<bool()> attempt = nullptr);
// Records device memory that a library allocates for itself and keeps. cudaMemGetInfo does not count it as free.
void take_device_memory(size_t bytes);
bool device_has_failed();  // whether simt::config.fail_at or fail_in_capture has taken effect
void copy_uninstrumented(void* to, const void* from, size_t bytes);
// Reports `wrong` unless p is in device memory, and reports a range that goes beyond its array.
void check_device_range(const void* p, size_t bytes, const char* wrong, Site site);

// A compute capability's threads, blocks and bytes of shared memory of a multiprocessor. CUDA takes reserved_shared for
// each block. A kernel that has not called cudaFuncSetAttribute has default_shared.
struct GpuLimits {
    static constexpr int reserved_shared = 1 << 10, default_shared = 48 << 10;
    int capability, threads, blocks;
    int64_t shared;
    int64_t shared_of_block() const { return shared - reserved_shared; }
};
// capability: 80 for 8.0. Returns the last known one that is not above it.
const GpuLimits& gpu_limits(int capability);
struct KernelUsage {
    std::string name;
    int registers = 0;  // for each thread
    int shared = 0;     // bytes of static shared memory
};
// budget: a text like dev/cuda_budget.txt. A kernel that it does not have takes 0 registers.
KernelUsage usage_in(const char* budget, const std::string& name, int capability);
// Blocks of `threads` threads and `shared_bytes` of dynamic shared memory; 0: not even one fits.
int blocks_per_multiprocessor(const KernelUsage& kernel, int threads, int64_t shared_bytes, int capability);

// The threads of a running block, with their stacks and shared memory. Each stream has its own Block, because to
// ThreadSanitizer the threads i of two streams must be different threads.
struct Block;
Block* create_block();
// max_dynamic: the dynamic shared memory to which the kernel has opted in by cudaFuncSetAttribute, or 0.
void run_grid(Block* block, Call* call, dim3 grid, dim3 size, int64_t shared_bytes, int64_t max_dynamic, Site launch);

}  // namespace simt
