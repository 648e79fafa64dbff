// cases_cross_entropy.h: the cases of softmax, cross entropy and the sum of losses that test_cross_entropy.cpp and
// test_gpu_cross_entropy.cu share.
#pragma once
#include "support/cases.h"

namespace cross_entropy_cases {

struct Shape {
    int N, V, Vp;
};

constexpr float SCALE = 0.125f;

template <class floatX>
struct Ops {
    decltype(&cpu::cross_entropy_forward<floatX>) forward;
    decltype(&cpu::cross_entropy<floatX>) both;
};
template <class floatX>
const Ops<floatX> definition{cpu::plain::cross_entropy_forward<floatX>, cpu::plain::cross_entropy<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::cross_entropy_forward<floatX>, ops::cross_entropy<floatX>};

// Random targets. The first is token 0, the second is token V - 1, and every fifth is ignored.
inline Tensor<int> some_targets(Shape s) {
    auto targets = random_tokens(s.N, s.V, 2);
    targets[0] = 0;
    if (s.N > 1) targets[1] = s.V - 1;
    for (int n = 4; n < s.N; n += 5) targets[n] = -1;
    return targets;
}

// Random logits. The padded columns hold 1e9, so that an operation which reads them has a wrong loss.
template <class floatX>
Tensor<floatX> some_logits(Shape s, float spread) {
    auto logits = random_tensor<floatX>(int64_t(s.N) * s.Vp, 1, spread);
    for (int n = 0; n < s.N; n++)
        for (int v = s.V; v < s.Vp; v++) logits[int64_t(n) * s.Vp + v] = floatX(1e9f);
    return logits;
}

// The losses of cross_entropy_forward and of cross_entropy, and the gradient of the logits.
template <class floatX>
struct Losses {
    Tensor<float> forward, both;
    Tensor<floatX> gradient;
};

template <class Backend, class floatX>
Losses<floatX> run(const Backend& backend, const Ops<floatX>& ops, const Tensor<floatX>& logits,
                   const Tensor<int>& targets, Shape s, float scale) {
    Losses<floatX> r{poisoned<float>(s.N), poisoned<float>(s.N), copy_of(logits)};
    backend.call(ops.forward, r.forward, logits, targets, s.N, s.V, s.Vp);
    backend.call(ops.both, r.gradient, r.both, targets, s.N, s.V, s.Vp, scale);
    return r;
}

// Two sums of V positive terms in different orders differ by about sqrt(V) roundings of the sum. This is the absolute
// error of the loss, which is the logarithm of the sum, and the relative error of each probability. exp_roundings: the
// relative error of the backend's exp and log, in roundings.
template <class floatX, class Backend>
void compare(const Backend& backend, float exp_roundings, Shape s, float spread = 2.0f) {
    CAPTURE(s.N);
    CAPTURE(s.V);
    CAPTURE(spread);
    const auto targets = some_targets(s);
    const auto logits = some_logits<floatX>(s, spread);
    const float error = (4.0f * std::sqrt(float(s.V)) + exp_roundings) * epsilon<float>();
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        const auto r = run(where, ops, logits, targets, s, SCALE);
        Outputs outputs;
        outputs.push_back(output("losses", r.forward, 1, 2 * epsilon<float>(), error));
        outputs.push_back(output("losses with gradient", r.both, 1, 2 * epsilon<float>(), error));
        outputs.push_back(
            output("gradient", r.gradient, s.Vp, rounding_step<floatX>() + error, error * SCALE * 0.125f));
        return outputs;
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, tested<floatX>); });
}

// The loss is log V, the gradients of a row sum to zero, and padding and ignored rows have none.
template <class floatX, class Backend>
void equal_logits(const Backend& backend) {
    const Shape s{3, 64, 72};
    Tensor<int> targets(s.N);
    targets[0] = 0;
    targets[1] = -1;
    targets[2] = s.V - 1;
    for (const float logit : {3.0f, 1e4f, -1e4f})
        backend.on_each_variant([&] {
            CAPTURE(logit);
            const auto r = run(backend, tested<floatX>, filled<floatX>(s.N * s.Vp, logit), targets, s, 1.0f);
            CHECK(double(r.both[0]) == doctest::Approx(std::log(64.0)).epsilon(1e-6));
            CHECK(r.both[1] == 0.0f);
            CHECK(r.both[2] == r.both[0]);
            CHECK(same_bits(r.forward, r.both));
            const Tensor<floatX>& g = r.gradient;
            for (int v = 0; v < s.Vp; v++) {
                const float other = v < s.V ? 1.0f / 64 : 0.0f;  // exact in bf16 as well
                CHECK(float(g[v]) == (v == 0 ? 1.0f / 64 - 1 : other));
                CHECK(float(g[s.Vp + v]) == 0.0f);
                CHECK(float(g[2 * s.Vp + v]) == (v == s.V - 1 ? 1.0f / 64 - 1 : other));
            }
        });
}

