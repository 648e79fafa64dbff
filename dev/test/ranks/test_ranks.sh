#!/usr/bin/env bash
# test_ranks.sh: tests training on several CPU ranks under mpirun on this machine: the same bits for any number
# of ranks, the bytes that they send, and the behaviour of the other ranks if one is killed, is stopped, or has
# other options or data.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks by mpirun" "$reason" && exit 0; fi
several_ranks_here

make_shards "$scratch/data" 30000 || fail "no shards"
data=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin")
# The vocabulary needs no padding, so that ranks send exactly the bytes of the parameters.
small=(--layers 2 --heads 2 --channels 64 --vocab-size 384 --seq-len 64 --micro-batch 1 --lr 1e-2 --warmup 2 --quiet)
export OMP_NUM_THREADS=1
train=("$program" "${data[@]}" "${small[@]}" --global-batch 1024 --steps 4 --val-every 2 --checkpoint-every 4)
virtual=(--deterministic-ranks 8)
parameters=128768  # 384 x 64 + 64 x 64 + 2 (12 x 64 x 64 + 13 x 64) + 2 x 64

# ---- the same bits on 1, 2, 4 and 8 ranks
for precision in fp32 bf16; do
    one=$scratch/1_$precision
    options=("${train[@]}" "${virtual[@]}" --precision "$precision")
    check "$precision: 1 rank" ranks 1 "${options[@]}" --output "$one"
    check "$precision: the log has every step and loss" test "$(results "$one" | grep -c .)" = 7
    for n in 2 4 8; do
        check "$precision: $n ranks" ranks $n "${options[@]}" --output "$scratch/${n}_$precision"
        check "$precision: $n ranks give the same bits as 1" same_run "$one" "$scratch/${n}_$precision" 4
    done
    for n in 2 4; do
        check "$precision: --zero 1 on $n ranks" ranks $n "${options[@]}" --zero 1 --output "$scratch/${n}z_$precision"
        check "$precision: --zero 1 on $n ranks gives the same bits as 1" same_run "$one" "$scratch/${n}z_$precision" 4
    done
    # --zero 2 adds the ranks in every micro-step, so its sums are rounded in another order than those of --zero 0.
    check "$precision: --zero 2 on 1 rank" ranks 1 "${options[@]}" --zero 2 --output "$scratch/1zz_$precision"
    check "$precision: --zero 2 has nearly the same loss" nearly "$scratch/1zz_$precision" "$one" 1e-4
    for n in 2 4; do
        check "$precision: --zero 2 on $n ranks" ranks $n "${options[@]}" --zero 2 --output "$scratch/${n}zz_$precision"
        check "$precision: --zero 2 on $n ranks gives the same bits as 1" \
            same_run "$scratch/1zz_$precision" "$scratch/${n}zz_$precision" 4
    done
done
check "1 rank without mpirun" "${train[@]}" "${virtual[@]}" --precision fp32 --output "$scratch/alone"
check "1 rank without mpirun gives the same bits" same_run "$scratch/1_fp32" "$scratch/alone" 4

