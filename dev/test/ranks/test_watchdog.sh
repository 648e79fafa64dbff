#!/usr/bin/env bash
# test_watchdog.sh: tests that a run in which a rank or a disk hangs ends with exit code 124 within --timeout plus 10 s,
# that each rank that is alive prints where it is, and that no process is left.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

export OMP_NUM_THREADS=1
make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --micro-batch 1 --global-batch 48)
timeout=$((3 * slower))  # seconds
# shellcheck disable=SC2206
endless=("${train[@]}" --steps 1000000 --checkpoint-every 1000000 --timeout $timeout)
start() {
    "$@" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# ranks_left: the processes whose command line names $out.
ranks_left() {
    local pid
    for pid in /proc/[0-9]*; do
        tr '\0' '\n' 2>/dev/null <"$pid/cmdline" | grep -qxF -- "$out" || continue
        if runs "${pid#/proc/}"; then echo "${pid#/proc/}"; fi
    done
}
nobody_left() {
    for _ in $(seq 100); do if [ -z "$(ranks_left)" ]; then return 0; fi; sleep 0.05; done
    echo "left: $(ranks_left)"
    return 1
}
# rank_process RANK: the process of this rank of the job in $out.
rank_process() {
    local pid
    for pid in $(ranks_left); do
        if tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxE "(OMPI_COMM_WORLD_)?RANK=$1"; then echo "$pid"; fi
    done
}
line="no progress for $timeout s \\(--timeout\\): .* in collective [0-9]+; look at the ranks that print no such line"
# hangs NAME RANKS...: the job has ended as watchdogs end it, and just these ranks have printed where they are.
hangs() {
    local name=$1 rank
    shift
    check "$name: all end in time" ends $((timeout + 10))
    check "$name: exit code $status after $seconds s" test "$status" = 124
    for rank in "$@"; do
        check "$name: rank $rank prints where it is" \
            grep -qE "error: rank $rank on $(hostname): $line" "$scratch/job.log"
    done
    check "$name: no other rank does" test "$(grep -c 'no progress' "$scratch/job.log")" = $#
    check "$name: no process is left" nobody_left
}

# ---- a single process: a disk that hangs
cat >"$scratch/hangs.cpp" <<'END'
extern "C" unsigned sleep(unsigned);
extern "C" int fsync(int) { for (;;) sleep(1000); }
END
check "a library with calls that hang" "${CXX:-g++}" -shared -fPIC -o "$scratch/hangs.so" "$scratch/hangs.cpp"
refused "a disk that hangs" 124 "no progress for $timeout s (--timeout): " \
    env LD_PRELOAD="$scratch/hangs.so" "${endless[@]}" --output "$scratch/hung_disk"

# ---- three CPU ranks, one of them stopped
reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks that hang" "$reason" && finish; fi
several_ranks_here
out=$scratch/stopped
check "a run of 5 steps" ranks 3 "${endless[@]}" --output "$out" --stop-after 5
start mpirun -np 3 "${endless[@]}" --output "$out" --resume
check "the ranks train" wait_for "$out/log.jsonl" '"step":12,'
kill -STOP "$(rank_process 2)"
hangs "rank 2 is stopped" 0 1
check "a line names the step" grep -qE "\(--timeout\): step [0-9]+, " "$scratch/job.log"
check "a run that the watchdog ended continues" ranks 3 "${endless[@]}" --output "$out" --resume --stop-after 4
check "the undisturbed run" ranks 3 "${endless[@]}" --output "$scratch/undisturbed" --stop-after 9
check "the continued run has the same bits" same_run "$out" "$scratch/undisturbed" 9

# ---- generate on two ranks
out=$scratch/undisturbed
start mpirun -np 2 "$program" generate --init "$out" --tensor-parallel 2 --prompt the \
    --num-samples 1000000000 --timeout $timeout
check "generate: the ranks work" wait_for "$scratch/job.log" '^---'
kill -STOP "$(rank_process 1)"
hangs "generate: rank 1 is stopped" 0

# ---- two GPUs in the emulator. Without a launcher each rank must end by itself.
emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "a GPU rank that is stopped" "$emulated is not built" && finish; fi
take_ports
out=$scratch/gpus
gpu_rank() {
    exec env SIMT_DEVICES=2 RANK="$1" LOCAL_RANK="$1" WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
        MASTER_PORT="$port" "$emulated" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --layers 1 --heads 1 \
        --micro-batch 1 --global-batch 0 --steps 1000000 --checkpoint-every 100000 --precision fp32 --autotune off \
        --output "$out" --timeout $timeout
}
gpu_rank 1 >/dev/null 2>&1 </dev/null &
other=$!
start gpu_rank 0
check "2 GPUs train" wait_for "$out/log.jsonl" '"step":3,'
kill -STOP $other
check "a GPU rank is stopped: the other ends in time" ends $((timeout + 10))
check "a GPU rank is stopped: exit code $status after $seconds s" test "$status" = 124
check "a GPU rank is stopped: the other prints where it is" \
    grep -qE "error: rank 0 on $(hostname): $line" "$scratch/job.log"
kill -9 $other && wait $other 2>/dev/null
finish
