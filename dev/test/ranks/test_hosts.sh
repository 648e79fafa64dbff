#!/usr/bin/env bash
# test_hosts.sh: training over two and four hosts, which are network namespaces here (cluster.sh): the bits of one rank,
# the bytes on the cables, and a cable that is pulled.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -z "$reason" ]; then reason=$(no_hosts_because); fi
if [ -n "$reason" ]; then skip "ranks on several hosts" "$reason" && exit 0; fi
several_ranks_here
export CLUSTER=h$$n
trap 'dev/test/ranks/cluster.sh down 4; rm -rf "$scratch"' EXIT
cluster() { dev/test/ranks/cluster.sh "$@"; }

make_shards "$scratch/data" 30000 || fail "no shards"
# 3.4 MB of gradients in fp32, so that what the network adds to them is small.
parameters=850816  # 384 x 128 + 64 x 128 + 4 (12 x 128 x 128 + 13 x 128) + 2 x 128
train=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin"
       --layers 4 --heads 2 --channels 128 --vocab-size 384 --seq-len 64 --micro-batch 1 --global-batch 512 --lr 1e-2
       --warmup 2 --threads 1 --precision fp32 --deterministic-ranks 8 --steps 6 --val-every 3 --checkpoint-every 6)

# on_hosts HOSTS RANKS NAME OPTION...: the run and, of its steps 2 to 5, the bytes of each that left the hosts. They are
# those of the whole run less those of its start and first two steps, which is another run.
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

# within SENT WANTED: 2 %. On these cables a frame of 64 KiB and more has one header of 66 bytes, since they do as network
# cards that cut frames themselves; with the confirmations that is less than 1 % of this model's gradients.
within() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0.98 * b && a < 1.02 * b) }'; }

# The mpirun of Open MPI 5 ends with exit code 0 when it loses a host before a rank does (its daemon there is killed, say), which
# no option changes: the program says so at start.
forgets=""
if mpirun --version | grep -q 'Open MPI) 5'; then forgets="Open MPI 5's mpirun may end with exit code 0 when it loses a host"; fi

check "1 rank" "${train[@]}" --output "$scratch/one" --quiet
whole=$((parameters * 4))
for hosts in 2 4; do
    ranks=$((4 / hosts)) name=$scratch/hosts_$hosts
    check "$hosts hosts" cluster up $hosts
    check "$hosts hosts x $ranks train" on_hosts $hosts $ranks "$name"
    check "$hosts hosts x $ranks: the bits of 1 rank" same_run "$scratch/one" "$name" 6
    check "$hosts hosts x $ranks: $sent bytes leave them in a step, 2 (H-1) N are $((2 * (hosts - 1) * whole))" \
        within "$sent" $((2 * (hosts - 1) * whole))
    if [ $hosts = 4 ]; then break; fi
    if [ -n "$forgets" ]; then check "what mpirun cannot do is said" grep -q "$forgets" "$name.log"; fi
    check "the table names the hosts" grep -q "4 ranks by MPI: 0-1 on ${CLUSTER}0 (.*1 thread.*), 2-3 on ${CLUSTER}1 (" "$name.log"
    check "2 hosts, --zero 1" on_hosts 2 2 "$scratch/zero" --zero 1
    check "2 hosts, --zero 1: the bits of 1 rank" same_run "$scratch/one" "$scratch/zero" 6
    check "2 hosts, --zero 1: $sent bytes" within "$sent" $((2 * whole))
    check "2 hosts, --grad-dtype bf16" on_hosts 2 2 "" --grad-dtype bf16
    check "2 hosts, --grad-dtype bf16: $sent bytes, half" within "$sent" $whole
    check "2 hosts, --trace" cluster run 2 2 "${train[@]}" --output "$scratch/traced" --trace "$scratch/t.json"
    check "2 hosts, --trace: a time line of both" python3 dev/test/support/trace_check.py "$scratch/t.json" "$scratch/traced" 4 0 6 2 hosts
    check "2 hosts, --trace: which says where its ranks are" grep -q "rank 3 on ${CLUSTER}1" "$scratch/t.json"
    check "nobody is left on 2 hosts" nobody_inside 2
    cluster down 2
done
check "nobody is left on 4 hosts" nobody_inside 4
cluster down 4

# ---- faults, on two hosts
endless=("${train[@]}" --steps 100000 --checkpoint-every 0 --val-every 0 --quiet)
check "2 hosts again" cluster up 2
start() {
    # Not by a function, whose process would be another than mpirun's.
    dev/test/ranks/cluster.sh run 2 1 --timeout 120 "${endless[@]}" --output "$1" >"$scratch/run.log" 2>&1 </dev/null &
    job=$!
    wait_for "$1/log.jsonl" '"step":3,'
}
# ends: mpirun does; sets status and seconds.
ends() {
    local start=$EPOCHREALTIME
    wait "$job"
    status=$?
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
}
ended_badly() { [ "$1" != 0 ] && ! timed_out "$1"; }  # and by itself
check "they train" start "$scratch/cut"
SECONDS=0
cluster cut "${CLUSTER}1"
# The ranks give up by themselves. mpirun, which then tells the other host to end, waits for TCP's confirmation, 15 minutes
# by default: tcp_retries2 says how often TCP tries.
until grep -qs 'Connection timed out' "$scratch/run.log" || [ $SECONDS -gt 60 ] || ! runs "$job"; do sleep 0.2; done
check "a cable is pulled: a rank gives up after $SECONDS s and says why" grep -q 'Connection timed out' "$scratch/run.log"
for host in 0 1; do ip netns exec "$CLUSTER$host" sh -c 'echo 3 >/proc/sys/net/ipv4/tcp_retries2'; done
ends
check "a cable is pulled: mpirun ends after $seconds s, exit code $status" ended_badly $status
for _ in $(seq 200); do if nobody_inside 2; then break; fi; sleep 0.2; done
check "nobody is left on either side: $(inside 2)" nobody_inside 2
cluster heal "${CLUSTER}1"

check "the cable is back, they train" start "$scratch/terminated"
kill -TERM "$job"
ends
check "SIGTERM: mpirun ends after $seconds s, exit code $status" ended_badly $status
for _ in $(seq 50); do if nobody_inside 2; then break; fi; sleep 0.1; done
check "nobody is left: $(inside 2)" nobody_inside 2
finish
