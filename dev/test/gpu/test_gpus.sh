#!/usr/bin/env bash
# test_gpus.sh: tests --ranks on GPUs, which starts one rank per GPU, in the emulator: the same bits as one GPU,
# signals, a killed rank, a killed parent process, and refused starts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "--ranks on GPUs" "build/release/emulator/train_gpt2cu is not built" && exit 0; fi
make_shards "$scratch/data" 30000 || fail "no shards"
small=(--train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384 --seq-len 16
    --micro-batch 1
       --lr 1e-2 --warmup 2 --precision fp32 --autotune off)
train=("$emulated" "${small[@]}" --global-batch 64 --steps 4 --checkpoint-every 4 --deterministic-ranks 2)
endless=("$emulated" "${small[@]}" --global-batch 0 --steps 1000000 --checkpoint-every 100000)
export SIMT_DEVICES=4 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# start COMMAND...: starts it in the background. Sets job; its output goes to job.log.
start() {
    "${interruptible[@]}" "$@" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# job_ends SECONDS: the job ends in time and leaves none of its ranks. Sets status.
job_ends() {
    local pid in_time=0
    ends "$1" || in_time=1
    for pid in "${processes[@]}"; do if runs "$pid"; then echo "rank $pid is left" && return 1; fi; done
    return $in_time
}
# they_train NAME: waits until the job trains into $out. Sets processes, its ranks.
they_train() {
    check "$1: the ranks train" wait_for "$out/log.jsonl" '"step":3,'
    mapfile -t processes < <(children "$job")
}

# ---- the same training
check "1 GPU" "${train[@]}" --output "$scratch/one"
check "--ranks 2" "${train[@]}" --ranks 2 --output "$scratch/two"
check "--ranks 2 gives the same bits as 1 GPU" same_run "$scratch/one" "$scratch/two" 4
check "--ranks 2 starts two ranks" grep -q '"world_size":2' "$scratch/two/log.jsonl"
check "--ranks all" "${train[@]}" --deterministic-ranks 0 --ranks all --output "$scratch/all"
check "--ranks all takes every GPU" grep -q '"world_size":4' "$scratch/all/log.jsonl"
check "--ranks 1" "${train[@]}" --ranks 1 --output "$scratch/single"
check "--ranks 1 is a single process" grep -q '"world_size":1' "$scratch/single/log.jsonl"
check "plan --ranks 16 plans for more GPUs than there are" \
    grep -q ' x 16 ranks x ' <("$emulated" plan "${small[@]:2}" --global-batch 256 --ranks 16)
check "a resume on --ranks 2 needs no other option" "$emulated" --resume --output "$scratch/two" --ranks 2 --steps 6

# ---- signals
for signal in TERM INT USR1; do
    out=$scratch/asked_$signal
    start "${endless[@]}" --ranks 2 --output "$out"
    they_train "SIG$signal"
    kill -$signal "$job"
    check "SIG$signal: all end" job_ends 20
    check "SIG$signal: exit code $status" test $status = 75
    check "SIG$signal: a checkpoint" test -e "$out/latest"
done
out=$scratch/terminal
if command -v python3 >/dev/null; then
    # A Ctrl-C reaches the ranks once: it is one request, not two.
    cat >"$scratch/terminal.py" <<'END'
import os, pty, sys, time
log = sys.argv[1] + "/log.jsonl"
child, terminal = pty.fork()
if child == 0: os.execv(sys.argv[2], sys.argv[2:])
os.set_blocking(terminal, False)
sent = False
while True:
    try:
        if not os.read(terminal, 65536): break
    except BlockingIOError: time.sleep(0.05)
    except OSError: break
    if not sent and os.path.exists(log) and '"step":3,' in open(log).read():
        os.write(terminal, b"\x03")
        sent = True
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
END
    timeout 60 python3 "$scratch/terminal.py" "$out" "${endless[@]}" --ranks 2 --output "$out"
    check "Ctrl-C on a terminal: exit code 75" test $? = 75
    check "Ctrl-C on a terminal: a checkpoint" test -e "$out/latest"
else
    skip "Ctrl-C on a terminal" "there is no python3"
fi

# ---- faults
for rank in 0 1; do
    out=$scratch/killed_$rank
    start "${endless[@]}" --ranks 2 --output "$out"
    they_train "rank $rank killed"
    kill -9 "${processes[$rank]}"
    check "rank $rank killed: all end" job_ends 15
    check "rank $rank killed: exit code $status" test $status = 137
    check "rank $rank killed: the error names it" \
        grep -q "^error: rank $rank was ended by signal 9 (Killed)$" "$scratch/job.log"
done
out=$scratch/orphans
start "${endless[@]}" --ranks 2 --output "$out"
they_train "kill -9"
disown "$job"  # else bash prints a line about it
kill -9 "$job"
for _ in $(seq 200); do if ! runs "${processes[0]}" && ! runs "${processes[1]}"; then break; fi; sleep 0.05; done
check "kill -9 leaves no rank" test -z "$(for pid in "${processes[@]}"; do runs "$pid" && echo "$pid"; done)"

# ---- refused starts
never=("${train[@]}" --output "$scratch/never")
refused "an error of all ranks is printed once" 2 "--global-batch 24 is not" "${never[@]}" --ranks 2 --global-batch 24
refused "missing data: the error is printed once" 66 "none_" "${never[@]}" --ranks 2 --train-data "$scratch/none_*.bin"
refused "a usage error is printed once" 2 "--zero 9" "${never[@]}" --ranks 2 --zero 9
refused "more ranks than GPUs" 2 "--ranks 5, but there are 4 GPUs on this machine" "${never[@]}" --ranks 5
refused "--ranks x" 2 "--ranks" "${never[@]}" --ranks x
refused "--ranks all on the CPU" 2 \
    "--ranks all takes every GPU, and this is the program for the CPU" "$program" "${never[@]:1}" --ranks all
refused "--ranks under torchrun" 2 "torchrun has started 2" \
    env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h0 MASTER_PORT=29511 "${never[@]}" --ranks 4
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"
finish
