#!/usr/bin/env bash
# test_nccl.sh: tests training on several GPUs by NCCL in the emulator, where each rank has its own GPU and a
# stand-in replaces the NCCL library. Ranks start under mpirun (MPI sends NCCL's id), and by torchrun's variables
# (TCP sends it). The tests compare the results with one GPU and with ranks by MPI, count the bytes sent, kill a
# rank, and check refused starts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "GPUs by NCCL" "build/release/emulator/train_gpt2cu is not built" && exit 0; fi
several_ranks_here
mpi=$(no_ranks_because)  # empty if there is MPI
take_ports

# start_ranks N COMMAND...: starts N ranks with the variables of torchrun, in the background. Sets pids. Output goes to
# rank_R.log. `local_rank` is LOCAL_RANK of every rank, if it is not the rank. With devices=1 every rank
# sees one GPU.
start_ranks() {
    local n=$1 rank
    shift
    pids=()
    for ((rank = 0; rank < n; rank++)); do
        RANK=$rank WORLD_SIZE=$n LOCAL_RANK=${local_rank:-$rank} LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=$port \
            TORCHELASTIC_RUN_ID=$$ SIMT_DEVICES=${devices:-${gpus:-$n}} timeout 60 "$@" \
                >"$scratch/rank_$rank.log" 2>&1 </dev/null &
        pids+=($!)
    done
}
# Waits for all. Sets ended, the exit code of each, and returns the largest.
wait_for_ranks() {
    local pid status one=0
    ended=() status=0
    for pid in "${pids[@]}"; do
        one=0
        wait "$pid" 2>/dev/null || one=$?
        ended+=("$one")
        if [ $one -gt $status ]; then status=$one; fi
    done
    if [ $status != 0 ]; then tail -n 3 "$scratch"/rank_*.log; fi
    return $status
}
by_variables() { start_ranks "$@" && wait_for_ranks; }
by_mpirun() {
    local n=$1
    shift
    SIMT_DEVICES=${gpus:-$n} mpirun --timeout 60 -np "$n" "$@"
}
if [ -n "$mpi" ]; then skip "GPUs by NCCL under mpirun" "$mpi"; fi

make_shards "$scratch/data" 30000 || fail "no shards"
data=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin")
# The vocabulary needs no padding, so that ranks send exactly the bytes of the parameters.
small=(--layers 2 --heads 1 --channels 32 --vocab-size 384 --seq-len 16 --micro-batch 1 --lr 1e-2 --warmup 2)
# Two micro-steps on each of two ranks: the first one replays a CUDA graph from the third step on.
train=("$emulated" "${data[@]}" "${small[@]}" --global-batch 64 --steps 4 --val-every 4 --val-batches 5
    --checkpoint-every 4)
virtual=(--deterministic-ranks 2)
parameters=38272  # 384 x 32 + 16 x 32 + 2 (12 x 32 x 32 + 13 x 32) + 2 x 32

# ---- two ranks: a + b = b + a, so the sum over two ranks has the same bits in any library
for precision in fp32 bf16; do
    one=$scratch/1_$precision
    options=("${train[@]}" "${virtual[@]}" --precision "$precision")
    check "$precision: 1 GPU" "${options[@]}" --output "$one"
    check "$precision: the log has every step and loss" test "$(results "$one" | grep -c .)" = 6
    for zero in 0 1; do
        out=$scratch/2_${precision}_$zero
        check "$precision: 2 GPUs, --zero $zero" by_variables 2 "${options[@]}" --zero $zero --output "$out"
        check "$precision: 2 GPUs, --zero $zero, give the same bits as 1" same_run "$one" "$out" 4
    done
    # --zero 2 adds the ranks in every micro-step, so its sums are rounded in another order.
    out=$scratch/2_${precision}_2
    check "$precision: 1 GPU, --zero 2" "${options[@]}" --zero 2 --output "${one}_2"
    check "$precision: --zero 2 has nearly the same loss" nearly "${one}_2" "$one" 1e-4
    check "$precision: 2 GPUs, --zero 2" by_variables 2 "${options[@]}" --zero 2 --output "$out"
    check "$precision: 2 GPUs, --zero 2, give the same bits as 1" same_run "${one}_2" "$out" 4
