"""hosts.py: several hosts on one machine, which are network namespaces. Each has a cable (veth) to a switch (a bridge)
in another namespace, so that the machine's own network does not change. The fixture `hosts` makes them."""

import itertools
import os
import shutil
from pathlib import Path

import harness
import pytest
from harness import (MPI_ENVIRONMENT, PROGRAM, Launch, execute, make_script, no_mpi_because, run, wait_until,
                     words)

# Each group of hosts has a switch of its own, so that all groups can have the same addresses.
SUBNET = "10.77.0"
COUNT = itertools.count()

# mpirun calls it in place of ssh. It may give the address of a host in place of its name.
AGENT = """host=$1
shift
case $host in {subnet}.*) host={prefix}$((${{host##*.}} - 1)) ;; esac
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && eval "$1"' "$host" "$*"
"""


class Hosts:
    """Hosts 0, 1, ... with the names `names`."""

    def __init__(self, n, folder):
        self.prefix = f"h{os.getpid()}n{next(COUNT)}n"
        self.names = [f"{self.prefix}{i}" for i in range(n)]
        self.switch = self.prefix + "switch"
        self.agent = Path(folder) / f"{self.prefix}agent"

    def up(self):
        make_script(self.agent, AGENT.format(subnet=SUBNET, prefix=self.prefix))
        run("ip netns add", self.switch)
        run("ip -n", self.switch, "link add bridge type bridge")
        run("ip -n", self.switch, "link set bridge up")
        lines = "".join(f"{SUBNET}.{i + 1} {name}\n" for i, name in enumerate(self.names))
        for i, name in enumerate(self.names):
            run("ip netns add", name)
            run("ip link add cable netns", name, f"type veth peer name port{i} netns", self.switch)
            run("ip -n", self.switch, f"link set port{i} master bridge up")
            run("ip -n", name, f"addr add {SUBNET}.{i + 1}/24 dev cable")
            for device in ("lo", "cable"):
                run("ip -n", name, "link set", device, "up")
            etc = Path("/etc/netns") / name  # `ip netns exec` shows these files in place of those in /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + lines)

    def down(self):
        self.kill()
        for name in [*self.names, self.switch]:
            execute("ip netns del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def inside(self, i, *command):
        """Returns the words of a command that runs on host i, with the host's own name. Open MPI uses this name to find
        the ranks that share memory, and in the names of its folders."""
        name = self.names[i]
        return words("ip netns exec", name, "unshare --uts sh -c 'hostname \"$0\" && exec \"$@\"'", name, *command)

    def ranks(self, each, hosts=None, keepalive="5 1 3", program=PROGRAM):
        """Starts this many ranks on each of the first hosts (None: all), by mpirun on host 0.

        keepalive (seconds until the first probe, seconds between probes, probes) lets mpirun notice a host whose cable
        is cut. Without it mpirun waits minutes or hours, although the watchdogs have ended the ranks."""
        if reason := no_mpi_because():
            pytest.skip(reason)
        names = self.names[:hosts]
        idle, interval, probes = keepalive.split()
        # Interfaces are chosen by subnet, because their names may differ between hosts. --host gives the number of
        # slots, because with the mapping policy of MPI_ENVIRONMENT Open MPI 5 puts all ranks on the first host.
        prefix = self.inside(
            0, f"mpirun -np {each * len(names)} --host", ",".join(f"{name}:{each}" for name in names),
            "--mca plm_rsh_agent", self.agent, f"--mca btl_tcp_if_include {SUBNET}.0/24",
            f"--mca oob_tcp_if_include {SUBNET}.0/24 --mca oob_tcp_keepalive_time {idle}",
            f"--mca oob_tcp_keepalive_intvl {interval} --mca oob_tcp_keepalive_probes {probes}")
        env = {**MPI_ENVIRONMENT, "PRTE_MCA_rmaps_default_mapping_policy": None}
        return Launch(program, prefix, env=env)

    def sent(self):
        """Returns the bytes that all hosts have sent so far."""
        lines = "".join(run("ip netns exec", name, "cat /proc/net/dev").out for name in self.names).splitlines()
        return sum(int(line.split()[9]) for line in lines if line.split()[0] == "cable:")

    def cut(self, i):
        """Disconnects the cable of host i from the switch."""
        run("ip -n", self.switch, f"link set port{i} down")

    def heal(self, i):
        """Connects the cable again. After failed lookups of its neighbours the host would send nothing for seconds."""
        run("ip -n", self.switch, f"link set port{i} up")
        run("ip -n", self.names[i], "neigh flush dev cable")

    def give_up_soon(self):
        """Lets the hosts take a silent host for lost after seconds: TCP tries for 15 minutes by default."""
        for name in self.names:
            run("ip netns exec", name, "sh -c 'echo 3 >/proc/sys/net/ipv4/tcp_retries2'")

    def processes(self, i=None):
        """Returns the IDs of the processes that live on host i (None: on all hosts)."""
        names = self.names if i is None else [self.names[i]]
        found = [int(pid) for name in names for pid in execute("ip netns pids", name).out.split()]
        return [pid for pid in found if harness.runs(pid)]

    def kill(self, i=None):
        """Kills all processes on host i (None: on all hosts)."""
        execute("sh -c 'kill -9 \"$@\"' sh", self.processes(i))

    def wait_until_empty(self):
        wait_until(lambda: not self.processes(), f"the end of the processes on {self.names}")


def no_hosts_because():
    """Returns why no hosts can be made here, or nothing."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "ip and unshare are needed (apt-get install iproute2 util-linux)"
    probe = f"probe{os.getpid()}"
    made = execute("ip netns add", probe).code == 0
    execute("ip netns del", probe)
    return "" if made else "no network namespaces can be made here"


def open_mpi_5():
    """Returns whether mpirun is Open MPI 5's, which may end with exit code 0 if it loses a host before a rank does."""
    return "Open MPI) 5" in run("mpirun --version").out
