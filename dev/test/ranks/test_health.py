"""test_health.py: what a run does about steps that are not finite, spikes, and ranks that round differently. A learning
rate of 1e30 makes every step after the first one NaN."""

import json
import re

import pytest
from harness import (MPI_ENVIRONMENT, PROGRAM, TINY, Run, assert_same_run, execute, ranks, refused, run, train,
                     train_command)
from mpi import each_rank

OPTIONS = "--micro-batch 1 --global-batch 48 --val-every 0"
NAN = f"{OPTIONS} --steps 16 --checkpoint-every 5 --lr 1e30 --warmup 0"


def skipped(run):
    return [(line["step"], line["skipped"]) for line in run.lines("step") if "skipped" in line]


def test_steps_that_are_not_finite_change_no_weight(data, tmp_path):
    result = refused(1, "step 1: loss nan", train_command(NAN, out=tmp_path / "halt", data=data))
    assert "the step did not change the weights, which are saved as of step 1" in result.errors[0]
    halt, skip = Run(tmp_path / "halt"), Run(tmp_path / "skip")
    assert halt.latest() == "step_000001"
    result = refused(1, "step 10: loss nan", train_command(NAN, "--on-nan skip", out=skip, data=data))
    assert "the last of 10 steps in a row" in result.errors[0]
    assert skipped(skip) == [(step, "non_finite") for step in range(1, 11)]
    assert skip.latest() == "step_000011"  # skipped steps count
    for name in ("model.safetensors", "optimizer.safetensors"):  # without their headers, which have the step
        a, b = ((checkpoint / name).read_bytes()[-50000:] for checkpoint in (halt.checkpoint(1), skip.checkpoint(11)))
        assert a == b


# With these options nearly every second loss is half a standard deviation above the mean of 128 steps.
def test_a_resumed_run_finds_the_same_spikes(more_data, tmp_path):
    options = f"{OPTIONS} --steps 150 --checkpoint-every 1000 --spike-z 0.5 --lr 0"
    where = {"data": more_data, "env": {"OMP_NUM_THREADS": 1}}
    whole = train(options, out=tmp_path / "whole", **where)
    assert any(step > 140 for step, _ in skipped(whole))
    train(options, "--stop-after 140", out=tmp_path / "resumed", **where)
    resumed = train(options, "--resume", out=tmp_path / "resumed", **where)
    assert skipped(resumed) == skipped(whole)
    assert_same_run(whole, resumed, 150)


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_skip_together(zero, data, tmp_path):
    two = ranks(2)
    result = execute(train_command(NAN, f"--global-batch 32 --on-nan skip --zero {zero}", out=tmp_path / "run",
                                   data=data, by=two), env=two.env)
    assert result.code == 1 and Run(tmp_path / "run").latest() == "step_000011"


# Ranks compare their weights, unless they round differently: with --zero 0 their weights then differ.
COMPARED = f"{OPTIONS} --steps 8 --check-replicas 4"


def test_equal_replicas_pass_the_comparison(data):
    train(COMPARED, "--zero 1", out="", data=data, by=ranks(3))


@pytest.mark.isa
def test_ranks_with_other_instruction_sets_do_not_compare_their_weights(data, tmp_path):
    if ", base;" in run(PROGRAM, "plan", TINY).out:
        pytest.skip("this machine has CPU_ISA=base only")
    command = train_command(COMPARED, "--global-batch 32 --precision fp32", out=tmp_path / "run", data=data)
    run(each_rank(["env", "CPU_ISA=base", *command], command), env=MPI_ENVIRONMENT)
    assert re.search("rank 1 has CPU_ISA=[a-z0-9]*, rank 0 has base: they may round differently, .*; "
                     "--check-replicas is off", str(Run(tmp_path / "run").lines("warning")))
    # A resume on equal ranks compares again.
    assert json.loads((tmp_path / "run/step_000008/trainer.json").read_text())["options"]["check-replicas"] == 4
