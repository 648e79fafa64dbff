#!/usr/bin/env bash
# test_elastic.sh: torchrun --nnodes 1:2 with an agent on each of two hosts: the run loses a host, continues on the
# other from its last checkpoint, and takes the host back. It ends with the bits of a run that was never disturbed. The
# ranks are emulated GPUs, because torchrun cannot start CPU ranks.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

emulated=$PWD/build/release/emulator/train_gpt2cu
reason=$(no_hosts_because)
if [ ! -x "$emulated" ]; then reason="build/release/emulator/train_gpt2cu is not built"; fi
if [ -z "$reason" ]; then reason=$(no_torchrun_because); fi
if [ -n "$reason" ]; then skip "a run that loses a host under torchrun" "$reason" && exit 0; fi
export CLUSTER=e$$n CLUSTER_SUBNET=10.79.0
export SIMT_NCCL_FOLDER=$scratch  # the hosts are network namespaces, which share no abstract sockets
trap 'if is_main_shell; then dev/test/ranks/cluster.sh down 2; rm -rf "$scratch"; fi' EXIT

make_shards "$scratch/data" 30000 || fail "no shards"
train=("$emulated" --train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384
    --seq-len 16
    --micro-batch 1 --global-batch 32 --steps 150 --checkpoint-every 10 --precision fp32 --autotune off --quiet
    --deterministic-ranks 2)
out=$scratch/elastic

# agent HOST: starts torchrun on a host, in the background. docs/distributed.md has the same options, from --nnodes to
# --rdzv_id. Each host has one GPU.
agent() {
    dev/test/ranks/cluster.sh agent "$CLUSTER$1" env SIMT_DEVICES=1 "${torchrun[@]}" \
        --rdzv_conf=last_call_timeout=5 --nnodes 1:2 --nproc_per_node 1 --max_restarts 3 \
        --rdzv_backend c10d --rdzv_endpoint "${CLUSTER}0:29400" --rdzv_id elastic \
        "${train[@]/\*/\\*}" --output "$out" --resume >>"$scratch/agent$1" 2>&1 &
    agents[$1]=$!
}
# starts_with RANKS STARTS: the run has started so many times, the last time with this number of ranks.
starts_with() { grep '"kind":"run"' "$out/log.jsonl" | awk -v n="$2" -v ranks="\"world_size\":$1[,}]" \
    '$0 ~ ranks { last = NR } END { exit !(NR == n && last == n) }'; }
started() {
    for _ in $(seq 400); do if starts_with "$@" 2>/dev/null; then return 0; fi; sleep 0.2; done
    grep '"kind":"run"' "$out/log.jsonl" | grep -o '"world_size":[0-9]*'
    tail -n 5 "$scratch/agent0" "$scratch/agent1"
    return 1
}
last_step() { sed -n 's/.*"kind":"step","step":\([0-9]*\).*/\1/p' "$out/log.jsonl" | tail -n 1; }
# trains_on: five more steps than now.
trains_on() { wait_for "$out/log.jsonl" "\"step\":$(($(last_step) + 5)),"; }
resumed_at() { grep '"kind":"run"' "$out/log.jsonl" | tail -n 1 | sed -n 's/.*"resumed_at":\([0-9]*\).*/\1/p'; }
kill_host() {
    local pid
    for pid in $(ip netns pids "$CLUSTER$1"); do kill -9 "$pid" 2>/dev/null; done
    wait "${agents[$1]}" 2>/dev/null
}

check "the undisturbed run" env SIMT_DEVICES=1 "${train[@]}" --output "$scratch/undisturbed"
check "cluster.sh makes 2 hosts" dev/test/ranks/cluster.sh up 2
agent 0
agent 1
check "2 agents start 2 ranks" started 2 1
check "2 ranks save" wait_for "$out/step_000010/trainer.json"
kill_host 1
check "a host is lost: the other continues alone" started 1 2
step=$(resumed_at)
check "a host is lost: from a checkpoint, step $step" grep -qx '[1-9][0-9]*0' <<<"$step"
check "a host is lost: one rank trains" trains_on
agent 1
check "the host is back: 2 ranks" started 2 3
check "the host is back: they resume at step $(resumed_at)" test "$(resumed_at)" -gt "$step"
for host in 0 1; do
    wait "${agents[host]}"
    check "the agent of host $host ends with exit code 0" test $? = 0
done
check "the run has the bits of the undisturbed one" same_run "$scratch/undisturbed" "$out" 150
finish
