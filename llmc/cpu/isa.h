// isa.h: which instruction set the CPU operations run on, found once by feature bits, never by the model number:
// virtual machines report models that do not exist.
#pragma once

#include <string>

// Each level includes those before it. The levels above plain are those of x86-64; arm64 has one, neon.
enum class Isa { plain, avx2, avx512, avx512bf16, amx, neon = avx2 };

const char* isa_name(Isa isa);
Isa best_isa();  // what this machine and its kernel offer
// What the operations use: best_isa(), or what the environment variable CPU_ISA names (refused when it is not there).
Isa isa();
// Whether vdpbf16ps does twice the FLOP/s of fp32: on Zen 4 (measured), and by feature bits where the CPU has no AMX. One with
// AMX does half of them (measured: 110 GFLOP/s on a core where fp32 does 225).
bool has_fast_vdpbf16ps();
void set_isa(Isa isa);  // tests force each path; refuses what the machine lacks
