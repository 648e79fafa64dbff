#!/usr/bin/env bash
# test_hosts.sh: tests training over two and four hosts, which are network namespaces here (cluster.sh): the same bits
# as one rank, the bytes that the hosts send, and a host that loses its network.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -z "$reason" ]; then reason=$(no_hosts_because); fi
if [ -n "$reason" ]; then skip "ranks on several hosts" "$reason" && exit 0; fi
several_ranks_here
export CLUSTER=h$$n
trap 'if is_main_shell; then dev/test/ranks/cluster.sh down 4; rm -rf "$scratch"; fi' EXIT
cluster() { dev/test/ranks/cluster.sh "$@"; }

make_shards "$scratch/data" 30000 || fail "no shards"
# 3.4 MB of gradients in fp32, so that the headers of the network are small in comparison.
parameters=850816  # 384 x 128 + 64 x 128 + 4 (12 x 128 x 128 + 13 x 128) + 2 x 128
train=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin"
       --layers 4 --heads 2 --channels 128 --vocab-size 384 --seq-len 64 --micro-batch 1 --global-batch 512 --lr 1e-2
       --warmup 2 --precision fp32 --deterministic-ranks 8 --steps 6 --val-every 3 --checkpoint-every 6)

# on_hosts HOSTS RANKS NAME OPTION...: runs the training. Sets sent, the bytes per step that the hosts send: the
# difference of a run of 6 steps and a run of 2, divided by 4.
on_hosts() {
    local hosts=$1 ranks=$2 name=$3 before middle after
    shift 3
    before=$(cluster bytes "$hosts")
    cluster run "$hosts" "$ranks" "${train[@]}" --val-every 0 --stop-after 2 --output '' "$@" || return 1
    middle=$(cluster bytes "$hosts")
    cluster run "$hosts" "$ranks" "${train[@]}" --val-every 0 --output '' "$@" || return 1
    after=$(cluster bytes "$hosts")
    sent=$(((after - middle - (middle - before)) / 4))
    if [ -n "$name" ]; then cluster run "$hosts" "$ranks" "${train[@]}" --output "$name" "$@" >"$name.log"; fi
}

# The bytes sent are compared within 2 %: these virtual cables carry frames of 64 KiB and more with one
# header of 66 bytes, like network cards with segmentation offload; headers and acknowledgements are less
# than 1 % of this model's gradients.

# The mpirun of Open MPI 5 ends with exit code 0 if it loses a host before a rank does, for example if its daemon there
# is killed. No option changes that. The program prints a note at the start.
forgets=""
if mpirun --version | grep -q 'Open MPI) 5'; then
    forgets="Open MPI 5's mpirun may end with exit code 0 when it loses a host"
fi

check "1 rank" "${train[@]}" --output "$scratch/one" --quiet
whole=$((parameters * 4))
for hosts in 2 4; do
    ranks=$((4 / hosts)) name=$scratch/hosts_$hosts
    check "cluster.sh makes $hosts hosts" cluster up $hosts
    check "$hosts hosts x $ranks train" on_hosts $hosts $ranks "$name"
    check "$hosts hosts x $ranks give the same bits as 1 rank" same_run "$scratch/one" "$name" 6
    check "$hosts hosts x $ranks: $sent bytes leave them in a step, 2 (H-1) N are $((2 * (hosts - 1) * whole))" \
        within "$sent" $((2 * (hosts - 1) * whole))
    if [ $hosts = 4 ]; then break; fi
    if [ -n "$forgets" ]; then check "a note says that mpirun may hide a lost host" grep -q "$forgets" "$name.log"; fi
    check "the table at the start counts the machines" grep -q "4 ranks by MPI on 2 machines" "$name.log"
    check "2 hosts, --zero 1" on_hosts 2 2 "$scratch/zero" --zero 1
    check "2 hosts, --zero 1, give the same bits as 1 rank" same_run "$scratch/one" "$scratch/zero" 6
    check "2 hosts, --zero 1: $sent bytes leave them in a step, 2 N are $((2 * whole))" within "$sent" $((2 * whole))
    check "2 hosts, --grad-dtype bf16" on_hosts 2 2 "" --grad-dtype bf16
    check "2 hosts, --grad-dtype bf16: $sent bytes leave them in a step, N are $whole" within "$sent" $whole
    check "no process is left on 2 hosts" nobody_inside 2
    cluster down 2
done
check "no process is left on 4 hosts" nobody_inside 4
cluster down 4

# ---- faults, on two hosts
timeout=$((5 * slower))
# shellcheck disable=SC2206
endless=("${train[@]}" --steps 100000 --checkpoint-every 0 --val-every 0 --quiet --timeout $timeout)
check "cluster.sh makes 2 hosts again" cluster up 2
start() {
    # Not by the function cluster: the process of the job must be mpirun's own.
    dev/test/ranks/cluster.sh run 2 1 --timeout 120 "${endless[@]}" --output "$1" >"$scratch/run.log" 2>&1 </dev/null &
    job=$!
    wait_for "$1/log.jsonl" '"step":3,'
}
# ends: waits for mpirun. Sets status and seconds.
ends() {
    local start=$EPOCHREALTIME
    wait "$job"
    status=$?
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
}
ended_badly() { [ "$1" != 0 ] && ! timed_out "$1"; }  # with an error, and not because of mpirun --timeout
export KEEPALIVE="30 2 5"  # mpirun notices after the ranks: Open MPI 5's would end with exit code 0
check "2 hosts train before the cable is pulled" start "$scratch/cut"
SECONDS=0
cluster cut "${CLUSTER}1"
# The watchdogs end the ranks. mpirun then tells the other host to end, and waits for TCP's acknowledgement, for 15
# minutes by default: tcp_retries2 is the number of attempts.
until grep -qs 'no progress' "$scratch/run.log" || [ $SECONDS -gt $((timeout + 10)) ] ||
    ! runs "$job"; do sleep 0.2; done
check "a cable is pulled: a rank ends after $SECONDS s with the reason" \
    grep -q "error: rank 0 on ${CLUSTER}0: no progress for $timeout s (--timeout): step" "$scratch/run.log"
for host in 0 1; do ip netns exec "$CLUSTER$host" sh -c 'echo 3 >/proc/sys/net/ipv4/tcp_retries2'; done
ends
check "a cable is pulled: mpirun ends after $seconds s, exit code $status" ended_badly $status
for _ in $(seq 200); do if nobody_inside 2; then break; fi; sleep 0.2; done
check "a cable is pulled: no process is left on either host: $(inside 2)" nobody_inside 2
cluster heal "${CLUSTER}1"

check "2 hosts train after the cable is back" start "$scratch/terminated"
kill -TERM "$job"
ends
check "SIGTERM: mpirun ends after $seconds s, exit code $status" ended_badly $status
for _ in $(seq 50); do if nobody_inside 2; then break; fi; sleep 0.1; done
check "SIGTERM: no process is left: $(inside 2)" nobody_inside 2
finish
