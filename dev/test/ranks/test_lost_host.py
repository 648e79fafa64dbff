"""test_lost_host.py: a run on several hosts (hosts.py) loses one: it ends, leaves no process, and continues on the
hosts that are left, with the bits of a run that was not disturbed."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from harness import Run, assert_same_run, train
from hosts import open_mpi_5

pytestmark = pytest.mark.launchers

# The batch divides among 1, 2, 3 and 4 ranks. The steps are more than a run makes until it is disturbed.
STEPS = 300
OPTIONS = f"--micro-batch 1 --global-batch 192 --steps {STEPS} --checkpoint-every 10 --deterministic-ranks 4"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, more_data):
    return train(OPTIONS, out=tmp_path_factory.mktemp("undisturbed") / "run", data=more_data, val=False,
                 env={"OMP_NUM_THREADS": 1})


@pytest.fixture
def given(more_data, tmp_path):
    return dict(data=more_data, val=False, out=tmp_path / "run")


@pytest.fixture
def lose(train_in_background, given):
    """Trains on each host of a group until two checkpoints are saved, calls `fault`, and waits for the end."""

    def lose(group, fault):
        # Open MPI 5's mpirun must notice a lost host after the ranks, or it ends with exit code 0.
        keepalive = "30 2 5" if open_mpi_5() else "5 1 3"
        process, run = train_in_background(OPTIONS, by=group.ranks(1, keepalive=keepalive), **given), Run(given["out"])
        process.wait_for(lambda: (run.latest() or "") >= "step_000020", "the second checkpoint")
        fault()
        if open_mpi_5():
            group.give_up_soon()
        assert process.wait() != 0 or open_mpi_5()
        group.wait_until_empty()
        assert not run.checkpoint(STEPS).exists(), "training ended before the fault"

    return lose


def test_run_continues_without_a_host_whose_cable_was_cut(hosts, lose, given, undisturbed, tmp_path):
    group = hosts(4)
    lose(group, lambda: group.cut(3))
    shutil.copytree(given["out"], tmp_path / "three")
    three = train(OPTIONS, "--deterministic-ranks 0 --resume --stop-after 30", by=group.ranks(1, hosts=3),
                  **{**given, "out": tmp_path / "three"})
    assert three.lines("run")[-1]["resumed_at"] >= 20 and three.lines("run")[-1]["world_size"] == 3
    two = train(OPTIONS, "--resume", by=group.ranks(1, hosts=2), **given)
    assert_same_run(undisturbed, two, STEPS)


def test_run_continues_after_the_daemon_of_mpirun_on_a_host_was_killed(hosts, lose, given, undisturbed):
    group = hosts(2)

    def kill_the_daemon():  # Open MPI 4 names it orted. Open MPI 5 names it prted, and it may have two processes.
        daemons = [pid for pid in group.processes(1) if Path(f"/proc/{pid}/comm").read_text() in ("orted\n", "prted\n")]
        assert daemons
        for pid in daemons:
            os.kill(pid, signal.SIGKILL)

    lose(group, kill_the_daemon)
    again = train(OPTIONS, "--resume", by=group.ranks(1), **given)
    assert_same_run(undisturbed, again, STEPS)
