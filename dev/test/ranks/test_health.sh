#!/usr/bin/env bash
# test_health.sh: tests what a run does about faults that train_gpt2_faults makes: gradients that are not finite on one rank,
# and spikes of the loss.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" 30000 || fail "no shards"
with_faults=${program}_faults
if [ ! -x "$with_faults" ]; then skip "faults" "$with_faults is not built" && finish; fi
options=(--train-data "$scratch/data/train_*.bin" "${tiny[@]}" --threads 1 --micro-batch 1 --global-batch 48)
train=("$with_faults" "${options[@]}" --steps 16 --checkpoint-every 5)
skipped() { sed -n 's/.*"step":\([0-9]*\),.*"skipped":"\([a-z_]*\)".*/\1 \2/p' "$1/log.jsonl" | tr '\n' ' '; }
skips() { test "$(skipped "$1")" = "$2 "; }

# ---- gradients that are not finite
check "--on-nan skip" "${train[@]}" --on-nan skip --fault nan:rank=0,step=7 --output "$scratch/skip"
check "--on-nan skip: the log names the step" skips "$scratch/skip" "7 non_finite"
check "--on-nan rollback" "${train[@]}" --on-nan rollback --fault nan:rank=0,step=7 --output "$scratch/rollback"
check "--on-nan rollback: the step is left out" skips "$scratch/rollback" "7 left_out"
steps_of() { sed -n 's/.*"kind":"step","step":\([0-9]*\),.*/\1/p' "$1/log.jsonl"; }
check "--on-nan rollback: the log has each step once" diff <(steps_of "$scratch/rollback") <(seq 0 15)
check "--on-nan rollback: the weights are those of skip" cmp "$scratch/skip/step_000016/model.safetensors" \
    "$scratch/rollback/step_000016/model.safetensors"
check "--on-nan rollback with saves in the background" "${train[@]}" --on-nan rollback --checkpoint-async on \
    --fault nan:rank=0,step=12,times=3 --output "$scratch/twice"
# NaN in step 12, in step 12 again, which is left out, and in step 13.
check "--on-nan rollback: two steps are left out" skips "$scratch/twice" "12 left_out 13 left_out"
refused "ten steps in a row" 1 "step 12: loss 4.8" "${train[@]}" --on-nan skip --fault nan:rank=0,step=3,times=12 --output "$scratch/ten"
check "ten steps in a row: the sentence" grep -q "the last of 10 steps in a row" "$scratch/err"
refused "four rollbacks" 1 "after 3 rollbacks" "${train[@]}" --on-nan rollback --fault nan:rank=0,step=7,times=10 --output "$scratch/four"
refused "a rollback without a checkpoint" 1 "there is no checkpoint to go back to" "${train[@]}" --on-nan rollback \
    --fault nan:rank=0,step=3 --output "$scratch/none"
refused "rollback without checkpoints" 2 "--on-nan rollback needs checkpoints" "$program" "${options[@]}" --on-nan rollback --output ''

# ---- spikes: nearly every second loss is half a standard deviation above the mean
spikes=("$program" "${options[@]}" --steps 150 --checkpoint-every 1000 --on-spike skip --spike-z 0.5 --lr 0)
check "--on-spike skip" "${spikes[@]}" --output "$scratch/spikes"
check "--on-spike skip: there are spikes after step 140: $(skipped "$scratch/spikes")" \
    test "$(skipped "$scratch/spikes" | tr ' ' '\n' | awk '/^[0-9]/ && $1 > 140' | wc -l)" -gt 0
check "--on-spike skip: 140 steps" "${spikes[@]}" --output "$scratch/resumed" --stop-after 140
check "--on-spike skip: the other steps" "${spikes[@]}" --output "$scratch/resumed" --resume
check "--on-spike skip: a resumed run finds the same spikes" same_run "$scratch/spikes" "$scratch/resumed" 150

# ---- gradients that are computed twice
again=("${train[@]}" --recompute-check 3)
check "--recompute-check" "${again[@]}" --global-batch 16 --output "$scratch/again"
check "without --recompute-check" "${train[@]}" --global-batch 16 --output "$scratch/once"
check "--recompute-check changes no bit" same_run "$scratch/once" "$scratch/again" 16
refused "--recompute-check, a bit in a gradient" 16 "step 9: the gradients of bucket 2 have other bits" "${again[@]}" \
    --fault bitflip:rank=0,step=9,phase=gradients --output "$scratch/bit"
check "--recompute-check does not see a step that it does not check" "${again[@]}" --fault bitflip:rank=0,step=8,phase=gradients \
    --output "$scratch/other"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks" "$reason" && finish; fi
several_ranks_here

for policy in skip rollback; do
    check "3 ranks, --on-nan $policy, NaN on one" ranks 3 "${train[@]}" --on-nan $policy --fault nan:rank=2,step=7,phase=allreduce \
        --zero 1 --output "$scratch/${policy}_3"
done
check "3 ranks, --on-nan skip: the log names the step" skips "$scratch/skip_3" "7 non_finite"
check "3 ranks: the weights after a rollback are those of skip" cmp "$scratch/skip_3/step_000016/model.safetensors" \
    "$scratch/rollback_3/step_000016/model.safetensors"
# ---- weights that differ between ranks: a bit of rank 2 is flipped in step 7
hashed=("${train[@]}" --hash-check 4)
for zero in 0 1 2; do
    check "3 ranks, --hash-check with --zero $zero" ranks 3 "${hashed[@]}" --zero $zero --output "$scratch/hashed_$zero"
