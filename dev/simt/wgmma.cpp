// wgmma.cpp: products by warpgroups, with the layouts of descriptors, and the accumulators that they own.
#include "engines.h"

namespace simt {

struct Descriptor {
    int64_t start, leading, stride;
    int width;  // bytes of a row of the swizzle
    explicit Descriptor(uint64_t d)
        : start(int64_t(d & 0x3fff) << 4),
          leading(int64_t(d >> 16 & 0x3fff) << 4),
          stride(int64_t(d >> 32 & 0x3fff) << 4),
          width(d >> 62 ? 256 >> (d >> 62) : 16) {}
};

// The canonical layouts of the PTX ISA. Groups of 8 outer elements (or of a row's width, if transposed) are `stride` or
// `leading` bytes apart.
int64_t operand_address(uint64_t descriptor, int outer, int k, bool transposed) {
    const Descriptor d(descriptor);
    const int columns = d.width / 2;
    int64_t at = d.start;
    if (d.width == 16)
        at += transposed ? outer % 8 * 2 + outer / 8 * d.stride + k % 8 * 16 + k / 8 * d.leading
                         : outer % 8 * 16 + outer / 8 * d.stride + k % 8 * 2 + k / 8 * d.leading;
    else
        at += transposed ? outer % columns * 2 + outer / columns * d.leading + k % 8 * d.width + k / 8 * d.stride
                         : outer % 8 * d.width + outer / 8 * d.stride + k * 2;
    return swizzled(at, d.width);
}

// Calls f(address, outer, k) for each 16 bytes: 8 values of k, or 8 outer elements if transposed.
template <class F>
static void for_chunks(uint64_t descriptor, int outer, bool transposed, F f) {
    for (int o = 0; o < outer; o += transposed ? 8 : 1)
        for (int k = 0; k < 16; k += transposed ? 1 : 8) f(operand_address(descriptor, o, k, transposed), o, k);
}
template <class F>
static void for_operands(const Product& p, F f) {
    const auto address_only = [&](int64_t address, int, int) { f(address); };
    if (!p.w.registers) for_chunks(p.w.a, 64, p.w.transposed_a, address_only);
    for_chunks(p.w.b, p.w.n, p.w.transposed_b, address_only);
}

bool reads(const Block& b, const Product& p, const char* chunk) {
    bool found = false;
    for_operands(p, [&](int64_t address) { found = found || pointer(b, address) == chunk; });
    return found;
}

static void check_descriptor(const Block& b, uint64_t descriptor, int outer, bool transposed, Site site) {
    const Descriptor d(descriptor);
    if (descriptor >> 49 & 7 || (d.start >> 7 & (d.width / 16 - 1)))
        report_with(site,
                    "a wgmma descriptor with swizzle of %d bytes must begin at a multiple of %d, without base offset",
                    d.width, d.width * 8);
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int, int) {
        const char* p = pointer(b, address);
        if (p < b.dynamic || p + 16 > b.dynamic + b.dynamic_bytes)
            report("a wgmma descriptor reaches outside of dynamic shared memory", site);
    });
}

// The rows and columns of an operand must lie in the order in which one TMA load has brought them. (If k of several
// columns are in a tile, the next columns are in the next tile, and a box of three dimensions may be several tiles.)
static void check_order(const Block& b, uint64_t descriptor, int outer, bool transposed, Site site) {
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int, int) {
        check_matrix(b, address, Descriptor(descriptor).width, "wgmma", site);
    });
    const Chunk& first = chunk_at(b, pointer(b, operand_address(descriptor, 0, 0, transposed)));
    if (first.writer != Chunk::copy || !first.columns) return;
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int o, int k) {
        const Chunk& c = chunk_at(b, pointer(b, address));
        const int column = first.column + (transposed ? o : k) / 8;
        const int row = first.row + (transposed ? k : o) + column / first.columns * first.rows;
        if (c.writer != Chunk::copy || c.time != first.time) return;
        if (c.row != row || c.column != column % first.columns)
            report_with(site,
                        "wgmma reads row %d of the box of the TMA load at %s:%d as row %d: a descriptor has a wrong "
                        "offset, stride or swizzle",
                        c.row, c.site.file, c.site.line, row);
    });
}

