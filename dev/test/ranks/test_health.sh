#!/usr/bin/env bash
# test_health.sh: tests what a run does about steps that are not finite, about spikes, and about ranks that round
# differently. A learning rate of 1e30 makes every step after the first one NaN.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" 30000 || fail "no shards"
options=(--train-data "$scratch/data/train_*.bin" "${tiny[@]}" --micro-batch 1 --global-batch 48)
train=("$program" "${options[@]}" --steps 16 --checkpoint-every 5)
nan=("${train[@]}" --lr 1e30 --warmup 0)
skipped() { sed -n 's/.*"step":\([0-9]*\),.*"skipped":"\([a-z_]*\)".*/\1 \2/p' "$1/log.jsonl" | tr '\n' ' '; }

# ---- steps that are not finite
refused "--on-nan halt" 1 "step 1: loss nan" "${nan[@]}" --output "$scratch/halt"
check "--on-nan halt: the good state is saved" test "$(cat "$scratch/halt/latest")" = step_000001
check "--on-nan halt: the message says so" \
    grep -q "the step did not change the weights, which are saved as of step 1" "$scratch/err"
"${nan[@]}" --on-nan skip --output "$scratch/skip" 2>"$scratch/err"
check "--on-nan skip: exit code" test $? = 1
check "--on-nan skip: the tenth step in a row ends the run" \
    grep -q "^error: step 10: loss nan.*the last of 10 steps in a row" "$scratch/err"
check "--on-nan skip: the log names the steps" test "$(skipped "$scratch/skip")" = "$(printf '%d non_finite ' {1..10})"
check "--on-nan skip: the skipped steps count" test "$(cat "$scratch/skip/latest")" = step_000011
for file in model optimizer; do
    check "neither changes the weights: $file" cmp <(tail -c 50000 "$scratch/halt/step_000001/$file.safetensors") \
        <(tail -c 50000 "$scratch/skip/step_000011/$file.safetensors")
done

# ---- spikes: nearly every second loss is half a standard deviation above the mean
spikes=("$program" "${options[@]}" --steps 150 --checkpoint-every 1000 --spike-z 0.5 --lr 0)
check "--spike-z" "${spikes[@]}" --output "$scratch/spikes"
check "--spike-z: there are spikes after step 140: $(skipped "$scratch/spikes")" \
    test "$(skipped "$scratch/spikes" | tr ' ' '\n' | awk '/^[0-9]/ && $1 > 140' | wc -l)" -gt 0
check "--spike-z: 140 steps" "${spikes[@]}" --output "$scratch/resumed" --stop-after 140
check "--spike-z: the other steps" "${spikes[@]}" --output "$scratch/resumed" --resume
check "--spike-z: a resumed run finds the same spikes" same_run "$scratch/spikes" "$scratch/resumed" 150

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks" "$reason" && finish; fi
several_ranks_here

for zero in 0 1; do
    check "2 ranks, --on-nan skip --zero $zero: exit code" test "$(ranks 2 "${nan[@]}" --global-batch 32 \
        --on-nan skip --zero $zero \
        --output "$scratch/skip_$zero" >/dev/null 2>&1; echo $?)" = 1
    check "2 ranks, --on-nan skip --zero $zero: saved" test "$(cat "$scratch/skip_$zero/latest")" = step_000011
done
# ---- ranks compare their weights, unless they round differently: with --zero 0 their weights then differ
compared=("${train[@]}" --check-replicas 4)
for zero in 0 1 2; do
    check "3 ranks, --check-replicas with --zero $zero" \
        ranks 3 "${compared[@]}" --zero $zero --output "$scratch/compared_$zero"
done
mixed=("${compared[@]}" --global-batch 32 --precision fp32)
warns() { grep '"kind":"warning"' "$1/log.jsonl" | grep -q -- "$2"; }
if "$program" plan "${options[@]}" | grep -q '^device .*, plain;'; then
    skip "ranks with other instruction sets" "this machine has plain only"
else
    on_isas() { mpirun --timeout 60 -np 2 "$each_rank" env CPU_ISA=plain "${mixed[@]}" "$@" + "${mixed[@]}" "$@"; }
    check "ranks with other instruction sets: no comparison" on_isas --output "$scratch/isas"
    check "ranks with other instruction sets: a warning" warns "$scratch/isas" \
        "rank 1 has CPU_ISA=[a-z0-9]*, rank 0 has plain: they may round differently, .*; --check-replicas is off"
    check "ranks with other instruction sets, --zero 1: their weights are equal" \
        on_isas --zero 1 --output "$scratch/isas_zero"
    check "ranks with other instruction sets, --zero 1: no warning" \
        test "$(grep -c '"kind":"warning"' "$scratch/isas_zero/log.jsonl")" = 0
fi
# ---- a rank that is slow in every step, because it is stopped for a while in each: it is named after 40 steps at most
"${interruptible[@]}" mpirun -np 2 "${train[@]}" --global-batch 32 --steps 60 --checkpoint-every 0 \
--output "$scratch/slow" >"$scratch/job.log" 2>&1 &
job=$!
until grep -qs '"step":0,' "$scratch/slow/log.jsonl" || ! runs $job; do sleep 0.01; done
rank=$(children "$job" | tail -n 1)
while runs "$rank"; do kill -STOP "$rank"; sleep 0.1; kill -CONT "$rank"; sleep 0.05; done 2>/dev/null
wait $job
check "2 ranks, one of them slow: exit code $?" test $? = 0
check "2 ranks, one of them slow: it is named" grep -q 'rank [01] is slow: the others waited' "$scratch/slow/log.jsonl"
finish
