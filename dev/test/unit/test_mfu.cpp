// test_mfu.cpp: compares the FLOPs per token with the formula computed by hand, and looks up names of devices in the
// table.
#include "model/mfu.h"

#include <doctest/doctest.h>

TEST_CASE("d12 at 1024 tokens needs 803,261,952 FLOP per token") {
    // 6 * 124,439,808 + 6 * 12 * 768 * 1024
    CHECK(flops_per_token(config_by_name("d12"), 1024) == 803261952.0);
    CHECK(flops_per_token(config_by_name("d12"), 256) == 746638848.0 + 14155776.0);
    CHECK(flops_per_token(config_by_name("d48"), 1024) == 6.0 * 1557611200.0 + 6.0 * 48 * 1600 * 1024);
}

TEST_CASE("MFU is a fraction of the peak") {
    // llm.c on 8 H100: 3,745,000 tokens/s, 38.0 % of 989 TFLOP/s each.
    const double flops = flops_per_token(config_by_name("d12"), 1024);
    CHECK(mfu(3745e3 / 8, flops, 989e12) == doctest::Approx(0.3802).epsilon(1e-3));
    CHECK(mfu(1000.0, flops, 0.0) == 0.0);
}

TEST_CASE("a device is found in the table by the whole words of its name") {
    CHECK(gpu_peak("NVIDIA H100 80GB HBM3").bf16 == 989);
    CHECK(gpu_peak("NVIDIA H100 PCIe").bf16 == 756);
    CHECK(gpu_peak("NVIDIA H100 NVL").bf16 == 835);
    CHECK(gpu_peak("NVIDIA H200").bf16 == 989);
    CHECK(gpu_peak("NVIDIA GH200 480GB").bf16 == 989);
    CHECK(gpu_peak("NVIDIA A100-SXM4-80GB").bf16 == 312);
    CHECK(gpu_peak("NVIDIA A10").bf16 == 125);
    CHECK(gpu_peak("NVIDIA B200").bf16 == 2250);
    CHECK(gpu_peak("NVIDIA L4").bf16 == 121);
    CHECK(gpu_peak("NVIDIA L40").bf16 == 181);
    CHECK(gpu_peak("NVIDIA L40S").bf16 == 362);
    CHECK(gpu_peak("NVIDIA GeForce RTX 4090").bf16 == 165.2);
    CHECK(gpu_peak("NVIDIA GeForce RTX 4090 D").bf16 == 147);
    CHECK(gpu_peak("NVIDIA RTX 6000 Ada Generation").bf16 == 364.2);
}

TEST_CASE("devices not in the table, laptop GPUs and MIG slices have no peak") {
    CHECK(gpu_peak("NVIDIA A10G").bf16 == 0);
    CHECK(gpu_peak("NVIDIA GeForce RTX 4090 Laptop GPU").bf16 == 0);
    CHECK(gpu_peak("NVIDIA A100-SXM4-80GB MIG 1g.10gb").bf16 == 0);
    CHECK(gpu_peak("Tesla V100-SXM2-16GB").bf16 == 0);
    CHECK(gpu_peak("").bf16 == 0);
}

TEST_CASE("no row of the table is hidden by a row above it") {
    for (const GpuPeak& row : gpu_peaks)
        CHECK(std::string(gpu_peak(std::string("NVIDIA ") + row.name).name) == row.name);
}
