// test_gpu_matmul.cu: the products of llmc/cuda against their definition in cpu::plain, with every finish, by the
// library's epilogues and by our own kernels; and the choice by time. The same source runs on a GPU, with cuBLASLt, and
// in the emulator, with plain loops in its place.
#include <cstring>

#include "base/files.h"
#include "cpu/variants.h"
#include "cuda/matmul.h"
#include "gpu/on_gpu.h"
#include "support/temporary.h"

#ifdef SIMT_EMULATOR
static void set_fused_epilogues(bool there) { simt::config.fused_epilogues = there; }
#else
static void set_fused_epilogues(bool) {}  // they are there or not
#endif

// Sums of K products of standard normal numbers are about sqrt(K), and two orders of adding them differ by about
// sqrt(K) roundings of that size: K 2^-24, of which the worst of some thousand elements is a few times. Operands are
// the same bf16 on both sides. The result is rounded once, to floatX.
static float sum_error(int K) { return 4.0f * float(K) * epsilon<float>() / 2; }
template <class floatX>
constexpr float one_rounding = sizeof(floatX) == 4 ? 0.0f : epsilon<bf16>();

enum class Epilogue { nothing, bias, gelu, bias_gelu };

template <class floatX>
static Tensor<floatX> compare_forward(int N, int IC, int OC, Epilogue finish) {
    CAPTURE(N);
    CAPTURE(IC);
    CAPTURE(OC);
    CAPTURE(int(finish));
    const bool with_bias = finish == Epilogue::bias || finish == Epilogue::bias_gelu,
               with_gelu = finish >= Epilogue::gelu;
    auto inp = random_tensor<floatX>(int64_t(N) * IC, 1), weight = random_tensor<floatX>(int64_t(OC) * IC, 2);
    auto bias = random_tensor<floatX>(OC, 3);
    auto out = poisoned<floatX>(int64_t(N) * OC), want = poisoned<floatX>(int64_t(N) * OC);
    auto pre = poisoned<floatX>(int64_t(N) * OC), want_pre = poisoned<floatX>(int64_t(N) * OC);
    OnGpu<floatX> x(inp), w(weight), b(bias), y(out), p(pre);
    gpu::matmul_forward<floatX>(y, with_gelu ? p.device : nullptr, x, {w, nullptr}, with_bias ? b.device : nullptr, N,
                                IC, OC, nullptr);
    y.back(), p.back();
    cpu::plain::matmul_forward<floatX>(want.data(), with_gelu ? want_pre.data() : nullptr, inp.data(),
                                       {weight.data(), nullptr}, with_bias ? bias.data() : nullptr, N, IC, OC, nullptr);
    // GELU by a kernel of ours starts from the rounded product, whose error its slope of up to 1.13 passes on.
    const float scale = with_gelu ? 5.0f * std::sqrt(float(IC)) : 0.0f;
    expect_close("out", out, want, OC, 2 * one_rounding<floatX>, sum_error(IC) + scale * one_rounding<floatX> / 4);
    if (with_gelu)
        expect_close("pre_gelu", pre, want_pre, OC, one_rounding<floatX>, sum_error(IC));
    else
        CHECK(std::isnan(float(pre[0])));
    return out;
}

template <class floatX>
static void compare_backward(int N, int IC, int OC, bool with_bias, bool with_gelu, bool accumulate) {
    CAPTURE(N);
    CAPTURE(IC);
    CAPTURE(OC);
    CAPTURE(with_bias);
    CAPTURE(with_gelu);
    CAPTURE(accumulate);
    auto dout = random_tensor<floatX>(int64_t(N) * OC, 1), inp = random_tensor<floatX>(int64_t(N) * IC, 2);
    auto weight = random_tensor<floatX>(int64_t(OC) * IC, 3), pre = random_tensor<floatX>(int64_t(N) * IC, 4);
    auto dinp = poisoned<floatX>(int64_t(N) * IC), want_dinp = poisoned<floatX>(int64_t(N) * IC);
    const auto before = [&](int64_t size, uint64_t seed) {
        return accumulate ? random_tensor<float>(size, seed) : poisoned<float>(size);
    };
    auto dweight = before(int64_t(OC) * IC, 5), want_dweight = before(int64_t(OC) * IC, 5);
    auto dbias = before(OC, 6), want_dbias = before(OC, 6);
    OnGpu<floatX> dy(dout), x(inp), w(weight), p(pre), dx(dinp);
    OnGpu<float> dw(dweight), db(dbias);
    gpu::matmul_backward<floatX>(dx, dw, with_bias ? db.device : nullptr, dy, x, {w, nullptr},
                                 with_gelu ? p.device : nullptr, N, IC, OC, accumulate, nullptr);
    dx.back(), dw.back(), db.back();
    cpu::plain::matmul_backward<floatX>(want_dinp.data(), want_dweight.data(), with_bias ? want_dbias.data() : nullptr,
                                        dout.data(), inp.data(), {weight.data(), nullptr},
                                        with_gelu ? pre.data() : nullptr, N, IC, OC, accumulate, nullptr);
    // times gelu', which is at most 1.13; by a kernel of ours after a rounding of its own
    expect_close("dinp", dinp, want_dinp, IC, (with_gelu ? 2.0f : 1.0f) * one_rounding<floatX> + 8 * epsilon<float>(),
                 sum_error(OC) + (with_gelu ? 64 * epsilon<float>() * std::sqrt(float(OC)) : 0.0f));
    expect_close("dweight", dweight, want_dweight, IC, epsilon<float>(), sum_error(N) + epsilon<float>());
    if (with_bias) expect_close("dbias", dbias, want_dbias, OC, epsilon<float>(), sum_error(N) + epsilon<float>());
}

