#!/usr/bin/env bash
# test_slurm.sh: ranks under Slurm on two hosts (slurm.sh): the rank that each process finds under srun, sbatch
# and salloc, training by srun with PMIx, the TCP rendezvous without it, a job that is asked to stop, and jobs
# that are queued again.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -z "$reason" ]; then reason=$(no_hosts_because); fi
if [ -z "$reason" ] && ! PATH=$PATH:/usr/sbin type srun slurmctld slurmd munged >/dev/null 2>&1; then
    reason="there is no Slurm (LAUNCHERS=1 ./scripts/test.sh installs it: apt-get install slurm-wlm munge)"
fi
if [ -n "$reason" ]; then skip "Slurm" "$reason" && exit 0; fi
several_ranks_here
export CLUSTER=s$$n CLUSTER_SUBNET=10.77.0
tidy() { dev/test/ranks/slurm.sh down "$scratch" 2; dev/test/ranks/cluster.sh down 2; rm -rf "$scratch"; }
trap 'if is_main_shell; then tidy; fi' EXIT

make_shards "$scratch/data" 30000 || fail "no shards"
check "cluster.sh makes 2 hosts" dev/test/ranks/cluster.sh up 2
check "Slurm starts on 2 hosts" dev/test/ranks/slurm.sh up "$scratch" 2 || finish
h0=${CLUSTER}0 h1=${CLUSTER}1
slurm() { timeout 60 dev/test/ranks/slurm.sh on "$scratch" "$@"; }  # slurm srun ...
subnet=(--mca btl_tcp_if_include "$CLUSTER_SUBNET.0/24" --mca oob_tcp_if_include "$CLUSTER_SUBNET.0/24")

# ---- how the program finds its rank. The lines of rendezvous_rank in the order of the ranks, with HOST0 and HOST1 in
# place of this run's names. launched NAME EXPECTED COMMAND...: the command prints EXPECTED.
launched() {
    local name=$1 expected=$2 found
    shift 2
    found=$("$@" 2>"$scratch/err" | sed "s/$h0/HOST0/; s/$h1/HOST1/" | sort)
    if [ "$found" = "$expected" ]; then pass "$name"; else fail "$name: $found $(tail -n 3 "$scratch/err")"; fi
}
# four_ranks LAUNCHER OF MPI: the lines that 4 ranks print, 2 on each host. OF is " of 2" if the launcher gives the
# number of local ranks, MPI ", MPI" if MPI joins the ranks.
four_ranks() {
    local rank
    for rank in 0 1 2 3; do echo "$1, rank $rank of 4, local rank $((rank % 2))$2 on HOST$((rank / 2))$3"; done
}
rank_program=$PWD/build/release/rendezvous_rank
make --no-print-directory -o Makefile "${rank_program#"$PWD"/}" >/dev/null || fail "$rank_program is not built"
who=("$rank_program" who)
two_by_two=(--nodes=2 --ntasks-per-node=2)
launched "srun --mpi=none" "$(four_ranks srun "" "")" slurm srun "${two_by_two[@]}" --mpi=none "${who[@]}"
launched "srun --mpi=pmi2" "$(four_ranks srun "" "")" slurm srun "${two_by_two[@]}" --mpi=pmi2 "${who[@]}"
launched "srun --mpi=pmix" "$(four_ranks srun "" ", MPI")" slurm srun "${two_by_two[@]}" --mpi=pmix "${who[@]}"
# Slurm gives one task to either host: the one that the step before has left first.
on_first_host=(--nodelist="$h0")
launched "srun of one task" "single process on HOST0" slurm srun "${on_first_host[@]}" --ntasks=1 --mpi=none "${who[@]}"
launched "srun --mpi=pmix of one task" "single process on HOST0" slurm srun "${on_first_host[@]}" --ntasks=1 \
    --mpi=pmix "${who[@]}"
