"""test_checkpoint_async.py: saves that are written while training goes on give the bytes of saves that training waits
for, on one rank or several; they survive kill -9 and a request to stop, and take no memory of their own."""

import re
import signal
from pathlib import Path

import pytest
from harness import (ONE, Run, assert_same_weights, emulated_gpus, execute, preload, ranks, run, train,
                     train_command)

SMALL = "--layers 3 --heads 4 --micro-batch 1 --global-batch 96 --val-every 0 --schedule constant --keep 0"
ENDLESS = "--steps 1000000 --checkpoint-every 20 --keep 0 --val-every 0 --quiet=0"
# No file may be larger than 32 MB, as on a full disk. The weights of LARGE are.
FULL_DISK = ["bash", "-c", 'ulimit -f 32768; exec "$@"', "bash"]
NO_MEMORY = ["bash", "-c", 'ulimit -v 550000; exec "$@"', "bash"]
LARGE = "--layers 1 --heads 8 --channels 512 --vocab-size 20480 --micro-batch 1 --global-batch 32 --quiet=0"
GATE = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int fsync(int file) {
    char link[64], path[4096] = "";
    sprintf(link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/step_"))
        while (access("GATE", F_OK) == 0) usleep(5000);
    return 0;
}
"""


@pytest.fixture
def closed_gate(tmp_path):
    """Returns an environment in which no save ends before the test has called open_gate(), and open_gate."""
    gate = tmp_path / "gate"
    gate.touch()
    return preload(tmp_path, GATE.replace("GATE", str(gate))), gate.unlink


# Several steps change the weights before the first save is written.
@pytest.mark.parametrize("n, options", [
    (1, ""), (3, "--zero 1"), (2, "--zero 3 --precision bf16 --master-weights off"),
    (4, "--tensor-parallel 2 --zero 2")])
def test_a_save_in_flight_has_the_bytes_of_one_that_training_waits_for(n, options, train_in_background, closed_gate,
                                                                       data, tmp_path):
    options = f"{SMALL} {options} --steps 6 --checkpoint-every 2"
    where = {"data": data, "by": ranks(n) if n > 1 else ONE}
    off, on = train(options, "--checkpoint-async off", out=tmp_path / "off", **where), Run(tmp_path / "on")
    env, open_gate = closed_gate
    process = train_in_background(options, out=on, env=env, **where)
    process.wait_for_step(on, 3)
    assert not on.checkpoint(2).exists()
    open_gate()
    assert process.wait() == 0, process.output
    for step in (2, 4, 6):
        assert_same_weights(off.checkpoint(step), on.checkpoint(step))
    assert [line["step"] for line in on.lines("checkpoint")] == [2, 4, 6]


def save_in_flight(process, run_folder):
    process.wait_for(lambda: any(Path(run_folder).glob("step_*.tmp/*")), "a save is in flight")


def test_a_run_that_is_killed_during_a_save_starts_again(train_in_background, closed_gate, data, tmp_path):
    where = {"out": tmp_path / "run", "data": data}
    for resume in ("", "--resume"):
        latest = Run(tmp_path / "run").latest()
        process = train_in_background(ENDLESS, resume, env=closed_gate[0], **where)
        save_in_flight(process, tmp_path / "run")
        process.signal(signal.SIGKILL)
        process.wait()
        killed = Run(tmp_path / "run")
        assert killed.unfinished() and killed.latest() == latest
        assert train(ENDLESS, resume, "--stop-after 5", **where).unfinished() == []


def test_a_request_to_stop_waits_for_the_save_in_flight(train_in_background, closed_gate, data, tmp_path):
    env, open_gate = closed_gate
    # Long steps: the signal arrives before the next save, which would wait for the one that the gate holds.
    long_steps = "--global-batch 6400 --checkpoint-every 20"
    process = train_in_background(ENDLESS, long_steps, out=tmp_path / "run", data=data, env=env)
    save_in_flight(process, tmp_path / "run")
    process.signal(signal.SIGTERM)
    process.wait_for(lambda: "the save before is still being written; the run waits for it" in process.output, "a note")
    open_gate()
    assert process.wait() == 75
    stopped = Run(tmp_path / "run")
    assert (stopped.checkpoint(20) / "trainer.json").exists()
    assert stopped.latest() == f"step_{stopped.last_step() + 1:06d}"


# Rank 0 cannot write, and the other one does not wait for ever.
@pytest.mark.parametrize("n, mode", [(1, "off"), (2, "on")])
def test_the_third_failed_save_ends_the_run(n, mode, data, tmp_path):
    by = ranks(n) if n > 1 else ONE
    options = f"{LARGE} --zero 1 --steps 100 --checkpoint-every 2 --checkpoint-async {mode}"
    result = execute(FULL_DISK, train_command(options, out=tmp_path / "run", data=data, val=False, by=by), env=by.env)
    assert result.code == 74 and "three saves in a row failed, so the run ends" in result.errors[0], result
    for step in (2, 4):
        assert re.search(f"^warning: the checkpoint of step {step} was not saved: .*: File too large; training "
                         "continues$", result.err, re.M), result
    assert Run(tmp_path / "run").last_step() >= 5 and not any((tmp_path / "run").glob("step_*"))


def test_a_run_without_memory_for_a_copy_waits_for_its_saves_and_is_whole_after_a_kill(start, closed_gate, data,
                                                                                       tmp_path):
    out = tmp_path / "run"
    command = train_command(f"{LARGE} --steps 4 --warmup 0 --checkpoint-every 1", out=out, data=data, val=False)
    result = run(NO_MEMORY, command, "--stop-after 2")
    assert "training waits for each checkpoint: a copy of the state takes" in result.out + result.err
    process = start(NO_MEMORY, command, "--resume", env=closed_gate[0])
    save_in_flight(process, out)
    process.signal(signal.SIGKILL)
    process.wait()
    assert Run(out).unfinished() and Run(out).last_step() == 2  # no step is taken during the save
    result = run(NO_MEMORY, command, "--resume")
    assert f"resumed from {out}/step_000002" in result.out + result.err and Run(out).latest() == "step_000004"


def test_two_gpus_save_the_same_bytes_in_flight(data, tmp_path):
    options = f"{SMALL} --layers 1 --heads 1 --channels 32 --global-batch 128 --autotune off --precision fp32 --zero 3"
    on, off = (train(options, f"--steps 4 --checkpoint-every 2 --checkpoint-async {mode}", out=tmp_path / mode,
                     data=data, by=emulated_gpus(2)) for mode in ("on", "off"))
    assert_same_weights(on.checkpoint(2), off.checkpoint(2))
