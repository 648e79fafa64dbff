#!/usr/bin/env bash
# test_random_faults.sh: random faults of a small run on two ranks, one in each run: a rank or the launcher is killed
# or stopped, a signal asks to stop, the disk is full, a bit of a checkpoint flips, or the cable between the two
# ranks' hosts is cut.
# A loop starts the run again. Each run must end with the log, weights and moments of a run that was
# not disturbed. Runs with an odd seed have --zero 1, so that each rank sends its part of a checkpoint to rank 0.
#
# FAULT_COUNT faults [200], with the seeds FAULT_SEED [1], FAULT_SEED + 1, ...; FAULT_COUNT=1 FAULT_SEED=17 repeats one,
# up to the moment at which it strikes.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "random faults" "$reason" && exit 0; fi
several_ranks_here
steps=400
make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --steps "$steps"
    --checkpoint-every 20
    --timeout $((5 * slower)))
undisturbed=$scratch/undisturbed
check "the undisturbed run" "${train[@]}" --ranks 2 --output "$undisturbed"

# The runs write to a disk of their own, which has room for eight checkpoints.
disk=$scratch/disk
kinds=(kill kill_launcher stop signal flip)
mkdir "$disk"
checkpoint_kib=$(du -sk "$undisturbed/step_000$steps" | cut -f1)
if mount -t tmpfs -o size=$((8 * checkpoint_kib))k faults "$disk" 2>/dev/null; then
    kinds+=(full_disk)
else
    skip "a full disk" "no tmpfs can be mounted here"
fi
export CLUSTER=f$$n CLUSTER_SUBNET=10.79.0
cluster() { dev/test/ranks/cluster.sh "$@"; }
clean_up() {
    umount --lazy "$disk" 2>/dev/null
    case " ${kinds[*]} " in *" cut_cable "*) cluster down 2 ;; esac
    rm -rf "$scratch"
}
trap 'if is_main_shell; then clean_up; fi' EXIT
reason=$(no_hosts_because)
if [ -n "$reason" ]; then
    skip "a cut cable" "$reason"
elif check "cluster.sh makes 2 hosts" cluster up 2; then
    kinds+=(cut_cable)
fi
out=$disk/run log=$scratch/job.log

start() {
    starts=$((starts + 1))
    local launcher=("${interruptible[@]}") ranks=(--ranks 2)
    if [ "$kind" = cut_cable ]; then launcher+=(dev/test/ranks/cluster.sh run 2 1) ranks=(); fi
    "${launcher[@]}" "${train[@]}" "${ranks[@]}" --zero $((seed % 2)) --resume --output "$out" \
    >>"$log" 2>&1 </dev/null &
    job=$!
}
# at_step STEP: waits for this step of the run. Fails if the run ends before.
at_step() {
    while runs "$job"; do
        if grep -qs "\"step\":$1," "$out/log.jsonl"; then return 0; fi
        sleep 0.01
    done
    return 1
}
a_rank() { children "$(children "$job")" | shuf -n 1 --random-source=<(yes $RANDOM); }

# ---- the faults. Each sets `what`.
fault_kill() {
    what="SIGKILL to a rank"
    kill -9 "$(a_rank)"
}
fault_kill_launcher() {
    what="SIGKILL to the process that starts the ranks"
    kill -9 "$job"
}
fault_stop() {
    what="SIGSTOP to a rank"
    kill -STOP "$(a_rank)"
}
fault_signal() {
    local signals=(INT TERM HUP USR1)
    local signal=${signals[RANDOM % 4]}
    what="SIG$signal"
    kill -"$signal" "$job"
}
# Until a save fails, after which training continues. It also takes the space of old checkpoints that the run deletes.
fault_full_disk() {
    what="a full disk"
    while runs "$job" && ! grep -q 'was not saved' "$log"; do
        dd if=/dev/zero bs=4096 status=none >>"$disk/filler"
        sleep 0.01
    done
    rm "$disk/filler"
}
# It is connected again when the ranks on both hosts have ended.
fault_cut_cable() {
    what="the cable of a host is cut"
    cluster cut "${CLUSTER}1"
    for ((tries = 0; tries < 300 * slower; tries++)); do
        if ! runs "$job" && [ -z "$(ip netns pids "${CLUSTER}1")" ]; then break; fi
        sleep 0.1
    done
    cluster heal "${CLUSTER}1"
}
fault_flip() {
    local step files file at byte
    step=$(cat "$out/latest")
    files=("$out/$step"/*)
    file=${files[RANDOM % ${#files[@]}]}
    at=$(((RANDOM * 32768 + RANDOM) % $(stat -c %s "$file"))) bit=$((RANDOM % 8))
    what="bit $bit of byte $at of $step/$(basename "$file") flipped, and SIGKILL to a rank"
    byte=$(od -An -tu1 -j$at -N1 "$file")
    # shellcheck disable=SC2059  # the byte
    printf "\\x$(printf %02x $((byte ^ (1 << bit))))" | dd of="$file" bs=1 seek=$at conv=notrunc status=none
    kill -9 "$(a_rank)"
}

# disturbed KIND STEP MICROSECONDS: runs until this time after this step, lets the fault strike, and starts the run
# until it is complete. Sets status, and hit: the fault has ended the ranks, or a save has failed.
disturbed() {
    rm -rf "$out" "$log"
    starts=0 hit=0 what="$1, too late"
    start
    if at_step "$2" && { [ "$1" != flip ] || at_step 60; }; then
        sleep "$(printf '0.%06d' "$3")"
        if runs "$job"; then "fault_$1" 2>/dev/null; fi
    fi
    while wait "$job" 2>/dev/null; status=$?; [ $status != 0 ] && [ $starts -lt 6 ]; do
        case $status in 2 | 65 | 66) break ;; esac
        sleep 1  # until the ranks of a launcher that was killed have ended
        start
    done
    if [ "$what" = "$1, too late" ]; then return; fi
    if [ $starts -gt 1 ] || grep -q '^restart 1 \|was not saved' "$log"; then hit=1; fi
}
complete() { [ $status = 0 ] && same_run "$undisturbed" "$out" $steps; }

first=${FAULT_SEED:-1}
for ((seed = first; seed < first + ${FAULT_COUNT:-200}; seed++)); do
    RANDOM=$((seed * 2654435761 % 4294967296))  # else neighbouring seeds give neighbouring numbers
    kind=${kinds[RANDOM % ${#kinds[@]}]}
    for _ in 1 2 3 4 5; do  # until the fault strikes
        step=$((RANDOM % (steps / 2))) microseconds=$((RANDOM % 50000))
        disturbed $kind $step $microseconds
        if [ $hit = 1 ] || ! complete >/dev/null 2>&1; then break; fi
    done
    check "seed $seed: $kind at step $step + $microseconds us: $what: it strikes" test $hit = 1
    check "seed $seed: $kind: $starts starts: the bits of the undisturbed run" complete
    if ! complete >/dev/null 2>&1; then sed 's/^/      /' "$log" | tail -n 20; fi
done
finish
