#!/usr/bin/env bash
# nvcc_restrict_members.sh: __restrict__ on a member of a kernel's struct argument has no effect in nvcc.
#
# Guess: a kernel that takes its pointers in a struct, with __restrict__ on each member, is compiled as one that takes
# them as parameters: loads of constant data go through the read-only path, and a loop loads what does not change once.
# Behaviour: nvcc takes no notice of it, and does not say so. Each load is a plain ld.global, and in a loop it is done
# again after each store (10 loads instead of 6, unrolled by 4). const and __grid_constant__ on the struct do not help.
# Local pointers with __restrict__ that are set from the members, or an inlined function with __restrict__ parameters,
# do. Of plain parameters one with __restrict__ is enough, also if it is only the output.
# Versions: nvcc 13.0.88 and 13.5.37 of PyPI for sm_90; no GPU is needed.
# Output seen: that of `want` below; the number of loads of each kind. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/kernels.cu" <<'CODE'
struct Arguments {
    float* __restrict__ out;
    const float* __restrict__ x;
    const float* __restrict__ scale;
    int n;
};
__device__ __forceinline__ void scaled(float* __restrict__ out, const float* __restrict__ x,
                                       const float* __restrict__ scale, int n) {
    for (int i = threadIdx.x; i < n; i += 256) out[i] = x[i] * *scale;
}
extern "C" __global__ void parameters(float* __restrict__ out, const float* __restrict__ x,
                                      const float* __restrict__ scale, int n) {
    for (int i = threadIdx.x; i < n; i += 256) out[i] = x[i] * *scale;
}
extern "C" __global__ void only_out(float* __restrict__ out, const float* x, const float* scale, int n) {
    for (int i = threadIdx.x; i < n; i += 256) out[i] = x[i] * *scale;
}
extern "C" __global__ void members(Arguments a) {
    for (int i = threadIdx.x; i < a.n; i += 256) a.out[i] = a.x[i] * *a.scale;
}
extern "C" __global__ void grid_constant(const __grid_constant__ Arguments a) {
    for (int i = threadIdx.x; i < a.n; i += 256) a.out[i] = a.x[i] * *a.scale;
}
extern "C" __global__ void local_pointers(Arguments a) {
    float* __restrict__ out = a.out;
    const float* __restrict__ x = a.x;
    const float* __restrict__ scale = a.scale;
    for (int i = threadIdx.x; i < a.n; i += 256) out[i] = x[i] * *scale;
}
extern "C" __global__ void inlined_function(Arguments a) { scaled(a.out, a.x, a.scale, a.n); }
CODE
for version in 13.0.88 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps nvidia-{cuda-nvcc,cuda-crt,nvvm}==$version \
        nvidia-cuda-runtime==${version%.*}.*
    nvcc=$(echo "$folder/$version"/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc)
    "$nvcc" -arch=sm_90 -ptx -o "$folder/kernels.ptx" "$folder/kernels.cu"
    for name in parameters only_out members grid_constant local_pointers inlined_function; do
        sed -n "/entry $name(/,/^}/p" "$folder/kernels.ptx" | grep -oE 'ld\.global(\.nc)?' | sort | uniq -c |
            while read -r count load; do echo "$version $name: $count $load"; done
    done
done | tee "$folder/got"

want=$(for version in 13.0.88 13.5.37; do
    echo "$version parameters: 6 ld.global.nc
$version only_out: 6 ld.global.nc
$version members: 10 ld.global
$version grid_constant: 10 ld.global
$version local_pointers: 6 ld.global.nc
$version inlined_function: 6 ld.global.nc"
done)
diff <(echo "$want") "$folder/got" && echo "as it was"
