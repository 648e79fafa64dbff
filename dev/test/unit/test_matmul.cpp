// test_matmul.cpp: the products in every form that this machine offers against their definition, cpu::plain, at small
// shapes like GPT-2's and at awkward ones; the forms' bits on different numbers of threads; NaN and infinity.
#include <omp.h>

#include <cstring>
#include <functional>

#include "cpu/variants.h"
#include "cpu/isa.h"
#include "support/test.h"

namespace {

struct Shape {
    int N, IC, OC;
};

template <class floatX>
struct Inputs {
    Shape s;
    Tensor<floatX> inp, weight, bias, dout, pre_gelu;
    explicit Inputs(Shape s)
        : s(s),
          inp(random_tensor<floatX>(int64_t(s.N) * s.IC, 1)),
          weight(random_tensor<floatX>(int64_t(s.OC) * s.IC, 2)),
          bias(random_tensor<floatX>(s.OC, 3)),
          dout(random_tensor<floatX>(int64_t(s.N) * s.OC, 4)),
          pre_gelu(random_tensor<floatX>(int64_t(s.N) * s.IC, 5)) {}
};

struct Options {
    bool bias = true, gelu = false, accumulate = false, packed = true;
};

template <class floatX>
struct Results {
    Tensor<floatX> out, pre_gelu, dinp;
    Tensor<float> dweight, dbias;
};

template <class floatX>
struct Form {
    decltype(&cpu::packed_bytes<floatX>) packed_bytes;
    decltype(&cpu::pack_weight<floatX>) pack_weight;
    decltype(&cpu::matmul_forward<floatX>) forward;
    decltype(&cpu::matmul_backward<floatX>) backward;
};

template <class floatX>
const Form<floatX> plain_form{cpu::plain::packed_bytes<floatX>, cpu::plain::pack_weight<floatX>,
                              cpu::plain::matmul_forward<floatX>, cpu::plain::matmul_backward<floatX>};
template <class floatX>
const Form<floatX> chosen_form{cpu::packed_bytes<floatX>, cpu::pack_weight<floatX>, cpu::matmul_forward<floatX>,
                               cpu::matmul_backward<floatX>};

// Outputs are NaN until written; with accumulate the gradients start at 0.5.
template <class floatX>
Results<floatX> run(const Form<floatX>& form, const Inputs<floatX>& in, Options options) {
    const auto [N, IC, OC] = in.s;
    const auto gradient = [&](int64_t size) {
        return options.accumulate ? filled<float>(size, 0.5f) : poisoned<float>(size);
    };
    Results<floatX> r{poisoned<floatX>(int64_t(N) * OC), poisoned<floatX>(int64_t(N) * OC),
                      poisoned<floatX>(int64_t(N) * IC), gradient(int64_t(OC) * IC), gradient(OC)};
    DeviceBuffer<char> packed(options.packed ? form.packed_bytes(OC, IC) : 0, "a packed weight");
    if (packed.data) form.pack_weight(packed.data, in.weight.data(), OC, IC, nullptr);
    const Weight<floatX> weight{in.weight.data(), packed.data};
    form.forward(r.out.data(), options.gelu ? r.pre_gelu.data() : nullptr, in.inp.data(), weight,
                 options.bias ? in.bias.data() : nullptr, N, IC, OC, nullptr);
    form.backward(r.dinp.data(), r.dweight.data(), options.bias ? r.dbias.data() : nullptr, in.dout.data(),
                  in.inp.data(), weight, options.gelu ? in.pre_gelu.data() : nullptr, N, IC, OC, options.accumulate,
                  nullptr);
    return r;
}

// A sum of K products of standard normal numbers is about sqrt(K); two orders of summation in float differ by about
// sqrt(K) roundings of numbers of that size, K epsilon in all, and by 8 of that in the worst of many elements. Both
// sides then round once, which may fall on different sides of a tie: one step of floatX. The GELU (fast exp: 1e-6
// relative, slopes up to 1.13) passes errors on about as they are.
template <class floatX>
void compare(const std::string& name, const Results<floatX>& got, const Results<floatX>& want, Shape s,
             Options options) {
    const auto sum_error = [](int K) { return (8.0f * float(K) + 16.0f) * epsilon<float>(); };
    const float step = std::max(epsilon<floatX>(), 16 * epsilon<float>());
    expect_close(name + " out", got.out, want.out, s.OC, step, sum_error(s.IC));
    if (options.gelu) expect_close(name + " pre_gelu", got.pre_gelu, want.pre_gelu, s.OC, step, sum_error(s.IC));
    expect_close(name + " dinp", got.dinp, want.dinp, s.IC, step, sum_error(s.OC));
    expect_close(name + " dweight", got.dweight, want.dweight, s.IC, 4 * epsilon<float>(), sum_error(s.N));
    if (options.bias) expect_close(name + " dbias", got.dbias, want.dbias, 1, 4 * epsilon<float>(), sum_error(s.N));
}

std::vector<Isa> available() {
    std::vector<Isa> levels;
    for (int i = 0; i <= int(best_isa()); i++) levels.push_back(Isa(i));
    return levels;
}

// Runs at every level of instructions that the machine has, and restores the one that was set.
void at_each_isa(const std::function<void(const std::string&)>& check) {
    const Isa before = isa();
    for (const Isa level : available()) {
        set_isa(level);
        check(isa_name(level));
    }
    set_isa(before);
}

template <class floatX>
void check_shape(Shape s, std::vector<Options> all_options) {
    const Inputs<floatX> in(s);
    for (const Options& options : all_options) {
        const auto want = run(plain_form<floatX>, in, options);
        at_each_isa([&](const std::string& level) {
            const std::string name =
                format("%s %s N=%d IC=%d OC=%d bias=%d gelu=%d accumulate=%d packed=%d", dtype_name(dtype_of<floatX>),
                       level.c_str(), s.N, s.IC, s.OC, options.bias, options.gelu, options.accumulate, options.packed);
            compare(name, run(chosen_form<floatX>, in, options), want, s, options);
        });
    }
}

const std::vector<Options> every_option = {{.bias = false},
                                           {.bias = true},
                                           {.gelu = true},
                                           {.bias = false, .gelu = true, .accumulate = true},
                                           {.accumulate = true, .packed = false},
                                           {.gelu = true, .packed = false}};

}  // namespace

