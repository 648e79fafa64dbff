// test_gpu_matmul.cu: the shared cases of the matrix products (cases_matmul.h) on the GPU, with every epilogue, by the
// library's epilogues and by our own kernels; and the choice by time. The same source runs on a GPU, with cuBLASLt, and
// in the emulator, with plain loops in its place.
#include "base/files.h"
#include "cuda/matmul.h"
#include "gpu/gpu_backend.h"
#include "support/cases_matmul.h"
#include "support/temporary.h"

using namespace matmul_cases;

#ifdef SIMT_EMULATOR
static void set_fused_epilogues(bool there) { simt::config.fused_epilogues = there; }
#else
static void set_fused_epilogues(bool) {}  // they are there or not
#endif

struct MatmulOnGpu : GpuBackend {
    // Sums of K products of standard normal numbers are about sqrt(K), and two orders of adding them differ by about
    // sqrt(K) roundings of that size: K 2^-24, of which the worst of some thousand elements is a few times. Operands
    // are the same bf16 on both sides. The result is rounded once, to floatX.
    template <class floatX>
    Bound bound(Value value, int K, Options options) const {
        const float sum_error = 4.0f * float(K) * epsilon<float>() / 2, root = std::sqrt(float(K));
        const float one_rounding = sizeof(floatX) == sizeof(float) ? 0.0f : epsilon<bf16>();
        switch (value) {
            case Value::out:  // a GELU kernel of ours starts from the rounded product; its slope is up to 1.13
                return {2 * one_rounding, sum_error + (options.gelu ? 5.0f * root * one_rounding / 4 : 0.0f)};
            case Value::pre_gelu:
                return {one_rounding, sum_error};
            case Value::dinp:  // times gelu', which is at most 1.13; by a kernel of ours after a rounding of its own
                return {(options.gelu ? 2.0f : 1.0f) * one_rounding + 8 * epsilon<float>(),
                        sum_error + (options.gelu ? 64 * epsilon<float>() * root : 0.0f)};
            default:
                return {epsilon<float>(), sum_error + epsilon<float>()};
        }
    }
};

static const MatmulOnGpu gpu_backend;

template <class floatX>
static void compare_forward(Shape s, Options options) {
    matmul_cases::compare_forward<floatX>(gpu_backend, Inputs<floatX>(s), options);
}

template <class floatX>
static void compare_backward(Shape s, Options options) {
    matmul_cases::compare_backward<floatX>(gpu_backend, Inputs<floatX>(s), options);
}

template <class floatX>
static void compare_all(Shape s) {
    for (const bool gelu : {false, true})
        for (const bool bias : {false, true}) compare_forward<floatX>(s, {.bias = bias, .gelu = gelu});
    compare_backward<floatX>(s, {});
    compare_backward<floatX>(s, {.bias = false, .gelu = true, .accumulate = true});
    compare_backward<floatX>(s, {.gelu = true});
}

TEST_CASE_TEMPLATE("products of awkward sizes agree with the definition, by either way to GELU", floatX, float, bf16) {
    constexpr int unit = 16 / int(sizeof(floatX));
    for (const bool fused : {true, false}) {
        set_fused_epilogues(fused);
        for (const int N : {1, 7, 17, 65}) compare_all<floatX>({N, 7 * unit, 17 * unit});
        compare_all<floatX>({3, unit, unit});
        compare_all<floatX>({2, 17 * unit, unit});
        compare_all<floatX>({5, 65 * unit, 3 * unit});
        compare_all<floatX>({4, unit, 65 * unit});
        device_autotune("");  // forget the plans
    }
    set_fused_epilogues(true);
}

#ifdef SIMT_EMULATOR
TEST_CASE("GELU is part of the product on H100 and B200, and a kernel of its own on the others") {
    const simt::Config as_it_was = simt::config;
    const Inputs<bf16> in({17, 64, 96});
    const auto result = [&](int compute_capability, bool fused_epilogues) {
        simt::config.compute_capability = compute_capability, simt::config.fused_epilogues = fused_epilogues;
        device_autotune("");  // forget the plans
        compare_forward<bf16>(in.s, {.gelu = true});
        return forward(gpu_backend, tested<bf16>, in, {.gelu = true}).out;
    };
    // Behind the product GELU starts from a rounded number: other bits in some of the results.
    const Tensor<bf16> apart = result(90, false);
    for (const int compute_capability : {80, 86, 89, 120}) CHECK(same_bits(result(compute_capability, true), apart));
    for (const int compute_capability : {90, 100}) CHECK(!same_bits(result(compute_capability, true), apart));
    simt::config = as_it_was;
    device_autotune("");
}
#endif

