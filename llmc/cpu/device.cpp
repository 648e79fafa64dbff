// device.cpp: device.h on the CPU. Device memory is host memory, streams and events do nothing.
//
// Large blocks are mapped on huge pages (about 25 % of the speed of L3-sized arrays) and touched at once, so that a
// lack of memory is a message here and not a kill in the middle of training: Linux promises more than it has.
#include "../device.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <unordered_map>

#include "../common.h"
#include "isa.h"
#include "matmul.h"

#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER
#endif
#endif

namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
#ifdef ADDRESS_SANITIZER
constexpr int64_t MAPPED_FROM = INT64_MAX;  // all from the heap, where the sanitizer guards both ends
#else
constexpr int64_t MAPPED_FROM = HUGE_PAGE;
#endif
constexpr int64_t KEEP_FREE = 128 << 20;  // for the rest of the process and of the machine

struct Block {
    int64_t bytes, mapped;  // asked for; mapped 0: from the heap
    bool counted;           // by device_bytes_allocated
};

struct Memory {
    std::mutex mutex;
    std::unordered_map<void*, Block> blocks;
    int64_t allocated = 0;
};

// Never destroyed: buffers of static duration may be freed after it would be.
Memory& memory() {
    static Memory& memory = *new Memory;
    return memory;
}

// The number in the first line of a file such as memory.max, or "otherwise" where there is none.
int64_t number_in(const std::string& path, int64_t otherwise) {
    int64_t value;
    std::ifstream file(path);
    return file >> value ? value : otherwise;
}

// The number after a name in a file such as /proc/meminfo.
int64_t field(const std::string& path, const std::string& name, int64_t otherwise) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.rfind(name, 0) == 0) return atoll(line.c_str() + name.size());
    return otherwise;
}

// What a control group still allows (version 2; no limit where there is none), its file cache counted as free: the
// kernel drops it before it kills. in_all: the limit itself.
int64_t control_group_bytes(const std::string& folder, bool in_all) {
    const int64_t limit = number_in(folder + "memory.max", INT64_MAX);  // or the word "max"
    if (in_all || limit == INT64_MAX) return limit;
    const std::string stat = folder + "memory.stat";
    const int64_t cache = field(stat, "active_file ", 0) + field(stat, "inactive_file ", 0);
    return limit - number_in(folder + "memory.current", 0) + cache;
}

// The least of this process's control group and those above it.
int64_t control_groups_bytes(bool in_all) {
    std::ifstream file("/proc/self/cgroup");
    int64_t least = INT64_MAX;
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("0::", 0) != 0) continue;
        for (std::string path = line.substr(3);; path.resize(path.rfind('/'))) {
            while (!path.empty() && path.back() == '/') path.pop_back();
            least = std::min(least, control_group_bytes("/sys/fs/cgroup" + path + "/", in_all));
            if (path.empty()) break;
        }
    }
    return least;
}

int64_t available_bytes() {
    const int64_t memory = 1024 * field("/proc/meminfo", "MemAvailable:", INT64_MAX / 1024);
    return std::max<int64_t>(0, std::min(memory, control_groups_bytes(false)) - KEEP_FREE);
}

[[noreturn]] void out_of_memory(int64_t bytes, const char* purpose) {
    rlimit limit;
    const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    const std::string limit_text =
        limited ? format(" under a limit of %s (ulimit -v)", human_bytes(int64_t(limit.rlim_cur)).c_str()) : "";
    const int64_t available = available_bytes();
    fail(EXIT_INTERNAL, "no memory for %s: %s bytes asked, %s available%s, %s already allocated; lower --micro-batch",
         purpose, with_commas(bytes).c_str(), available < INT64_MAX / 2 ? human_bytes(available).c_str() : "unknown",
         limit_text.c_str(), human_bytes(device_bytes_allocated()).c_str());
}

// Reads and writes every page, in case the kernel cannot do it for us (MADV_POPULATE_WRITE is of Linux 5.14).
void touch_pages(char* begin, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
    constexpr int populate_write = MADV_POPULATE_WRITE;
#else
    constexpr int populate_write = 23;
#endif
    if (madvise(begin, bytes, populate_write) == 0) return;
    for (int64_t i = 0; i < bytes; i += 4096) static_cast<volatile char*>(begin)[i] = 0;
}

