// device.h: memory, copies, streams and events of the device (a GPU or the CPU). One declaration for both backends,
// cuda/device.cu and cpu/device.cpp. On the CPU, device memory is host memory and calls are synchronous.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/dtype.h"

using Event = struct CUevent_st*;
using Graph = struct CUgraphExec_st*;

struct DeviceInfo {
    std::string name;        // "NVIDIA H100 80GB HBM3", "2 threads, avx512 + amx"
    int64_t memory_bytes;    // total
    double peak_flops_bf16;  // FLOP/s of the matrix units for the MFU line; 0: not known
    double peak_flops_fp32;
    std::string peak_source;   // "data sheet", "measured at start" (a lower bound), or why no peak is known
    std::string cpu_isa = {};  // instruction set of the CPU operations, a value of CPU_ISA; empty on a GPU

    double peak_flops(Dtype dtype) const { return dtype == Dtype::fp32 ? peak_flops_fp32 : peak_flops_bf16; }
};

// Call this once, before all other functions here. threads: CPU threads to use, 0 = one per core.
void device_init(int local_rank, int threads);
DeviceInfo device_info();
// Measures the peak FLOP/s of a CPU, and returns the highest value so far; 0 on a GPU.
double device_measure_peak(Dtype dtype);
int device_count();              // GPUs that this process sees; the CPU counts as one
bool device_memory_is_host();    // true on the CPU
bool device_bf16_is_faster();    // whether bf16 matmuls are faster than fp32
void device_check_fp8();         // refuses a GPU without FP8 matmuls; the CPU simulates them
std::string device_libraries();  // libraries in use, with versions: "cuBLASLt 13.1, cuDNN 9.19"

// Algorithms of matmuls and attention that were chosen by timing. Each key names the device, its libraries and a
// shape. A shape without a choice takes its library's first proposal. Algorithms may round differently, so only runs
// with the same choices are bitwise equal. On the CPU there are no such algorithms, and these functions do nothing.
// The text has a line for each choice; lines that cannot be read are ignored.
void device_load_algorithms(const std::string& text);  // replaces all choices
std::string device_algorithms();
// While timing is on, the first use of a shape without a choice times several algorithms and chooses the fastest. The
// timing repeats the operation, so a gradient that accumulates is then wrong.
void device_time_algorithms(bool on);

// Set by a communicator. Called repeatedly while the host waits for the device. It throws if the device's work can
// never complete because another rank is gone.
inline void (*while_host_waits)() = nullptr;

struct OutOfMemory : Error {
    std::string purpose;
    // state: how much of the device's memory is free and allocated.
    OutOfMemory(const char* purpose, int64_t bytes, const std::string& state)
        : Error(EXIT_INTERNAL,
                format("no memory for %s: %s bytes asked, ", purpose, with_commas(bytes).c_str()) + state),
          purpose(purpose) {}
};
// Allocates zeroed memory, aligned to at least 64 bytes. Throws OutOfMemory. 0 bytes give null.
void* device_allocate(int64_t bytes, const char* purpose);
void device_free(void* memory);
int64_t device_bytes_allocated();  // currently allocated by device_allocate
// Bytes that each of `processes` processes on this host can still allocate, minus a reserve for the libraries.
int64_t device_bytes_free(int processes = 1);
// Host memory for direct copies from and to the device, and for kernels (pinned on CUDA).
void* host_allocate(int64_t bytes);
void host_free(void* memory);

Stream create_stream(bool first = false);  // first: its work starts before that of other streams
void destroy_stream(Stream stream);
void wait_for_stream(Stream stream);
void wait_for_device();
Event create_event();
void destroy_event(Event event);
void record_event(Event event, Stream stream);
void stream_wait_event(Stream stream, Event event);  // later work on the stream waits for the event
bool event_done(Event event);                        // does not block; always true on the CPU
void wait_for_event(Event event);                    // blocks the host
// Waits like wait_for_event, but ignores errors: a destructor calls it when an error ends the program.
void wait_ignoring_errors(Event event) noexcept;
// An event that also records the time at which it completes. seconds_between takes two completed timers.
Event create_timer();
double seconds_between(Event from, Event to);

// CUDA graphs. Work queued between begin_graph and end_graph is captured and not run. run_graph queues it with one
// launch, with the same pointers and arguments each time. The CPU, whose calls are synchronous, has none.
bool device_has_graphs();
void begin_graph(Stream stream);  // the stream must not be the null stream
Graph end_graph(Stream stream);
void abandon_graph(Stream stream) noexcept;  // call it instead of end_graph after an error
void run_graph(Graph graph, Stream stream);
void destroy_graph(Graph graph);

// A named range of this thread in the timeline of base/trace.h, from its construction to the end of the block. On a GPU
// also in the timeline of a profiler such as nsys.
struct ProfileRange {
    explicit ProfileRange(const char* name, int64_t number = -1);  // name: of static duration. number: -1: none
    ProfileRange(const ProfileRange&) = delete;
    ~ProfileRange();

  private:
    const char* const name;
    const int64_t number;
    const double begin;  // seconds_now()
};
void device_begin_range(const char* name);  // opens a range in a profiler; does nothing on the CPU
void device_end_range();

// A stream that is destroyed with its owner.
struct OwnedStream {
    Stream stream;

    explicit OwnedStream(bool first = false) : stream(create_stream(first)) {}
    OwnedStream(const OwnedStream&) = delete;
    ~OwnedStream() { destroy_stream(stream); }
    operator Stream() const { return stream; }
};

void copy_to_device(void* device, const void* host, int64_t bytes, Stream stream);
void copy_to_host(void* host, const void* device, int64_t bytes, Stream stream);
void copy_on_device(void* to, const void* from, int64_t bytes, Stream stream);
// Copies rows of row_bytes, whose begins are to_stride and from_stride bytes apart.
void copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t row_bytes, int64_t rows,
               Stream stream);
void fill_zero(void* device, int64_t bytes, Stream stream);

// Scratch memory, shared by all operations (they run one after another). device_reserve_scratch makes it at least
// `bytes` large; call it before training starts. device_scratch returns it, and grows it only if none was reserved
// (tests).
void device_reserve_scratch(int64_t bytes);
void* device_scratch(int64_t bytes);

// An owned array on the device, or in pinned host memory, which kernels read and write over the bus.
template <class T>
struct DeviceBuffer {
    T* data = nullptr;
    int64_t size = 0;  // elements
    bool on_host = false;

    DeviceBuffer() = default;
    DeviceBuffer(int64_t size, const char* purpose, bool on_host = false) : size(size), on_host(on_host) {
        data = static_cast<T*>(on_host ? host_allocate(bytes()) : device_allocate(bytes(), purpose));
    }
    DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data, other.data);
        std::swap(size, other.size);
        std::swap(on_host, other.on_host);
        return *this;
    }
    ~DeviceBuffer() { on_host ? host_free(data) : device_free(data); }
    int64_t bytes() const { return size * int64_t(sizeof(T)); }
};

template <class T>
std::vector<T> to_host(const T* device, int64_t size) {
    std::vector<T> host(size);
    wait_for_device();  // the null stream does not synchronize with other streams
    copy_to_host(host.data(), device, size * int64_t(sizeof(T)), nullptr);
    wait_for_device();
    return host;
}
