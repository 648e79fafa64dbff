#!/usr/bin/env bash
# gcc_omp_simd_objects.sh: `#pragma omp simd` stops gcc from vectorizing a loop that stores new objects of a class.
#
# Guess: `omp simd` can only help. It promises that no iteration depends on another, so gcc leaves out the overlap test,
# and a loop that it vectorizes without the pragma stays vectorized with it.
# Behaviour: a loop of out[i] = bf16(x[i]), with a class of 16 bits and a constructor that rounds, is vectorized at -O3
# without the pragma. With it gcc makes of each temporary object an array of one element per lane, and then gives up:
# "not vectorized: more than one data ref in stmt". The loop stays scalar without a warning, also with `omp parallel for
# simd`. Where a function does the same assignment to a reference, its temporary does not belong to the loop, and the
# loop is vectorized. clang 14 vectorizes all three. A step of Newton-Schulz in bf16 spent a fifth of its time in such a
# loop of three instructions.
# Versions: g++ 12.2, 13.3 and 14.2 of Debian (the system's is run), ziglang 0.15.1 of PyPI as clang; x86-64.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/loops.cpp" <<'CODE'
#include <cstdint>
struct bf16 {
    uint16_t bits;
    bf16() = default;
    explicit bf16(float x) : bits((__builtin_bit_cast(uint32_t, x) + 0x7fff) >> 16) {}
};
static inline void round_to(bf16& out, float x) { out = bf16(x); }
#define LOOP(name, pragma, statement)                          \
    void name(bf16* __restrict out, const float* __restrict x) { \
        pragma for (int i = 0; i < 4096; i++) statement;       \
    }
LOOP(plain, , out[i] = bf16(x[i]))
LOOP(with_omp_simd, _Pragma("omp simd"), out[i] = bf16(x[i]))
LOOP(with_omp_simd_and_a_function, _Pragma("omp simd"), round_to(out[i], x[i]))
CODE
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ziglang==0.15.1
show() { # COMPILER...: whether each loop stores vectors
    "$@" -std=c++20 -O3 -fopenmp-simd -S "$folder/loops.cpp" -o "$folder/loops.s"
    for name in plain with_omp_simd with_omp_simd_and_a_function; do
        body=$(sed -n "/^_Z[0-9]*${name}P/,/cfi_endproc/p" "$folder/loops.s")
        if grep -qE 'v?mov(dq[au]|[au]p[sd]|q).*xmm[0-9]+, .*\(' <<<"$body"; then echo "$name: vectors"
        else echo "$name: scalar"; fi
    done
}
got=$(echo "g++"; show g++; echo clang; show "$folder/venv/bin/python" -m ziglang c++ -target x86_64-linux-gnu)
want='g++
plain: vectors
with_omp_simd: scalar
with_omp_simd_and_a_function: vectors
clang
plain: vectors
with_omp_simd: vectors
with_omp_simd_and_a_function: vectors'
echo "$got"
[ "$got" = "$want" ] || { echo "changed; it was:"; echo "$want"; exit 1; }
