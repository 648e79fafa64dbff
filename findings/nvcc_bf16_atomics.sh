#!/usr/bin/env bash
# nvcc_bf16_atomics.sh: atomicAdd of one bfloat16 or half is a loop of compare-and-swap for Hopper and Blackwell too.
#
# Guess: PTX has atom.add.noftz.bf16 from sm_90 on, and .f16 from sm_70 on, so that a GPU of that kind adds to a single
# bfloat16 in memory with one instruction, as it does for float; and an addition whose result nobody reads becomes RED.
# Behaviour: ptxas makes of the scalar forms a loop that reads 32 bits, adds, and swaps them in by ATOM.CAS, for sm_90,
# sm_100 and sm_120 as for sm_80; it does not say so. Two values for different halves of a word contend as well. Pairs
# (__nv_bfloat162, __half2) have an instruction, but cuda_bf16.h asks for the old value of a generic address: atomicAdd
# of a pair becomes ATOM, whose predicate the thread waits for, and a loop for addresses in shared memory. Written in
# PTX, red.global.add.noftz.bf16x2 is one RED, and red.global.v4.bf16x2 one RED of eight values. A gradient of
# embeddings in bfloat16 is to be added in pairs, in PTX.
# Versions: nvcc 13.2.86 and 13.5.37 of PyPI with nvdisasm of the same versions; no GPU is needed.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/atomics.cu" <<'CODE'
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define ATOMIC_ADD(name, type) \
    extern "C" __global__ void name(type* to, type value) { atomicAdd(to + threadIdx.x, value); }
ATOMIC_ADD(float_, float)
ATOMIC_ADD(half_, __half)
ATOMIC_ADD(half2_, __half2)
ATOMIC_ADD(bf16_, __nv_bfloat16)
ATOMIC_ADD(bf162_, __nv_bfloat162)
#if __CUDA_ARCH__ >= 900
#define RED(name, instruction, type, letter, value)                                       \
    extern "C" __global__ void name(void* to, type x) {                                   \
        asm volatile("red.global." instruction " [%0], " value ";" ::"l"(to), letter(x)); \
    }
RED(red_bf16, "add.noftz.bf16", unsigned short, "h", "%1")
RED(red_bf162, "add.noftz.bf16x2", unsigned, "r", "%1")
RED(red_v4_bf162, "v4.bf16x2.add.noftz", unsigned, "r", "{%1, %1, %1, %1}")
#endif
CODE
for version in 13.2.86 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps nvidia-{cuda-nvcc,cuda-crt,nvvm,cuda-nvdisasm}==$version \
        nvidia-cuda-runtime==${version%.*}.*
    bin=$(echo "$folder/$version"/lib/python3.*/site-packages/nvidia/cu13/bin)
    for target in sm_80 sm_90 sm_100 sm_120; do
        "$bin/nvcc" -arch=$target -cubin -o "$folder/atomics.cubin" "$folder/atomics.cu"
        "$bin/nvdisasm" -c "$folder/atomics.cubin" | sed -nE 's/^\.text\.([a-z0-9_]*):/: \1/p
            s/.* (RED|ATOM)[GS]?\.([A-Z0-9a-z]*\.)*(ADD|CAS|CAST)\.([A-Z0-9a-z]*).*/\1.\3.\4/p' |
            sed 's/CAS.*/CAS/' | tr '\n' ' ' | tr ':' '\n' | sort -u |
            sed -n "s/^ \([a-z].*[^ ]\) *$/$version $target \1/p"
    done
done | tee "$folder/got"

want=$(for version in 13.2.86 13.5.37; do
    echo "$version sm_80 bf162_ ATOM.CAS
$version sm_80 bf16_ ATOM.CAS
$version sm_80 float_ RED.ADD.F32
$version sm_80 half2_ ATOM.ADD.F16x2 ATOM.CAS
$version sm_80 half_ ATOM.CAS"
    for target in sm_90 sm_100 sm_120; do
        echo "$version $target bf162_ ATOM.ADD.BF16x2 ATOM.CAS
$version $target bf16_ ATOM.CAS
$version $target float_ RED.ADD.F32
$version $target half2_ ATOM.ADD.F16x2 ATOM.CAS
$version $target half_ ATOM.CAS
$version $target red_bf16 ATOM.CAS
$version $target red_bf162 RED.ADD.BF16x2
$version $target red_v4_bf162 RED.ADD.BF16x8"
    done
done)
diff <(echo "$want") "$folder/got" && echo "as it was"
