// cases_residual.h: the cases of add_residual that test_ops.cpp and test_gpu_ops.cu share.
#pragma once
#include "support/cases.h"

namespace residual_cases {

// All backends add in the definition's order, so the results have the same bits.
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
        return outputs_of(output("out", out, C, 0.0f, 0.0f), output("out in place of inp", in_place, C, 0.0f, 0.0f));
    };
    backend.compare(outputs(OnHost{}, cpu::reference::add_residual<floatX>),
                    [&] { return outputs(backend, ops::add_residual<floatX>); });
}

inline void refuse_no_rows() {
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(ops::add_residual(&x, &x, &x, &x, 0, 8, nullptr),
                         doctest::Contains("add_residual of 0 rows of 8"), Error);
}

}  // namespace residual_cases
