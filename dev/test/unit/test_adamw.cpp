// test_adamw.cpp: ten steps of AdamW against its definition and against the paper's formula in double; what is decayed;
// weights without masters: their bits and their mean; a factor that is NaN.
#include "support/each_variant.h"

constexpr int steps = 10;
constexpr float lr = 1e-2f;

// A buffer of one bucket.
static DecayPattern first_ones(int64_t count, int64_t decayed) { return {count, decayed, FLAT_ALIGN, 0}; }

enum class Master { apart, weight_itself };

template <class floatX>
struct State {
    Tensor<floatX> weight;
    Tensor<float> master, m, v;
    bool has_master;
    explicit State(int64_t count, Master where = Master::apart)
        : weight(random_tensor<floatX>(count, 1)),
          master(random_tensor<float>(count, 1)),
          m(filled<float>(count, 0.0f)),
          v(filled<float>(count, 0.0f)),
          has_master(where == Master::apart && sizeof(floatX) != sizeof(float)) {}
    float* masters() { return has_master ? master.data() : nullptr; }
    Tensor<float> weights() {  // at full precision
        Tensor<float> w(weight.size());
        for (int64_t i = 0; i < w.size(); i++) w[i] = has_master ? master[i] : float(weight[i]);
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
static Results run(decltype(&cpu::adamw<floatX>) op, const std::vector<Tensor<float>>& grads, DecayPattern decay) {
    const int64_t count = grads[0].size();
    State<floatX> s(count);
    const float factor = 0.5f;
    for (int step = 1; step <= steps; step++)
        op(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grads[step - 1].data(), &factor, 0, count, decay,
           AdamWConfig{}, lr, step, nullptr);
    int64_t not_rounded = 0;
    for (int64_t i = 0; i < count && s.masters(); i++) not_rounded += float(s.weight[i]) != float(floatX(s.master[i]));
    REQUIRE(not_rounded == 0);
    Results r;
    r.push_back(result("weight", s.weights(), 1, steps * epsilon<float>(), update_error));
    r.push_back(result("m", s.m, 1, 2 * steps * epsilon<float>(), steps * epsilon<float>() * 0.1f));
    r.push_back(result("v", s.v, 1, 4 * steps * epsilon<float>(), 1e-30f));
    return r;
}

template <class floatX>
static void compare(int64_t count, DecayPattern decay) {
    const auto grads = gradients(count);
    check_variants(run<floatX>(cpu::plain::adamw, grads, decay), [&] { return run<floatX>(cpu::adamw, grads, decay); });
}

TEST_CASE_TEMPLATE("AdamW of any count, decaying any part", floatX, float, bf16) {
    for (int64_t count : {64, 128, 192, 1088})
        for (int64_t decayed : {int64_t(0), count / 128 * 64, count})
            compare<floatX>(count, first_ones(count, decayed));
    compare<floatX>((1 << 17) + 192, first_ones((1 << 17) + 192, (1 << 16) + 64));  // pieces of 2^16, a border inside
    compare<floatX>(1408, {192, 128, 320, 64});                                     // ends within a bucket
    compare<floatX>((1 << 17), {64, 0, (1 << 15) + 64, 1 << 15});
}

// Loshchilov and Hutter's algorithm 2, every number a double.
TEST_CASE_TEMPLATE("AdamW is the paper's, in double", floatX, float, bf16) {
    const int64_t count = 128, decayed = 64;
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
            cpu::adamw(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grad.data(), &factor, 0, count,
                       first_ones(count, decayed), c, lr, step, nullptr);
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
TEST_CASE_TEMPLATE("decay reaches the first elements of each bucket, wherever a call begins", floatX, float, bf16) {
    const int64_t begin = 128, count = 1024;
    const DecayPattern decay = {256, 192, 320, 128};
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        State<floatX> s(count);
        const auto start = s.weights();
        const auto grad = filled<float>(count, 0.0f);
        const float factor = 1.0f;
        cpu::adamw(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grad.data(), &factor, begin, count, decay,
                   AdamWConfig{}, lr, 1, nullptr);
        const auto end = s.weights();
        for (int64_t i = 0; i < count; i++) {
            CAPTURE(i);
            const int64_t at = begin + i;
            if (at < 256 ? at < 192 : (at - 256) % 320 < 128)
                CHECK(end[i] == doctest::Approx(double(start[i]) * (1 - 1e-2 * 0.1)).epsilon(1e-6));
            else
                CHECK(end[i] == start[i]);
        }
    }
}

// ---- without masters

// One step of decay alone by powers of two, which every form computes exactly: weight - 2^-10 * weight, of which bf16
// holds 8 digits.
constexpr AdamWConfig exact_config = {0.5f, 0.5f, 1.0f, 0x1p-10f, 42};

static Tensor<bf16> decayed_once(decltype(&cpu::adamw<bf16>) op, const Tensor<bf16>& start, int64_t begin, int step,
                                 uint64_t seed = 42, int64_t cut = 1 << 30) {
    const int64_t count = start.size();
    auto weight = filled<bf16>(count, 0.0f);
    auto m = filled<float>(count, 0.0f), v = filled<float>(count, 0.0f), grad = filled<float>(count, 0.0f);
    for (int64_t i = 0; i < count; i++) weight[i] = start[i];
    const float factor = 1.0f;
    AdamWConfig config = exact_config;
    config.seed = seed;
    for (int64_t i = 0; i < count; i += cut)
        op(weight.data() + i, nullptr, m.data() + i, v.data() + i, grad.data() + i, &factor, begin + i,
           std::min(cut, count - i), {FLAT_ALIGN, FLAT_ALIGN, FLAT_ALIGN, FLAT_ALIGN}, config, 1.0f, step, nullptr);
    return weight;
}

static int64_t differences(const Tensor<bf16>& a, const Tensor<bf16>& b) {
    int64_t n = 0;
    for (int64_t i = 0; i < a.size(); i++) n += a[i].bits != b[i].bits;
    return n;
}

TEST_CASE("without masters a weight is rounded by the bits of seed, step and element, in every form") {
    // Indices of Philox below, across and beyond 2^32, which is where its counter has two words.
    for (const int64_t begin : {int64_t(0), int64_t(64), (int64_t(1) << 35) - 320, int64_t(1) << 35}) {
        const auto start = random_tensor<bf16>((1 << 16) + 576, 1);  // more than a piece of work
        const int step = 7;
        Tensor<bf16> want(start.size());
        const Philox random{42, ROUNDING_STREAMS + uint64_t(step)};
        for (int64_t i = 0; i < start.size(); i++) {
            const float w = float(start[i]);
            want[i] = round_randomly(w - 0x1p-10f * w, random.bits16(uint64_t(begin + i)));
        }
        CHECK(differences(decayed_once(cpu::plain::adamw, start, begin, step), want) == 0);
        for (const Isa level : available_isas())
            for (int threads = 1; threads <= 3; threads++) {
                const RunsOn setting(level, threads);
                CAPTURE(isa_name(level));
                CHECK(differences(decayed_once(cpu::adamw, start, begin, step), want) == 0);
                CHECK(differences(decayed_once(cpu::adamw, start, begin, step, 42, 64), want) == 0);
                CHECK(differences(decayed_once(cpu::adamw, start, begin, step, 42, 8256), want) == 0);
            }
    }
}

// 1 - 2^-10 is a quarter of the way from 1 to the next bf16, 1 - 2^-8: two draws differ with 2 * 1/4 * 3/4.
TEST_CASE("steps, seeds and elements have their own draws") {
    const int64_t count = 1 << 16;
    const auto start = filled<bf16>(count, 1.0f);
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        CAPTURE(isa_name(level));
        const auto draws = decayed_once(cpu::adamw, start, 0, 1);
        const auto check = [&](const Tensor<bf16>& others) {
            const double p = 2 * 0.25 * 0.75, sigma = std::sqrt(p * (1 - p) * double(count));
            CHECK(std::fabs(double(differences(draws, others)) - p * double(count)) <= 4 * sigma);
        };
        check(decayed_once(cpu::adamw, start, 0, 2));
        check(decayed_once(cpu::adamw, start, 0, 1, 43));
        check(decayed_once(cpu::adamw, start, count, 1));
        for (const int distance : {1, 2, 4, 8, 16, 64}) {
            Tensor<bf16> shifted(count);
            for (int64_t i = 0; i < count; i++) shifted[i] = draws[(i + distance) % count];
            check(shifted);
        }
    }
}

// The other operands are the same for all forms, so only the last digits of their floats differ: of some 2^-22 of the
// weight, where neighbours in bf16 are 2^-8 apart. One in 2^14 draws may go the other way.
TEST_CASE("one step without masters is that of the definition") {
    const int64_t count = (1 << 16) + 192;
    const DecayPattern decay = {1024, 512, 4096, 2048};
    const auto grads = gradients(count);
    const auto step_of = [&](decltype(&cpu::adamw<bf16>) op, Tensor<float>& m, Tensor<float>& v) {
        State<bf16> s(count, Master::weight_itself);
        const float factor = 0.5f;
        op(s.weight.data(), nullptr, m.data(), v.data(), grads[0].data(), &factor, 0, count, decay, AdamWConfig{}, lr,
           3, nullptr);
        return std::move(s.weight);
    };
    const auto moments = [&](uint64_t seed) {
        auto x = random_tensor<float>(count, seed);
        for (int64_t i = 0; i < count; i++) x[i] *= x[i];
        return x;
    };
    auto m = moments(5), v = moments(6);
    const auto want = step_of(cpu::plain::adamw, m, v);
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        CAPTURE(isa_name(level));
        auto got_m = moments(5), got_v = moments(6);
        const auto got = step_of(cpu::adamw, got_m, got_v);
        CHECK(differences(got, want) <= count >> 12);
        expect_close("weight", got, want, 1, epsilon<bf16>(), 1e-4f);
        expect_close("m", got_m, m, 1, 8 * epsilon<float>(), 1e-7f);
        expect_close("v", got_v, v, 1, 8 * epsilon<float>(), 1e-30f);
    }
}

