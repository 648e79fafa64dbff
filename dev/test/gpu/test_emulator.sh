#!/usr/bin/env bash
# test_emulator.sh: tests the commands of train_gpt2cu in the emulator: training has the losses of train_gpt2, a resumed
# run equals an uninterrupted one, matmuls are timed, and generate, eval and plan work.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
[ "$(uname -m)" = x86_64 ] || { skip "the CUDA backend" "the emulator is for x86-64"; exit 0; }

emulated=$PWD/build/release/emulator/train_gpt2cu
make_shards "$scratch/data" || fail "no shards"
run=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin" "${tiny[@]}" --steps 6
    --val-every 6 --val-batches 2
    --sample-every 6 --sample-tokens 4 --checkpoint-every 3 --keep 0)

losses() { sed -n 's/.*"kind":"\(step\|val\)".*loss":\([0-9.]*\).*/\2/p' "$1/log.jsonl"; }
same_run() {
    diff <(losses "$1") <(losses "$2") || return 1
    for file in model optimizer; do
        cmp "$1/step_000006/$file.safetensors" "$2/step_000006/$file.safetensors" || return 1
    done
}
# close RUN RUN TOLERANCE: the losses differ by less. Losses are about 5, and in ten steps of AdamW rounding errors grow
# to a few roundings of the precision.
close() {
    paste <(losses "$1") <(losses "$2") |
        awk -v t="$3" '{ d = $1 - $2; if (!(d < t && -d < t)) bad = 1 } END { exit bad || NR != 8 }'
}

for precision in fp32 bf16 fp8; do
    cpu=$scratch/cpu_$precision whole=$scratch/whole_$precision parts=$scratch/parts_$precision
    check "$precision: on the CPU" "$program" "${run[@]}" --precision $precision --output "$cpu"
    check "$precision: 6 steps" "$emulated" "${run[@]}" --precision $precision --output "$whole"
    check "$precision: the losses are close to the CPU's" \
        close "$cpu" "$whole" "$([ $precision = fp32 ] && echo 1e-4 || echo 5e-2)"
    check "$precision: 3 steps" "$emulated" "${run[@]}" --precision $precision --output "$parts" --stop-after 3
    check "$precision: the other 3 steps, resumed" \
        "$emulated" "${run[@]}" --precision $precision --output "$parts" --resume
    check "$precision: a run in two parts has the same log and weights as a run in one part" same_run "$whole" "$parts"
done
accumulated=("${run[@]}" --precision bf16 --micro-batch 1 --global-batch 64)
check "four micro-steps with CUDA graphs" "$emulated" "${accumulated[@]}" --output "$scratch/recorded"
check "four micro-steps without CUDA graphs" "$emulated" "${accumulated[@]}" --output "$scratch/calls" --cuda-graph off
check "CUDA graphs do not change a bit" same_run "$scratch/recorded" "$scratch/calls"
check "four micro-steps with --recompute layer" \
    "$emulated" "${accumulated[@]}" --output "$scratch/recomputed" --recompute layer
check "--recompute layer does not change a bit" same_run "$scratch/recorded" "$scratch/recomputed"
check "the largest micro-batch" \
    grep -q 'x 1 micro-step,\? *$' <("$emulated" plan "${tiny[@]}" --micro-batch auto --global-batch 64 |
        grep '^ *batch')
sequences() {
    "$emulated" plan "${tiny[@]}" --seq-len 1024 --micro-batch auto --global-batch 0 |
    sed -n 's/^batch.* = \([0-9,]*\) sequences.*/\1/p' | tr -d ,
}
check "the largest micro-batch leaves the memory that libraries take" \
    test "$(SIMT_LIBRARY_MIB=8192 sequences)" -lt "$(sequences)"

# Before the first step the program times algorithms, and keeps the choices.
choices=$XDG_CACHE_HOME/train_gpt2/algorithms.txt
rm "$choices"
timed=("$emulated" --precision bf16)
for word in "${run[@]}"; do if [ "$word" != --quiet ]; then timed+=("$word"); fi; done
# says TEXT COMMAND...: the command succeeds and prints a line that matches TEXT.
says() { "${@:2}" >"$scratch/said" 2>&1 && grep "$1" "$scratch/said"; }
check "the first start times algorithms" \
    says 'timed the algorithms of [0-9]* matmuls and attentions' "${timed[@]}" --output "$scratch/timed"
check "the choices are kept" grep -q '; forward bf16 m ' "$choices"
check "no temporary file is left" test "$(ls "$XDG_CACHE_HOME/train_gpt2")" = algorithms.txt
cp "$choices" "$scratch/choices"
check "the second start times nothing" \
    test "$("${timed[@]}" --output "$scratch/timed_again" | grep -c 'timed the algorithms')" = 0
check "the second start does not change the file" cmp "$choices" "$scratch/choices"
check "the same choices give the same bits" same_run "$scratch/timed" "$scratch/timed_again"
echo 'another GPU; shape: 1 2 3' >>"$choices"
sed -i '/forward bf16/d' "$choices"
check "missing choices are made again" says 'timed the algorithms' "${timed[@]}" --output "$scratch/timed_some"
check "other choices stay" diff <(sort "$choices") <(sort "$scratch/choices" <(echo 'another GPU; shape: 1 2 3'))
check "--autotune off takes the libraries' proposals" "${timed[@]}" --output "$scratch/proposals" --autotune off
check "--autotune off gives other bits" \
    test "$(sum <"$scratch/proposals/step_000006/model.safetensors")" != "$(sum \
        <"$scratch/timed/step_000006/model.safetensors")"
touch "$scratch/file"
check "a note says that the choices cannot be kept" \
    says 'the next start times them again: .* is not a directory' \
    env XDG_CACHE_HOME="$scratch/file" "${timed[@]}" --output "$scratch/no_cache"
check "a note says so also if there is no home directory" \
    says 'times them again: neither HOME nor XDG_CACHE_HOME is set' \
    env -u HOME -u XDG_CACHE_HOME "${timed[@]}" --output "$scratch/no_home"
check "choices that cannot be kept do not change a bit" same_run "$scratch/timed" "$scratch/no_home"
check "generate" "$emulated" generate --init "$whole" --max-tokens 8
check "eval" "$emulated" eval --init "$whole" --val-data "$scratch/data/val_*.bin" --seq-len 16 --micro-batch 2 \
    --batches 2
check "plan names the GPU and its libraries" grep -q 'cuBLASLt' <("$emulated" plan --layers 2 --heads 2 --channels 32)
refused "channels that are not a multiple of 16 bytes" 2 \
    "multiple of 8" "$emulated" "${run[@]}" --channels 36 --precision bf16 --output ''

# A failure on the GPU, such as an illegal access, ends the program with one error and exit code 1, at any time.
for when in 1 100 700 2000 capture; do
    reason=cudaErrorIllegalAddress
    if [ $when = capture ]; then reason=CUBLAS_STATUS_EXECUTION_FAILED; fi
    refused "operation $when fails" 1 \
        $reason env SIMT_FAIL=$when TORCHELASTIC_ERROR_FILE="$scratch/failure.json" RANK=0 \
        WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "$emulated" \
            "${accumulated[@]}" \
        --output "$scratch/failed_$when"
    check "operation $when fails: the launcher gets the reason" grep -q $reason "$scratch/failure.json"
    rm -f "$scratch/failure.json"
done
finish
