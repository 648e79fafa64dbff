#!/usr/bin/env bash
# test_ranks_option.sh: tests --ranks N, which starts CPU ranks by mpirun: the same bits as mpirun -np N, signals, a killed rank, a
# killed parent process, a restart, and refused starts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "--ranks" "$reason" && exit 0; fi
make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --threads 1 --steps 4 --checkpoint-every 4)
endless=("${train[@]}" --steps 1000000 --checkpoint-every 100000)

start() {
    : >"$scratch/job.log"  # now, so that nobody finds the lines of the job before
    "${interruptible[@]}" "$@" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# they_train NAME: waits until the job trains into $out. Sets processes: mpirun and the ranks.
they_train() {
    check "$1: the ranks train" wait_for "$out/log.jsonl" '"step":3,'
    processes=("$(children "$job")")
    mapfile -t -O 1 processes < <(children "${processes[0]}")
}
# job_ends SECONDS: the job ends in time and leaves none of its processes. Sets status. After twice the time the job is killed.
job_ends() {
    local begin=$EPOCHREALTIME watchdog
    (sleep $((2 * $1 * slower)) && kill -9 "$job") >/dev/null 2>&1 &
    watchdog=$!
    wait "$job" 2>/dev/null
    status=$?
    kill $watchdog
    awk -v a="$begin" -v b="$EPOCHREALTIME" -v most="$(($1 * slower))" 'BEGIN { exit !(b - a < most) }' && nobody_left 2
}
# nobody_left SECONDS: none of the processes is left after that time.
nobody_left() {
    local pid
    for _ in $(seq $((20 * $1))); do
        for pid in "${processes[@]}"; do if runs "$pid"; then sleep 0.05 && continue 2; fi; done
        return 0
    done
    echo "process $pid is left"
    return 1
}

check "--ranks 2" "${train[@]}" --ranks 2 --output "$scratch/option"
several_ranks_here
check "mpirun -np 2" ranks 2 "${train[@]}" --output "$scratch/mpirun"
check "--ranks 2 gives the same bits as mpirun -np 2" same_run "$scratch/mpirun" "$scratch/option" 4
check "--ranks 2 starts two ranks" grep -q '"world_size":2' "$scratch/option/log.jsonl"
check "--ranks 1 is a single process" test "$("$program" --print-launch --ranks 1)" = "single process on $(hostname)"
check "--print-launch with --ranks 2" test "$("$program" --print-launch --ranks 2 | tail -1)" \
    = "mpirun, rank 1 of 2, local rank 1 of 2 on $(hostname): joins the others by MPI"
check "plan --ranks 2 plans for 2 ranks" grep -q '^batch .* x 2 ranks x' <("$program" plan "${tiny[@]}" --ranks 2)

more=$(($(nproc) + 1))
"${train[@]}" --ranks $more --micro-batch 1 --global-batch 0 --quiet=0 --output '' >"$scratch/out" 2>&1
check "more ranks than cores: a note" grep -q "^note: --ranks $more on $(nproc) core.*slower than --ranks $(nproc)$" "$scratch/out"
check "--ranks 2 with a value that is a colon" "${train[@]}" --ranks 2 --sample-prompt : -o : -o "$scratch/colon"
check "--ranks 2 with a value that is a colon: the value" grep -q '"sample-prompt":":"' "$scratch/colon/log.jsonl"

# mpirun would crash if it wrote into the closed pipe.
bash -c '"$@" 2>"$0" | head -n 1 >/dev/null; exit "${PIPESTATUS[0]}"' "$scratch/err" "${train[@]}" --ranks 2 --quiet=0 --steps 300 --output "$scratch/unread"
check "nobody reads the output: exit code" test $? = 0
check "nobody reads the output: one warning" grep -qx "warning: cannot write to stdout: Broken pipe; the run continues without it" "$scratch/err"
check "nobody reads the output: the run is complete" test -e "$scratch/unread/step_000300/trainer.json"
if [ -e /dev/full ]; then
    status=0
    timeout 60 "$program" generate --init "$scratch/unread" --max-tokens 20 --ranks 2 --tensor-parallel 2 >/dev/full 2>"$scratch/err" ||
        status=$?
    check "generate: text that cannot be written is an error" test $status = 74
    check "generate: text that cannot be written: the reason" \
        grep -qx "error: cannot write to standard output: No space left on device" "$scratch/err"
fi
refused "an error of both ranks is printed once" 2 "holds the checkpoints of an earlier run" "${train[@]}" --ranks 2 --output "$scratch/unread"

check "--ranks 2 in a Slurm job of two other machines stays on this one" env SLURM_JOB_ID=5 SLURM_JOBID=5 SLURM_NNODES=2 SLURM_NTASKS=2 \
    SLURM_NODELIST='h[1-2]' SLURM_JOB_NODELIST='h[1-2]' SLURM_TASKS_PER_NODE='1(x2)' "${train[@]}" --ranks 2 --output ''

# Every fsync takes 0.4 s, and a save more than 2 s, after which mpirun kills the ranks if one has ended.
echo 'extern "C" int usleep(unsigned); extern "C" int fsync(int) { usleep(400000); return 0; }' >"$scratch/slow.cpp"
check "a library with a slow fsync" "${CXX:-g++}" -shared -fPIC -o "$scratch/slow.so" "$scratch/slow.cpp"
refused "gradients that are not finite: one error, and the last good step is saved" 1 "which are saved as of step" \
    env LD_PRELOAD="$scratch/slow.so" "${train[@]}" --ranks 2 --steps 40 --checkpoint-every 100 --lr 100 --grad-clip 0 --output "$scratch/not_finite"
check "gradients that are not finite: the checkpoint" test -e "$scratch/not_finite/latest"
check "gradients that are not finite: no line about a request to stop" test "$(grep -c '^stopping' "$scratch/err")" = 0

adds_lines=""
if mpirun --version | grep -q 'Open MPI) 5'; then adds_lines="Open MPI 5 has no setting that leaves them out"; fi
for signal in INT TERM; do
    out=$scratch/asked_$signal
    start "${endless[@]}" --ranks 2 --output "$out"
    they_train "SIG$signal"
    kill -$signal "$job"
    check "SIG$signal: all end" job_ends 15
    check "SIG$signal: exit code $status" test $status = 75
    check "SIG$signal: a checkpoint" test -e "$out/latest"
    if [ -n "$adds_lines" ]; then skip "SIG$signal: no line of mpirun" "$adds_lines" && continue; fi
    check "SIG$signal: no line of mpirun" test "$(grep -v '^stopping: ' "$scratch/job.log" | grep -c '[Pp]rimary job\|mpirun\|[Ee]xit code')" = 0
done

# mpirun loses a signal that it gets before it has started its ranks.
out=$scratch/asked_early
start "${endless[@]}" --ranks 2 --output "$out"
while [ -z "$(children "$job")" ]; do sleep 0.01; done
sleep 0.05
processes=("$(children "$job")")
kill -TERM "$job"
check "SIGTERM before mpirun has started the ranks: all end" job_ends 15
check "SIGTERM before mpirun has started the ranks: exit code $status" test $status = 75 -o $status = 143

out=$scratch/asked_twice
start "${endless[@]}" --ranks 2 --output "$out"
they_train "two signals"
kill -STOP "${processes[1]}"  # it cannot stop
kill -INT "$job"
sleep 0.7
kill -INT "$job"
check "two signals: all end" job_ends 15
check "two signals: exit code $status" test $status = 130
check "two signals: a line" grep -q "^ended by a second signal" "$scratch/job.log"

out=$scratch/killed
start "${endless[@]}" --ranks 2 --checkpoint-every 20 --max-restarts 1 --output "$out"
they_train "rank 1 killed"
check "rank 1 killed: they save" wait_for "$out/step_000020/model.safetensors"
kill -9 "${processes[2]}"
check "rank 1 killed: an error" wait_for "$scratch/job.log" '^error: rank 1 was ended by signal 9 (Killed; out of memory?)$'
check "rank 1 killed: a restart" wait_for "$scratch/job.log" '^restart 1 of 1 in 1 s: rank 1 was ended by signal 9'
# two_starts LOG: the log has a line for the start of the run and one for its resume.
two_starts() { for _ in $(seq 500); do if [ "$(grep -c '"kind":"run"' "$1")" = 2 ]; then return 0; fi; sleep 0.04; done && return 1; }
check "rank 1 killed: the ranks continue" two_starts "$out/log.jsonl"
check "rank 1 killed: they resume" grep -q -- --resume <(grep '"kind":"run"' "$out/log.jsonl" | tail -n 1)
processes=("$(children "$job")")
mapfile -t -O 1 processes < <(children "${processes[0]}")
sleep 1  # until the ranks handle signals
kill -TERM "$job"
check "rank 1 killed, restarted: all end at a signal" job_ends 15

# The run stops 400 steps after its start at step 4; the restart at step 20 or later does not begin to count again.
out=$scratch/stop_after
check "4 steps" "${endless[@]}" --ranks 2 --stop-after 4 --output "$out"
start "${endless[@]}" --ranks 2 --checkpoint-every 20 --max-restarts 1 --stop-after 400 --resume --output "$out"
check "--stop-after with a restart: the ranks save" wait_for "$out/step_000020/model.safetensors"
processes=("$(children "$job")")
mapfile -t -O 1 processes < <(children "${processes[0]}")
kill -9 "${processes[2]}"
check "--stop-after with a restart: all end" job_ends 60
check "--stop-after with a restart: exit code $status" test "$status" = 0
check "--stop-after with a restart: one restart" test "$(grep -c '^restart ' "$scratch/job.log")" = 1
check "--stop-after with a restart: the last step" test "$(cat "$out/latest")" = step_000404
check "the same run without a restart" "${endless[@]}" --ranks 2 --stop-after 404 --output "$scratch/undisturbed"
check "a run that was restarted has the bits of one that was not disturbed" same_run "$scratch/undisturbed" "$out" 404

out=$scratch/killed_later
start "${endless[@]}" --ranks 2 --checkpoint-every 20 --output "$out"
check "rank 0 killed, a checkpoint: they save" wait_for "$out/step_000020/model.safetensors"
they_train "rank 0 killed, a checkpoint"
kill -9 "${processes[1]}"
check "rank 0 killed, a checkpoint: all end" job_ends 15
check "rank 0 killed, a checkpoint: what to do" grep -q \
    "^error: rank 0 was ended by signal 9 (Killed; out of memory?); --resume continues from $out/step_" "$scratch/job.log"

out=$scratch/killed_once
start "${endless[@]}" --ranks 2 --output "$out"
they_train "rank 1 killed, no restart"
kill -9 "${processes[2]}"
check "rank 1 killed, no restart: all end" job_ends 15
check "rank 1 killed, no restart: exit code $status" test $status = 137
check "rank 1 killed, no restart: an error" grep -qx "error: rank 1 was ended by signal 9 (Killed; out of memory?); there is no checkpoint yet" \
    "$scratch/job.log"
check "rank 1 killed, no restart: no lines of mpirun" test "$(grep -v '^stopping: ' "$scratch/job.log" | grep -c '^---\|mpirun\|exit code')" = 0

# ---- --max-restarts gives up: a stand-in for mpirun notes each start, and ends as it is told
mkdir "$scratch/stand_in"
cat >"$scratch/stand_in/mpirun" <<'END'
#!/usr/bin/env bash
echo "$TRAIN_GPT2_RESTARTS ${*: -1} $EPOCHREALTIME" >>"$STARTS"
if [ -n "$SAVES" ]; then  # makes a checkpoint, like a run that comes further each time
    step=$SAVES/step_00000$((TRAIN_GPT2_RESTARTS + 1))
    mkdir -p "$step" && touch "$step/trainer.json"
fi
exit "$ENDS_WITH"
END
chmod +x "$scratch/stand_in/mpirun"
# gives_up NAME CODE STARTS RESTARTS SAVES LINE [OPTION...]: with --max-restarts RESTARTS, ranks that end with this code are started so
# many times. $resumed is the option that restarts add.
resumed=--resume
gives_up() {
    local out=$scratch/gives_up
    rm -rf "$out" "$scratch/starts"
    refused "$1" "$2" "$6" env PATH="$scratch/stand_in:$PATH" STARTS="$scratch/starts" ENDS_WITH="$2" SAVES="${5:+$out}" \
        "${train[@]}" --ranks 2 --max-restarts "$4" --output "$out" "${@:7}"
    check "$1: $3 starts" test "$(awk '{ print $1 }' "$scratch/starts" | tr '\n' ' ')" = "$(seq -s ' ' 0 $(($3 - 1))) "
    check "$1: a restart resumes" test "$(awk 'NR > 1 { print $2 }' "$scratch/starts" | sort -u)" = "$resumed"
}
# pauses SECONDS...: these are the pauses that the lines name, and the starts are at least so far apart.
pauses() {
    test "$(sed -n 's/^restart .* in \([0-9]*\) s: .*/\1/p' "$scratch/err" | tr '\n' ' ')" = "$* " || return 1
    awk -v want="$*" 'BEGIN { split(want, w, " ") }
        NR > 1 && $3 - last < w[NR - 1] { print $3 - last " s instead of " w[NR - 1]; bad = 1 } { last = $3 } END { exit bad }' "$scratch/starts"
}
gives_up "no progress" 1 3 9 "" "error: 3 attempts in a row ended without a new checkpoint; no restart"
check "no progress: the pause grows" pauses 2 4
gives_up "restarts used" 74 3 2 saves "error: the ranks have failed after 2 restarts (--max-restarts)"
check "restarts used: with progress the pause does not grow" pauses 1 1
check "restarts used: the last restart names its number and the checkpoint" grep -q \
    '^restart 2 of 2 in 1 s: mpirun ended with exit code 74; .*step_000002$' "$scratch/err"
gives_up "a watchdog has ended the ranks" 124 3 2 saves "error: the ranks have failed after 2 restarts (--max-restarts)"
resumed=--resume=strict
gives_up "--resume=strict" 74 2 1 saves "error: the ranks have failed after 1 restarts (--max-restarts)" --resume=strict
resumed=
for code in 0 2 17 65 75; do
    rm -f "$scratch/starts"
    env PATH="$scratch/stand_in:$PATH" STARTS="$scratch/starts" ENDS_WITH=$code SAVES= "${train[@]}" --ranks 2 --max-restarts 9 --output "$scratch/ends" \
        >"$scratch/out" 2>&1
    check "exit code $code is no reason for a restart" test "$? $(wc -l <"$scratch/starts")" = "$code 1"
done

out=$scratch/orphans
start "${endless[@]}" --ranks 2 --output "$out"
they_train "kill -9"
disown "$job"  # else bash prints a line about it
kill -9 "$job"
check "kill -9 leaves no process" nobody_left 15

never=("${train[@]}" --output "$scratch/never")
refused "--ranks and --rank" 2 "leave out --rank, --world-size, --local-rank, --rendezvous and --run-id" "${never[@]}" --ranks 2 --rank 0 --world-size 2 --rendezvous h0:29500
refused "--ranks and --run-id" 2 "--ranks 2 starts all ranks and numbers them" "${never[@]}" --ranks 2 --run-id x
refused "plan --ranks and --world-size" 2 "--ranks 2 starts all ranks and numbers them" "$program" plan "${tiny[@]}" --ranks 2 --world-size 4
refused "plan --ranks: the error names no rank" 2 "error: --global-batch 64 is not a multiple" "$program" plan "${tiny[@]}" --ranks 3
refused "--ranks of another number under mpirun" 2 "mpirun has started rank 0 of 2" \
    env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "${never[@]}" --ranks 4
refused "--ranks under torchrun" 2 "leave out --ranks or torchrun" \
    env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h0 MASTER_PORT=29511 "${never[@]}" --ranks 2
refused "--nnodes on the CPU" 2 "CPU ranks of several machines start by mpirun" "${never[@]}" --ranks 2 --nnodes 2
limited=(bash -c 'ulimit "$0" "$1" && exec "${@:2}"')  # OPTION LIMIT COMMAND...
refused "few open files" 2 "need 50 open files, but the limit is 20 (ulimit -n); raise it" "${limited[@]}" -n 20 "${never[@]}" --ranks 2
refused "small files" 2 "need 4,194,304 bytes in a file, for shared memory, but the limit is 102,400 (ulimit -f)" \
    "${limited[@]}" -f 100 "${never[@]}" --ranks 2
refused "little address space" 1 "need 268,435,456 bytes of address space, but the limit is 102,400,000 (ulimit -v)" \
    "${limited[@]}" -v 100000 "${never[@]}" --ranks 2
mkdir "$scratch/no_programs"
refused "no mpirun" 2 "needs mpirun, which cannot be started" env PATH="$scratch/no_programs" "${never[@]}" --ranks 2
mkdir "$scratch/few_programs"
for name in mpirun orterun orted prterun prte prted sh; do
    if path=$(command -v $name); then ln -s "$path" "$scratch/few_programs/$name"; fi
done
check "no ssh: mpirun starts ranks of this machine without it" env PATH="$scratch/few_programs" "$program" \
    --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --threads 1 --output "$scratch/no_ssh" --ranks 2 --steps 2
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"
finish
