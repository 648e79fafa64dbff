"""test_hosts.py: training on two to four hosts (hosts.py): the same bits as one rank, the bytes that the hosts send,
and what happens when a host is lost, its cable is cut or the run is asked to stop."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from harness import Run, assert_same_run, close, run, train, train_command
from hosts import open_mpi_5

pytestmark = pytest.mark.launchers

# 3.4 MB of gradients in fp32, so that the headers of the network are small in comparison.
PARAMETERS = 850816  # 384 x 128 + 64 x 128 + 4 (12 x 128 x 128 + 13 x 128) + 2 x 128
MODEL = "--layers 4 --heads 2 --channels 128 --vocab-size 384 --seq-len 64 --micro-batch 1 --global-batch 512 " \
        "--precision fp32 --deterministic-ranks 8 --steps 3"
# The batch divides among 1, 2, 3 and 4 ranks. The steps are more than a run makes until it is disturbed.
STEPS = 300
LOST = f"--micro-batch 1 --global-batch 192 --steps {STEPS} --checkpoint-every 10 --deterministic-ranks 4"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, more_data):
    """one_rank[OPTIONS] is the run of one rank."""
    return {options: train(options, out=tmp_path_factory.mktemp("one") / "run", data=more_data, val=False,
                           env={"OMP_NUM_THREADS": 1}) for options in (MODEL, LOST)}


# The virtual cables carry frames of 64 KiB and more with one header of 66 bytes, as network cards with segmentation
# offload do. Headers and acknowledgements are less than 1 % of the gradients.
@pytest.mark.parametrize("n, each, options, copies", [
    (2, 2, "--zero 1", 2), (4, 1, "", 6), (2, 2, "--grad-dtype bf16", 1)])
def test_hosts_send_2_copies_of_the_gradients_per_further_host(n, each, options, copies, hosts, one_rank, more_data,
                                                               tmp_path):
    group = hosts(n)
    given = dict(data=more_data, val=False, by=group.ranks(each))
    train(MODEL, options, "--stop-after 1", out=tmp_path / "short", **given)
    before = group.sent()
    whole = train(MODEL, options, out=tmp_path / "whole", **given)
    after = group.sent()
    per_step = (after - before - before) / 2  # the whole run has two steps more
    assert close(per_step, copies * PARAMETERS * 4, 0.02), per_step
    if "bf16" not in options:
        assert_same_run(one_rank[MODEL], whole, 3)
    group.wait_until_empty()


def test_first_table_counts_the_machines_and_a_divided_layer_on_two_is_a_warning(hosts, more_data):
    group = hosts(2)
    by = group.ranks(2)
    warning = f"warning: --tensor-parallel 4: ranks on {group.names[0]} and {group.names[1]} exchange activations"
    for n in (2, 4):
        options = f"--quiet=0 --stop-after 1 --heads 4 --tensor-parallel {n} --deterministic-ranks 0"
        result = run(train_command(MODEL, options, out="", data=more_data, by=by, val=False), env=by.env)
        assert "4 ranks by MPI on 2 machines" in result.out and (warning in result.err) == (n == 4)


@pytest.fixture
def endless(hosts, train_in_background, more_data, tmp_path):
    """Starts an endless run on two hosts; returns both."""
    group = hosts(2)
    # mpirun notices a lost host after the ranks: Open MPI 5's would end with exit code 0.
    process = train_in_background(MODEL, "--steps 100000 --timeout 10", out=tmp_path / "run", data=more_data,
                                  by=group.ranks(1, keepalive="30 2 5"), val=False)
    process.wait_for_step(tmp_path / "run", 3)
    return group, process


def test_cut_cable_ends_the_run_and_the_error_says_where_it_was(endless):
    group, process = endless
    group.cut(1)
    process.wait_for(lambda: "no progress" in process.output, "the error of a rank")
    group.give_up_soon()
    assert process.wait() != 0
    assert f"error: rank 0 on {group.names[0]}: no progress for 10 s (--timeout): step" in process.output
    group.wait_until_empty()


def test_sigterm_to_mpirun_ends_the_ranks_on_all_hosts(endless):
    group, process = endless
    process.signal(signal.SIGTERM)
    assert process.wait() != 0
    group.wait_until_empty()


@pytest.fixture
def given(more_data, tmp_path):
    return dict(data=more_data, val=False, out=tmp_path / "run")


@pytest.fixture
def lose(train_in_background, given):
    """Trains on each host of a group until two checkpoints are saved, calls `fault`, and waits for the end."""

    def lose(group, fault):
        # Open MPI 5's mpirun must notice a lost host after the ranks, or it ends with exit code 0.
        keepalive = "30 2 5" if open_mpi_5() else "5 1 3"
        process, run = train_in_background(LOST, by=group.ranks(1, keepalive=keepalive), **given), Run(given["out"])
        process.wait_for(lambda: (run.latest() or "") >= "step_000020", "the second checkpoint")
        fault()
        if open_mpi_5():
            group.give_up_soon()
        assert process.wait() != 0 or open_mpi_5()
        group.wait_until_empty()
        assert not run.checkpoint(STEPS).exists(), "training ended before the fault"

    return lose


def test_run_continues_without_a_host_whose_cable_was_cut(hosts, lose, given, one_rank, tmp_path):
    group = hosts(4)
    lose(group, lambda: group.cut(3))
    shutil.copytree(given["out"], tmp_path / "three")
    three = train(LOST, "--deterministic-ranks 0 --resume --stop-after 30", by=group.ranks(1, hosts=3),
                  **{**given, "out": tmp_path / "three"})
    assert three.lines("run")[-1]["resumed_at"] >= 20 and three.lines("run")[-1]["world_size"] == 3
    two = train(LOST, "--resume", by=group.ranks(1, hosts=2), **given)
    assert_same_run(one_rank[LOST], two, STEPS)


def test_run_continues_after_the_daemon_of_mpirun_on_a_host_was_killed(hosts, lose, given, one_rank):
    group = hosts(2)

    def kill_the_daemon():  # Open MPI 4 names it orted. Open MPI 5 names it prted, and it may have two processes.
        daemons = [pid for pid in group.processes(1) if Path(f"/proc/{pid}/comm").read_text() in ("orted\n", "prted\n")]
        assert daemons
        for pid in daemons:
            os.kill(pid, signal.SIGKILL)

    lose(group, kill_the_daemon)
    again = train(LOST, "--resume", by=group.ranks(1), **given)
    assert_same_run(one_rank[LOST], again, STEPS)