// First of all tests, because working memory only grows: it must not, beyond what scratch_bytes said.
TEST_CASE("scratch_bytes covers the products of the model") {
    const int B = 2, T = 40, C = 64, NH = 2, Vp = 256;
    const Isa before = isa();
    for (int level = int(best_isa()); level >= 0; level--) {  // AMX takes less than the forms that widen
        set_isa(Isa(level));
        device_scratch(cpu::scratch_bytes<bf16>(B, T, C, NH, Vp));
        const int64_t allocated = device_bytes_allocated();
        for (const Shape s : {Shape{B * T, C, 3 * C}, {B * T, 4 * C, C}, {B * T, C, Vp}}) {
            run(chosen_form<bf16>, Inputs<bf16>(s), {.packed = false});
            CHECK(device_bytes_allocated() == allocated);
        }
    }
    set_isa(before);
}

// A model reserves for its whole micro-batch, and then runs fewer rows too: pieces of the logits, a prompt, one token.
TEST_CASE_TEMPLATE("scratch_bytes of fewer rows is never more", floatX, float, bf16) {
    const Isa before = isa();
    for (int level = 0; level <= int(best_isa()); level++) {
        set_isa(Isa(level));
        for (const int T : {33, 1000, 2100, 3000, 4097})
            for (const int fewer : {1, 2, 31, 32, 500, 2048, 3001})
                if (fewer < T) {
                    INFO(isa_name(isa()), ", ", fewer, " of ", T, " rows");
                    CHECK(cpu::scratch_bytes<floatX>(1, fewer, 32, 1, 50304) <=
                          cpu::scratch_bytes<floatX>(1, T, 32, 1, 50304));
                }
    }
    set_isa(before);
}

TEST_CASE_TEMPLATE("a block of GPT-2: 96 and 384 channels", floatX, float, bf16) {
    for (const Shape s : {Shape{64, 96, 288}, {64, 96, 96}, {64, 96, 384}, {64, 384, 96}, {300, 128, 160}})
        check_shape<floatX>(s, {{.gelu = true}, {.accumulate = true}});
}

TEST_CASE_TEMPLATE("several tasks in each direction, several panels of the inner one", floatX, float, bf16) {
    check_shape<floatX>({520, 780, 1300}, {{.gelu = true, .accumulate = true}});
}

TEST_CASE_TEMPLATE("awkward sizes", floatX, float, bf16) {
    const int sizes[] = {1, 7, 17, 33, 65};
    for (const int N : sizes)
        for (const int IC : sizes)
            for (const int OC : sizes)
                check_shape<floatX>({N, IC, OC}, {{.gelu = true, .accumulate = (N + OC) % 3 == 0}});
}

