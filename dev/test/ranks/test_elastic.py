"""test_elastic.py: torchrun --nnodes 1:2 with an agent on each of two hosts: the run loses a host, continues on the
other, and takes the host back. The ranks are emulated GPUs, because torchrun cannot start CPU ranks."""

import pytest
from harness import Run, assert_same_run, emulated_gpus, train, train_command
from torchrun import TORCHRUN

pytestmark = pytest.mark.launchers

# The steps are more than the run makes until the host is back.
OPTIONS = ("--layers 1 --heads 1 --vocab-size 384 --micro-batch 1 --global-batch 32 --steps 100 --checkpoint-every 10"
           " --precision fp32 --autotune off --deterministic-ranks 2")
# The options of docs/distributed.md, from --nnodes to --rdzv_id.
AGENT = ("--rdzv_conf last_call_timeout=5 --nnodes 1:2 --nproc_per_node 1 --max_restarts 3 --rdzv_backend c10d"
         " --rdzv_endpoint {host}:29400 --rdzv_id elastic")


def starts_of(run):
    """Returns the starts of a run, with the number of the steps after each."""
    starts = []
    for line in run.lines():
        if line["kind"] == "run":
            starts.append({"ranks": line["world_size"], "resumed_at": line.get("resumed_at", 0), "steps": 0})
        elif line["kind"] == "step":
            starts[-1]["steps"] += 1
    return starts


def test_run_loses_a_host_continues_and_takes_it_back_with_the_same_bits(hosts, torchrun, start, more_data, tmp_path):
    given = dict(data=more_data, val=False, by=emulated_gpus(1))
    undisturbed = train(OPTIONS, out=tmp_path / "undisturbed", **given)
    group = hosts(2)
    run = Run(tmp_path / "run")
    # The hosts are network namespaces, which share no abstract sockets.
    env = {"SIMT_DEVICES": 1, "SIMT_NCCL_FOLDER": tmp_path, "OMP_NUM_THREADS": 1}

    def agent(host):
        return start(group.inside(host, TORCHRUN, AGENT.format(host=group.names[0]),
                                  train_command(OPTIONS, "--resume", out=run, **given)), env=env)

    def trains_on(ranks, after, steps):
        """Waits until the last start, one beyond the first `after`, has so many ranks and has made so many steps."""
        first.wait_for(lambda: len(starts_of(run)) > after and starts_of(run)[-1]["ranks"] == ranks and
                       starts_of(run)[-1]["steps"] >= steps, f"{steps} steps of {ranks} ranks")
        return len(starts_of(run)), starts_of(run)[-1]["resumed_at"]

    first, second = agent(0), agent(1)
    starts, _ = trains_on(2, after=0, steps=1)
    first.wait_for(run.latest, "a checkpoint")
    group.kill(1)
    second.wait()
    starts, saved = trains_on(1, after=starts, steps=5)
    assert saved > 0
    second = agent(1)
    _, saved_by_one = trains_on(2, after=starts, steps=1)
    assert saved_by_one > saved
    assert [first.wait(), second.wait()] == [0, 0]
    assert_same_run(undisturbed, run, 100)
