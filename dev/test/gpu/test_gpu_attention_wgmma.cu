// test_gpu_attention_wgmma.cu: the shared cases of causal attention (cases_attention.h) on the kernels for Hopper, in
// every mode of the emulator, at lengths around the tiles. On other GPUs the cases are skipped.
#include "cuda/attention_wgmma_backward.cuh"
#include "cuda/attention_wgmma_forward.cuh"
#include "gpu/gpu_backend.h"
#include "gpu/hopper_modes.h"
#include "support/cases_attention.h"

using namespace attention_cases;

static const GpuBackend gpu_backend;

static void wgmma_forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream stream) {
    const auto launch = HS == 64 ? launch_attention_forward_wgmma<64> : launch_attention_forward_wgmma<128>;
    launch(out, lse, qkv, B, T, NH, stream);
}
// The scratch memory is NaN before each call, so that nothing depends on the call before.
static void wgmma_backward(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B,
                           int T, int NH, int HS, Stream stream) {
    const int64_t bytes = attention_wgmma_backward_scratch_bytes(B, T, NH, HS);
    void* scratch = device_scratch(bytes);
    check_cuda(cudaMemset(scratch, 0xff, size_t(bytes)));
    const auto launch = HS == 64 ? launch_attention_backward_wgmma<64> : launch_attention_backward_wgmma<128>;
    launch(dqkv, scratch, dout, out, lse, qkv, B, T, NH, stream);
}
static const Ops<bf16> wgmma_ops{wgmma_forward, wgmma_backward, gpu::attention_decode<bf16>};

static void compare(Shape s, float scale = 1.0f) {
    attention_cases::compare<bf16>(gpu_backend, s, {epsilon<bf16>(), 4 * epsilon<float>()}, scale, wgmma_ops);
}

TEST_CASE("attention on Hopper agrees with the definition at lengths around the tiles") {
    if (skips_on_other_gpus()) return;
    in_every_mode([] {
        for (const int HS : {64, 128})
            for (const int T : {1, 64, 127, 128, 129, 200, 257, 384}) compare({1, T, 1, HS});
        compare({2, 200, 3, 64});  // two tiles for each of 4 blocks, or four; two heads that are shared by two blocks
        compare({2, 300, 4, 64});
        compare({2, 300, 2, 128});
        compare({1, 1024, 1, 64});
    });
    compare({1, 1300, 2, 64});
    compare({3, 530, 3, 64});  // a head is shared by four blocks, after two others
    compare({3, 530, 3, 128});
    compare({1, 150, 2, 64}, 2.0f);  // large, but not one-hot scores
    compare({1, 150, 2, 128}, 2.0f);
}

static Tensor<float> widened_copy(const Tensor<bf16>& x) { return output("", x, 1, 0, 0).values; }

// A rounding to bf16 has an error of 0.0016 in the mean. Forward has two, of the weights and the results, backward
// four, of the weights, their gradients, the results and of out for delta. The definition in float has an error of
// 1e-6.
TEST_CASE("attention on Hopper is as near to the definition in float as its roundings to bf16 allow") {
    if (skips_on_other_gpus()) return;
    for (const int HS : {64, 128})
        for (const int T : {100, 300}) {
            const Shape s{1, T, 1, HS};
            const auto qkv = random_tensor<bf16>(s.tokens() * 3 * HS, 1),
                       dout = random_tensor<bf16>(s.tokens() * HS, 2);
            const auto x = widened_copy(qkv), dy = widened_copy(dout);
            const auto want = forward(OnHost{}, definition<float>, s, x);
            const auto r = forward(gpu_backend, wgmma_ops, s, qkv);
            CHECK(distance(r.out, want.out) < 0.0025);
            CHECK(distance(backward(gpu_backend, wgmma_ops, s, qkv, dout, r),
                           backward(OnHost{}, definition<float>, s, x, dy, want)) < 0.004);
        }
}

TEST_CASE("attention on Hopper: one row of a warp alone finds a key that is far above its others, in a later tile") {
    if (skips_on_other_gpus()) return;
    for (const int HS : {64, 128})
        for (const int query : {128, 137}) {
            const Shape s{1, 140, 1, HS};
            auto qkv = filled<bf16>(s.tokens() * 3 * HS, 0.0f);
            for (int64_t t = 0; t < s.T; t++) qkv[(t * 3 + 2) * HS] = bf16(float(t));
            qkv[query * 3 * HS] = bf16(1000.0f);
            qkv[(5 * 3 + 1) * HS] = bf16(1.0f);
            const auto [out, lse] = forward(gpu_backend, wgmma_ops, s, qkv);
            for (int t = 0; t < s.T; t++)
                CHECK(std::fabs(float(out[t * HS]) - (t == query ? 5.0f : 0.5f * float(t))) <= 0.25f);
            CHECK(std::fabs(lse[query] - 1000.0f / std::sqrt(float(HS))) < 1e-4f);
        }
}

TEST_CASE("attention on Hopper has the same bits in two runs") {
    if (skips_on_other_gpus()) return;
    for (const int HS : {64, 128}) same_bits_twice<bf16>(gpu_backend, {2, 300, 3, HS}, wgmma_ops);
}

TEST_CASE("attention on Hopper: huge queries select one value, and scores of up to 1e32 do not overflow") {
    if (skips_on_other_gpus()) return;
    for (const int HS : {64, 128}) one_hot_queries<bf16>(gpu_backend, HS, 125.0f * epsilon<float>(), wgmma_ops);
    for (const int HS : {64, 128})
        for (const float magnitude : {3e3f, 3e4f, 1e15f}) far_scores<bf16>(gpu_backend, HS, magnitude, true, wgmma_ops);
}

TEST_CASE("attention on Hopper: a NaN in a key reaches every later query, and none before") {
    if (skips_on_other_gpus()) return;
    for (const int HS : {64, 128})
        for (const int key : {0, 100}) nan_in_a_key<bf16>(gpu_backend, 150, key, HS, wgmma_ops);
}
