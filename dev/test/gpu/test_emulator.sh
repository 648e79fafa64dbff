#!/usr/bin/env bash
# test_emulator.sh: the commands of train_gpt2cu, as a CPU runs them: training as train_gpt2 trains, resumed as never
# stopped, with timed products, validation, samples and text.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
[ "$(uname -m)" = x86_64 ] || { skip "the CUDA backend" "the emulator is for x86-64"; exit 0; }

emulated=$PWD/build/release/emulator/train_gpt2cu
make_shards "$scratch/data" || fail "no shards"
export XDG_CACHE_HOME=$scratch/cache  # of --autotune
run=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin" "${tiny[@]}" --steps 6 --val-every 6 --val-batches 2
    --sample-every 6 --sample-tokens 4 --checkpoint-every 3 --keep 0)

losses() { sed -n 's/.*"kind":"\(step\|val\)".*loss":\([0-9.]*\).*/\2/p' "$1/log.jsonl"; }
same_run() {
    diff <(losses "$1") <(losses "$2") || return 1
    for file in model optimizer; do cmp "$1/step_000006/$file.safetensors" "$2/step_000006/$file.safetensors" || return 1; done
}
# Losses of about 5, which ten steps of AdamW tear apart by a few roundings of the precision.
close() { paste <(losses "$1") <(losses "$2") | awk -v t="$3" '{ d = $1 - $2; if (!(d < t && -d < t)) bad = 1 } END { exit bad || NR != 8 }'; }

for precision in fp32 bf16; do
    cpu=$scratch/cpu_$precision whole=$scratch/whole_$precision parts=$scratch/parts_$precision
    check "$precision: on the CPU" "$program" "${run[@]}" --precision $precision --output "$cpu"
    check "$precision: 6 steps" "$emulated" "${run[@]}" --precision $precision --output "$whole"
    check "$precision: losses as on the CPU" close "$cpu" "$whole" "$([ $precision = fp32 ] && echo 1e-4 || echo 5e-2)"
    check "$precision: 3 steps" "$emulated" "${run[@]}" --precision $precision --output "$parts" --stop-after 3
    check "$precision: and the rest" "$emulated" "${run[@]}" --precision $precision --output "$parts" --resume
    check "$precision: in parts as in one" same_run "$whole" "$parts"
done
accumulated=("${run[@]}" --precision bf16 --micro-batch 1 --global-batch 64)
check "four micro-steps, recorded" "$emulated" "${accumulated[@]}" --output "$scratch/recorded"
check "four micro-steps, each call by itself" "$emulated" "${accumulated[@]}" --output "$scratch/calls" --cuda-graph off
check "both the same" same_run "$scratch/recorded" "$scratch/calls"
check "layers recomputed" "$emulated" "${accumulated[@]}" --output "$scratch/recomputed" --recompute layer
check "with the same bits" same_run "$scratch/recorded" "$scratch/recomputed"
check "the largest micro-batch" grep -q 'x 1 micro-step,\? *$' <("$emulated" plan "${tiny[@]}" --micro-batch auto --global-batch 64 | grep '^ *batch')
check "--autotune" "$emulated" "${run[@]}" --precision bf16 --output "$scratch/timed" --autotune
check "--autotune keeps what it chose" grep -q '; forward bf16 m ' "$XDG_CACHE_HOME/train_gpt2/products.txt"
check "--autotune again" "$emulated" "${run[@]}" --precision bf16 --output "$scratch/timed_again" --autotune
check "the same choices, the same bits" same_run "$scratch/timed" "$scratch/timed_again"
refused "--autotune on the CPU" 2 "this program runs on the CPU" "$program" plan --autotune
check "generate" "$emulated" generate --init "$whole" --max-tokens 8
check "eval" "$emulated" eval --init "$whole" --val-data "$scratch/data/val_*.bin" --seq-len 16 --micro-batch 2 --batches 2
check "plan names the GPU and its libraries" grep -q 'cuBLASLt' <("$emulated" plan --layers 2 --heads 2 --channels 32)
refused "channels that no row of 16 bytes fills" 2 "multiple of 8" "$emulated" "${run[@]}" --channels 36 --precision bf16 --output ''

# A failure on the GPU, such as an illegal access, ends the program with one error and code 1, whatever it was doing then.
for when in 1 100 400 700 capture; do
    reason=cudaErrorIllegalAddress
    if [ $when = capture ]; then reason=CUBLAS_STATUS_EXECUTION_FAILED; fi
    refused "operation $when fails" 1 $reason env SIMT_FAIL=$when TORCHELASTIC_ERROR_FILE="$scratch/failure.json" RANK=0 \
        WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "$emulated" "${accumulated[@]}" \
        --output "$scratch/failed_$when"
    check "operation $when fails: the launcher gets the reason" grep -q $reason "$scratch/failure.json"
    rm -f "$scratch/failure.json"
done
finish