// A constant gradient moves a weight by lr in each step. From 1 that is lost in rounding to nearest, to which the next
// bf16 is 2^-8 away; at random, 40 steps of 2^-11 make 5 * 2^-8 on average. A step's draw has at most the variance
// (2^-8 / 2)^2, and the weights are independent.
TEST_CASE("the mean of weights without masters takes steps that bf16 cannot") {
    const int64_t count = 1 << 14;
    const int many = 40;
    const float small = 0x1p-11f;
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        CAPTURE(isa_name(level));
        for (const float sign : {1.0f, -1.0f}) {
            auto weight = filled<bf16>(count, sign);
            auto m = filled<float>(count, 0.0f), v = filled<float>(count, 0.0f), grad = filled<float>(count, sign);
            const float factor = 1.0f;
            AdamWConfig config;
            config.eps = 1e-30f;
            for (int step = 1; step <= many; step++)
                cpu::adamw(weight.data(), static_cast<float*>(nullptr), m.data(), v.data(), grad.data(), &factor, 0,
                           count, first_ones(count, 0), config, small, step, nullptr);
            double sum = 0.0;
            for (int64_t i = 0; i < count; i++) sum += double(float(weight[i]));
            const double sigma = 0x1p-9 * std::sqrt(double(many) / double(count));
            CHECK(std::fabs(sum / double(count) - double(sign) * (1 - many * double(small))) <= 4 * sigma);
        }
    }
}

