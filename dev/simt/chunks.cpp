// chunks.cpp: the table of chunks: who has written each 16 bytes of shared memory, and what still reads or writes them.
// It has the rules on proxies, phases and overwriting, and the stores that SANITIZE=stores shows.
#include "engines.h"

#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

namespace simt {

// The innermost function that is not inlined from kernels.h.
Site resolved(Site site) {
    static char text[512];
    Dl_info program;
    if (site.line != -1 || !dladdr(site.file, &program)) return site;
    snprintf(text, sizeof(text), "addr2line -i -e /proc/%d/exe %#zx", int(getpid()),
             size_t(site.file - static_cast<const char*>(program.dli_fbase)) - 1);
    FILE* output = popen(text, "r");
    if (!output) return {"an unknown place", 0};
    snprintf(text, sizeof(text), "an unknown place");
    while (fgets(text, sizeof(text), output) && strstr(text, "dev/simt/kernels.h")) continue;
    pclose(output);
    char *colon = strrchr(text, ':'), folder[512];
    if (colon) *colon = 0;
    const size_t length = getcwd(folder, sizeof(folder)) ? strlen(folder) : 0;
    const bool is_below = length && strncmp(text, folder, length) == 0 && text[length] == '/';
    return {is_below ? text + length + 1 : text, colon ? atoi(colon + 1) : 0};
}

int64_t address_of(const Block& b, const void* p, int64_t bytes, Site site) {
    const char* at = static_cast<const char*>(p);
    if (at < b.dynamic || at + bytes > b.dynamic + b.dynamic_bytes)
        report("an asynchronous instruction needs an address in dynamic shared memory", site);
    return at - pointer(b, 0);
}
uint32_t shared_address(const void* p, Site site) { return uint32_t(address_of(*running, p, 1, site)); }

static bool has_waited(const Block& b, int warp, const Chunk& c) {
    for (int lane = 0; lane < 32; lane++)
        if (b.engines->threads[warp * 32 + lane].seen[c.barrier] >= c.phase + 2) return true;
    return false;
}

void check_read(const Block& b, const void* p, const char* who, bool by_async, int first_warp, int warps, Site site) {
    const Chunk& c = chunk_at(b, p);
    const Site from = c.site;
    if (c.writers)
        report_with(site, "%s reads shared memory that a TMA load still writes: it needs mbarrier_wait", who);
    if (c.writer == Chunk::nobody && sees_stores)
        report_with(site, "%s reads shared memory that nothing has written", who);
    if (by_async && c.writer == Chunk::thread && b.engines->threads[c.number].fence_time < c.time) {
        const Site store = resolved(from);
        report_with(site, "%s reads what thread %d has written at %s:%d without fence_proxy_async", who, c.number,
                    store.file, store.line);
    }
    for (int w = first_warp; w < first_warp + warps && c.writer == Chunk::copy; w++)
        if (!has_waited(b, w, c))
            report_with(site,
                        "%s reads what TMA has written (load at %s:%d), but warp %d has not waited for phase %d of "
                        "its mbarrier",
                        who, from.file, from.line, w, c.phase);
}

void check_write(const Block& b, const void* p, const char* who, Site site) {
    const Chunk& c = chunk_at(b, p);
    if (c.writers) report_with(site, "%s writes shared memory that a TMA load still writes", who);
    if (!c.readers) return;
    const char* chunk = b.shared + size_t(static_cast<const char*>(p) - b.shared) / CHUNK * CHUNK;
    for (const Warpgroup& g : b.engines->groups)
        for (int64_t k = g.executed; k < g.issued; k++)
            if (const Product& product = g.products[k % MAX_PRODUCTS]; reads(b, product, chunk))
                report_with(site, "%s overwrites an operand of the wgmma at %s:%d, which was not waited for", who,
                            product.site.file, product.site.line);
    report_with(site, "%s overwrites shared memory that a bulk store still reads: it needs store_wait_read", who);
}

void note_store(Block& b, const void* p, size_t bytes, Site site) {
    Chunk& c = chunk_at(b, p);
    check_write(b, p, "a thread", site);
    if (c.time != now) c.first_row = 0;  // else this is the store of the stmatrix that was noted
    c.writer = Chunk::thread;
    c.number = uint16_t(number(*b.current));
    c.time = ++now;
    c.site = site;
    if (sees_stores) note_access(b, p, bytes, true, site);
}

// A tile's rows have `width` bytes. A wrong swizzle scatters the eight rows of a matrix over columns and rows.
void check_matrix(const Block& b, int64_t address, int width, const char* who, Site site) {
    const Chunk& c = chunk_at(b, pointer(b, address));
    if (c.writer != Chunk::thread || !c.first_row || width == int(CHUNK)) return;
    const int64_t first = swizzled(int64_t(c.first_row * CHUNK) - int64_t(STATIC_BYTES), width);
    const int64_t place = swizzled(address, width);
    if (place / width == first / width || place % width == first % width) return;
    const Site from = resolved(c.site);
    report_with(site,
                "%s reads row %d of a matrix of the stmatrix at %s:%d from column %d of chunks and its first row from "
                "column %d: it was stored without the swizzle of %d bytes",
                who, c.number % 8, from.file, from.line, int(place % width / CHUNK), int(first % width / CHUNK), width);
}

void copy_plain(void* to, const void* from, size_t bytes) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}
void copy(void* to, const void* from, size_t bytes) {
    if (__msan_memcpy)
        __msan_memcpy(to, from, bytes);
    else
        copy_plain(to, from, bytes);
}

static void see(const void* p, size_t bytes, bool is_store, void* place) {
    sees_stores = true;
    if (!running || !running->engines || !is_shared(p, bytes)) return;
    const Site site{static_cast<const char*>(place), -1};
    if (is_store) return note_store(*running, p, bytes, site);
    ++now;
    note_access(*running, p, bytes, false, site);
    if (running->uses_engines) check_read(*running, p, "a thread", false, running->current->warp, 1, site);
}

}  // namespace simt

// With SANITIZE=stores the compiler calls these for each load and store.
#define SIMT_SEEN(bytes)                                                                                              \
    extern "C" void __sanitizer_cov_load##bytes(void* p) { simt::see(p, bytes, false, __builtin_return_address(0)); } \
    extern "C" void __sanitizer_cov_store##bytes(void* p) { simt::see(p, bytes, true, __builtin_return_address(0)); }
SIMT_SEEN(1)
SIMT_SEEN(2)
SIMT_SEEN(4)
SIMT_SEEN(8)
SIMT_SEEN(16)