three=("${train[@]}" --global-batch 1536 --precision fp32)
check "3 ranks" ranks 3 "${three[@]}" --output "$scratch/3"
check "3 ranks with --zero 1" ranks 3 "${three[@]}" --zero 1 --output "$scratch/3z"
check "3 ranks: --zero 1 changes no bit" same_run "$scratch/3" "$scratch/3z" 4
check "3 ranks with --zero 2" ranks 3 "${three[@]}" --zero 2 --output "$scratch/3zz"
check "3 ranks: --zero 2 has nearly the same loss" nearly "$scratch/3zz" "$scratch/3" 1e-4
# With one micro-step per virtual rank there is only one order of sums, so a run may continue with another --zero and
# another number of ranks.
stages=("${train[@]}" "${virtual[@]}" --precision bf16 --global-batch 512 --output "$scratch/stages")
check "1 rank, one micro-step per virtual rank" ranks 1 "${stages[@]}" --output "$scratch/one_stage"
check "--zero 2 on 2 ranks, one step" ranks 2 "${stages[@]}" --zero 2 --stop-after 1
check "--zero 0 on 4 ranks, one step more" ranks 4 "${stages[@]}" --zero 0 --stop-after 1 --resume
check "--zero 2 on 4 ranks, one step more" ranks 4 "${stages[@]}" --zero 2 --stop-after 1 --resume
check "--zero 1 on 2 ranks, the last step" ranks 2 "${stages[@]}" --zero 1 --resume
check "each --zero continues with the same bits as the others" same_run "$scratch/one_stage" "$scratch/stages" 4
three_wire=("${three[@]}" --grad-dtype bf16)
check "3 ranks, --grad-dtype bf16" ranks 3 "${three_wire[@]}" --output "$scratch/3_wire"
check "3 ranks, --grad-dtype bf16: nearly the loss of fp32" nearly "$scratch/3_wire" "$scratch/3" 1e-3
check "3 ranks, --grad-dtype bf16: other bits" test "$(results "$scratch/3_wire")" != "$(results "$scratch/3")"
check "3 ranks, --grad-dtype bf16 --zero 1" ranks 3 "${three_wire[@]}" --zero 1 --output "$scratch/3z_wire"
check "3 ranks, --grad-dtype bf16: --zero 1 has nearly the same loss" nearly "$scratch/3z_wire" "$scratch/3_wire" 1e-3
check "1 rank on the batch of 3" ranks 1 "${three[@]}" --output "$scratch/1_of_3"
check "3 ranks: nearly the loss of 1" nearly "$scratch/3" "$scratch/1_of_3" 1e-4

# ---- bytes that ranks send
# sends RUN BYTES: each step sends this number within 2 %.
sends() {
    sed -n 's/.*"kind":"step".*"comm_bytes":\([0-9]*\).*/\1/p' "$1/log.jsonl" |
        awk -v want="$2" '
            { n++; if ($1 < 0.98 * want || $1 > 1.02 * want) { print $1 " bytes instead of " want; bad = 1 } }
            END { exit n != 4 || bad }'
}
for n in 2 4 8; do
    check "$n ranks send 2 (n-1)/n of the gradients" sends "$scratch/${n}_fp32" $((2 * (n - 1) * parameters * 4 / n))
done
check "--zero 1 sends no more" sends "$scratch/4z_fp32" $((2 * 3 * parameters * 4 / 4))
check "--zero 1 in bf16 sends gradients and half-sized weights" \
    sends "$scratch/4z_bf16" $((3 * parameters * (4 + 2) / 4))
check "--zero 2 sends gradients in both micro-steps, and weights once" \
    sends "$scratch/4zz_fp32" $((3 * parameters * (4 + 4 + 4) / 4))
check "larger micro-batches" ranks 2 "${train[@]}" --precision fp32 --micro-batch 4 --output "$scratch/2_micro_4"
check "ranks send once per step, not once per micro-step" sends "$scratch/2_micro_4" $((parameters * 4))
check "--grad-dtype bf16" ranks 2 "${train[@]}" "${virtual[@]}" --precision fp32 --grad-dtype bf16 \
    --output "$scratch/2_wire"
check "--grad-dtype bf16 sends half" sends "$scratch/2_wire" $((parameters * 2))
check "--grad-dtype bf16 has nearly the same loss" nearly "$scratch/2_wire" "$scratch/2_fp32" 1e-3
check "--grad-dtype bf16 gives other bits" test "$(results "$scratch/2_wire")" != "$(results "$scratch/2_fp32")"

# ---- validation: the same windows for any number of ranks, also if it does not divide the number of windows
for batches in 5 0; do
    for n in 1 2 3; do
        check "--val-batches $batches on $n ranks" \
            ranks $n "${three[@]}" --micro-batch 2 --steps 1 --warmup 0 --checkpoint-every 0 \
            --val-batches $batches --output "$scratch/val_${batches}_$n"
    done
    values=$(for n in 1 2 3; do first_val "$scratch/val_${batches}_$n"; done)
    check "--val-batches $batches: 1, 2 and 3 ranks have the same loss: ${values//$'\n'/ }" \
        test "$(sort <<<"$values" | uniq -c | awk '{ print $1 }')" = 3
done

