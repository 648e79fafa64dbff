#!/usr/bin/env bash
# test_watchdog.sh: tests that a run in which a rank hangs ends with exit code 124, names the rank, and leaves no process: a
# stopped rank, also at its end, a rank that waits for its data, a cable that is cut, and a stopped GPU rank in the emulator. A
# process that is stopped and continued is not ended.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --threads 1 --micro-batch 1 --global-batch 48)
# Without checkpoints at which a rank could be stopped: they have another limit. saved_run makes one before.
endless=("${train[@]}" --steps 1000000 --checkpoint-every 1000000)
deadline=$((2 * slower))  # seconds
saved_run() { "$@" --stop-after 5 && test -e "$out/step_000005"; }
start() {
    : >"$scratch/job.log"  # now, so that nobody finds the lines of the job before
    "$@" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# rank_process RANK: the process of this rank of the job in $out.
rank_process() {
    local pid rank
    for pid in /proc/[0-9]*; do
        if ! tr '\0' '\n' 2>/dev/null <"$pid/cmdline" | grep -qxF -- "$out" || [ "${pid#/proc/}" = "$job" ]; then continue; fi
        rank=$(tr '\0' '\n' 2>/dev/null <"$pid/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
        if [ "$rank" = "$1" ]; then echo "${pid#/proc/}"; fi
    done
}
# ranks_left: the processes whose command line names $out.
ranks_left() {
    local pid
    for pid in /proc/[0-9]*; do
        if tr '\0' '\n' 2>/dev/null <"$pid/cmdline" | grep -qxF -- "$out" && runs "${pid#/proc/}"; then echo "${pid#/proc/}"; fi
    done
}
nobody_left() {
    for _ in $(seq 100); do if [ -z "$(ranks_left)" ]; then return 0; fi; sleep 0.05; done
    echo "left: $(ranks_left)"
    return 1
}
says() { grep -q -- "$1" "$scratch/job.log"; }
errors() { grep -c '^error: ' "$scratch/job.log"; }
# in_time NAME [STEP]: call it just after a rank was stopped. The sentence comes within 1 s of the deadline. Until the others
# wait for the stopped rank they work on, for less than STEP seconds; on the CPU a step is too short to count.
in_time() {
    local begin=$EPOCHREALTIME after
    wait_for "$scratch/job.log" '^error: '
    after=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')
    check "$1: the sentence comes $after s after the stop, with a limit of $deadline s" \
        awk -v s="$after" -v most=$((deadline + slower + ${2:-0} * slower)) 'BEGIN { exit !(s < most) }'
}
# hangs NAME SECONDS RANK TEXT: the job ends as a watchdog ends it, and RANK is named with TEXT.
hangs() {
    check "$1: all end in time" ends "$2"
    check "$1: exit code $status after $seconds s" test $status = 124
    check "$1: the sentence: $(grep -am1 '^error: ' "$scratch/job.log")" says "^error: .*no progress in .*rank $3 $4"
    check "$1: one sentence" test "$(errors)" = 1
    check "$1: no process is left" nobody_left
}
explains() { "$program" explain "$1" | tee "$scratch/explained" | tail -n 1 | grep -qE -- "$2"; }

# ---- a single process
out=$scratch/alone
start "${endless[@]}" --output "$out" --timeout-step $deadline
check "1 process trains" wait_for "$out/log.jsonl" '"step":3,'
kill -STOP "$job"
sleep $((deadline + 1))
kill -CONT "$job"
lines=$(wc -l <"$out/log.jsonl")
check "a process that was stopped for longer than the deadline continues" \
    wait_for "$out/log.jsonl" "\"step\":$((lines + 20)),"
kill -INT "$job" 2>/dev/null
kill -TERM "$job"
wait "$job"
check "a process that was stopped: exit code" test $? = 75
check "a process that was stopped has written no report" test ! -e "$out/errors"

# The loader waits up to 10 s for a shard that is missing.
out=$scratch/no_data
cp -r "$scratch/data" "$scratch/data_of_one"
start "${endless[@]}" --train-data "$scratch/data_of_one/train_*.bin" --output "$out" --timeout-step 1
check "1 process trains before its data are gone" wait_for "$out/log.jsonl" '"step":3,'
mv "$scratch/data_of_one" "$scratch/data_gone"
check "1 process without data: all end in time" ends 20
check "1 process without data: exit code $status" test $status = 124
check "1 process without data: $(grep -am1 '^error: ' "$scratch/job.log")" \
    says '^error: no progress in step [0-9]* for 1 s (--timeout-step): it was last seen in data of micro-step'
check "1 process without data: explain" explains "$out" '^it was last seen in data of micro-step'
# A disk that hangs: neither run.json nor the report can be written.
cat >"$scratch/hangs.cpp" <<'END'
extern "C" unsigned sleep(unsigned);
extern "C" int fsync(int) { for (;;) sleep(1000); }
extern "C" int rename(const char*, const char*) { for (;;) sleep(1000); }
END
check "a library with calls that hang" "${CXX:-g++}" -shared -fPIC -o "$scratch/hangs.so" "$scratch/hangs.cpp"
start env LD_PRELOAD="$scratch/hangs.so" "${endless[@]}" --output "$scratch/hung_disk" --timeout-start 2
check "a disk that hangs: the process ends in time" ends 8
check "a disk that hangs: exit code $status after $seconds s" test $status = 124
check "a disk that hangs: $(grep -am1 '^error: ' "$scratch/job.log")" \
    says '^error: no progress in the start for 2 s (--timeout-start)'
# A slow disk: 0.15 s for each MiB of a checkpoint. It takes longer than --timeout-start to verify, but no piece does.
cat >"$scratch/slow.cpp" <<'END'
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <unistd.h>
static bool slow(int file) {
    char name[4096];
    const ssize_t got = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), name, sizeof name);
    return got > 0 && std::string(name, size_t(got)).ends_with(".safetensors");
}
extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t at) {
    static auto real = reinterpret_cast<ssize_t (*)(int, void*, size_t, off_t)>(dlsym(RTLD_NEXT, "pread"));
    if (bytes > 500000 && slow(file)) usleep(getenv("VERY_SLOW") ? 1 << 30 : 150000);
    return real(file, to, bytes, at);
}
END
check "a library with a slow disk" "${CXX:-g++}" -std=c++20 -shared -fPIC -o "$scratch/slow.so" "$scratch/slow.cpp"
out=$scratch/slow_disk
large=("${train[@]}" --channels 256 --warmup 0 --steps 1 --output "$out" --timeout-start "$slower")
check "a slow disk: a run of 1 step" "${large[@]}"
check "a slow disk: a checkpoint that takes longer than the limit to verify is resumed" \
    env LD_PRELOAD="$scratch/slow.so" "${large[@]}" --resume --steps 2
