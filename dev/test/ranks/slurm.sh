#!/usr/bin/env bash
# slurm.sh: starts Slurm on the hosts of cluster.sh: munged, slurmctld, and a slurmd on each host. All of their files
# are in one folder. Needs root, and Debian's slurm-wlm and munge.
#
#   slurm.sh up FOLDER HOSTS       starts Slurm on hosts that `cluster.sh up` has made; returns when all are idle
#   slurm.sh on FOLDER COMMAND...  runs srun, sbatch, salloc, scancel, ... on the first host
#   slurm.sh down FOLDER HOSTS     ends jobs and daemons; cluster.sh removes the hosts
#
# CLUSTER and CLUSTER_SUBNET have the same meaning as for cluster.sh.
set -euo pipefail

export CLUSTER=${CLUSTER:-h} CLUSTER_SUBNET=${CLUSTER_SUBNET:-10.77.0}
PATH=$PATH:/usr/sbin
folder=$2

# in_host HOST COMMAND...: runs the command on a host, with the host's own name.
in_host() {
    local host=$1
    shift
    # shellcheck disable=SC2016  # for the inner shell
    exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
}

# Every host has its own copy of the configuration, because mpi.conf differs: two hosts on one file system need
# different folders for PMIx. No cgroups and no limits: the hosts are one machine, which other programs use too.
configure() {
    local host i
    for ((i = 0; i < $1; i++)); do
        host=$CLUSTER$i
        mkdir -p "$folder/$host/spool" "$folder/$host/tmp" "$folder/state"
        echo "PMIxCliTmpDirBase=$folder/$host/tmp" >"$folder/$host/mpi.conf"
        echo "CgroupPlugin=cgroup/v1" >"$folder/$host/cgroup.conf"
        cat >"$folder/$host/slurm.conf" <<EOF
ClusterName=$CLUSTER
SlurmctldHost=${CLUSTER}0($CLUSTER_SUBNET.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n/slurmd.log
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
DebugFlags=NO_CONF_HASH
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
$(for ((n = 0; n < $1; n++)); do
    echo "NodeName=$CLUSTER$n NodeAddr=$CLUSTER_SUBNET.$((n + 1)) CPUs=4 State=UNKNOWN"
done)
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
    done
}

up() {
    local i
    configure "$1"
    (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
    munged --force --num-threads=2 --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
    on slurmctld -i
    for ((i = 0; i < $1; i++)); do
        # slurmd looks for cgroups, and accepts an empty folder in place of them.
        (SLURM_CONF=$folder/$CLUSTER$i/slurm.conf in_host "$CLUSTER$i" unshare --mount \
            sh -c 'mount -t tmpfs none /sys/fs/cgroup && exec slurmd')
    done
    for ((i = 0; i < 300; i++)); do
        if [ "$(on sinfo --noheader --Node --format=%t 2>/dev/null | grep -cx idle)" = "$1" ]; then return; fi
        sleep 0.1
    done
    on sinfo --Node --long >&2
    tail -n 5 "$folder"/*.log "$folder"/*/*.log >&2
    return 1
}

on() { (SLURM_CONF=$folder/${CLUSTER}0/slurm.conf in_host "${CLUSTER}0" "$@"); }

# end PIDFILE: ends the daemon of this process id, if it still runs.
end() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    case $(readlink "/proc/$pid/exe") in */slurm* | */munged) kill -9 "$pid" 2>/dev/null || true ;; esac
}

down() {
    local i
    if [ -e "$folder/slurmctld.pid" ]; then
        timeout 10 "$0" on "$folder" scancel --quiet --user=root 2>/dev/null || true
        for ((i = 0; i < 30; i++)); do
            if [ -z "$(timeout 10 "$0" on "$folder" squeue --noheader 2>/dev/null)" ]; then break; fi
            sleep 0.1
        done
    fi
    for ((i = 0; i < $1; i++)); do end "$folder/$CLUSTER$i/slurmd.pid"; done
    end "$folder/slurmctld.pid"
    end "$folder/munged.pid"
}

case ${1:-} in
    up | down) "$1" "$3" ;;
    on) on "${@:3}" ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
