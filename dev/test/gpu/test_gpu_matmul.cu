// test_gpu_matmul.cu: the shared cases of the matmuls (cases_matmul.h) on the GPU, with the library's epilogues and
// with our own kernels in their place; and tests of the choice of algorithms by timing. The same source runs on a GPU
// with cuBLASLt, and in the emulator with plain loops.
#include "cuda/autotune.h"
#include "cuda/matmul.h"
#include "cuda/matmul_routes.h"
#include "gpu/gpu_backend.h"
#include "gpu/hopper_modes.h"
#include "support/cases_matmul.h"

using namespace matmul_cases;

struct MatmulOnGpu : GpuBackend {
    // A sum of K products of standard normal numbers is about sqrt(K). Two orders of adding them differ by about
    // sqrt(K) roundings of that size, which is K 2^-24. The worst of some thousand elements differs by a few times
    // that. + 8: of millions of sums of few products, the largest are far above sqrt(K). Both sides have the same bf16
    // operands, and the result is rounded to floatX once. A tensor core adds 16 products at a time to the sum, and
    // does not round: it drops the low bits (Fasi et al. 2021). Each of these K / 16 additions loses less than one unit
    // in the last place of the sum.
    template <class floatX>
    Bound bound(Value value, int K, Options options) const {
        const float one_rounding = sizeof(floatX) == sizeof(float) ? 0.0f : epsilon<bf16>(), root = std::sqrt(float(K));
        const float cut = one_rounding > 0 ? root * float(K) / 16 * epsilon<float>() : 0.0f;
        const float sum_error = 4.0f * float(K + 8) * epsilon<float>() / 2 + cut;
        switch (value) {
            case Value::out:  // our GELU kernel reads the rounded sum, and its derivative is at most 1.13
                return {2 * one_rounding, sum_error + (options.gelu ? 5.0f * root * one_rounding / 4 : 0.0f)};
            case Value::pre_gelu:
                return {one_rounding, sum_error};
            case Value::dinp:  // multiplied by gelu', at most 1.13; our own kernel reads a sum that is already rounded
                return {(options.gelu ? 2.0f : 1.0f) * one_rounding + 8 * epsilon<float>(),
                        sum_error + (options.gelu ? 64 * epsilon<float>() * root : 0.0f) +
                            (options.gelu && one_rounding > 0 ? fused_gelu_error(K) : 0.0f)};
            case Value::dbias:  // the roundings of its N additions grow like sqrt(N)
                return {epsilon<float>(), root * (4.0f + root) * epsilon<float>()};
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
    for (const bool bias : {false, true}) compare_forward<floatX>(s, {.bias = bias, .residual = true});
    compare_backward<floatX>(s, {});
    compare_backward<floatX>(s, {.bias = false, .gelu = true, .accumulate = true});
    compare_backward<floatX>(s, {.gelu = true});
}

TEST_CASE_TEMPLATE("matmuls of awkward sizes agree with the definition, with GELU fused and separate", floatX, float,
                   bf16) {
    constexpr int unit = 16 / int(sizeof(floatX));
    for (const bool fused : {true, false}) {
        set_fused_epilogues(fused);
        for (const int N : {1, 7, 17, 65}) compare_all<floatX>({N, 7 * unit, 17 * unit});
        compare_all<floatX>({3, unit, unit});
        compare_all<floatX>({2, 17 * unit, unit});
        compare_all<floatX>({5, 65 * unit, 3 * unit});
        compare_all<floatX>({4, unit, 65 * unit});
        compare_all<floatX>({1, 768, 2304});  // generation of one token
        gpu::load_algorithms({});             // discards the plans
    }
    set_fused_epilogues(true);
}

TEST_CASE_TEMPLATE("the gradients of a matmul have the same bits in two calls as in one", floatX, float, bf16) {
    const Inputs<floatX> in({40, 64, 96});
    for (const bool fused : {true, false}) {
        set_fused_epilogues(fused);
        for (const bool accumulate : {false, true})
            for (const bool gelu : {false, true}) {
                gradients_one_by_one<floatX>(gpu_backend, tested<floatX>, in, {.gelu = gelu, .accumulate = accumulate});
                gradients_one_by_one<floatX>(gpu_backend, tested<floatX>, in,
                                             {.bias = false, .gelu = gelu, .accumulate = accumulate});
            }
        gpu::load_algorithms({});  // discards the plans
    }
    set_fused_epilogues(true);
}

// The gradient of a bias at GPT-2's widths and around the rows and the channels that a block of its kernel reads.
TEST_CASE_TEMPLATE("bias gradients of any size agree with the definition", floatX, float, bf16) {
    const auto compare = [](int N, int OC) {
        const Inputs<floatX> in({N, 8, OC});
        for (const bool accumulate : {false, true})
            matmul_cases::compare_backward<floatX>(gpu_backend, in, {.accumulate = accumulate});
    };
    for (int OC : {768, 1600, 2304, 4800}) compare(65, OC);
    for (int N : {31, 32, 33, 95, 96, 97, 127, 128, 129, 255, 257, 5000}) compare(N, 8);
    for (int OC : {16, 24, 56, 64, 72, 120, 128, 136, 264}) compare(40, OC);
    compare(300, 768);                                // three chunks
    if (sizeof(floatX) == 2) compare(2580, 64 * 39);  // 17 chunks, longer than the shortest
}

TEST_CASE_TEMPLATE("NaN and infinity reach exactly the outputs that depend on them", floatX, float, bf16) {
    for (const int N : {40, 1}) not_finite<floatX>(gpu_backend, {N, 56, 72});
}

TEST_CASE("no gradients, sizes below 1, and widths that are not a multiple of 16 bytes, are refused") {
    refuse_no_gradients();
    const auto forward = [&](int N, int IC, int OC) {
        gpu::matmul_forward<bf16>({.out = nullptr, .inp = nullptr}, N, IC, OC, nullptr);
    };
    CHECK_THROWS_WITH_AS(forward(0, 64, 64), doctest::Contains("a matmul of (0, 64) and (64, 64): every size"), Error);
    CHECK_THROWS_WITH_AS(forward(4, 100, 64), doctest::Contains("widths must be multiples of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::matmul_backward<float>({.dout = nullptr}, 4, 64, 6, nullptr),
                         doctest::Contains("in fp32: the widths must be multiples of 4"), Error);
}

TEST_CASE("working memory of the matmuls is part of the plan") {
    CHECK(gpu::matmul_scratch_bytes<bf16>(1024, 768) == 72 << 20);  // 8 gradients of (3072, 768)
    CHECK(gpu::matmul_scratch_bytes<float>(1 << 16, 6400) >= 128 << 20);
}

// ---- our kernel for Hopper

// Tiles have 128 rows, 64 products, and 192 columns, or 128 where these are fewer.
TEST_CASE("matmuls with a residual by our kernel for Hopper agree with the definition, in every mode") {
    if (skips_on_other_gpus()) return;
    const OwnMatmul restored;
    gpu::wgmma_matmul.always = true;
    const auto compare = [](Shape s) {
        for (const bool bias : {false, true}) compare_forward<bf16>(s, {.bias = bias, .residual = true});
    };
    in_every_mode([&] {
        for (const int N : {1, 64, 200})
            for (const int OC : {8, 136, 192, 200}) compare({N, 72, OC});
        compare({129, 8, 384});
        compare({70, 200, 256});
    });
    compare({2100, 8, 1544});  // two bands, blocks with two tiles of 128 columns
}

TEST_CASE("a matmul with a residual whose results differ from the library's is refused") {
    if (skips_on_other_gpus()) return;
    const OwnMatmul restored;
    static const auto own = restored.own;
    gpu::wgmma_matmul.run = [](const gpu::MatmulCall<bf16>& call, Stream stream) {
        own.run(call, stream);
        bf16* const row = static_cast<bf16*>(call.out) + 129 * call.shape.m;
        set_bytes(row, 0, size_t(call.shape.m), stream);
    };
    gpu::wgmma_matmul.compared_bytes = 64 * 96 * 6;
    gpu::load_algorithms({});
    const Inputs<bf16> in({130, 64, 96});
    device_time_algorithms(true);
    forward(gpu_backend, tested<bf16>, in, {.residual = true});
    device_time_algorithms(false);
    const std::string choice = gpu::algorithms().rbegin()->second;  // keys of cuBLASLt's choices begin with the GPU
    CHECK_MESSAGE(choice.starts_with("cuBLASLt (wgmma refused, it differs by "), choice);
    matmul_cases::compare_forward<bf16>(gpu_backend, in, {.residual = true});
}

// ---- choices by timing

// Loads the choices and discards the plans. During its lifetime, shapes without a choice are timed.
struct Timing {
    explicit Timing(const AlgorithmChoices& choices) {
        gpu::load_algorithms(choices);
        device_time_algorithms(true);
    }
    ~Timing() {
        device_time_algorithms(false);
        gpu::load_algorithms({});
    }
};

// The key of the choice for a shape whose description contains the text.
static std::string key_of(const AlgorithmChoices& choices, const std::string& shape) {
    for (const auto& [key, choice] : choices)
        if (key.find(shape) != std::string::npos) return key;
    CHECK_MESSAGE(false, "no choice for " << shape);
    return "";
}

TEST_CASE("matmuls chosen by timing agree with the definition, and the choice is kept") {
    const Inputs<bf16> in({17, 64, 96});
    const Options gelu = {.gelu = true}, gelu_added = {.gelu = true, .accumulate = true};
    const auto compared_forward = [&] {
        compare_forward<bf16>(in.s, gelu);
        return forward(gpu_backend, tested<bf16>, in, gelu).out;
    };
    const Timing timing({});
    const Tensor<bf16> timed = compared_forward();
    compare_backward<bf16>({40, 64, 96}, gelu);
    compare_backward<bf16>({40, 64, 96}, gelu_added);
    const AlgorithmChoices choices = gpu::algorithms();
    for (const char* shape : {"forward bf16 m 96 n 17 k 64+bias+gelu, ", "input-gradient bf16 m 64 n 40 k 96*gelu', ",
                              "weight-gradient bf16 m 64 n 96 k 40, "})
        CHECK(choices.count(key_of(choices, shape)) == 1);

    gpu::load_algorithms(choices);  // a later run: nothing is timed, and the bits are the same
    const Tensor<bf16> again = compared_forward();
    compare_backward<bf16>({40, 64, 96}, gelu);
    expect_close("with the choices", again, timed, 96, 0.0f, 0.0f);
    CHECK(gpu::algorithms() == choices);

    // A choice that cannot be read, or that the library refuses, is timed again. Choices of other GPUs stay.
    const std::string key = key_of(choices, "+bias+gelu, ");
    std::vector<const char*> damages = {"", "7", "0 zz", "0 0 1"};
    // The emulator's library refuses algorithm 63, which does not exist; the real one need not.
    if (emulated) damages.push_back("0 63 1 0 0 0 0 0 0 1.0 1.0");
    for (const char* damage : damages) {
        CAPTURE(damage);
        AlgorithmChoices damaged = choices;
        damaged[key] = damage;
        damaged["another GPU; forward"] = "1 2 3";
        gpu::load_algorithms(damaged);
        compare_forward<bf16>(in.s, gelu);
        CHECK(parse_matmul_choice(gpu::algorithms().at(key)).has_value());
        CHECK(gpu::algorithms().at(key) != damage);
        CHECK(gpu::algorithms().at("another GPU; forward") == "1 2 3");
    }
}

// Only sums of whole tiles may be computed in parts (may_split in matmul.cpp).
TEST_CASE("gradients of weights are right after any number of rows, with the first and with the fastest algorithm") {
    for (const bool timed : {false, true}) {
        std::optional<Timing> timing;
        if (timed) timing.emplace(AlgorithmChoices{});
        for (const int N : {257, 1024, 1032, 4096, 4097, 4100, 5000}) compare_backward<bf16>({N, 64, 96}, {});
        gpu::load_algorithms({});  // discards the plans
    }
}

TEST_CASE("products of a batch of matrices agree with the definition, and do not depend on its size") {
    constexpr Shape s = {24, 96, 40};
    for (const bool timed : {false, true}) {
        std::optional<Timing> timing;
        if (timed) timing.emplace(AlgorithmChoices{});
        for (const int count : {1, 5, 20}) {
            matmul_cases::compare_batch<bf16>(gpu_backend, count, s);
            matmul_cases::compare_batch<float>(gpu_backend, count, s);
        }
        if (timed) CHECK(gpu::algorithms().size() == 4);  // one for each form and type, for all sizes of the batch
        gpu::load_algorithms({});
    }
}

TEST_CASE("matmuls chosen by timing have right gradients, in two calls as in one") {
    const Inputs<bf16> in({40, 64, 96});
    const Timing timing({});
    for (const bool accumulate : {false, true}) {
        gradients_one_by_one<bf16>(gpu_backend, tested<bf16>, in, {.gelu = true, .accumulate = accumulate});
        compare_backward<bf16>(in.s, {.accumulate = accumulate});
    }
}

#ifdef SIMT_EMULATOR
TEST_CASE("an algorithm that needs more alignment than an operand has is not used for it") {
    constexpr int N = 16, IC = 64, OC = 96, shift = 8;  // 16 bytes
    const Timing timing({});
    auto inp = random_tensor<bf16>(N * IC + shift, 1), weight = random_tensor<bf16>(OC * IC, 2);
    auto out = poisoned<bf16>(N * OC);
    OnGpu<bf16> x(inp), w(weight), y(out);
    for (const int from : {0, shift}) {
        const bf16* inp = static_cast<bf16*>(x) + from;
        gpu::matmul_forward<bf16>({.out = y.device, .inp = inp, .weight = {w, nullptr}}, N, IC, OC, nullptr);
        wait_for_device();
    }
    AlgorithmChoices choices = gpu::algorithms();
    CHECK(choices[key_of(choices, "m 96 n 16 k 64, aligned to 128")].starts_with("0 2 "));
    CHECK(choices[key_of(choices, "m 96 n 16 k 64, aligned to 16")].starts_with("0 1 "));
}

TEST_CASE("an algorithm that cannot be launched is replaced by the next one, in the same call") {
    gpu::load_algorithms({});
    for (const int failing : {0, 1}) {
        simt::config.failing_algorithm = failing;
        compare_forward<bf16>({17, 64, 96}, {.gelu = true});
        for (const bool accumulate : {false, true})  // a gradient must not be added twice
            compare_backward<bf16>({256, 64, 96}, {.gelu = true, .accumulate = accumulate});
        gpu::load_algorithms({});  // discards the plans
    }
    simt::config.failing_algorithm = -1;
}
#endif
