// test_gpu_attention.cu: the shared cases of causal attention (cases_attention.h) on the kernels of llmc/cuda. bf16
// heads of 64 and 128 channels run on tensor cores, the others in float arithmetic, at lengths around every tile.
#include "cuda/attention.cuh"
#include "gpu/gpu_backend.h"
#include "support/cases_attention.h"

using namespace attention_cases;

static const GpuBackend gpu_backend;

template <class floatX>
static bool on_tensor_cores(int HS) {
    return sizeof(floatX) == sizeof(bf16) && (HS == 64 || HS == 128);
}

template <class floatX>
static void compare(Shape s, float scale = 1.0f) {
    const Bounds bounds = {on_tensor_cores<floatX>(s.HS) ? epsilon<floatX>() : 0.0f, 4 * epsilon<float>()};
    const WithPoisonedScratch backend{{}, gpu::attention_scratch_bytes<floatX>(s.B, s.T, s.NH, s.HS)};
    attention_cases::compare<floatX>(backend, s, bounds, scale);
}

TEST_CASE_TEMPLATE("attention with GPT-2's heads agrees with the definition", floatX, float, bf16) {
    compare<floatX>({2, 256, 3, 64});
    compare<floatX>({1, emulated ? 512 : 1024, 1, 64});
}

TEST_CASE("attention with bf16 heads of 64 and 128 agrees with the definition at lengths around the tiles") {
    for (const int HS : {64, 128})
        for (const int T : {1, 2, 7, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200}) compare<bf16>({1, T, 2, HS});
    compare<bf16>({3, 70, 2, 64});
    compare<bf16>({3, 70, 2, 128});
}

TEST_CASE_TEMPLATE("attention with heads of other sizes agrees with the definition", floatX, float, bf16) {
    for (const int T : {1, 2, 7, 17, 33, 64, 65}) compare<floatX>({2, T, 2, 24});
    for (const int HS : {8, 16, 56, 72, 80, 120, 136, 192, 200, 248, 256}) compare<floatX>({1, 37, 2, HS});
}

TEST_CASE("attention with fp32 heads agrees with the definition at lengths around the tiles") {
    for (const int T : {1, 15, 16, 17, 63, 64, 65, 129}) compare<float>({1, T, 2, 64});
    for (const int T : {31, 32, 33}) compare<float>({1, T, 2, 128});
    for (const int HS : {4, 12, 60, 68, 252}) compare<float>({1, 18, 2, HS});
}

TEST_CASE("attention with large, but not one-hot scores agrees with the definition") {
    compare<bf16>({1, 150, 2, 64}, 2.0f);
    compare<bf16>({1, 150, 2, 128}, 2.0f);
    compare<float>({1, 70, 2, 64}, 2.0f);
}

TEST_CASE_TEMPLATE("attention has the same bits in two runs", floatX, float, bf16) {
    for (const int HS : {64, 128, 40}) same_bits_twice<floatX>(gpu_backend, {2, 130, 2, HS});
}

TEST_CASE_TEMPLATE("huge queries select one value, and scores of up to 1e32 do not overflow", floatX, float, bf16) {
    for (const int HS : {64, 128, 72}) one_hot_queries<floatX>(gpu_backend, HS, 125.0f * epsilon<float>());
    for (const int HS : {64, 128, 16})
        for (const float magnitude : {3e3f, 3e4f, 1e15f})
            far_scores<floatX>(gpu_backend, HS, magnitude, on_tensor_cores<floatX>(HS));
}

TEST_CASE_TEMPLATE("a NaN in a key reaches every later query, and none before", floatX, float, bf16) {
    for (const int HS : {64, 128, 32})
        for (const int key : {0, 100}) nan_in_a_key<floatX>(gpu_backend, 150, key, HS);
}

TEST_CASE("attention with heads, lengths and batches that the kernels do not support is refused") {
    refuse_no_heads_and_no_tokens();
    bf16 x[8] = {};
    float y[8] = {};
    CHECK_THROWS_WITH_AS(gpu::attention_forward(x, y, x, 1, 1, 1, 20, nullptr),
                         doctest::Contains("heads of 20 channels must be a multiple of 8, at most 256"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_forward(x, y, x, 65536, 1, 1, 64, nullptr),
                         doctest::Contains("attention of 65536 sequences of 1 tokens: at most 65535"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_forward(x, y, x, 1, 1 << 20, 12, 64, nullptr),
                         doctest::Contains("a sequence has 2147483647 numbers at most"), Error);
}