launched "salloc and mpirun" "$(four_ranks mpirun " of 2" ", MPI")" slurm salloc "${two_by_two[@]}" mpirun \
    "${subnet[@]}" "${who[@]}"
launched "salloc of one task, and mpirun of two ranks" \
    "$(printf 'mpirun, rank %d of 2, local rank %d of 2 on HOST0, MPI\n' 0 0 1 1)" \
    slurm salloc "${on_first_host[@]}" --nodes=1 --ntasks=1 mpirun -np 2 --host "$h0:2" "${who[@]}"

# batch NAME OPTION... -- COMMAND: runs a job with this script, and waits for it. Its output is in NAME.out.
batch() {
    local name=$1 options=()
    shift
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    printf '#!/usr/bin/env bash\n%s\n' "$2" >"$scratch/$name.sh"
    slurm sbatch --wait --output="$scratch/$name.out" "${options[@]}" "$scratch/$name.sh"
}
check "sbatch of the program" batch alone "${two_by_two[@]}" -- "${who[*]}"
launched "sbatch without srun" "single process on HOST0 (SLURM_NTASKS=4, but srun did not start this process)" cat \
    "$scratch/alone.out"
check "sbatch of mpirun" batch mpirun "${two_by_two[@]}" -- "mpirun ${subnet[*]} ${who[*]}"
launched "sbatch and mpirun" "$(four_ranks mpirun " of 2" ", MPI")" cat "$scratch/mpirun.out"

# refused_tasks NAME TEXT COMMAND...: 4 tasks end with exit code 2, and each prints the text.
refused_tasks() {
    local name=$1 text=$2 status=0
    shift 2
    slurm "$@" >"$scratch/out" 2>"$scratch/err" || status=$?
    if [ $status = 2 ] && [ "$(grep -cF -- "$text" "$scratch/err")" = 4 ] &&
        [ "$(grep -c 'task.*: Exited with exit code 2' "$scratch/err")" -ge 1 ]; then
        pass "$name: $(grep -m1 '^error: ' "$scratch/err")"
    else
        fail "$name: exit code $status, said $(head -n 8 "$scratch/err")"
    fi
}
refused_tasks "torchrun's variables of another run" \
    "this is one of 4 processes (SLURM_STEP_NUM_TASKS=4), but one of 2 ranks (torchrun)" \
    srun "${two_by_two[@]}" --mpi=none env RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR="$h0" MASTER_PORT=29511 \
        "${who[@]}"
refused_tasks "another rank than PMIx says" "they come from two launchers; start with one of them" \
    srun "${two_by_two[@]}" --mpi=pmix env PMIX_RANK=9 "${who[@]}"

# ---- training
train=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin" "${tiny[@]}"
       --seq-len 32 --micro-batch 1 --global-batch 512 --precision fp32 --deterministic-ranks 8 --steps 4 --val-every 2
       --checkpoint-every 4)
check "1 process" "${train[@]}" --output "$scratch/one"
check "srun --mpi=pmix trains" slurm srun "${two_by_two[@]}" --mpi=pmix "${train[@]}" --output "$scratch/pmix"
check "srun --mpi=pmix gives the same bits as 1 process" same_run "$scratch/one" "$scratch/pmix" 4
check "salloc and mpirun trains" \
    slurm salloc "${two_by_two[@]}" mpirun "${subnet[@]}" "${train[@]}" --output "$scratch/salloc"
check "salloc and mpirun give the same bits as 1 process" same_run "$scratch/one" "$scratch/salloc" 4
for mpi in none pmi2; do
    refused_tasks "srun --mpi=$mpi with CPU ranks" "4 CPU ranks need MPI: start with mpirun -np 4 (found: srun)" \
        srun "${two_by_two[@]}" --mpi=$mpi "${train[@]}" --output "$scratch/never"
    check "srun --mpi=$mpi: nothing is written" test ! -e "$scratch/never/log.jsonl"
done