refused "a slow disk: a piece takes longer than the limit" 124 "no progress in the start for $slower s (--timeout-start)" \
    env LD_PRELOAD="$scratch/slow.so" VERY_SLOW=1 "${large[@]}" --resume --steps 3
refused "explain without reports" 66 "has no errors/rank_" "$program" explain "$scratch/alone"
refused "explain without a directory" 2 "explain needs one DIR" "$program" explain
cut=$scratch/cut_short
mkdir "$cut" && head -c 100 "$out/errors/rank_0.json" >"$cut/rank_0.json"
refused "explain with a damaged report" 65 "$cut/rank_0.json" "$program" explain "$cut"

# eval and generate in one process: no data, and a disk that hangs
model=$scratch/alone
mkdir "$scratch/many"
for i in $(seq 300); do cp "$scratch/data/train_000001.bin" "$scratch/many/train_000$i.bin"; done
cp -r "$scratch/many" "$scratch/many_of_one"
start "$program" eval --init "$model" --val-data "$scratch/many_of_one/train_*.bin" --micro-batch 1 --threads 1 --timeout-step 1
check "eval in 1 process works before its data are gone" wait_for "$scratch/job.log" batches
mv "$scratch/many_of_one" "$scratch/many_gone"
check "eval in 1 process without data: all end in time" ends 20
check "eval in 1 process without data: exit code $status" test $status = 124
check "eval in 1 process without data: $(grep -am1 '^error: ' "$scratch/job.log")" \
    says '^error: no progress in the evaluation for 1 s (--timeout-step): it was last seen in batch [0-9]*$'
# A pipe that is full when eval writes its first progress line.
mkfifo "$scratch/full" && exec 9<>"$scratch/full"
dd if=/dev/zero of="$scratch/full" bs=4096 count=16 oflag=nonblock status=none
"$program" eval --init "$model" --val-data "$scratch/many/train_*.bin" --micro-batch 1 --threads 1 --timeout-step 1 >"$scratch/text" 2>&9 &
job=$!
sleep $((4 * slower))
check "eval in 1 process whose reader pauses is not ended" runs "$job"
check "eval in 1 process whose reader pauses waits for it" test ! -s "$scratch/text"
kill -9 "$job" && wait "$job" 2>/dev/null
exec 9>&-
cat >"$scratch/hangs_in_open.cpp" <<'END'
#include <fcntl.h>
#include <string>
extern "C" unsigned sleep(unsigned);
extern "C" int open(const char* path, int flags, ...) {
    while (std::string(path).ends_with("/model.safetensors")) sleep(1000);
    return openat(AT_FDCWD, path, flags, 0600);
}
END
check "a library with an open that hangs" \
    "${CXX:-g++}" -std=c++20 -shared -fPIC -o "$scratch/hangs_in_open.so" "$scratch/hangs_in_open.cpp"
