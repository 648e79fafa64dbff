// test_gpu_layernorm.cu: LayerNorm of llmc/cuda against its definition in cpu::plain, forward and backward, at GPT-2's
// widths and at awkward ones, in bf16 and fp32.
#include "cpu/variants.h"
#include "cuda/layernorm.cuh"
#include "gpu/on_gpu.h"

// ---- forward

// Sums of C terms of about 1 in two orders differ by about sqrt(C) roundings, which mean and rstd have relative to the
// size of the numbers; out follows them and is rounded to floatX once.
template <class floatX>
static void compare_layernorm(int N, int C, float offset = 0.0f) {
    CAPTURE(N);
    CAPTURE(C);
    const int64_t size = int64_t(N) * C;
    auto inp = random_tensor<floatX>(size, 1, 1.0f, offset), add = random_tensor<floatX>(size, 2);
    auto weight = random_tensor<floatX>(C, 3), bias = random_tensor<floatX>(C, 4);
    const float row_error = 2.0f * std::sqrt(float(C)) * epsilon<float>() * (1.0f + std::fabs(offset));

    struct Outputs {
        Tensor<floatX> sum, out;
        Tensor<float> mean, rstd;
        Outputs(int64_t size, int N)
            : sum(poisoned<floatX>(size)),
              out(poisoned<floatX>(size)),
              mean(poisoned<float>(N)),
              rstd(poisoned<float>(N)) {}
    };
    Outputs got(size, N), want(size, N);
    const auto expect_equal_to_definition = [&](const std::string& name) {
        expect_close(name + " mean", got.mean, want.mean, 1, 0.0f, row_error);
        expect_close(name + " rstd", got.rstd, want.rstd, 1, row_error, 0.0f);
        expect_close(name + " out", got.out, want.out, C, rounding<floatX>(), 8 * row_error);
    };
    OnGpu<floatX> x(inp), y(add), w(weight), b(bias), sum(got.sum), out(got.out);
    OnGpu<float> mean(got.mean), rstd(got.rstd);
    const auto bring_back = [&] { sum.back(), out.back(), mean.back(), rstd.back(); };

    gpu::layernorm_forward<floatX>(out, mean, rstd, x, w, b, N, C, nullptr);
    bring_back();
    cpu::plain::layernorm_forward<floatX>(want.out.data(), want.mean.data(), want.rstd.data(), inp.data(),
                                          weight.data(), bias.data(), N, C, nullptr);
    expect_equal_to_definition("forward");

    gpu::residual_layernorm_forward<floatX>(sum, out, mean, rstd, x, y, w, b, N, C, nullptr);
    bring_back();
    cpu::plain::residual_layernorm_forward<floatX>(want.sum.data(), want.out.data(), want.mean.data(), want.rstd.data(),
                                                   inp.data(), add.data(), weight.data(), bias.data(), N, C, nullptr);
    expect_close("sum", got.sum, want.sum, C, 0.0f, 0.0f);
    expect_equal_to_definition("residual");

    gpu::residual_layernorm_forward<floatX>(x, out, mean, rstd, x, y, w, b, N, C, nullptr);  // sum in place of a
    x.back();
    expect_close("sum in place", inp, want.sum, C, 0.0f, 0.0f);
}

TEST_CASE_TEMPLATE("LayerNorm at GPT-2's sizes and at awkward ones", floatX, float, bf16) {
    for (int C : {768, 1024, 1280, 1600}) compare_layernorm<floatX>(17, C);
    for (int C : {8, 16, 24, 248, 256, 264, 384}) compare_layernorm<floatX>(9, C);
    compare_layernorm<floatX>(1, 768);
    compare_layernorm<floatX>(65, 64);
    compare_layernorm<floatX>(3, 32 * 16 * 16 / int(sizeof(floatX)));  // the widest
}

TEST_CASE_TEMPLATE("LayerNorm far from zero", floatX, float, bf16) { compare_layernorm<floatX>(9, 768, 30.0f); }

// ---- backward

constexpr float before = 0.25f;  // what is in the gradients of parameters already

