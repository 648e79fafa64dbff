#!/usr/bin/env bash
# ptxas_min_blocks.sh: __launch_bounds__ with more blocks than fit limits nothing: ptxas drops it, it does not lower it.
#
# Guess: __launch_bounds__(512, 4), which fills the 2048 threads of an A100's or H100's SM, becomes the most that fits
# on a GPU with 1536 threads (sm_89, sm_120): three blocks, so at most 40 registers a thread.
# Behaviour: ptxas ignores the second number there, with a warning that fails no build, and the kernel gets as many
# registers as without it. At 46 to 60 of them two blocks of 512 threads fit, where (512, 3) makes it three. So a kernel
# that was tuned on an H100 has fewer threads on an RTX 4090 than its bound could give. Choose it by __CUDA_ARCH__.
# Versions: nvcc 13.0.88 and 13.5.37 of PyPI; no GPU is needed.
# Output seen: that of `want` below: registers of a thread for each bound. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/bounds.cu" <<'CODE'
#define KERNEL(name, ...)                                                                   \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(float* x, int n) {       \
        float a[40], sum = 0;                                                               \
        for (int i = 0; i < 40; i++) a[i] = x[threadIdx.x] * i;                             \
        for (int k = 0; k < n; k++)                                                         \
            for (int i = 0; i < 40; i++) a[i] = a[i] * a[(i + 7) % 40] + a[(i + 3) % 40];   \
        for (int i = 0; i < 40; i++) sum += a[i];                                           \
        x[threadIdx.x] = sum;                                                               \
    }
KERNEL(threads_512, 512)
KERNEL(threads_512_blocks_3, 512, 3)
KERNEL(threads_512_blocks_4, 512, 4)
KERNEL(threads_1024, 1024)
KERNEL(threads_1024_blocks_2, 1024, 2)
CODE
for version in 13.0.88 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps nvidia-{cuda-nvcc,cuda-crt,nvvm}==$version \
        nvidia-cuda-runtime==${version%.*}.*
    nvcc=$(echo "$folder/$version"/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc)
    for target in sm_80 sm_89 sm_90 sm_120; do
        "$nvcc" -arch=$target -cubin -Xptxas -v -o "$folder/bounds.cubin" "$folder/bounds.cu" 2>"$folder/log"
        registers=$(sed -nE "s/.*entry function '(\w+)'.*/\1/p; s/.*Used ([0-9]+) registers.*/\1/p" "$folder/log" |
            paste - - | sort | xargs)
        echo "$version $target $registers ignored: $(grep -c 'minnctapersm will be ignored' "$folder/log")"
    done
done | sed 's/threads_//g; s/_blocks_/x/g' | tee "$folder/got"

want="13.0.88 sm_80 1024 60 1024x2 32 512 60 512x3 40 512x4 32 ignored: 0
13.0.88 sm_89 1024 60 1024x2 60 512 60 512x3 40 512x4 60 ignored: 2
13.0.88 sm_90 1024 60 1024x2 32 512 60 512x3 40 512x4 32 ignored: 0
13.0.88 sm_120 1024 58 1024x2 58 512 58 512x3 40 512x4 58 ignored: 2
13.5.37 sm_80 1024 60 1024x2 32 512 60 512x3 40 512x4 32 ignored: 0
13.5.37 sm_89 1024 60 1024x2 60 512 60 512x3 40 512x4 60 ignored: 2
13.5.37 sm_90 1024 60 1024x2 32 512 60 512x3 40 512x4 32 ignored: 0
13.5.37 sm_120 1024 46 1024x2 46 512 46 512x3 40 512x4 46 ignored: 2"
diff <(echo "$want") "$folder/got" && echo "as it was"
