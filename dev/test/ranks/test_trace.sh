#!/usr/bin/env bash
# test_trace.sh: --trace: the traces of runs on one rank and several against their logs, when a trace is written, files that
# are refused, and that a trace changes nothing in the training.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" 30000 || fail "no shards"
run=("$program" --train-data "$scratch/data/train_*.bin" --layers 2 --heads 2 --channels 64 --vocab-size 384 --seq-len 64
     --micro-batch 1 --global-batch 512 --lr 1e-2 --warmup 2 --threads 1 --steps 6)
reports=(--val-data "$scratch/data/val_*.bin" --val-every 3 --checkpoint-every 4 --sample-every 5 --sample-tokens 3)
said() { "$@" >"$scratch/said.log" 2>&1; }  # keeps the output of the command
holds() { python3 dev/test/support/trace_check.py "$@" >"$scratch/found"; }  # its arguments are explained there
found() { grep -qx "$1" "$scratch/found" || { cat "$scratch/found" && return 1; }; }

# ---- one rank
check "without a trace" "${run[@]}" "${reports[@]}" --output "$scratch/untraced"
check "one rank with a trace" said "${run[@]}" "${reports[@]}" --output "$scratch/one" --trace "$scratch/one.json"
check "a line names the trace" grep -qxF "trace of steps 0 to 5: $scratch/one.json (open it in ui.perfetto.dev)" "$scratch/said.log"
check "the trace has all steps of a short run, and their micro-steps" holds "$scratch/one.json" "$scratch/one" 1 0 6 8
for what in "checkpoint 2" "validation 3" "sample 2"; do check "the trace has each $what" found "$what"; done
check "the trace changes nothing in the training" same_run "$scratch/untraced" "$scratch/one" 6
check "--trace-steps 4 over an older trace" "${run[@]}" --output "$scratch/four" --trace "$scratch/one.json" --trace-steps 4
check "--trace-steps 4 replaces the older trace by steps 0 to 3" holds "$scratch/one.json" "$scratch/four" 1 0 4 8
check "--stop-after 2 with a trace" "${run[@]}" --output "$scratch/parts" --trace "$scratch/two.json" --stop-after 2
check "--stop-after 2: the trace has steps 0 and 1" holds "$scratch/two.json" "$scratch/parts" 1 0 2 8
check "resumed with another trace" said "${run[@]}" --output "$scratch/parts" --trace "$scratch/rest.json" --trace-steps 3 --resume
check "resumed: the trace has the first 3 steps of this start" holds "$scratch/rest.json" "$scratch/parts" 1 2 3 8
check "resumed: another --trace is not reported as a change" test "$(grep -c 'changed since' "$scratch/said.log")" = 0
check "virtual ranks with a trace" "${run[@]}" --deterministic-ranks 4 --output "$scratch/virtual" --trace "$scratch/virtual.json" --steps 2
check "the trace of virtual ranks has their micro-steps" holds "$scratch/virtual.json" "$scratch/virtual" 1 0 2 8

# ---- runs that end early
"${run[@]}" --lr 100 --grad-clip 0 --output "$scratch/nan" --checkpoint-every 0 --steps 40 --trace "$scratch/nan.json" \
    --trace-steps 40 >"$scratch/nan.log" 2>&1
check "gradients that are not finite: exit code 1" test $? = 1
steps=$(grep -c '"kind":"step"' "$scratch/nan/log.jsonl")
check "gradients that are not finite: the trace has the $steps steps" holds "$scratch/nan.json" "$scratch/nan" 1 0 "$steps" 8
endless=("${run[@]}" --steps 1000000 --checkpoint-every 1000000)
"${endless[@]}" --output "$scratch/asked" --trace "$scratch/asked.json" --trace-steps 1000000 >"$scratch/asked.log" 2>&1 &
job=$!
check "a long run with a trace trains" wait_for "$scratch/asked/log.jsonl" '"step":3,'
kill -TERM $job
wait $job
check "SIGTERM: exit code 75" test $? = 75
check "SIGTERM: the trace is written" grep -q 'trace of steps 0 to ' "$scratch/asked.log"
mkdir "$scratch/gone"
"${endless[@]}" --output "$scratch/lost" --trace "$scratch/gone/t.json" --trace-steps 300 >"$scratch/lost.log" 2>&1 &
job=$!
check "a run that traces into a directory" wait_for "$scratch/lost/log.jsonl" '"step":3,'
rm -r "$scratch/gone"
check "the directory of the trace is removed: training goes on" wait_for "$scratch/lost/log.jsonl" '"step":400,'
kill -TERM $job
wait $job
check "the directory of the trace is removed: a warning names the file" grep -q "^warning: the trace was not written: $scratch/gone/t.json.tmp: .*; training continues" "$scratch/lost.log"

