// test_matmul.cpp: the shared cases of the matmul (cases_matmul.h) on every CPU variant, at small shapes like GPT-2's
// and at awkward ones, and the scratch memory that matmuls need.
#include "support/cases_matmul.h"
#include "support/cpu_backend.h"

using namespace matmul_cases;

namespace {

struct MatmulOnCpu : CpuBackend {
    // A sum of K products of standard normal numbers is about sqrt(K). Two orders of summation in float differ by about
    // sqrt(K) roundings of numbers of that size, which is K epsilon, and by 8 times that in the worst of many elements.
    // Backend and definition then round once, possibly in different directions, which is one step of floatX. GELU
    // hardly enlarges an error: its derivative is at most 1.13, and the fast exp has a relative error of 1e-6.
    template <class floatX>
    Bound bound(Value value, int K, Options) const {
        const float sum_error = (8.0f * float(K) + 16.0f) * epsilon<float>();
        const bool of_parameters = value == Value::dweight || value == Value::dbias;
        return {of_parameters ? 4 * epsilon<float>() : std::max(epsilon<floatX>(), 16 * epsilon<float>()), sum_error};
    }
};

// Compares on all threads only. One test case compares the bits on 1, 2 and 3 threads.
struct OnAllThreads : MatmulOnCpu {
    template <class Run>
    void compare(const Outputs& definition, const Run& run) const {
        for (const Isa level : levels) {
            const RunsOn setting(level, omp_get_max_threads());
            expect_close(std::string(isa_name(level)) + " ", run(), definition);
        }
    }
};

const OnAllThreads cpu_backend;

template <class floatX>
void check_shape(Shape s, const std::vector<Options>& all_options) {
    const Inputs<floatX> in(s);
    for (const Options& options : all_options) {
        compare_forward<floatX>(cpu_backend, in, options);
        compare_backward<floatX>(cpu_backend, in, options);
    }
}

const std::vector<Options> every_option = {{.bias = false},
                                           {.bias = true},
                                           {.gelu = true},
                                           {.bias = false, .gelu = true, .accumulate = true},
                                           {.accumulate = true},
                                           {.residual = true},
                                           {.bias = false, .residual = true}};

}  // namespace

// This test must run first, because scratch memory never shrinks. It must not grow beyond scratch_bytes.
TEST_CASE("scratch_bytes is enough for every matmul of the model, and never larger for fewer rows") {
    const int B = 2, T = 40, C = 64, NH = 2, Vp = 256;
    for (int level = int(best_isa()); level >= 0; level--) {  // AMX needs the least: other variants widen operands
        const RunsOn setting(Isa(level), omp_get_max_threads());
        device_scratch(cpu::scratch_bytes<bf16>(B, T, C, NH, Vp));
        for (const Shape s : {Shape{B * T, C, 3 * C}, {B * T, 4 * C, C}}) {
            const Inputs<bf16> in(s);
            const int64_t allocated = device_bytes_allocated();
            forward(OnHost{}, tested<bf16>, in, {});
            backward(OnHost{}, tested<bf16>, in, {});
            CHECK(device_bytes_allocated() == allocated);
        }
        std::vector<int64_t> of_bf16, of_float;
        for (const int rows : {1, 2, 31, 32, 33, 500, 1000, 2048, 2100, 3000, 3001, 4097}) {
            of_bf16.push_back(cpu::scratch_bytes<bf16>(1, rows, 32, 1, 50304));
            of_float.push_back(cpu::scratch_bytes<float>(1, rows, 32, 1, 50304));
        }
        INFO(isa_name(isa()));
        CHECK(std::is_sorted(of_bf16.begin(), of_bf16.end()));
        CHECK(std::is_sorted(of_float.begin(), of_float.end()));
    }
}

TEST_CASE_TEMPLATE("the matmuls of a GPT-2 block of 96 and 384 channels agree with the definition", floatX, float,
                   bf16) {
    for (const Shape s : {Shape{64, 96, 288}, {64, 96, 96}, {64, 96, 384}, {64, 384, 96}, {300, 128, 160}})
        check_shape<floatX>(s, {{.gelu = true}, {.accumulate = true, .residual = true}});
}

TEST_CASE_TEMPLATE("matmuls of awkward sizes agree with the definition", floatX, float, bf16) {
    const int sizes[] = {1, 7, 17, 33, 65};
    for (const int N : sizes)
        for (const int IC : sizes)
            for (const int OC : sizes)
                check_shape<floatX>({N, IC, OC}, {{.gelu = true, .accumulate = (N + OC) % 3 == 0}});
}

TEST_CASE_TEMPLATE("matmuls with every option agree with the definition", floatX, float, bf16) {
    check_shape<floatX>({64, 64, 64}, every_option);
    check_shape<floatX>({37, 51, 70}, every_option);
    check_shape<floatX>({1, 100, 130}, every_option);
}

