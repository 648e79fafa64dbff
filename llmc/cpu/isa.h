// isa.h: selects the instruction set of the CPU operations, from CPU feature bits. The CPU model number is not used:
// virtual machines report models that do not exist.
#pragma once

#include <string>

// The instruction sets, one line each: the name, which is that of its source and namespace, and what a CPU must have
// beside what the sets above it need (the functions are in isa.cpp). base is SSE2 on x86-64 and NEON on arm64.
#define X86_SETS(SET)                                                                                        \
    SET(avx2, bit(1, 0, C, 12) && bit(1, 0, C, 29) && bit(7, 0, B, 5) && saved(0x6)) /* FMA, F16C, AVX2 */   \
    SET(avx512, bit(7, 0, B, 16) && bit(7, 0, B, 17) && bit(7, 0, B, 30) && bit(7, 0, B, 31) && saved(0xe6)) \
    SET(avx512bf16, bit(7, 1, A, 5))                                                                         \
    SET(amx, bit(7, 0, D, 22) && bit(7, 0, D, 24) && saved(0x60000) && request_amx()) /* AMX-BF16, AMX-TILE */

#if defined(__x86_64__)
#define INSTRUCTION_SETS(SET) SET(base, true) X86_SETS(SET)  // those of this program
#else
#define INSTRUCTION_SETS(SET) SET(base, true)
#endif

#define ISA_NAME(name, test) name,
enum class Isa { base, X86_SETS(ISA_NAME) };
#undef ISA_NAME

const char* isa_name(Isa isa);
std::string amx_refusal();  // "; why the kernel does not let this process use the CPU's AMX", or ""
// The best that this machine and its kernel support. The environment variable CPU_ISA makes it a machine that has no
// more than its value (refused if the machine lacks that).
Isa best_isa();
Isa isa();  // the set that the operations use: best_isa(), but for tests
// Whether vdpbf16ps has twice the FLOP/s of fp32, as on Zen 4 (measured) and Cooper Lake, or half of it, as on Emerald
// Rapids (measured): Intel CPUs have AMX, which a virtual machine may hide, and AVX512-FP16 since Sapphire Rapids.
bool has_fast_vdpbf16ps();
void set_isa(Isa isa);  // tests force each path; refuses what is above best_isa()
