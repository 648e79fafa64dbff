#!/usr/bin/env bash
# nvcc_bf16_contraction.sh: a * b + c of bfloat16 rounds twice before sm_90 and once from sm_90 on.
#
# Guess: nvcc contracts a * b + c of __nv_bfloat16 to one fused multiply-add wherever the hardware has that instruction,
# since sm_80, as it does for float and __half. So the same source gives an A100 and an H100 the same numbers.
# Behaviour: for sm_80 to sm_89 the header makes a multiplication of fma(a, b, -0) and an addition of fma(a, 1, b). The
# compiler contracts neither, and the product is rounded to bfloat16 in between. From sm_90 on it is one instruction
# with one rounding, and --fmad=false makes two of it. The operators of __nv_bfloat162, and __hadd of __hmul, are the
# same. __hfma is one instruction everywhere, and __hadd_rn of __hmul_rn two.
# Versions: nvcc 13.0.88 and 13.5.37 of PyPI; no GPU is needed.
# Output seen: that of `want` below; the number of arithmetic instructions. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/kernels.cu" <<'CODE'
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using bf16 = __nv_bfloat16;
template <typename T> __device__ void operators(T* x) { x[0] = x[0] * x[1] + x[2]; }
extern "C" __global__ void with_float(float* x) { operators(x); }
extern "C" __global__ void with_half(__half* x) { operators(x); }
extern "C" __global__ void with_bf16(bf16* x) { operators(x); }
extern "C" __global__ void with_bf162(__nv_bfloat162* x) { operators(x); }
extern "C" __global__ void hadd_hmul(bf16* x) { x[0] = __hadd(__hmul(x[0], x[1]), x[2]); }
extern "C" __global__ void hadd_hmul_rn(bf16* x) { x[0] = __hadd_rn(__hmul_rn(x[0], x[1]), x[2]); }
extern "C" __global__ void hfma(bf16* x) { x[0] = __hfma(x[0], x[1], x[2]); }
CODE
cat >"$folder/count.py" <<'CODE'
import pathlib
import struct
import sys

cubin = pathlib.Path(sys.argv[1]).read_bytes()
ARITHMETIC = {0x020, 0x021, 0x023, 0x030, 0x031, 0x032, 0x035}  # FMUL FADD FFMA HADD2 HFMA2 HMUL2 HFMA2.MMA
table, (count, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HH", cubin, 60)
sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
numbers = {}
for section in sections:
    name = cubin[sections[names][4] + section[0] :].split(b"\0", 1)[0].decode()
    places = range(section[4], section[4] + section[5], 16)
    if name.startswith(".text."):
        numbers[name[6:]] = sum(struct.unpack_from("<H", cubin, at)[0] & 0x1FF in ARITHMETIC for at in places)
print(*sys.argv[2:], *(f"{name} {numbers[name]}" for name in sorted(numbers)))
CODE
for version in 13.0.88 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps nvidia-{cuda-nvcc,cuda-crt,nvvm}==$version \
        nvidia-cuda-runtime==${version%.*}.*
    nvcc=$(echo "$folder/$version"/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc)
    for options in sm_80 sm_89 sm_90 "sm_90 --fmad=false" sm_100; do
        "$nvcc" -arch=$options -cubin \
            -o "$folder/kernels.cubin" "$folder/kernels.cu"
        python3 "$folder/count.py" "$folder/kernels.cubin" $version $options
    done
done | tee "$folder/got"

want=$(for version in 13.0.88 13.5.37; do
    echo "$version sm_80 hadd_hmul 2 hadd_hmul_rn 2 hfma 1 with_bf16 2 with_bf162 2 with_float 1 with_half 1
$version sm_89 hadd_hmul 2 hadd_hmul_rn 2 hfma 1 with_bf16 2 with_bf162 2 with_float 1 with_half 1
$version sm_90 hadd_hmul 1 hadd_hmul_rn 2 hfma 1 with_bf16 1 with_bf162 1 with_float 1 with_half 1
$version sm_90 --fmad=false hadd_hmul 2 hadd_hmul_rn 2 hfma 1 with_bf16 2 with_bf162 2 with_float 2 with_half 2
$version sm_100 hadd_hmul 1 hadd_hmul_rn 2 hfma 1 with_bf16 1 with_bf162 1 with_float 1 with_half 1"
done)
diff <(echo "$want") "$folder/got" && echo "as it was"
