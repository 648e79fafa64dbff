"""test_torchrun.py: ranks started by PyTorch's torchrun: the rank that each process finds, the rendezvous of the ranks
while the agent listens on MASTER_PORT, restarts, requests to stop, and a host that is lost and comes back."""

import importlib.util
import os
import re
import signal
import sys

import pytest
from harness import (RELEASE, Run, assert_same_run, emulated_gpus, execute, ranks_of, run, train, train_command, words)

pytestmark = [pytest.mark.launchers, pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="there is no torchrun (ALL=1 ./scripts/test.sh installs it: apt-get install python3-torch)")]
# -r and -t are given, because version 1.13 cannot parse their default values under Python 3.11.
TORCHRUN = words([sys.executable], "-m torch.distributed.run -r 9:1 -t 9:1 --monitor_interval 0.1 --no_python")
# torchrun listens on any free port. These options replace --standalone, which in version 1.13 always listens on port
# 29400: a second run would join the store of the first run, and fail when the first run ends.
ONE_HOST = TORCHRUN + words("--nnodes 1 --rdzv_backend c10d --rdzv_endpoint localhost:0 --rdzv_id one")
JOIN = RELEASE / "rendezvous_rank"  # joins the rendezvous; with the argument `who` it only prints its rank
WHO_AND_JOIN = ["sh", "-c", f"{JOIN} who; exec {JOIN}"]


@pytest.fixture(scope="module", autouse=True)
def torchrun_starts():
    """Debian 13's PyTorch 2.6 is built without libuv, which its torchrun requires."""
    if "without libuv" in execute(ONE_HOST, "--nproc_per_node 1 true").err:
        pytest.skip("torchrun starts nothing here: its PyTorch is built without libuv")


def assert_joined(output, n, attempt=0):
    """Asserts that n ranks have joined with one id."""
    found = re.findall(rf"^torchrun rank (\d+) of {n} on \S+, attempt {attempt}, joined (.*)$", output, re.MULTILINE)
    assert sorted(int(rank) for rank, _ in found) == list(range(n)), output
    assert len({id for _, id in found}) == 1, output


@pytest.mark.parametrize("agents, secret, mode", [
    (1, None, "--node_rank {agent} --master_addr {host} --master_port 29500"),
    (2, None, "--node_rank {agent} --master_addr {host} --master_port 29500"),
    (2, "b1946ac92492d2347c6235b4d2611184", "--rdzv_backend c10d --rdzv_endpoint {host}:29400 --rdzv_id run")])
def test_each_process_finds_its_rank_and_all_join(agents, secret, mode, hosts, start):
    group = hosts(agents)
    processes = [start(group.inside(i, TORCHRUN, f"--nnodes {agents} --nproc_per_node 3",
                                    mode.format(host=group.names[0], agent=i), WHO_AND_JOIN),
                       env={"TRAIN_GPT2_SECRET": secret}) for i in range(agents)]
    assert [process.wait() for process in processes] == [0] * agents
    n = 3 * agents
    output = "".join(process.output for process in processes)
    assert_joined(output, n)
    assert output.count("rank 0 takes any process for a rank: trusted networks only") == (not secret)
    ranks = []
    for process, name in zip(processes, group.names):
        found = re.findall(rf"^torchrun, rank (\d+) of {n}, local rank (\d) of 3 on {name}$", process.output, re.M)
        assert sorted(int(local) for _, local in found) == [0, 1, 2], process.output
        assert all(int(rank) % 3 == int(local) for rank, local in found), process.output
        ranks += [int(rank) for rank, _ in found]
    assert sorted(ranks) == list(range(n))


def test_restarted_ranks_join_as_attempt_1():
    fails_once = ["sh", "-c", f"[ \"$TORCHELASTIC_RESTART_COUNT $RANK\" != '0 1' ] || exit 3; {WHO_AND_JOIN[2]}"]
    output = run(ONE_HOST, "--max_restarts 1 --nproc_per_node 2", fails_once).out
    assert_joined(output, 2, attempt=1)
    assert len(re.findall(", restart 1$", output, re.MULTILINE)) == 2