# ---- faults
# start_ranks N COMMAND...: starts them in the background. Sets job, processes and segments (their shared memory).
start_ranks() {
    local out=$scratch/background.log
    mpirun --timeout 60 -np "$@" >"$out" 2>&1 </dev/null &
    job=$!
    for _ in $(seq 500); do  # they have shared memory once MPI has started
        mapfile -t processes < <(children $job)
        mapfile -t segments < <(for pid in ${processes[@]+"${processes[@]}"}; do
            grep -oE '/dev/shm/(vader|sm)_segment[^ ]*' "/proc/$pid/maps" 2>/dev/null; done | sort -u)
        if [ ${#segments[@]} -ge "$1" ]; then return; fi
        sleep 0.02
    done
}

# job_ends SECONDS: the job ends in time, and leaves no process and no shared memory. Sets status.
job_ends() {
    local start=$EPOCHREALTIME pid segment
    wait "$job"
    status=$?
    if ! awk -v a="$start" -v b="$EPOCHREALTIME" -v most="$1" 'BEGIN { exit !(b - a < most) }'; then
        echo "the job still runs after $1 s"
        return 1
    fi
    for pid in "${processes[@]}"; do  # the mpirun of Open MPI 5 can end a moment before the last rank
        for _ in $(seq 50); do if ! runs "$pid"; then break; fi; sleep 0.02; done
        if runs "$pid"; then echo "process $pid is left"; return 1; fi
    done
    for segment in "${segments[@]}"; do if [ -e "$segment" ]; then echo "$segment is left"; return 1; fi; done
}

long=("${train[@]}" "${virtual[@]}" --precision fp32 --steps 60 --checkpoint-every 20)
check "60 steps on 1 rank" ranks 1 "${long[@]}" --output "$scratch/undisturbed"
start_ranks 2 "${long[@]}" --output "$scratch/killed"
check "2 ranks with shared memory" test "${#processes[@]} ${#segments[@]}" = "2 2"
check "2 ranks train to step 20" wait_for "$scratch/killed/step_000020/model.safetensors"
kill -9 "${processes[1]}"
check "rank 1 killed: all end within 15 s, and leave nothing" job_ends 15
check "rank 1 killed: exit code $status" test "$status" != 0
check "rank 1 killed: mpirun names the rank" mpirun_says 'process rank 1.*signal 9' "$scratch/background.log"
check "rank 1 killed: training did not end before" test ! -e "$scratch/killed/step_000060"
check "rank 1 killed: resumed on 4 ranks" ranks 4 "${long[@]}" --output "$scratch/killed" --resume
check "rank 1 killed: the log and weights of an uninterrupted run" same_run "$scratch/undisturbed" "$scratch/killed" 60

endless=("${train[@]}" "${virtual[@]}" --precision fp32 --steps 100000 --checkpoint-every 100000 --val-every 0)
for signal in USR1 TERM; do
    out=$scratch/asked_$signal
    start_ranks 2 "${endless[@]}" --output "$out"
    check "SIG$signal: the ranks train" wait_for "$out/log.jsonl" '"step":3,'
    kill -$signal "$job"
    check "SIG$signal to mpirun: all end, and leave nothing" job_ends 15
    if [ $signal = USR1 ]; then  # mpirun passes SIGUSR1 on to the ranks; at SIGTERM it kills them after two seconds
        check "SIGUSR1: exit code 75" test "$status" = 75
        check "SIGUSR1: a checkpoint" test -e "$out/latest"
    else
        check "SIGTERM: exit code $status" test "$status" != 0
    fi
done

# A signal during a step that takes seconds: all ranks abandon the step at the same micro-step, and the
# resumed run repeats it.
slow=("${train[@]}" --seq-len 16 --global-batch 32000 --steps 3 --precision fp32 --checkpoint-every 3 --val-every 0)
check "3 long steps on 2 ranks" ranks 2 "${slow[@]}" --output "$scratch/slow"
start_ranks 2 "${slow[@]}" --quiet=0 --output "$scratch/given_up"
check "a long step: the ranks train" wait_for "$scratch/given_up/log.jsonl" '"step":0,'
kill -TERM "${processes[1]}"
check "a long step: all end, and leave nothing" job_ends 15
check "a long step: exit code 75" test "$status" = 75
check "a long step: a line says so" grep -q "^stopped on request.* step 1 is saved" "$scratch/background.log"
check "a signal in a long step: the step is not saved" test "$(cat "$scratch/given_up/latest")" = step_000001
check "a long step: resumed" ranks 2 "${slow[@]}" --output "$scratch/given_up" --resume
check "a long step: the log and weights of an uninterrupted run" same_run "$scratch/slow" "$scratch/given_up" 3

start_ranks 2 "${endless[@]}" --output "$scratch/busy"
check "a live run: its ranks train" wait_for "$scratch/busy/log.jsonl" '"step":3,'
ranks 2 "${endless[@]}" --output "$scratch/busy" --resume >"$scratch/second.log" 2>&1
check "a second run in the output of a live one: exit code 73" test $? = 73
without_zeros "$scratch/second.log"
check "a second run in the output of a live one: only one rank prints the error" \
    test "$(grep -c '^error: ' "$scratch/second.log")" = 1
check "a second run in the output of a live one: the error names the process" \
    grep -qE "is in use by another run: pid (${processes[0]}|${processes[1]}) on " "$scratch/second.log"
kill -USR1 "$job"
check "the live run continues until it is asked to stop" job_ends 15

start_ranks 2 "${endless[@]}" --output "$scratch/orphans"
check "mpirun to be killed: the ranks train" wait_for "$scratch/orphans/log.jsonl" '"step":3,'
kill -9 "$job"
wait "$job" 2>/dev/null
for _ in $(seq 150); do if ! runs "${processes[0]}" && ! runs "${processes[1]}"; then break; fi; sleep 0.1; done
for pid in "${processes[@]}"; do
    check "mpirun killed: rank $pid does not continue" test "$(runs "$pid"; echo $?)" = 1
done
check "mpirun killed: the run can be resumed" \
    ranks 2 "${endless[@]}" --output "$scratch/orphans" --resume --stop-after 1
rm -f "${segments[@]}"  # no process is left to remove them

# One rank reads a token outside of the vocabulary: it prints the error, and all end with its code.
cp -r "$scratch/data" "$scratch/damaged"
printf '\xff\xff' | dd of="$scratch/damaged/train_000001.bin" bs=1 seek=41024 conv=notrunc status=none
ranks 4 "${long[@]}" --train-data "$scratch/damaged/train_*.bin" --output "$scratch/damaged_run" \
    >"$scratch/damaged.log" 2>&1
check "bad data for one rank: exit code 65" test $? = 65
without_zeros "$scratch/damaged.log"
check "bad data for one rank: the error names the rank and the token" \
    grep -q "^error: rank [0-3] on $(hostname): .*65535" "$scratch/damaged.log"
check "bad data for one rank: no other rank prints an error" test "$(grep -c '^error: ' "$scratch/damaged.log")" = 1
check "bad data for one rank: resumed with good data" ranks 4 "${long[@]}" --output "$scratch/damaged_run" --resume
check "bad data for one rank: the log and weights of an uninterrupted run" \
    same_run "$scratch/undisturbed" "$scratch/damaged_run" 60
printf '\xff\xff' | dd of="$(ls "$scratch"/damaged/val_*.bin | head -1)" bs=1 seek=1600 conv=notrunc status=none
ranks 2 "${long[@]}" --val-data "$scratch/damaged/val_*.bin" --output "$scratch/damaged_val" \
    >"$scratch/damaged.log" 2>&1
check "bad validation data for one rank: exit code 65" test $? = 65
without_zeros "$scratch/damaged.log"
check "bad validation data for one rank: only one rank prints an error" \
    test "$(grep -c '^error: .*65535' "$scratch/damaged.log")" = 1

# ---- refused before any file is written
# refused_ranks NAME TEXT COMMAND...: exit code 2, and every error line has the text and names its rank.
refused_ranks() {
    local name=$1 text=$2 status=0
    shift 2
    timeout 60 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || status=$?
    without_zeros "$scratch/err"
    if [ $status != 2 ]; then
        fail "$name: exit code $status instead of 2: $(tail -n 3 "$scratch/err")"
    elif ! grep -q '^error: ' "$scratch/err" || grep '^error: ' "$scratch/err" | grep -qvF -- "$text"; then
        fail "$name: said $(cat "$scratch/err")"
    elif grep '^error: ' "$scratch/err" | grep -qvE "^error: rank [0-9]+ on $(hostname): "; then
        fail "$name: a message does not name its rank: $(cat "$scratch/err")"
    elif [ -e "$scratch/never/log.jsonl" ]; then
        fail "$name: wrote a log"
    else
        pass "$name: $(grep -m1 '^error: ' "$scratch/err")"
    fi
}
never=("${train[@]}" --precision fp32 --output "$scratch/never")
refused_ranks "another learning rate" 'rank 1 differs from rank 0: --lr 0.02 there, 0.01 on rank 0' \
    mpirun -np 2 "$each_rank" "${never[@]}" + "${never[@]}" --lr 2e-2
refused_ranks "another option on rank 2" 'rank 2 differs from rank 0: --seed' \
    mpirun -np 4 "$each_rank" "${never[@]}" + "${never[@]}" + "${never[@]}" --seed 7 + "${never[@]}"
make_shards "$scratch/other" 20000
refused_ranks "other training data" "rank 1 differs from rank 0: training data " \
    mpirun -np 2 "$each_rank" "${never[@]}" + "${never[@]}" --train-data "$scratch/other/train_*.bin"
refused_ranks "other validation data" "rank 1 differs from rank 0: validation data " \
    mpirun -np 2 "$each_rank" "${never[@]}" + "${never[@]}" --val-data "$scratch/other/val_*.bin"
cp -r "$scratch/data" "$scratch/one_bit"  # files of the same names and sizes
byte=$(od -An -tu1 -j30000 -N1 "$scratch/data/train_000001.bin")
printf "\\x$(printf %x $((byte ^ 1)))" | dd of="$scratch/one_bit/train_000001.bin" bs=1 seek=30000 conv=notrunc \
    status=none
check "the copy of the data differs in one byte" \
    test "$(cmp -l "$scratch/data/train_000001.bin" "$scratch/one_bit/train_000001.bin" | wc -l)" = 1
refused_ranks "training data with one other bit" "rank 1 differs from rank 0: training data " \
    mpirun -np 2 "$each_rank" "${never[@]}" + "${never[@]}" --train-data "$scratch/one_bit/train_*.bin"
# Another program: a digit of the checksum of its sources is changed. Another build of the same sources:
# a byte is added.
sources=$(awk '{ print $NF }' "${program%/*}/commit")
sed "s/$sources/$(tr 0-9 1-90 <<<"$sources")/" "$program" >"$scratch/other_program"
cat "$program" <(echo) >"$scratch/other_build"
chmod +x "$scratch/other_program" "$scratch/other_build"
refused_ranks "another program" "rank 1 differs from rank 0: program \"$("$program" \
    --version) for the CPU, sources $(tr 0-9 1-90 <<<"$sources")\" there, \"" \
    mpirun -np 2 "$each_rank" "${never[@]}" + "$scratch/other_program" "${never[@]:1}"
evaluate=(eval --init "$scratch/1_fp32" --val-data "$scratch/data/val_*.bin")
refused_ranks "eval by another program" "rank 1 differs from rank 0: program \"" \
    mpirun -np 2 "$each_rank" "$program" "${evaluate[@]}" + "$scratch/other_program" "${evaluate[@]}"
refused_ranks "--deterministic-ranks, another build" \
    "rank 1 runs another build of the sources than rank 0: they may round differently, and --deterministic-ranks" \
    mpirun -np 2 "$each_rank" "${never[@]}" --deterministic-ranks 2 + "$scratch/other_build" "${never[@]:1}" \
        --deterministic-ranks 2
if "$program" plan "${small[@]}" | grep -q '^device .*, plain;'; then
    skip "ranks with another CPU_ISA" "this machine has plain only"
else
    refused_ranks "--deterministic-ranks, another CPU_ISA" "rank 1 has CPU_ISA=plain, rank 0 has " \
        mpirun -np 2 "$each_rank" "${never[@]}" --deterministic-ranks 2 + env CPU_ISA=plain "${never[@]}" \
            --deterministic-ranks 2
fi
refused_ranks "a batch that does not divide" \
    "--global-batch 1000 is not a multiple of 128 tokens = --micro-batch 1 x --seq-len 64 x 2 ranks; try" \
    mpirun -np 2 "${never[@]}" --global-batch 1000
refused_ranks "more ranks than virtual ranks" "--deterministic-ranks 2 on 4 ranks" mpirun -np 4 "${never[@]}" \
    --deterministic-ranks 2
refused_ranks "virtual ranks on 3 ranks" "--deterministic-ranks 8 on 3 ranks" mpirun -np 3 "${never[@]}" \
    --global-batch 1536 \
    --deterministic-ranks 8
refused_ranks "torchrun's variables without torchrun" \
    "2 CPU ranks need MPI: start with mpirun -np 2 (found: torchrun)" \
    env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29511 "${never[@]}"
refused_ranks "tokenize on 2 ranks" \
    "tokenize runs in one process, but mpirun started 2, which would all do the same; start it without mpirun" \
    mpirun -np 2 "$program" tokenize "$scratch/data.txt" --output "$scratch/tokenized" --train-bpe 300
refused_ranks "generate on 2 ranks that have the same layers" \
    "generate needs as many ranks as --tensor-parallel 1 says, and there are 2; give --ranks 1" \
    mpirun -np 2 "$program" generate --init "$scratch/1_fp32"
refused_ranks "tensor-parallel generate on 3 ranks" \
    "generate needs as many ranks as --tensor-parallel 2 says, and there are 3; give --ranks 2" \
    mpirun -np 3 "$program" generate --init "$scratch/1_fp32" --tensor-parallel 2
check "tokenize on 2 ranks wrote nothing" test ! -e "$scratch/tokenized"

# ---- a model that several ranks evaluate or continue
texts=(generate --init "$scratch/1_fp32" --precision fp32 --max-tokens 40 --num-samples 2 --prompt a)
losses=(eval --init "$scratch/1_fp32" --precision fp32 --val-data "$scratch/data/val_*.bin" --micro-batch 2)
"$program" "${texts[@]}" >"$scratch/texts"
"$program" "${losses[@]}" >"$scratch/losses"
check "generate: 2 tensor-parallel ranks print the text of one" \
    cmp <(timeout 60 "$program" "${texts[@]}" --ranks 2 --tensor-parallel 2 2>"$scratch/notes") "$scratch/texts"
check "generate: the text has more than the prompts" test "$(wc -c <"$scratch/texts")" -gt 20
for ranks in "2" "2 --tensor-parallel 2" "4 --tensor-parallel 2"; do
    # shellcheck disable=SC2086
    check "eval: --ranks $ranks prints the loss of one rank" \
        cmp <(timeout 60 "$program" "${losses[@]}" --ranks $ranks 2>"$scratch/notes") "$scratch/losses"
done

refused_ranks "eval of different windows" "rank 1 differs from rank 0: --seq-len 32 there, 64 on rank 0" \
    mpirun -np 2 "$each_rank" "$program" "${losses[@]}" --seq-len 64 + "$program" "${losses[@]}" --seq-len 32
refused_ranks "generate with different prompts" 'rank 1 differs from rank 0: --prompt "b" there, "a" on rank 0' \
    mpirun -np 2 "$each_rank" "$program" "${texts[@]}" --tensor-parallel 2 + "$program" "${texts[@]:0:9}" --prompt b \
        --tensor-parallel 2
refused_ranks "layers that ranks divide differently" \
    "rank 1 differs from rank 0: --tensor-parallel 1 there, 2 on rank 0" \
    mpirun -np 2 "$each_rank" "${never[@]}" --tensor-parallel 2 + "${never[@]}"
check "--grad-dtype bf16 with 3 tensor-parallel ranks" \
    mpirun -np 3 --oversubscribe "${train[@]}" --heads 3 --channels 24 --output '' \
    --tensor-parallel 3 --grad-dtype bf16

# ---- torchrun, which starts ranks without MPI
reason=$(no_torchrun_because)
if [ -z "$reason" ]; then
    torchrun() { timeout 60 "${torchrun[@]}" "${one_host[@]}" "$@"; }
    check "torchrun: 1 rank trains" \
        torchrun --nproc_per_node=1 "${train[@]}" "${virtual[@]}" --precision fp32 --output "$scratch/torchrun"
    check "torchrun: 1 rank gives the same bits as mpirun" same_run "$scratch/1_fp32" "$scratch/torchrun" 4
    torchrun --nproc_per_node=2 "${never[@]}" >"$scratch/torchrun.log" 2>&1
    check "torchrun: 2 ranks are refused with exit code 2" grep -q 'exitcode *: 2 ' "$scratch/torchrun.log"
    check "torchrun: 2 ranks are refused with the reason" \
        grep -q 'traceback : 2 CPU ranks need MPI: start with mpirun -np 2 (found: torchrun)' "$scratch/torchrun.log"
    check "torchrun: 2 ranks write nothing" test ! -e "$scratch/never/log.jsonl"
else
    skip "torchrun" "$reason"
fi

finish
