// test_gelu.cpp: the shared cases of GELU (cases_gelu.h) on every CPU variant.
#include "support/cases_gelu.h"
#include "support/cpu_backend.h"

using namespace gelu_cases;

static const CpuBackend cpu_backend;

TEST_CASE_TEMPLATE("GELU of an MLP's activations agrees with the definition", floatX, float, bf16) {
    compare<floatX>(cpu_backend, 16 * 3072);
}

TEST_CASE_TEMPLATE("GELU of awkward counts agrees with the definition", floatX, float, bf16) {
    for (int count : {1, 3, 4, 7, 8, 15, 16, 17, 65, 2048, 2049, (1 << 14) + 1}) compare<floatX>(cpu_backend, count);
}

TEST_CASE("GELU is its formula in double, and finite for any finite input") {
    const auto cancelled = [] { return isa() == Isa::plain ? 64 * double(epsilon<float>()) : 1e-36; };
    formula_in_double(CpuBackend{{}, Isa::avx512}, cancelled);
    huge_inputs(cpu_backend);
}

TEST_CASE_TEMPLATE("GELU has known values at chosen points", floatX, float, bf16) { known_points<floatX>(cpu_backend); }

TEST_CASE_TEMPLATE("dinp of GELU may be dout, and NaN stays NaN", floatX, float, bf16) {
    in_place_with_nan<floatX>(cpu_backend);
}
