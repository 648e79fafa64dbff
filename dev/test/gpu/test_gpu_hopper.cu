// test_gpu_hopper.cu: the forms of Hopper's instructions that kernels use: descriptors of both layouts of both
// operands, operands in registers, multicast, tensor maps whose boxes are cut, and stores by TMA. In the emulator, and
// on a GPU, which then agrees with the emulator about them.
#include <doctest/doctest.h>

#include "gpu/hopper_modes.h"
#include "gpu/hopper_runs.h"

TEST_CASE("a persistent GEMM by wgmma and TMA is right in every mode") {
    if (skips_on_other_gpus()) return;
    static constexpr double bound = 0.005;  // error of rounding to bf16
    in_every_mode([] {
        CHECK(gemm_error<128, 1, false, false>(256, 256, 192, 1) < bound);
        CHECK(gemm_error<128, 2, false, true>(400, 200, 136, 2) < bound);  // not multiples of the tiles
        CHECK(gemm_error<128, 2, true, false>(512, 256, 72, 4) < bound);
        CHECK(gemm_error<192, 2, true, true>(256, 192, 320, 2) < bound);
    });
}

TEST_CASE("a product of a product, with operands in registers and from stmatrix, is right in every mode") {
    if (skips_on_other_gpus()) return;
    in_every_mode([] { CHECK(chain_error(5) < 0.005); });
}
