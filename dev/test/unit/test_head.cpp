// test_head.cpp: the shared cases of the head (cases_head.h) on every CPU variant, and the same bits on any number of
// threads.
#include "support/cases_head.h"
#include "support/cpu_backend.h"

using namespace head_cases;

static const CpuBackend cpu_backend;

// e, and inp times its factor, are rounded once each, and dinp is; a shard's dinp may cancel with those of others.
template <class floatX>
static Bounds bounds_of(const Kind& kind, int shards) {
    const bool is_bf16 = sizeof(floatX) == 2, cancels = kind.common != 0.0f;
    const double loss = 8e-7;
    if (!is_bf16) return {loss, loss, cancels ? 1e-4 : 1e-5, 1e-5};
    return {loss, loss, cancels ? (shards > 1 ? 0.1 : 0.03) : 3e-3, 2.5e-3};
}

TEST_CASE_TEMPLATE("losses and gradients of five kinds of logits agree with double", floatX, float, bf16) {
    for (const Kind& kind : KINDS)
        for (const int shards : {1, 3}) {
            INFO(kind.name);
            compare(cpu_backend, inputs_of<floatX>({40, 96, 1000, shards}, kind), shards == 1,
                    bounds_of<floatX>(kind, shards));
        }
}

TEST_CASE_TEMPLATE("the head of awkward sizes agrees with double", floatX, float, bf16) {
    awkward_shapes<floatX>(cpu_backend, bounds_of<floatX>(KINDS[0], 1), 1);
    const Shape odd{5, 13, 7, 2};
    compare(cpu_backend, inputs_of<floatX>(odd, KINDS[0]), true, bounds_of<floatX>(KINDS[0], 1));
}

TEST_CASE_TEMPLATE("the number of threads does not change a bit", floatX, float, bf16) {
    const Inputs<floatX> in = inputs_of<floatX>({150, 96, 1500, 2}, KINDS[1]);
    const auto bits = [&] {
        const Results r = run(cpu_backend, in, true);
        constexpr float any = 1e30f;  // other tests compare the numbers
        return outputs_of(output("losses", r.losses, 1, 0, any), output("validated", r.validated, 1, 0, any),
                          output("dinp", r.dinp, 1, 0, any), output("dweight", r.dweight, 1, 0, any));
    };
    cpu_backend.compare(bits(), bits);
}

TEST_CASE_TEMPLATE("losses of 2 to 1,000 nats have gradients that point the right way", floatX, float, bf16) {
    large_losses<floatX>(cpu_backend);
}

TEST_CASE_TEMPLATE("NaN gives a NaN loss, and ignored targets count nowhere", floatX, float, bf16) {
    not_finite<floatX>(cpu_backend);
}

TEST_CASE("a loss is rounded once, where log1pf of glibc 2.36 is an ulp off") {
    const std::vector<float> sums = {0x1.92eee8p+6f, 0x1.966036p+6f, 0x1.9779b8p+6f};
    std::vector<float> losses(3);
    cpu::head_losses(losses.data(), sums.data(), std::vector<int>{0, 0, 0}.data(), 3, nullptr);
    CHECK(losses == std::vector<float>{4.62235498f, 4.63077879f, 4.6334548f});
}

TEST_CASE("losses are added up in double") { sum_of_losses(cpu_backend, 1e-7); }

TEST_CASE("a head of no rows, of impossible shards, or of no shards is refused") { refuse_impossible_heads(); }
