#!/usr/bin/env bash
# nvcc_powf_constants.sh: nvcc makes no multiplication of powf(x, 2), which is NaN for x < 0 with --use_fast_math.
#
# Guess: powf(x, 2.f) is x * x, and powf(x, 3.f) of the tanh form of GELU two multiplications, at the latest with
# --use_fast_math: the exponent is a constant. g++ makes the first at -O3 and both with -ffast-math.
# Behaviour: nvcc inlines the whole of powf, more than 100 instructions of PTX for either, and also for powf(x, 1.f).
# std::pow(x, 3) of a float is computed in double precision. --use_fast_math leaves two or three instructions of powf,
# but they are ex2(3 * lg2(x)), and lg2.approx of a negative number is NaN (PTX ISA). So an option that is known to cost
# last bits makes this GELU NaN at every negative input, and a sum of squares NaN. Write x * x * x.
# Versions: nvcc 13.0.88 and 13.5.37 of PyPI for sm_90, g++ 12.2 of Debian (the system's is run); no GPU is needed.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/powers.cu" <<'CODE'
#include <cmath>
#ifndef __CUDACC__
#define __global__
#endif
extern "C" __global__ void powf_x_1(float* x) { x[0] = powf(x[0], 1.f); }
extern "C" __global__ void powf_x_2(float* x) { x[0] = powf(x[0], 2.f); }
extern "C" __global__ void powf_x_3(float* x) { x[0] = powf(x[0], 3.f); }
extern "C" __global__ void pow_x_3(float* x) { x[0] = std::pow(x[0], 3); }
extern "C" __global__ void x_x_x(float* x) { x[0] = x[0] * x[0] * x[0]; }
CODE
cat >"$folder/show.py" <<'CODE'
import re
import sys

for name, body in re.findall(r"^\.visible \.entry (\w+)\(.*?\n\{(.*?)\n\}", open(sys.argv[1]).read(), re.S | re.M):
    lines = [line.split()[0] for line in body.splitlines() if re.match(r"\t(@\S+ +)?[a-z]", line)]
    what = "many instructions" if len(lines) > 40 else " ".join(x for x in lines if x[:2] in ("mu", "ad", "lg", "ex"))
    print(*sys.argv[2:], name + ":", ("double precision, " if ".f64" in body else "") + (what or "nothing"))
CODE
{
    for option in -O3 "-O3 -ffast-math"; do
        g++ $option -x c++ -S "$folder/powers.cu" -o "$folder/powers.s"
        for name in powf_x_1 powf_x_2 powf_x_3 pow_x_3 x_x_x; do
            found=$(sed -n "/^$name:/,/cfi_endproc/p" "$folder/powers.s" | grep -oE 'mul[sd]+|pow[f]?@' | xargs || true)
            echo g++ $option $name: ${found:-nothing}
        done
    done
    for version in 13.0.88 13.5.37; do
        python3 -m venv "$folder/$version"
        "$folder/$version/bin/pip" install -q --no-deps nvidia-{cuda-nvcc,cuda-crt,nvvm}==$version \
            nvidia-cuda-runtime==${version%.*}.*
        nvcc=$(echo "$folder/$version"/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc)
        for option in -O3 --use_fast_math; do
            "$nvcc" $option -arch=sm_90 -ptx -o "$folder/powers.ptx" "$folder/powers.cu"
            python3 "$folder/show.py" "$folder/powers.ptx" $version $option
        done
    done
} | tee "$folder/got"

want="g++ -O3 powf_x_1: nothing
g++ -O3 powf_x_2: mulss
g++ -O3 powf_x_3: powf@
g++ -O3 pow_x_3: pow@
g++ -O3 x_x_x: mulss mulss
g++ -O3 -ffast-math powf_x_1: nothing
g++ -O3 -ffast-math powf_x_2: mulss
g++ -O3 -ffast-math powf_x_3: mulss mulss
g++ -O3 -ffast-math pow_x_3: mulsd mulsd
g++ -O3 -ffast-math x_x_x: mulss mulss
$(for version in 13.0.88 13.5.37; do
    echo "$version -O3 powf_x_1: many instructions
$version -O3 powf_x_2: many instructions
$version -O3 powf_x_3: many instructions
$version -O3 pow_x_3: double precision, many instructions
$version -O3 x_x_x: mul.f32 mul.f32
$version --use_fast_math powf_x_1: lg2.approx.ftz.f32 ex2.approx.ftz.f32
$version --use_fast_math powf_x_2: lg2.approx.ftz.f32 add.ftz.f32 ex2.approx.ftz.f32
$version --use_fast_math powf_x_3: lg2.approx.ftz.f32 mul.ftz.f32 ex2.approx.ftz.f32
$version --use_fast_math pow_x_3: double precision, many instructions
$version --use_fast_math x_x_x: mul.ftz.f32 mul.ftz.f32"
done)"
diff <(echo "$want") "$folder/got" && echo "as it was"