def test_torchrun_reports_the_error_of_a_rank():
    result = execute(ONE_HOST, "--nproc_per_node 1", JOIN, "who", env={"PMIX_RANK": 3, "PMI_SIZE": 4})
    assert re.search(r"exitcode *: 2 ", result.err) and "traceback : this is one of 4 processes" in result.err, result


@pytest.fixture
def trains(start, more_data, tmp_path):
    """A torchrun of one rank, and its Run."""
    command = train_command("--steps 1000000 --checkpoint-every 1000000 --resume", out=tmp_path / "run", data=more_data,
                            val=False)
    process = start(ONE_HOST, "--max_restarts 2 --nproc_per_node 1", command, env={"OMP_NUM_THREADS": 1})
    return process, Run(tmp_path / "run")


def test_rank_that_ends_with_code_75_is_restarted_and_no_step_is_lost(trains):
    process, run = trains
    for starts in (1, 2, 3):
        process.wait_for(lambda: len(run.lines("run")) == starts and run.lines()[-1]["kind"] == "step", "a step")
        os.kill(ranks_of(process)[0], signal.SIGTERM)
    assert process.wait() == 1
    assert [line["step"] for line in run.lines("step")] == list(range(run.last_step() + 1))
    assert len(run.lines("run")) == 3


def test_sigterm_to_torchrun_saves_the_last_step_and_starts_nothing(trains):
    process, run = trains
    process.wait_for_step(run, 12)
    process.signal(signal.SIGTERM)
    assert process.wait() != 0
    assert run.latest() == f"step_{len(run.lines('step')):06d}"
    assert len(run.lines("run")) == 1


# The ranks are emulated GPUs, because torchrun cannot start CPU ranks. The steps are more than the run makes until the
# host is back.
OPTIONS = "--layers 1 --heads 1 --vocab-size 384 --micro-batch 1 --global-batch 32 --steps 100 --checkpoint-every 10 " \
          "--precision fp32 --autotune off --deterministic-ranks 2"
# The options of docs/distributed.md, from --nnodes to --rdzv_id.
AGENT = "--rdzv_conf last_call_timeout=5 --nnodes 1:2 --nproc_per_node 1 --max_restarts 3 --rdzv_backend c10d " \
        "--rdzv_endpoint {host}:29400 --rdzv_id elastic"


def last_start(run):
    """Returns the number of starts of a run, and of the last one the ranks, the begin and the number of steps."""
    lines = run.lines()
    starts = [i for i, line in enumerate(lines) if line["kind"] == "run"]
    begin = lines[starts[-1]] if starts else {"world_size": 0}
    steps = sum(line["kind"] == "step" for line in lines[starts[-1] if starts else 0:])
    return len(starts), begin["world_size"], begin.get("resumed_at", 0), steps


def test_run_loses_a_host_continues_and_takes_it_back_with_the_same_bits(hosts, start, more_data, tmp_path):
    given = dict(data=more_data, val=False, by=emulated_gpus(1))
    undisturbed = train(OPTIONS, out=tmp_path / "undisturbed", **given)
    group, run = hosts(2), Run(tmp_path / "run")
    # The hosts are network namespaces, which share no abstract sockets.
    env = {"SIMT_DEVICES": 1, "SIMT_NCCL_FOLDER": tmp_path, "OMP_NUM_THREADS": 1}

    def agent(host):
        return start(group.inside(host, TORCHRUN, AGENT.format(host=group.names[0]),
                                  train_command(OPTIONS, "--resume", out=run, **given)), env=env)

    def trains_on(ranks, after, steps):
        """Waits until the last start, one beyond the first `after`, has so many ranks and has made so many steps."""
        def reached():
            starts, world_size, _, made = last_start(run)
            return starts > after and world_size == ranks and made >= steps

        first.wait_for(reached, f"{steps} steps of {ranks} ranks")
        return last_start(run)

    first, second = agent(0), agent(1)
    starts, *_ = trains_on(2, after=0, steps=1)
    first.wait_for(run.latest, "a checkpoint")
    group.kill(1)
    second.wait()
    starts, _, saved, _ = trains_on(1, after=starts, steps=5)
    assert saved > 0
    second = agent(1)
    assert trains_on(2, after=starts, steps=1)[2] > saved
    assert [first.wait(), second.wait()] == [0, 0]
    assert_same_run(undisturbed, run, 100)
