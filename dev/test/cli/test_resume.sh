#!/usr/bin/env bash
# test_resume.sh: tests that a run that is stopped and resumed has the same log and weights as an uninterrupted
# run, byte for byte.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
data=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin")
run=("$program" "${data[@]}" "${tiny[@]}" --steps 20 --val-every 4 --sample-every 5 --sample-tokens 8
    --checkpoint-every 7 --keep 0)

for precision in fp32 bf16 fp8; do
    whole=$scratch/whole_$precision parts=$scratch/parts_$precision
    check "$precision: 20 steps" "${run[@]}" --precision $precision --output "$whole"
    check "$precision: the log has every step" test "$(results "$whole" | grep -c '"kind":"step"')" = 20
    check "$precision: 6 steps" "${run[@]}" --precision $precision --output "$parts" --stop-after 6
    check "$precision: resumed for 7 steps" "${run[@]}" --precision $precision --output "$parts" --stop-after 7 --resume
    check "$precision: resumed to the end" "${run[@]}" --precision $precision --output "$parts" --resume
    check "$precision: a run in three parts has the same log and weights as a run in one part" \
        same_run "$whole" "$parts"
    check "$precision: 1 thread" \
        env OMP_NUM_THREADS=1 "${run[@]}" --precision $precision --output "$scratch/one_$precision"
    check "$precision: 1 thread gives the same bits as 2" same_run "$whole" "$scratch/one_$precision"
done
check "resuming a finished run does nothing" "${run[@]}" --precision fp32 --output "$scratch/whole_fp32" --resume
check "resuming a finished run changes nothing" same_run "$scratch/whole_fp32" "$scratch/parts_fp32"

# Without master weights, stochastic rounding repeats the same choices after a resume.
bare=(--precision bf16 --master-weights off)
check "no masters: 20 steps" "${run[@]}" "${bare[@]}" --output "$scratch/whole_bare"
check "no masters: 6 steps" "${run[@]}" "${bare[@]}" --output "$scratch/parts_bare" --stop-after 6
check "no masters: run.toml has the option" grep -qx 'master-weights = "off"' "$scratch/parts_bare/run.toml"
check "no masters: resumed to the end" "${run[@]}" "${bare[@]}" --output "$scratch/parts_bare" --resume
check "no masters: a run in two parts has the same log and weights as a run in one part" \
    same_run "$scratch/whole_bare" "$scratch/parts_bare"
check "no masters: 1 thread, and bf16 checkpoints" \
    env OMP_NUM_THREADS=1 "${run[@]}" "${bare[@]}" --output "$scratch/one_bare" \
    --export-dtype bf16 --stop-after 12
check "no masters: resumed from bf16" "${run[@]}" "${bare[@]}" --output "$scratch/one_bare" --resume --export-dtype fp32
check "no masters: 1 thread and bf16 checkpoints give the same bits as 2 threads and fp32" \
    same_run "$scratch/whole_bare" "$scratch/one_bare"
if cmp -s "$scratch/whole_bare/step_000020/model.safetensors" "$scratch/whole_bf16/step_000020/model.safetensors"; then
    fail "no masters: the same weights as with masters"
else
    pass "no masters: other weights than with masters"
fi
check "no masters: the loss is close" \
    awk -v a="$(val_loss "$scratch/whole_bf16")" -v b="$(val_loss "$scratch/whole_bare")" \
    'BEGIN { exit !(a > 0 && a - b < 0.05 && b - a < 0.05) }'

# A killed run resumes from its last checkpoint.
long=(--steps 200 --val-every 0 --sample-every 0 --checkpoint-every 50)
check "200 steps" "${run[@]}" "${long[@]}" --precision fp32 --output "$scratch/undisturbed"
"${run[@]}" "${long[@]}" --precision fp32 --output "$scratch/killed" &
pid=$!
wait_for "$scratch/killed/step_000100/trainer.json"
kill -9 $pid
wait $pid 2>/dev/null
check "kill -9 ends the run before its last step" test ! -e "$scratch/killed/step_000200"
check "a killed run can be resumed" "${run[@]}" "${long[@]}" --precision fp32 --output "$scratch/killed" --resume
check "a killed run has the log and weights of an uninterrupted one" \
    same_run "$scratch/undisturbed" "$scratch/killed" 200

