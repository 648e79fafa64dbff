#!/usr/bin/env bash
# test_lost_host.sh: tests that a run on several hosts (network namespaces, cluster.sh) ends, leaves no process and
# continues on the hosts that are left: the cable of one of four is cut, and mpirun's daemon on one of two is killed.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -z "$reason" ]; then reason=$(no_hosts_because); fi
if [ -n "$reason" ]; then skip "hosts that are lost" "$reason" && exit 0; fi
several_ranks_here
export CLUSTER=l$$n CLUSTER_SUBNET=10.80.0
trap 'if is_main_shell; then dev/test/ranks/cluster.sh down 4; rm -rf "$scratch"; fi' EXIT
cluster() { dev/test/ranks/cluster.sh "$@"; }

make_shards "$scratch/data" 30000 || fail "no shards"
# The batch divides among 1, 2, 3 and 4 ranks. The steps are more than a run makes until it is disturbed.
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --micro-batch 1 --global-batch 192 --steps 900
    --checkpoint-every 10 --deterministic-ranks 4)
# Open MPI 5's mpirun must notice a lost host after the ranks, or it ends with exit code 0 (docs/distributed.md).
open_mpi_5=$(mpirun --version | grep -c 'Open MPI) 5')
if [ "$open_mpi_5" = 1 ]; then export KEEPALIVE="30 2 5"; fi

# start HOSTS: a rank on each host, up to a checkpoint. Sets job, whose process is mpirun.
start() {
    dev/test/ranks/cluster.sh run "$1" 1 "${train[@]}" --output "$out" >"$scratch/run.log" 2>&1 </dev/null &
    job=$!
    wait_for "$out/latest" && wait_for "$out/step_000020/trainer.json"
}
ended_badly() { test "$status" != 0 || test "$open_mpi_5" = 1; }
# nobody_left HOSTS: no process is left on the hosts, after 20 s at most.
nobody_left() {
    for _ in $(seq $((100 * slower))); do if nobody_inside "$1"; then return 0; fi; sleep 0.2; done
    inside "$1"
    return 1
}
check "the undisturbed run" "${train[@]}" --output "$scratch/undisturbed"

# ---- the cable of one of four hosts
out=$scratch/cut
check "cluster.sh makes 4 hosts" cluster up 4
check "a cable of 4: the hosts train" start 4
cluster cut "${CLUSTER}3"
if [ "$open_mpi_5" = 1 ]; then
    for host in 0 1 2 3; do ip netns exec "$CLUSTER$host" sh -c 'echo 3 >/proc/sys/net/ipv4/tcp_retries2'; done
    check "a cable of 4: mpirun ends" ends 60
else
    check "a cable of 4: mpirun ends in 15 s" ends 15
fi
check "a cable of 4: exit code $status after $seconds s" ended_badly
check "a cable of 4: no process is left" nobody_left 4
check "a cable of 4: training did not end before" test ! -e "$out/step_000900"
cp -r "$out" "$scratch/three"
check "a cable of 4: three hosts continue" \
    cluster run 3 1 "${train[@]}" --deterministic-ranks 0 --output "$scratch/three" --resume --stop-after 30
check "a cable of 4: three hosts continue from a checkpoint" \
    grep -q '"resumed_at":[1-9].*"world_size":3[,}]' "$scratch/three/log.jsonl"
check "a cable of 4: two hosts continue to the end" cluster run 2 1 "${train[@]}" --output "$out" --resume
check "a cable of 4: the log and weights of the undisturbed run" same_run "$scratch/undisturbed" "$out" 900
cluster down 4

# ---- the daemon of mpirun on the second host. Open MPI 4 names it orted. Open MPI 5 names it prted, and on Debian 13
# it has two processes.
daemon() {
    local pid
    for pid in $(ip netns pids "${CLUSTER}1"); do
        case $(cat "/proc/$pid/comm") in orted | prted) echo "$pid" ;; esac
    done
}
out=$scratch/daemon
check "cluster.sh makes 2 hosts" cluster up 2
check "the daemon on a host: the hosts train" start 2
mapfile -t daemons < <(daemon)
check "the daemon on a host runs" test ${#daemons[@]} != 0
kill -9 "${daemons[@]}"
check "the daemon on a host is killed: mpirun ends" ends 15
check "the daemon on a host is killed: exit code $status after $seconds s" ended_badly
check "the daemon on a host is killed: no process is left" nobody_left 2
check "the daemon on a host is killed: training did not end before" test ! -e "$out/step_000900"
check "the daemon on a host is killed: the hosts continue to the end" \
    cluster run 2 1 "${train[@]}" --output "$out" --resume
check "the daemon on a host is killed: the log and weights of the undisturbed run" \
    same_run "$scratch/undisturbed" "$out" 900
finish
