// occupancy.cpp: which launches fit the emulated GPU, and how many blocks of a kernel a multiprocessor runs at once.
// Compiled without sanitizers, like emulator.cpp.
//
// ptxas has reported a kernel's registers and static shared memory for each architecture (dev/cuda_budget.txt). Kernels
// of tests are not in that file. They take no registers here, and the emulator learns of their static shared memory
// while they run.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <regex>
#include <string_view>
#include <cxxabi.h>
#include <dlfcn.h>

using namespace cudart;
using simt::GpuLimits, simt::KernelUsage, simt::Site;

constexpr int64_t REGISTERS = 64 << 10;  // in a multiprocessor
constexpr int REGISTER_UNIT = 256, SHARED_UNIT = 128;
constexpr int MAX_CLUSTER = 8;  // that every GPU with clusters has

// CUDA programming guide, "Technical Specifications per Compute Capability".
static constexpr GpuLimits gpus[] = {
    {80, 2048, 32, 164 << 10}, {86, 1536, 16, 100 << 10},  {87, 1536, 16, 164 << 10},  {89, 1536, 24, 100 << 10},
    {90, 2048, 32, 228 << 10}, {100, 2048, 32, 228 << 10}, {120, 1536, 24, 100 << 10},
};

const GpuLimits& simt::gpu_limits(int capability) {
    const GpuLimits* found = gpus;
    for (const GpuLimits& gpu : gpus)
        if (gpu.capability <= capability) found = &gpu;
    return *found;
}

// The text of dev/cuda_budget.txt.
asm(R"(
.pushsection .rodata
simt_budget:
.incbin "dev/cuda_budget.txt"
.byte 0
.popsection
)");
extern "C" const char simt_budget[];

// The kernel's name as in dev/cuda_budget.txt, for example "adamw_kernel<bf16,0>". Empty if the program does not export
// the kernel's symbol.
static std::string name_of(const void* kernel) {
    Dl_info symbol;
    if (!dladdr(kernel, &symbol) || symbol.dli_saddr != kernel) return "";
    char* text = abi::__cxa_demangle(symbol.dli_sname, nullptr, nullptr, nullptr);
    static const std::regex left_out(R"(^void |\(anonymous namespace\)::|\([A-Z][A-Za-z]*\)| )");  // see check_cuda.sh
    const std::string name = std::regex_replace(text ? text : symbol.dli_sname, left_out, "");
    free(text);
    return name.substr(0, name.find('('));
}

// A GPU runs the code of the last architecture up to its own with the same major number. `budget` is in their order.
KernelUsage simt::usage_in(const char* budget, const std::string& name, int capability) {
    KernelUsage usage{name};
    const std::string_view text(budget);
    for (size_t at = 0; (at = text.find(' ' + name + ' ', at)) != text.npos; at++) {
        const int architecture = atoi(budget + text.rfind('\n', at) + 1);  // 90 for "90a"
        if (architecture / 10 == capability / 10 && architecture <= capability)
            sscanf(budget + at + name.size() + 2, "%d %*d %d", &usage.registers, &usage.shared);
    }
    return usage;
}

static const KernelUsage& usage_of(const void* kernel) {
    static std::map<std::pair<const void*, int>, KernelUsage> known;
    const std::pair key{kernel, simt::config.compute_capability};
    auto found = known.find(key);
    if (found == known.end())
        found = known.emplace(key, simt::usage_in(simt_budget, name_of(kernel), key.second)).first;
    return found->second;
}

static int64_t round_up(int64_t n, int unit) { return (n + unit - 1) / unit * unit; }

// As NVIDIA's cuda_occupancy.h computes it. A multiprocessor has four parts with their own registers and warps.
int simt::blocks_per_multiprocessor(const KernelUsage& kernel, int threads, int64_t shared_bytes, int capability) {
    const GpuLimits& gpu = gpu_limits(capability);
    const int64_t warps = (threads + 31) / 32, of_warp = round_up(32 * kernel.registers, REGISTER_UNIT);
    int64_t blocks = std::min<int64_t>(gpu.blocks, gpu.threads / 32 / warps);
    if (of_warp) blocks = std::min(blocks, REGISTERS / 4 / of_warp * 4 / warps);
    const int64_t of_block = round_up(kernel.shared + shared_bytes + GpuLimits::reserved_shared, SHARED_UNIT);
    return int(std::min(blocks, gpu.shared / of_block));
}

