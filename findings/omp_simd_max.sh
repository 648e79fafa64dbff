#!/usr/bin/env bash
# omp_simd_max.sh: no way to write `omp simd reduction(max)` of floats is vectorized by both g++ and clang.
#
# Guess: the reduction clause lets a compiler take the maximum in any order, as it does for a sum, so the row maximum of
# a softmax becomes vector code at -O3 -fopenmp-simd, written with std::max, fmaxf, ?: or if.
# Behaviour: clang takes the clause's word for a sum, but wants a maximum to be free of NaN and of zeros of two signs:
# std::max, ?: and if stay scalar in clang 16 and 22, with a warning; only clang 22 vectorizes fmaxf. g++ vectorizes ?:
# and if; with fmaxf it calls the function for each element, and std::max it vectorizes only if the element is a
# temporary, as fabs(x) is, else it chooses between references. -ffinite-math-only -fno-signed-zeros vectorizes all of
# them in clang 22, all but std::max in g++, and is no option for a loss that looks for NaN.
# Versions: g++ 12.2 of Debian (the system's is run), ziglang 0.11.0 and 0.17.1 of PyPI as clang 16 and 22; AVX2.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/loops.cpp" <<'CODE'
#include <algorithm>
#include <cmath>
#define LOOP(name, clause, statement)                                     \
    extern "C" float name(const float* x, int n) {                        \
        float s = 0;                                                      \
        _Pragma(clause) for (int i = 0; i < n; i++) statement;            \
        return s;                                                         \
    }
LOOP(sum, "omp simd reduction(+ : s)", s += x[i])
LOOP(with_if, "omp simd reduction(max : s)", if (x[i] > s) s = x[i])
LOOP(with_question, "omp simd reduction(max : s)", s = x[i] > s ? x[i] : s)
LOOP(with_std_max, "omp simd reduction(max : s)", s = std::max(s, x[i]))
LOOP(with_std_max_fabs, "omp simd reduction(max : s)", s = std::max(s, std::fabs(x[i])))
LOOP(with_fmaxf, "omp simd reduction(max : s)", s = fmaxf(s, x[i]))
CODE
show() { # NAME COMPILER...: whether each loop has vector code
    "${@:2}" -std=c++20 -O3 -mavx2 -fopenmp-simd -S "$folder/loops.cpp" -o "$folder/loops.s" 2>"$folder/log"
    for name in sum with_if with_question with_std_max with_std_max_fabs with_fmaxf; do
        body=$(sed -n "/^$name:/,/cfi_endproc/p" "$folder/loops.s")
        if grep -qE '(max|add)ps.*ymm' <<<"$body"; then echo "$1, $name: vectors"
        elif grep -q 'call.*fmaxf' <<<"$body"; then echo "$1, $name: calls"
        else echo "$1, $name: scalar"; fi
    done
}
for version in 0.11.0 0.17.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q ziglang==$version
done
clang() { show "$1" "$folder/$2/bin/python" -m ziglang c++ -target x86_64-linux-gnu -fno-sanitize=all "${@:3}"; }
finite="-ffinite-math-only -fno-signed-zeros"
{
    show "g++" g++
    clang "clang 16" 0.11.0
    clang "clang 22" 0.17.1
    show "g++ finite" g++ $finite
    clang "clang 22 finite" 0.17.1 $finite
} | tee "$folder/got"

want="g++, sum: vectors
g++, with_if: vectors
g++, with_question: vectors
g++, with_std_max: scalar
g++, with_std_max_fabs: vectors
g++, with_fmaxf: calls
clang 16, sum: vectors
clang 16, with_if: scalar
clang 16, with_question: scalar
clang 16, with_std_max: scalar
clang 16, with_std_max_fabs: scalar
clang 16, with_fmaxf: scalar
clang 22, sum: vectors
clang 22, with_if: scalar
clang 22, with_question: scalar
clang 22, with_std_max: scalar
clang 22, with_std_max_fabs: scalar
clang 22, with_fmaxf: vectors
g++ finite, sum: vectors
g++ finite, with_if: vectors
g++ finite, with_question: vectors
g++ finite, with_std_max: scalar
g++ finite, with_std_max_fabs: vectors
g++ finite, with_fmaxf: vectors
clang 22 finite, sum: vectors
clang 22 finite, with_if: vectors
clang 22 finite, with_question: vectors
clang 22 finite, with_std_max: vectors
clang 22 finite, with_std_max_fabs: vectors
clang 22 finite, with_fmaxf: vectors"
diff <(echo "$want") "$folder/got" && echo "as it was"