for command in "generate --max-tokens 1" "eval --val-data $scratch/data/val_*.bin"; do
    # shellcheck disable=SC2086 # words
    start env LD_PRELOAD="$scratch/hangs_in_open.so" "$program" ${command%% *} --init "$model" ${command#* } --timeout-start 2
    check "${command%% *} from a disk that hangs: the process ends in time" ends 8
    check "${command%% *} from a disk that hangs: exit code $status after $seconds s" test $status = 124
    check "${command%% *} from a disk that hangs: $(grep -am1 '^error: ' "$scratch/job.log")" \
        says '^error: no progress in the start for 2 s (--timeout-start): it was last seen in verification of a checkpoint$'
done
refused "a limit that the watchdog cannot keep" 2 "--timeout-step 1e-09 must be 0, or at least 1" \
    "$program" eval --init "$model" --val-data "$scratch/data/val_*.bin" --timeout-step 1e-9

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks that hang" "$reason" && finish; fi
several_ranks_here

# ---- three ranks, one of them stopped
for launcher in "mpirun -np 3" "--ranks 3"; do
    out=$scratch/stopped_${launcher:0:3}
    stopped=$([ "$launcher" = "--ranks 3" ] && echo 0 || echo 2)  # rank 0 holds the lock, and usually prints
    command=("${endless[@]}" --output "$out" --timeout-step "$deadline")
    if [ "$launcher" = "--ranks 3" ]; then command+=(--ranks 3); else command=(mpirun -np 3 "${command[@]}"); fi
    check "$launcher: a run of 5 steps" saved_run "${command[@]}"
    start "${command[@]}" --resume
    check "$launcher: the ranks train" wait_for "$out/log.jsonl" '"step":12,'
    kill -STOP "$(rank_process $stopped)"
    in_time "$launcher, rank $stopped stopped"
    hangs "$launcher, rank $stopped stopped" $((deadline + 8)) $stopped "on $(hostname) did not answer"
    check "$launcher: the reports of the others" test "$(find "$out/errors" -name 'rank_?.json' | wc -l)" = 2
    check "$launcher: explain names the rank" explains "$out" "rank $stopped on $(hostname) did not answer"
    check "$launcher: explain has a line for each report" test "$(grep -c '^rank [0-9] *on ' "$scratch/explained")" = 2
done
# The same bits as a run that was never stopped.
check "a run after the watchdog continues" ranks 3 "${endless[@]}" --output "$out" --resume --stop-after 4
check "the undisturbed run" ranks 3 "${endless[@]}" --output "$scratch/undisturbed" --stop-after 9
check "the continued run has the same bits" same_run "$out" "$scratch/undisturbed" 9
check "the continued run has removed the reports" test ! -e "$out/errors"

# ---- --fault stops rank 0 just before it saves. The other ranks wait for --timeout-checkpoint, and their message says so. With
# --zero 1 the other ranks take part in the save. A rank that is stopped in a validation has a limit of its own.
with_faults=${program}_faults
if [ ! -x "$with_faults" ]; then
    skip "a rank that is stopped while it saves" "$with_faults is not built"
else
    for zero in 0 1; do
        out=$scratch/stopped_save_$zero
        start mpirun -np 3 "$with_faults" "${train[@]:1}" --steps 1000 --checkpoint-every 5 --checkpoint-async off --zero $zero --output "$out" \
            --timeout-step $deadline --timeout-checkpoint $((2 * deadline)) --fault hang:rank=0,phase=save,step=5
        hangs "--zero $zero, rank 0 stopped while it saves" $((2 * deadline + 8)) 0 "on $(hostname) did not answer"
        phase="no progress in step 5 for $((2 * deadline)) s (--timeout-checkpoint, because rank 0 saves before it)"
        if [ $zero = 1 ]; then phase="no progress in the checkpoint of step 5 for $((2 * deadline)) s (--timeout-checkpoint)"; fi
        check "--zero $zero, rank 0 stopped while it saves: the phase is named" says "$phase"
    done
    out=$scratch/stopped_validation
    start mpirun -np 3 "$with_faults" "${endless[@]:1}" --val-data "$scratch/data/val_*.bin" --val-every 5 --output "$out" \
        --timeout-step 0 --timeout-validation $deadline --fault hang:rank=1,phase=validation,step=5
    hangs "rank 1 stopped in a validation" $((deadline + 8)) 1 "on $(hostname) did not answer"
    check "rank 1 stopped in a validation: the phase is named" \
        says "no progress in the validation of step 5 for $deadline s (--timeout-validation)"
fi

# ---- eval and generate: with no --output, the reports go into a folder of their own
export TMPDIR=$scratch/tmp
mkdir "$TMPDIR"
limits=(--timeout-start $((20 * slower)) --timeout-step "$deadline")
evaluate=("$program" eval --init "$scratch/undisturbed" --micro-batch 1 --threads 1)
generate=("$program" generate --init "$scratch/undisturbed" --tensor-parallel 2 --threads 1 --prompt the)
check "eval on 2 ranks ends" "${evaluate[@]}" --val-data "$scratch/data/train_*.bin" --batches 20 "${limits[@]}" --ranks 2
check "generate on 2 ranks ends" "${generate[@]}" "${limits[@]}" --max-tokens 20 --ranks 2
check "eval and generate leave no folder of reports" test -z "$(find "$TMPDIR" -name 'train_gpt2_*')"
evaluate+=(--val-data "$scratch/many/train_*.bin" "${limits[@]}")
generate+=(--num-samples 1000000000 "${limits[@]}")
# rank_stops NAME PHASE PROCESS [STEP]: stops this process of the job, which is its rank 1. STEP: see in_time.
rank_stops() {
    check "$1: the ranks work" test -n "$3"
    kill -STOP "$3"
    in_time "$1, a rank stopped" "${4:-0}"
    hangs "$1, a rank stopped" $((deadline + 8)) 1 "on $(hostname) did not answer"
    check "$1: the sentence names the phase" says "no progress in the $2 for "
    check "$1: explain names the rank" explains "$(find "$TMPDIR" -name 'train_gpt2_*')" "rank 1 on $(hostname) did not answer"
    rm -rf "$TMPDIR"/train_gpt2_*
}
out=$scratch/undisturbed  # for rank_process
start mpirun -np 2 "${evaluate[@]}"
rank_stops "eval by mpirun" evaluation "$(wait_for "$scratch/job.log" batches && rank_process 1)"
start "${evaluate[@]}" --ranks 2
rank_stops "eval --ranks 2" evaluation "$(wait_for "$scratch/job.log" batches && rank_process 1)"
# A sentence in the file of the text might not begin a line.
start_writing() {
    "$@" 2>"$scratch/job.log" >"$scratch/text" </dev/null &
    job=$!
}
start_writing "${generate[@]}" --ranks 2
rank_stops "generate --ranks 2" generation "$(wait_for "$scratch/text" '^---' && rank_process 1)"

# ---- a reader that pauses for longer than the limit: the lines of 2,000 steps are more than a pipe holds
"${train[@]/--quiet/--quiet=false}" --steps 2000 --log-every 1 --checkpoint-every 0 --timeout-step $deadline --output "$scratch/read" 2>&1 |
    { sleep $((deadline + 4)) && cat >"$scratch/read.log"; }
check "a run whose reader pauses is not ended" test "${PIPESTATUS[0]}" = 0
check "a run whose reader pauses has waited for it" awk -v s=$deadline -F'"step_ms":' '
    /"kind":"step"/ { split($2, ms, ","); if (ms[1] > most) most = ms[1] } END { exit !(most > 1000 * s) }' "$scratch/read/log.jsonl"

# ---- a rank that waits for its data: its pattern is the same, but its folder is its own
out=$scratch/late
mkdir "$scratch/in0" "$scratch/in1"
for rank in 0 1; do cp -r "$scratch/data" "$scratch/in$rank/data"; done
start mpirun -np 2 sh -c "cd '$scratch'/in\$OMPI_COMM_WORLD_RANK && exec \"\$@\"" sh "${endless[@]}" \
    --train-data 'data/train_*.bin' --global-batch 32 --output "$out" --timeout-step $deadline
check "a rank with data of its own trains" wait_for "$out/log.jsonl" '"step":12,'
mv "$scratch/in1/data" "$scratch/in1/gone"
hangs "a rank without data" $((deadline + 8)) 1 "on $(hostname) never entered it; it was last seen in data of micro-step"

# ---- a restart by --max-restarts
out=$scratch/restarted
check "--max-restarts: a run of 5 steps" saved_run "${endless[@]}" --output "$out" --ranks 2 --global-batch 32
start "${endless[@]}" --resume --output "$out" --timeout-step $deadline --ranks 2 --global-batch 32 --max-restarts 1
check "--max-restarts: the ranks train" wait_for "$out/log.jsonl" '"step":12,'
kill -STOP "$(rank_process 1)"
check "--max-restarts: a line says why" wait_for "$scratch/job.log" \
    '^restart 1 of 1 in 2 s: mpirun ended with exit code 124; .*step_000005$'
resumed_twice() {
    for _ in $(seq $((1000 * slower))); do
        if [ "$(grep -c '"resumed_at":5' "$out/log.jsonl")" = 2 ]; then return 0; fi
        sleep 0.02
    done
    return 1
}
check "--max-restarts: the ranks continue" resumed_twice
kill -TERM "$job"
check "--max-restarts: all end" ends 10

# ---- a rank that is stopped when all others have ended: only the process that starts the ranks can notice it
cat >"$scratch/end.cpp" <<'END'
#include <cstdlib>
#include <cstring>
#include <signal.h>
__attribute__((destructor)) static void stop() {
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && strcmp(rank, "1") == 0) raise(SIGSTOP);
}
END
check "a library that stops rank 1 at its end" "${CXX:-g++}" -shared -fPIC -o "$scratch/end.so" "$scratch/end.cpp"
out=$scratch/late
start env LD_PRELOAD="$scratch/end.so" "${train[@]}" --steps 3 --ranks 2 --global-batch 32 --output "$out"
check "stopped at the end: all end" ends 25
check "stopped at the end: exit code $status" test $status = 124
check "stopped at the end: one sentence" says '^error: 1 rank is stopped and cannot end, and all others have ended; it is killed$'
check "stopped at the end: no process is left" nobody_left
check "stopped at the end: the run is complete" "$program" verify "$out/step_000003"