// A row with the largest logit at its target, and one with the largest logit elsewhere.
template <class floatX, class Backend>
void huge_logits(const Backend& backend, int Vp) {
    const Shape s{2, 33, Vp};
    const float huge = float(floatX(1e30f));
    auto logits = filled<floatX>(2 * Vp, -huge);
    logits[5] = floatX(huge);
    logits[Vp + 32] = floatX(huge);
    Tensor<int> targets(2);
    targets[0] = 5;
    targets[1] = 7;
    backend.on_each_variant([&] {
        const auto r = run(backend, tested<floatX>, logits, targets, s, 1.0f);
        for (const auto* losses : {&r.both, &r.forward}) {
            CHECK((*losses)[0] == 0.0f);
            CHECK((*losses)[1] == doctest::Approx(2.0 * double(huge)));
        }
        for (int v = 0; v < s.V; v++) {
            CHECK(float(r.gradient[v]) == 0.0f);
            CHECK(float(r.gradient[Vp + v]) == (v == 32 ? 1.0f : v == 7 ? -1.0f : 0.0f));
        }
    });
}

template <class floatX, class Backend>
void not_finite_logits(const Backend& backend, int V, int Vp) {
    CAPTURE(V);
    const Shape s{1, V, Vp};
    Tensor<int> target(1);
    target[0] = 10;
    for (int place : {0, 3, 20, V - 1})
        for (const float x : {NAN, INFINITY, -INFINITY})
            backend.on_each_variant([&] {
                CAPTURE(x);
                CAPTURE(place);
                auto logits = filled<floatX>(Vp, 1.0f);
                logits[place] = floatX(x);
                const auto r = run(backend, tested<floatX>, logits, target, s, 1.0f);
                if (x == -INFINITY) {
                    CHECK(double(r.forward[0]) == doctest::Approx(std::log(double(V - 1))).epsilon(1e-6));
                    CHECK(r.forward[0] == r.both[0]);
                    CHECK(float(r.gradient[place]) == 0.0f);
                } else {
                    CHECK(std::isnan(r.forward[0]));
                    CHECK(std::isnan(r.both[0]));
                }
            });
}

template <class floatX, class Backend>
void one_finite_logit(const Backend& backend, int V) {
    CAPTURE(V);
    const Shape s{1, V, round_up(V, 8)};
    auto logits = filled<floatX>(s.Vp, -INFINITY);
    logits[V - 1] = floatX(-3.0f);
    Tensor<int> target(1);
    target[0] = V - 1;
    backend.on_each_variant([&] {
        const auto r = run(backend, tested<floatX>, logits, target, s, 1.0f);
        CHECK(r.forward[0] == 0.0f);
        CHECK(r.both[0] == 0.0f);
        int64_t nonzero = 0;
        for (int v = 0; v < s.V; v++) nonzero += float(r.gradient[v]) != 0.0f;
        CHECK(nonzero == 0);
    });
}

// ---- the vocabulary in shards

// The results of all shards together.
template <class floatX>
struct ShardLosses {
    Tensor<float> losses, lse;
    Tensor<floatX> gradient;  // (N, V)
};

