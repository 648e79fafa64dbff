#!/usr/bin/env bash
# test_torch_curve.sh: PyTorch has the losses of train_gpt2, step by step, with the same initial weights, tokens and learning
# rates (dev/bench/torch_curve.py), and has others if an option in the run's log is changed.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

python=/usr/bin/python3  # which has Debian's PyTorch
if ! $python -c 'import torch' 2>/dev/null; then
    skip "the same losses in PyTorch" "there is none (LAUNCHERS=1 ./scripts/test.sh installs it: apt-get install python3-torch)" && exit 0
fi
export OMP_NUM_THREADS=1
make_shards "$scratch/data"
settings=(--train-data "$scratch/data/train_*.bin" --seq-len 16 --micro-batch 2 --global-batch 128 --sample-every 0 --val-every 0 --quiet)
# Weights whose LayerNorms and biases are no longer those of an initialization, and which the first steps change little.
check "initial weights" "$program" "${settings[@]}" --layers 2 --heads 2 --channels 32 --steps 20 --warmup 0 --lr 3e-3 \
    --output "$scratch/first"
# A third of the steps are in the second epoch, whose tokens have another order.
windows=$(($(stat -c %s "$scratch/data/train_000001.bin") / 32))
steps=$((windows * 3 / 2 / 8))
for precision in fp32 bf16; do
    check "a run in $precision" "$program" "${settings[@]}" --precision $precision --init "$scratch/first" --steps $steps --warmup 3 \
        --lr 3e-3 --grad-clip 0.3 --weight-decay 0.2 --beta2 0.98 --checkpoint-every 0 --output "$scratch/$precision"
done
# curve FIRST TOLERANCE RUN: the largest relative difference of the first losses must be at most TOLERANCE.
curve() { $python dev/bench/torch_curve.py "$3" --first "$1" --tolerance "$2"; }
check "fp32: PyTorch has the same $steps losses within 1e-5" curve $steps 1e-5 "$scratch/fp32"
# In bf16 train_gpt2 rounds the residual stream; PyTorch keeps it in float.
check "bf16: PyTorch has the same 10 first losses within 0.5 %" curve 10 5e-3 "$scratch/bf16"
for change in 's/"seed":42/"seed":43/g' 's/"grad-clip":0.3/"grad-clip":1/' 's/"weight-decay":0.2/"weight-decay":0/' 's/"beta2":0.98/"beta2":0.9/' \
    '/"step":5,/s/"lr":[0-9.e-]*/"lr":0.002/'; do
    rm -rf "$scratch/changed" && mkdir "$scratch/changed" && sed "$change" "$scratch/fp32/log.jsonl" >"$scratch/changed/log.jsonl"
    if cmp -s "$scratch/fp32/log.jsonl" "$scratch/changed/log.jsonl"; then fail "$change changes nothing"; continue; fi
    if curve $steps 1e-5 "$scratch/changed" >/dev/null; then fail "the same losses with $change"; else pass "other losses with $change"; fi
done
finish
