"""test_resume.py: a run that is stopped, killed or fails, and is resumed, has the log and weights of an uninterrupted
run, byte for byte."""

import functools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from harness import (PROGRAM, STOP_SIGNALS, Run, assert_same_run, close, execute, overwrite, run, train,
                     train_command)

FORMS = {
    "fp32": "--precision fp32",
    "bf16": "--precision bf16",
    "fp8": "--precision fp8",
    "no_masters": "--precision bf16 --master-weights off",  # rounds stochastically
    "8bit": "--precision bf16 --moments 8bit",
    "bf16_sums": "--precision bf16 --grad-accum bf16 --master-weights off",
    "bf16_moments": "--precision fp32 --moments bf16 --optimizer muon",
}
RUN = "--steps 20 --val-every 4 --sample-every 5 --sample-tokens 8 --checkpoint-every 7 --keep 0"
ENDLESS = "--precision fp32 --schedule constant --steps 10000000 --val-every 0 --checkpoint-every"
# Steps of a thousand micro-steps.
LONG = "--precision fp32 --channels 64 --micro-batch 1 --global-batch 16000 --steps 3 --checkpoint-every 3"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """whole(form) returns the uninterrupted run, by two threads."""

    @functools.cache
    def of_form(form):
        out = tmp_path_factory.mktemp("whole") / form
        return train(RUN, FORMS[form], out=out, data=data, env={"OMP_NUM_THREADS": 2})

    return of_form


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, more_data):
    """An uninterrupted run of three long steps."""
    return train(LONG, out=tmp_path_factory.mktemp("long") / "run", data=more_data, val=False)


def saved(run):
    """Returns whether the newest checkpoint is that of the last step in the log."""
    return Run(run).latest() == f"step_{Run(run).last_step() + 1:06d}"


@pytest.mark.parametrize("form", FORMS)
def test_a_run_in_parts_by_one_or_two_threads_has_the_bits_of_a_run_in_one_part(form, whole, tmp_path, data):
    for threads, options in [(1, "--stop-after 6"), (2, "--stop-after 7 --resume"), (1, "--resume")]:
        train(RUN, FORMS[form], options, out=tmp_path / "run", data=data, env={"OMP_NUM_THREADS": threads})
    assert list(whole(form).losses()) == list(range(20))
    assert_same_run(whole(form), tmp_path / "run", 20)


@pytest.mark.isa
def test_without_master_weights_a_bf16_checkpoint_resumes_and_the_loss_is_close(whole, tmp_path, data):
    options = {"out": tmp_path / "run", "data": data}
    train(RUN, FORMS["no_masters"], "--export-dtype bf16 --stop-after 12", **options)
    train(RUN, FORMS["no_masters"], "--export-dtype fp32 --resume", **options)
    assert_same_run(whole("no_masters"), tmp_path / "run", 20)
    assert close(whole("no_masters").val_loss(), whole("bf16").val_loss(), 0.02)
    assert close(whole("bf16_sums").val_loss(), whole("no_masters").val_loss(), 0.005)


def test_a_killed_run_resumes_from_its_last_checkpoint(train_in_background, tmp_path, data):
    killed, undisturbed = Run(tmp_path / "killed"), tmp_path / "undisturbed"
    process = train_in_background(ENDLESS, "50 --keep 3", out=killed, data=data)
    process.wait_for(lambda: (killed.latest() or "") >= "step_000100", "two checkpoints")
    process.signal(signal.SIGKILL)
    assert process.wait() == 128 + signal.SIGKILL
    steps = int(killed.latest().removeprefix("step_")) + 20
    for run in (killed, undisturbed):
        train(ENDLESS, f"50 --resume --steps {steps}", out=run, data=data)
    assert_same_run(undisturbed, killed, steps)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_step_that_a_signal_interrupts_is_left_and_repeated(number, start, long_run, tmp_path, more_data):
    run = tmp_path / "run"
    process = start("env --default-signal=INT,HUP", train_command(LONG, out=run, data=more_data, val=False))
    process.wait_for_step(run, 0)
    process.signal(number)
    assert process.wait() == 75
    assert "stopping: the run leaves this step" in process.output
    assert saved(run)
    train(LONG, "--resume", out=run, data=more_data, val=False)
    assert_same_run(long_run, run, 3)


