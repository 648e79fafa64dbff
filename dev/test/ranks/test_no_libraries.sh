#!/usr/bin/env bash
# test_no_libraries.sh: tests programs that were built without MPI, without NCCL, and without both: every way to start
# two ranks is refused with a sentence and exit code 2, leaves no process and writes nothing.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

folder=$(dirname "$program")
no_mpi=$folder/alone/train_gpt2 no_nccl=$folder/emulator/nonccl/train_gpt2cu neither=$folder/emulator/alone/train_gpt2cu
make_shards "$scratch/data" 6000 || fail "no shards"
options=(--train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384 --seq-len 16
    --micro-batch 1
         --global-batch 0 --steps 2 --precision fp32 --autotune off --output "$scratch/never")
export SIMT_DEVICES=2 OMP_NUM_THREADS=1
torchrun=(env RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511)
# Of an mpirun that starts this program without its MPI.
mpirun_variables=(env OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2)
srun_pmix=(env SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1 PMIX_RANK=1)

# left PROGRAM: the processes that run it.
left() {
    local process
    for process in /proc/[0-9]*; do
        if [ "$(readlink "$process/exe")" = "$(readlink -f "$1")" ] && runs "${process#/proc/}"; then
            echo "${process#/proc/}"
        fi
    done
}
# refuses NAME TEXT PROGRAM COMMAND...: refused, as in functions.sh, and no process of PROGRAM is left.
refuses() {
    local name=$1 text=$2 tested=$3
    shift 3
    refused "$name" 2 "$text" "$@"
    check "$name: no process is left" test -z "$(left "$tested")"
}

if [ -x "$no_mpi" ]; then
    none="this is one of 2 CPU ranks"
    check "without MPI: one process trains" "$no_mpi" "${options[@]}" --output '' --quiet
    refuses "without MPI: --ranks 2" "--ranks needs MPI, which this build lacks: apt-get install libopenmpi-dev" \
        "$no_mpi" \
        "$no_mpi" "${options[@]}" --ranks 2
    refuses "without MPI: under torchrun" "$none (torchrun), but this build has no library that connects them" \
        "$no_mpi" \
        "${torchrun[@]}" "$no_mpi" "${options[@]}"
    refuses "without MPI: under srun" "$none (srun), but this build has no library" "$no_mpi" "${srun_pmix[@]}" \
        "$no_mpi" "${options[@]}"
    refuses "without MPI: mpirun's variables" "$none (mpirun), but this build has no library" "$no_mpi" \
        "${mpirun_variables[@]}" "$no_mpi" "${options[@]}"
else
    skip "a program without MPI" "$no_mpi is not built"
fi
if [ -x "$no_nccl" ] && [ -x "$neither" ]; then
    gpus="--ranks needs NCCL, which this build lacks: apt-get install libnccl-dev, and run make"
    check "without NCCL: --ranks 1 trains" "$no_nccl" "${options[@]}" --ranks 1 --output '' --quiet
    refuses "without NCCL: --ranks 2" "$gpus" "$no_nccl" "$no_nccl" "${options[@]}" --ranks 2
    refuses "without NCCL and MPI: --ranks 2" "$gpus" "$neither" "$neither" "${options[@]}" --ranks 2
    refuses "without NCCL and MPI: under torchrun" "install NCCL and run make" "$neither" \
        "${torchrun[@]}" "$neither" "${options[@]}"
    refuses "without NCCL and MPI: mpirun's variables" \
        "this is one of 2 GPU ranks (mpirun), but this build has no library" "$neither" \
        "${mpirun_variables[@]}" "$neither" "${options[@]}"
else
    skip "programs without NCCL" "$no_nccl is not built"
fi

reason=$(no_ranks_because)
if [ -n "$reason" ]; then
    skip "programs without libraries under mpirun" "$reason"
else
    several_ranks_here
    # both_refuse NAME TEXT PROGRAM: mpirun's exit code is 2, each rank's error is TEXT, and no rank is left.
    both_refuse() {
        timeout -k 5 60 mpirun --timeout 50 -np 2 "$3" "${options[@]}" >"$scratch/both" 2>&1 </dev/null
        check "$1: exit code" test $? = 2
        check "$1: the sentence" grep -q "^error: .*$2" "$scratch/both"
        check "$1: no process is left" test -z "$(left "$3")"
    }
    if [ -x "$no_mpi" ]; then
        both_refuse "without MPI, by mpirun" "2 CPU ranks (mpirun), but this build has no library" "$no_mpi"
    fi
    if [ -x "$neither" ]; then
        both_refuse "without NCCL and MPI, by mpirun" "2 GPU ranks (mpirun), but this build has no library" "$neither"
        refuses "without NCCL: under torchrun" "2 GPU ranks (torchrun), but this build has no library" "$no_nccl" \
            "${torchrun[@]}" "$no_nccl" "${options[@]}"
        refuses "without NCCL: mpirun's variables" "2 GPU ranks (mpirun), but this build has no library" "$no_nccl" \
            "${mpirun_variables[@]}" "$no_nccl" "${options[@]}"
    fi
fi
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"
finish