template <class floatX>
static void compare_all(int N, int IC, int OC) {
    for (Epilogue finish : {Epilogue::nothing, Epilogue::bias, Epilogue::gelu, Epilogue::bias_gelu})
        compare_forward<floatX>(N, IC, OC, finish);
    compare_backward<floatX>(N, IC, OC, true, false, false);
    compare_backward<floatX>(N, IC, OC, false, true, true);
    compare_backward<floatX>(N, IC, OC, true, true, false);
}

TEST_CASE_TEMPLATE("products of awkward sizes, by either way to GELU", floatX, float, bf16) {
    constexpr int unit = 16 / int(sizeof(floatX));
    for (const bool fused : {true, false}) {
        set_fused_epilogues(fused);
        for (const int N : {1, 7, 17, 65}) compare_all<floatX>(N, 7 * unit, 17 * unit);
        compare_all<floatX>(3, unit, unit);
        compare_all<floatX>(2, 17 * unit, unit);
        compare_all<floatX>(5, 65 * unit, 3 * unit);
        compare_all<floatX>(4, unit, 65 * unit);
        device_autotune("");  // forget the plans
    }
    set_fused_epilogues(true);
}

#ifdef SIMT_EMULATOR
TEST_CASE("GELU is part of the product on H100 and B200, and a kernel of its own on the others") {
    const simt::Config as_it_was = simt::config;
    const auto result = [&](int compute_capability, bool fused_epilogues) {
        simt::config.compute_capability = compute_capability, simt::config.fused_epilogues = fused_epilogues;
        device_autotune("");  // forget the plans
        return compare_forward<bf16>(17, 64, 96, Epilogue::bias_gelu);
    };
    const auto same = [](const Tensor<bf16>& a, const Tensor<bf16>& b) {
        return memcmp(a.data(), b.data(), size_t(a.buffer.bytes())) == 0;
    };
    // Behind the product GELU starts from a rounded number: other bits in some of the results.
    const Tensor<bf16> apart = result(90, false);
    for (const int compute_capability : {80, 86, 89, 120}) CHECK(same(result(compute_capability, true), apart));
    for (const int compute_capability : {90, 100}) CHECK(!same(result(compute_capability, true), apart));
    simt::config = as_it_was;
    device_autotune("");
}
#endif

TEST_CASE_TEMPLATE("products of GPT-2's layers, few rows", floatX, float, bf16) {
    compare_forward<floatX>(1, 768, 2304, Epilogue::bias);  // a token generated
    compare_forward<floatX>(5, 768, 3072, Epilogue::bias_gelu);
    compare_backward<floatX>(5, 3072, 768, false, true, true);
}

TEST_CASE_TEMPLATE("the same product twice has the same bits, on any stream", floatX, float, bf16) {
    constexpr int N = 33, IC = 64, OC = 96;
    auto inp = random_tensor<floatX>(N * IC, 1), dout = random_tensor<floatX>(N * OC, 2);
    auto weight = random_tensor<floatX>(OC * IC, 3);
    Tensor<floatX> dinp[] = {poisoned<floatX>(N * IC), poisoned<floatX>(N * IC)};
    Tensor<float> dweight[] = {poisoned<float>(OC * IC), poisoned<float>(OC * IC)};
    Tensor<float> dbias[] = {poisoned<float>(OC), poisoned<float>(OC)};
    OnGpu<floatX> x(inp), dy(dout), w(weight);
    for (int i = 0; i < 2; i++) {
        OnGpu<floatX> dx(dinp[i]);
        OnGpu<float> dw(dweight[i]), db(dbias[i]);
        const Stream stream = i == 0 ? nullptr : create_stream();
        gpu::matmul_backward<floatX>(dx, dw, db, dy, x, {w, nullptr}, nullptr, N, IC, OC, false, stream);
        wait_for_stream(stream);
        dx.back(), dw.back(), db.back();
        destroy_stream(stream);
    }
    expect_close("dinp", dinp[1], dinp[0], IC, 0.0f, 0.0f);
    expect_close("dweight", dweight[1], dweight[0], IC, 0.0f, 0.0f);
    expect_close("dbias", dbias[1], dbias[0], OC, 0.0f, 0.0f);
}

