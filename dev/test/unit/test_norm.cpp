// test_norm.cpp: the sum of squares against a sum in double, and the factor by which gradients are clipped.
#include "support/each_form.h"

static Results run(decltype(&cpu::sum_of_squares) op, const Tensor<float>& x) {
    const int64_t count = x.size();
    auto out = poisoned<float>(1);
    op(out.data(), x.data(), count, nullptr);
    // A lane adds up to count / 1024 / 16 + 64 positive squares in float. The rounding errors grow with the square root
    // of that number.
    const float roundings = 8.0f + std::sqrt(float(count) / (1024 * 16) + 64);
    Results r;
    r.push_back(result("squares", out, 1, roundings * epsilon<float>(), 0.0f));
    return r;
}

TEST_CASE("the fast sum of squares equals the plain one for any number of elements") {
    for (const int64_t count : {0, 1, 7, 17, 64, 65, 4095, 4096, 4097, 1 << 20, (1 << 21) + 4097}) {
        CAPTURE(count);
        const auto x = random_tensor<float>(count, 1, 1.0f, 0.5f);
        check_forms(run(cpu::plain::sum_of_squares, x), [&] { return run(cpu::sum_of_squares, x); });
    }
}

TEST_CASE("the sum of squares of a constant is exact, of huge numbers infinite, of NaN is NaN") {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto x = filled<float>(5000, 2.0f), out = poisoned<float>(1);
        cpu::sum_of_squares(out.data(), x.data(), 5000, nullptr);
        CHECK(out[0] == 20000.0f);
        x[4999] = 1e30f;
        cpu::sum_of_squares(out.data(), x.data(), 5000, nullptr);
        CHECK(std::isinf(out[0]));
        x[4999] = NAN;
        cpu::sum_of_squares(out.data(), x.data(), 5000, nullptr);
        CHECK(std::isnan(out[0]));
    }
}

TEST_CASE("accumulate_gradients adds element by element") {
    for (const int64_t count : {0, 64, 4096, (1 << 20) + 64}) {
        CAPTURE(count);
        const auto x = random_tensor<float>(count, 1), before = random_tensor<float>(count, 2);
        auto sum = random_tensor<float>(count, 2);
        cpu::accumulate_gradients(sum.data(), x.data(), count, nullptr);
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; i++) wrong += !(sum[i] == before[i] + x[i]);
        CHECK(wrong == 0);
    }
}

TEST_CASE("gradients are rounded to the nearest bf16, and widened back") {
    for (const int64_t count : {0, 64, (1 << 20) + 64}) {
        CAPTURE(count);
        const auto x = random_tensor<float>(count, 1);
        auto rounded = poisoned<bf16>(count);
        auto widened = poisoned<float>(count);
        cpu::round_gradients(rounded.data(), x.data(), count, nullptr);
        cpu::widen_gradients(widened.data(), rounded.data(), count, nullptr);
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; i++)
            wrong += rounded[i].bits != bf16(x[i]).bits || !(std::fabs(widened[i] - x[i]) <= 0x1p-8f * std::fabs(x[i]));
        CHECK(wrong == 0);
    }
}

static float factor_of(float squares, float max_norm, float expected_norm, float factor = 0.5f) {
    float norm = -1.0f;
    cpu::clip_factor(&norm, &factor, &squares, max_norm, nullptr);
    CHECK((norm == expected_norm || (std::isnan(norm) && std::isnan(expected_norm))));
    return factor;
}

TEST_CASE("gradients are clipped if their norm exceeds the limit") {
    CHECK(factor_of(16.0f, 1.0f, 4.0f) == 0.25f);
    CHECK(factor_of(0.25f, 1.0f, 0.5f) == 1.0f);
    CHECK(factor_of(16.0f, 4.0f, 4.0f) == 1.0f);
    CHECK(factor_of(16.0f, 0.0f, 4.0f) == 1.0f);  // 0: never
    CHECK(factor_of(0.0f, 1.0f, 0.0f) == 1.0f);
}

TEST_CASE("a norm that is not finite makes the clip factor NaN") {
    CHECK(std::isnan(factor_of(INFINITY, 1.0f, INFINITY)));
    CHECK(std::isnan(factor_of(NAN, 1.0f, NAN)));
    CHECK(std::isnan(factor_of(NAN, 0.0f, NAN)));
}

TEST_CASE("a clip factor of NaN stays NaN until the host has read it") {
    CHECK(std::isnan(factor_of(16.0f, 1.0f, 4.0f, NAN)));
    CHECK(std::isnan(factor_of(16.0f, 0.0f, 4.0f, NAN)));
}
