#!/usr/bin/env bash
# nvcc_shared_alignment.sh: the alignment of one kernel's dynamic shared memory rounds up the static one of the others.
#
# Guess: __align__ on an extern __shared__ array concerns the kernels that use the array. Another kernel of the file
# reserves the bytes of its own variables.
# Behaviour: an array aligned to 1024 bytes, as TMA's swizzle wants it, makes each kernel of the translation unit that
# has static shared variables reserve a multiple of 1024 bytes: 1024 in place of 12, 2048 in place of 1028. Kernels
# without static variables stay at 0. Small kernels lose occupancy by an array that they never name. The array in a file
# of its own avoids it, and so does -rdc=true.
# Versions: nvcc and ptxas 13.0.88 and 13.5.37 of PyPI, for sm_80 and sm_90a; no GPU is needed.
# Output seen: that of `want` below; the bytes of a small, a larger and no static array. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/kernels.cu" <<'CODE'
template <int count> __device__ void fill(int (&all)[count], int* out) {
    all[threadIdx.x % count] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = all[0];
}
extern "C" __global__ void few(int* out) {
    __shared__ int all[3];
    fill(all, out);
}
extern "C" __global__ void many(int* out) {
    __shared__ int all[257];
    fill(all, out);
}
extern "C" __global__ void none(int* out) { out[threadIdx.x] = 1; }
#ifdef ALIGNMENT
extern __shared__ __align__(ALIGNMENT) unsigned char tiles[];
extern "C" __global__ void aligned(int* out) {
    tiles[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = tiles[0];
}
#endif
CODE
ask() { # ask VERSION ARCHITECTURE OPTION...: compiles, and prints the bytes that the kernels reserve
    local bin
    bin=$(echo "$folder/$1"/lib/python3.*/site-packages/nvidia/cu13/bin)
    "$bin/nvcc" -arch="$2" "${@:3}" -cubin -Xptxas -v -o "$folder/kernels.cubin" "$folder/kernels.cu" 2>"$folder/log"
    awk -F"'" -v question="$*" '/Compiling entry/ { kernel = $2 }
        /Used [0-9]+ registers/ { bytes[kernel] = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART) + 0 : 0 }
        END { print question, bytes["few"], bytes["many"], bytes["none"] }' "$folder/log"
}
for version in 13.0.88 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps nvidia-{cuda-nvcc,cuda-crt,nvvm}==$version \
        nvidia-cuda-runtime==${version%.*}.*
    for architecture in sm_80 sm_90a; do
        for options in "" -DALIGNMENT=16 -DALIGNMENT=1024 "-DALIGNMENT=1024 -rdc=true"; do
            ask $version $architecture $options
        done
    done
done | tee "$folder/got"

want="13.0.88 sm_80 12 1028 0
13.0.88 sm_80 -DALIGNMENT=16 16 1040 0
13.0.88 sm_80 -DALIGNMENT=1024 1024 2048 0
13.0.88 sm_80 -DALIGNMENT=1024 -rdc=true 12 1028 0
13.0.88 sm_90a 12 1028 0
13.0.88 sm_90a -DALIGNMENT=16 16 1040 0
13.0.88 sm_90a -DALIGNMENT=1024 1024 2048 0
13.0.88 sm_90a -DALIGNMENT=1024 -rdc=true 12 1028 0
13.5.37 sm_80 12 1028 0
13.5.37 sm_80 -DALIGNMENT=16 16 1040 0
13.5.37 sm_80 -DALIGNMENT=1024 1024 2048 0
13.5.37 sm_80 -DALIGNMENT=1024 -rdc=true 12 1028 0
13.5.37 sm_90a 12 1028 0
13.5.37 sm_90a -DALIGNMENT=16 16 1040 0
13.5.37 sm_90a -DALIGNMENT=1024 1024 2048 0
13.5.37 sm_90a -DALIGNMENT=1024 -rdc=true 12 1028 0"
diff <(echo "$want") "$folder/got" && echo "as it was"
