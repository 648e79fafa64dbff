// internal.h: what emulator.cpp (threads, blocks, shared memory) and cudart.cpp (memory, streams) share, and the hooks
// of the sanitizers.
//
// The hooks are weak symbols: null unless the program is linked with their sanitizer. So the two files are compiled
// once, without any -fsanitize, and serve every variant. They must not be instrumented: AddressSanitizer would report
// the poison of frames that never return, and ThreadSanitizer the scheduler itself.
#pragma once
#include "emulator.h"

#include <functional>

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
SIMT_HOOK void __msan_poison(const volatile void* p, size_t bytes);
SIMT_HOOK void __msan_start_switch_fiber(const void* bottom, size_t size);
SIMT_HOOK void __msan_finish_switch_fiber(const void** old_bottom, size_t* old_size);
#undef SIMT_HOOK
}

namespace simt {

inline bool detects_races() { return __tsan_create_fiber != nullptr; }

// An edge of happens-before: what comes before a release of the address comes before what follows an acquire of it.
inline void acquire(void* address) {
    if (__tsan_acquire) __tsan_acquire(address);
}
inline void release(void* address) {
    if (__tsan_release) __tsan_release(address);
}
inline void become(void* tsan_fiber) {
    constexpr unsigned no_edge = 1;
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(tsan_fiber, no_edge);
}

inline void forbid(void* p, size_t bytes) {
    if (__asan_poison_memory_region) __asan_poison_memory_region(p, bytes);
}
inline void allow(void* p, size_t bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, bytes);
}
inline void mark_uninitialized(void* p, size_t bytes) {
    if (__msan_poison) __msan_poison(p, bytes);
}

// memset would be the sanitizer's own, a write of the running thread.
inline void fill(void* p, uint8_t value, size_t bytes) {
    asm volatile("rep stosb" : "+D"(p), "+c"(bytes) : "a"(value) : "memory");
}
constexpr uint8_t uninitialized = 0xff;  // a NaN in every floating-point format
constexpr uint8_t untouched = 0xa5;      // what red zones hold
inline bool is_untouched(const char* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (uint8_t(p[i]) != untouched) return false;
    return true;
}

char* map_memory(size_t bytes);  // zeroed; takes no memory until it is touched

// Work of the runtime's own, on the stream, which it is said to take so long: libraries in place of kernels. It must
// not use memory of the host that a sanitizer watches.
void enqueue_work(std::function<void()> work, float ms, struct CUstream_st* stream);
// Work that other processes have a part in: attempted again and again until it says that it is done, while the host
// and other streams go on. The host attempts it, and touches device memory by copy_unseen alone, which no sanitizer
// sees; the work after it, as the stream, tells.
void enqueue_outside(std::function<bool()> attempt, std::function<void()> work, float ms, struct CUstream_st* stream);
void copy_unseen(void* to, const void* from, size_t bytes);
// Reports `wrong` unless p is device memory, and what leaves its array.
void check_device_range(const void* p, size_t bytes, const char* wrong, Site site);

// The threads of one stream's running block, with their stacks and shared memory. A stream keeps its own: to
// ThreadSanitizer thread i of two streams must be two threads.
struct Block;
Block* create_block();
void run_grid(Block* block, Call* call, dim3 grid, dim3 size, int64_t shared_bytes, Site launch);

}  // namespace simt
