// test_residual.cpp: the shared cases of add_residual (cases_residual.h) on every CPU variant.
#include "support/cases_residual.h"
#include "support/cpu_backend.h"

using namespace residual_cases;

static const CpuBackend cpu_backend;

TEST_CASE_TEMPLATE("a matmul's output, its bias and the residual stream are added and rounded once", floatX, float,
                   bf16) {
    compare<floatX>(cpu_backend, 70, 768);
    for (const int C : {1, 7, 15, 16, 17, 33}) compare<floatX>(cpu_backend, 65, C);
}

TEST_CASE("add_residual of no rows is refused") { refuse_no_rows(); }
