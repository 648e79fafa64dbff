#!/usr/bin/env bash
# test_clock.sh: tests that a jump of the system's time, forward or back by a day, does not end a run, and changes neither
# --max-time nor the times that it prints. A library in LD_PRELOAD adds the seconds in a file to the time.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

cat >"$scratch/clock.cpp" <<'END'
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

static long seconds_ahead() {
    char text[32] = "";
    const int file = open(getenv("CLOCK_AHEAD"), O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    [[maybe_unused]] const ssize_t bytes = read(file, text, sizeof text - 1);
    close(file);
    return atol(text);
}
extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
    const long result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += seconds_ahead();
    return int(result);
}
extern "C" time_t time(time_t* where) noexcept {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
extern "C" int gettimeofday(timeval* where, void*) noexcept {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    where->tv_sec = now.tv_sec, where->tv_usec = now.tv_nsec / 1000;
    return 0;
}
END
check "a library that moves the clock" "${CXX:-g++}" -std=c++20 -shared -fPIC -o "$scratch/clock.so" "$scratch/clock.cpp"
day=86400
moved=(env LD_PRELOAD="$scratch/clock.so" CLOCK_AHEAD="$scratch/ahead")
jump() { echo "$1" >"$scratch/ahead.new" && mv "$scratch/ahead.new" "$scratch/ahead"; }
jump $day
"${moved[@]}" "$program" --version >/dev/null 2>&1 && on=$("${moved[@]}" date +%s)
check "the library moves the clock by a day" test $((on - $(date +%s))) -gt $((day - 100))

make_shards "$scratch/data" 30000 || fail "no shards"
# A limit of 10 s, of which a busy machine does not take a tenth in a step of 2 ms.
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --threads 1 --steps 100000 --checkpoint-every 100000
       --timeout-step $((10 * slower)) --quiet=0 --log-every 1)
last_step() { sed -n 's/.*"kind":"step","step":\([0-9]*\),.*/\1/p' "$1/log.jsonl" | tail -n 1; }
# steps_more RUN N: the run makes N more steps.
steps_more() { wait_for "$1/log.jsonl" "\"step\":$(($(last_step "$1") + $2)),"; }
# No step of these runs takes a minute. A day in a mean over 20 steps is an hour per step, and 100,000 steps take years.
plausible_steps() { awk -F'"step_ms":' '/"kind":"step"/ { split($2, ms, ","); n++; if (ms[1] < 0 || ms[1] > 6e4) exit 1 } END { exit n < 10 }' "$1/log.jsonl"; }
plausible_etas() { grep -q ' eta ' "$1" && ! grep -qE ' eta (-|.*(days|years))' "$1"; }

# jumps NAME OUT COMMAND...: a run of an hour at most, whose clock jumps by a day forward, and back by two.
jumps() {
    local name=$1 out=$2 ahead
    shift 2
    jump 0
    "$@" --output "$out" --max-time 3600 >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
    check "$name: it trains" wait_for "$out/log.jsonl" '"step":12,'
    for ahead in $day -$day; do
        jump $ahead
        check "$name, the clock is $ahead s ahead: it trains on" steps_more "$out" 40
    done
    kill -USR1 $job
    wait $job
    check "$name: exit code $? at a request to stop" test $? = 75
    check "$name: the request is the only reason to stop" grep -q '^stopped on request (SIGUSR1' "$scratch/job.log"
    check "$name: no error and no warning" test "$(grep -cE '^(error|warning)' "$scratch/job.log")" = 0
    check "$name: the times of the steps" plausible_steps "$out"
    check "$name: the remaining time: $(grep -o 'eta .*' "$scratch/job.log" | tail -n 1)" plausible_etas "$scratch/job.log"
}
jumps "1 process" "$scratch/alone" "${moved[@]}" "${train[@]}"

# --max-time ends a run whose clock has gone back by a day.
jump 0
"${moved[@]}" "${train[@]}" --max-time $((4 * slower)) --output "$scratch/limited" >"$scratch/job.log" 2>&1 </dev/null &
job=$!
wait_for "$scratch/limited/log.jsonl" '"step":12,'
jump -$day
(sleep $((60 * slower)) && kill -9 $job) >/dev/null 2>&1 &
killer=$!
wait $job
check "--max-time, and the clock goes back: exit code $?" test $? = 75
kill $killer 2>/dev/null
check "--max-time, and the clock goes back: the reason" grep -q '^stopped on request (--max-time)' "$scratch/job.log"

# A run that is resumed a day before its checkpoint was saved.
short=("${train[@]}" --steps 20 --checkpoint-every 7)
check "20 steps" "${short[@]}" --output "$scratch/whole"
jump $day
check "13 steps, a day ahead" "${moved[@]}" "${short[@]}" --stop-after 13 --output "$scratch/parts"
jump -$day
check "the rest, a day back" "${moved[@]}" "${short[@]}" --resume --output "$scratch/parts"
check "the log and weights of a run in one part" same_run "$scratch/whole" "$scratch/parts"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "the clock of one rank" "$reason" && finish; fi
several_ranks_here
cat >"$scratch/rank_1" <<END
#!/bin/sh
if [ "\$OMPI_COMM_WORLD_RANK" = 1 ]; then export LD_PRELOAD="$scratch/clock.so" CLOCK_AHEAD="$scratch/ahead"; fi
exec "\$@"
END
chmod +x "$scratch/rank_1"
jumps "2 ranks, and the clock of one jumps" "$scratch/ranks" mpirun -np 2 "$scratch/rank_1" "${train[@]}"
finish
