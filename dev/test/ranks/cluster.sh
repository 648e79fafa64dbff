#!/usr/bin/env bash
# cluster.sh: hosts on one machine, each a network namespace with a cable (veth) to a switch (a bridge) in a namespace of
# its own, so that the machine's network is left alone. Needs root, iproute2, util-linux and Open MPI.
#
#   cluster.sh up HOSTS                   makes h0 .. h(HOSTS-1)
#   cluster.sh run HOSTS RANKS COMMAND... by mpirun on h0, as many ranks on each host, host by host
#   cluster.sh bytes HOSTS                that have left all hosts so far
#   cluster.sh cut HOST | heal HOST       takes its cable out of the switch, and puts it back
#   cluster.sh down HOSTS                 ends what runs inside, and removes all
#   cluster.sh agent HOST COMMAND...      what mpirun calls in place of ssh
#
# CLUSTER, a word of a few letters, tells clusters apart that stand side by side: it begins the names. CLUSTER_SUBNET,
# like 10.77.0, is theirs.
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
        mkdir -p "/etc/netns/$host"  # `ip netns exec` lays these files over those of /etc
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

# inside HOST COMMAND...: with a host name of its own, by which Open MPI tells who shares memory, and names its folders.
inside() {
    local host=$1
    shift
    # shellcheck disable=SC2016  # for the inner shell
    exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
}

# mpirun may have looked up the address.
agent() {
    local host=$1
    shift
    if [[ $host == "$CLUSTER_SUBNET".* ]]; then host=$CLUSTER$((${host##*.} - 1)); fi
    inside "$host" sh -c "$*"
}

# The subnet, since interfaces may have other names on other hosts. Keepalive, 40 s: mpirun would wait for a host behind a cut
# cable for minutes or hours, after the ranks have given up (SILENT_SECONDS in llmc/parallel/comm_mpi.cpp). The slots are those of --host: with several_ranks_here's policy Open MPI 5 would put all ranks on the first host.
run() {
    local list="" host ranks=$2 all=$(($1 * $2))
    for host in $(hosts "$1"); do list+=${list:+,}$host:$ranks; done
    shift 2
    unset PRTE_MCA_rmaps_default_mapping_policy
    inside "${CLUSTER}0" mpirun --mca plm_rsh_agent "$(realpath "${BASH_SOURCE[0]}") agent" --host "$list" -np $all \
        --mca btl_tcp_if_include "$CLUSTER_SUBNET.0/24" --mca oob_tcp_if_include "$CLUSTER_SUBNET.0/24" \
        --mca oob_tcp_keepalive_time 30 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 5 "$@"
}

bytes() {
    local host
    for host in $(hosts "$1"); do ip netns exec "$host" cat /proc/net/dev; done | awk '$1 == "cable:" { sum += $10 } END { print sum }'
}

cut() { ip -n "$switch" link set "$(port_of "$1")" down; }
# It asks again who is there: where nobody has answered it would not send for seconds.
heal() {
    ip -n "$switch" link set "$(port_of "$1")" up
    ip -n "$1" neigh flush dev cable
}

case ${1:-} in
    up | down | run | bytes | cut | heal | agent) "$@" ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
