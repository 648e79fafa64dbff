#!/usr/bin/env bash
# slurm_srun_signals.sh: SIGTERM or SIGHUP to srun kills its tasks at once; a preempted task gets SIGTERM twice.
#
# Guess: srun passes SIGTERM and SIGHUP on to its tasks, as mpirun and torchrun do, and Slurm waits KillWait before it
# kills them. So tasks can save at `timeout 3h srun ...` and at a lost ssh connection. With GraceTime a preempted task
# gets one SIGTERM, and SIGKILL at the end of that time.
# Behaviour: srun passes SIGUSR1 on. SIGTERM, SIGHUP and SIGQUIT end its tasks at once by SIGKILL, without any signal
# before it, where scancel gives them KillWait. A preempted task gets SIGTERM at once, again at the end of GraceTime,
# and SIGKILL only KillWait later: a program that takes a second SIGTERM for an impatient user, as many do, ends without
# its save.
# Versions: Slurm 22.05.8 of Debian 12 and 24.11.5 of Debian 13, in minimal systems by debootstrap. Needs root.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf --one-file-system "$folder"' EXIT
cat >"$folder/task.py" <<'END'
import signal
import sys
import time

log = open("/task", "w", buffering=1)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
    signal.signal(number, lambda got, _: print(signal.Signals(got).name, time.time(), file=log))
for _ in range(1200):
    print("alive", time.time(), file=log)
    time.sleep(0.05)
END
# What the task got since `begin`. Signals that come within a second count once.
cat >"$folder/events.py" <<'END'
import sys

last, got = float(sys.argv[1]), []
for what, at in [line.split() for line in open("/task")] + [["SIGKILL", open("/task").read().split()[-1]]]:
    if what != "alive" and (float(at) - last >= 1 or what not in [name for name, _ in got]):
        got.append((what, "at once" if float(at) - last < 1 else "seconds later"))
        last = float(at)
print(*(f"{name} {when}" for name, when in got), sep=", ")
END
cat >"$folder/inside.sh" <<'END'
set -euo pipefail
hostname node
ip link set lo up
ip address add 10.77.0.1/24 dev lo
echo "10.77.0.1 node" >/etc/hosts
mount -t tmpfs none /sys/fs/cgroup
mkdir -p /run/munge /var/state /var/spool/slurmd
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=node(10.77.0.1)
SlurmUser=root
StateSaveLocation=/var/state
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
NodeName=node NodeAddr=10.77.0.1 CPUs=2
PartitionName=low Nodes=node Default=YES PriorityTier=1 GraceTime=5 State=UP
PartitionName=high Nodes=node PriorityTier=2 PreemptMode=OFF State=UP
CONF
echo "CgroupPlugin=$1" >/etc/slurm/cgroup.conf
chown -R root: /etc/munge /var/log/munge /var/lib/munge /run/munge
munged --force
slurmctld -i
slurmd
until [ "$(sinfo -ho %t -p low)" = idle ]; do sleep 0.5; done
ask() { # ask SCRIPT COMMAND...: submits the script, runs the command with the job's number, prints what the task got
    local job begin
    rm -f /task
    job=$(sbatch --parsable --output=/out --no-requeue --wrap "$1")
    until [ -s /task ]; do sleep 0.1; done
    sleep 1
    begin=$(date +%s.%N)
    "${@:2}" "$job" >/log 2>&1 || true
    while squeue -hj "$job" 2>/log | grep -q .; do sleep 0.3; done
    python3 /events.py "$begin"
}
signal_srun() { pkill --oldest "-$1" -x srun; sleep 2; scancel "$2"; }
preempt() { srun -p high -n 2 true; }
task="srun --quiet python3 /task.py"
srun --version
for name in USR1 TERM HUP QUIT; do echo "SIG$name to srun: $(ask "exec $task" signal_srun $name)"; done
echo "scancel: $(ask "$task; true" scancel)"
echo "preempted: $(ask "$task; true" preempt)"
END
cat >"$folder/enter.sh" <<'END'
mount -t proc proc "$1/proc"
mount -t sysfs sysfs "$1/sys"
mount --rbind /dev "$1/dev"
exec chroot "$1" bash /inside.sh "$2"
END
# run SUITE PLUGIN: asks Slurm of this Debian, in a system and in namespaces of its own.
run() {
    local root=$folder/$1
    debootstrap --variant=minbase --include=munge,slurm-wlm,python3,iproute2,procps "$1" "$root" >"$folder/log"
    cp "$folder"/{task.py,events.py,inside.sh} "$root/"
    unshare --mount --net --uts --pid --fork --kill-child bash "$folder/enter.sh" "$root" "$2" \
        </dev/null 2>"$folder/log"
}
{
    run bookworm cgroup/v1
    run trixie disabled
} | tee "$folder/got"

behaviour="SIGUSR1 to srun: SIGUSR1 at once, SIGTERM seconds later, SIGKILL seconds later
SIGTERM to srun: SIGKILL at once
SIGHUP to srun: SIGKILL at once
SIGQUIT to srun: SIGKILL at once
scancel: SIGTERM at once, SIGKILL seconds later
preempted: SIGTERM at once, SIGTERM seconds later, SIGKILL seconds later"
want="slurm-wlm 22.05.8
$behaviour
slurm-wlm 24.11.5
$behaviour"
diff <(echo "$want") "$folder/got" && echo "as it was"