TEST_CASE("sizes that cannot be are refused") {
    bf16* none = nullptr;
    float* no_floats = nullptr;
    const auto forward = [&](int N, int IC, int OC) {
        gpu::matmul_forward<bf16>(none, none, none, {none, nullptr}, none, N, IC, OC, nullptr);
    };
    CHECK_THROWS_WITH_AS(forward(0, 64, 64), doctest::Contains("a product of (0, 64) and (64, 64): every size"), Error);
    CHECK_THROWS_WITH_AS(forward(4, 100, 64), doctest::Contains("widths must be multiples of 8"), Error);
    CHECK_THROWS_WITH_AS(forward(4, 64, 100), doctest::Contains("(4, 64) and (64, 100) in bf16"), Error);
    CHECK_THROWS_WITH_AS(gpu::matmul_backward<float>(no_floats, no_floats, no_floats, no_floats, no_floats,
                                                     {no_floats, nullptr}, no_floats, 4, 64, 6, false, nullptr),
                         doctest::Contains("in fp32: the widths must be multiples of 4"), Error);
}

TEST_CASE("working memory of the products is part of the plan") {
    CHECK(gpu::matmul_scratch_bytes<bf16>(1024, 768) >= 32 << 20);
    CHECK(gpu::matmul_scratch_bytes<float>(1 << 16, 6400) >= 32 << 20);
}

// ---- --autotune

TEST_CASE("products chosen by time are right, and the choice is kept") {
    const TemporaryDirectory dir;
    const std::string file = dir.path + "/products.txt";
    device_autotune(file);
    const Tensor<bf16> timed = compare_forward<bf16>(17, 64, 96, Epilogue::bias_gelu);
    compare_backward<bf16>(40, 64, 96, true, true, true);  // adds: not timed
    compare_backward<bf16>(40, 64, 96, true, true, false);
    compare_backward<bf16>(40, 64, 96, true, true, true);
    const std::string text = read_file(file, 1 << 20);
    for (const char* line : {"forward bf16 m 96 n 17 k 64+bias+gelu: ", "input-gradient bf16 m 64 n 40 k 96*gelu': ",
                             "weight-gradient bf16 m 64 n 96 k 40: "})
        CHECK(text.find(line) != std::string::npos);

    device_autotune(file);  // a later run: nothing is timed, and the bits are the same
    const Tensor<bf16> again = compare_forward<bf16>(17, 64, 96, Epilogue::bias_gelu);
    compare_backward<bf16>(40, 64, 96, true, true, false);
    expect_close("with the file", again, timed, 96, 0.0f, 0.0f);
    CHECK(read_file(file, 1 << 20) == text);

    // What cannot be read, or is refused by the library, is timed anew; what others chose stays.
    const size_t choice = text.find("+bias+gelu: ") + 12, end = text.find('\n', choice);
    for (const char* damage : {"", "7", "0 zz", "0 63 1 0 0 0 0 0 0 1.0 1.0", "0 0 1"}) {
        CAPTURE(damage);
        replace_file(
            file, "another GPU; forward: 1 2 3\n\nno colon\n: \n" + text.substr(0, choice) + damage + text.substr(end));
        device_autotune(file);
        compare_forward<bf16>(17, 64, 96, Epilogue::bias_gelu);
        const std::string mended = read_file(file, 1 << 20);
        CHECK(mended.find("+bias+gelu: 0 ") != std::string::npos);
        CHECK(mended.find(std::string("+bias+gelu: ") + damage + "\n") == std::string::npos);
        CHECK(mended.find("another GPU; forward: 1 2 3\n") != std::string::npos);
    }
    device_autotune("");
}

#ifdef SIMT_EMULATOR
TEST_CASE("the fastest wins: split for the gradient of a weight, else the third of the four") {
    const TemporaryDirectory dir;
    const std::string file = dir.path + "/products.txt";
    device_autotune(file);
    compare_forward<bf16>(40, 64, 96, Epilogue::bias);
    compare_backward<bf16>(40, 64, 96, false, false, false);
    const std::string text = read_file(file, 1 << 20);
    CHECK(text.find("forward bf16 m 96 n 40 k 64+bias: 0 2 1 0") != std::string::npos);
    CHECK(text.find(" 3.0000 5.0000\n") != std::string::npos);
    CHECK(text.find("weight-gradient bf16 m 64 n 96 k 40: 0 2 20 1 ") != std::string::npos);  // 32 parts, in place

    std::string slower = text;
    const size_t at = slower.find("+bias: 0 2 ");
    slower[at + 9] = '1';  // the second algorithm
    replace_file(file, slower);
    device_autotune(file);
    compare_forward<bf16>(40, 64, 96, Epilogue::bias);
    compare_forward<bf16>(41, 64, 96, Epilogue::bias);  // timed, and so the file is written again
    CHECK(read_file(file, 1 << 20).find("n 40 k 64+bias: 0 1 1 0") != std::string::npos);
    device_autotune("");
}
#endif