# ---- the TCP rendezvous of ranks without MPI, which NCCL uses
# joined TASKS PLACES COMMAND...: one line of each task, on these hosts, all with the same id.
joined() {
    local tasks=$1 places=$2
    shift 2
    slurm "$@" >"$scratch/out" 2>"$scratch/err"
    if [ "$(sed -n "s/^srun rank \([0-9]*\) of $tasks on \([^,]*\),.*/\1@\2/p" "$scratch/out" | sort |
        xargs)" != "$places" ] ||
        [ "$(sed 's/.*, joined //' "$scratch/out" | sort -u | wc -l)" != 1 ]; then
        cat "$scratch/out" "$scratch/err"
        return 1
    fi
}
check "4 tasks on 2 hosts join one run" \
    joined 4 "0@$h0 1@$h0 2@$h1 3@$h1" srun "${two_by_two[@]}" --mpi=none $rank_program
check "2 tasks on the second host join" joined 2 "0@$h1 1@$h1" srun --nodelist="$h1" --ntasks=2 --mpi=none $rank_program
check "3 tasks on one host and 1 on the other join" \
    joined 4 "0@$h0 1@$h0 2@$h0 3@$h1" srun --nodes=2 --ntasks=4 --distribution=block:block,pack \
        --mpi=none $rank_program
cat >"$scratch/late" <<EOF
#!/usr/bin/env bash
sleep 0.\$((5 * SLURM_PROCID))
exec $rank_program
EOF
chmod +x "$scratch/late"
# Not in the same instant, at which Debian 12's slurmd has crashed with a segmentation fault.
# shellcheck disable=SC2016  # for the job's shell
two_steps='for step in 1 2; do
    srun --nodelist='$h0' --ntasks=2 --nodes=1 --overlap --mpi=none '$scratch/late' >'$scratch'/step$step &
    sleep 0.2
done
wait'
check "two steps of a job at once" batch steps "${two_by_two[@]}" -- "$two_steps"
check "two steps of a job at once: each has its own id" \
    test "$(sed 's/.*, joined //' "$scratch/step1" "$scratch/step2" | sort | uniq -c | awk '{ print $1 }' |
        xargs)" = "2 2"

# ---- a job that is asked to stop
endless=("${train[@]}" --steps 100000 --checkpoint-every 100000 --val-every 0 --output "$scratch/asked")
printf '#!/usr/bin/env bash\nsrun --mpi=pmix %s; echo $? >%s/code\n' "${endless[*]}" "$scratch" >"$scratch/asked.sh"
job=$(slurm sbatch --parsable "${two_by_two[@]}" --output="$scratch/asked.out" "$scratch/asked.sh")
check "a job of srun trains" wait_for "$scratch/asked/log.jsonl" '"step":3,'
check "scancel --signal=USR1" slurm scancel --signal=USR1 "$job"
check "scancel --signal=USR1: the step ends with exit code 75" wait_for "$scratch/code" '^75$'
check "scancel --signal=USR1: the step saves a checkpoint" test -e "$scratch/asked/latest"
check "scancel --signal=USR1: another job resumes" \
    slurm srun "${two_by_two[@]}" --mpi=pmix "${endless[@]}" --resume --stop-after 2

# ---- a job that the recipe queues again. Its trainer ends with exit code 75 at first, and prints its
# rank the second time.
tree=$scratch/tree
mkdir -p "$tree/data/fineweb10B" && cp -r scripts "$tree/" && touch "$tree/data/fineweb10B/fineweb_train_000001.bin"
# shellcheck disable=SC2016  # for the stand-in
printf '#!/usr/bin/env bash\nif [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then exit 75; fi\nexec %s\n' "${who[*]}" \
    >"$tree/train_gpt2cu"
