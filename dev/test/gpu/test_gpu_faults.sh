#!/usr/bin/env bash
# test_gpu_faults.sh: tests what a run on two GPUs in the emulator does about faults that train_gpt2cu_faults makes on one of them:
# gradients that are not finite, spikes, a bit in the weights, and a bit in the gradients. test_health.sh tests CPU ranks.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

emulated=$PWD/build/release/emulator/train_gpt2cu_faults
if [ ! -x "$emulated" ]; then skip "faults on GPUs" "build/release/emulator/train_gpt2cu_faults is not built" && exit 0; fi
make_shards "$scratch/data" 30000 || fail "no shards"
export SIMT_DEVICES=2 OMP_WAIT_POLICY=passive
options=("$emulated" --train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384 --seq-len 16
         --micro-batch 1 --global-batch 32 --lr 1e-2 --warmup 2 --threads 1 --precision fp32 --autotune off --quiet)
train=("${options[@]}" --gpus 2 --steps 8 --checkpoint-every 3)
skipped() { sed -n 's/.*"step":\([0-9]*\),.*"skipped":"\([a-z_]*\)".*/\1 \2/p' "$1/log.jsonl" | tr '\n' ' '; }
skips() { test "$(skipped "$1")" = "$2 "; }

# ---- gradients that are not finite
for zero in 0 1; do
    out=$scratch/skip_$zero
    check "--on-nan skip, --zero $zero" "${train[@]}" --zero $zero --on-nan skip --fault nan:rank=1,step=5 --output "$out"
    check "--on-nan skip, --zero $zero: the log names the step" skips "$out" "5 non_finite"
done
check "--on-nan rollback" "${train[@]}" --on-nan rollback --fault nan:rank=1,step=5 --output "$scratch/rollback"
check "--on-nan rollback: the step is left out" skips "$scratch/rollback" "5 left_out"
check "--on-nan rollback: the weights are those of skip" cmp "$scratch/skip_0/step_000008/model.safetensors" \
    "$scratch/rollback/step_000008/model.safetensors"
refused "--on-nan halt" 1 "step 5: loss" "${train[@]}" --fault nan:rank=1,step=5 --output "$scratch/halt"
check "--on-nan halt: the last good step is saved" test "$(cat "$scratch/halt/latest")" = step_000005

# ---- spikes: nearly every second loss is half a standard deviation above the mean of 128 steps
spikes=("${options[@]}" --steps 140 --checkpoint-every 140 --on-spike skip --spike-z 0.5 --lr 0 --deterministic-ranks 2)
# The program for the CPU, which is faster than the emulator, fills the window.
check "--on-spike skip: 130 steps" "$program" "${spikes[@]:1}" --stop-after 130 --output "$scratch/spikes_of_one"
cp -r "$scratch/spikes_of_one" "$scratch/spikes"
check "--on-spike skip on 2 GPUs" "${spikes[@]}" --gpus 2 --resume --output "$scratch/spikes"
check "--on-spike skip: there are spikes: $(skipped "$scratch/spikes")" test -n "$(skipped "$scratch/spikes")"
check "--on-spike skip on 1 GPU" "${spikes[@]}" --resume --output "$scratch/spikes_of_one"
check "--on-spike skip: 2 GPUs skip the steps that 1 GPU skips" same_run "$scratch/spikes" "$scratch/spikes_of_one" 140

# ---- a bit in the weights of one GPU, and in its gradients
for zero in 0 1 2; do
    check "--hash-check, --zero $zero" "${train[@]}" --hash-check 2 --zero $zero --output "$scratch/hashed_$zero"
done
refused "--hash-check, a bit in the weights" 17 "step 6: rank 0 on $(hostname), rank 1 on $(hostname): their weights differ" \
    "${train[@]}" --hash-check 2 --fault bitflip:rank=1,step=4 --output "$scratch/flipped"
check "--hash-check: the last checkpoint is older" test "$(cat "$scratch/flipped/latest")" = step_000003
check "--recompute-check" "${train[@]}" --recompute-check 2 --output "$scratch/again"
check "without --recompute-check" "${train[@]}" --output "$scratch/once"
check "--recompute-check changes no bit" same_run "$scratch/once" "$scratch/again" 8
flip=bitflip:rank=1,step=4,phase=gradients
"${train[@]}" --recompute-check 2 --fault $flip --output "$scratch/bit" >"$scratch/job.log" 2>&1
check "--recompute-check, a bit in a gradient: exit code 16" test $? = 16
check "--recompute-check, a bit in a gradient: $(grep -m1 '^error: ' "$scratch/job.log")" grep -q \
    "^error: rank 1 on $(hostname): step 4: the gradients of bucket" "$scratch/job.log"  # rank 0 may add that rank 1 is gone
check "--recompute-check and --max-restarts: a passing fault" "${train[@]}" --recompute-check 2 --max-restarts 3 --fault $flip \
    --output "$scratch/passing"
check "--max-restarts: the run has the bits of an undisturbed one" same_run "$scratch/once" "$scratch/passing" 8
"${train[@]}" --recompute-check 2 --max-restarts 3 --fault $flip,times=9 --output "$scratch/lasting" >"$scratch/job.log" 2>&1
check "--max-restarts, a lasting fault: exit code 16" test $? = 16
check "--max-restarts, a lasting fault: one restart" test "$(grep -c '^restart ' "$scratch/job.log")" = 1
finish
