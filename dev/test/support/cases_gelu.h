// cases_gelu.h: the cases of GELU that test_ops.cpp and test_gpu_ops.cu share.
#pragma once
#include "support/cases.h"

namespace gelu_cases {

template <class floatX>
struct Ops {
    decltype(&cpu::gelu_forward<floatX>) forward;
    decltype(&cpu::gelu_backward<floatX>) backward;
};
template <class floatX>
const Ops<floatX> definition{cpu::reference::gelu_forward<floatX>, cpu::reference::gelu_backward<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::gelu_forward<floatX>, ops::gelu_backward<floatX>};

template <class floatX>
struct Gelu {
    Tensor<floatX> out, dinp;
};

template <class Backend, class floatX>
Gelu<floatX> run(const Backend& backend, const Ops<floatX>& ops, const Tensor<floatX>& inp,
                 const Tensor<floatX>& dout) {
    Gelu<floatX> r{poisoned<floatX>(inp.size()), poisoned<floatX>(inp.size())};
    backend.call(ops.forward, r.out, inp, inp.size());
    backend.call(ops.backward, r.dinp, inp, dout, inp.size());
    return r;
}

// With u = sqrt(2/pi) (x + 0.044715 x^3), the definition computes 0.5 x (1 + tanh u). Where tanh u is near -1, the sum
// cancels, and an error of 2 epsilon remains. The output multiplies it by |x| <= 12. The derivative multiplies it also
// by u', except where 1 - tanh^2 u is 0.
template <class floatX, class Backend>
void compare(const Backend& backend, int64_t count) {
    CAPTURE(count);
    const auto inp = random_tensor<floatX>(count, 1, 3.0f), dout = random_tensor<floatX>(count, 2);
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        const auto r = run(where, ops, inp, dout);
        return outputs_of(output("out", r.out, 1, rounding_step<floatX>(), 12 * 2 * epsilon<float>()),
                          output("dinp", r.dinp, 1, rounding_step<floatX>(), 64 * epsilon<float>()));
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, tested<floatX>); });
}

// Compares with 0.5 x (1 + tanh u) = x s, where s = 1 / (1 + e^-2u) does not cancel. The derivative is
// s + x s (1 - s) 2u'. An error of one rounding in 2u changes e^-2u by |2u| roundings. On a GPU s has a relative error
// of up to (4 + 4 |2u|) epsilon, half of what the test allows, because e^-2u and 1 / (1 + e^-2u) are approximations
// (gelu.cuh); the emulator rounds both correctly. cancelled(): the additional absolute error of a variant that computes
// tanh, or that replaces small numbers by 0.
template <class Backend, class Cancelled>
void formula_in_double(const Backend& backend, const Cancelled& cancelled) {
    std::vector<float> points = {0.0f, -0.0f, 1.0f, -1.0f, 1e-30f, -1e-30f, 1e4f, -1e4f, 1e30f, -1e30f};
    for (float x = -12.0f; x <= 12.0f; x += 0.0137f) points.push_back(x);
    const int64_t count = int64_t(points.size());
    auto inp = filled<float>(count, 0.0f);
    for (int64_t i = 0; i < count; i++) inp[i] = points[i];
    const auto dout = filled<float>(count, 1.0f);
    backend.on_each_variant([&] {
        const auto [out, dinp] = run(backend, tested<float>, inp, dout);
        for (int64_t i = 0; i < count; i++) {
            const double x = std::fmax(std::fmin(double(points[i]), 1e9), -1e9);
            const double slope = 2 * std::sqrt(2 / std::acos(-1));
            const double two_u = slope * (x + 0.044715 * x * x * x), s = 1 / (1 + std::exp(-two_u));
            const double bend = s == 0 || s == 1 ? 0 : x * s * (1 - s) * slope * (1 + 3 * 0.044715 * x * x);
            const double roundings = 8 * double(epsilon<float>()) * (1 + std::fmin(std::fabs(two_u), 90.0));
            CAPTURE(x);
            CHECK(std::fabs(double(out[i]) - s * double(points[i])) <=
                  roundings * std::fabs(s * double(points[i])) + cancelled());
            CHECK(std::fabs(double(dinp[i]) - (s + bend)) <=
                  roundings * (std::fabs(s) + std::fabs(bend)) + cancelled());
        }
    });
}

template <class floatX, class Backend>
void in_place_with_nan(const Backend& backend) {
    const int count = 67, bad = 40;
    auto inp = random_tensor<floatX>(count, 1);
    const auto dout = random_tensor<floatX>(count, 2);
    inp[bad] = floatX(NAN);
    backend.on_each_variant([&] {
        const auto [out, apart] = run(backend, tested<floatX>, inp, dout);
        auto d = copy_of(dout);
        backend.call(tested<floatX>.backward, d, inp, d, int64_t(count));
        for (int i = 0; i < count; i++) {
            CHECK((i == bad) == std::isnan(float(d[i])));
            CHECK((i == bad) == std::isnan(float(out[i])));
            if (i != bad) CHECK(float(d[i]) == float(apart[i]));
        }
    });
}

}  // namespace gelu_cases
