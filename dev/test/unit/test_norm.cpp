// test_norm.cpp: the shared cases of the gradient's norm, of clipping, and of sums and conversions of gradients
// (cases_norm.h) on the CPU.
#include "support/cases_norm.h"
#include "support/cpu_backend.h"

using namespace norm_cases;

static const CpuBackend cpu_backend;

// A lane adds up to count / 1024 / 16 + 64 squares, all positive, in float: about the root of that in roundings.
TEST_CASE("the sum of squares of any count is the definition's, and has the same bits twice") {
    for (const int64_t count : {0, 1, 3, 7, 17, 64, 65, 4095, 4096, 4097, 100003, 1 << 20, (1 << 21) + 4097})
        compare_squares(cpu_backend, count, 8.0f + std::sqrt(float(count) / (1024 * 16) + 64));
}

TEST_CASE("a sum of squares that overflows is infinite, and one with a NaN is NaN") { known_squares(cpu_backend); }

TEST_CASE("gradients are added to, each to its own") {
    accumulated_gradients(cpu_backend, {0, 64, 4096, (1 << 20) + 64});
}

TEST_CASE("gradients are rounded to nearest and widened, and nothing around them is") {
    converted_gradients(cpu_backend, {0, 64, (1 << 20) + 64});
}

TEST_CASE("gradients are clipped where their norm exceeds the largest; a factor of NaN stays NaN") {
    clip_factors(cpu_backend);
}
