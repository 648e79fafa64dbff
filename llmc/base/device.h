// device.h: memory, copies, streams and events of the device, declared once; defined in cuda/device.cu and
// cpu/device.cpp. On the CPU device memory is host memory and every call is complete when it returns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"

using Event = struct CUevent_st*;
using Graph = struct CUgraphExec_st*;

struct DeviceInfo {
    std::string name;        // "NVIDIA H100 80GB HBM3", "2 threads, avx512 + amx"
    int64_t memory_bytes;    // in all
    double peak_flops_bf16;  // FLOP/s of the matrix units for the MFU line; 0: not known
    double peak_flops_fp32;
    std::string peak_source;   // "data sheet", "measured at start", or why there is none
    std::string cpu_isa = {};  // CPU_ISA's value that the operations run on; empty: they run on a GPU
};

// Set by --debug-sync: every kernel is waited for, so that its error names it. Slow.
inline bool device_debug_sync = false;

// To be called once, before anything else here. threads: CPU threads to use, 0 = one per core.
void device_init(int local_rank, int threads);
DeviceInfo device_info();
int device_count();              // GPUs that this process sees; the CPU counts as one
std::string device_id();         // which GPU this is, of all that there are: "GPU-3f9c..." (UUID); empty on the CPU
bool device_memory_is_host();    // the CPU's pointers are the host's
bool device_bf16_is_faster();    // than fp32, in the matrix products: what --precision auto chooses by
std::string device_libraries();  // those that do the products, with versions: "cuBLASLt 13.1, cuDNN 9.19"
// From now on each shape of a product runs by the algorithm that is fastest here, timed when it first comes, and kept
// in this file for later runs. Another choice may round differently: only runs with the same file have the same bits.
// An empty name ends that. On the CPU refused: there is nothing to choose.
void device_autotune(const std::string& cache_file);

// Set by a communicator, and called again and again while the host waits for the device, with the seconds that this
// wait has lasted: it throws when what the device waits for will never come, because another rank is gone.
inline void (*while_host_waits)(double seconds) = nullptr;

// Zeroed memory, aligned to 64 bytes at least. Fails with the purpose and what was asked for. nbytes 0 gives null.
void* device_allocate(int64_t bytes, const char* purpose);
void device_free(void* memory);
// The advice for when there is no memory for this purpose. What the model itself takes does not depend on the batch.
inline const char* memory_advice(std::string_view purpose) {
    for (const char* of_model : {"weights", "gradients", "moments"})
        if (purpose.find(of_model) != purpose.npos)
            return "the model is too large for this machine; lower --layers or --channels";
    return "lower --micro-batch, or try --recompute or --logit-chunks";
}
int64_t device_bytes_allocated();  // now, by device_allocate
// That each of so many processes of this host could still allocate, with some left for the libraries.
int64_t device_bytes_free(int processes = 1);
// Host memory that the device copies from and to without a detour (pinned on CUDA).
void* host_allocate(int64_t bytes);
void host_free(void* memory);

Stream create_stream();
void destroy_stream(Stream stream);
void wait_for_stream(Stream stream);
void wait_for_device();
Event create_event();
void destroy_event(Event event);
void record_event(Event event, Stream stream);
void stream_wait_event(Stream stream, Event event);  // what is queued on stream later runs after the event
bool event_done(Event event);                        // without blocking; on the CPU always
void wait_for_event(Event event);                    // blocks the host
// An event that also keeps the time at which it is reached; and of two such that have been, the seconds between them.
Event create_timer();
double seconds_between(Event from, Event to);

// What is queued on the stream from begin_graph to end_graph is recorded and not run; run_graph queues all of it as
// one, for the price of one launch, with the same pointers and numbers each time. Not on the CPU, where calls run as
// they come.
bool device_has_graphs();
void begin_graph(Stream stream);  // not the null stream
Graph end_graph(Stream stream);
void run_graph(Graph graph, Stream stream);
void destroy_graph(Graph graph);

// A named range on the time line of a profiler; on the CPU, nothing.
struct ProfileRange {
    explicit ProfileRange(const char* name);
    ProfileRange(const ProfileRange&) = delete;
    ~ProfileRange();
};

// A stream of one's own.
struct OwnedStream {
    Stream stream = create_stream();

    OwnedStream() = default;
    OwnedStream(const OwnedStream&) = delete;
    ~OwnedStream() { destroy_stream(stream); }
};

void copy_to_device(void* device, const void* host, int64_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, int64_t bytes, Stream stream);
void copy_on_device(void* to, const void* from, int64_t bytes, Stream stream);
void fill_zero(void* device, int64_t bytes, Stream stream);

// Working memory of the operations, shared by all of them (they run one after another). device_reserve_scratch makes
// it at least that large, before training starts; device_scratch hands it out and grows it only for callers that
// reserved nothing (tests).
void device_reserve_scratch(int64_t bytes);
void* device_scratch(int64_t bytes);

// An owned array on the device.
template <class T>
struct DeviceBuffer {
    T* data = nullptr;
    int64_t size = 0;  // elements

    DeviceBuffer() = default;
    DeviceBuffer(int64_t size, const char* purpose)
        : data(static_cast<T*>(device_allocate(size * int64_t(sizeof(T)), purpose))), size(size) {}
    DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data, other.data);
        std::swap(size, other.size);
        return *this;
    }
    ~DeviceBuffer() { device_free(data); }
    int64_t bytes() const { return size * int64_t(sizeof(T)); }
};

template <class T>
std::vector<T> to_host(const T* device, int64_t size) {
    std::vector<T> host(size);
    wait_for_device();  // the null stream does not wait for the others
    copy_to_host(host.data(), device, size * int64_t(sizeof(T)), nullptr);
    wait_for_device();
    return host;
}