done
check "2 GPUs use NCCL" grep -q '2 ranks by NCCL' "$scratch/rank_0.log"
check "2 GPUs by torchrun's variables" \
    by_variables 2 "${train[@]}" "${virtual[@]}" --precision fp32 --output "$scratch/torchrun"
check "2 GPUs by torchrun's variables give the same bits as 1" same_run "$scratch/1_fp32" "$scratch/torchrun" 4
devices=1 check "LOCAL_RANK=RANK, and each rank sees one GPU" by_variables 2 "${train[@]}" "${virtual[@]}" \
    --precision fp32 --output "$scratch/one_visible"
check "LOCAL_RANK=RANK, and each rank sees one GPU: rank 1 takes it, and says so" \
    grep -qx "note: process 1 of this machine sees one GPU and uses it" "$scratch/rank_1.log"
devices=1 local_rank=0 check "LOCAL_RANK=0 on all ranks, and each sees one GPU" by_variables 2 "${train[@]}" \
    "${virtual[@]}" --precision fp32 --output "$scratch/local_0"
for run in one_visible local_0; do
    check "ranks that see one GPU each give the same bits as 1 ($run)" same_run "$scratch/1_fp32" "$scratch/$run" 4
done
export SIMT_STREAMS=deferred:3
check "2 GPUs with another order of streams" \
    by_variables 2 "${train[@]}" "${virtual[@]}" --precision fp32 --zero 1 --output "$scratch/deferred"
check "2 GPUs with another order of streams, --zero 2" \
    by_variables 2 "${train[@]}" "${virtual[@]}" --precision fp32 --zero 2 --output "$scratch/deferred_2"
unset SIMT_STREAMS
check "2 GPUs with another order of streams give the same bits as --zero 2" \
    same_run "$scratch/1_fp32_2" "$scratch/deferred_2" 4
check "2 GPUs with another order of streams give the same bits as 1" same_run "$scratch/1_fp32" "$scratch/deferred" 4
check "2 GPUs without CUDA graphs" \
    by_variables 2 "${train[@]}" "${virtual[@]}" --precision fp32 --cuda-graph off --output "$scratch/calls"
check "2 GPUs without CUDA graphs give the same bits as 1" same_run "$scratch/1_fp32" "$scratch/calls" 4
if [ -z "$mpi" ]; then
    check "2 GPUs by mpirun" by_mpirun 2 "${train[@]}" "${virtual[@]}" --precision fp32 --zero 1 \
        --output "$scratch/mpirun"
    check "2 GPUs by mpirun give the same bits as 1" same_run "$scratch/1_fp32" "$scratch/mpirun" 4
fi

# ---- three ranks: NCCL chooses the order of sums
three=("${train[@]}" --global-batch 96 --precision fp32)
check "1 GPU on the batch of 3" "${three[@]}" --output "$scratch/1_of_3"
for zero in 0 1; do
    check "3 GPUs, --zero $zero" by_variables 3 "${three[@]}" --zero $zero --output "$scratch/3_$zero"
    check "3 GPUs, --zero $zero: nearly the loss of 1" nearly "$scratch/3_$zero" "$scratch/1_of_3" 1e-4
done
check "3 GPUs: --zero 1 changes no bit" same_run "$scratch/3_0" "$scratch/3_1" 4
values=$(for n in 1_of_3 3_0 3_1 2_fp32_1; do first_val "$scratch/$n"; done)
check "validation: 1, 2 and 3 GPUs have the same loss: ${values//$'\n'/ }" \
    test "$(sort <<<"$values" | uniq -c | awk '{ print $1 }')" = 4

# ---- bytes that ranks send, and the time for which training waits
# each_step RUN KEY LOW HIGH: the number of every step is between these.
each_step() {
    sed -n 's/.*"kind":"step".*"'"$2"'":\([0-9.]*\).*/\1/p' "$1/log.jsonl" |
        awk -v low="$3" -v high="$4" \
            '{ n++; if (!($1 >= low && $1 <= high)) { print $1 " is not in " low " .. " high; bad = 1 } }
             END { exit n != 4 || bad }'
}
sends() { each_step "$1" comm_bytes $(($2 * 97 / 100)) $(($2 * 103 / 100)); }  # the bytes include padding
check "2 GPUs send their gradients once" sends "$scratch/2_fp32_0" $((parameters * 4))
check "3 GPUs send 2 (n-1)/n of them" sends "$scratch/3_0" $((2 * 2 * parameters * 4 / 3))
check "--zero 1 sends no more" sends "$scratch/2_fp32_1" $((parameters * 4))
check "--zero 1 in bf16 sends gradients and half-sized weights" sends "$scratch/2_bf16_1" $((parameters * (4 + 2) / 2))
check "--zero 2 sends gradients in both micro-steps, and weights once" \
    sends "$scratch/2_fp32_2" $((parameters * (4 + 4 + 4) / 2))
