// test_norm.cpp: the shared cases of gradient norm, gradient clipping, and sums and conversions of gradients
// (cases_norm.h) on the CPU.
#include "support/cases_norm.h"
#include "support/cpu_backend.h"

using namespace norm_cases;

static const CpuBackend cpu_backend;

// A lane adds up to count / 1024 / 16 + 64 positive squares in float. The error in roundings is about the square root
// of that number.
TEST_CASE("the sum of squares of any count agrees with the definition, and has the same bits in two runs") {
    for (const int64_t count : {0, 1, 3, 7, 17, 64, 65, 4095, 4096, 4097, 100003, 1 << 20, (1 << 21) + 4097})
        compare_squares(cpu_backend, count, 8.0f + std::sqrt(float(count) / (1024 * 16) + 64));
}

TEST_CASE("the sum of squares is infinite if it overflows, and NaN if an element is NaN") {
    known_squares(cpu_backend);
}

TEST_CASE("accumulate_gradients adds each gradient to its own sum") {
    accumulated_gradients(cpu_backend, {0, 64, 4096, (1 << 20) + 64});
}

TEST_CASE("round_gradients rounds to nearest, widen_gradients is exact, and neither writes past the end") {
    converted_gradients(cpu_backend, {0, 64, (1 << 20) + 64});
}

TEST_CASE("clip_factor limits the norm, and a NaN factor stays NaN") { clip_factors(cpu_backend); }
