#!/usr/bin/env bash
# test_read_only.sh: tests that a run whose output becomes read-only trains on with a warning, keeps its checkpoints,
# and saves
# again when the output can be written. A read-only mount hides the output from calls that open or make a file; the log,
# which is
# open, is still written.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

if [ "${IN_NAMESPACE:-}" != 1 ]; then
    if unshare --mount sh -c 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"' sh "$scratch" 2>/dev/null; then
        IN_NAMESPACE=1 unshare --mount bash "${BASH_SOURCE[0]}"
        exit
    fi
    skip "an output that becomes read-only" "no mounts can be made here" && finish
fi

make_shards "$scratch/data" || fail "no shards"
for async in off on; do
    out=$scratch/$async
    "$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --quiet=0 --steps 10000000 --checkpoint-every \
        200 --keep 0 \
        --checkpoint-async $async --output "$out" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
    check "async $async: the first save" wait_for "$out/latest"
    kill -STOP $job
    mount --bind "$out" "$out" && mount -o remount,ro,bind "$out"
    check "async $async: nothing can be made in the output" \
        test "$(touch "$out/file" 2>&1 | grep -c 'Read-only file system')" = 1
    kill -CONT $job
    check "async $async: a warning" \
        wait_for "$scratch/job.log" \
            '^warning: the checkpoint of step .*00 was not saved: .*Read-only file system.*; training continues$'
    kill -STOP $job
    umount "$out"
    failed=$(sed -n 's/^warning: the checkpoint of step \([0-9]*\) was not saved.*/\1/p' "$scratch/job.log" | tail -1)
    check "async $async: the warning is true" test ! -e "$out/step_$(printf %06d "$failed")"
    kill -CONT $job
    check "async $async: a later save" wait_for "$out/log.jsonl" "\"kind\":\"checkpoint\",\"step\":$((failed + 2000)),"
    kill -TERM $job
    wait $job
    check "async $async: a request to stop: exit code 75" test $? = 75
    check "async $async: no part of a checkpoint" test -z "$(compgen -G "$out/step_*.tmp")"
    check "async $async: the log has every step" \
        test "$(grep -c '"kind":"step"' "$out/log.jsonl")" = "$((10#$(sed 's/step_//' "$out/latest")))"
done
finish
