// isa.h: selects the instruction set of the CPU operations, from CPU feature bits. The CPU model number is not used:
// virtual machines report models that do not exist.
#pragma once

#include <string>

// Each level includes those before it. The levels above plain are those of x86-64; arm64 has one, neon.
enum class Isa { plain, avx2, avx512, avx512bf16, amx, neon = avx2 };

const char* isa_name(Isa isa);
Isa best_isa();  // the best that this machine and its kernel support
// The set that the operations use: best_isa(), or the value of the environment variable CPU_ISA (refused if the machine
// lacks it).
Isa isa();
// Whether vdpbf16ps has twice the FLOP/s of fp32: on Zen 4 (measured), and by feature bits if the CPU has no AMX. With
// AMX it has half the FLOP/s of fp32 (measured: 110 GFLOP/s on a core with 225 in fp32).
bool has_fast_vdpbf16ps();
void set_isa(Isa isa);  // tests force each path; refuses what the machine lacks