# A collective takes 1 ms on the emulator's clock. A step has four, of which the first overlaps with matmuls.
check "a step waits for at most its 4 collectives" each_step "$scratch/2_fp32_0" comm_exposed_ms 2.9 4.1
check "--zero 1: a step waits for at most its collectives of gradients and weights" \
    each_step "$scratch/2_fp32_1" comm_exposed_ms 2.9 7.1
for zero in 0 1; do
    out=$scratch/wire_$zero
    check "--grad-dtype bf16, --zero $zero" \
        by_variables 2 "${train[@]}" "${virtual[@]}" --precision fp32 --grad-dtype bf16 --zero $zero --output "$out"
    check "--grad-dtype bf16, --zero $zero: nearly the same loss" nearly "$out" "$scratch/2_fp32_0" 1e-3
    check "--grad-dtype bf16, --zero $zero: other bits" test "$(results "$out")" != "$(results "$scratch/2_fp32_0")"
done
check "--grad-dtype bf16 sends half" sends "$scratch/wire_0" $((parameters * 2))
check "--grad-dtype bf16 --zero 1 sends half of the gradients" sends "$scratch/wire_1" $((parameters * (2 + 4) / 2))
check "--grad-dtype bf16 on 3 GPUs" by_variables 3 "${three[@]}" --grad-dtype bf16 --output "$scratch/wire_3"
check "--grad-dtype bf16 on 3 GPUs: nearly the same loss" nearly "$scratch/wire_3" "$scratch/1_of_3" 1e-3
plan() { "$emulated" plan "${small[@]::14}" --ranks 2 --precision fp32 "$@"; }
check "plan counts the bf16 gradients of --grad-dtype bf16" grep -q 'gradients in bf16' <(plan --grad-dtype bf16)
check "plan counts no bf16 gradients without --grad-dtype bf16" test -z "$(plan | grep 'gradients in bf16')"

# ---- saved by two ranks, resumed by one
half=$scratch/half
check "2 steps on 2 GPUs, --zero 1" \
    by_variables 2 "${train[@]}" "${virtual[@]}" --precision bf16 --zero 1 --stop-after 2 --checkpoint-every 2 \
        --output "$half"
check "the other 2 steps on 1 GPU" \
    "${train[@]}" "${virtual[@]}" --precision bf16 --checkpoint-every 2 --output "$half" --resume
check "2 steps on 2 GPUs and 2 on 1 have the log and weights of 4 on 1" same_run "$scratch/1_bf16" "$half" 4

# ---- a rank is killed
# others_end NAME GONE TEXT CODE: all ranks but GONE end within 15 s, with this error and exit code.
others_end() {
    local start=$EPOCHREALTIME rank
    wait_for_ranks >/dev/null
    check "$1: the others end within 15 s" awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { exit !(b - a < 15) }'
    for rank in "${!pids[@]}"; do
        if [ "$rank" = "$2" ]; then continue; fi
        check "$1: rank $rank with exit code ${ended[rank]}" test "${ended[rank]}" = "$4"
        check "$1: rank $rank says $(grep -m1 '^error: ' "$scratch/rank_$rank.log")" \
            grep -q "^error: rank $rank on $(hostname): $3" "$scratch/rank_$rank.log"
    done
}
endless=("${train[@]}" --precision fp32 --steps 100000 --checkpoint-every 100000 --val-every 0 --global-batch 0)
# lose NAME N GONE TEXT [CODE]: starts N ranks and kills rank GONE.
lose() {
    rm -rf "$scratch/endless"
    start_ranks "$2" "${endless[@]}" --output "$scratch/endless"
    check "$1: the ranks train" wait_for "$scratch/endless/log.jsonl" '"step":3,'
    kill -9 "$(children "${pids[$3]}")"  # the child of timeout
    others_end "$1" "$3" "$4" "${5:-1}"
}
lose "rank 1 of 3 killed" 3 1 'another rank is gone, or not to be reached: '
lose "rank 0 of 2 killed" 2 0 'another rank is gone, or not to be reached: '
export SIMT_NCCL=deaf
endless+=(--timeout 3)
lose "rank 1 killed, and NCCL does not notice" 2 1 'no progress for 3 s (--timeout): ' 124
unset SIMT_NCCL
if [ -z "$mpi" ]; then
    rm -rf "$scratch/endless"
    # Not in a function, because $! would then be the process of the function instead of mpirun's.
    SIMT_DEVICES=2 mpirun --timeout 60 -np 2 "${endless[@]}" --output "$scratch/endless" >"$scratch/mpirun.log" 2>&1 &
    job=$!
    check "mpirun, rank 1 killed: the ranks train" wait_for "$scratch/endless/log.jsonl" '"step":3,'
    start=$EPOCHREALTIME
    kill -9 "$(children $job | tail -1)"
    wait $job 2>/dev/null
    status=$?
    check "mpirun, rank 1 killed: all end within 15 s" \
        awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { exit !(b - a < 15) }'
    check "mpirun, rank 1 killed: exit code $status" test $status != 0
