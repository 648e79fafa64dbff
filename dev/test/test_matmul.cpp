// test_matmul.cpp: the products in every form that this machine offers against their definition, cpu::plain, at small
// shapes like GPT-2's and at awkward ones; the forms' bits on different numbers of threads; NaN and infinity.
#include <omp.h>

#include <functional>

#include "../../llmc/cpu/forms.h"
#include "../../llmc/cpu/isa.h"
#include "test.h"

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
            const std::string name = format("%s %s N=%d IC=%d OC=%d bias=%d gelu=%d accumulate=%d packed=%d",
                                            dtype_name<floatX>(), level.c_str(), s.N, s.IC, s.OC, options.bias,
                                            options.gelu, options.accumulate, options.packed);
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
            for (const int OC : sizes) check_shape<floatX>({N, IC, OC}, {{.gelu = true, .accumulate = (N + OC) % 3 == 0}});
}

TEST_CASE_TEMPLATE("every option, at one round and one ragged shape", floatX, float, bf16) {
    check_shape<floatX>({64, 64, 64}, every_option);
    check_shape<floatX>({37, 51, 70}, every_option);
    check_shape<floatX>({1, 100, 130}, every_option);
}
