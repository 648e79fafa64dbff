// cases_residual.h: the cases of add_residual that test_residual.cpp and test_gpu_ops.cu share.
#pragma once
#include "support/cases.h"

namespace residual_cases {

// All backends add in the definition's order, so the results have the same bits. The definition has two roundings in
// float and the one of the result.
template <class floatX, class Backend>
void compare(const Backend& backend, int N, int C) {
    CAPTURE(N);
    CAPTURE(C);
    const int64_t size = int64_t(N) * C;
    const auto inp = random_tensor<floatX>(size, 1), residual = random_tensor<floatX>(size, 2);
    const auto bias = random_tensor<floatX>(C, 3);
    const auto outputs = [&](const auto& where, const auto& op) {
        auto out = poisoned<floatX>(size), in_place = copy_of(inp);
        where.call(op, out, inp, residual, bias, N, C);
        where.call(op, in_place, std::as_const(in_place), residual, bias, N, C);
        Outputs outputs;
        outputs.push_back(output("out", out, C, 0.0f, 0.0f));
        outputs.push_back(output("out in place of inp", in_place, C, 0.0f, 0.0f));
        return outputs;
    };
    const Outputs definition = outputs(OnHost{}, cpu::plain::add_residual<floatX>);
    int64_t wrong = 0;
    for (int64_t i = 0; i < size; i++) {
        const double x = double(float(inp[i])), b = double(float(bias[i % C])), r = double(float(residual[i]));
        const double roundings = 2 * double(epsilon<float>()) * (std::fabs(x) + std::fabs(b) + std::fabs(r));
        wrong += !(std::fabs(double(definition[0].values[i]) - (x + b + r)) <=
                   0.5 * double(epsilon<floatX>()) * std::fabs(x + b + r) + roundings);
    }
    CHECK(wrong == 0);
    backend.compare(definition, [&] { return outputs(backend, ops::add_residual<floatX>); });
}

inline void refuse_no_rows() {
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(ops::add_residual(&x, &x, &x, &x, 0, 8, nullptr),
                         doctest::Contains("add_residual of 0 rows of 8"), Error);
}

}  // namespace residual_cases