def test_signals_that_the_caller_ignores_do_not_stop_the_run_and_those_that_it_blocks_do(start, tmp_path, data):
    run = tmp_path / "run"
    process = start("env --ignore-signal=INT --block-signal=TERM nohup",
                    train_command(ENDLESS, 10000000, out=run, data=data))
    process.wait_for_step(run, 3)
    process.signal(signal.SIGINT)
    process.signal(signal.SIGHUP)
    process.wait_for_step(run, Run(run).last_step() + 50)
    process.signal(signal.SIGTERM)
    assert process.wait() == 75


# Process 1 of a container has no default actions, so a signal without a handler does nothing.
@pytest.mark.parametrize("command, number, code", [
    ("train", signal.SIGTERM, 75), ("generate", signal.SIGTERM, 143), ("generate", signal.SIGINT, 130),
    ("generate", signal.SIGHUP, 129)])
def test_signals_end_process_1(command, number, code, start, trained, tmp_path, data):
    container = "env --default-signal=INT,HUP unshare --pid --fork --kill-child --mount-proc"
    if execute(container, "true").code != 0:
        pytest.skip("there are no PID namespaces here")
    if command == "train":
        process = start(container, train_command(ENDLESS, 10000000, out=tmp_path / "run", data=data))
        process.wait_for_step(tmp_path / "run", 3)
    else:
        process = start(container, PROGRAM, "generate --prompt king --num-samples 1000000 --init", trained.folder)
        process.wait_for(lambda: "king" in process.output, "a text")
    os.kill(process.descendants()[-1], number)
    assert process.wait() == code


def test_a_signal_before_the_first_step_ends_the_process_and_leaves_the_checkpoint(start, tmp_path, data):
    def files():
        return {path: path.read_bytes() for path in run.checkpoint(1).iterdir()}

    # The model is so large that it is still being loaded when the lock is there.
    run, large = Run(tmp_path / "run"), "--channels 512 --keep 1 --steps 2"
    train(large, "--stop-after 1", out=run, data=data)
    before = files()
    process = start(train_command(large, "--resume", out=run, data=data))
    process.wait_for((run / "run.lock").exists, "the lock")
    process.signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert files() == before
    train(large, "--resume", out=run, data=data)


