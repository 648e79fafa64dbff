#!/usr/bin/env bash
# cluster.sh: makes several hosts on one machine. Each is a network namespace with a cable (veth) to a switch (a
# bridge) in another namespace, so that the machine's own network does not change. Needs root, iproute2,
# util-linux and Open MPI.
#
#   cluster.sh up HOSTS                   makes the hosts h0 .. h(HOSTS-1)
#   cluster.sh run HOSTS RANKS COMMAND... runs mpirun on h0, with RANKS ranks on each host
#   cluster.sh bytes HOSTS                prints the bytes that all hosts have sent so far
#   cluster.sh cut HOST | heal HOST       disconnects the cable of a host from the switch, and connects it again
#   cluster.sh down HOSTS                 ends the processes on the hosts, and removes the hosts
#   cluster.sh agent HOST COMMAND...      runs a command on a host; mpirun calls it in place of ssh
#
# The names of the hosts begin with $CLUSTER, a word of a few letters, so that several clusters can run at once.
# CLUSTER_SUBNET is the subnet of this cluster, for example 10.77.0.
set -euo pipefail

export CLUSTER=${CLUSTER:-h} CLUSTER_SUBNET=${CLUSTER_SUBNET:-10.77.0}
switch=${CLUSTER}switch

hosts() { for ((i = 0; i < $1; i++)); do echo "$CLUSTER$i"; done; }
port_of() { echo "port${1#"$CLUSTER"}"; }

up() {
    local host names="127.0.0.1 localhost" i
    for ((i = 0; i < $1; i++)); do names+=$'\n'"$CLUSTER_SUBNET.$((i + 1)) $CLUSTER$i"; done
    ip netns add "$switch"
    ip -n "$switch" link add bridge type bridge
    ip -n "$switch" link set bridge up
    for ((i = 0; i < $1; i++)); do
        host=$CLUSTER$i
        ip netns add "$host"
        ip link add cable netns "$host" type veth peer name "$(port_of "$host")" netns "$switch"
        ip -n "$switch" link set "$(port_of "$host")" master bridge up
        ip -n "$host" addr add "$CLUSTER_SUBNET.$((i + 1))/24" dev cable
        ip -n "$host" link set lo up
        ip -n "$host" link set cable up
        mkdir -p "/etc/netns/$host"  # `ip netns exec` shows these files in place of those in /etc
        echo "$names" >"/etc/netns/$host/hosts"
    done
}

down() {
    local host pid
    for host in $(hosts "$1"); do
        for pid in $(ip netns pids "$host" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
        ip netns del "$host" 2>/dev/null || true
        rm -rf "/etc/netns/$host"
    done
    ip netns del "$switch" 2>/dev/null || true
    rmdir --ignore-fail-on-non-empty /etc/netns 2>/dev/null || true
}

# inside HOST COMMAND...: runs the command with the host's own name. Open MPI uses this name to find the ranks that
# share memory, and in the names of its folders.
inside() {
    local host=$1
    shift
    # shellcheck disable=SC2016  # for the inner shell
    exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
}

# mpirun may give the host's address in place of its name.
agent() {
    local host=$1
    shift
    if [[ $host == "$CLUSTER_SUBNET".* ]]; then host=$CLUSTER$((${host##*.} - 1)); fi
    inside "$host" sh -c "$*"
}

# Interfaces are chosen by subnet, because their names may differ between hosts. The keepalive, of 8 s unless $KEEPALIVE
# says another, lets mpirun notice a host whose cable is cut. Without it mpirun waits minutes or hours, although the
# watchdogs have ended the ranks. --host gives the number of slots, because with the policy of several_ranks_here Open
# MPI 5 would put all ranks on the first host.
run() {
    local list="" host ranks=$2 all=$(($1 * $2)) idle interval probes
    read -r idle interval probes <<<"${KEEPALIVE:-5 1 3}"
    for host in $(hosts "$1"); do list+=${list:+,}$host:$ranks; done
    shift 2
    unset PRTE_MCA_rmaps_default_mapping_policy
    inside "${CLUSTER}0" mpirun --mca plm_rsh_agent "$(realpath "${BASH_SOURCE[0]}") agent" --host "$list" -np $all \
        --mca btl_tcp_if_include "$CLUSTER_SUBNET.0/24" --mca oob_tcp_if_include "$CLUSTER_SUBNET.0/24" \
        --mca oob_tcp_keepalive_time "$idle" --mca oob_tcp_keepalive_intvl "$interval" --mca oob_tcp_keepalive_probes \
        "$probes" "$@"
}

bytes() {
    local host
    for host in $(hosts "$1"); do ip netns exec "$host" cat /proc/net/dev; done |
        awk '$1 == "cable:" { sum += $10 } END { print sum }'
}

cut() { ip -n "$switch" link set "$(port_of "$1")" down; }
# Flushes the neighbour table: after failed lookups the host would send nothing for seconds.
heal() {
    ip -n "$switch" link set "$(port_of "$1")" up
    ip -n "$1" neigh flush dev cable
}

case ${1:-} in
    up | down | run | bytes | cut | heal | agent) "$@" ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