int64_t cudart::asked_shared(const void* kernel) {
    const auto asked = runtime().max_dynamic.find(kernel);
    return asked == runtime().max_dynamic.end() ? 0 : asked->second;
}

// Whether a block of the kernel may have so much dynamic shared memory.
static bool may_have_shared(const void* kernel, int64_t bytes) {
    return bytes >= 0 &&
           (bytes + usage_of(kernel).shared <= GpuLimits::default_shared || bytes <= asked_shared(kernel));
}

cudaError_t cudart::check_launch(simt::Call* call, dim3 grid, dim3 block, int64_t shared_bytes, Site site) {
    const KernelUsage& k = usage_of(call->kernel);
    call->registers = k.registers;
    const int capability = simt::config.compute_capability;
    if (!k.registers && strstr(site.file, "llmc/")) {
        fprintf(stderr, "emulator: kernel \"%s\" on sm_%d\n", k.name.c_str(), capability);
        simt::report("a kernel that dev/cuda_budget.txt does not have: run dev/check_cuda.sh --update", site);
    }
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    cudaError_t error = cudaSuccess;
    const char* reason = "";
    if (!grid.x || !grid.y || !grid.z || grid.x >> 31 || grid.y > 65535 || grid.z > 65535 || threads < 1 ||
        threads > 1024 || block.z > 64) {
        error = cudaErrorInvalidConfiguration, reason = "an empty grid or block, or beyond the limits of a GPU";
    } else if (call->cluster < 1 || call->cluster > MAX_CLUSTER || grid.x % unsigned(call->cluster) ||
               (call->cluster > 1 && capability < 90)) {
        error = cudaErrorInvalidClusterSize, reason = "clusters have 1 to 8 blocks, divide the grid, and need sm_90";
    } else if (!may_have_shared(call->kernel, shared_bytes)) {
        error = cudaErrorInvalidValue, reason = "more shared memory than cudaFuncSetAttribute has allowed";
    } else if (!simt::blocks_per_multiprocessor(k, int(threads), shared_bytes, capability)) {
        error = cudaErrorLaunchOutOfResources, reason = "more registers than a multiprocessor has";
    }
    if (error == cudaSuccess) return error;
    fprintf(stderr,
            "emulator: a launch of %s at %s:%d on sm_%d, (%u, %u, %u) blocks of (%u, %u, %u) threads with %d "
            "registers, %d + %lld bytes of shared memory: %s (%s)\n",
            k.name.empty() ? "a kernel" : k.name.c_str(), site.file, site.line, capability, grid.x, grid.y, grid.z,
            block.x, block.y, block.z, k.registers, k.shared, static_cast<long long>(shared_bytes), reason,
            cudaGetErrorName(error));
    return result(error);
}

cudaError_t cudaFuncGetName(const char** name, const void* kernel) {
    *name = usage_of(kernel).name.c_str();
    return **name ? cudaSuccess : result(cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    attributes->sharedSizeBytes = size_t(usage_of(kernel).shared);
    return result(simt::config.kernel_images ? cudaSuccess : cudaErrorNoKernelImageForDevice);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
    const int64_t limit = simt::gpu_limits(simt::config.compute_capability).shared_of_block();
    if (value < 0 || value + usage_of(kernel).shared > limit) return result(cudaErrorInvalidValue);
    runtime().max_dynamic[kernel] = value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          size_t shared_bytes) {
    if (threads < 1 || threads > 1024) return result(cudaErrorInvalidValue);
    *blocks = may_have_shared(kernel, int64_t(shared_bytes))
                  ? simt::blocks_per_multiprocessor(usage_of(kernel), threads, int64_t(shared_bytes),
                                                    simt::config.compute_capability)
                  : 0;
    return completed();
}