def catches_sigterm(pid):
    caught = re.search("SigCgt:(.*)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1


# Long validations, before the first step and after the last one.
@pytest.mark.parametrize("step", [0, 4])
def test_a_signal_leaves_a_validation_and_saves_its_step(step, train_in_background, tmp_path, data, more_data):
    options = ["--precision fp32 --steps 4 --val-every 4 --val-tokens 64000 --allow-other-tokenizer",
               ["--val-data", more_data / "train_*.bin"]]
    run = Run(tmp_path / "run")
    process = train_in_background(*options, "--quiet=0", out=run, data=data)
    if step == 0:
        process.wait_for(lambda: catches_sigterm(process.pid), "the handler of SIGTERM")
    else:
        process.wait_for_step(run, step - 1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 75
    assert step not in run.val_losses()
    assert run.latest() == (None if step == 0 else "step_000004")
    assert ("there is nothing to save" in process.output) == (step == 0)
    train(*options, "--resume", out=run, data=data)
    assert_same_run(train(*options, out=tmp_path / "whole", data=data), run, 4)


def test_more_steps_for_a_finished_run_say_both_learning_rates(tmp_path, data):
    out = train("--steps 4 --warmup 0 --lr 1e-3", out=tmp_path / "run", data=data)
    longer = run(train_command("--resume --steps 8 --warmup 0 --lr 1e-3", out=out, data=data))
    # The cosine from 1 to 0.1 of the rate is at step 4 of 0 to 7.
    assert ("changed since the checkpoint: --steps 8 (was 4); the learning rate goes on with 4.50e-04, and would have "
            "gone on with 1.00e-04") in longer.err


def test_a_run_goes_on_with_the_other_optimizer_and_says_so(tmp_path, data):
    options = "--steps 12 --warmup 0 --lr 1e-3 --schedule constant --checkpoint-every 4"
    out = train(options, "--stop-after 4", out=tmp_path / "run", data=data)
    for optimizer, before in [("muon", "adamw"), ("adamw", "muon")]:
        part = run(train_command("--resume", options, "--stop-after 4 --optimizer", optimizer, out=out, data=data))
        assert f'changed since the checkpoint: --optimizer "{optimizer}" (was "{before}")' in part.err
        assert ("the checkpoint has no second moments of matrices" in part.err) == (before == "muon")
    losses = out.by_step("step", "loss")
    assert sorted(losses) == list(range(12)) and max(losses[step] for step in range(8, 12)) < losses[3]


def test_a_run_goes_on_with_moments_of_any_kind_and_says_what_is_rounded(tmp_path, data):
    options = "--precision fp32 --steps 15 --warmup 0 --lr 1e-3 --schedule constant --checkpoint-every 3"
    out = train(options, "--stop-after 3", out=tmp_path / "run", data=data)
    for kind, note in [("8bit", "moments are fp32; they are rounded to 8bit"),
                       ("bf16", "moments are 8bit; they are rounded to bf16"),
                       ("fp32", "moments are bf16; they are widened to fp32"), ("8bit", "rounded to 8bit")]:
        part = run(train_command("--resume", options, "--stop-after 3 --moments", kind, out=out, data=data))
        assert note in part.err
    whole = train(options, out=tmp_path / "whole", data=data)
    assert close(out.losses()[14], whole.losses()[14], 0.02)


def test_a_checkpoint_before_the_cooldown_resumes_into_a_longer_run_with_its_bits(tmp_path, data):
    def train_with(cooldown, out, more=""):
        options = f"--schedule wsd --cooldown {cooldown} --checkpoint-every 6 --keep 0 {more}"
        return run(train_command(options, out=out, data=data)).err

    note = "the cooldown began at step 12: for the result of a longer run resume a checkpoint up to it"
    before, inside = Run(tmp_path / "before"), tmp_path / "inside"
    train_with(0.25, inside, "--steps 16")
    shutil.copytree(inside, before)
    shutil.rmtree(before.checkpoint(16))
    train_with(0.5, tmp_path / "longer", "--steps 30")
    assert note in train_with(0.5, inside, "--steps 30 --resume")
    assert note not in train_with(0.5, before, "--steps 30 --resume")
    assert_same_run(tmp_path / "longer", before, 30)


@pytest.mark.parametrize("loss, code", [("cut", 65), ("removed", 66), ("token", 65)])
def test_data_that_become_unreadable_end_the_run_after_a_save(loss, code, train_in_background, long_run, tmp_path,
                                                              more_data):
    spoilt, run = shutil.copytree(more_data, tmp_path / "spoilt"), tmp_path / "run"
    shard = next(spoilt.glob("train_*.bin"))
    process = train_in_background(LONG, out=run, data=spoilt, val=False)
    process.wait_for_step(run, 0)
    if loss == "cut":
        os.truncate(shard, 5000)
    elif loss == "token":
        overwrite(shard, 1024, b"\xff" * (shard.stat().st_size - 1024))
    else:
        shard.unlink()
    assert process.wait() == code
    assert saved(run)
    assert f"error: {shard}: " in process.output and "; mend or replace this file, or leave it out" in process.output
    shutil.copy(more_data / shard.name, shard)
    train(LONG, "--resume", out=run, data=spoilt, val=False)
    assert_same_run(long_run, run, 3)


def test_a_bad_token_in_the_validation_data_ends_the_run_after_a_save(train_in_background, tmp_path, data):
    spoilt, run = shutil.copytree(data, tmp_path / "spoilt"), tmp_path / "run"
    shard = next(spoilt.glob("val_*.bin"))
    process = train_in_background(ENDLESS.replace("--val-every 0", "--val-every 300"), 10000000, out=run, data=spoilt)
    process.wait_for_step(run, 0)
    overwrite(shard, 1024, b"\xff" * 100)
    assert process.wait() == 65
    assert saved(run)
    assert f"error: {shard}: token " in process.output
    assert "leave it out of --val-data" in process.output
