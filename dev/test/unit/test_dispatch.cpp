// test_dispatch.cpp: the instruction sets that can be chosen (test_cpu_isa.py tests CPU_ISA), and that the scratch
// memory of each vector variant is enough for its operations.
#include "support/cpu_backend.h"

TEST_CASE("the detected instruction sets agree with the compiler's, and none beyond can be chosen") {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    CHECK(((best_isa() >= Isa::avx2) == avx2 || getenv("CPU_ISA")));  // CPU_ISA may be less
    if (best_isa() >= Isa::avx512) CHECK(__builtin_cpu_supports("avx512bw"));
    if (best_isa() >= Isa::avx512bf16) CHECK(__builtin_cpu_supports("avx512bf16"));
    for (int level = 0; level <= int(Isa::amx); level++) {
        const RunsOn setting(std::min(Isa(level), best_isa()), 1);
        CHECK(isa() == std::min(Isa(level), best_isa()));
        if (Isa(level) > best_isa())
            CHECK_THROWS_WITH_AS(set_isa(Isa(level)), doctest::Contains("this machine offers"), Error);
    }
#elif defined(__aarch64__)
    CHECK(best_isa() == Isa::base);
#endif
}

// An operation that asks for more scratch memory than is reserved throws.
TEST_CASE_TEMPLATE("the operations stay within the scratch that was planned", floatX, float, bf16) {
    const int B = 2, T = 70, NH = 2, HS = 33, C = NH * HS, N = B * T, Vp = 128, threads = 3;
    auto x = random_tensor<floatX>(int64_t(N) * 3 * C, 1), out = poisoned<floatX>(N * C);
    auto dx = poisoned<floatX>(int64_t(N) * 3 * C);
    auto statistics = random_tensor<float>(N * NH, 3), gradients = filled<float>(C, 0.0f);
    for (const Isa level : available_isas(Isa::avx512)) {
        const RunsOn setting(level, threads);
        // Memory that another level or type has reserved cannot hide an error: the number of bytes is the same for all.
        const int64_t bytes = cpu::base::variant.of_float.scratch_bytes(B, T, C, NH, Vp);
        device_reserve_scratch(bytes);
        CHECK_NOTHROW(cpu::attention_forward(out.data(), statistics.data(), x.data(), B, T, NH, HS, nullptr));
        CHECK_NOTHROW(cpu::attention_backward(dx.data(), out.data(), out.data(), statistics.data(), x.data(), B, T, NH,
                                              HS, nullptr));
        CHECK_NOTHROW(cpu::layernorm_backward({out.data()}, gradients.data(), gradients.data(), gradients.data(),
                                              x.data(), x.data(), x.data(), statistics.data(), statistics.data(),
                                              x.data(), N, C, nullptr));
    }
    CHECK_THROWS_AS(device_scratch(int64_t(1) << 40), Error);
}
