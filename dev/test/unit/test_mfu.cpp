// test_mfu.cpp: compares the FLOPs per token with the formula computed by hand, and looks up names of devices in the
// table.
#include "model/mfu.h"

#include <doctest/doctest.h>

#include <string>
#include <utility>

TEST_CASE("d12 at 1024 tokens needs 803,261,952 FLOP per token, and MFU is a fraction of the peak") {
    // 6 * 124,439,808 + 6 * 12 * 768 * 1024
    const double flops = flops_per_token(config_by_name("d12"), 1024);
    CHECK(flops == 803261952.0);
    CHECK(flops_per_token(config_by_name("d48"), 256) == 6.0 * 1557611200.0 + 6.0 * 48 * 1600 * 256);
    // llm.c on 8 H100: 3,745,000 tokens/s, 38.0 % of 989 TFLOP/s each.
    CHECK(mfu(3745e3 / 8, flops, 989e12) == doctest::Approx(0.3802).epsilon(1e-3));
    CHECK(mfu(1000.0, flops, 0.0) == 0.0);
}

TEST_CASE("a device is found in the table by the whole words of its name, but no laptop GPU and no MIG slice") {
    for (const auto& [name, peak] :
         {std::pair("NVIDIA H100 80GB HBM3", 989.0), std::pair("NVIDIA H100 PCIe", 756.0),
          std::pair("NVIDIA GH200 480GB", 989.0), std::pair("NVIDIA A100-SXM4-80GB", 312.0),
          std::pair("NVIDIA L4", 121.0), std::pair("NVIDIA L40", 181.0), std::pair("NVIDIA GeForce RTX 4090 D", 147.0),
          std::pair("NVIDIA A10G", 0.0), std::pair("NVIDIA GeForce RTX 4090 Laptop GPU", 0.0),
          std::pair("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 0.0), std::pair("Tesla V100-SXM2-16GB", 0.0),
          std::pair("", 0.0)})
        CHECK(gpu_peak(name).bf16 == peak);
    for (const GpuPeak& row : gpu_peaks)  // none is hidden by a row above it
        CHECK(gpu_peak(std::string("NVIDIA ") + row.name).name == std::string(row.name));
}
