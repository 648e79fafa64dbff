// test_gradients.cpp: compares the backward pass of every operation's definition with finite differences of its forward
// pass.
//
// The loss is the sum of weight * output, in double, with fixed random weights. The gradient of input i is compared
// with (loss(x_i + h) - loss(x_i - h)) / 2h, where h = 2^-8. The finite difference has two errors. Its cubic term is
// h^2/6 = 3e-6 times the third derivative, which is up to about 100 here. The outputs are floats with a relative error
// of about 2^-24; a hundred of them, divided by 2h, have an error of about 8e-5. The tolerance of 1e-3 covers both, and
// a wrong term in a gradient exceeds it by far.
#include <functional>

#include "support/each_variant.h"
#include "support/test.h"

constexpr float h = 0x1p-8f;
constexpr double tolerance = 1e-3;

static double weighted(const Tensor<float>& out, const Tensor<float>& weights) {
    double sum = 0.0;
    for (int64_t i = 0; i < out.size(); i++) sum += double(out[i]) * double(weights[i]);
    return sum;
}

static void check_gradient(const std::string& name, Tensor<float>& x, const Tensor<float>& gradient,
                           const std::function<double()>& loss) {
    REQUIRE(x.size() == gradient.size());
    for (int64_t i = 0; i < x.size(); i++) {
        const float before = x[i];
        x[i] = before + h;
        const double above = loss();
        x[i] = before - h;
        const double below = loss();
        x[i] = before;
        const double difference = (above - below) / (2.0 * double(h));
        CAPTURE(name);
        CAPTURE(i);
        CAPTURE(difference);
        CAPTURE(gradient[i]);
        CHECK(std::fabs(difference - double(gradient[i])) <= tolerance * (1.0 + std::fabs(difference)));
    }
}

TEST_CASE("the gradient of the embeddings matches finite differences") {
    const int B = 2, T = 3, C = 4, V = 3;
    const auto tokens = random_tokens(B * T, V, 1);
    auto wte = random_tensor<float>(V * C, 2), wpe = random_tensor<float>(T * C, 3), out = poisoned<float>(B * T * C);
    const auto dout = random_tensor<float>(B * T * C, 4);
    auto dwte = filled<float>(V * C, 0.0f), dwpe = filled<float>(T * C, 0.0f);
    cpu::plain::embedding_backward(dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T, C, {0, V}, nullptr);
    const auto loss = [&] {
        cpu::plain::embedding_forward(out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C, {0, V}, nullptr);
        return weighted(out, dout);
    };
    check_gradient("wte", wte, dwte, loss);
    check_gradient("wpe", wpe, dwpe, loss);
}

TEST_CASE("the gradient of LayerNorm matches finite differences") {
    const int N = 3, C = 7;
    auto inp = random_tensor<float>(N * C, 1), weight = random_tensor<float>(C, 2), bias = random_tensor<float>(C, 3);
    const auto dout = random_tensor<float>(N * C, 4);
    auto out = poisoned<float>(N * C), mean = poisoned<float>(N), rstd = poisoned<float>(N);
    auto dinp = filled<float>(N * C, 0.0f), dweight = filled<float>(C, 0.0f), dbias = filled<float>(C, 0.0f);
    const auto loss = [&] {
        cpu::plain::layernorm_forward(out.data(), mean.data(), rstd.data(), nullptr, inp.data(), weight.data(),
                                      bias.data(), N, C, nullptr);
        return weighted(out, dout);
    };
    loss();
    const float* no_residual = nullptr;
    cpu::plain::layernorm_backward(dinp.data(), dweight.data(), dbias.data(), nullptr, nullptr, dout.data(), inp.data(),
                                   weight.data(), mean.data(), rstd.data(), no_residual, N, C, nullptr);
    check_gradient("inp", inp, dinp, loss);
    check_gradient("weight", weight, dweight, loss);
    check_gradient("bias", bias, dbias, loss);
}

TEST_CASE("the gradient of the matmul matches finite differences") {
    const int N = 3, IC = 5, OC = 4;
    auto inp = random_tensor<float>(N * IC, 1), weight = random_tensor<float>(OC * IC, 2);
    auto bias = random_tensor<float>(OC, 3), out = poisoned<float>(N * OC);
    const auto dout = random_tensor<float>(N * OC, 4);
    auto dinp = poisoned<float>(N * IC), dweight = poisoned<float>(OC * IC), dbias = poisoned<float>(OC);
    float* no_gelu = nullptr;
    const Weight<float> rows{weight.data(), nullptr};
    cpu::plain::matmul_backward(dinp.data(), nullptr, dweight.data(), dbias.data(), dout.data(), inp.data(), rows,
                                static_cast<const float*>(no_gelu), N, IC, OC, false, nullptr);
    const auto loss = [&] {
        cpu::plain::matmul_forward(out.data(), no_gelu, nullptr, inp.data(), rows, bias.data(),
                                   static_cast<const float*>(no_gelu), N, IC, OC, nullptr);
        return weighted(out, dout);
    };
    check_gradient("inp", inp, dinp, loss);
    check_gradient("weight", weight, dweight, loss);
    check_gradient("bias", bias, dbias, loss);
}

