// test_isa.cpp: tests which instruction set is used, and how it is forced. The program reads CPU_ISA once, so the cases
// that set it run this program again with --test-case.
#include "cpu/isa.h"

#include <doctest/doctest.h>

#include <unistd.h>

#include <cstdlib>

#include "base/common.h"

#if defined(__aarch64__)
static const Isa all[] = {Isa::plain, Isa::neon};
#else
static const Isa all[] = {Isa::plain, Isa::avx2, Isa::avx512, Isa::avx512bf16, Isa::amx};
#endif

TEST_CASE("names") {
    CHECK(std::string(isa_name(Isa::plain)) == "plain");
#if defined(__aarch64__)
    CHECK(std::string(isa_name(Isa::neon)) == "neon");
#else
    CHECK(std::string(isa_name(Isa::avx2)) == "avx2");
    CHECK(std::string(isa_name(Isa::avx512)) == "avx512");
    CHECK(std::string(isa_name(Isa::avx512bf16)) == "avx512bf16");
    CHECK(std::string(isa_name(Isa::amx)) == "amx");
#endif
}

TEST_CASE("the detected instruction sets agree with the compiler's detection") {
#if defined(__x86_64__)
    CHECK((best_isa() >= Isa::avx2) == (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")));
    if (best_isa() >= Isa::avx512) CHECK(__builtin_cpu_supports("avx512bw"));
    if (best_isa() >= Isa::avx512bf16) CHECK(__builtin_cpu_supports("avx512bf16"));
#elif defined(__aarch64__)
    CHECK(best_isa() == Isa::neon);
#else
    CHECK(best_isa() == Isa::plain);
#endif
}

TEST_CASE("each level up to the best can be forced, and none beyond") {
    const Isa before = isa();
    for (Isa level : all) {
        if (level <= best_isa()) {
            set_isa(level);
            CHECK(isa() == level);
        } else {
            CHECK_THROWS_WITH_AS(set_isa(level), doctest::Contains("this machine offers"), Error);
        }
    }
    set_isa(before);
    CHECK(isa() == before);
}

// Runs in the process that child_finds starts.
TEST_CASE("child: the level is as EXPECT says" * doctest::skip()) {
    const std::string expect = getenv("EXPECT");
    if (expect == "refused")
        CHECK_THROWS_AS(isa(), Error);
    else
        CHECK(isa_name(isa()) == expect);
}

static bool child_finds(const std::string& cpu_isa, const std::string& expect) {
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
    const char* run_by = getenv("RUN_BY");  // the emulator for programs of another architecture: "qemu-aarch64 -L ..."
    const std::string command = "CPU_ISA=" + cpu_isa + " EXPECT=" + expect + " " + (run_by ? run_by : "") + " '" +
                                self + "' --no-skip --test-case='child: *' > /dev/null 2>&1";
    return system(command.c_str()) == 0;
}

TEST_CASE("CPU_ISA forces a level, and is refused if it is unknown or this machine lacks it") {
    CHECK(child_finds("", isa_name(best_isa())));
    for (Isa level : all) CHECK(child_finds(isa_name(level), level <= best_isa() ? isa_name(level) : "refused"));
    CHECK(child_finds("avx1024", "refused"));
#if defined(__aarch64__)
    CHECK(child_finds("avx2", "refused"));  // although avx2 and neon have the same number
#endif
    CHECK_FALSE(child_finds("plain", "avx2"));  // proves that the child compares
}