# ---- a cable: mpirun notices it long before the watchdog. test_hosts.sh tests that the ranks notice it, too.
reason=$(no_hosts_because)
if mpirun --version | grep -q 'Open MPI) 5'; then reason="the mpirun of Open MPI 5 ends with exit code 0"; fi
if [ -n "$reason" ]; then
    skip "a cable that is cut" "$reason"
else
    export CLUSTER=w$$n CLUSTER_SUBNET=10.78.0
    trap 'if is_main_shell; then dev/test/ranks/cluster.sh down 2; rm -rf "$scratch"; fi' EXIT
    out=$scratch/cable
    check "cluster.sh makes 2 hosts" dev/test/ranks/cluster.sh up 2
    start dev/test/ranks/cluster.sh run 2 1 "${endless[@]}" --global-batch 32 --output "$out"
    check "a cable: 2 hosts train" wait_for "$out/log.jsonl" '"step":12,'
    dev/test/ranks/cluster.sh cut "${CLUSTER}1"
    check "a cable that is cut: mpirun ends in 15 s" ends 15
    check "a cable that is cut: exit code $status after $seconds s" test $status = 205
    for _ in $(seq 100); do if nobody_inside 2; then break; fi; sleep 0.1; done
    check "a cable that is cut: no process is left: $(inside 2)" nobody_inside 2
    dev/test/ranks/cluster.sh down 2
