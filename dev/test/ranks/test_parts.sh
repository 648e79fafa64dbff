#!/usr/bin/env bash
# test_parts.sh: tests saves in the background if each rank has only a part of the state (ZeRO, tensor parallelism): the
# bytes of saves that training waits for, also if a part comes several steps later; kill -9, a request to stop and a
# rank that sends nothing, while rank 0 waits for parts; ranks on two hosts, and emulated GPUs.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "parts of checkpoints" "$reason" && exit 0; fi
with_faults=${program}_faults
if [ ! -x "$with_faults" ]; then skip "parts of checkpoints" "$with_faults is not built" && exit 0; fi
several_ranks_here
export CLUSTER=p$$n CLUSTER_SUBNET=10.78.0
hosts_up=""
trap 'if is_main_shell; then if [ -n "$hosts_up" ]; then dev/test/ranks/cluster.sh down 2; fi; rm -rf "$scratch"; fi' \
    EXIT

make_shards "$scratch/data" || fail "no shards"
small=(--train-data "$scratch/data/train_*.bin" --layers 3 --heads 4 --channels 128 --seq-len 32 --micro-batch 2
    --val-every 0
       --log-every 1000 --schedule constant --warmup 4)
train=("$with_faults" "${small[@]}" --quiet --steps 6 --checkpoint-every 2 --keep 0)