TEST_CASE_TEMPLATE("the gradients of a matmul have the same bits in two calls as in one", floatX, float, bf16) {
    for (const Shape s : {Shape{64, 64, 64}, {37, 51, 70}, {1, 100, 130}, {130, 65, 33}}) {
        const Inputs<floatX> in(s);
        for (const Options& options : every_option)
            for (const Ops<floatX>& ops : {definition<floatX>, tested<floatX>})
                gradients_one_by_one<floatX>(cpu_backend, ops, in, options);
    }
}

// The variants pack at most 8192 rows, 4096 output channels, and 384 elements of the inner dimension at a time.
TEST_CASE("matmuls of more rows and output channels than are packed at a time agree with the definition" * LARGE) {
    check_shape<float>({520, 780, 1300}, {{.gelu = true, .accumulate = true}, {.residual = true}});  // several panels
    check_shape<bf16>({520, 780, 1300}, {{.gelu = true, .accumulate = true}, {.residual = true}});
    check_shape<float>({20, 5, 3100}, {{.gelu = true}});
    check_shape<float>({17, 770, 33}, {{.gelu = true, .accumulate = true}});
    check_shape<bf16>({8200, 33, 9}, {{.gelu = true, .accumulate = true}});
    check_shape<bf16>({8200, 3, 8230}, {{.gelu = true}});
    gradients_one_by_one<bf16>(cpu_backend, tested<bf16>, Inputs<bf16>({8200, 33, 9}), {.gelu = true});
}

TEST_CASE_TEMPLATE("matmuls have the same bits on 1, 2 and 3 threads" * LARGE, floatX, float, bf16) {
    for (const Shape s : {Shape{520, 300, 700}, {33, 1000, 65}, {1, 70, 600}}) {
        compare_forward<floatX>(MatmulOnCpu{}, Inputs<floatX>(s), {.gelu = true});
        compare_backward<floatX>(MatmulOnCpu{}, Inputs<floatX>(s), {.gelu = true});
    }
}

TEST_CASE_TEMPLATE("NaN and infinity reach exactly the outputs that depend on them", floatX, float, bf16) {
    for (const int N : {40, 1}) not_finite<floatX>(cpu_backend, {N, 50, 70});
}

TEST_CASE("a backward pass without gradients is refused") { refuse_no_gradients(); }

TEST_CASE_TEMPLATE("products of a batch of matrices agree with the definition", floatX, float, bf16) {
    // Of the last shape, a matrix unit packs three products at a time.
    for (const auto& [count, s] :
         {std::pair(1, Shape{8, 8, 8}), {3, {24, 96, 24}}, {4, {33, 40, 56}}, {4, {33, 16000, 8}}})
        compare_batch<floatX>(cpu_backend, count, s);
}

TEST_CASE_TEMPLATE("a matrix times itself has the bits of two equal ones", floatX, float, bf16) {
    for (const auto& size : {std::pair(1, 5), {130, 300}, {192, 8}, {400, 70}, {40, 40000}}) {
        const int N = size.first, IC = size.second;
        CAPTURE(N);
        const auto x = random_tensor<floatX>(int64_t(2) * N * IC, 1), same = random_tensor<floatX>(x.size(), 1);
        auto got = poisoned<floatX>(int64_t(2) * N * N), want = poisoned<floatX>(got.size());
        cpu_backend.on_each_variant([&] {
            ops::matmul_batch<floatX>(want.data(), x.data(), same.data(), true, 2, N, IC, N, nullptr);
            ops::matmul_batch<floatX>(got.data(), x.data(), x.data(), true, 2, N, IC, N, nullptr);
            for (int64_t i = 0; i < got.size(); i++) REQUIRE(float(got[i]) == float(want[i]));
        });
    }
}

#if defined(__x86_64__)
// 2^-126 - 1.5 x 2^-151 is denormal, but rounds to the normal number 2^-126 in denormal numbers, which are coarser.
TEST_CASE("bf16 units make denormal sums zero before they round them, whatever MXCSR says") {
    const unsigned mxcsr = __builtin_ia32_stmxcsr();
    for (const Isa level : {Isa::avx512bf16, Isa::amx}) {
        if (level > best_isa()) continue;
        const RunsOn setting(level, 1);
        for (const float factor : {1.0f, 1.5f}) {
            const bf16 large = bf16(0x1p-63f), small = bf16(-factor * 0x1p-76f), none = bf16(0);
            const bf16 inp[] = {large, none, small, none, large, none, small, none};  // two rows: one has another route
            const bf16 weight[] = {large, none, bf16(0x1p-75f), none};
            bf16 out[2];
            __builtin_ia32_ldmxcsr(0x1f80);  // no flush to zero, no denormals are zeros
            ops::matmul_forward<bf16>({.out = out, .inp = inp, .weight = {weight, nullptr}}, 2, 4, 1, nullptr);
            __builtin_ia32_ldmxcsr(mxcsr);
            CHECK(float(out[1]) == (factor == 1 ? 0x1p-126f : 0));
        }
    }
}
#endif
