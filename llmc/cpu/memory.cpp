// memory.cpp: host memory on huge pages, and the scratch memory of the CPU's operations.
//
// Large blocks are mapped on huge pages, which give about 25 % of the speed of L3-sized arrays. Their pages are touched
// at allocation: Linux overcommits memory, and a lack of it must be an error message here, not a kill during training.
#include "cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/common.h"
#include "base/device.h"
#include "base/host.h"

namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
#ifdef ADDRESS_SANITIZER                    // mk/sanitize.mk
constexpr int64_t MAPPED_FROM = INT64_MAX;  // all blocks from the heap, where the sanitizer guards both ends
#else
constexpr int64_t MAPPED_FROM = HUGE_PAGE;
#endif

struct Block {
    int64_t bytes, mapped;  // requested bytes; mapped bytes, or 0 if the block is from the heap
    bool counted;           // true: it is in device_bytes_allocated
};

struct Memory {
    std::mutex mutex;
    std::unordered_map<void*, Block> blocks;
    int64_t allocated = 0;
};

// This object is never destroyed, because buffers of static storage duration may be freed later.
Memory& memory() {
    static Memory& memory = *new Memory;
    return memory;
}

[[noreturn]] void out_of_memory(int64_t bytes, const char* purpose) {
    const int64_t limit = address_space().limit;
    const std::string limit_text =
        limit < INT64_MAX ? format(" under a limit of %s (ulimit -v)", human_bytes(limit).c_str()) : "";
    const int64_t available = host_bytes_free();
    throw OutOfMemory(purpose, bytes,
                      format("%s available%s, %s already allocated",
                             available < INT64_MAX / 2 ? human_bytes(available).c_str() : "unknown", limit_text.c_str(),
                             human_bytes(cpu::bytes_allocated()).c_str()));
}

// Makes the kernel allocate every page now; returns false if memory is exhausted. Before Linux 5.14, which does not
// know MADV_POPULATE_WRITE, it writes to every page, and then exhausted memory is a kill.
bool touch_pages(char* begin, int64_t bytes) {
#if defined(__linux__)
    constexpr int MADVISE_POPULATE_WRITE = 23;  // older headers do not define it
    int result;
    do result = madvise(begin, bytes, MADVISE_POPULATE_WRITE);
    while (result != 0 && errno == EINTR);
    if (result == 0) return true;
    if (errno == ENOMEM || errno == EFAULT) return false;
#endif
    for (int64_t i = 0; i < bytes; i += 4096) static_cast<volatile char*>(begin)[i] = 0;
    return true;
}

void* map_zeroed(int64_t mapped) {
    char* wide = static_cast<char*>(
        mmap(nullptr, mapped + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (wide == MAP_FAILED) return nullptr;
    char* begin = reinterpret_cast<char*>(round_up<uintptr_t>(uintptr_t(wide), HUGE_PAGE));
    if (begin > wide) munmap(wide, begin - wide);
    munmap(begin + mapped, wide + HUGE_PAGE - begin);
#if defined(__linux__)
    madvise(begin, mapped, MADV_HUGEPAGE);  // if it fails, the pages are small
#endif
    if (touch_pages(begin, mapped)) return begin;
    munmap(begin, mapped);
    return nullptr;
}

struct {
    void* data = nullptr;
    int64_t bytes = 0;
    bool reserved = false;
} the_scratch;

void grow_scratch(int64_t bytes) {
    if (bytes <= the_scratch.bytes) return;
    cpu::release(the_scratch.data);
    the_scratch.data = nullptr;  // allocate may throw
    the_scratch.bytes = 0;
    the_scratch.data = cpu::allocate(bytes, "working memory of the operations", true);
    the_scratch.bytes = bytes;
}

}  // namespace

namespace cpu {

void* allocate(int64_t bytes, const char* purpose, bool counted) {
    ENSURE(bytes >= 0, "%s: %lld bytes asked", purpose, static_cast<long long>(bytes));
    if (bytes == 0) return nullptr;
    const bool large = bytes >= MAPPED_FROM;
    // A lack of address space needs no check: mmap fails.
    if (bytes >= HUGE_PAGE && bytes > host_bytes_left()) out_of_memory(bytes, purpose);
    const int64_t whole = round_up<int64_t>(bytes, large ? HUGE_PAGE : 64);
    void* block = large ? map_zeroed(whole) : aligned_alloc(64, whole);
    if (!block) out_of_memory(bytes, purpose);
    if (!large) memset(block, 0, bytes);
    std::lock_guard lock(memory().mutex);
    memory().blocks[block] = {bytes, large ? whole : 0, counted};
    if (counted) memory().allocated += bytes;
    return block;
}

void release(void* pointer) {
    if (!pointer) return;
    Block block;
    {
        std::lock_guard lock(memory().mutex);
        const auto found = memory().blocks.find(pointer);
        ENSURE(found != memory().blocks.end(), "device_free of memory that is not ours: %p", pointer);
        block = found->second;
        memory().blocks.erase(found);
        if (block.counted) memory().allocated -= block.bytes;
    }
    if (block.mapped)
        munmap(pointer, block.mapped);
    else
        free(pointer);
}

int64_t bytes_allocated() {
    std::lock_guard lock(memory().mutex);
    return memory().allocated;
}

void reserve_scratch(int64_t bytes) {
    grow_scratch(bytes);
    the_scratch.reserved = true;
}

void* scratch(int64_t bytes) {
    INVARIANT(!the_scratch.reserved || bytes <= the_scratch.bytes,
              "an operation asks for %s bytes of working memory, %s are reserved: scratch_bytes is wrong",
              with_commas(bytes).c_str(), with_commas(the_scratch.bytes).c_str());
    grow_scratch(bytes);
    return the_scratch.data;
}

}  // namespace cpu
