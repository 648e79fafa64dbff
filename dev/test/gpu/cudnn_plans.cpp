// cudnn_plans.cpp: tests that cuDNN has engines for our attention graphs on the GPUs described in dev/test/gpu/devices,
// and that their workspace is within the limit. It needs cuDNN but no GPU; test_libraries.py builds and runs it.
//
// The descriptions are in cuDNN's JSON format for device properties, with figures from data sheets.
#include "cuda/cudnn_plan.h"

#include <doctest/doctest.h>

#include "base/files.h"
#include "support/skip.h"

using gpu::AttentionPass;
using gpu::AttentionSizes;
using gpu::CudnnPlan;

constexpr const char* pass_names[] = {"forward", "backward", "deterministic backward"};
constexpr AttentionPass passes[] = {AttentionPass::forward, AttentionPass::backward,
                                    AttentionPass::deterministic_backward};
constexpr const char* devices[] = {"sm80_a100", "sm90_h100", "sm100_b200"};
constexpr int64_t MiB = 1 << 20;

static CudnnPlan plan_for(AttentionPass pass, const AttentionSizes& shape, const char* device, int first = 0) {
    const std::string path = format("dev/test/gpu/devices/%s.json", device);
    return gpu::plan_attention(pass, shape, {nullptr, read_file(path, 1 << 16)}, first);
}

// The first plans.
static std::vector<CudnnPlan> plans_for(AttentionPass pass, const AttentionSizes& shape, const char* device,
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
static void expect_plan(AttentionPass pass, const AttentionSizes& shape, const char* device) {
    CAPTURE(device);
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
    const auto forward = plans_for(AttentionPass::forward, shape, "sm90_h100");
    CHECK(forward.size() >= 2);
    for (const auto& plan : forward) CHECK(plan.bytes() <= small_buffers);
    // The sums of dQ, 64 * 12 * 1024 * 64 floats, and an engine's own copy of them, or nothing.
    const auto backward = plans_for(AttentionPass::backward, shape, "sm90_h100");
    CHECK(backward.size() >= 2);
    for (const auto& plan : backward) {
        CHECK(plan.dq_sums_bytes == 192 * MiB);
        CHECK(plan.workspace_bytes <= 192 * MiB + small_buffers);
    }
    // dS of all sequences, 64 * 12 * 1024 * 1024 elements in bf16.
    const auto deterministic = plans_for(AttentionPass::deterministic_backward, shape, "sm90_h100");
    CHECK(deterministic.size() >= 1);
    for (const auto& plan : deterministic) {
        CHECK(plan.workspace_bytes >= 1536 * MiB);
        CHECK(plan.workspace_bytes <= 1536 * MiB + small_buffers);
    }
}

TEST_CASE("deterministic backward on a B200 prefers an engine that stores no dS") {
    if (cudnnGetVersion() < 91801) return skip_case("cuDNN has this engine from 9.18.1 on");
    for (const AttentionSizes& shape : {AttentionSizes{64, 1024, 12, 64}, {3, 100, 2, 64}, {2, 130, 3, 128}}) {
        const auto found = plans_for(AttentionPass::deterministic_backward, shape, "sm100_b200", 2);
        REQUIRE(found.size() >= 2);
        CHECK(found[0].engine == 5);
        CHECK(found[0].bytes() <= small_buffers);
        CHECK(found[1].engine == 7);  // the heuristics' first
    }
}

TEST_CASE("GPT-2's shapes, awkward lengths and heads of 128 channels have a plan on each GPU") {
    for (const AttentionPass pass : passes) {
        for (const char* device : devices) expect_plan(pass, {3, 100, 2, 64}, device);
        for (const char* device : {"sm80_a100", "sm100_b200"}) expect_plan(pass, {64, 1024, 12, 64}, device);
        for (const AttentionSizes& shape : {AttentionSizes{5, 1024, 25, 64}, {2, 130, 3, 128}})
            expect_plan(pass, shape, "sm90_h100");
    }
    expect_plan(AttentionPass::deterministic_backward, {10, 1024, 12, 64}, "sm90_h100");  // a part of a micro-batch
    expect_plan(AttentionPass::forward, {1, 1, 12, 64}, "sm90_h100");
}

TEST_CASE("a shape or device that cuDNN does not support gives no plan or an error, not a crash") {
    for (const AttentionPass pass : {AttentionPass::backward, AttentionPass::deterministic_backward}) {
        const CudnnPlan none = plan_for(pass, {1, 1, 12, 64}, "sm90_h100");
        CHECK(!none);
        CHECK(none.reason == "backward for one token");
    }
    const CudnnPlan none = plan_for(AttentionPass::forward, {2, 128, 3, 20}, "sm90_h100");
    CHECK(!none);
    CHECK(none.reason != "");
    CHECK_THROWS_WITH_AS(gpu::plan_attention(AttentionPass::forward, {1, 64, 1, 64}, {nullptr, "{}"}, 0),
                         doctest::Contains("cudnn_plan.cpp:"), Error);
}