done
refused "3 ranks, a bit in the weights of one" 17 "step 8: rank 2 on $(hostname) differs in its weights" \
    "${hashed[@]}" --ranks 3 --fault bitflip:rank=2,step=7 --output "$scratch/flipped"
check "3 ranks, a bit in the weights: the last checkpoint is older" test "$(cat "$scratch/flipped/latest")" = step_000005
refused "4 ranks in 2 groups, a bit in the weights of one" 17 "rank 1 on $(hostname), rank 3 on $(hostname): their weights differ" "${hashed[@]}" --ranks 4 --tensor-parallel 2 \
    --global-batch 32 --fault bitflip:rank=1,step=7 --output "$scratch/flipped_tp"
# Ranks that round differently: with --zero 0 their weights differ.
mixed=("${hashed[@]}" --global-batch 32 --precision fp32)
warns() { grep '"kind":"warning"' "$1/log.jsonl" | grep -q -- "$2"; }
if "$program" plan "${options[@]}" | grep -q '^device .*, plain;'; then
    skip "ranks with other instruction sets" "this machine has plain only"
else
    on_isas() { mpirun --timeout 60 -np 2 "$each_rank" env CPU_ISA=plain "${mixed[@]}" "$@" + "${mixed[@]}" "$@"; }
    check "ranks with other instruction sets: no comparison" on_isas --output "$scratch/isas"
    check "ranks with other instruction sets: a warning" warns "$scratch/isas" \
        "rank 1 has CPU_ISA=[a-z0-9]*, rank 0 has plain: they may round differently, .*; --hash-check is off"
    check "ranks with other instruction sets, --zero 1: their weights are equal" on_isas --zero 1 --output "$scratch/isas_zero" \
        --trace "$scratch/trace.json"
    check "ranks with other instruction sets, --zero 1: the weights are compared" grep -q "comparison of weights" "$scratch/trace.json"
    check "ranks with other instruction sets, --zero 1: no warning" test "$(grep -c '"kind":"warning"' "$scratch/isas_zero/log.jsonl")" = 0
fi
cat "$with_faults" <(echo) >"$scratch/other_build"
chmod +x "$scratch/other_build"
check "another build of the same sources: no comparison" mpirun --timeout 60 -np 2 "$each_rank" \
    "${mixed[@]}" --output "$scratch/builds" + "$scratch/other_build" "${mixed[@]:1}" --output "$scratch/builds"
check "another build of the same sources: a warning" warns "$scratch/builds" \
    "rank 1 runs another build of the sources than rank 0: they may round differently, .*; --hash-check is off"
# ---- a rank that is slow in every step from the fifth on. straggler.h sums times over 20 steps: it is named after 40 at most.
check "3 ranks, one of them slow" ranks 3 "${train[@]}" --steps 46 --checkpoint-every 46 --fault slow:rank=1,step=5,ms=200 --output "$scratch/slow"
check "3 ranks, one of them slow: steps before it is named: $(sed '/is slow/q' "$scratch/slow/log.jsonl" | grep -c '"kind":"step"')" \
    test "$(sed '/rank 1 is slow: the others waited/q' "$scratch/slow/log.jsonl" | grep -c '"kind":"step"')" -le 45
check "3 ranks, one of them slow: no other is named" test "$(grep -c 'rank [02] is slow' "$scratch/slow/log.jsonl")" = 0

check "3 ranks, --recompute-check with --zero 2" ranks 3 "${again[@]}" --zero 2 --output "$scratch/again_3"
refused "3 ranks, a bit in a gradient" 16 "rank 1 on $(hostname): step 9: the gradients of bucket" "${again[@]}" --ranks 3 \
    --fault bitflip:rank=1,step=9,phase=gradients --output "$scratch/bit_3"

# ---- --max-restarts: one restart tells a passing fault from a lasting one
restarted() {  # NAME CODE RESTARTS COMMAND...: the command ends with this code after so many restarts
    local name=$1 code=$2 restarts=$3 status=0
    shift 3
    timeout 120 "$@" >"$scratch/job.log" 2>&1 </dev/null || status=$?
    check "$name: exit code $status" test $status = "$code"
    check "$name: $restarts restarts" test "$(grep -c '^restart ' "$scratch/job.log")" = "$restarts"
}
again=("${train[@]}" --global-batch 32 --recompute-check 3 --ranks 2 --max-restarts 5)
flip=bitflip:rank=1,step=9,phase=gradients
restarted "a passing fault in a gradient" 0 1 "${again[@]}" --fault $flip --output "$scratch/passing"
check "a passing fault: $(grep '^restart ' "$scratch/job.log")" grep -q \
    '^restart 1 of 5 in [12] s: mpirun ended with exit code 16; .*step_000005$' "$scratch/job.log"
check "a passing fault: a note says so" grep -q '^note: the attempt after exit code 16 had no such fault' "$scratch/job.log"
restarted "a lasting fault in a gradient" 16 1 "${again[@]}" --fault $flip,times=9 --output "$scratch/lasting"
check "a lasting fault: $(grep '^error: two' "$scratch/job.log")" grep -q \
    '^error: two attempts in a row ended with exit code 16: the fault lasts' "$scratch/job.log"
check "a lasting fault: both attempts name the rank" test "$(grep -c "^error: rank 1 on $(hostname): step 9: " "$scratch/job.log")" = 2
restarted "--max-restarts, a bit in the weights" 17 0 "${hashed[@]}" --global-batch 32 --ranks 2 --max-restarts 5 \
    --fault bitflip:rank=1,step=7 --output "$scratch/no_restart"
finish
