#!/usr/bin/env bash
# test_checkpoint_async.sh: saves that are written while training goes on give the bytes of saves that training waits
# for, with the state on one rank or divided among several; they survive kill -9 and a request to stop, and take no
# memory of their own.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

make_shards "$scratch/data" || fail "no shards"
small=(--train-data "$scratch/data/train_*.bin" --layers 3 --heads 4 --channels 128 --seq-len 32 --micro-batch 2
    --val-every 0
       --log-every 1000 --schedule constant --warmup 4)
train=("$program" "${small[@]}" --quiet)

# Every fsync takes 0.1 s, so a save takes more than 1 s: several steps change the weights before the copy is written.
echo 'extern "C" int usleep(unsigned); extern "C" int fsync(int) { usleep(100000); return 0; }' >"$scratch/slow.cpp"
check "a library with a slow fsync" "${CXX:-g++}" -shared -fPIC -o "$scratch/slow.so" "$scratch/slow.cpp"
slow=(env LD_PRELOAD="$scratch/slow.so")

# ---- the same bytes
check "off" "${train[@]}" --steps 12 --checkpoint-every 4 --keep 0 --checkpoint-async off --output "$scratch/off"
check "on, with slow saves" "${slow[@]}" "${train[@]}" --steps 12 --checkpoint-every 4 --keep 0 --output "$scratch/on"
for step in 4 8 12; do
    check "step $step: the same bytes with on and off" same_run "$scratch/on" "$scratch/off" $step
done
check "the checkpoints of both runs have the same steps" diff <(ls "$scratch/on") <(ls "$scratch/off")
# checkpoint_field RUN STEP FIELD
checkpoint_field() { sed -n "s/.*\"kind\":\"checkpoint\",\"step\":$2,.*\"$3\":\([0-9]*\).*/\1/p" "$1/log.jsonl"; }
check "off: training waits for the whole save" \
    test "$(checkpoint_field "$scratch/off" 4 stall_ms)" -ge "$(checkpoint_field "$scratch/off" 4 ms)"
check "on: training waits for less" \
    test "$(checkpoint_field "$scratch/on" 4 stall_ms)" -lt "$(checkpoint_field "$scratch/on" 4 ms)"
check "the last save is one that the run waits for" \
    test "$(checkpoint_field "$scratch/on" 12 stall_ms)" -ge "$(checkpoint_field "$scratch/on" 12 ms)"

