// cases_cross_entropy.h: the cases of softmax, cross entropy and the sum of losses that test_cross_entropy.cpp and
// test_gpu_cross_entropy.cu share.
#pragma once
#include <algorithm>

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
const Ops<floatX> definition{cpu::reference::cross_entropy_forward<floatX>, cpu::reference::cross_entropy<floatX>};
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
    INFO("N=", s.N, " V=", s.V, " spread=", spread);
    const auto targets = some_targets(s);
    const auto logits = some_logits<floatX>(s, spread);
    const float error = (4.0f * std::sqrt(float(s.V)) + exp_roundings) * epsilon<float>();
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        const auto r = run(where, ops, logits, targets, s, SCALE);
        return outputs_of(
            output("losses", r.forward, 1, 2 * epsilon<float>(), error),
            output("losses with gradient", r.both, 1, 2 * epsilon<float>(), error),
            output("gradient", r.gradient, s.Vp, rounding_step<floatX>() + error, error * SCALE * 0.125f));
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, tested<floatX>); });
}

// ---- the vocabulary in shards

// The results of all shards together.
template <class floatX>
struct ShardLosses {
    Tensor<float> losses;
    Tensor<floatX> gradient;  // (N, V)
};

// logits (N, s.Vp). Each shard has its own rows, with up to 15 padded columns, which hold 1e9 before.
template <class Backend, class floatX>
ShardLosses<floatX> run_shards(const Backend& backend, const Tensor<floatX>& logits, const Tensor<int>& targets,
                               Shape s, int shards, float scale) {
    ShardLosses<floatX> r{poisoned<float>(s.N), poisoned<floatX>(int64_t(s.N) * s.V)};
    std::vector<Tensor<floatX>> rows;
    auto partials = poisoned<float>(int64_t(shards) * s.N * 2), lse = poisoned<float>(s.N);
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
        std::copy_n(own.data(), own.size(), partials.data() + i * own.size());
    }
    backend.call(ops::cross_entropy_combine, r.losses, lse, partials, targets, shards, s.N);
    int64_t not_zero = 0;
    for (int i = 0; i < shards; i++) {
        const VocabShard shard = shard_of(s.V, shards, i);
        const int Vp = columns_of(i);
        backend.call(ops::cross_entropy_shard_backward<floatX>, rows[i], lse, targets, s.N, shard, Vp, scale);
        for (int n = 0; n < s.N; n++)
            for (int v = 0; v < Vp; v++) {
                const floatX gradient = rows[i][int64_t(n) * Vp + v];
                if (v < shard.count) r.gradient[int64_t(n) * s.V + shard.first + v] = gradient;
                if ((v >= shard.count && !std::isnan(lse[n])) || targets[n] < 0) not_zero += float(gradient) != 0.0f;
            }
    }
    CHECK_MESSAGE(not_zero == 0, "gradients of padded columns and ignored rows");
    return r;
}

// The losses, and the gradients (N, columns) in two parts: at the target a probability of almost 1 and the 1 cancel.
template <class floatX>
Outputs shard_outputs(const Tensor<float>& losses, const Tensor<floatX>& gradient, int columns,
                      const Tensor<int>& targets, Shape s, float error) {
    auto at_target = filled<floatX>(s.N, 0.0f), others = filled<floatX>(int64_t(s.N) * s.V, 0.0f);
    for (int n = 0; n < s.N; n++)
        for (int v = 0; v < s.V; v++)
            (v == targets[n] ? at_target[n] : others[int64_t(n) * s.V + v]) = gradient[int64_t(n) * columns + v];
    // Backends compute exp(x) with a relative error of up to |x| roundings; |x| <= 88 where the result is not 0.
    const float step = rounding_step<floatX>(), exp_error = 90 * epsilon<float>();
    return outputs_of(output("losses", losses, 1, 2 * epsilon<float>(), error),
                      output("gradient at the target", at_target, 1, step, error * SCALE),
                      output("gradient", others, s.V, step + error + exp_error, 1e-36f));
}