# ---- the same bytes
for layout in "2 --zero 1" "2 --zero 2" "2 --zero 3 --precision bf16" \
    "2 --zero 1 --precision bf16 --master-weights off" "3 --zero 1" \
    "2 --tensor-parallel 2" "4 --tensor-parallel 2" "4 --tensor-parallel 2 --zero 1"; do
    # shellcheck disable=SC2206
    options=(${layout#* } --global-batch $((12 * 32)))
    for async in off on; do
        check "$layout: --checkpoint-async $async" \
            ranks "${layout%% *}" "${train[@]}" "${options[@]}" --checkpoint-async $async \
            --output "$scratch/ranks_$async"
    done
    for step in 2 4 6; do
        check "$layout, step $step: the same bytes" same_run "$scratch/ranks_on" "$scratch/ranks_off" $step
    done
    check "$layout: the same checkpoints" diff <(ls "$scratch/ranks_on") <(ls "$scratch/ranks_off")
    rm -rf "$scratch/ranks_on" "$scratch/ranks_off"
done

# ---- faults while rank 0 waits for the part of rank 1
zero=(--zero 1 --checkpoint-async on)
check "the undisturbed run" ranks 2 "${train[@]}" --zero 1 --checkpoint-async off --steps 40 --checkpoint-every 20 \
    --output "$scratch/whole"
late=(--fault "slow:rank=1,step=20,times=1,phase=part,ms=2000")
check "the part of step 20 comes 2 s late" \
    ranks 2 "${train[@]}" "${zero[@]}" "${late[@]}" --steps 40 --checkpoint-every 20 --output "$scratch/late"
first_step_after=$(grep -n '"kind":"step","step":3[0-9]' "$scratch/late/log.jsonl" | head -1 | cut -d: -f1)
saved=$(grep -n '"kind":"checkpoint","step":20' "$scratch/late/log.jsonl" | cut -d: -f1)
check "late: training went on for more than 10 steps before the save of step 20 was complete" \
    test "${saved:-0}" -gt "${first_step_after:-0}"
for step in 20 40; do
    check "late: step $step has the undisturbed bytes" same_run "$scratch/late" "$scratch/whole" $step
done

# between RUN: waits for a step that ends while rank 0 waits for the part of step 20.
between() { wait_for "$1/log.jsonl" '"step":25,'; }
endless=("$with_faults" "${small[@]}" "${zero[@]}" --steps 1000000 --checkpoint-every 20 --keep 0)
late=(--fault "slow:rank=1,step=40,times=1,phase=part,ms=20000")
"${interruptible[@]}" "${endless[@]}" --ranks 2 "${late[@]}" --output "$scratch/killed" >"$scratch/killed.log" 2>&1 &
run=$!
check "kill -9: a part is on its way" wait_for "$scratch/killed/log.jsonl" '"step":45,'
mapfile -t processes < <(children "$run")
kill -9 $run
{ wait $run; } 2>/dev/null
for process in "${processes[@]}"; do kill -9 "$process" 2>/dev/null; done
sleep 1  # the ranks notice within 0.3 s that mpirun has ended
check "kill -9: step 20 is the newest checkpoint" test "$(cat "$scratch/killed/latest")" = step_000020
check "kill -9: no part of a save is left" test -z "$(compgen -G "$scratch/killed/step_000040*")"
check "kill -9: resumes" ranks 2 "${train[@]}" "${zero[@]}" --resume --steps 40 --output "$scratch/killed"
check "kill -9: ends with the undisturbed bytes" same_run "$scratch/killed" "$scratch/whole" 40

late=(--fault "slow:rank=1,step=20,times=1,phase=part,ms=2000")
"${interruptible[@]}" "${endless[@]}" --ranks 2 "${late[@]}" --output "$scratch/stopped" >"$scratch/stopped.log" 2>&1 &
run=$!
check "a request to stop: a part is on its way" between "$scratch/stopped"
kill -TERM $run
wait $run
check "a request to stop: exit code 75" test $? = 75
check "a request to stop: the save of step 20 has the undisturbed bytes" \
    cmp "$scratch/stopped/step_000020/model.safetensors" \
    "$scratch/whole/step_000020/model.safetensors"
last=$(sed -n 's/.*"kind":"step","step":\([0-9]*\).*/\1/p' "$scratch/stopped/log.jsonl" | tail -1)
check "a request to stop: the last complete step is saved" \
    test "$(cat "$scratch/stopped/latest")" = "step_$(printf '%06d' $((last + 1)))"

# A rank that cannot send its part: the save fails, training continues, and the next save is whole. Rank 0
# waits for half of
# --timeout.
ranks 2 "${train[@]/--quiet/--quiet=false}" "${zero[@]}" --fault error:rank=1,step=20,phase=part \
    --timeout 6 --steps 40 --checkpoint-every 20 --output "$scratch/missing" >"$scratch/missing.log" 2>&1
check "a part that does not come: trains" test $? = 0
check "a part that does not come: rank 0 says so" grep -q \
    "the checkpoint of step 20 was not saved: rank 1 has sent nothing of its part for 3 s" "$scratch/missing.log"
check "a part that does not come: the save of step 20 is not there" test ! -e "$scratch/missing/step_000020"
check "a part that does not come: step 40 has the undisturbed bytes" same_run "$scratch/missing" "$scratch/whole" 40

# ---- rank 0 cannot listen: the run waits for each save, and says so
echo '#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
extern "C" int listen(int fd, int backlog) {
    if (backlog == 66) return errno = EACCES, -1;  // the one of PartChannel with two ranks
    return int(syscall(SYS_listen, fd, backlog));
}' >"$scratch/deaf.cpp"
check "a library that refuses to listen" "${CXX:-g++}" -shared -fPIC -o "$scratch/deaf.so" "$scratch/deaf.cpp"
deaf=(env LD_PRELOAD="$scratch/deaf.so" "${train[@]/--quiet/--quiet=false}" --zero 1 --steps 40 --checkpoint-every 20)
ranks 2 "${deaf[@]}" --output "$scratch/deaf" >"$scratch/deaf.log" 2>&1
check "rank 0 cannot listen: trains" test $? = 0
check "rank 0 cannot listen: says so" \
    grep -q     \
        "training waits for each checkpoint: rank 0 cannot open a port: Permission denied (--checkpoint-async)" \
        "$scratch/deaf.log"
check "rank 0 cannot listen: the undisturbed bytes" same_run "$scratch/deaf" "$scratch/whole" 40
refused "rank 0 cannot listen, --checkpoint-async on" \
    1     "--checkpoint-async on: rank 0 cannot open a port: Permission denied; give auto or off" \
    "${deaf[@]}" --ranks 2 --checkpoint-async on --output "$scratch/none"

# ---- two hosts
reason=$(no_hosts_because)
if [ -n "$reason" ]; then
    skip "parts of checkpoints from another host" "$reason"
else
    hosts_up=1
    check "cluster.sh makes 2 hosts" dev/test/ranks/cluster.sh up 2
    hosts=(dev/test/ranks/cluster.sh run 2 1 "${train[@]}" --zero 1 --steps 40 --checkpoint-every 20
        --checkpoint-async on)
    check "2 hosts" "${hosts[@]}" --output "$scratch/hosts"
    for step in 20 40; do
        check "2 hosts: step $step has the same bytes as on one host" same_run "$scratch/hosts" "$scratch/whole" $step
    done
fi

# ---- emulated GPUs
emulated=build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then
    skip "parts of checkpoints of GPUs" "$emulated is not built"
else
    for zero in 1 3; do
        for async in off on; do
            check "2 GPUs, --zero $zero: --checkpoint-async $async" \
                env SIMT_DEVICES=2 "$emulated" "${small[@]}" --quiet --layers 1 --heads 1 \
                --channels 32 --precision fp32 --autotune off --steps 6 --checkpoint-every 2 --keep 0 --ranks 2 \
                --zero $zero \
                --checkpoint-async $async --output "$scratch/gpus_$async"
        done
        for step in 2 4 6; do
            check "2 GPUs, --zero $zero, step $step: the same bytes" \
                same_run "$scratch/gpus_on" "$scratch/gpus_off" $step
        done
        rm -rf "$scratch/gpus_on" "$scratch/gpus_off"
    done
fi
finish
