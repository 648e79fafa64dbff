// isa.h: selects the instruction set of the CPU operations, from CPU feature bits. The CPU model number is not used:
// virtual machines report models that do not exist.
#pragma once

#include <string>

// Each level includes those before it. The levels above plain are those of x86-64; arm64 has one, neon.
enum class Isa { plain, avx2, avx512, avx512bf16, amx, neon = avx2 };

const char* isa_name(Isa isa);
// The best that this machine and its kernel support. The environment variable CPU_ISA makes it a machine that has no
// more than its value (refused if the machine lacks that).
Isa best_isa();
Isa isa();  // the set that the operations use: best_isa(), but for tests
// Whether vdpbf16ps has twice the FLOP/s of fp32: on Zen 4 (measured), and by feature bits if the CPU has no AMX. With
// AMX it has half the FLOP/s of fp32 (measured: 110 GFLOP/s on a core with 225 in fp32).
bool has_fast_vdpbf16ps();
void set_isa(Isa isa);  // tests force each path; refuses what is above best_isa()
