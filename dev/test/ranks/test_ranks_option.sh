#!/usr/bin/env bash
# test_ranks_option.sh: tests --ranks N, which starts CPU ranks by mpirun: the same bits as mpirun -np N, signals, a
# killed rank, a killed parent process, and refused starts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "--ranks" "$reason" && exit 0; fi
make_shards "$scratch/data" 30000 || fail "no shards"
export OMP_NUM_THREADS=1
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --steps 4 --checkpoint-every 4)
endless=("${train[@]}" --steps 1000000 --checkpoint-every 100000)

start() {
    "${interruptible[@]}" "$@" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# they_train NAME: waits until the job trains into $out. Sets processes: mpirun and the ranks.
they_train() {
    check "$1: the ranks train" wait_for "$out/log.jsonl" '"step":3,'
    processes=("$(children "$job")")
    mapfile -t -O 1 processes < <(children "${processes[0]}")
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
# job_ends SECONDS: the job ends in time and leaves none of its processes. Sets status.
job_ends() { ends "$1" && nobody_left 2; }

check "--ranks 2" "${train[@]}" --ranks 2 --output "$scratch/option"
several_ranks_here
check "mpirun -np 2" ranks 2 "${train[@]}" --output "$scratch/mpirun"
check "--ranks 2 gives the same bits as mpirun -np 2" same_run "$scratch/mpirun" "$scratch/option" 4
check "--ranks 2 starts two ranks" grep -q '"world_size":2' "$scratch/option/log.jsonl"
check "--ranks 1" "${train[@]}" --ranks 1 --output "$scratch/single"
check "--ranks 1 is a single process" grep -q '"world_size":1' "$scratch/single/log.jsonl"
check "plan --ranks 64 plans for 64 ranks anywhere" \
    grep -q ' x 64 ranks' <("$program" plan "${tiny[@]}" --global-batch 0 --ranks 64)
check "--ranks 2 in a Slurm job of two other machines stays on this one" \
    env SLURM_JOB_ID=5 SLURM_JOBID=5 SLURM_NNODES=2 SLURM_NTASKS=2 \
    SLURM_NODELIST='h[1-2]' SLURM_JOB_NODELIST='h[1-2]' SLURM_TASKS_PER_NODE='1(x2)' "${train[@]}" --ranks 2 --output ''
mkdir "$scratch/few_programs"
for name in mpirun orterun orted prterun prte prted sh; do
    if path=$(command -v $name); then ln -s "$path" "$scratch/few_programs/$name"; fi
done
check "no ssh: mpirun starts ranks of this machine without it" \
    env PATH="$scratch/few_programs" "${train[@]}" --output "$scratch/no_ssh" --ranks 2

for signal in INT TERM USR1; do
    out=$scratch/asked_$signal
    start "${endless[@]}" --ranks 2 --output "$out"
    they_train "SIG$signal"
    kill -$signal "$job"
    check "SIG$signal: all end" job_ends 15
    check "SIG$signal: exit code $status" test $status = 75
    check "SIG$signal: a checkpoint" test -e "$out/latest"
done

out=$scratch/asked_twice
start "${endless[@]}" --ranks 2 --output "$out"
they_train "two signals"
kill -STOP "${processes[1]}"  # it cannot stop
kill -INT "$job"
sleep 0.7
kill -INT "$job"
check "two signals: all end" job_ends 15
check "two signals: exit code $status" test $status != 0

for rank in 0 1; do
    out=$scratch/killed_$rank
    start "${endless[@]}" --ranks 2 --checkpoint-every 20 --output "$out"
    they_train "rank $rank killed"
    kill -9 "${processes[$((1 + rank))]}"
    check "rank $rank killed: all end" job_ends 12
    check "rank $rank killed: exit code $status" test $status = 137
    check "rank $rank killed: mpirun names it" mpirun_says "process rank $rank.*signal 9" "$scratch/job.log"
done
check "a killed rank: the run is resumed" "${endless[@]}" --ranks 2 --output "$out" --resume --stop-after 2

out=$scratch/orphans
start "${endless[@]}" --ranks 2 --output "$out"
they_train "kill -9"
disown "$job"  # else bash prints a line about it
kill -9 "$job"
check "kill -9 leaves no process" nobody_left 15

never=("${train[@]}" --output "$scratch/never")
refused "an error of both ranks is printed once" 2 \
    "holds the checkpoints of an earlier run" "${train[@]}" --ranks 2 --output "$scratch/option"
refused "a usage error is printed once" 2 "--zero 9" "${never[@]}" --ranks 2 --zero 9
refused "--ranks of another number under mpirun" 2 "mpirun has started 2" \
    env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
        "${never[@]}" --ranks 4
refused "--ranks all on the CPU" 2 "this is the program for the CPU: give a number of ranks" "${never[@]}" --ranks all
mkdir "$scratch/no_programs"
refused "no mpirun" 2 "--ranks 2 needs mpirun: No such file" env PATH="$scratch/no_programs" "${never[@]}" --ranks 2
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"
finish