TEST_CASE_TEMPLATE("every option, at one round and one ragged shape", floatX, float, bf16) {
    check_shape<floatX>({64, 64, 64}, every_option);
    check_shape<floatX>({37, 51, 70}, every_option);
    check_shape<floatX>({1, 100, 130}, every_option);
}

// Larger than what the forms do in one go: up to 8192 rows, of those 4096 output channels, and 384 steps.
TEST_CASE("more rows and more output channels than are packed at a time") {
    check_shape<float>({20, 5, 3100}, {{.gelu = true}});
    check_shape<float>({17, 770, 33}, {{.gelu = true, .accumulate = true}});
    check_shape<bf16>({8200, 33, 9}, {{.gelu = true, .accumulate = true}});
    check_shape<bf16>({8200, 3, 8230}, {{.gelu = true}});
}

template <class T>
static bool same_bits(const Tensor<T>& a, const Tensor<T>& b) {
    return memcmp(a.data(), b.data(), a.buffer.bytes()) == 0;
}

TEST_CASE_TEMPLATE("the same bits on 1, 2 and 3 threads", floatX, float, bf16) {
    const int before = omp_get_max_threads();
    for (const Shape s : {Shape{520, 300, 700}, {33, 1000, 65}, {1, 70, 600}}) {
        const Inputs<floatX> in(s);
        at_each_isa([&](const std::string& level) {
            CAPTURE(level);
            omp_set_num_threads(1);
            const auto want = run(chosen_form<floatX>, in, {.gelu = true});
            for (const int threads : {2, 3}) {
                omp_set_num_threads(threads);
                const auto got = run(chosen_form<floatX>, in, {.gelu = true});
                CHECK(same_bits(got.out, want.out));
                CHECK(same_bits(got.pre_gelu, want.pre_gelu));
                CHECK(same_bits(got.dinp, want.dinp));
                CHECK(same_bits(got.dweight, want.dweight));
                CHECK(same_bits(got.dbias, want.dbias));
            }
        });
    }
    omp_set_num_threads(before);
}

TEST_CASE_TEMPLATE("NaN and infinity reach exactly what depends on them", floatX, float, bf16) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
        for (const int N : {40, 1}) {
            const int IC = 50, OC = 70, n = N - 1, i = 33, o = 65;
            Inputs<floatX> in({N, IC, OC});
            in.inp[n * IC + i] = floatX(bad);
            in.dout[n * OC + o] = floatX(bad);
            at_each_isa([&](const std::string& level) {
                CAPTURE(level);
                const auto r = run(chosen_form<floatX>, in, {});
                for (int at = 0; at < N * OC; at++) CHECK(std::isfinite(float(r.out[at])) == (at / OC != n));
                for (int at = 0; at < N * IC; at++) CHECK(std::isfinite(float(r.dinp[at])) == (at / IC != n));
                for (int at = 0; at < OC * IC; at++)
                    CHECK(std::isfinite(r.dweight[at]) == (at / IC != o && at % IC != i));
                for (int at = 0; at < OC; at++) CHECK(std::isfinite(r.dbias[at]) == (at != o));
            });
        }
}

// Numbers whose sums are exact in any order: small integers.
TEST_CASE_TEMPLATE("small integers: every form is exact", floatX, float, bf16) {
    const Shape s{70, 300, 90};
    Inputs<floatX> in(s);
    const Philox random{7, 0};
    for (Tensor<floatX>* x : {&in.inp, &in.weight, &in.bias, &in.dout})
        for (int64_t i = 0; i < x->size(); i++) (*x)[i] = floatX(float(int(random(uint64_t(i))[0] % 5) - 2));
    const auto want = run(plain_form<floatX>, in, {});
    at_each_isa([&](const std::string& level) {
        CAPTURE(level);
        const auto got = run(chosen_form<floatX>, in, {});
        CHECK(same_bits(got.out, want.out));
        CHECK(same_bits(got.dinp, want.dinp));
        CHECK(same_bits(got.dweight, want.dweight));
        CHECK(same_bits(got.dbias, want.dbias));
    });
}

TEST_CASE("sizes below 1 are refused") {
    const Inputs<float> in({1, 1, 1});
    auto out = poisoned<float>(1);
    CHECK_THROWS_WITH_AS(cpu::matmul_forward<float>(out.data(), nullptr, in.inp.data(), {in.weight.data(), nullptr},
                                                    nullptr, 0, 1, 1, nullptr),
                         doctest::Contains("every size must be at least 1"), Error);
}