void* map_zeroed(int64_t mapped) {
    char* wide = static_cast<char*>(
        mmap(nullptr, mapped + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (wide == MAP_FAILED) return nullptr;
    char* begin = reinterpret_cast<char*>(round_up<uintptr_t>(uintptr_t(wide), HUGE_PAGE));
    if (begin > wide) munmap(wide, begin - wide);
    munmap(begin + mapped, wide + HUGE_PAGE - begin);
    madvise(begin, mapped, MADV_HUGEPAGE);  // advice: without it the pages are small
    touch_pages(begin, mapped);
    return begin;
}

void* allocate(int64_t bytes, const char* purpose, bool counted) {
    ENSURE(bytes >= 0, "%s: %lld bytes asked", purpose, static_cast<long long>(bytes));
    if (bytes == 0) return nullptr;
    const bool large = bytes >= MAPPED_FROM;
    if (bytes >= HUGE_PAGE && bytes > available_bytes()) out_of_memory(bytes, purpose);
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

// Denormal numbers slow some instructions down up to 75 times and mean nothing here: make them zero.
void flush_denormals() {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // FTZ, DAZ
#elif defined(__aarch64__)
    uint64_t fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr));
    asm volatile("msr fpcr, %0" ::"r"(fpcr | uint64_t(1) << 24));
#endif
}

std::string cpu_model() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
            return line.substr(line.find(": ") + 2);
    return "CPU";
}

struct Scratch {
    void* data = nullptr;
    int64_t bytes = 0;
    bool reserved = false;
};

Scratch& scratch() {
    static Scratch scratch;
    return scratch;
}

void grow_scratch(int64_t bytes) {
    if (bytes <= scratch().bytes) return;
    device_free(scratch().data);
    scratch().data = nullptr, scratch().bytes = 0;  // in case the next line throws
    scratch().data = device_allocate(bytes, "working memory of the operations");
    scratch().bytes = bytes;
}

}  // namespace

void device_init(int, int threads) {
    isa();  // asks Linux for AMX, which must come before the first thread
    ENSURE(threads >= 0, "--threads %d: must be 0 (one per core) or more", threads);
    if (threads) omp_set_num_threads(threads);
    flush_denormals();  // threads made from here on inherit it
#pragma omp parallel
    flush_denormals();
}

DeviceInfo device_info() {
    static const DeviceInfo info = [] {
        const int64_t memory_bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
        return DeviceInfo{.name = format("%s, %d thread%s, %s", cpu_model().c_str(), omp_get_max_threads(),
                                         omp_get_max_threads() == 1 ? "" : "s", isa_name(isa())),
                          .memory_bytes = std::min(memory_bytes, control_groups_bytes(true)),
                          .peak_flops_bf16 = cpu::measure_peak_flops<bf16>(),
                          .peak_flops_fp32 = cpu::measure_peak_flops<float>(),
                          .peak_source = "measured at start"};
    }();
    return info;
}

bool device_has_bf16_units() { return isa() == Isa::amx; }

std::string device_libraries() { return "none: every product is a kernel of this program"; }

int64_t device_bytes_free() { return available_bytes(); }
void* device_allocate(int64_t bytes, const char* purpose) { return allocate(bytes, purpose, true); }
void device_free(void* pointer) { release(pointer); }
void* host_allocate(int64_t bytes) { return allocate(bytes, "host memory", false); }
void host_free(void* pointer) { release(pointer); }

int64_t device_bytes_allocated() {
    std::lock_guard lock(memory().mutex);
    return memory().allocated;
}

// Everything is done when its call returns, so there is nothing to wait for.
Stream create_stream() { return nullptr; }
void destroy_stream(Stream) {}
void wait_for_stream(Stream) {}
void wait_for_device() {}
Event create_event() { return nullptr; }
void destroy_event(Event) {}
void record_event(Event, Stream) {}
void stream_wait_event(Stream, Event) {}
bool event_done(Event) { return true; }
void wait_for_event(Event) {}

void copy_to_device(void* device, const void* host, int64_t bytes, Stream stream) {
    copy_on_device(device, host, bytes, stream);
}
void copy_to_host(void* host, const void* device, int64_t bytes, Stream stream) {
    copy_on_device(host, device, bytes, stream);
}

// Large copies by all threads: one core reaches a third of the memory's bandwidth.
void copy_on_device(void* to, const void* from, int64_t bytes, Stream) {
    constexpr int64_t chunk = 1 << 20;
#pragma omp parallel for schedule(static) if (bytes > 4 * chunk)
    for (int64_t i = 0; i < bytes; i += chunk)
        memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, std::min(chunk, bytes - i));
}

void fill_zero(void* device, int64_t bytes, Stream) {
    constexpr int64_t chunk = 1 << 20;
#pragma omp parallel for schedule(static) if (bytes > 4 * chunk)
    for (int64_t i = 0; i < bytes; i += chunk) memset(static_cast<char*>(device) + i, 0, std::min(chunk, bytes - i));
}

void device_reserve_scratch(int64_t bytes) {
    grow_scratch(bytes);
    scratch().reserved = true;
}

void* device_scratch(int64_t bytes) {
    if (bytes > scratch().bytes && scratch().reserved)
        fail(EXIT_INTERNAL, "an operation asks for %s bytes of working memory, %s are reserved: scratch_bytes is wrong",
             with_commas(bytes).c_str(), with_commas(scratch().bytes).c_str());
    grow_scratch(bytes);
    return scratch().data;
}