# ---- refused before any file is written
mkdir "$scratch/folder"
never=("${run[@]}" --output "$scratch/never")
refused "--trace to a directory" 73 "is a directory" "${never[@]}" --trace "$scratch/folder"
refused "--trace into a directory that does not exist" 73 "does not exist" "${never[@]}" --trace "$scratch/none/t.json"
refused "--trace to a file that is not a trace" 73 "is not a trace" "${never[@]}" --trace "$scratch/data/train_000001.bin"
refused "--trace-steps 0" 2 "--trace-steps" "${never[@]}" --trace "$scratch/t.json" --trace-steps 0
check "the refused runs do not train" test ! -e "$scratch/never/log.jsonl"

# ---- several ranks
reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks by mpirun" "$reason" && finish; fi
several_ranks_here
for zero in 0 1; do
    out=$scratch/2_$zero
    check "2 ranks, --zero $zero" ranks 2 "${run[@]}" "${reports[@]}" --zero $zero --output "$out" --trace "$out.json" --trace-steps 5
    check "2 ranks, --zero $zero: the trace has steps, buckets, bytes and waits" holds "$out.json" "$out" 2 0 5 4
    check "2 ranks, --zero $zero: the trace has the gathers of weights" test "$(grep -c '"gather bucket' "$out.json")" = $((zero * 2 * 5 * 3))
    check "2 ranks, --zero $zero, without a trace" ranks 2 "${run[@]}" "${reports[@]}" --zero $zero --output "${out}_untraced"
    check "2 ranks, --zero $zero: the trace changes nothing in the training" same_run "${out}_untraced" "$out" 6
done
check "3 ranks in bf16" ranks 3 "${run[@]}" --global-batch 576 --precision bf16 --output "$scratch/3" --trace "$scratch/3.json"
check "3 ranks: the trace has all ranks" holds "$scratch/3.json" "$scratch/3" 3 0 6 3
refused "2 ranks, --trace into a directory that does not exist" 73 "does not exist" mpirun -np 2 "${never[@]}" --trace "$scratch/none/t.json"

# ---- GPUs, in the emulator
emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "GPUs in the emulator" "build/release/emulator/train_gpt2cu is not built" && finish; fi
gpu=(--train-data "$scratch/data/train_*.bin" "${tiny[@]}" --global-batch 128 --steps 4 --quiet)
check "a GPU with CUDA graphs and a trace" "$emulated" "${gpu[@]}" --output "$scratch/gpu" --trace "$scratch/gpu.json" --trace-steps 3
check "a GPU: the trace has its steps" holds "$scratch/gpu.json" "$scratch/gpu" 1 0 3 4 gpu
check "a GPU: a replayed micro-step is one span" test "$(grep -c forward "$scratch/gpu.json")" = 0
check "a GPU: the trace has the host thread" grep -q '"finish step 2"' "$scratch/gpu.json"
for zero in 0 1; do
    out=$scratch/gpus_$zero
    check "2 staged GPUs, --zero $zero" ranks 2 "$emulated" "${gpu[@]}" --share-gpu --zero $zero --output "$out" --trace "$out.json" \
        --trace-steps 3
    check "2 staged GPUs, --zero $zero: the trace has their steps" holds "$out.json" "$out" 2 0 3 2 gpu
done
check "2 staged GPUs: the trace has copies to the host" grep -q '"copy to host"' "$out.json"
finish