// Compares with the definition over the whole vocabulary. The errors are those of `compare` above and four roundings of
// the logarithm of the sum, which is about as large as the largest logit.
template <class floatX, class Backend>
void compare_shards(const Backend& backend, float exp_roundings, Shape s, int shards, float spread = 2.0f) {
    INFO("N=", s.N, " V=", s.V, " shards=", shards, " spread=", spread);
    const auto targets = some_targets(s);
    const auto logits = some_logits<floatX>(s, spread);
    float largest = 0.0f;
    for (int64_t i = 0; i < logits.size(); i++)
        if (i % s.Vp < s.V) largest = std::max(largest, std::fabs(float(logits[i])));
    const float error = (4.0f * std::sqrt(float(s.V)) + exp_roundings + 4.0f * largest) * epsilon<float>();
    const auto whole = run(OnHost{}, definition<floatX>, logits, targets, s, SCALE);
    backend.compare(shard_outputs(whole.both, whole.gradient, s.Vp, targets, s, error), [&] {
        const auto r = run_shards(backend, logits, targets, s, shards, SCALE);
        return shard_outputs(r.losses, r.gradient, s.V, targets, s, error);
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

// ---- rows whose result is known

// Calls check with the loss and the gradient of one row, over the whole vocabulary (shards 0) and in shards, of which
// the last of 20 may be empty.
template <class floatX, class Backend, class Check>
void known_row(const Backend& backend, const Tensor<floatX>& logits, int V, int target, const Check& check) {
    const Shape s{1, V, int(logits.size())};
    const auto targets = filled<int>(1, float(target));
    for (const int shards : {0, 1, 3, 20})
        backend.on_each_variant([&] {
            CAPTURE(V);
            CAPTURE(shards);
            if (shards) {
                const auto r = run_shards(backend, logits, targets, s, shards, 1.0f);
                return check(r.losses[0], r.gradient);
            }
            const auto r = run(backend, tested<floatX>, logits, targets, s, 1.0f);
            CHECK((r.forward[0] == r.both[0] || (std::isnan(r.forward[0]) && std::isnan(r.both[0]))));
            check(r.both[0], r.gradient);
        });
}

// A row with the largest logit at its target, and one with the largest logit elsewhere, maybe in another shard.
template <class floatX, class Backend>
void huge_logits(const Backend& backend, int Vp) {
    for (const float about : {1e30f, 3e38f})
        for (const int target : {32, 7}) {
            const float huge = float(floatX(about));
            auto logits = filled<floatX>(Vp, -huge);
            logits[32] = floatX(huge);
            known_row(backend, logits, 33, target, [&](float loss, const Tensor<floatX>& gradient) {
                CHECK(loss == (target == 32 ? 0.0f : huge + huge));
                for (int v = 0; v < 33; v++) CHECK(float(gradient[v]) == float(v == 32) - float(v == target));
            });
        }
}
template <class floatX, class Backend>
void not_finite_logits(const Backend& backend, int V, int Vp) {
    for (const int place : {0, 3, 20, V - 1})
        for (const float x : {NAN, INFINITY, -INFINITY}) {
            CAPTURE(x);
            auto logits = filled<floatX>(Vp, 1.0f);
            logits[place] = floatX(x);
            known_row(backend, logits, V, 10, [&](float loss, const Tensor<floatX>& gradient) {
                CAPTURE(place);
                CHECK(std::isnan(loss) == (x != -INFINITY));
                if (x != -INFINITY) return;
                CHECK(double(loss) == doctest::Approx(std::log(double(V - 1))).epsilon(1e-6));
                CHECK(float(gradient[place]) == 0.0f);
            });
        }
}
// All logits of most shards are -infinity.
template <class floatX, class Backend>
void one_finite_logit(const Backend& backend, int V) {
    auto logits = filled<floatX>(round_up(V, 8), -INFINITY);
    logits[V - 1] = floatX(-3.0f);
    known_row(backend, logits, V, V - 1, [&](float loss, const Tensor<floatX>& gradient) {
        CHECK(loss == 0.0f);
        int64_t nonzero = 0;
        for (int v = 0; v < V; v++) nonzero += !(float(gradient[v]) == 0.0f);
        CHECK(nonzero == 0);
    });
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
    for (const int N : {1, 31, 33, 1000, 1023, 1024, 1025, 5000}) {
        CAPTURE(N);
        auto losses = random_tensor<float>(N, 1, 1.0f, 10.0f);
        double sum = 0.0;
        for (int n = 0; n < N; n++) sum += double(losses[n]);
        const float got = total_of(losses);
        CHECK(double(got) == doctest::Approx(5.0 + 0.5 * sum).epsilon(tolerance));
        CHECK(total_of(losses) == got);
        losses[N - 1] = NAN;
        CHECK(std::isnan(total_of(losses)));
    }
}

inline void refuse_impossible_shards() {
    float x = 0.0f;
    const int target = 0;
    CHECK_THROWS_WITH_AS(ops::cross_entropy_shard(&x, &x, &target, 1, {0, 9}, 8, nullptr),
                         doctest::Contains("cross_entropy_shard: a shard of 9 tokens in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_shard_backward(&x, &x, &target, 1, {0, -1}, 8, 1.0f, nullptr),
                         doctest::Contains("a shard of -1 rows from row 0"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_combine(&x, &x, &x, &target, 0, 1, nullptr),
                         doctest::Contains("cross_entropy_combine of 0 shards of 1 rows"), Error);
}

inline void refuse_impossible_rows() {
    float x = 0.0f;
    const int target = 0;
    CHECK_THROWS_WITH_AS(ops::cross_entropy_forward(&x, &x, &target, 1, 9, 8, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy(&x, &x, &target, 0, 9, 12, 1.0f, nullptr), doctest::Contains("0 rows of 9"),
                         Error);
}

}  // namespace cross_entropy_cases
