#!/usr/bin/env bash
# test_checkpoint_async.sh: saves that are written while training goes on give the bytes of saves that training waits for,
# survive kill -9 and a request to stop, and take no memory of their own after the first one. test_parts.sh tests several ranks.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" --layers 3 --heads 4 --channels 128 --seq-len 32 --micro-batch 2
       --val-every 0 --log-every 1000 --quiet --threads 1)

# ---- the same bytes
for async in off on; do
    check "--checkpoint-async $async" "${train[@]}" --steps 12 --checkpoint-every 4 --keep 0 --checkpoint-async $async --output "$scratch/$async"
done
for step in 4 8 12; do check "step $step: the same bytes with on and off" same_run "$scratch/on" "$scratch/off" $step; done
check "the checkpoints of both runs have the same steps" diff <(ls "$scratch/on") <(ls "$scratch/off")
# checkpoint_field RUN STEP FIELD
checkpoint_field() { sed -n "s/.*\"kind\":\"checkpoint\",\"step\":$2,.*\"$3\":\([0-9]*\).*/\1/p" "$1/log.jsonl"; }
check "off: training waits for the whole save" test "$(checkpoint_field "$scratch/off" 4 stall_ms)" = "$(checkpoint_field "$scratch/off" 4 ms)"
check "on: training waits for less" test "$(checkpoint_field "$scratch/on" 4 stall_ms)" -lt "$(checkpoint_field "$scratch/on" 4 ms)"
check "the last save is one that the run waits for" \
    test "$(checkpoint_field "$scratch/on" 12 stall_ms)" = "$(checkpoint_field "$scratch/on" 12 ms)"

# File systems without O_DIRECT: some refuse it at once, others at the first write.
cat >"$scratch/buffered.cpp" <<'END'
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int refuse(int number) {
    if (const int fd = open(getenv("REFUSED"), O_CREAT | O_WRONLY, 0600); fd >= 0) close(fd);
    errno = number;
    return -1;
}

extern "C" int fcntl64(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    const long value = va_arg(list, long);
    va_end(list);
    if (getenv("AT_ONCE") && command == F_SETFL && (value & O_DIRECT)) return refuse(EINVAL);
    return int(syscall(SYS_fcntl, fd, command, value));
}
extern "C" int fcntl(int fd, int command, ...) __attribute__((alias("fcntl64")));

extern "C" ssize_t write(int fd, const void* data, size_t bytes) {
    if (syscall(SYS_fcntl, fd, F_GETFL, 0) & O_DIRECT) return refuse(EINVAL);
    return syscall(SYS_write, fd, data, bytes);
}
END
check "a library without O_DIRECT" "${CXX:-g++}" -std=c++17 -shared -fPIC -D_GNU_SOURCE -o "$scratch/buffered.so" "$scratch/buffered.cpp"
blocks=(--layers 2 --heads 4 --channels 384 --steps 1 --checkpoint-every 1)  # files of more than a block of 16 MiB
check "a save of several blocks" "${train[@]}" "${blocks[@]}" --output "$scratch/direct"
for refused in at_once at_first_write; do
    buffered=(env LD_PRELOAD="$scratch/buffered.so" REFUSED="$scratch/$refused.refused")
    if [ $refused = at_once ]; then buffered+=(AT_ONCE=1); fi
    check "O_DIRECT is refused $refused: trains" "${buffered[@]}" "${train[@]}" "${blocks[@]}" --output "$scratch/$refused"
    check "O_DIRECT is refused $refused" test -e "$scratch/$refused.refused"
    check "O_DIRECT is refused $refused: the same bytes" same_run "$scratch/$refused" "$scratch/direct" 1
done

# A validation that ends before or after the save of its step: its loss is in the checkpoint, also if there are more validations
# during the save. Every fsync takes 0.1 s, and a save more than 1 s.
echo 'extern "C" int usleep(unsigned); extern "C" int fsync(int) { usleep(100000); return 0; }' >"$scratch/slow.cpp"
check "a library with a slow fsync" "${CXX:-g++}" -shared -fPIC -o "$scratch/slow.so" "$scratch/slow.cpp"
for every in 1 4; do
    check "with a validation every $every steps" env LD_PRELOAD="$scratch/slow.so" "${train[@]}" --val-data "$scratch/data/val_*.bin" \
        --val-every $every --val-batches 1 --steps 9 --checkpoint-every 4 --checkpoint-async on --output "$scratch/val$every"
    for step in 4 8; do
        loss=$(sed -n "s/.*\"kind\":\"val\",\"step\":$step,\"val_loss\":\([0-9.]*\).*/\1/p" "$scratch/val$every/log.jsonl")
        saved=$(sed -n 's/.*"val_loss": \([0-9.]*\).*/\1/p' "$scratch/val$every/step_00000$step/trainer.json")
        check "step $step: trainer.json has the loss $loss of its validation: $saved" \
            awk -v a="$loss" -v b="$saved" 'BEGIN { exit !(a > 0 && a - b < 1e-4 && b - a < 1e-4) }'
    done
done
# The save of step 8 begins while that of step 4 is written, which takes more than 1 s.
save_ms=$(checkpoint_field "$scratch/val4" 8 ms) stall_ms=$(checkpoint_field "$scratch/val4" 8 stall_ms)
check "the time of a save ($save_ms ms) has no wait for the save before ($stall_ms ms)" test "$save_ms" -lt $((stall_ms + 900))
# The second step first sleeps for 6 s. The save of the first step takes much less.
check "a save that is complete before the next step" "${program}_faults" "${train[@]:1}" --steps 2 --checkpoint-every 1 \
    --checkpoint-async on --fault slow:rank=0,step=1,times=1,ms=6000 --output "$scratch/long"