TEST_CASE_TEMPLATE("products of few rows in GPT-2's layers agree with the definition", floatX, float, bf16) {
    compare_forward<floatX>({1, 768, 2304}, {});  // a token generated
    compare_forward<floatX>({5, 768, 3072}, {.gelu = true});
    compare_backward<floatX>({5, 3072, 768}, {.bias = false, .gelu = true, .accumulate = true});
}

TEST_CASE_TEMPLATE("NaN and infinity reach exactly the outputs that depend on them", floatX, float, bf16) {
    for (const int N : {40, 1}) not_finite<floatX>(gpu_backend, {N, 56, 72});
}

TEST_CASE_TEMPLATE("products of small integers are exact", floatX, float, bf16) {
    small_integers<floatX>(gpu_backend, {70, 304, 96});
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
    CHECK_THROWS_WITH_AS(forward(0, 64, 64), doctest::Contains("a matmul of (0, 64) and (64, 64): every size"), Error);
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
    const Inputs<bf16> in({17, 64, 96});
    const Options gelu = {.gelu = true}, gelu_added = {.gelu = true, .accumulate = true};
    const auto compared_forward = [&] {
        compare_forward<bf16>(in.s, gelu);
        return forward(gpu_backend, tested<bf16>, in, gelu).out;
    };
    const Tensor<bf16> timed = compared_forward();
    compare_backward<bf16>({40, 64, 96}, gelu_added);  // adds: not timed
    compare_backward<bf16>({40, 64, 96}, gelu);
    compare_backward<bf16>({40, 64, 96}, gelu_added);
    const std::string text = read_file(file, 1 << 20);
    for (const char* line : {"forward bf16 m 96 n 17 k 64+bias+gelu: ", "input-gradient bf16 m 64 n 40 k 96*gelu': ",
                             "weight-gradient bf16 m 64 n 96 k 40: "})
        CHECK(text.find(line) != std::string::npos);

    device_autotune(file);  // a later run: nothing is timed, and the bits are the same
    const Tensor<bf16> again = compared_forward();
    compare_backward<bf16>({40, 64, 96}, gelu);
    expect_close("with the file", again, timed, 96, 0.0f, 0.0f);
    CHECK(read_file(file, 1 << 20) == text);

    // What cannot be read, or is refused by the library, is timed anew; what others chose stays.
    const size_t choice = text.find("+bias+gelu: ") + 12, end = text.find('\n', choice);
    std::vector<const char*> damages = {"", "7", "0 zz", "0 0 1"};
#ifdef SIMT_EMULATOR  // its library knows that there is no algorithm 63; the real one need not check invented numbers
    damages.push_back("0 63 1 0 0 0 0 0 0 1.0 1.0");
#endif
    for (const char* damage : damages) {
        CAPTURE(damage);
        replace_file(
            file, "another GPU; forward: 1 2 3\n\nno colon\n: \n" + text.substr(0, choice) + damage + text.substr(end));
        device_autotune(file);
        compare_forward<bf16>(in.s, gelu);
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
    compare_forward<bf16>({40, 64, 96}, {});
    compare_backward<bf16>({40, 64, 96}, {.bias = false});
    const std::string text = read_file(file, 1 << 20);
    CHECK(text.find("forward bf16 m 96 n 40 k 64+bias: 0 2 1 0") != std::string::npos);
    CHECK(text.find(" 3.0000 5.0000\n") != std::string::npos);
    CHECK(text.find("weight-gradient bf16 m 64 n 96 k 40: 0 2 20 1 ") != std::string::npos);  // 32 parts, in place

    std::string slower = text;
    const size_t at = slower.find("+bias: 0 2 ");
    slower[at + 9] = '1';  // the second algorithm
    replace_file(file, slower);
    device_autotune(file);
    compare_forward<bf16>({40, 64, 96}, {});
    compare_forward<bf16>({41, 64, 96}, {});  // timed, and so the file is written again
    CHECK(read_file(file, 1 << 20).find("n 40 k 64+bias: 0 1 1 0") != std::string::npos);
    device_autotune("");
}
#endif