fi

# ---- two GPUs in the emulator
emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "a GPU rank that is stopped" "build/release/emulator/train_gpt2cu is not built" && finish; fi
export SIMT_DEVICES=2
deadline=$((5 * slower))  # the emulator takes up to a second for a step on a busy machine
out=$scratch/gpus
start "$emulated" --train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384 --seq-len 16 \
    --micro-batch 1 --global-batch 0 --steps 1000000 --checkpoint-every 100000 --threads 1 --precision fp32 --autotune off --quiet \
    --gpus 2 --output "$out" --timeout-step $deadline
check "2 GPUs train" wait_for "$out/log.jsonl" '"step":3,'
kill -STOP "$(children "$job" | tail -n 1)"
in_time "a GPU rank that is stopped" 1
hangs "a GPU rank that is stopped" $((deadline + 5)) 1 "on $(hostname) did not answer"
limits=(--timeout-start $((20 * slower)) --timeout-step "$deadline")
start_writing "$emulated" generate --init "$scratch/undisturbed" --gpus 2 --tensor-parallel 2 --precision fp32 --threads 1 --prompt the \
    --num-samples 1000000000 --max-tokens 6 "${limits[@]}"
out=$scratch/undisturbed
rank_stops "generate --gpus 2" generation "$(wait_for "$scratch/text" '^---' && children "$job" | tail -n 1)" 1
finish
