// tma.cpp: copies between global and shared memory by the TMA unit, and the driver's tensor maps.
#include "engines.h"

#include <cstring>

namespace simt {

// Calls f(global, shared, skip, bytes) for each 16 bytes of the box. The `bytes` after the first `skip` are of the
// tensor.
template <class F>
static void for_parts(const Transfer& t, const Block& b, F f) {
    const TensorMap& m = t.map;
    const int64_t element = m.strides[0];
    int64_t linear = t.address;
    for (int z = 0; z < m.box[2]; z++)
        for (int y = 0; y < m.box[1]; y++)
            for (int64_t i = 0; i < m.row_bytes(); i += 16, linear += 16) {
                const int64_t cx = t.from.x + i / element, cy = t.from.y + y, cz = t.from.z + z;
                const bool row = cy >= 0 && cy < m.sizes[1] && cz >= 0 && cz < m.sizes[2];
                const int64_t first = std::max<int64_t>(cx, 0), end = std::min(cx + 16 / element, m.sizes[0]);
                char* to = pointer(b, m.swizzle > 16 ? swizzled(linear, m.swizzle) : linear);
                if (!row || first >= end)
                    f(nullptr, to, 0, 0);
                else
                    f(m.base + first * element + cy * m.strides[1] + cz * m.strides[2], to, (first - cx) * element,
                      (end - first) * element);
            }
}

static void load(Transfer& t, Block& b) {
    Barrier& bar = *t.barrier;
    const int columns = int(t.map.row_bytes() / 16);
    const uint64_t time = ++now;
    int part = 0;
    for_parts(t, b, [&](char* global, char* shared, int64_t skip, int64_t bytes) {
        Chunk& c = chunk_at(b, shared);
        if (bytes < 16) {
            fill(shared, 0, 16);
            if (__msan_unpoison) __msan_unpoison(shared, 16);
        }
        if (global) {
            check_device_range(global, size_t(bytes), "a tensor map of memory that is not the device's", t.site);
            if (__tsan_read_range) __tsan_read_range(global, size_t(bytes));
            copy(shared + skip, global, size_t(bytes));
        }
        if (__tsan_write_range) __tsan_write_range(shared, 16);
        c.writers--;
        c.writer = Chunk::copy;
        c.barrier = uint8_t(&bar - b.engines->barriers);
        c.phase = bar.phase;
        c.site = t.site;
        c.time = time;
        c.row = uint16_t(part / columns);
        c.rows = uint16_t(t.map.box[1]);
        c.column = uint16_t(part++ % columns);
        c.columns = uint16_t(columns);
    });
    bar.bytes -= t.map.bytes();
    release(&bar.edge[bar.phase & 1]);
}

static void store(Transfer& t, Block& b) {
    ThreadState& s = state(*t.thread);
    for_parts(t, b, [&](char*, char* shared, int64_t, int64_t) {
        chunk_at(b, shared).readers--;
        if (__tsan_read_range) __tsan_read_range(shared, 16);
    });
    release(&s.read_edge);
    for_parts(t, b, [&](char* global, char* shared, int64_t skip, int64_t bytes) {
        if (!global) return;
        check_device_range(global, size_t(bytes), "a tensor map of memory that is not the device's", t.site);
        if (__tsan_write_range) __tsan_write_range(global, size_t(bytes));
        copy(global, shared + skip, size_t(bytes));
    });
    release(&s.write_edge);
}

void execute_transfer(Block& b, int i) {
    Engines& e = *b.engines;
    Transfer& t = *e.pending[i];
    as_engine(b, e.tsan_fiber, t.place, [&] {
        acquire(&t.edge);
        t.is_store ? store(t, b) : load(t, b);
        release(&b.leader->end_edge);
    });
    std::swap(e.pending[i], e.pending[--e.num_transfers]);
    if (!t.is_store) settle(b, *t.barrier, t.site);
}

static void begin_transfer(Block& b, const Transfer& given) {
    Engines& e = *b.engines;
    if (e.num_transfers == MAX_TRANSFERS) report("more pending TMA copies than the emulator has room for", given.site);
    Transfer& t = *e.pending[e.num_transfers++];
    copy_plain(&t, &given, sizeof(t));
    release(&t.edge);
    for_parts(t, b, [&](char*, char* shared, int64_t, int64_t) {
        if (!t.is_store) check_write(b, shared, "a TMA load", t.site);
        if (t.is_store) {
            check_read(b, shared, "a bulk store", true, t.thread->warp, 1, t.site);
            check_matrix(b, shared - pointer(b, 0), t.map.swizzle, "a bulk store", t.site);
        }
        (t.is_store ? chunk_at(b, shared).readers : chunk_at(b, shared).writers)++;
    });
    if (config.async == Async::early) execute_transfer(b, e.num_transfers - 1);
}

static Transfer transfer(const TensorMap& map, Box from, const void* shared, Site site, void* place) {
    Block& b = block_with_engines();
    const int64_t address = address_of(b, shared, map.bytes(), site);
    if (address % 128)
        report_with(site, "a TMA copy needs shared memory that is aligned to 128 bytes, not %d",
                    int(address & -address));
    if (map.swizzle > 16 && map.row_bytes() != map.swizzle)
        report_with(site, "a box with rows of %d bytes, with a swizzle of %d: the emulator does not know this",
                    int(map.row_bytes()), map.swizzle);
    return {false, b.current, 0, map, from, address, nullptr, site, place, 0};
}

static void begin_load(Transfer t, uint64_t* barrier, unsigned blocks) {
    Block& b = *running;
    if (!blocks || blocks >> b.blocks) report("a TMA load for a block that the cluster does not have", t.site);
    const auto offset = reinterpret_cast<char*>(barrier) - b.shared;
    for (int i = 0; i < b.blocks; i++) {
        if (!(blocks >> i & 1)) continue;
        Block& other = *b.leader->cluster[size_t(i)];
        if (!other.live) report("a TMA load for a block that has ended", t.site);
        t.barrier = &barrier_at(other, reinterpret_cast<uint64_t*>(other.shared + offset), t.site);
        if (!t.barrier->fenced) report("a TMA load signals an mbarrier without fence_mbarrier_init", t.site);
        begin_transfer(other, t);
    }
}

static void begin_store(Transfer t) {
    ThreadState& s = state(*t.thread);
    t.is_store = true;
    t.group = s.store_groups;
    s.last_store = t.group + 1;
    begin_transfer(*running, t);
}

static const TensorMap& decoded(const CUtensorMap* map) { return *reinterpret_cast<const TensorMap*>(map); }

void tensor_load(void* to, const CUtensorMap* map, Box from, uint64_t* barrier, unsigned blocks, Site site) {
    begin_load(transfer(decoded(map), from, to, site, __builtin_return_address(0)), barrier,
               blocks ? blocks : 1u << running->rank);
}
void tensor_store(const CUtensorMap* map, const void* from, Box to, Site site) {
    begin_store(transfer(decoded(map), to, from, site, __builtin_return_address(0)));
}

void store_commit() { state(*block_with_engines().current).store_groups++; }
void store_wait(int groups_kept, bool only_read) {
    Block& b = block_with_engines();
    ThreadState& s = state(*b.current);
    const int64_t end = s.store_groups - groups_kept;
    for (int i = 0; i < b.engines->num_transfers;) {
        const Transfer& t = *b.engines->pending[i];
        if (t.is_store && t.thread == b.current && t.group < end)
            execute_transfer(b, i);
        else
            i++;
    }
    s.stores_waited = std::max(s.stores_waited, end);
    acquire(&s.read_edge);
    if (!only_read) acquire(&s.write_edge);
}

}  // namespace simt