// logits (N, s.Vp). Each shard has its own rows, with up to 15 padded columns, which hold 1e9 before.
template <class Backend, class floatX>
ShardLosses<floatX> run_shards(const Backend& backend, const Tensor<floatX>& logits, const Tensor<int>& targets,
                               Shape s, int shards, float scale) {
    ShardLosses<floatX> r{poisoned<float>(s.N), poisoned<float>(s.N), poisoned<floatX>(int64_t(s.N) * s.V)};
    std::vector<Tensor<floatX>> rows;
    auto partials = poisoned<float>(int64_t(shards) * s.N * 2);
    const auto columns_of = [&](int i) { return round_up(std::max(1, shard_of(s.V, shards, i).count), 8) + i % 2 * 8; };
    for (int i = 0; i < shards; i++) {
        const VocabShard shard = shard_of(s.V, shards, i);
        const int Vp = columns_of(i);
        rows.push_back(filled<floatX>(int64_t(s.N) * Vp, 1e9f));
        for (int n = 0; n < s.N; n++)
            for (int v = 0; v < shard.count; v++)
                rows[i][int64_t(n) * Vp + v] = logits[int64_t(n) * s.Vp + shard.first + v];
        auto own = poisoned<float>(int64_t(s.N) * 2);
        backend.call(ops::cross_entropy_shard<floatX>, own, std::as_const(rows[i]), targets, s.N, shard, Vp);
        for (int64_t k = 0; k < own.size(); k++) partials[i * own.size() + k] = own[k];
    }
    backend.call(ops::cross_entropy_combine, r.losses, r.lse, partials, targets, shards, s.N);
    int64_t not_zero = 0;
    for (int i = 0; i < shards; i++) {
        const VocabShard shard = shard_of(s.V, shards, i);
        const int Vp = columns_of(i);
        backend.call(ops::cross_entropy_shard_backward<floatX>, rows[i], r.lse, targets, s.N, shard, Vp, scale);
        for (int n = 0; n < s.N; n++)
            for (int v = 0; v < Vp; v++) {
                const floatX gradient = rows[i][int64_t(n) * Vp + v];
                if (v < shard.count) r.gradient[int64_t(n) * s.V + shard.first + v] = gradient;
                if (v >= shard.count || targets[n] < 0) not_zero += !(float(gradient) == 0.0f);
            }
    }
    CHECK_MESSAGE(not_zero == 0, "gradients of padded columns and ignored rows");
    return r;
}

// The losses, and the gradients in two parts: at the target a probability of almost 1 and the 1 cancel.
template <class floatX>
Outputs shard_outputs(const ShardLosses<floatX>& r, const Tensor<int>& targets, Shape s, float error) {
    auto lse = copy_of(r.lse), at_target = filled<float>(s.N, 0.0f);
    auto others = copy_of(r.gradient);
    for (int n = 0; n < s.N; n++) {
        if (targets[n] < 0) {
            lse[n] = 0.0f;
            continue;
        }
        at_target[n] = float(others[int64_t(n) * s.V + targets[n]]);
        others[int64_t(n) * s.V + targets[n]] = floatX(0.0f);
    }
    // Backends compute exp(x) with a relative error of up to |x| roundings; |x| <= 88 where the result is not 0.
    const float step = rounding_step<floatX>(), exp_error = 90 * epsilon<float>();
    Outputs outputs;
    outputs.push_back(output("lse", lse, 1, 2 * epsilon<float>(), error));
    outputs.push_back(output("losses", r.losses, 1, 2 * epsilon<float>(), error));
    outputs.push_back(output("gradient at the target", at_target, 1, step, error * SCALE));
    outputs.push_back(output("gradient", others, s.V, step + error + exp_error, 1e-36f));
    return outputs;
}

// The same in double.
template <class floatX>
ShardLosses<floatX> losses_in_double(const Tensor<floatX>& logits, const Tensor<int>& targets, Shape s) {
    ShardLosses<floatX> r{filled<float>(s.N, 0.0f), filled<float>(s.N, 0.0f), filled<floatX>(int64_t(s.N) * s.V, 0.0f)};
    for (int n = 0; n < s.N; n++) {
        if (targets[n] < 0) continue;
        const floatX* row = logits.data() + int64_t(n) * s.Vp;
        double largest = double(float(row[0])), sum = 0.0;
        for (int v = 0; v < s.V; v++) largest = std::max(largest, double(float(row[v])));
        for (int v = 0; v < s.V; v++) sum += std::exp(double(float(row[v])) - largest);
        const double lse = std::log(sum) + largest;
        r.lse[n] = float(lse);
        r.losses[n] = float(lse - double(float(row[targets[n]])));
        for (int v = 0; v < s.V; v++) {
            const double probability = std::exp(double(float(row[v])) - lse);
            r.gradient[int64_t(n) * s.V + v] = floatX(float((probability - (v == targets[n])) * double(SCALE)));
        }
    }
    return r;
}