template <class floatX>
struct BackwardInputs {
    int N, C;
    Tensor<floatX> dout, inp, weight, dresidual;
    Tensor<float> mean, rstd;
    BackwardInputs(int N, int C, float offset)
        : N(N),
          C(C),
          dout(random_tensor<floatX>(int64_t(N) * C, 1)),
          inp(random_tensor<floatX>(int64_t(N) * C, 2, 1.0f, offset)),
          weight(random_tensor<floatX>(C, 3)),
          dresidual(random_tensor<floatX>(int64_t(N) * C, 4)),
          mean(random_tensor<float>(N, 5, 0.1f, offset)),
          rstd(random_tensor<float>(N, 6, 0.1f, 1.0f)) {}
};

enum class Past { none, apart, in_place };  // dresidual

template <class floatX>
struct BackwardOutputs {
    Tensor<floatX> dinp;
    Tensor<float> dweight, dbias, dbranch_bias;
    BackwardOutputs(int N, int C)
        : dinp(poisoned<floatX>(int64_t(N) * C)),
          dweight(filled<float>(C, before)),
          dbias(filled<float>(C, before)),
          dbranch_bias(filled<float>(C, before)) {}
};

template <class floatX>
static BackwardOutputs<floatX> backward(BackwardInputs<floatX>& in, Past past, bool branch) {
    BackwardOutputs<floatX> out(in.N, in.C);
    OnGpu<floatX> dout(in.dout), inp(in.inp), weight(in.weight), dresidual(in.dresidual), dinp(out.dinp);
    OnGpu<float> mean(in.mean), rstd(in.rstd), dweight(out.dweight), dbias(out.dbias), dbranch_bias(out.dbranch_bias);
    gpu::layernorm_backward<floatX>(past == Past::in_place ? dresidual : dinp, dweight, dbias,
                                    branch ? dbranch_bias.device : nullptr, dout, inp, weight, mean, rstd,
                                    past == Past::none ? nullptr : dresidual.device, in.N, in.C, nullptr);
    dinp.back(), dweight.back(), dbias.back(), dbranch_bias.back();
    if (past == Past::in_place)
        check_cuda(cudaMemcpy(out.dinp.data(), dresidual, size_t(out.dinp.buffer.bytes()), cudaMemcpyDeviceToHost));
    return out;
}

// How far sums are from `before` plus the column sums of d, relative to what they add up.
template <class floatX>
static Tensor<float> off_column_sums(const Tensor<float>& sums, const Tensor<floatX>& d, int C) {
    auto off = poisoned<float>(C);
    for (int c = 0; c < C; c++) {
        double sum = double(before), size = sum;
        for (int64_t i = c; i < d.size(); i += C) sum += double(float(d[i])), size += std::fabs(double(float(d[i])));
        off[c] = float((double(sums[c]) - sum) / size);
    }
    return off;
}

// The averages over a row sum C terms of about 1, in two orders, which differ by about sqrt(C) roundings; dinp follows
// them and is rounded once. Gradients of parameters are sums of N terms. dbranch_bias is compared with the dinp that
// was stored, as a number may be rounded to either side.
template <class floatX>
static void compare_backward(int N, int C, Past past = Past::apart, float offset = 0.0f) {
    CAPTURE(N);
    CAPTURE(C);
    BackwardInputs<floatX> in(N, C, offset);
    const auto got = backward(in, past, true);
    BackwardOutputs<floatX> want(N, C);
    cpu::plain::layernorm_backward<floatX>(want.dinp.data(), want.dweight.data(), want.dbias.data(), nullptr,
                                           in.dout.data(), in.inp.data(), in.weight.data(), in.mean.data(),
                                           in.rstd.data(), past == Past::none ? nullptr : in.dresidual.data(), N, C,
                                           nullptr);
    const float row_error = 2.0f * std::sqrt(float(C)) * epsilon<float>() * (1.0f + std::fabs(offset));
    const float column_error = std::sqrt(float(N)) * (8.0f + 2.0f * std::sqrt(float(N))) * epsilon<float>();
    expect_close("dinp", got.dinp, want.dinp, C, rounding<floatX>(), 8 * row_error);
    expect_close("dweight", got.dweight, want.dweight, 1, 0.0f, column_error * (1.0f + std::fabs(offset)));
    expect_close("dbias", got.dbias, want.dbias, 1, 0.0f, column_error);
    expect_close("dbranch_bias", off_column_sums(got.dbranch_bias, got.dinp, C), filled<float>(C, 0.0f), 1, 0.0f,
                 (8.0f + std::sqrt(float(N))) * epsilon<float>());
}