# ---- kill -9 and a request to stop, at a moment in which a save is in flight
# in_flight RUN: waits for a file of a save that is being written.
in_flight() {
    local tries
    for ((tries = 0; tries < 4000; tries++)); do
        if compgen -G "$1/step_*.tmp/*" >/dev/null; then return 0; fi
        sleep 0.005
    done
    return 1
}
last_step() { sed -n 's/.*"kind":"step","step":\([0-9]*\).*/\1/p' "$1/log.jsonl" | tail -1; }
# interrupt NAME SIGNAL RUN COMMAND...: starts a run, and sends the signal while a save is in flight. Sets code.
interrupt() {
    local name=$1 signal=$2 run=$3 pid
    shift 3
    "$@" --output "$run" >"$run.log" 2>&1 &
    pid=$!
    check "$name: a save is in flight" in_flight "$run"
    kill "-$signal" $pid
    { wait $pid; } 2>/dev/null
    code=$?
}
endless=("${slow[@]}" "${train[@]/--quiet/--quiet=0}" --steps 1000000 --checkpoint-every 20)
for run in first second; do
    if [ $run = second ]; then endless+=(--resume); fi
    interrupt "kill -9, $run save" KILL "$scratch/killed" "${endless[@]}"
    if [ $run = first ]; then check "kill -9: nothing is saved" test ! -e "$scratch/killed/latest"; fi
    # shellcheck disable=SC2046
    check "kill -9: the run starts again" \
        "${train[@]}" --steps 1000000 --checkpoint-every 20 $([ $run = second ] && echo --resume) \
        --stop-after 5 --output "$scratch/killed"
    check "kill -9: no part of a save is left" test -z "$(compgen -G "$scratch/killed/*.tmp")"
done
interrupt "a request to stop" TERM "$scratch/stopped" "${endless[@]:0:${#endless[@]}-1}"
check "a request to stop: exit code 75" test $code = 75
check "a request to stop: the run says that it waits" \
    grep -q "save before is still being written; the run waits for it" "$scratch/stopped.log"
check "a request to stop: the save in flight is whole" test -e "$scratch/stopped/step_000020/trainer.json"
check "a request to stop: the last complete step is saved" \
    test "$(cat "$scratch/stopped/latest")" = "step_$(printf '%06d' $(($(last_step "$scratch/stopped") + 1)))"

# ---- failed saves: no file may be larger than 64 MB, as on a full disk
large=(--layers 1 --heads 8 --channels 512 --vocab-size 50257 --global-batch 128)
# expect_failures NAME ASYNC LAUNCHER...: the third failed save ends the run.
expect_failures() {
    local name=$1 async=$2
    shift 2
    rm -rf "$scratch/full"
    (ulimit -f 65536 && exec "$@" "${train[@]/--quiet/--quiet=0}" "${large[@]}" --zero 1 --steps 100 \
        --checkpoint-every 2 --checkpoint-async "$async" --output "$scratch/full") \
        >"$scratch/full.log" 2>&1
    check "$name: exit code 74" test $? = 74
    check "$name: the error" grep -q "^error: .*three saves in a row failed, so the run ends" "$scratch/full.log"
    for step in 2 4; do
        check "$name: a warning of step $step" grep -q \
            "^warning: the checkpoint of step $step was not saved: .*: .*File too large; training continues$" \
            "$scratch/full.log"
    done
    check "$name: the run ends at step 6" test "$(last_step "$scratch/full")" -ge 5
    check "$name: no part of a checkpoint is left" test -z "$(compgen -G "$scratch/full/step_*")"
}
for async in on off; do
    expect_failures "full disk, $async" $async env
done

# ---- memory
saves() { grep -c '"kind":"checkpoint"' "$1/log.jsonl"; }
# resident PID: the most memory that it has had, in KiB.
resident() { awk '/^VmHWM:/ { print $2 }' "/proc/$1/status"; }
# saved RUN N: waits until the run has made N saves.
saved() {
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        if [ -e "$1/log.jsonl" ] && [ "$(saves "$1")" -ge "$2" ]; then return 0; fi
        sleep 0.05
    done
    return 1
}
"${train[@]}" --steps 1000000 --checkpoint-every 2 --keep 1 --output "$scratch/many" &
run=$!
check "memory: 5 saves" saved "$scratch/many" 5
before=$(resident $run)
check "memory: 40 saves" saved "$scratch/many" 40
after=$(resident $run)
kill -9 $run
{ wait $run; } 2>/dev/null
check "memory: $before KiB after 5 saves, $after KiB after 40" within "$after" "$before"

# Under a limit that has no room for the copy, the run waits for each save, and says so.
limited=(bash -c 'ulimit -v "$0" && exec "$@"' 1000000 "${train[@]/--quiet/--quiet=0}" --layers 2 --heads 8
    --channels 512
         --vocab-size 50257 --steps 3 --warmup 0 --checkpoint-every 1 --keep 1 --output "$scratch/small")
"${limited[@]}" >"$scratch/small.log" 2>&1
check "a run without memory for a copy" test $? = 0
check "a run without memory for a copy says so" \
    grep -q "training waits for each checkpoint: a copy of the state takes" "$scratch/small.log"

# ---- several ranks, each with a part of the state
reason=$(no_ranks_because)
if [ -n "$reason" ]; then
    skip "saves of several ranks" "$reason"
else
    several_ranks_here
    # Rank 0 cannot write, and the other rank does not wait for ever.
    for async in on off; do
        expect_failures "full disk, $async, 2 ranks" $async timeout $((120 * slower)) mpirun -np 2
    done
    for layout in "2 --zero 1" "2 --zero 3 --precision bf16" "2 --zero 1 --precision bf16 --master-weights off" \
        "3 --zero 1" \
        "2 --tensor-parallel 2" "4 --tensor-parallel 2 --zero 2"; do
        # shellcheck disable=SC2206
        options=(${layout#* } --global-batch $((12 * 32)) --steps 6 --checkpoint-every 2 --keep 0)
        check "$layout: off" ranks "${layout%% *}" "${train[@]}" "${options[@]}" --checkpoint-async off \
            --output "$scratch/ranks_off"
        check "$layout: on" ranks "${layout%% *}" "${slow[@]}" "${train[@]}" "${options[@]}" \
            --output "$scratch/ranks_on"
        for step in 2 4 6; do
            check "$layout, step $step: the same bytes" same_run "$scratch/ranks_on" "$scratch/ranks_off" $step
        done
        rm -rf "$scratch/ranks_on" "$scratch/ranks_off"
    done
fi
emulated=build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then
    skip "saves of emulated GPUs" "$emulated is not built"
else
    for async in off on; do
        check "2 GPUs, --zero 3: --checkpoint-async $async" \
            env SIMT_DEVICES=2 "$emulated" "${small[@]}" --quiet --layers 1 --heads 1 \
            --channels 32 --precision fp32 --autotune off --steps 6 --checkpoint-every 2 --keep 0 --ranks 2 --zero 3 \
            --checkpoint-async $async --output "$scratch/gpus_$async"
    done
    for step in 2 4 6; do
        check "2 GPUs, step $step: the same bytes" same_run "$scratch/gpus_on" "$scratch/gpus_off" $step
    done
fi
finish