# A signal to stop: the run saves and ends with exit code 75.
for signal in TERM INT USR1; do
    out=$scratch/stopped_$signal
    "${interruptible[@]}" "${run[@]}" --precision fp32 --output "$out" --steps 100000 --sample-every 0 \
    --checkpoint-every 100000 &
    pid=$!
    wait_for "$out/log.jsonl" '"step":3,'
    kill -$signal $pid
    wait $pid
    check "SIG$signal: exit code 75" test $? = 75
    check "SIG$signal: a checkpoint" test -e "$out/latest"
done

"${run[@]}" --precision fp32 --output "$scratch/ignored" --steps 100000 --sample-every 0 --checkpoint-every 100000 \
2>"$scratch/said" &
pid=$!
wait_for "$scratch/ignored/log.jsonl" '"step":3,'
kill -INT $pid
check "a SIGINT that the caller ignores does not stop the run" \
    wait_for "$scratch/ignored/log.jsonl" "\"step\":$(($(wc -l <"$scratch/ignored/log.jsonl") + 50)),"
kill -TERM $pid
wait $pid

# A signal during a step that takes seconds: the run abandons the step, and the resumed run repeats it.
make_shards "$scratch/more" 60000 || fail "no shards"
slow=("$program" --train-data "$scratch/more/train_*.bin" "${tiny[@]}" --channels 64 --micro-batch 1
    --global-batch $((32000 / slower))
      --steps 3 --precision fp32 --checkpoint-every 3)
check "3 long steps" "${slow[@]}" --output "$scratch/slow"
# begin DIR [OPTION...]: starts this run in the background and waits for its first step.
begin() {
    "${interruptible[@]}" "${slow[@]}" "${@:2}" --output "$1" 2>"$scratch/said" &
    pid=$!
    wait_for "$1/log.jsonl" '"step":0,'
}
begin "$scratch/given_up"
kill -TERM $pid
wait $pid
check "SIGTERM in a long step: exit code 75" test $? = 75
check "SIGTERM in a long step: a message says that the step is given up" \
    grep -q "^stopping: the run leaves this step" "$scratch/said"
check "SIGTERM in a long step: the step is not saved" test "$(cat "$scratch/given_up/latest")" = step_000001
check "SIGTERM in a long step: resumed" "${slow[@]}" --output "$scratch/given_up" --resume
check "SIGTERM in a long step: the log and weights of an uninterrupted run" \
    same_run "$scratch/slow" "$scratch/given_up" 3
if [ "$slower" != 1 ]; then
    skip "SIGTERM in the first step" "an emulated CPU: its emulator catches the signals first"
