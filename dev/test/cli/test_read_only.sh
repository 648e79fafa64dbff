#!/usr/bin/env bash
# test_read_only.sh: tests that a run whose output becomes read-only trains on with a warning, keeps its checkpoints,
# and saves again when the output can be written. A read-only mount hides the output from calls that open or make a
# file; the log, which is open, is still written.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

if [ "${IN_NAMESPACE:-}" != 1 ]; then
    if unshare --mount sh -c 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"' sh "$scratch" 2>/dev/null; then
        IN_NAMESPACE=1 unshare --mount bash "${BASH_SOURCE[0]}"
        exit
    fi
    skip "an output that becomes read-only" "no mounts can be made here" && finish
fi
with_faults=${program}_faults
if [ ! -x "$with_faults" ]; then skip "an output that becomes read-only" "$with_faults is not built" && finish; fi

make_shards "$scratch/data" || fail "no shards"
train=("$with_faults" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --steps 60 --checkpoint-every 10 --keep 0)
check "the undisturbed run" "${train[@]}" --output "$scratch/undisturbed"

# advance_until TEXT: the process, which the fault stops before each step, makes up to 14 steps, until its
# output has the text.
advance_until() {
    for _ in $(seq 14); do
        kill -CONT "$job" && wait_for_stop "$job" || return 1
        if grep -q "$1" "$scratch/job.log"; then return 0; fi
    done
    return 1
}
for async in off on; do
    out=$scratch/$async
    check "async $async: 10 steps" "${train[@]}" --stop-after 10 --output "$out"
    "${train[@]}" --resume --checkpoint-async $async --fault hang:rank=0,step=18,times=40 --output "$out" \
    >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
    check "async $async: the run is before its second save" wait_for_stop $job
    mount --bind "$out" "$out" && mount -o remount,ro,bind "$out"
    check "async $async: nothing can be made in the output" \
        test "$(touch "$out/file" 2>&1 | grep -c 'Read-only file system')" = 1
    check "async $async: a warning" \
        advance_until \
            '^warning: the checkpoint of step 20 was not saved: .*Read-only file system.*; training continues$'
    check "async $async: the checkpoint before is whole" intact "$out/step_000010"
    check "async $async: no part of a checkpoint" test -z "$(compgen -G "$out/step_*.tmp")"
    umount "$out"
    while runs $job; do kill -CONT $job 2>/dev/null; sleep 0.02; done
    wait $job
    check "async $async: the run ends: exit code $?" test $? = 0
    # In the background the save of step 20 may fail only when that of step 30 begins, which then fails, too.
    check "async $async: later saves succeed" \
        test "$(cd "$out" && echo step_*[1456]0)" = "step_000010 step_000040 step_000050 step_000060"
    check "async $async: the warning is true" test ! -e "$out/step_000020"
    check "async $async: the log and weights of the undisturbed run" same_run "$scratch/undisturbed" "$out" 60
done
finish