// Padding is zero in every buffer.
TEST_CASE("without masters zeros stay zeros, and a NaN a NaN") {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto start = filled<bf16>(64, 0.0f);
        start[3] = bf16(NAN), start[4] = bf16(INFINITY), start[5] = bf16(-3.0e38f);
        const auto end = decayed_once(cpu::adamw, start, 0, 1);
        for (int i = 0; i < 64; i++) {
            CAPTURE(i);
            if (i < 3 || i > 5) CHECK(float(end[i]) == 0.0f);
        }
        CHECK(std::isnan(float(end[3])));
        CHECK(std::isnan(float(end[4])));  // infinity - infinity
        CHECK(float(end[5]) == doctest::Approx(-3.0e38).epsilon(0.01));
    }
}

// ---- refusals

TEST_CASE_TEMPLATE("a NaN factor leaves everything as it is", floatX, float, bf16) {
    for (const Master where : {Master::apart, Master::weight_itself})
        for (const Isa level : available_isas()) {
            const RunsOn setting(level, 2);
            State<floatX> s(128, where), untouched(128, where);
            const auto grad = random_tensor<float>(128, 3);
            const float factor = NAN;
            cpu::adamw(s.weight.data(), s.masters(), s.m.data(), s.v.data(), grad.data(), &factor, 0, 128,
                       first_ones(128, 64), AdamWConfig{}, lr, 1, nullptr);
            expect_close("weight", s.weight, untouched.weight, 1, 0.0f, 0.0f);
            expect_close("master", s.master, untouched.master, 1, 0.0f, 0.0f);
            expect_close("m", s.m, untouched.m, 1, 0.0f, 0.0f);
            expect_close("v", s.v, untouched.v, 1, 0.0f, 0.0f);
        }
}

TEST_CASE("no elements are nothing to do, and impossible steps are refused") {
    float one = 1.0f;
    cpu::adamw(&one, &one, &one, &one, &one, &one, 64, 0, first_ones(64, 64), AdamWConfig{}, lr, 1, nullptr);
    CHECK(one == 1.0f);
    const auto refused = [](int64_t begin, int64_t count, DecayPattern decay, int step, const char* text) {
        float x = 0.0f;
        CHECK_THROWS_WITH_AS(cpu::adamw(&x, &x, &x, &x, &x, &x, begin, count, decay, AdamWConfig{}, lr, step, nullptr),
                             doctest::Contains(text), Error);
    };
    refused(0, 64, first_ones(64, 0), 0, "step 0; steps count from 1");
    refused(0, 65, first_ones(64, 0), 1, "65 elements from 0 on: multiples of 64");
    refused(8, 64, first_ones(64, 0), 1, "64 elements from 8 on: multiples of 64");
    refused(-64, 64, first_ones(64, 0), 1, "64 elements from -64 on");
    refused(0, 64, first_ones(64, 128), 1, "128 of a bucket of 64 elements decay");
    refused(0, 64, {64, 0, 64, 1}, 1, "1 of a bucket of 64 elements decay: multiples of 64");
    refused(0, 64, {64, 0, 100, 64}, 1, "64 of a bucket of 100 elements decay: multiples of 64");
    refused(0, 64, {64, 0, 0, 0}, 1, "buckets of no elements");
}
