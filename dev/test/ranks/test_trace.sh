#!/usr/bin/env bash
# test_trace.sh: --trace: the time line of runs on one and two ranks against what they log, when it is written, files that
# are refused, and that training is not changed by it.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" 30000 || fail "no shards"
run=("$program" --train-data "$scratch/data/train_*.bin" --layers 2 --heads 2 --channels 64 --vocab-size 384 --seq-len 64
     --micro-batch 1 --global-batch 512 --lr 1e-2 --warmup 2 --threads 1 --steps 6)
reports=(--val-data "$scratch/data/val_*.bin" --val-every 3 --checkpoint-every 4 --sample-every 5 --sample-tokens 3)
ranks() { mpirun --timeout 60 -np "$@"; }  # ranks N COMMAND...
said() { "$@" >"$scratch/said.log" 2>&1; }  # what the command prints
holds() { python3 dev/test/support/trace_check.py "$@" >"$scratch/found"; }  # see there
found() { grep -qx "$1" "$scratch/found" || { cat "$scratch/found" && return 1; }; }

# ---- one rank
check "without a trace" "${run[@]}" "${reports[@]}" --output "$scratch/untraced"
check "one rank" said "${run[@]}" "${reports[@]}" --output "$scratch/one" --trace "$scratch/one.json"
check "a line says so" grep -qxF "trace of steps 0 to 5: $scratch/one.json (open it in ui.perfetto.dev)" "$scratch/said.log"
check "all steps of a short run, and their micro-steps" holds "$scratch/one.json" "$scratch/one" 1 0 6 8
for what in "checkpoint 2" "validation 3" "sample 2"; do check "with each $what" found "$what"; done
check "training is the same" same_run "$scratch/untraced" "$scratch/one" 6
check "--trace-steps 4, beside others" "${run[@]}" --output "$scratch/four" --trace "$scratch/one.json" --trace-steps 4
check "steps 0 to 3, in place of the older trace" holds "$scratch/one.json" "$scratch/four" 1 0 4 8
check "--stop-after 2" "${run[@]}" --output "$scratch/parts" --trace "$scratch/two.json" --stop-after 2
check "steps 0 and 1" holds "$scratch/two.json" "$scratch/parts" 1 0 2 8
check "resumed" said "${run[@]}" --output "$scratch/parts" --trace "$scratch/rest.json" --trace-steps 3 --resume
check "the first 3 steps of that start" holds "$scratch/rest.json" "$scratch/parts" 1 2 3 8
check "no word of another --trace" test "$(grep -c 'changed since' "$scratch/said.log")" = 0
check "virtual ranks" "${run[@]}" --deterministic-ranks 4 --output "$scratch/virtual" --trace "$scratch/virtual.json" --steps 2
check "virtual ranks have micro-steps" holds "$scratch/virtual.json" "$scratch/virtual" 1 0 2 8

# ---- ends that were not planned
"${run[@]}" --lr 100 --grad-clip 0 --output "$scratch/nan" --checkpoint-every 0 --steps 40 --trace "$scratch/nan.json" \
    --trace-steps 40 >"$scratch/nan.log" 2>&1
check "gradients that are not finite: exit code 1" test $? = 1
steps=$(grep -c '"kind":"step"' "$scratch/nan/log.jsonl")
check "their $steps steps are there" holds "$scratch/nan.json" "$scratch/nan" 1 0 "$steps" 8
endless=("${run[@]}" --steps 1000000 --checkpoint-every 1000000)
"${endless[@]}" --output "$scratch/asked" --trace "$scratch/asked.json" --trace-steps 1000000 >"$scratch/asked.log" 2>&1 &
job=$!
check "a long run" wait_for "$scratch/asked/log.jsonl" '"step":3,'
kill -TERM $job
wait $job
check "SIGTERM: exit code 75" test $? = 75
check "SIGTERM: a trace" grep -q 'trace of steps 0 to ' "$scratch/asked.log"
mkdir "$scratch/gone"
"${endless[@]}" --output "$scratch/lost" --trace "$scratch/gone/t.json" --trace-steps 300 >"$scratch/lost.log" 2>&1 &
job=$!
check "a run that traces into a directory" wait_for "$scratch/lost/log.jsonl" '"step":3,'
rm -r "$scratch/gone"
check "the directory gone: it goes on" wait_for "$scratch/lost/log.jsonl" '"step":400,'
kill -TERM $job
wait $job
check "and is warned" grep -q "^warning: the trace was not written: $scratch/gone/t.json.tmp: .*; training continues" "$scratch/lost.log"

# ---- what is refused, before anything is written
mkdir "$scratch/folder"
never=("${run[@]}" --output "$scratch/never")
refused "a directory" 73 "is a directory" "${never[@]}" --trace "$scratch/folder"
refused "a directory that is not there" 73 "does not exist" "${never[@]}" --trace "$scratch/none/t.json"
refused "a file that is no trace" 73 "is not a trace" "${never[@]}" --trace "$scratch/data/train_000001.bin"
refused "no steps" 2 "--trace-steps" "${never[@]}" --trace "$scratch/t.json" --trace-steps 0
check "none of them trained" test ! -e "$scratch/never/log.jsonl"

# ---- several ranks
reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks by mpirun" "$reason" && finish; fi
several_ranks_here
for zero in 0 1; do
    out=$scratch/2_$zero
    check "2 ranks, --zero $zero" ranks 2 "${run[@]}" "${reports[@]}" --zero $zero --output "$out" --trace "$out.json" --trace-steps 5
    check "--zero $zero: steps, buckets, bytes and waits" holds "$out.json" "$out" 2 0 5 4
    check "--zero $zero: weights are gathered" test "$(grep -c '"gather bucket' "$out.json")" = $((zero * 2 * 5 * 3))
    check "--zero $zero: untraced" ranks 2 "${run[@]}" "${reports[@]}" --zero $zero --output "${out}_untraced"
    check "--zero $zero: training is the same" same_run "${out}_untraced" "$out" 6
done
check "3 ranks in bf16" ranks 3 "${run[@]}" --global-batch 576 --precision bf16 --output "$scratch/3" --trace "$scratch/3.json"
check "3 ranks: their trace" holds "$scratch/3.json" "$scratch/3" 3 0 6 3
refused "2 ranks and a directory that is not there" 73 "does not exist" mpirun -np 2 "${never[@]}" --trace "$scratch/none/t.json"

# ---- GPUs, in the emulator
emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "GPUs in the emulator" "build/release/emulator/train_gpt2cu is not built" && finish; fi
gpu=(--train-data "$scratch/data/train_*.bin" "${tiny[@]}" --global-batch 128 --steps 4 --quiet)
check "a GPU, with graphs" "$emulated" "${gpu[@]}" --output "$scratch/gpu" --trace "$scratch/gpu.json" --trace-steps 3
check "its steps" holds "$scratch/gpu.json" "$scratch/gpu" 1 0 3 4 gpu
check "a recorded micro-step is one span" test "$(grep -c forward "$scratch/gpu.json")" = 0
check "its host" grep -q '"finish step 2"' "$scratch/gpu.json"
for zero in 0 1; do
    out=$scratch/gpus_$zero
    check "2 staged GPUs, --zero $zero" ranks 2 "$emulated" "${gpu[@]}" --share-gpu --zero $zero --output "$out" --trace "$out.json" \
        --trace-steps 3
    check "2 staged GPUs, --zero $zero: their steps" holds "$out.json" "$out" 2 0 3 2 gpu
done
check "copies for them" grep -q '"copy to host"' "$out.json"
finish