fi
# One rank reads a token outside of the vocabulary: it prints the error, and all end with its exit code, or with 1 if
# they find that the rank has ended.
cp -r "$scratch/data" "$scratch/damaged"
for at in $(seq 3000 1000 40000); do
    printf '\xff\xff' | dd of="$scratch/damaged/train_000001.bin" bs=1 seek=$((1024 + 2 * at)) conv=notrunc status=none
done
by_variables 2 "${endless[@]}" --train-data "$scratch/damaged/train_*.bin" --output "$scratch/damaged_run" >/dev/null
check "bad data for one rank: exit codes ${ended[*]}" \
    grep -qxE '(1|65) 65' <<<"$(printf '%s\n' "${ended[@]}" | sort -n | xargs)"

# ---- refused starts
# refused_start NAME TEXT COMMAND...: starts two ranks. Rank 0 ends with exit code 2 and this text, the other with 1.
refused_start() {
    local name=$1 text=$2
    shift 2
    "$@"
    wait_for_ranks >/dev/null
    check "$name: exit codes ${ended[*]}" test "${ended[*]}" = "2 1"
    check "$name: $(grep -m1 '^error: ' "$scratch/rank_0.log")" grep -qF -- "$text" \
        <(grep '^error: ' "$scratch/rank_0.log")
}
never=("${train[@]}" --precision fp32 --output "$scratch/never")
if [ -z "$mpi" ]; then
    check "two ranks that see one GPU each" \
        env -u SIMT_DEVICES -u CUDA_VISIBLE_DEVICES mpirun --timeout 60 -np 2 "$each_rank" \
        env SIMT_DEVICES=1 "${train[@]}" "${virtual[@]}" --precision fp32 --output "$scratch/own_gpus" + \
        env SIMT_DEVICES=1 "${train[@]}" "${virtual[@]}" --precision fp32 --output "$scratch/own_gpus"
    check "two ranks that see one GPU each give the same bits as 1" same_run "$scratch/1_fp32" "$scratch/own_gpus" 4
fi
if [ -z "$mpi" ]; then
    SIMT_DEVICES=2 mpirun --timeout 60 -np 2 "$each_rank" "${never[@]}" + "${never[@]}" --lr 2e-2 \
        >"$scratch/mpirun.log" 2>&1
    check "another learning rate: exit code 2" test $? = 2
    without_zeros "$scratch/mpirun.log"
    check "another learning rate: $(grep -m1 '^error: ' "$scratch/mpirun.log")" \
        grep -qF 'rank 1 differs from rank 0: --lr 0.02 there, 0.01 on rank 0' "$scratch/mpirun.log"
fi
pids=()
for rank in 0 1; do
    RANK=$rank WORLD_SIZE=$((2 + rank)) LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port SIMT_DEVICES=2 \
        timeout 60 "${never[@]}" \
        >"$scratch/rank_$rank.log" 2>&1 </dev/null &
    pids+=($!)
done
refused_start "ranks that disagree on their number" "rank 1 is one of 3 ranks, and rank 0 is one of 2" :
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"
finish