else
    # Before the end of the first step there is nothing to save.
    "${slow[@]}" --quiet=0 --val-data "$scratch/more/val_*.bin" --output "$scratch/first" \
    >"$scratch/out" 2>"$scratch/said" &
    pid=$!
    wait_for "$scratch/first/log.jsonl" '"kind":"val"'  # the validation before the first step
    kill -TERM $pid
    wait $pid
    check "SIGTERM in the first step: exit code 75" test $? = 75
    check "SIGTERM in the first step: nothing is saved" grep -q "there is nothing to save" "$scratch/out"
    # A signal before the first step ends the process.
    large=("${slow[@]}" --layers 4 --channels 512 --global-batch 64 --checkpoint-every 1 --keep 1)
    check "a larger model" "${large[@]}" --output "$scratch/early" --stop-after 1
    before=$(sha256sum "$scratch"/early/step_000001/*)
    for signal in TERM INT; do
        "${interruptible[@]}" "${large[@]}" --output "$scratch/early" --resume >"$scratch/out" 2>"$scratch/said" &
        pid=$!
        sleep 0.05
        kill -$signal $pid
        wait $pid 2>/dev/null
        check "SIG$signal before the first step: its exit code" test $? = $((128 + $(kill -l $signal)))
        check "SIG$signal before the first step: the checkpoint is unchanged" \
            test "$(sha256sum "$scratch"/early/step_000001/*)" = "$before"
    done
    check "signals before the first step: resumed" "${large[@]}" --output "$scratch/early" --resume
    check "signals before the first step: the run in one part" "${large[@]}" --output "$scratch/late"
    check "signals before the first step: the log and weights of an uninterrupted run" \
        same_run "$scratch/late" "$scratch/early" 3
fi

# A signal in a validation of a second: before the first step, and after a step, which is saved.
validated=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/more/train_*.bin" "${tiny[@]}"
    --quiet=0 --steps 4 --val-every 4 --val-batches 2000 --precision fp32)
# wait_until_caught PID: waits up to 20 s until the process catches SIGTERM, which it does from its first validation on.
wait_until_caught() {
    local caught
    for _ in $(seq 1000); do
        caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
        if (((0x${caught:-0} >> 14) & 1)); then return 0; fi
        sleep 0.02
    done
    return 1
}
check "two long validations" "${validated[@]}" --output "$scratch/validated"
for step in 0 4; do
    if [ "$slower" != 1 ] && [ $step = 0 ]; then
        skip "a signal in the validation of step 0" "an emulated CPU: its emulator catches the signals first"
        continue
    fi
    out=$scratch/in_validation_$step
    "${interruptible[@]}" "${validated[@]}" --output "$out" >"$scratch/said" 2>&1 &
    pid=$!
    if [ $step = 0 ]; then wait_until_caught $pid; else wait_for "$out/log.jsonl" '"step":3,'; fi
    kill -TERM $pid
    wait $pid
    check "a signal in the validation of step $step: exit code 75" test $? = 75
    check "a signal in the validation of step $step: the validation is left" \
        test "$(grep -c "\"kind\":\"val\",\"step\":$step," "$out/log.jsonl")" = 0
    if [ $step = 0 ]; then
        check "a signal in the validation of step 0: nothing is saved" \
            grep -q "there is nothing to save" "$scratch/said"
    else
        check "a signal in the validation of step $step: the step is saved" test "$(cat "$out/latest")" = step_000004
    fi
    check "a signal in the validation of step $step: resumed" "${validated[@]}" --output "$out" --resume
    check "a signal in the validation of step $step: the log and weights of an uninterrupted run" \
        same_run "$scratch/validated" "$out" 4
done

# Data that become unreadable end the run, which saves its last step; with the data back, it continues from there.
cp -r "$scratch/more" "$scratch/spoilt"
shard=$(ls "$scratch"/spoilt/train_*.bin | head -1)
for how in "truncate -s 5000" rm; do
    cp "$scratch"/more/train_*.bin "$scratch/spoilt/"
    out=$scratch/data_${how%% *}
    begin "$out" --train-data "$scratch/spoilt/train_*.bin"
    $how "$shard"
    wait $pid
    status=$?
    check "$how a shard: exit code $status" test $status = 65 -o $status = 66
    check "$how a shard: the last step is saved" test "$(grep -c '"kind":"step"' "$out/log.jsonl")" = \
        "$(sed 's/step_0*//' "$out/latest")"
    cp "$scratch"/more/train_*.bin "$scratch/spoilt/"
    check "$how a shard: resumed with the data restored" \
        "${slow[@]}" --train-data "$scratch/spoilt/train_*.bin" --output "$out" --resume
    check "$how a shard: the log and weights of an uninterrupted run" same_run "$scratch/slow" "$out" 3
done

# Another micro-batch reads the same windows in the same order.
check "micro-batch 4" "${run[@]}" --precision fp32 --output "$scratch/micro" --micro-batch 4
check "micro-batch 4 reaches the loss of micro-batch 2" \
    awk -v a="$(val_loss "$scratch/whole_fp32")" -v b="$(val_loss "$scratch/micro")" \
    'BEGIN { exit !(a > 0 && a - b < 1e-3 && b - a < 1e-3) }'

# --keep, --init, and training from our own weights.
check "--keep 2" "${run[@]}" --precision fp32 --output "$scratch/kept" --keep 2
check "--keep 2 keeps two checkpoints" \
    test "$(find "$scratch/kept" -maxdepth 1 -name 'step_*' | sort | xargs -n1 basename |
        tr '\n' ' ')" = "step_000014 step_000020 "
check "--init starts from weights" \
    "$program" "${data[@]}" --init "$scratch/kept" --seq-len 16 --micro-batch 2 --global-batch 64 \
    --steps 3 --lr 0 --quiet --precision fp32 --output "$scratch/init" --val-every 3 --warmup 0 --checkpoint-every 3
weights() { tail -c 100000 "$1/model.safetensors"; }  # without the header, which names the step
check "--lr 0 leaves the weights as they are" \
    cmp <(weights "$scratch/init/step_000003") <(weights "$scratch/kept/step_000020")

finish