// The first element of an operand in the box of a TMA load.
struct Origin {
    const Chunk* chunk;
    int outer;
};
static Origin origin(const Block& b, uint64_t descriptor, bool transposed) {
    const Chunk& c = chunk_at(b, pointer(b, operand_address(descriptor, 0, 0, transposed)));
    return {&c, transposed ? c.column * 8 : c.row % std::max<int>(c.rows, 1)};
}

// Pending products that accumulate in the same registers must have the same rows of A and columns of B, so those that
// one load has brought are the same. (Not compared between matrices of a box of three dimensions.)
static void check_sum(const Block& b, uint64_t before, uint64_t now, bool transposed, char operand, Site site) {
    const Origin x = origin(b, before, transposed), y = origin(b, now, transposed);
    if (x.chunk->writer != Chunk::copy || y.chunk->writer != Chunk::copy || x.chunk->time != y.chunk->time) return;
    if (!x.chunk->columns || x.chunk->row / x.chunk->rows != y.chunk->row / y.chunk->rows || x.outer == y.outer) return;
    report_with(site,
                "wgmma accumulates %s %d of the box of the TMA load at %s:%d, as operand %c, upon %s %d: a descriptor "
                "has a wrong step of k",
                transposed ? "column" : "row", y.outer, y.chunk->site.file, y.chunk->site.line, operand,
                transposed ? "column" : "row", x.outer);
}
static void check_sum(const Block& b, const Product& before, const Product& p) {
    if (!p.w.registers && !before.w.registers && p.w.transposed_a == before.w.transposed_a)
        check_sum(b, before.w.a, p.w.a, p.w.transposed_a, 'A', p.site);
    if (p.w.transposed_b == before.w.transposed_b) check_sum(b, before.w.b, p.w.b, p.w.transposed_b, 'B', p.site);
}

static float widened(uint32_t pair, int half) { return std::bit_cast<float>(half ? pair & 0xffff0000u : pair << 16); }

// Puts an operand into matrix[outer][k], or [k][outer] if outer_stride is 1.
static void read_operand(const Block& b, uint64_t descriptor, int outer, bool transposed, float* matrix,
                         int outer_stride, int k_stride) {
    for_chunks(descriptor, outer, transposed, [&](int64_t address, int o, int k) {
        const auto* pairs = reinterpret_cast<const uint32_t*>(pointer(b, address));
        for (int i = 0; i < 8; i++)
            matrix[(o + (transposed ? i : 0)) * outer_stride + (k + (transposed ? 0 : i)) * k_stride] =
                widened(pairs[i / 2], i % 2);
    });
}

static void multiply(const Block& b, const Product& p, const ThreadState* threads) {
    static float A[64][16], B[16][256], D[64][256];
    const int n = p.w.n;
    for (int t = 0; t < 128 && p.w.registers; t++)
        for (int i = 0; i < 8; i++)
            A[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][t % 4 * 2 + i / 4 * 8 + i % 2] =
                widened(p.registers[t][i / 2], i % 2);
    if (!p.w.registers) read_operand(b, p.w.a, 64, p.w.transposed_a, A[0], 16, 1);
    read_operand(b, p.w.b, n, p.w.transposed_b, B[0], 1, 256);
    for (int m = 0; m < 64; m++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < n; j++) D[m][j] = (k ? D[m][j] : 0.0f) + A[m][k] * B[k][j];
    for (int t = 0; t < 128; t++) {
        float* values = const_cast<float*>(threads[t].accumulators[p.accumulators[t]].values);
        for (int i = 0; i < n / 2; i++) {
            const float x = D[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2];
            values[i] = p.w.accumulate ? values[i] + x : x;
        }
    }
}

