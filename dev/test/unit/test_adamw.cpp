// test_adamw.cpp: the shared cases of AdamW (cases_adamw.h) on every CPU variant.
#include "support/cases_adamw.h"
#include "support/cpu_backend.h"

using namespace adamw_cases;

static const CpuBackend cpu_backend;

constexpr int STEPS = 10;

TEST_CASE_TEMPLATE("AdamW of any range, with any decayed part, agrees with the definition", floatX, float, bf16) {
    awkward_counts<floatX>(cpu_backend, STEPS);
    const int64_t pieces = 1 << 17;  // threads share the work in pieces of 2^16 elements; decay ends within a piece
    compare<floatX>(cpu_backend, 2, pieces + 192, first_ones(pieces + 192, (1 << 16) + 64));
    several_buckets<floatX>(cpu_backend, STEPS);
    compare<floatX>(cpu_backend, STEPS, 1408, {192, 128, 320, 64});  // the range ends within a bucket
    compare<floatX>(cpu_backend, 2, 1 << 17, {64, 0, (1 << 15) + 64, 1 << 15});
}

TEST_CASE("without master weights the rounding depends on seed, step and element alone, however the range is cut") {
    stochastic_rounding(cpu_backend, (1 << 16) + 576, {64, 8256});  // more than one piece of work
}

TEST_CASE("without master weights zeros stay zero, and a NaN stays NaN") { zeros_and_nan_without_masters(cpu_backend); }

TEST_CASE_TEMPLATE("AdamW with a factor that is not finite changes nothing", floatX, float, bf16) {
    for (float value : {NAN, INFINITY}) factor_not_finite<floatX>(cpu_backend, value);
}

TEST_CASE("AdamW of no elements does nothing, and impossible steps are refused") { no_elements_and_impossible_steps(); }
