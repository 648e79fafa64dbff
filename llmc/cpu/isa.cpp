// isa.cpp: detects the instruction sets of the CPU that the kernel supports, and reads CPU_ISA.
#include "cpu/isa.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "base/common.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The registers of the instruction cpuid.
enum Register { A, B, C, D };

static bool bit(unsigned leaf, unsigned subleaf, Register in, int number) {
    unsigned x[4] = {};
    if (subleaf > 0 && (!__get_cpuid_count(leaf, 0, &x[A], &x[B], &x[C], &x[D]) || x[A] < subleaf)) return false;
    return __get_cpuid_count(leaf, subleaf, &x[A], &x[B], &x[C], &x[D]) && (x[in] >> number & 1);
}

// Whether the kernel saves these register states.
static bool saved(unsigned mask) {
    if (!bit(1, 0, C, 27)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & mask) == mask;
}

// Linux gives AMX tile registers to a process on request only, then also to the threads that it has. Sets errno.
static bool request_amx() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}
#endif

struct InstructionSet {
    const char* name;
    bool (*offered)();
};

#define ROW(name, test) {#name, [] { return test; }},
static constexpr InstructionSet sets[] = {INSTRUCTION_SETS(ROW)};
#undef ROW

const char* isa_name(Isa isa) { return int(isa) < int(std::size(sets)) ? sets[int(isa)].name : "another"; }

static Isa detect() {
    size_t best = 0;
    while (best + 1 < std::size(sets) && sets[best + 1].offered()) best++;
#if defined(EMULATED_UNITS)  // dev/test/support/emulated_units.h replaces the matrix units
    if (Isa(best) >= Isa::avx512) return Isa::amx;
#endif
    return Isa(best);
}

bool has_fast_vdpbf16ps() {
#if defined(__x86_64__)
    unsigned x[4] = {};
    const bool amd = __get_cpuid(0, &x[A], &x[B], &x[C], &x[D]) && x[B] == signature_AMD_ebx;
    return amd || !(bit(7, 0, D, 22) || bit(7, 0, D, 23));  // AMX-BF16, AVX512-FP16
#else
    return false;
#endif
}

std::string amx_refusal() {
#if defined(__x86_64__)
    if (bit(7, 0, D, 22) && bit(7, 0, D, 24) && !request_amx())
        return format("; the kernel refuses AMX, which Linux has since 5.16: %s", strerror(errno));
#endif
    return "";
}

// Returns the instruction set that CPU_ISA names. Without CPU_ISA, returns the fastest set that the machine offers.
static Isa limited(Isa offered) {
    const char* value = getenv("CPU_ISA");
    if (!value || !*value) return offered == Isa::avx512bf16 && !has_fast_vdpbf16ps() ? Isa::avx512 : offered;
    const std::string wanted = value;
    std::string known;
    for (int i = 0; i < int(std::size(sets)); i++) {
        if (wanted == sets[i].name) {
            ENSURE(Isa(i) <= offered, "CPU_ISA=%s, but this machine offers %s at most%s", value, isa_name(offered),
                   amx_refusal().c_str());
            return Isa(i);
        }
        known += format(i == 0 ? "%s" : i + 1 < int(std::size(sets)) ? ", %s" : " or %s", sets[i].name);
    }
    ENSURE(wanted != "plain" && wanted != "neon", "CPU_ISA=%s has another name now: use CPU_ISA=base", value);
    fail(EXIT_USAGE, "CPU_ISA=%s is not known: %s", value, known.c_str());
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
