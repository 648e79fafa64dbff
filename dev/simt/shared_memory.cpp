// shared_memory.cpp: the emulator's shared memory and cp.async. Red zones around the variables detect writes out of
// bounds. Variables are aligned no better than CUDA guarantees, so that code which needs more alignment fails here.
#include "block.h"

#include <algorithm>
#include <sys/mman.h>

namespace simt {

constexpr size_t RED_ZONE = 32;

// Called at the launch, and for each static variable, because the emulator learns of a static variable only when a
// thread reaches its declaration.
static void check_shared_bytes(const Block& b) {
    constexpr size_t DEFAULT_LIMIT = GpuLimits::default_shared;
    if (b.static_bytes > DEFAULT_LIMIT) report("more than 48 KiB of static shared memory in a kernel", b.launch);
    if (b.dynamic_bytes > std::max(DEFAULT_LIMIT - b.static_bytes, b.max_dynamic))
        report("static and dynamic shared memory above 48 KiB, without cudaFuncSetAttribute", b.launch);
    if (b.static_bytes + b.dynamic_bytes > size_t(gpu_limits(config.compute_capability).shared_of_block()))
        report("more static and dynamic shared memory than a block may have on this GPU", b.launch);
}

void allocate_shared_memory(Block& b, int64_t dynamic_bytes, int64_t max_dynamic) {
    if (!b.shared) b.shared = map_memory(SHARED_BYTES);
    b.dynamic_align = 16;
    b.dynamic_bytes = size_t(dynamic_bytes);
    b.max_dynamic = size_t(max_dynamic);
    b.static_bytes = 0;
    check_shared_bytes(b);
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

// Dynamic memory is aligned as asked and no better, thus to 16 bytes but not to 32.
static void place_dynamic_memory(Block& b) {
    b.dynamic = b.shared + STATIC_BYTES + b.dynamic_align;
    poison(b.shared + STATIC_BYTES, SHARED_BYTES - STATIC_BYTES);
    unpoison(b.dynamic, b.dynamic_bytes);
    fill(b.shared + STATIC_BYTES, red_zone_byte, b.dynamic + b.dynamic_bytes + RED_ZONE - (b.shared + STATIC_BYTES));
    fill(b.dynamic, uninitialized, b.dynamic_bytes);
    mark_uninitialized(b.dynamic, b.dynamic_bytes);
}

// The first thread that asks for more than 16 bytes moves the memory, for this block and later ones.
void* dynamic_shared_memory(size_t align) {
    Block& b = *running;
    if (align > b.dynamic_align) {
        b.dynamic_align = align;
        place_dynamic_memory(b);
    }
    return b.dynamic;
}

bool is_shared(const void* address, size_t bytes) {
    const char *p = static_cast<const char*>(address), *shared = running->shared, *dynamic = running->dynamic;
    return (p >= dynamic && p + bytes <= dynamic + running->dynamic_bytes) ||
           (p >= shared && p + bytes <= shared + running->static_end);
}

void reset_shared_memory(Block& b) {
    b.num_statics = 0;
    b.static_end = b.static_bytes = 0;
    if (detects_races()) {  // a new mapping makes ThreadSanitizer forget the previous block's accesses, without an edge
        constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap(b.shared, SHARED_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    }
    poison(b.shared, STATIC_BYTES);
    fill(b.shared, red_zone_byte, STATIC_BYTES);
    place_dynamic_memory(b);
}

// For builds without AddressSanitizer, which itself reports the line of the access.
void check_red_zones(const Block& b) {
    for (int i = 0; i < b.num_statics; i++) {
        const SharedVariable& v = b.statics[i];
        if (!red_zone_is_intact(v.address - RED_ZONE, RED_ZONE) || !red_zone_is_intact(v.address + v.bytes, RED_ZONE))
            report("a block wrote out of bounds of its shared variable", {v.name, 0});
    }
    if (!red_zone_is_intact(b.dynamic + b.dynamic_bytes, RED_ZONE) ||
        !red_zone_is_intact(b.dynamic - RED_ZONE, RED_ZONE))
        report("a block wrote out of bounds of its dynamic shared memory", b.launch);
}

// cp.async.

void cp_async_begin(Copy copy, Site site) {
    Thread& t = *running->current;
    t.site = site;
    if (t.num_copies == MAX_COPIES) report("too many pending cp.async copies", site);
    t.copies[t.num_copies++] = copy;
}

void cp_async_commit() {
    Thread& t = *running->current;
    if (t.num_groups == MAX_GROUPS) report("too many pending cp.async groups", t.site);
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

}  // namespace simt
