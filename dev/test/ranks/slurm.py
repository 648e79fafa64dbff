"""slurm.py: Slurm on two hosts of hosts.py: munged, slurmctld, and a slurmd on each host. All of their files are in one
folder. Needs root, and Debian's slurm-wlm and munge."""

import os
import signal

from harness import MPI_ENVIRONMENT, execute, run, wait_until, words
from hosts import SUBNET, Hosts

SBIN = f"{os.environ['PATH']}:/usr/sbin"

# No cgroups and no limits: the hosts are one machine, which other programs use too.
CONFIGURATION = """
ClusterName={prefix}
SlurmctldHost={prefix}0({subnet}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
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
NodeName={prefix}0 NodeAddr={subnet}.1 CPUs=4 State=UNKNOWN
NodeName={prefix}1 NodeAddr={subnet}.2 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder):
        self.folder = folder
        self.group = Hosts(2, folder)
        self.hosts = self.group.names

    def up(self):
        self.group.up()
        (self.folder / "state").mkdir()
        for name in self.hosts:
            # Every host has its own copy of the configuration, because mpi.conf differs: two hosts on one file system
            # need different folders for PMIx.
            for part in ("spool", "tmp"):
                (self.folder / name / part).mkdir(parents=True)
            (self.folder / name / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.folder / name}/tmp\n")
            (self.folder / name / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
            (self.folder / name / "slurm.conf").write_text(
                CONFIGURATION.format(prefix=self.group.prefix, subnet=SUBNET, folder=self.folder))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log",
                 "seed-file": "munged.seed"}
        run("munged --force --num-threads=2", [f"--{name}={self.folder / file}" for name, file in files.items()],
            env={"PATH": SBIN})
        run(self.on("slurmctld -i"))
        for i in (0, 1):  # slurmd looks for cgroups, and accepts an empty folder in place of them
            run(self.on("unshare --mount sh -c 'mount -t tmpfs none /sys/fs/cgroup && exec slurmd'", host=i))
        wait_until(lambda: execute(self.on("sinfo --noheader --Node --format=%t")).out.split() == ["idle"] * 2,
                   f"idle nodes; see {self.folder}/*.log")

    def down(self):
        self.group.down()  # also ends slurmctld, slurmd and jobs
        try:
            os.kill(int((self.folder / "munged.pid").read_text()), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass

    def on(self, *command, host=0):
        """Returns the words by which a host runs srun, sbatch, scancel, ..."""
        configuration = self.folder / self.hosts[host] / "slurm.conf"
        return self.group.inside(host, "env", f"SLURM_CONF={configuration}", [f"PATH={SBIN}"], *command)

    def run(self, *command, **keywords):
        return run(self.on(*command), env=MPI_ENVIRONMENT, **keywords)

    def execute(self, *command):
        return execute(self.on(*command), env=MPI_ENVIRONMENT)

    def batch(self, path, script, *options):
        """Submits a script as the file `path`; returns the ID of the job. Its output goes to `path` with .out."""
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        return self.run("sbatch --parsable", f"--output={path}.out", words(*options), path).out.strip()