chmod +x "$tree/train_gpt2cu" && ln -s "$program" "$tree/train_gpt2"
slurm=$PWD/dev/test/ranks/slurm.sh
# submit NAME OPTION...: submits the recipe with these options. Its output is in NAME.out.
submit() {
    (cd "$tree" && timeout 60 "$slurm" on "$scratch" sbatch --parsable "${two_by_two[@]}" --gpus-per-node=0 \
        --cpus-per-task=1 \
        --output="$scratch/$1.out" scripts/run_gpt2_124M.sbatch "${@:2}")
}
check "the recipe as a job" submit plan --plan
check "the recipe as a job counts 8 ranks per node" wait_for "$scratch/plan.out" 'x 16 ranks'
job=$(submit recipe --seed 7)
check "exit code 75 queues the recipe again" wait_for "$scratch/recipe.out" 'ended with exit code 75; queued again'
# Slurm waits two minutes before it starts the job again, unless scontrol changes the start time. That must wait until
# all files of the first attempt are gone, which slurmd would take for those of the job: its script, and the sockets
# of its steps, HOST_JOB.STEP. scontrol must also wait for the next second. slurmd revokes the first attempt's
# credential and notes the time in whole seconds. It refuses a credential that was made in the same second, and then
# Slurm fails the job.
first_attempt_is_there() { compgen -G "$scratch/*/spool/job*" || compgen -G "$scratch/*/spool/*_$job.*"; } >/dev/null
# starts_again FILE TEXT: a second attempt of $job writes TEXT into FILE.
starts_again() {
    for _ in $(seq 60); do
        if grep -q -- "$2" "$1"; then return; fi
        if slurm squeue --noheader --jobs="$job" --format=%r | grep -q BeginTime && ! first_attempt_is_there; then
            sleep 1
            slurm scontrol update "JobId=$job" StartTime=now
        fi
        sleep 0.5
    done
    tail -n 3 "$1"  # why not
    slurm scontrol show job "$job" | grep -E 'JobState|Restarts|StartTime'
    return 1
}
check "the recipe starts again" starts_again "$scratch/recipe.out" 'restart 1'
for rank in 0 1 2 3; do
    check "the second attempt of the recipe, rank $rank" \
        wait_for "$scratch/recipe.out" "srun, rank $rank of 4, .*, restart 1"
done

# ---- a job that is queued again while it trains: Slurm sends SIGTERM, and the ranks save
long=("${train[@]}" --steps 400 --val-every 0 --checkpoint-every 100000)
check "1 process, 400 steps" "${long[@]}" --output "$scratch/long"
out=$scratch/requeued
printf '#!/usr/bin/env bash\nexec srun --mpi=pmix %s\n' "${long[*]} --output $out --resume" >"$scratch/requeued.sh"
job=$(slurm sbatch --parsable "${two_by_two[@]}" --requeue --open-mode=append \
    --output="$scratch/requeued.out" "$scratch/requeued.sh")
check "a job that is queued again trains" wait_for "$out/log.jsonl" '"step":3,'
check "scontrol requeue" slurm scontrol requeue "$job"
check "scontrol requeue: the run saves" wait_for "$out/latest"
saved=$(cat "$out/latest")
check "scontrol requeue: the run saves in between, $saved" test "$saved" != step_000400
check "scontrol requeue: the job resumes at the step that it has saved" \
    starts_again "$out/log.jsonl" "\"resumed_at\":$((10#${saved#step_}))[,}]"
# Beside other programs a step of four ranks takes 150 ms, not 8.
slower=$((5 * slower)) check "scontrol requeue: the run is complete" wait_for "$out/latest" step_000400
check "scontrol requeue: the run has the bits of one that was not disturbed" same_run "$scratch/long" "$out" 400

# ---- no process is left
check "Slurm stops" dev/test/ranks/slurm.sh down "$scratch" 2
for _ in $(seq 50); do if nobody_inside 2; then break; fi; sleep 0.1; done
check "no process is left on the hosts: $(inside 2)" nobody_inside 2
finish
