// device.cpp: device.h on the CPU. Device memory is host memory. All calls are synchronous: streams and events do
// nothing.
#include "base/device.h"

#include <unistd.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/common.h"
#include "base/host.h"
#include "cpu/memory.h"
#include "cpu/variants.h"

namespace {

// Makes denormal numbers zero: they slow some instructions down up to 250 times, and their values do not matter here.
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

}  // namespace

void device_init(int, int threads) {
    isa();  // a wrong CPU_ISA is refused here
    if (threads) omp_set_num_threads(threads);
    flush_denormals();  // later threads inherit it
#pragma omp parallel
    flush_denormals();
}

double device_measure_peak(Dtype dtype) {
    static double best[2] = {};
    double& peak = best[dtype == Dtype::bf16];
    return peak = std::max(peak, with_dtype(dtype, [](auto x) { return cpu::measure_peak_flops<decltype(x)>(); }));
}

DeviceInfo device_info() {
    const int64_t memory_bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    const int threads = openmp_threads();
    return {.name = format("%s, %d thread%s, %s%s", cpu_model().c_str(), threads, threads == 1 ? "" : "s",
                           isa_name(isa()), amx_refusal().c_str()),
            .memory_bytes = std::min(memory_bytes, control_groups().limit),
            .peak_flops_bf16 = device_measure_peak(Dtype::bf16),
            .peak_flops_fp32 = device_measure_peak(Dtype::fp32),
            .peak_source = "measured at start",
            .cpu_isa = isa_name(isa())};
}

int device_count() { return 1; }
bool device_memory_is_host() { return true; }
void device_check_fp8() {}
bool device_bf16_is_faster() { return isa() == Isa::amx || (isa() == Isa::avx512bf16 && has_fast_vdpbf16ps()); }

std::string device_libraries() { return "none: every matmul is a kernel of this program"; }

void* device_allocate(int64_t bytes, const char* purpose) { return cpu::allocate(bytes, purpose, true); }
void device_free(void* pointer) { cpu::release(pointer); }
void* host_allocate(int64_t bytes) { return cpu::allocate(bytes, "host memory", false); }
void host_free(void* pointer) { cpu::release(pointer); }
int64_t device_bytes_free(int processes) { return host_bytes_free(processes); }
int64_t device_bytes_allocated() { return cpu::bytes_allocated(); }

// Every call has finished its work when it returns, so there is nothing to wait for.
Stream create_stream(bool) { return nullptr; }
void destroy_stream(Stream) {}
void wait_for_stream(Stream) {}
void wait_for_device() {}
struct CUevent_st {
    double reached;  // seconds_now()
};

Event create_event() { return nullptr; }
Event create_timer() { return new CUevent_st{}; }
double seconds_between(Event from, Event to) { return to->reached - from->reached; }
void destroy_event(Event event) { delete event; }
void record_event(Event event, Stream) {
    if (event) event->reached = seconds_now();
}
void stream_wait_event(Stream, Event) {}
bool event_done(Event) { return true; }
void wait_for_event(Event) {}
void wait_ignoring_errors(Event) noexcept {}

void device_begin_range(const char*) {}
void device_end_range() {}

bool device_has_graphs() { return false; }
void begin_graph(Stream) { fail(EXIT_INTERNAL, "there are no graphs on the CPU"); }
Graph end_graph(Stream) { return nullptr; }
void abandon_graph(Stream) noexcept {}
void run_graph(Graph, Stream) {}
void destroy_graph(Graph) {}

void copy_to_device(void* device, const void* host, int64_t bytes, Stream stream) {
    copy_on_device(device, host, bytes, stream);
}
void copy_to_host(void* host, const void* device, int64_t bytes, Stream stream) {
    copy_on_device(host, device, bytes, stream);
}

// All threads share a large copy: one core reaches a third of the memory bandwidth.
void copy_on_device(void* to, const void* from, int64_t bytes, Stream) {
    constexpr int64_t chunk = 1 << 20;
#pragma omp parallel for schedule(static) if (bytes > 4 * chunk)
    for (int64_t i = 0; i < bytes; i += chunk)
        memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, std::min(chunk, bytes - i));
}

void copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t row_bytes, int64_t rows,
               Stream) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        memcpy(static_cast<char*>(to) + row * to_stride, static_cast<const char*>(from) + row * from_stride,
               size_t(row_bytes));
}

void fill_zero(void* device, int64_t bytes, Stream) {
    constexpr int64_t chunk = 1 << 20;
#pragma omp parallel for schedule(static) if (bytes > 4 * chunk)
    for (int64_t i = 0; i < bytes; i += chunk) memset(static_cast<char*>(device) + i, 0, std::min(chunk, bytes - i));
}

void device_reserve_scratch(int64_t bytes) { cpu::reserve_scratch(bytes); }
void* device_scratch(int64_t bytes) { return cpu::scratch(bytes); }

void device_load_algorithms(const std::string&) {}
std::string device_algorithms() { return {}; }
void device_time_algorithms(bool) {}