// Compares with the losses in double, and with the operation on the whole vocabulary. The errors are those of `compare`
// above and four roundings of lse, which is about as large as the largest logit.
template <class floatX, class Backend>
void compare_shards(const Backend& backend, float exp_roundings, Shape s, int shards, float spread = 2.0f) {
    CAPTURE(s.N);
    CAPTURE(s.V);
    CAPTURE(shards);
    CAPTURE(spread);
    const auto targets = some_targets(s);
    const auto logits = some_logits<floatX>(s, spread);
    float largest = 0.0f;
    for (int n = 0; n < s.N; n++)
        for (int v = 0; v < s.V; v++) largest = std::max(largest, std::fabs(float(logits[int64_t(n) * s.Vp + v])));
    const float error = (4.0f * std::sqrt(float(s.V)) + exp_roundings + 4.0f * largest) * epsilon<float>();
    const auto in_double = losses_in_double(logits, targets, s);
    backend.compare(shard_outputs(in_double, targets, s, error), [&] {
        return shard_outputs(run_shards(backend, logits, targets, s, shards, SCALE), targets, s, error);
    });
    backend.on_each_variant([&] {
        const auto whole = run(backend, tested<floatX>, logits, targets, s, SCALE);
        const auto got = run_shards(backend, logits, targets, s, shards, SCALE);
        auto gradient = poisoned<floatX>(got.gradient.size());
        for (int n = 0; n < s.N; n++)
            for (int v = 0; v < s.V; v++) gradient[int64_t(n) * s.V + v] = whole.gradient[int64_t(n) * s.Vp + v];
        expect_close("losses of the whole", got.losses, whole.both, 1, 4 * epsilon<float>(), 2 * error);
        expect_close("gradient of the whole", got.gradient, gradient, s.V, 2 * (rounding_step<floatX>() + error),
                     2 * error * SCALE);
    });
}

// Random shapes. The second half has so few tokens that some shards are empty.
template <class floatX, class Backend>
void random_shards(const Backend& backend, float exp_roundings, int shapes) {
    const Philox random{12, 0};
    for (int i = 0; i < shapes; i++) {
        const auto x = random(uint64_t(i));
        const int V = i < shapes / 2 ? 1 + 2 * int(x[1] % 400) : 1 + int(x[1] % 4);
        const Shape s{1 + int(x[0] % 12), V, round_up(V, 8)};
        for (const int shards : {1, 2, 3, 4}) compare_shards<floatX>(backend, exp_roundings, s, shards);
    }
}

// As huge_logits: the largest logit is at the target, or in another column, which may be in another shard.
template <class floatX, class Backend>
void huge_logits_in_shards(const Backend& backend) {
    const Shape s{2, 33, 40};
    Tensor<int> targets(2);
    targets[0] = 5;
    targets[1] = 7;
    for (const float about : {1e30f, 3e38f})
        for (const int shards : {1, 2, 3, 4, 40}) {
            const float huge = float(floatX(about));
            auto logits = filled<floatX>(2 * s.Vp, -huge);
            logits[5] = floatX(huge);
            logits[s.Vp + 32] = floatX(huge);
            backend.on_each_variant([&] {
                CAPTURE(huge);
                CAPTURE(shards);
                const auto r = run_shards(backend, logits, targets, s, shards, 1.0f);
                CHECK(r.losses[0] == 0.0f);
                CHECK(r.losses[1] == huge + huge);
                for (int v = 0; v < s.V; v++) {
                    CHECK(float(r.gradient[v]) == 0.0f);
                    CHECK(float(r.gradient[s.V + v]) == (v == 32 ? 1.0f : v == 7 ? -1.0f : 0.0f));
                }
            });
        }
}

