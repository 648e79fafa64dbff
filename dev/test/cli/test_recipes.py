"""test_recipes.py: the recipes scripts/run_gpt*: their plans, their comments, and how they start training again."""

import functools
import os
import re
import shutil
from pathlib import Path

import pytest
from harness import ROOT, execute, refused, run

RECIPES = sorted(path.name for path in (ROOT / "scripts").glob("run_gpt*"))


@functools.cache
def plan(script, **env):
    return run(f"scripts/{script} --plan", env=env).out.replace(",", "")


@pytest.mark.parametrize("script, env, ranks, tokens, parameters, seq_len", [
    ("run_gpt2_124M.sh", {}, 8, 524288, 124439808, 1024),
    *[("run_gpt2_124M.sh", {"NP": ranks}, ranks, 524288, 124439808, 1024) for ranks in (1, 2, 4)],
    ("run_gpt2_350M.sh", {}, 8, 524288, 354823168, 1024),
    ("run_gpt2_774M.sh", {}, 8, 524288, 774030080, 1024),
    ("run_gpt2_1558M.sh", {}, 8, 1048576, 1557611200, 1024),
    *[("run_gpt2_1558M.sh", {"NP": ranks}, ranks, 1048576, 1557611200, 1024) for ranks in (1, 2, 4)],
    ("run_gpt3_6.7B.sh", {}, 8, 2097152, 6658404352, 2048),
    ("run_gpt3_13B.sh", {}, 8, 2097152, 12853386240, 2048),
    ("run_gpt2_124M_torchrun.sh", {}, 8, 524288, 124439808, 1024),
    ("run_gpt2_124M_torchrun.sh", {"NODES": "2"}, 16, 524288, 124439808, 1024),
    ("run_gpt2_124M_torchrun.sh", {"NODES": "1:2"}, 16, 524288, 124439808, 1024),
    ("run_gpt2_124M.sbatch", {}, 16, 524288, 124439808, 1024),
    ("run_gpt2_124M.sbatch", {"NODES": "4"}, 32, 524288, 124439808, 1024),
])
def test_a_plan_has_the_published_batch_and_size(script, env, ranks, tokens, parameters, seq_len):
    batch = re.search("^batch (.*)", plan(script, **env), re.MULTILINE)[1]
    in_step, sequences, length, world_size, micro_steps = map(int, re.findall("[0-9]+", batch))
    assert (in_step, length, world_size) == (tokens, seq_len, ranks)
    assert in_step == sequences * length * world_size * micro_steps
    assert f" {parameters} parameters" in plan(script, **env) and "vocabulary 50257 " in plan(script, **env)


@pytest.mark.parametrize("script", [name for name in RECIPES if re.fullmatch(r"run_gpt\d_[0-9.]+[MB]\.sh", name)])
def test_the_comment_has_the_steps_and_the_flop_of_the_plan(script):
    lines = (ROOT / "scripts" / script).read_text().splitlines()
    text = " ".join(line.lstrip("# ") for line in lines if line.startswith("#")).replace(",", "")
    steps, tokens = map(int, re.search("([0-9]+) steps of ([0-9]+) tokens", text).groups())
    gflop = float(re.search("^work +([0-9.]+) GFLOP", plan(script), re.MULTILINE)[1])
    assert float(re.search("([0-9.]+) GFLOP per token", text)[1]) == pytest.approx(gflop, rel=0.01)
    assert float(re.search("in all ([0-9.e]+) FLOP", text)[1]) == pytest.approx(steps * tokens * gflop * 1e9, rel=0.01)


def test_options_of_a_recipe_are_those_of_the_program():
    recipe = "scripts/run_gpt2_124M.sh --plan"
    assert " 24 layers" in run(recipe, "--model d24").out
    refused(2, "did you mean --steps?", recipe, "--stesp 3")
    refused(2, "is not a multiple of", recipe, env={"NP": 3})


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_without_data_says_how_to_get_some(script, tmp_path):
    refused(66, "data/fineweb10B.sh", f"scripts/{script}", env={"DATA": tmp_path})


@pytest.fixture
def recipe(tmp_path):
    """recipe(SCRIPT, CODES...) runs a recipe whose trainer ends with these exit codes. It returns the recipe's own code
    and how often the trainer was started. Stand-ins replace the trainer and the launchers."""
    bin_ = tmp_path / "bin"
    (tmp_path / "data/fineweb10B").mkdir(parents=True)
    (tmp_path / "data/fineweb10B/fineweb_train_000001.bin").touch()
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    bin_.mkdir()
    for path, script in {
            tmp_path / "train_gpt2cu": 'echo "$*" >>runs; exit "$(sed -n "$(wc -l <runs)p" codes)"',
            bin_ / "mpirun": 'while [ "$1" != ./train_gpt2cu ]; do shift; done; "$@"',
            bin_ / "srun": 'shift; "$@"',
            bin_ / "scontrol": 'echo "$*" >requeued',
            bin_ / "sleep": ""}.items():
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def start(script, *codes, **env):
        (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
        env["PATH"] = f"{bin_}:{os.environ['PATH']}"
        result = execute(f"scripts/{script} --seed 7", cwd=tmp_path, env=env)
        runs = (tmp_path / "runs").read_text().splitlines()
        for line in runs:
            assert re.search(r"--train-data data/fineweb10B/\*train_\*.bin .* --resume --seed 7$", line)
        return result.code, len(runs)

    return start


@pytest.mark.parametrize("codes, code, starts", [
    ([0], 0, 1),
    ([137, 1, 0], 0, 3),  # failures
    ([1] * 8, 1, 6),
    ([2], 2, 1),  # bad options
    ([75], 75, 1),  # a request to stop
])
def test_a_recipe_starts_a_run_that_fails_again_at_most_five_times(codes, code, starts, recipe):
    assert recipe("run_gpt2_124M.sh", *codes) == (code, starts)


@pytest.mark.parametrize("ended, restarts, code, requeued", [
    (0, 0, 0, ""),
    (75, 0, 0, "requeue 5\n"),  # its time is up
    (1, 5, 1, ""),  # a sixth failure
])
def test_a_job_of_slurm_is_queued_again(ended, restarts, code, requeued, recipe, tmp_path):
    job = {"SLURM_JOB_ID": 5, "SLURM_JOB_NUM_NODES": 2, "SLURM_SUBMIT_DIR": tmp_path, "SLURM_RESTART_COUNT": restarts}
    assert recipe("run_gpt2_124M.sbatch", ended, **job) == (code, 1)
    queue = Path(tmp_path / "requeued")
    assert (queue.read_text() if queue.exists() else "") == requeued
