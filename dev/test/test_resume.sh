#!/usr/bin/env bash
# test_resume.sh: a run that is stopped and continued equals one that was not, byte for byte: log and weights.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=dev/test/functions.sh
source dev/test/functions.sh

make_shards "$scratch/data" || fail "no shards"
data=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin")
run=("$program" "${data[@]}" "${tiny[@]}" --steps 20 --val-every 4 --sample-every 5 --sample-tokens 8 --checkpoint-every 7 --keep 0)

for precision in fp32 bf16; do
    whole=$scratch/whole_$precision parts=$scratch/parts_$precision
    check "$precision: 20 steps" "${run[@]}" --precision $precision --output "$whole"
    check "$precision: the log has every step" test "$(results "$whole" | grep -c '"kind":"step"')" = 20
    check "$precision: 6 steps" "${run[@]}" --precision $precision --output "$parts" --stop-after 6
    check "$precision: and 7 more" "${run[@]}" --precision $precision --output "$parts" --stop-after 7 --resume
    check "$precision: and the rest" "${run[@]}" --precision $precision --output "$parts" --resume
    check "$precision: in parts as in one" same_run "$whole" "$parts"
    check "$precision: 1 thread" "${run[@]}" --precision $precision --output "$scratch/one_$precision" --threads 1
    check "$precision: 1 thread as 2" same_run "$whole" "$scratch/one_$precision"
done
check "resuming a finished run does nothing" "${run[@]}" --precision fp32 --output "$scratch/whole_fp32" --resume
check "and changes nothing" same_run "$scratch/whole_fp32" "$scratch/parts_fp32"

# Without master weights: what was rounded at random is rounded so again.
bare=(--precision bf16 --master-weights off)
check "no masters: 20 steps" "${run[@]}" "${bare[@]}" --output "$scratch/whole_bare"
check "no masters: 6 steps" "${run[@]}" "${bare[@]}" --output "$scratch/parts_bare" --stop-after 6
check "no masters: run.json says so" grep -q '"master-weights": *"off"' "$scratch/parts_bare/run.json"
check "no masters: the rest" "${run[@]}" "${bare[@]}" --output "$scratch/parts_bare" --resume
check "no masters: in parts as in one" same_run "$scratch/whole_bare" "$scratch/parts_bare"
check "no masters: 1 thread, and bf16 checkpoints" "${run[@]}" "${bare[@]}" --output "$scratch/one_bare" --threads 1 \
    --export-dtype bf16 --stop-after 12
check "no masters: resumed from bf16" "${run[@]}" "${bare[@]}" --output "$scratch/one_bare" --resume
check "no masters: as 2 threads and fp32" same_run "$scratch/whole_bare" "$scratch/one_bare"
if cmp -s "$scratch/whole_bare/step_000020/model.safetensors" "$scratch/whole_bf16/step_000020/model.safetensors"; then
    fail "no masters: the same weights as with masters"
else
    pass "no masters: other weights than with masters"
fi
check "no masters: the loss is close" awk -v a="$(val_loss "$scratch/whole_bf16")" -v b="$(val_loss "$scratch/whole_bare")" \
    'BEGIN { exit !(a > 0 && a - b < 0.05 && b - a < 0.05) }'

# Killed without warning in the middle: continues from the last checkpoint.
long=(--steps 200 --val-every 0 --sample-every 0 --checkpoint-every 50)
check "200 steps" "${run[@]}" "${long[@]}" --precision fp32 --output "$scratch/undisturbed"
"${run[@]}" "${long[@]}" --precision fp32 --output "$scratch/killed" &
pid=$!
for _ in $(seq 1000); do if [ -e "$scratch/killed/step_000100" ]; then break; fi; sleep 0.01; done
kill -9 $pid
wait $pid 2>/dev/null
check "killed before its end" test ! -e "$scratch/killed/step_000200"
check "after kill -9" "${run[@]}" "${long[@]}" --precision fp32 --output "$scratch/killed" --resume
check "as never killed" same_run "$scratch/undisturbed" "$scratch/killed" 200

# Asked to stop: the step is finished and saved, the exit code says so.
for signal in TERM INT USR1; do
    out=$scratch/stopped_$signal
    "${run[@]}" --precision fp32 --output "$out" --steps 100000 --sample-every 0 --checkpoint-every 100000 &
    pid=$!
    for _ in $(seq 1000); do if grep -q '"step":3,' "$out/log.jsonl" 2>/dev/null; then break; fi; sleep 0.01; done
    kill -$signal $pid
    wait $pid
    check "SIG$signal: exit code 75" test $? = 75
    check "SIG$signal: a checkpoint" test -e "$out/latest"
done

# Another batch reads the same windows in the same order.
check "micro-batch 4" "${run[@]}" --precision fp32 --output "$scratch/micro" --micro-batch 4
check "micro-batch 4 trains as micro-batch 2" awk -v a="$(val_loss "$scratch/whole_fp32")" -v b="$(val_loss "$scratch/micro")" \
    'BEGIN { exit !(a > 0 && a - b < 1e-3 && b - a < 1e-3) }'

# --keep, --init, and training from our own weights.
check "--keep 2" "${run[@]}" --precision fp32 --output "$scratch/kept" --keep 2
check "--keep 2 leaves two" test "$(find "$scratch/kept" -maxdepth 1 -name 'step_*' | sort | xargs -n1 basename | tr '\n' ' ')" = "step_000014 step_000020 "
check "--init starts from weights" "$program" "${data[@]}" --init "$scratch/kept" --seq-len 16 --micro-batch 2 --global-batch 64 \
    --steps 3 --lr 0 --quiet --precision fp32 --output "$scratch/init" --val-every 3 --warmup 0 --checkpoint-every 3
weights() { tail -c 100000 "$1/model.safetensors"; }  # without the header, which names the step
check "--lr 0 leaves them as they are" cmp <(weights "$scratch/init/step_000003") <(weights "$scratch/kept/step_000020")
finish