TEST_CASE_TEMPLATE("LayerNorm backward at GPT-2's widths and at awkward ones", floatX, float, bf16) {
    for (int C : {768, 1024, 1280, 1600}) compare_backward<floatX>(17, C);
    for (int C : {8, 16, 24, 120, 128, 136, 248, 256, 264, 384}) compare_backward<floatX>(9, C);
    for (int N : {1, 2, 3, 4, 5, 7, 65}) compare_backward<floatX>(N, 768);
    for (int vecs : {13, 14, 15, 16}) compare_backward<floatX>(3, vecs * 512 / int(sizeof(floatX)));  // the widest
    compare_backward<floatX>(9, 768, Past::none);
    compare_backward<floatX>(9, 768, Past::in_place);
    compare_backward<floatX>(9, 768, Past::apart, 30.0f);
}

// 264 blocks have at most 14 rows at a time.
TEST_CASE_TEMPLATE("LayerNorm backward in several turns", floatX, float, bf16) {
    compare_backward<floatX>(264 * 14, 8);
    compare_backward<floatX>(264 * 14 + 15, 8);
    compare_backward<floatX>(3 * 264 * 14 + 100, 8);
    compare_backward<floatX>(2 * 264 * 4 + 1, 3 * 512 / int(sizeof(floatX)), Past::in_place);
}

TEST_CASE_TEMPLATE("without dbranch_bias the rest has the same bits, and so have two runs", floatX, float, bf16) {
    const int N = 500, C = 264;
    BackwardInputs<floatX> in(N, C, 0.0f);
    const auto with = backward(in, Past::apart, true);
    for (const bool branch : {true, false}) {
        const auto again = backward(in, Past::apart, branch);
        expect_close("dinp", again.dinp, with.dinp, C, 0.0f, 0.0f);
        expect_close("dweight", again.dweight, with.dweight, 1, 0.0f, 0.0f);
        expect_close("dbias", again.dbias, with.dbias, 1, 0.0f, 0.0f);
        CHECK((again.dbranch_bias[C - 1] == with.dbranch_bias[C - 1]) == branch);
    }
}

TEST_CASE("a NaN of dout stays in its row of dinp, and in its columns of the sums of the rest") {
    const int N = 6, C = 512;
    BackwardInputs<bf16> in(N, C, 0.0f);
    in.dout[4 * C + 300] = bf16(NAN);
    const auto got = backward(in, Past::apart, true);
    for (int c = 0; c < C; c++) {
        for (int n = 0; n < N; n++) REQUIRE(std::isnan(float(got.dinp[n * C + c])) == (n == 4));
        REQUIRE(std::isnan(got.dweight[c]) == (c == 300));
        REQUIRE(std::isnan(got.dbias[c]) == (c == 300));
        REQUIRE(std::isnan(got.dbranch_bias[c]));
    }
}

// ---- both

TEST_CASE("LayerNorm refuses rows that vectors of 16 bytes do not fill, and rows too wide for a warp") {
    bf16* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::layernorm_forward<bf16>(none, nullptr, nullptr, none, none, none, 4, 100, nullptr),
                         doctest::Contains("100 channels must be a multiple of 8, at most 4096"), Error);
    CHECK_THROWS_WITH_AS(gpu::layernorm_forward<bf16>(none, nullptr, nullptr, none, none, none, 4, 4104, nullptr),
                         doctest::Contains("4104 channels must be a multiple of 8, at most 4096"), Error);
    CHECK_THROWS_WITH_AS(gpu::layernorm_backward<bf16>(none, nullptr, nullptr, nullptr, none, none, none, nullptr,
                                                       nullptr, none, 4, 4104, nullptr),
                         doctest::Contains("layernorm_backward: 4104 channels must be a multiple of 8, at most 4096"),
                         Error);
    CHECK_THROWS_WITH_AS(gpu::layernorm_forward<bf16>(none, nullptr, nullptr, none, none, none, 0, 64, nullptr),
                         doctest::Contains("0 rows of 64"), Error);
}
