#!/usr/bin/env bash
# test_constant_memory.sh: the memory of two ranks does not grow: the resident memory of each at step 10,000 is within 1
# % of that at step 1,000, with a save in the background every 50 steps.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "the memory of two ranks" "$reason" && exit 0; fi
several_ranks_here

make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --micro-batch 1 --global-batch 32
    --steps 1000000 --schedule constant
    --checkpoint-every 50 --keep 2 --checkpoint-async on --check-replicas 100)
# at_step N: waits until the log has this step or a later one.
at_step() {
    local last
    while runs "$job"; do
        last=$(tail -n 5 "$out/log.jsonl" 2>/dev/null | sed -n 's/.*"kind":"step","step":\([0-9]*\),.*/\1/p' |
            tail -n 1)
        if [ "${last:-0}" -ge "$1" ]; then return 0; fi
        sleep 0.2
    done
    return 1
}
resident() { local pid; for pid in $(children "$job"); do awk '/^VmRSS:/ { print $2 }' "/proc/$pid/status"; done; }
within_1_percent() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0 && b > 0.99 * a && b < 1.01 * a) }'; }

for zero in 0 1; do
    out=$scratch/run_$zero
    mpirun -np 2 "${train[@]}" --zero $zero --output "$out" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
    check "--zero $zero: 1,000 steps" at_step 1000
    mapfile -t before < <(resident)
    check "--zero $zero: 10,000 steps" at_step 10000
    mapfile -t after < <(resident)
    check "--zero $zero: two ranks" test "${#before[@]} ${#after[@]}" = "2 2"
    for rank in 0 1; do
        check "--zero $zero, process $rank: ${before[rank]} KiB after 1,000 steps, ${after[rank]} KiB after 10,000" \
            within_1_percent "${before[rank]}" "${after[rank]}"
    done
    kill -USR1 $job
    wait $job
    check "--zero $zero: exit code $? at a request to stop" test $? = 75
done
finish