void execute_next_product(Block& b, Warpgroup& g) {
    const Product& p = g.products[g.executed % MAX_PRODUCTS];
    as_engine(b, g.tsan_fiber, p.place, [&] {
        acquire(&g.issue_edge);
        for_operands(p, [&](int64_t address) {
            char* shared = pointer(b, address);
            chunk_at(b, shared).readers--;
            if (__tsan_read_range) __tsan_read_range(shared, 16);
            if (__msan_test_shadow && __msan_test_shadow(shared, 16) >= 0)
                report("wgmma reads shared memory that is not initialised", p.site);
        });
        release(&g.done_edge);
    });
    multiply(b, p, &b.engines->threads[(&g - b.engines->groups) * 128]);
    g.executed++;
}

// The index of the thread's accumulators at d, which from now on belong to the product number `product`.
static uint8_t give_accumulators(ThreadState& s, float* d, int count, int64_t product, Site site) {
    int i = 0;
    while (i < s.num_accumulators && (s.accumulators[i].at != d || s.accumulators[i].count != count)) i++;
    if (i == s.num_accumulators) {
        for (int k = 0; k < i; k++)
            if (!s.accumulators[k].pending) i = k;  // forgotten: the variable may not exist any more
        if (s.num_accumulators < MAX_ACCUMULATORS) i = s.num_accumulators++;
        if (s.accumulators[i].pending && i < s.num_accumulators - 1)
            report("more pending accumulators than the emulator has room for", site);
        s.accumulators[i].at = d;
        s.accumulators[i].count = count;
        s.accumulators[i].pending = false;
        s.accumulators[i].fences = -1;
    }
    Accumulators& a = s.accumulators[i];
    a.before = a.pending ? a.last : -1;
    a.last = product;
    if (a.pending) return uint8_t(i);
    bool changed = s.fences == 0;
    for (int k = 0; k < count && a.fences == s.fences; k++)
        changed = changed || std::bit_cast<uint32_t>(a.returned[k]) != std::bit_cast<uint32_t>(d[k]);
    if (changed) report("wgmma uses accumulators that the thread has changed, without wgmma_fence", site);
    copy_plain(a.values, d, size_t(count) * 4);
    for (int k = 0; k < count; k++) d[k] = std::bit_cast<float>(PENDING);
    if (__msan_unpoison) __msan_unpoison(d, size_t(count) * 4);  // the product writes them
    a.pending = true;
    return uint8_t(i);
}

void expect_returned(float x, float y, Site site) {
    const auto is_pending = [](float v) { return (std::bit_cast<uint32_t>(v) & 0x7fffffff) == PENDING; };
    if (!running || !running->uses_engines || !(is_pending(x) || is_pending(y))) return;
    const Thread& t = *running->current;
    const ThreadState& s = state(t);
    if (!s.issued) return;
    int64_t product = s.issued - 1;
    for (int i = 0; i < s.num_accumulators; i++)
        if (s.accumulators[i].pending) product = s.accumulators[i].last;
    const Site from = t.block->engines->groups[t.warp / 4].products[product % MAX_PRODUCTS].site;
    report_with(site, "a thread uses an accumulator of the wgmma at %s:%d before wgmma_wait", from.file, from.line);
}

static bool same(const Wgmma& x, const Wgmma& y) {
    return x.n == y.n && x.transposed_a == y.transposed_a && x.transposed_b == y.transposed_b &&
           x.accumulate == y.accumulate && x.a == y.a && x.b == y.b && !x.registers == !y.registers;
}

static void begin_product(Block& b, Warpgroup& g, const Wgmma& w, Site site, void* place) {
    const int group = int(&g - b.engines->groups);
    if (b.num_threads < group * 128 + 128) report("wgmma needs a warpgroup of 128 threads", site);
    if (g.begun - g.executed == MAX_PRODUCTS) report("more pending wgmma than the emulator has room for", site);
    if (!w.registers) check_descriptor(b, w.a, 64, w.transposed_a, site);
    check_descriptor(b, w.b, w.n, w.transposed_b, site);
    Product& p = g.products[g.begun++ % MAX_PRODUCTS];
    p.w = w;
    p.threads = 0;
    p.site = site;
    p.place = place;
}

