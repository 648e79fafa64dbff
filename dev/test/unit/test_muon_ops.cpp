// test_muon_ops.cpp: the shared cases of Muon's operations (cases_muon.h) on the CPU.
#include "support/cases_muon.h"
#include "support/cpu_backend.h"

static const CpuBackend cpu_backend;

TEST_CASE("Muon's momentum is Nesterov's, also in place, and a factor that is not finite changes only its output") {
    for (const int64_t count : {0, 64, 1088, 70080}) muon_cases::momentum(cpu_backend, count, 0.5f);
    for (const float factor : {NAN, INFINITY}) muon_cases::momentum(cpu_backend, 320, factor);
}

TEST_CASE_TEMPLATE("the steps of Newton-Schulz between the matmuls agree with their formulas", floatX, float, bf16) {
    for (const auto& [rows, cols] : {std::pair(1, 1), {7, 7}, {33, 40}, {5, 131}, {64, 64}}) {
        muon_cases::stack<floatX>(cpu_backend, rows, cols);
        muon_cases::unstack<floatX>(cpu_backend, rows, cols);
    }
    for (const int n : {0, 1, 2, 7, 33, 64}) muon_cases::polynomial<floatX>(cpu_backend, n);
}

TEST_CASE_TEMPLATE("Muon's update of any range of weights agrees with its formula", floatX, float, bf16) {
    for (const int64_t count : {0, 1, 255, 70001}) muon_cases::update<floatX>(cpu_backend, count);
}

TEST_CASE("without master weights Muon's rounding depends on seed, step and element alone") {
    muon_cases::stochastic_rounding(cpu_backend, 70001, {70001, 77});
}
