// cudnn_plans.cpp: tests that cuDNN has engines for our attention graphs on the GPUs described here, and that their
// workspace is within the limit. It needs cuDNN but no GPU; test_libraries.py builds and runs it.
#include "cuda/cudnn_plan.h"

#include <doctest/doctest.h>

#include "support/skip.h"

using gpu::AttentionPass;
using gpu::AttentionSizes;
using gpu::CudnnPlan;

constexpr const char* pass_names[] = {"forward", "backward", "deterministic backward"};
constexpr AttentionPass passes[] = {AttentionPass::forward, AttentionPass::backward,
                                    AttentionPass::deterministic_backward};
constexpr int64_t MiB = 1 << 20;

// Figures from data sheets.
struct Device {
    const char* name;
    int capability, multiprocessors, shared_bytes, pci_id, core_khz, memory_khz, bus_bits, l2_bytes;
    long long memory_bytes;
};
constexpr Device A100 = {"A100-SXM4-80GB", 800, 108, 166912, 8370, 1410000, 1593000, 5120, 41943040, 85029158912},
                 H100 = {"H100 80GB HBM3", 900, 132, 232448, 9008, 1980000, 2619000, 5120, 52428800, 85029158912},
                 B200 = {"B200", 1000, 148, 232448, 10497, 1980000, 2619000, 8192, 132644864, 191000000000};

// cuDNN's format for device properties.
static std::string json_of(const Device& d) {
    return format(R"({"deviceName": "NVIDIA %s", "deviceVer": %d, "multiProcessorCount": %d,
        "maxSharedMemoryPerBlockOptin": %d, "pciDeviceId": %d, "smClockRateKHz": %d, "memClockRateKHz": %d,
        "memoryBusWidth": %d, "l2CacheSize": %d, "totalGlobalMem": %lld,
        "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
        "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
        "isTccDriver": 0, "supportCoopLaunch": 1, "driverVer": 13000, "cudaDeviceId": 0})",
                  d.name, d.capability, d.multiprocessors, d.shared_bytes, d.pci_id, d.core_khz, d.memory_khz,
                  d.bus_bits, d.l2_bytes, d.memory_bytes);
}

static CudnnPlan plan_for(AttentionPass pass, const AttentionSizes& shape, const Device& device, int first = 0) {
    return gpu::plan_attention(pass, shape, {nullptr, json_of(device)}, first);
}

// The first plans.
static std::vector<CudnnPlan> plans_for(AttentionPass pass, const AttentionSizes& shape, const Device& device,
                                        size_t most = 4) {
    std::vector<CudnnPlan> plans;
    for (int first = 0; plans.size() < most; first = plans.back().candidate + 1) {
        CudnnPlan plan = plan_for(pass, shape, device, first);
        if (!plan) break;
        plans.push_back(std::move(plan));
    }
    return plans;
}

// Checks the first engine, which runs if --autotune is off.
static void expect_plan(AttentionPass pass, const AttentionSizes& shape, const Device& device) {
    CAPTURE(std::string(device.name));
    CAPTURE(pass_names[int(pass)]);
    const CudnnPlan found = plan_for(pass, shape, device);
    REQUIRE(bool(found));
    CHECK(found.workspace_bytes >= 0);
    CHECK(found.bytes() <= gpu::workspace_limit(pass, shape));
    CHECK((found.dq_sums_bytes > 0) == (pass == AttentionPass::backward));
}

// Allowance for small buffers in addition to those of a tensor's size. Up to 256 bytes were measured.
constexpr int64_t small_buffers = 4096;

TEST_CASE("every candidate plan for GPT-2 124M on an H100 needs no more workspace than expected") {
    const AttentionSizes shape{64, 1024, 12, 64};
    const auto forward = plans_for(AttentionPass::forward, shape, H100);
    CHECK(forward.size() >= 2);
    for (const auto& plan : forward) CHECK(plan.bytes() <= small_buffers);
    // The sums of dQ, 64 * 12 * 1024 * 64 floats, and an engine's own copy of them, or nothing.
    const auto backward = plans_for(AttentionPass::backward, shape, H100);
    CHECK(backward.size() >= 2);
    for (const auto& plan : backward) {
        CHECK(plan.dq_sums_bytes == 192 * MiB);
        CHECK(plan.workspace_bytes <= 192 * MiB + small_buffers);
    }
    // dS of all sequences, 64 * 12 * 1024 * 1024 elements in bf16.
    const auto deterministic = plans_for(AttentionPass::deterministic_backward, shape, H100);
    CHECK(deterministic.size() >= 1);
    for (const auto& plan : deterministic) {
        CHECK(plan.workspace_bytes >= 1536 * MiB);
        CHECK(plan.workspace_bytes <= 1536 * MiB + small_buffers);
    }
}

TEST_CASE("deterministic backward on a B200 prefers an engine that stores no dS") {
    if (cudnnGetVersion() < 91801) return skip_case("cuDNN has this engine from 9.18.1 on");
    for (const AttentionSizes& shape : {AttentionSizes{64, 1024, 12, 64}, {3, 100, 2, 64}, {2, 130, 3, 128}}) {
        const auto found = plans_for(AttentionPass::deterministic_backward, shape, B200, 2);
        REQUIRE(found.size() >= 2);
        CHECK(found[0].engine == 5);
        CHECK(found[0].bytes() <= small_buffers);
        CHECK(found[1].engine == 7);  // the heuristics' first
    }
}

TEST_CASE("GPT-2's shapes, awkward lengths and heads of 128 channels have a plan on each GPU") {
    for (const AttentionPass pass : passes) {
        for (const Device& device : {A100, H100, B200}) expect_plan(pass, {3, 100, 2, 64}, device);
        for (const Device& device : {A100, B200}) expect_plan(pass, {64, 1024, 12, 64}, device);
        for (const AttentionSizes& shape : {AttentionSizes{5, 1024, 25, 64}, {2, 130, 3, 128}})
            expect_plan(pass, shape, H100);
    }
    expect_plan(AttentionPass::deterministic_backward, {10, 1024, 12, 64}, H100);  // a part of a micro-batch
    expect_plan(AttentionPass::forward, {1, 1, 12, 64}, H100);
}

TEST_CASE("a shape or device that cuDNN does not support gives no plan or an error, not a crash") {
    for (const AttentionPass pass : {AttentionPass::backward, AttentionPass::deterministic_backward}) {
        const CudnnPlan none = plan_for(pass, {1, 1, 12, 64}, H100);
        CHECK(!none);
        CHECK(none.reason == "backward for one token");
    }
    const CudnnPlan none = plan_for(AttentionPass::forward, {2, 128, 3, 20}, H100);
    CHECK(!none);
    CHECK(none.reason != "");
    CHECK_THROWS_WITH_AS(gpu::plan_attention(AttentionPass::forward, {1, 64, 1, 64}, {nullptr, "{}"}, 0),
                         doctest::Contains("cudnn_plan.cpp:"), Error);
}
