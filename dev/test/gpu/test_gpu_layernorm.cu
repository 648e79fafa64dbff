// test_gpu_layernorm.cu: LayerNorm's shared cases (cases_layernorm.h) on the kernels of llmc/cuda, at GPT-2's widths
// and at awkward ones: around multiples of a 16-byte vector, of a warp, and of the rows that fit into the grid.
#include "cuda/layernorm.cuh"
#include "gpu/gpu_backend.h"
#include "support/cases_layernorm.h"

using namespace layernorm_cases;

static const GpuBackend gpu_backend;

// ---- forward

TEST_CASE_TEMPLATE("LayerNorm at GPT-2's widths and at awkward ones agrees with the definition", floatX, float, bf16) {
    for (int C : {768, 1024, 1280, 1600}) compare_forward<floatX>(gpu_backend, 17, C);
    for (int C : {8, 16, 24, 248, 256, 264, 384}) compare_forward<floatX>(gpu_backend, 9, C);
    compare_forward<floatX>(gpu_backend, 1, 768);
    compare_forward<floatX>(gpu_backend, 65, 64);
    for (int vecs : {16, 17, LAYERNORM_MAX_VECS})
        compare_forward<floatX>(gpu_backend, 3, 32 * 16 * vecs / int(sizeof(floatX)));
}

TEST_CASE_TEMPLATE("LayerNorm of numbers far from zero agrees with the definition", floatX, float, bf16) {
    for (const float offset : {30.0f, 1000.0f}) compare_forward<floatX>(gpu_backend, 9, 768, offset);
}

// ---- backward

TEST_CASE_TEMPLATE("LayerNorm backward at GPT-2's widths and at awkward ones agrees with the definition", floatX, float,
                   bf16) {
    for (int C : {768, 1024, 1280, 1600}) compare_backward<floatX>(gpu_backend, 17, C);
    for (int C : {8, 16, 24, 120, 128, 136, 248, 256, 264, 384}) compare_backward<floatX>(gpu_backend, 9, C);
    for (int N : {1, 2, 3, 4, 5, 7, 65}) compare_backward<floatX>(gpu_backend, N, 768);
    // Warps per row: each number up to 16 has its own kernel. The last lane has no vector in one of the two types.
    for (int warps = 1; warps <= LAYERNORM_MAX_VECS; warps += warps <= LAYERNORM_MANY_VECS ? 1 : 3) {
        const int vecs = warps * WARP_SIZE - (warps + Vec<floatX>::size / 8) % 2;
        compare_backward<floatX>(gpu_backend, 5, vecs * Vec<floatX>::size);
    }
    compare_backward<floatX>(gpu_backend, 9, 768, Dresidual::none);
    compare_backward<floatX>(gpu_backend, 9, 768, Dresidual::in_place);
    compare_backward<floatX>(gpu_backend, 9, 768, Dresidual::apart, 30.0f);
    for (const float offset : {0.0f, 1000.0f}) compare_backward<floatX>(gpu_backend, 9, 256, Dresidual::apart, offset);
}

// A GPU with 132 SMs runs 2 * 132 blocks at once, and a block has at most 14 rows at a time.
TEST_CASE_TEMPLATE("LayerNorm backward of more rows than fit into the grid agrees with the definition", floatX, float,
                   bf16) {
    compare_backward<floatX>(gpu_backend, 264 * 14, 8);
    compare_backward<floatX>(gpu_backend, 264 * 14 + 15, 8);
    compare_backward<floatX>(gpu_backend, 3 * 264 * 14 + 100, 8);
    compare_backward<floatX>(gpu_backend, 2 * 264 * 4 + 1, 3 * 512 / int(sizeof(floatX)), Dresidual::in_place);
}

TEST_CASE_TEMPLATE("LayerNorm backward without dresidual or dbranch_bias, or in place, has the same bits", floatX,
                   float, bf16) {
    optional_arguments<floatX>(gpu_backend, 500, 264);
}

TEST_CASE_TEMPLATE("a NaN reaches its row, and its column of the parameters' gradients, and no other", floatX, float,
                   bf16) {
    nan_in_a_row<floatX>(gpu_backend, 40);
    nan_in_dout<floatX>(gpu_backend, 6, 512);
}

// ---- both

TEST_CASE("LayerNorm refuses rows that are not a multiple of 16 bytes, and rows too wide for a warp") {
    bf16* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::layernorm_forward<bf16>(none, nullptr, nullptr, none, none, none, 4, 100, nullptr),
                         doctest::Contains("100 channels must be a multiple of 8, at most 5120"), Error);
    CHECK_THROWS_WITH_AS(gpu::layernorm_backward<bf16>(none, nullptr, nullptr, nullptr, none, none, none, nullptr,
                                                       nullptr, none, 4, 5128, nullptr),
                         doctest::Contains("layernorm_backward: 5128 channels must be a multiple of 8, at most 5120"),
                         Error);
    CHECK_THROWS_WITH_AS(gpu::layernorm_forward<bf16>(none, nullptr, nullptr, none, none, none, 0, 64, nullptr),
                         doctest::Contains("0 rows of 64"), Error);
}
