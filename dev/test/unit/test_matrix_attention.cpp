// test_matrix_attention.cpp: compares attention with AMX and with AVX512-BF16 with the definition, cpu::plain, for
// every head size that they support, at lengths around their blocks of 32 and their chunks. Other cases test inputs
// whose result is known, and the bits on different numbers of threads.
#include <omp.h>

#include <cstring>
#include <functional>

#include "cpu/variants.h"
#include "cpu/isa.h"
#include "support/test.h"

namespace {

struct Shape {
    int B, T, NH, HS;
};

struct Forward {
    Tensor<bf16> out;
    Tensor<float> lse;
};

Forward forward(decltype(&cpu::attention_forward<bf16>) op, const Tensor<bf16>& qkv, Shape s) {
    Forward r{poisoned<bf16>(int64_t(s.B) * s.T * s.NH * s.HS), poisoned<float>(int64_t(s.B) * s.NH * s.T)};
    op(r.out.data(), r.lse.data(), qkv.data(), s.B, s.T, s.NH, s.HS, nullptr);
    return r;
}

Tensor<bf16> backward(decltype(&cpu::attention_backward<bf16>) op, const Tensor<bf16>& dout, const Forward& f,
                      const Tensor<bf16>& qkv, Shape s) {
    auto dqkv = poisoned<bf16>(qkv.size());
    op(dqkv.data(), dout.data(), f.out.data(), f.lse.data(), qkv.data(), s.B, s.T, s.NH, s.HS, nullptr);
    return dqkv;
}

Tensor<bf16> random_qkv(Shape s, float scale = 1.0f) {
    return random_tensor<bf16>(int64_t(s.B) * s.T * 3 * s.NH * s.HS, 1, scale);
}

struct Unit {
    Isa isa;
    decltype(&cpu::attention_forward<bf16>) attention_forward;
    decltype(&cpu::attention_backward<bf16>) attention_backward;
};

std::vector<Unit> units_here() {
    std::vector<Unit> units;
#if defined(__x86_64__)
    if (best_isa() >= Isa::avx512bf16)
        units.push_back({Isa::avx512bf16, cpu::avx512bf16::attention_forward, cpu::avx512bf16::attention_backward});
    if (best_isa() >= Isa::amx) units.push_back({Isa::amx, cpu::amx::attention_forward, cpu::amx::attention_backward});
#endif
    return units;
}

// Calls check for every matrix unit that the machine has.
void on_each_unit(const std::function<void(const Unit&)>& check) {
    const std::vector<Unit> units = units_here();
    if (units.empty()) skip_case("this machine has no matrix unit for bf16");
    for (const Unit& unit : units) {
        INFO(isa_name(unit.isa));
        check(unit);
    }
}

// P and dS are rounded to bf16, by at most half a step, before they are multiplied by numbers of up to about 4 (v,
// dout, k, q). out is a mean with weights P, so its error is at most half a step of 4. For gradients, rows of dS and
// columns of P sum up to about 4, which multiplies the error by 4. Each result is then rounded by one step.
void compare(const Unit& unit, Shape s, float scale = 1.0f) {
    const std::string name = format("B=%d T=%d NH=%d HS=%d ", s.B, s.T, s.NH, s.HS);
    const auto qkv = random_qkv(s, scale);
    const auto dout = random_tensor<bf16>(int64_t(s.B) * s.T * s.NH * s.HS, 2);
    const Forward want = forward(cpu::plain::attention_forward, qkv, s), got = forward(unit.attention_forward, qkv, s);
    const float step = epsilon<bf16>();
    expect_close(name + "out", got.out, want.out, s.NH * s.HS, step, 2 * step * scale);
    expect_close(name + "lse", got.lse, want.lse, s.T, 1e-6f, 1e-5f * scale * scale);
    expect_close(name + "dqkv", backward(unit.attention_backward, dout, want, qkv, s),
                 backward(cpu::plain::attention_backward, dout, want, qkv, s), s.HS, 2 * step, 8 * step * scale);
}

}  // namespace

TEST_CASE("head sizes 32, 64, 96, 128") {
    on_each_unit([](const Unit& unit) {
        for (const int HS : {32, 64, 96, 128}) compare(unit, {2, 96, 3, HS});
    });
}

