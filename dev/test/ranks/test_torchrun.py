"""test_torchrun.py: ranks started by PyTorch's torchrun: the rank that each process finds, the rendezvous of the ranks
while the agent listens on MASTER_PORT, restarts, and requests to stop."""

import os
import re
import signal

import pytest
from harness import RELEASE, Run, execute, ranks_of, run, train_command, wait_until
from torchrun import TORCHRUN

pytestmark = pytest.mark.launchers

JOIN = RELEASE / "rendezvous_rank"  # joins the rendezvous; with the argument `who` it only prints its rank
WHO_AND_JOIN = ["sh", "-c", f"{JOIN} who; exec {JOIN}"]


def joined(output, n, attempt=0):
    """Returns the id with which n ranks have joined. All must have the same."""
    found = re.findall(rf"^torchrun rank (\d+) of {n} on \S+, attempt {attempt}, joined (.*)$", output, re.MULTILINE)
    assert sorted(int(rank) for rank, _ in found) == list(range(n)), output
    assert len({id for _, id in found}) == 1, output
    return found[0][1]


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("mode", ["--rdzv_backend c10d --rdzv_endpoint {host}:29400 --rdzv_id run",
                                  "--node_rank {agent} --master_addr {host} --master_port 29500"],
                         ids=["c10d", "static"])
def test_each_process_finds_its_rank_and_all_join(agents, mode, hosts, torchrun, start):
    group = hosts(agents)
    processes = [start(group.inside(i, TORCHRUN, f"--nnodes {agents} --nproc_per_node 3",
                                    mode.format(host=group.names[0], agent=i), WHO_AND_JOIN)) for i in range(agents)]
    assert [process.wait() for process in processes] == [0] * agents
    n = 3 * agents
    joined("".join(process.output for process in processes), n)
    ranks = []
    for process, name in zip(processes, group.names):
        found = re.findall(rf"^torchrun, rank (\d+) of {n}, local rank (\d) of 3 on {name}$", process.output, re.M)
        assert sorted(int(local) for _, local in found) == [0, 1, 2], process.output
        assert all(int(rank) % 3 == int(local) for rank, local in found), process.output
        ranks += [int(rank) for rank, _ in found]
    assert sorted(ranks) == list(range(n))


def listens(group, port):
    """Returns whether a process of host 0 listens on this port."""
    lines = run(group.inside(0, "cat /proc/net/tcp /proc/net/tcp6")).out.splitlines()
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def test_two_runs_on_overlapping_ports_join_each_its_own(hosts, torchrun, start, tmp_path):
    # The agent of run 1 has the port at which rank 0 of run 0 would listen, so that this rank listens at the first port
    # of run 1. Rank 1 of run 1 finds it there, and must go on to the next port. A rank starts when its file is there.
    group = hosts(1)
    rank = f"until [ -e '{tmp_path}/RUN'$RANK ]; do sleep 0.02; done; exec {JOIN}"
    runs = [start(group.inside(0, TORCHRUN, "--nnodes 1 --master_addr 127.0.0.1 --nproc_per_node 2", "--master_port",
                               29500 + number, ["sh", "-c", rank.replace("RUN", str(number))])) for number in (0, 1)]
    for port in (29500, 29501):
        wait_until(lambda: listens(group, port), f"an agent on port {port}")
    (tmp_path / "00").touch()
    runs[0].wait_for(lambda: listens(group, 29502), "rank 0 of run 0")
    (tmp_path / "11").touch()
    (tmp_path / "10").touch()
    assert runs[1].wait() == 0
    (tmp_path / "01").touch()
    assert runs[0].wait() == 0
    assert joined(runs[0].output, 2) != joined(runs[1].output, 2)


def test_restarted_ranks_join_as_attempt_1(torchrun):
    fails_once = ["sh", "-c", f"[ \"$TORCHELASTIC_RESTART_COUNT $RANK\" != '0 1' ] || exit 3; {WHO_AND_JOIN[2]}"]
    output = run(torchrun, "--max_restarts 1 --nproc_per_node 2", fails_once).out
    joined(output, 2, attempt=1)
    assert len(re.findall(", restart 1$", output, re.MULTILINE)) == 2


def test_torchrun_reports_the_error_of_a_rank(torchrun):
    result = execute(torchrun, "--nproc_per_node 1", JOIN, "who", env={"PMIX_RANK": 3, "PMI_SIZE": 4})
    assert re.search(r"exitcode *: 2 ", result.err) and "traceback : this is one of 4 processes" in result.err, result


@pytest.fixture
def trains(torchrun, start, more_data, tmp_path):
    """A torchrun of one rank, and its Run."""
    command = train_command("--steps 1000000 --checkpoint-every 1000000 --resume", out=tmp_path / "run", data=more_data,
                            val=False)
    process = start(torchrun, "--max_restarts 2 --nproc_per_node 1", command, env={"OMP_NUM_THREADS": 1})
    return process, Run(tmp_path / "run")


def test_rank_that_ends_with_code_75_is_restarted_and_no_step_is_lost(trains):
    process, run = trains
    for starts in (1, 2, 3):
        process.wait_for(lambda: len(run.lines("run")) == starts and run.lines()[-1]["kind"] == "step", "a step")
        os.kill(ranks_of(process)[0], signal.SIGTERM)
    assert process.wait() == 1
    steps = 0
    for line in run.lines():
        if line["kind"] == "run":
            assert (line.get("resumed_at", 0)) == steps
        if line["kind"] == "step":
            assert line["step"] == steps
            steps += 1
    assert len(run.lines("run")) == 3


def test_sigterm_to_torchrun_saves_the_last_step_and_starts_nothing(trains):
    process, run = trains
    process.wait_for_step(run, 12)
    process.signal(signal.SIGTERM)
    assert process.wait() != 0
    assert run.latest() == f"step_{len(run.lines('step')):06d}"
    assert len(run.lines("run")) == 1