check "the log has the checkpoint when it is complete, not when the next step is" \
    test "$(sed -n 's/.*"kind":"\(step\|checkpoint\)".*/\1/p' "$scratch/long/log.jsonl" | tr '\n' ' ')" = "step checkpoint step checkpoint "

# ---- kill -9 and a request to stop, at a moment in which a save is in flight
# in_flight RUN: waits for a file of a save that is being written, after a checkpoint is there.
in_flight() {
    local tries
    for ((tries = 0; tries < 2000; tries++)); do
        if [ -e "$1/latest" ] && compgen -G "$1/step_*.tmp/*" >/dev/null; then return 0; fi
        sleep 0.005
    done
    return 1
}
for attempt in 1 2 3; do
    "${train[@]}" --steps 1000000 --checkpoint-every 3 --keep 2 --checkpoint-async on --output "$scratch/killed$attempt" &
    run=$!
    check "kill $attempt: a save is in flight" in_flight "$scratch/killed$attempt"
    kill -9 $run
    wait $run 2>/dev/null
    latest=$(cat "$scratch/killed$attempt/latest")
    check "kill $attempt: resumes from $latest or a newer one" "${train[@]}" --resume --stop-after 1 --output "$scratch/killed$attempt"
    resumed=$(sed -n 's/.*"resumed_at":\([0-9]*\).*/\1/p' "$scratch/killed$attempt/log.jsonl" | tail -1)
    check "kill $attempt: resumed at step $resumed" test "${resumed:-0}" -ge "$((10#${latest#step_}))"
done

"${train[@]}" --steps 1000000 --checkpoint-every 3 --checkpoint-async on --output "$scratch/stopped" &
run=$!
check "a request to stop: a save is in flight" in_flight "$scratch/stopped"
kill -TERM $run
wait $run
check "a request to stop: exit code 75" test $? = 75
check "a request to stop: no part of a save is left" test -z "$(compgen -G "$scratch/stopped/*.tmp")"
last=$(sed -n 's/.*"kind":"step","step":\([0-9]*\).*/\1/p' "$scratch/stopped/log.jsonl" | tail -1)
check "a request to stop: the last complete step is saved" test "$(cat "$scratch/stopped/latest")" = "step_$(printf '%06d' $((last + 1)))"

# With a slow fsync a save is in flight for more than 1 s. On a busy machine it may be the one of step 200.
slow_run=(env LD_PRELOAD="$scratch/slow.so" "${train[@]}" --quiet=0 --steps 1000000 --checkpoint-every 100 --checkpoint-async on)
# first_in_flight RUN: waits for a file of the first save.
first_in_flight() {
    local tries
    for ((tries = 0; tries < 20000; tries++)); do
        if compgen -G "$1/step_*.tmp/*" >/dev/null; then return 0; fi
        sleep 0.005
    done
    return 1
}
"${slow_run[@]}" --output "$scratch/waits" >"$scratch/waits.log" 2>&1 &
run=$!
check "a slow save: it is in flight" first_in_flight "$scratch/waits"
kill -TERM $run
wait $run
check "a slow save: exit code 75" test $? = 75
check "a slow save: the run says that it waits" grep -qx "the save of step [0-9]*00 is still being written; the run waits for it" "$scratch/waits.log"

"${slow_run[@]}" --output "$scratch/moved" >"$scratch/moved.log" 2>&1 &
run=$!
check "--output is moved and the run stopped: a save is in flight" first_in_flight "$scratch/moved"
kill -STOP $run
mv "$scratch/moved" "$scratch/elsewhere"
kill -TERM $run
kill -CONT $run
wait $run
check "--output is moved and the run stopped: exit code 74" test $? = 74
check "--output is moved and the run stopped: a warning about the save in flight" \
    grep -q "^warning: the checkpoint of step [0-9]*00 was not saved: .*; the last step is saved next$" "$scratch/moved.log"
check "--output is moved and the run stopped: the error names the step that is lost" \
    grep -q "^error: the checkpoint of step [0-9]* was not saved: .* is moved back; there is no checkpoint$" "$scratch/moved.log"

# ---- memory
# saves RUN: number of complete saves.
saves() { grep -c '"kind":"checkpoint"' "$1/log.jsonl"; }
# resident PID: the most memory that it has had, in KiB. A save in flight has blocks that another moment does not have.
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
"${train[@]}" --steps 1000000 --checkpoint-every 2 --keep 1 --checkpoint-async on --output "$scratch/many" &
run=$!
check "memory: 5 saves" saved "$scratch/many" 5
before=$(resident $run)
check "memory: 40 saves" saved "$scratch/many" 40
after=$(resident $run)
kill -9 $run
wait $run 2>/dev/null
check "memory: $before KiB after 5 saves, $after KiB after 40" within "$after" "$before"

# Under a limit that has no room for the copy, `auto` waits for each save, and says so.
limited=(bash -c 'ulimit -v "$0" && exec "$@"')
large=(--layers 2 --heads 8 --channels 512 --vocab-size 50257 --steps 3 --checkpoint-every 1 --keep 1)
noisy=("${train[@]/--quiet/--quiet=false}")
"${limited[@]}" 1000000 "${noisy[@]}" "${large[@]}" --output "$scratch/small" >"$scratch/small.log" 2>&1
check "auto without memory for a copy trains" test $? = 0
check "auto without memory for a copy says so" grep -q "training waits for each checkpoint: a copy of the state takes" "$scratch/small.log"
refused "on without memory for a copy" 1 "--checkpoint-async on: a copy of the state takes" "${limited[@]}" 1000000 "${train[@]}" "${large[@]}" --checkpoint-async on \
    --output "$scratch/none"

finish