// The driver's tensor maps. "CUDA Driver API", cuTensorMapEncodeTiled, has the limits.

static const char* wrong_map(const simt::TensorMap& m, int rank, const cuuint64_t* strides, const cuuint32_t* box,
                             const cuuint32_t* element_strides, int interleave) {
    if (rank < 1 || rank > 3 || interleave) return "the emulator knows ranks 1 to 3 without interleaving";
    if (!m.strides[0]) return "the emulator knows elements of uint8, bf16 and float";
    if (reinterpret_cast<uintptr_t>(m.base) % 16) return "the address must be a multiple of 16 bytes";
    for (int i = 0; i < rank; i++) {
        if (m.sizes[i] < 1 || m.sizes[i] > int64_t(1) << 32) return "sizes must be 1 to 2^32";
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >> 40)) return "strides must be multiples of 16 below 2^40";
        if (box[i] < 1 || box[i] > 256) return "the box must have 1 to 256 elements in each dimension";
        if (element_strides[i] != 1) return "the emulator knows element strides of 1";
    }
    if (m.row_bytes() % 16) return "the box must have rows of a multiple of 16 bytes";
    if (m.swizzle > 16 && m.row_bytes() > m.swizzle) return "the box must have rows no longer than the swizzle";
    return nullptr;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8      ? 1
                        : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                        : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32  ? 4
                                                                   : 0;
    simt::TensorMap m{static_cast<char*>(address), {1, 1, 1}, {element, 0, 0}, {1, 1, 1}, 16 << int(swizzle)};
    for (unsigned i = 0; i < std::min(rank, 3u); i++) {
        m.sizes[i] = int64_t(sizes[i]);
        m.box[i] = int(box[i]);
        if (i) m.strides[i] = int64_t(strides[i - 1]);
    }
    const char* wrong = reinterpret_cast<uintptr_t>(map) % 64 ? "the tensor map must be aligned to 64 bytes" : nullptr;
    if (!wrong) wrong = wrong_map(m, int(rank), strides, box, element_strides, int(interleave));
    if (wrong) {
        fprintf(stderr, "emulator: cuTensorMapEncodeTiled: %s (CUDA_ERROR_INVALID_VALUE)\n", wrong);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(map, &m, sizeof(m));
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    const bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
