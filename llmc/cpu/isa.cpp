// isa.cpp: detects the instruction sets of the CPU that the kernel supports, and reads CPU_ISA.
#include "cpu/isa.h"

#include <cstdlib>
#include <iterator>

#include "base/common.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__aarch64__)
static constexpr const char* names[] = {"plain", "neon"};
static constexpr const char* known_names = "plain or neon";
#else
static constexpr const char* names[] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};
static constexpr const char* known_names = "plain, avx2, avx512, avx512bf16 or amx";
#endif

const char* isa_name(Isa isa) { return int(isa) < int(std::size(names)) ? names[int(isa)] : "another"; }

#if defined(__x86_64__)
// Linux gives AMX tile registers to a process on request only. The request must be made before other threads exist.
static bool request_amx() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static Isa detect() {
    unsigned a, b, c, d, b7, c7, d7, a71 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::plain;
    const bool fma = c >> 12 & 1, f16c = c >> 29 & 1, osxsave = c >> 27 & 1;
    if (!osxsave || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return Isa::plain;
    if (a >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // the register states that the kernel saves
    const auto saved = [&](unsigned mask) { return (low & mask) == mask; };
    const bool avx2 = fma && f16c && (b7 >> 5 & 1) && saved(0x6);
    const bool avx512 = avx2 && (b7 >> 16 & 1) && (b7 >> 17 & 1) && (b7 >> 30 & 1) && (b7 >> 31 & 1) && saved(0xe6);
#if defined(EMULATED_UNITS)  // dev/test/support/emulated_units.h replaces the matrix units
    if (avx512) return Isa::amx;
#endif
    const bool avx512bf16 = avx512 && (a71 >> 5 & 1);
    const bool amx = avx512bf16 && (d7 >> 22 & 1) && (d7 >> 24 & 1) && saved(0x60000) && request_amx();
    if (amx) return Isa::amx;
    return avx512bf16 ? Isa::avx512bf16 : avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::plain;
}

bool has_fast_vdpbf16ps() {
#if defined(EMULATED_UNITS)
    return false;  // as on the CPUs that have AMX
#else
    unsigned a, b, c, d;
    return best_isa() >= Isa::avx512bf16 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && !(d >> 22 & 1);
#endif
}
#else
static Isa detect() {
#if defined(__aarch64__)
    return Isa::neon;  // every arm64 CPU has it
#else
    return Isa::plain;
#endif
}
bool has_fast_vdpbf16ps() { return false; }
#endif

// Returns the value of CPU_ISA, or `offered` if it is not set.
static Isa limited(Isa offered) {
    const char* wanted = getenv("CPU_ISA");
    if (!wanted || !*wanted) return offered;
    for (int i = 0; i < int(std::size(names)); i++)
        if (std::string(wanted) == names[i]) {
            ENSURE(Isa(i) <= offered, "CPU_ISA=%s, but this machine offers %s at most", wanted, isa_name(offered));
            return Isa(i);
        }
    fail(EXIT_USAGE, "CPU_ISA=%s is not known: %s", wanted, known_names);
}

Isa best_isa() {
    static const Isa best = limited(detect());
    return best;
}

static Isa& current() {
    static Isa value = best_isa();
    return value;
}

Isa isa() { return current(); }

void set_isa(Isa isa) {
    ENSURE(isa <= best_isa(), "this machine offers %s at most, not %s", isa_name(best_isa()), isa_name(isa));
    current() = isa;
}
