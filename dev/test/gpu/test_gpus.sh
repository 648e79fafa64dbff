#!/usr/bin/env bash
# test_gpus.sh: tests --gpus, which starts one rank per GPU, in the emulator: the same bits as one GPU, signals, a killed rank, a
# killed parent process, restarts, two machines, and refused starts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "--gpus" "build/release/emulator/train_gpt2cu is not built" && exit 0; fi
make_shards "$scratch/data" 30000 || fail "no shards"
small=(--train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384 --seq-len 16 --micro-batch 1
       --lr 1e-2 --warmup 2 --threads 1 --precision fp32 --autotune off)
train=("$emulated" "${small[@]}" --global-batch 64 --steps 4 --checkpoint-every 4 --deterministic-ranks 2)
endless=("$emulated" "${small[@]}" --global-batch 0 --steps 1000000 --checkpoint-every 100000)
export SIMT_DEVICES=4 OMP_WAIT_POLICY=passive

# start COMMAND...: starts it in the background. Sets job; its output goes to job.log.
start() {
    : >"$scratch/job.log"  # now, so that nobody finds the lines of the job before
    "${interruptible[@]}" "$@" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# job_ends SECONDS: the job ends in time and leaves none of its ranks. Sets status.
job_ends() {
    local begin=$EPOCHREALTIME pid
    wait "$job" 2>/dev/null
    status=$?
    if ! awk -v a="$begin" -v b="$EPOCHREALTIME" -v most="$(($1 * slower))" 'BEGIN { exit !(b - a < most) }'; then
        echo "it took longer than $1 s"
        return 1
    fi
    for pid in "${processes[@]}"; do if runs "$pid"; then echo "rank $pid is left" && return 1; fi; done
}
# they_train NAME: waits until the job trains into $out. Sets processes, its ranks.
they_train() {
    check "$1: the ranks train" wait_for "$out/log.jsonl" '"step":3,'
    mapfile -t processes < <(children "$job")
}
says() { grep -q -- "$1" "$scratch/job.log"; }

# ---- the same training
check "1 GPU" "${train[@]}" --output "$scratch/one"
check "--gpus 2" "${train[@]}" --gpus 2 --output "$scratch/two"
check "--gpus 2 gives the same bits as 1 GPU" same_run "$scratch/one" "$scratch/two" 4
check "--gpus 1,3" "${train[@]}" --gpus 1,3 --output "$scratch/listed"
check "--gpus 1,3 gives the same bits as 1 GPU" same_run "$scratch/one" "$scratch/listed" 4
check "--print-launch names the GPUs" test "$("$emulated" --print-launch --gpus 1,3)" = \
    "--gpus, rank 0 of 2, local rank 0 of 2, GPU 1 on $(hostname): joins the others at a free port of 127.0.0.1
--gpus, rank 1 of 2, local rank 1 of 2, GPU 3 on $(hostname): joins the others at a free port of 127.0.0.1"
check "--gpus all takes every GPU" test "$("$emulated" --print-launch --gpus all | grep -c 'of 4,')" = 4
check "--gpus 1 is a single process" test "$("$emulated" --print-launch --gpus 1)" = "single process on $(hostname)"
check "plan --gpus 4 plans for 4 ranks" grep -q ' x 4 ranks x ' <("$emulated" plan "${small[@]:2}" --global-batch 64 --gpus 4)
check "a resume on --gpus 2 needs no other option" "$emulated" --resume --output "$scratch/two" --gpus 2 --steps 6
check "a resume without --gpus takes one GPU" grep -q 'single process' <("$emulated" --resume --output "$scratch/two" --print-launch)

# ---- two machines: the same command on each
take_ports
nodes=("${train[@]}" --gpus 1 --nnodes 2 --rendezvous "127.0.0.1:$port" --output "$scratch/nodes")
start "${nodes[@]}" --node-rank 0
SIMT_DEVICES=4 "${nodes[@]}" --gpus 1,2 --node-rank 1 >"$scratch/node_1.log" 2>&1 && fail "machines with 1 and 2 GPUs trained"
processes=()
check "machines with 1 and 2 GPUs: all end" job_ends 20
check "machines with 1 and 2 GPUs are refused with exit code $status" test $status = 2
check "machines with 1 and 2 GPUs: $(grep -m1 '^error: ' "$scratch/job.log")" says 'as many GPUs to each'
port=$((port + 1))
nodes=("${train[@]}" --deterministic-ranks 0 --nnodes 2 --rendezvous "127.0.0.1:$port" --output "$scratch/four")
start "${nodes[@]}" --gpus 0,1 --node-rank 0
check "the second of two machines trains" timeout 60 "${nodes[@]}" --gpus 2,3 --node-rank 1
check "the first of two machines: all end" job_ends 20
check "the first of two machines: exit code $status" test $status = 0
check "two machines train as four ranks" says '4 ranks by NCCL'
if command -v python3 >/dev/null; then
    port=$((port + 1))
    python3 -c "import socket, time; s = socket.create_server(('', $port)); print('listens', flush=True); time.sleep(60)" >"$scratch/taken" &
    taken=$!
    wait_for "$scratch/taken" listens
    "${nodes[@]}" --rendezvous "127.0.0.1:$port" --rendezvous-timeout 5 --gpus 0,1 --node-rank 0 --output "$scratch/taken_port" >"$scratch/job.log" 2>&1
    check "a port that is taken: exit code 1" test $? = 1
    check "a port that is taken: $(grep -m1 '^error: ' "$scratch/job.log")" says "rank 0 cannot listen on 127.0.0.1:$port: Address already in use"
    kill $taken
else
    skip "a port that is taken" "there is no python3"
fi

# ---- signals
out=$scratch/asked
start "${endless[@]}" --gpus 2 --output "$out"
they_train "SIGTERM"
kill -TERM "$job"
check "SIGTERM: all end" job_ends 20
check "SIGTERM: exit code $status" test $status = 75
check "SIGTERM: a checkpoint" test -e "$out/latest"
out=$scratch/terminal
if command -v python3 >/dev/null; then
    # A Ctrl-C reaches this process and its ranks: it is one request, not two.
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
    timeout 60 python3 "$scratch/terminal.py" "$out" "${endless[@]}" --gpus 2 --output "$out"
    check "Ctrl-C on a terminal: exit code 75" test $? = 75
    check "Ctrl-C on a terminal: a checkpoint" test -e "$out/latest"
else
    skip "Ctrl-C on a terminal" "there is no python3"
fi
out=$scratch/twice
start "${endless[@]}" --gpus 2 --checkpoint-every 0 --output "$out"
they_train "a signal without checkpoints"
kill -INT "$job"
check "a signal without checkpoints: all end" job_ends 20
check "a signal without checkpoints: exit code $status" test $status = 130

# ---- faults
out=$scratch/killed
start "${endless[@]}" --gpus 2 --output "$out"
they_train "rank 1 killed"
kill -9 "${processes[1]}"
check "rank 1 killed: all end" job_ends 15
check "rank 1 killed: exit code $status" test $status = 137
check "rank 1 killed: $(grep -m1 '^error: ' "$scratch/job.log")" says '^error: rank 1 was ended by signal 9 (Killed; out of memory?); there is no checkpoint yet$'
out=$scratch/orphans
start "${endless[@]}" --gpus 2 --output "$out"
they_train "kill -9"
disown "$job"  # else bash prints a line about it
kill -9 "$job"
wait "$job" 2>/dev/null
for _ in $(seq 100); do if ! runs "${processes[0]}" && ! runs "${processes[1]}"; then break; fi; sleep 0.05; done
check "kill -9 leaves no rank" test -z "$(for pid in "${processes[@]}"; do runs "$pid" && echo "$pid"; done)"

# ---- restarts
out=$scratch/restarted
start "${endless[@]}" --gpus 2 --max-restarts 2 --checkpoint-every 5 --output "$out"
check "restarts: the ranks save" wait_for "$out/step_000005/model.safetensors"
mapfile -t processes < <(children "$job")
kill -9 "${processes[1]}"
check "restarts: a line says why" wait_for "$scratch/job.log" "^restart 1 of 2 in 1 s: rank 1 was ended by signal 9"
check "restarts: the ranks continue" wait_for "$scratch/job.log" ", restart 1"
sleep 1
kill -INT "$job"
mapfile -t processes < <(children "$job")
check "restarts: a signal ends all" job_ends 20
check "restarts: a signal does not count as a failure: exit code $status" grep -qxE '75|130' <<<$status
start "${train[@]}" --gpus 2 --max-restarts 5 --train-data "$scratch/none_*.bin" --output "$scratch/no_data"
processes=()
check "missing data: all end" job_ends 20
check "missing data: no restart" test "$status $(grep -c '^restart ' "$scratch/job.log")" = "66 0"

# ---- refused starts
never=("${train[@]}" --output "$scratch/never")
for list in 0 0,,2 -1 all,1 '1,' x; do refused "--gpus=$list" 2 "is neither all, nor a number of GPUs from 1, nor a list" "${never[@]}" "--gpus=$list"; done
refused "--gpus without a list" 2 "--gpus is empty" "${never[@]}" --gpus ""
refused "an error of all ranks is printed once" 2 "error: ranks 0 and 1 on $(hostname): --global-batch 24 is not" "${never[@]}" --gpus 2 --global-batch 24
refused "more ranks than GPUs" 2 "--gpus 5, but there are 4 on this host" "${never[@]}" --gpus 5
refused "a GPU that is not there" 2 "but there are 4 on this host: GPUs 0 to 3" "${never[@]}" --gpus 0,4
refused "a GPU twice" 2 "--gpus 1,2,1 names GPU 1 twice" "${never[@]}" --gpus 1,2,1
refused "--gpus and --rank" 2 "leave out --rank" "${never[@]}" --gpus 2 --rank 0 --world-size 2
refused "--gpus and --ranks" 2 "give one" "${never[@]}" --gpus 2 --ranks 2
refused "--ranks on GPUs" 2 "give --gpus 2" "${never[@]}" --ranks 2
refused "--gpus on the CPU" 2 "which has --ranks" "$program" "${never[@]:1}" --gpus 2
refused "--gpus under torchrun" 2 "torchrun has started 2 processes" \
    env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h0 MASTER_PORT=29511 "${never[@]}" --gpus 2
refused "--gpus under mpirun" 2 "mpirun has started 2 processes" \
    env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "${never[@]}" --gpus 2
refused "--gpus under srun" 2 "srun has started 2 processes" \
    env SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_LOCALID=0 "${never[@]}" --gpus 2
refused "--nnodes without --rendezvous" 2 "needs --rendezvous HOST:PORT" "${never[@]}" --gpus 2 --nnodes 2 --node-rank 0
refused "--nnodes without --node-rank" 2 "needs --node-rank" "${never[@]}" --gpus 2 --nnodes 2 --rendezvous h0:29500
refused "--max-restarts alone" 2 "--max-restarts needs --gpus or --ranks" "${never[@]}" --max-restarts 2
refused "--max-restarts without checkpoints" 2 "needs checkpoints to continue from" "${never[@]}" --gpus 2 --max-restarts 2 --checkpoint-every 0
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"
finish