template <class floatX, class Backend>
void not_finite_logits_in_shards(const Backend& backend) {
    const Shape s{1, 37, 40};
    Tensor<int> target(1);
    target[0] = 10;
    for (const int shards : {1, 2, 3, 4})
        for (const int place : {0, 3, 20, 36})
            for (const float x : {NAN, INFINITY, -INFINITY})
                backend.on_each_variant([&] {
                    CAPTURE(shards);
                    CAPTURE(x);
                    CAPTURE(place);
                    auto logits = filled<floatX>(s.Vp, 1.0f);
                    logits[place] = floatX(x);
                    auto losses = poisoned<float>(1), lse = poisoned<float>(1), partials = poisoned<float>(2 * shards);
                    for (int i = 0; i < shards; i++) {
                        const VocabShard shard = shard_of(s.V, shards, i);
                        auto row = filled<floatX>(s.Vp, 1e9f);
                        for (int v = 0; v < shard.count; v++) row[v] = logits[shard.first + v];
                        auto partial = poisoned<float>(2);
                        backend.call(ops::cross_entropy_shard<floatX>, partial, row, target, 1, shard, s.Vp);
                        partials[2 * i] = partial[0];
                        partials[2 * i + 1] = partial[1];
                    }
                    backend.call(ops::cross_entropy_combine, losses, lse, partials, target, shards, 1);
                    if (x == -INFINITY)
                        CHECK(double(losses[0]) == doctest::Approx(std::log(36.0)).epsilon(1e-6));
                    else
                        CHECK(std::isnan(losses[0]));
                });
}

// All logits of most shards are -infinity.
template <class floatX, class Backend>
void one_finite_logit_in_shards(const Backend& backend, int V) {
    const Shape s{1, V, round_up(V, 8)};
    auto logits = filled<floatX>(s.Vp, -INFINITY);
    logits[V - 1] = floatX(-3.0f);
    Tensor<int> target(1);
    target[0] = V - 1;
    for (const int shards : {1, 3, 4})
        backend.on_each_variant([&] {
            CAPTURE(shards);
            const auto r = run_shards(backend, logits, target, s, shards, 1.0f);
            CHECK(r.lse[0] == -3.0f);
            CHECK(r.losses[0] == 0.0f);
            int64_t nonzero = 0;
            for (int v = 0; v < s.V; v++) nonzero += !(float(r.gradient[v]) == 0.0f);
            CHECK(nonzero == 0);
        });
}

inline void refuse_impossible_shards() {
    float x = 0.0f;
    const int target = 0;
    CHECK_THROWS_WITH_AS(ops::cross_entropy_shard(&x, &x, &target, 1, {0, 9}, 8, nullptr),
                         doctest::Contains("cross_entropy_shard: a shard of 9 tokens in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_shard_backward(&x, &x, &target, 1, {0, -1}, 8, 1.0f, nullptr),
                         doctest::Contains("a shard of -1 rows from row 0"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_shard(&x, &x, &target, 0, {0, 8}, 8, nullptr),
                         doctest::Contains("cross_entropy_shard of 0 rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_combine(&x, &x, &x, &target, 0, 1, nullptr),
                         doctest::Contains("cross_entropy_combine of 0 shards of 1 rows"), Error);
}

// ---- the sum of losses

// tolerance: the allowed relative error of the sum.
template <class Backend>
void sum_of_losses(const Backend& backend, double tolerance) {
    const auto total_of = [&](const Tensor<float>& losses) {
        auto total = filled<float>(1, 5.0f);
        backend.call(ops::accumulate_loss, total, losses, int(losses.size()), 0.5f);
        return total[0];
    };
    const auto check = [&](const Tensor<float>& losses) {
        CAPTURE(losses.size());
        double sum = 0.0;
        for (int64_t n = 0; n < losses.size(); n++) sum += double(losses[n]);
        const float got = total_of(losses);
        CHECK(double(got) == doctest::Approx(5.0 + 0.5 * sum).epsilon(tolerance));
        CHECK(total_of(losses) == got);
    };
    for (int N : {1, 31, 33, 1000, 1023, 1024, 1025, 5000}) check(random_tensor<float>(N, 1, 1.0f, 10.0f));
    auto losses = filled<float>(1000, 0.1f);
    check(losses);
    losses[999] = NAN;
    CHECK(std::isnan(total_of(losses)));
}

inline void refuse_impossible_rows() {
    float x = 0.0f;
    const int target = 0;
    CHECK_THROWS_WITH_AS(ops::cross_entropy(&x, &x, &target, 1, 9, 8, 1.0f, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_forward(&x, &x, &target, 1, 9, 8, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy(&x, &x, &target, 0, 9, 12, 1.0f, nullptr), doctest::Contains("0 rows of 9"),
                         Error);
}

}  // namespace cross_entropy_cases