// Two matmuls with GELU between them, as in the MLP. The first one's forward pass computes GELU, the second one's
// backward pass computes its gradient.
TEST_CASE("the gradient of a matmul, GELU and a second matmul matches finite differences") {
    const int N = 2, IC = 3, MC = 5, OC = 4;
    auto inp = random_tensor<float>(N * IC, 1), weight1 = random_tensor<float>(MC * IC, 2);
    auto bias1 = random_tensor<float>(MC, 3), weight2 = random_tensor<float>(OC * MC, 4);
    const auto dout = random_tensor<float>(N * OC, 5);
    auto pre_gelu = poisoned<float>(N * MC), middle = poisoned<float>(N * MC), out = poisoned<float>(N * OC);
    auto dmiddle = poisoned<float>(N * MC), dinp = poisoned<float>(N * IC), dbias1 = poisoned<float>(MC);
    auto dweight1 = poisoned<float>(MC * IC), dweight2 = poisoned<float>(OC * MC);
    float* none = nullptr;
    const float* no_input = nullptr;
    const Weight<float> first{weight1.data(), nullptr}, second{weight2.data(), nullptr};
    const auto loss = [&] {
        cpu::plain::matmul_forward(middle.data(), pre_gelu.data(), nullptr, inp.data(), first, bias1.data(), no_input,
                                   N, IC, MC, nullptr);
        cpu::plain::matmul_forward(out.data(), none, nullptr, middle.data(), second, no_input, no_input, N, MC, OC,
                                   nullptr);
        return weighted(out, dout);
    };
    loss();
    cpu::plain::matmul_backward(dmiddle.data(), nullptr, dweight2.data(), none, dout.data(), middle.data(), second,
                                static_cast<const float*>(pre_gelu.data()), N, MC, OC, false, nullptr);
    cpu::plain::matmul_backward(dinp.data(), nullptr, dweight1.data(), dbias1.data(), dmiddle.data(), inp.data(), first,
                                no_input, N, IC, MC, false, nullptr);
    check_gradient("inp", inp, dinp, loss);
    check_gradient("weight1", weight1, dweight1, loss);
    check_gradient("bias1", bias1, dbias1, loss);
    check_gradient("weight2", weight2, dweight2, loss);
}

TEST_CASE("the gradient of attention matches finite differences") {
    const int B = 2, T = 5, NH = 2, HS = 3, C = NH * HS;
    auto qkv = random_tensor<float>(B * T * 3 * C, 1), out = poisoned<float>(B * T * C),
         lse = poisoned<float>(B * NH * T);
    const auto dout = random_tensor<float>(B * T * C, 2);
    auto dqkv = poisoned<float>(B * T * 3 * C);
    const auto loss = [&] {
        cpu::plain::attention_forward(out.data(), lse.data(), qkv.data(), B, T, NH, HS, nullptr);
        return weighted(out, dout);
    };
    loss();
    cpu::plain::attention_backward(dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), B, T, NH, HS, nullptr);
    check_gradient("qkv", qkv, dqkv, loss);
}

TEST_CASE("the gradient of GELU matches finite differences") {
    const int count = 61;
    auto inp = random_tensor<float>(count, 1, 2.0f), out = poisoned<float>(count), dinp = poisoned<float>(count);
    const auto dout = random_tensor<float>(count, 2);
    cpu::plain::gelu_backward(dinp.data(), inp.data(), dout.data(), count, nullptr);
    check_gradient("inp", inp, dinp, [&] {
        cpu::plain::gelu_forward(out.data(), inp.data(), count, nullptr);
        return weighted(out, dout);
    });
}

TEST_CASE("the gradient of cross entropy matches finite differences") {
    const int N = 4, V = 7, Vp = 9;
    const float scale = 0.75f;
    auto logits = random_tensor<float>(N * Vp, 1), losses = poisoned<float>(N),
         gradient = random_tensor<float>(N * Vp, 1);
    auto targets = random_tokens(N, V, 2);
    targets[2] = -1;
    cpu::plain::cross_entropy(gradient.data(), losses.data(), targets.data(), N, V, Vp, scale, nullptr);
    const auto scales = filled<float>(N, scale);
    check_gradient("logits", logits, gradient, [&] {
        cpu::plain::cross_entropy_forward(losses.data(), logits.data(), targets.data(), N, V, Vp, nullptr);
        return weighted(losses, scales);
    });
}