void wgmma_fence() { state(*block_with_engines().current).fences++; }

void wgmma(float* d, Wgmma w, Site site) {
    Block& b = block_with_engines();
    const int number_in_group = number(*b.current) % 128, group = b.current->warp / 4;
    ThreadState& s = state(*b.current);
    Warpgroup& g = b.engines->groups[group];
    if (s.issued == g.begun) begin_product(b, g, w, site, __builtin_return_address(0));
    Product& p = g.products[s.issued % MAX_PRODUCTS];
    if (!same(p.w, w) || p.site.line != site.line) report("threads of a warpgroup issue different wgmma", site);
    for (int i = 0; i < 4 && w.registers; i++) p.registers[number_in_group][i] = w.registers[i];
    p.accumulators[number_in_group] = give_accumulators(s, d, w.n / 2, s.issued, site);
    release(&g.issue_edge);
    s.issued++;
    if (++p.threads < 128) return;
    for_operands(p, [&](int64_t address) {
        check_read(b, pointer(b, address), "wgmma", true, group * 4, 4, site);
        chunk_at(b, pointer(b, address)).readers++;
    });
    if (!w.registers) check_order(b, w.a, 64, w.transposed_a, site);
    check_order(b, w.b, w.n, w.transposed_b, site);
    const int64_t before = s.accumulators[p.accumulators[number_in_group]].before;
    if (w.accumulate && before >= 0 && g.begun - before <= MAX_PRODUCTS)
        check_sum(b, g.products[before % MAX_PRODUCTS], p);
    g.issued++;
    wake(b, &g);
    if (config.async == Async::early) execute_next_product(b, g);
}

void wgmma_commit() {
    ThreadState& s = state(*block_with_engines().current);
    s.group_end[s.groups++ % MAX_WGMMA_GROUPS] = s.issued;
}

void wgmma_wait(int groups_kept, Site site) {
    Block& b = block_with_engines();
    ThreadState& s = state(*b.current);
    Warpgroup& g = b.engines->groups[b.current->warp / 4];
    if (s.groups <= groups_kept) return;
    const int64_t end = s.group_end[(s.groups - groups_kept - 1) % MAX_WGMMA_GROUPS];
    while (g.issued < end) block_until_woken(&g, "for its warpgroup to issue wgmma", site);
    while (g.executed < end) execute_next_product(b, g);
    acquire(&g.done_edge);
    s.waited = end;
    for (int i = 0; i < s.num_accumulators; i++) {
        Accumulators& a = s.accumulators[i];
        if (!a.pending || a.last >= end) continue;
        copy_plain(a.at, a.values, size_t(a.count) * 4);
        copy_plain(a.returned, a.values, size_t(a.count) * 4);
        a.pending = false;
        a.fences = s.fences;
    }
}

void exchange_matrices(const uint32_t* registers, void* row, uint64_t (&out)[2], Site site) {
    Block& b = block_with_engines();
    check_aligned(row, 16, "stmatrix: a row is not 16-byte aligned", site);
    if (!is_shared(row, 16)) report("stmatrix: a row is not in shared memory", site);
    // The lanes meet in stmatrix, so none is more than one matrix ahead of another.
    ThreadState& s = state(*b.current);
    const int parity = s.matrices++ % 2;
    s.rows[parity] = row;
    stmatrix(registers, out, site);
    note_store(b, row, 16, site);
    const ThreadState& first = b.engines->threads[number(*b.current) / 8 * 8];
    chunk_at(b, row).first_row = uint16_t(size_t(static_cast<const char*>(first.rows[parity]) - b.shared) / CHUNK);
}

}  // namespace simt
