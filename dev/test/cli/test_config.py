"""test_config.py: the options of a run in run.toml, which --resume and --config take, and what a resume changes."""

import os
import re
import shutil

from harness import (PROGRAM, TINY, Run, assert_same_run, data_options, no_mpi_because, refused, run, train,
                     train_command)


def resume(out, *options, **keywords):
    """Continues the run with no options other than these, and returns the result."""
    return run(PROGRAM, "--resume --quiet --output", out, *options, **keywords)


def test_a_resume_takes_the_options_of_the_run_and_does_nothing_if_it_is_finished(trained, tmp_path):
    again = Run(shutil.copytree(trained, tmp_path / "again"))
    result = resume(again, "--quiet=0 --steps 30 --lr 1e-5")
    assert "\nnothing to do: the run is at step 30, and --steps is 30; a larger --steps continues" in result.out
    assert "the learning rate goes on" not in result.err
    assert (again / "run.toml").read_bytes() == (trained / "run.toml").read_bytes()
    assert_same_run(trained, again, 30)
    result = resume(again, "--steps 33 --quiet=0")
    assert again.last_step() == 32
    assert f"options from {again}/run.toml: --train-data " in result.out and " --lr 0.01 " in result.out
    assert "warning: changed since the checkpoint: --steps 33 (was 30); the learning rate goes on with " in result.err


def test_a_resume_compares_its_options_with_the_checkpoint_whatever_run_toml_says(trained, tmp_path):
    out = Run(shutil.copytree(trained, tmp_path / "run"))
    options = (out / "run.toml").read_text()
    refused(65, "one step needs 8,000 ", PROGRAM, "--resume --output", out, "--steps 40 --global-batch 128000")
    assert (out / "run.toml").read_text() == options
    (out / "run.toml").write_text(re.sub("^(lr|precision) = .*\n", "", options, flags=re.MULTILINE))
    said = resume(out, "--steps 31 --ranks", 1 if no_mpi_because() else 2).err
    assert "--lr 0.0006 (was 0.01)" in said
    assert no_mpi_because() or "warning: the checkpoint is of 1 rank, and 2 go on: the weights will differ" in said
    assert ('--precision "bf16" (was "fp32")' in said) == (out.lines("run")[-1]["precision"] == "bf16")
    if no_mpi_because():
        return
    assert "rounding errors" not in resume(out, "--steps 32 --ranks 1 --deterministic-ranks 2").err
    said = resume(out, "--steps 33 --ranks 2 --deterministic-ranks 2 --grad-dtype bf16").err  # each rank rounds its sum
    assert "the weights will differ by rounding errors" in said


def test_a_new_run_with_the_config_of_another_has_the_same_losses(trained, tmp_path):
    command = ["bash", "-c", '"$0" --config <(cat run.toml) --output "$1" $2', PROGRAM, tmp_path / "run"]
    run(command, cwd=trained)
    assert_same_run(trained, tmp_path / "run", 30)
    refused(2, "the ranks of --ranks cannot share a pipe or stdin", command, "--ranks=2", cwd=trained)


def test_a_warmup_that_was_not_given_follows_steps(tmp_path, data):
    out = Run(tmp_path / "run")
    options = TINY.replace("--warmup 2", "")
    run(PROGRAM, data_options(data), options, "--output", out, "--steps 400 --stop-after 1")
    resume(out, "--steps 20 --stop-after 1")
    resume(out, "--steps 3")
    rates = out.by_step("step", "lr")
    assert rates[0] == 0.01 / 40  # the warmup is a tenth of the steps
    assert rates[1] == 0.01


def test_relative_paths_are_relative_to_where_the_run_began_or_to_where_they_are_given(tmp_path, data):
    began, elsewhere, out = tmp_path / "began [here]", tmp_path / "elsewhere", tmp_path / "run"
    for folder in (began / "data", elsewhere / "near"):
        shutil.copytree(data, folder)
    (began / "task.jsonl").write_text('{"context": "a", "continuation": "b"}')
    options = "--steps 2 --tokenizer data/tokenizer.json --eval-task task.jsonl --val-every 1"
    run(train_command(options, out=out, data="data"), cwd=began)
    resume(out, "--steps 4 --train-data near/train_*.bin", cwd=elsewhere)
    assert "--train-data" not in resume(out, "--steps 6", cwd=tmp_path).err  # the same files
    assert Run(out).last_step() == 5


def test_another_micro_batch_on_resume_keeps_the_tokens_of_a_step(tmp_path, data):
    odd = shutil.copytree(data, tmp_path / os.fsdecode(b'd\xffx #"]'))  # run.toml has to name it
    out = train("--global-batch 0 --steps 2 --checkpoint-every 2", out=tmp_path / "run", data=odd)
    resume(out, "--steps 3 --micro-batch 1")
    assert out.by_step("step", "tokens") == {0: 32, 1: 64, 2: 96}


def test_a_run_that_began_with_init_is_resumed_with_or_without_it(trained, tmp_path, data):
    out = Run(tmp_path / "run")
    begin = ["--train-data", data / "train_*.bin", "--seq-len 16 --micro-batch 2 --init"]
    resume(out, *begin, trained.folder, "--steps 2")
    resume(out, *begin, trained.folder, "--steps 4")
    resume(out, "--steps 6", cwd=tmp_path)
    assert out.last_step() == 5
    other = trained.checkpoint(15)
    refused(2, f"so the weights of --init {other} would not be read", PROGRAM, "--resume --output", out, *begin, other,
            "--steps 10")
