#!/usr/bin/env bash
# test_gpu_pass.sh: dev/gpu_pass.sh from end to end with small shapes. The emulator's programs, with two GPUs, take the
# place of the GPU build. make, nvidia-smi, compute-sanitizer and the bench are stand-ins. Each claim about losses must
# hold, and must fail for a run that has another seed and another learning rate.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

emulator=$PWD/build/release/emulator
if [ ! -x "$emulator/train_gpt2cu" ]; then
    skip "gpu_pass.sh" "build/release/emulator/train_gpt2cu is not built" && exit 0
fi
several_ranks_here

# The tree in which gpu_pass.sh runs. Stand-ins replace the kernel tests except test_gpu_device, because
# test.sh runs them all.
tree=$scratch/tree
mkdir -p "$tree/build/release/cuda" "$scratch/bin"
ln -s "$PWD"/{dev,llmc,scripts,data,README.md} "$tree/"
ln -s "$program" "$tree/train_gpt2"
stand_in() { cat >"$1" && chmod +x "$1"; }
for source in dev/test/gpu/test_gpu_*.cu; do
    stand_in "$tree/build/release/cuda/$(basename "$source" .cu)" <<<"#!/bin/sh"
done
ln -sf "$emulator/test_gpu_device" "$tree/build/release/cuda/"
stand_in "$tree/test_gpt2cu" <<<"#!/bin/sh"
stand_in "$scratch/bin/make" <<<'#!/bin/sh
if [ "$1" = found ]; then echo "CPU | CUDA | cuDNN 9.19.0 | Open MPI 4 | NCCL"; fi'
stand_in "$scratch/bin/nvidia-smi" <<<'#!/bin/sh
echo "GPU 0"; echo "GPU 1"'
# Fails if the command line selects no kernel of ours. memcheck may: it checks all kernels.
stand_in "$scratch/bin/compute-sanitizer" <<<'#!/usr/bin/env bash
case "$2 $*" in
    *"--kernel-name kns=adamw_kernel "* | memcheck*) ;;
    *) exit 1 ;;
esac
while [[ "$1" == --* ]]; do shift 2; done
exec "$@"'
stand_in "$tree/build/release/cuda/bench_ops" <<<'#!/bin/sh
while [ $# != 0 ]; do if [ "$1" = --json ]; then json=$2; fi; shift; done
step="\"bench\":\"step\",\"device\":\"none\",\"model\":\"d12\",\"dtype\":\"bf16\""
echo "{$step,\"B\":2,\"T\":16,\"ms\":1.0,\"tokens_per_s\":32000}" >>"$json"'
# The trainer. SPOILT names runs that get another seed and learning rate, as the basename of their --output.
for name in gpt2 gpt2cu; do
    real=$emulator/train_gpt2cu
    if [ $name = gpt2 ]; then real=$program; fi
    rm -f "$tree/train_$name"
    stand_in "$tree/train_$name" <<<"#!/usr/bin/env bash
for ((i = 1; i < \$#; i++)); do
    next=\$((i + 1))
    if [ \"\${!i}\" != --output ]; then continue; fi
    if [[ \" \${SPOILT:-} \" == *\" \$(basename \"\${!next}\") \"* ]]; then set -- \"\$@\" --seed 7 --lr 0.3; fi
    break
done
exec $real \"\$@\""
done

# gpu_pass FOLDER STAGE...: 280 seconds for each stage, because other tests run beside it.
gpu_pass() {
    local folder=$1
    shift
    env PATH="$scratch/bin:$PATH" SHAPES=tiny STAGE_SECONDS=280 SIMT_DEVICES=2 TEXT="$tree/README.md" \
        XDG_CACHE_HOME="$scratch/cache" \
        bash "$tree/dev/gpu_pass.sh" -o "$folder" "$@" >"$folder.log" 2>&1
}
# The statements of the script, up to the first variable.
claims=$(sed -n 's/^ *claim "\([^"$]*\).*/\1/p' dev/gpu_pass.sh)
check "there are claims" test "$(wc -l <<<"$claims")" -ge 11

check "all stages" gpu_pass "$scratch/good"
while read -r claim; do
    check "holds: $claim" grep -q "^ok   $claim" "$scratch/good/summary.txt"
done <<<"$claims"
for row in small d12 d12-autotune-off d48 two-gpus-zero-1 d12-two-gpus d12-tensor-parallel; do
    check "results.md has the run $row" grep -q "^| $row |" "$scratch/good/results.md"
done
check "results.md has the bench" grep -q '^| train_gpt2 | none | d12 ' "$scratch/good/results.md"
check "d12 has the vocabulary that is asked for" \
    grep -q '"vocab_size": *384' "$scratch/good/d12/step_000002/config.json"

cp -r "$scratch/good/data" "$scratch/data_of_good"
mkdir -p "$scratch/bad" && mv "$scratch/data_of_good" "$scratch/bad/data"
export SPOILT="small-again small-resumed small-no-graph small-recompute small-hand-written small-fp8 cpu-fp32 cpu-bf16"
SPOILT+=" two-gpus-zero-0 two-gpus-zero-1 two-gpus-zero-2 two-gpus-zero-3"
SPOILT+=" two-gpus-tensor-parallel two-gpus-sequence-parallel"
if gpu_pass "$scratch/bad" train; then
    fail "spoilt runs: exit code 0"
else
    pass "spoilt runs: an exit code other than 0"
fi
while read -r claim; do
    check "fails for another seed: $claim" grep -q "^FAIL $claim" "$scratch/bad/summary.txt"
done <<<"$claims"
for zero in 0 1 2 3; do
    check "fails for another seed: --zero $zero" grep -q "^FAIL two GPUs with --zero $zero " "$scratch/bad/summary.txt"
done
finish
