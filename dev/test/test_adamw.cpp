// test_adamw.cpp: ten steps of AdamW against its definition and against the paper's formula in double; what is decayed;
// a factor that is NaN.
#include "each_form.h"

constexpr int steps = 10;
constexpr float lr = 1e-2f;

template <class floatX>
struct State {
    Tensor<floatX> weight;
    Tensor<float> master, m, v;
    explicit State(int64_t count)
        : weight(random_tensor<floatX>(count, 1)),
          master(random_tensor<float>(count, 1)),
          m(filled<float>(count, 0.0f)),
          v(filled<float>(count, 0.0f)) {}
    float* masters() { return sizeof(floatX) == sizeof(float) ? nullptr : master.data(); }
    Tensor<float> weights() {  // at full precision
        Tensor<float> w(weight.size());
        for (int64_t i = 0; i < w.size(); i++) w[i] = masters() ? master[i] : float(weight[i]);
        return w;
    }
};

// Gradients span magnitudes from 1e-12 to 1.
static std::vector<Tensor<float>> gradients(int64_t count) {
    std::vector<Tensor<float>> all;
    for (int step = 1; step <= steps; step++) {
        all.push_back(random_tensor<float>(count, 100 + uint64_t(step)));
        for (int64_t i = 0; i < count; i++) all.back()[i] *= std::pow(10.0f, -float(i % 13));
    }
    return all;
}

// m sums terms of up to about 0.2, which may cancel. An update is at most about lr * (1 + decay), with some 8
// roundings; the weight, of about 1, is rounded in each step.
constexpr float update_error = steps * (8 * lr + 1) * epsilon<float>();

template <class floatX>
static Results run(decltype(&cpu::adamw<floatX>) op, const std::vector<Tensor<float>>& grads, int64_t decayed) {
    const int64_t count = grads[0].size();
    State<floatX> s(count);
    const float factor = 0.5f;
    for (int step = 1; step <= steps; step++)
        op(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grads[step - 1].data(), &factor, count, decayed,
           AdamWConfig{}, lr, step, nullptr);
    if (s.masters())
        for (int64_t i = 0; i < count; i++) REQUIRE(float(s.weight[i]) == float(floatX(s.master[i])));
    Results r;
    r.push_back(result("weight", s.weights(), 1, steps * epsilon<float>(), update_error));
    r.push_back(result("m", s.m, 1, 2 * steps * epsilon<float>(), steps * epsilon<float>() * 0.1f));
    r.push_back(result("v", s.v, 1, 4 * steps * epsilon<float>(), 1e-30f));
    return r;
}

template <class floatX>
static void compare(int64_t count, int64_t decayed) {
    const auto grads = gradients(count);
    check_forms(run<floatX>(cpu::plain::adamw, grads, decayed),
                [&] { return run<floatX>(cpu::adamw, grads, decayed); });
}

TEST_CASE_TEMPLATE("AdamW of any count, decaying any part", floatX, float, bf16) {
    for (int64_t count : {1, 7, 17, 65, 1000})
        for (int64_t decayed : {int64_t(0), count / 2, count}) compare<floatX>(count, decayed);
    compare<floatX>((1 << 17) + 3, (1 << 16) + 5);  // pieces of 2^16, and a boundary inside one
}

// Loshchilov and Hutter's algorithm 2, every number a double.
TEST_CASE_TEMPLATE("AdamW is the paper's, in double", floatX, float, bf16) {
    const int64_t count = 100, decayed = 60;
    const AdamWConfig c;
    const double b1 = double(c.beta1), b2 = double(c.beta2);
    const auto grads = gradients(count);
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        State<floatX> s(count);
        const float factor = 0.5f;
        std::vector<double> w(count), m(count), v(count);
        const auto start = s.weights();
        for (int i = 0; i < count; i++) w[i] = double(start[i]);
        for (int step = 1; step <= steps; step++) {
            const Tensor<float>& grad = grads[step - 1];
            cpu::adamw(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grad.data(), &factor, count, decayed, c,
                       lr, step, nullptr);
            for (int i = 0; i < count; i++) {
                const double g = 0.5 * double(grad[i]);
                m[i] = b1 * m[i] + (1 - b1) * g;
                v[i] = b2 * v[i] + (1 - b2) * g * g;
                const double m_hat = m[i] / (1 - std::pow(b1, step)), v_hat = v[i] / (1 - std::pow(b2, step));
                const double decay = i < decayed ? double(c.weight_decay) * w[i] : 0.0;
                w[i] -= double(lr) * (m_hat / (std::sqrt(v_hat) + double(c.eps)) + decay);
            }
        }
        const auto got = s.weights();
        for (int i = 0; i < count; i++) {
            CAPTURE(i);
            CHECK(std::fabs(double(got[i]) - w[i]) <= double(update_error) * (1 + std::fabs(w[i])));
        }
    }
}

// Without a gradient only decay moves a weight, by the factor 1 - lr * decay; the first moment starts at zero.
TEST_CASE_TEMPLATE("decay reaches the first elements only", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        State<floatX> s(40);
        const auto start = s.weights();
        const auto grad = filled<float>(40, 0.0f);
        const float factor = 1.0f;
        cpu::adamw(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grad.data(), &factor, 40, 21, AdamWConfig{},
                   lr, 1, nullptr);
        const auto end = s.weights();
        for (int i = 0; i < 40; i++) {
            if (i < 21)
                CHECK(end[i] == doctest::Approx(double(start[i]) * (1 - 1e-2 * 0.1)).epsilon(1e-6));
            else
                CHECK(end[i] == start[i]);
        }
    }
}

TEST_CASE_TEMPLATE("a NaN factor leaves everything as it is", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        State<floatX> s(100), untouched(100);
        const auto grad = random_tensor<float>(100, 3);
        const float factor = NAN;
        cpu::adamw(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grad.data(), &factor, 100, 50, AdamWConfig{},
                   lr, 1, nullptr);
        expect_close("weight", s.weight, untouched.weight, 1, 0.0f, 0.0f);
        expect_close("master", s.master, untouched.master, 1, 0.0f, 0.0f);
        expect_close("m", s.m, untouched.m, 1, 0.0f, 0.0f);
        expect_close("v", s.v, untouched.v, 1, 0.0f, 0.0f);
    }
}

TEST_CASE("impossible steps are refused") {
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(cpu::adamw(&x, &x, &x, &x, &x, &x, 1, 0, AdamWConfig{}, lr, 0, nullptr),
                         doctest::Contains("step 0; steps count from 1"), Error);
    CHECK_THROWS_WITH_AS(cpu::adamw(&x, &x, &x, &x, &x, &x, 1, 2, AdamWConfig{}, lr, 1, nullptr),
                         doctest::Contains("2 of 1 elements decayed"), Error);
}