TEST_CASE("lengths around the blocks of 32") {
    on_each_unit([](const Unit& unit) {
        for (const int T : {1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 257}) compare(unit, {2, T, 2, 64});
    });
}

TEST_CASE("lengths around the chunks of 512 in backward and of 2048 in forward" * LARGE) {
    on_each_unit([](const Unit& unit) {
        for (const int T : {511, 512, 513, 1024, 1030, 2048, 2049, 2200}) compare(unit, {1, T, 1, 32});
    });
}

// The scores of the diagonal are far above the others, so each row of out is its own v, exactly.
TEST_CASE("huge scores make attention one-hot") {
    on_each_unit([](const Unit& unit) {
        const Shape s{1, 70, 2, 64};
        const int C = s.NH * s.HS;
        auto qkv = random_qkv(s);
        for (int t = 0; t < s.T; t++)
            for (int c = 0; c < C; c++) {
                bf16& q = qkv[int64_t(t) * 3 * C + c];
                q = bf16(q.bits & 0x8000 ? -1e3f : 1e3f);
                qkv[int64_t(t) * 3 * C + C + c] = q;
            }
        const Forward got = forward(unit.attention_forward, qkv, s);
        bool same = true;
        for (int t = 0; t < s.T; t++)
            for (int c = 0; c < C; c++)
                same &= got.out[int64_t(t) * C + c].bits == qkv[int64_t(t) * 3 * C + 2 * C + c].bits;
        CHECK(same);
    });
}

TEST_CASE("large scores that are not one-hot") {
    on_each_unit([](const Unit& unit) {
        const Shape s{1, 200, 2, 64};
        const auto qkv = random_qkv(s, 4.0f);  // scores are normal with a standard deviation of 16
        const Forward want = forward(cpu::plain::attention_forward, qkv, s),
                      got = forward(unit.attention_forward, qkv, s);
        expect_close("out", got.out, want.out, s.NH * s.HS, epsilon<bf16>(), 8 * epsilon<bf16>());
        expect_close("lse", got.lse, want.lse, s.T, 1e-6f, 1e-4f);
    });
}

TEST_CASE("NaN and infinity reach the rows that see them, and no earlier block") {
    on_each_unit([](const Unit& unit) {
        const Shape s{1, 96, 1, 32};
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            auto qkv = random_qkv(s);
            const int C = s.HS, at = 40;
            qkv[int64_t(at) * 3 * C + 2 * C] = bf16(bad);  // channel 0 of v
            const Forward got = forward(unit.attention_forward, qkv, s);
            for (int t = at; t < s.T; t++) CHECK_FALSE(std::isfinite(float(got.out[int64_t(t) * C])));
            for (int t = 0; t < 32; t++) CHECK(std::isfinite(float(got.out[int64_t(t) * C])));
        }
    });
}

TEST_CASE("the same bits on 1, 2 and 3 threads" * LARGE) {
    on_each_unit([](const Unit& unit) {
        const Shape s{2, 600, 3, 64};
        const auto qkv = random_qkv(s), dout = random_tensor<bf16>(int64_t(s.B) * s.T * s.NH * s.HS, 2);
        const int before = omp_get_max_threads();
        omp_set_num_threads(1);
        const Forward want = forward(unit.attention_forward, qkv, s);
        const auto want_dqkv = backward(unit.attention_backward, dout, want, qkv, s);
        for (const int threads : {2, 3}) {
            omp_set_num_threads(threads);
            const Forward got = forward(unit.attention_forward, qkv, s);
            const auto got_dqkv = backward(unit.attention_backward, dout, want, qkv, s);
            CHECK(memcmp(got.out.data(), want.out.data(), want.out.buffer.bytes()) == 0);
            CHECK(memcmp(got.lse.data(), want.lse.data(), want.lse.buffer.bytes()) == 0);
            CHECK(memcmp(got_dqkv.data(), want_dqkv.data(), want_dqkv.buffer.bytes()) == 0);
        }
        omp_set_num_threads(before);
    });
}

TEST_CASE("other head sizes are refused") {
    on_each_unit([](const Unit& unit) {
        const Shape s{1, 4, 1, 48};
        CHECK_THROWS_WITH_AS(forward(unit.attention_forward, random_qkv(s), s),
                             doctest::Contains("48 channels per head"), Error);
    });
}
