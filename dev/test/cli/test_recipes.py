"""test_recipes.py: the recipes scripts/run_gpt*: their plans, and how they start training again."""

import re
import shutil

import pytest
from harness import ROOT, execute, make_script, on_path, refused, run

RECIPES = sorted(path.name for path in (ROOT / "scripts").glob("run_gpt*"))


@pytest.mark.parametrize("script, env, ranks, tokens, parameters, seq_len", [
    ("run_gpt2_124M.sh", {}, 8, 524288, 124439808, 1024),
    ("run_gpt2_124M.sh", {"NP": 1}, 1, 524288, 124439808, 1024),
    ("run_gpt2_124M_fast.sh", {}, 8, 524288, 124439808, 1024),
    ("run_gpt2_350M.sh", {}, 8, 524288, 354823168, 1024),
    ("run_gpt2_774M.sh", {}, 8, 524288, 774030080, 1024),
    ("run_gpt2_1558M.sh", {}, 8, 1048576, 1557611200, 1024),
    ("run_gpt3_6.7B.sh", {}, 8, 2097152, 6658404352, 2048),
    ("run_gpt3_13B.sh", {}, 8, 2097152, 12853386240, 2048),
    ("run_gpt2_124M_torchrun.sh", {"NODES": "1:2"}, 16, 524288, 124439808, 1024),
    ("run_gpt2_124M.sbatch", {"NODES": "4"}, 32, 524288, 124439808, 1024),
])
def test_a_plan_has_the_published_batch_and_size(script, env, ranks, tokens, parameters, seq_len):
    plan = run(f"scripts/{script} --plan --measure off", env=env).out.replace(",", "")
    batch = re.search("^batch (.*)", plan, re.MULTILINE)[1]
    in_step, sequences, length, world_size, micro_steps = map(int, re.findall("[0-9]+", batch))
    assert (in_step, length, world_size) == (tokens, seq_len, ranks)
    assert in_step == sequences * length * world_size * micro_steps
    assert f" {parameters} parameters" in plan and "vocabulary 50257 " in plan
    warmup = 250 if "fast" in script else 179 if "gpt3" in script else 700
    assert f" {warmup} steps warmup" in plan


def test_the_fast_recipe_has_the_published_rate_and_steps():
    plan = run("scripts/run_gpt2_124M_fast.sh --plan --measure off").out
    assert re.search("^schedule +linear, lr 0.0018, 250 steps warmup, to 0 of it at step 12288;", plan, re.MULTILINE)


def test_options_of_a_recipe_are_those_of_the_program():
    recipe = "scripts/run_gpt2_124M.sh --plan --measure off"
    assert " 24 layers" in run(recipe, "--model d24").out
    refused(2, "did you mean --steps?", recipe, "--stesp 3")


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_without_data_says_how_to_get_some(script, tmp_path):
    refused(66, "data/fineweb10B.sh", f"scripts/{script}", env={"DATA": tmp_path})


@pytest.fixture
def recipe(tmp_path):
    """recipe(SCRIPT, CODES...) runs a recipe whose trainer ends with these exit codes. It returns the recipe's own code
    and how often the trainer was started. Stand-ins replace the trainer and the launchers."""
    for folder in ("data/fineweb10B", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/fineweb10B/fineweb_train_000001.bin").touch()
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    make_script(tmp_path / "train_gpt2cu", 'echo "$*" >>runs; exit "$(sed -n "$(wc -l <runs)p" codes)"')
    for name, text in {"mpirun": 'while [ "$1" != ./train_gpt2cu ]; do shift; done; "$@"', "srun": 'shift; "$@"',
                       "scontrol": 'echo "$*" >requeued', "sleep": ""}.items():
        make_script(tmp_path / "bin" / name, text)

    def start(script, *codes, **env):
        (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
        result = execute(f"scripts/{script} --seed 7", cwd=tmp_path, env=on_path(tmp_path / "bin", **env))
        runs = (tmp_path / "runs").read_text().splitlines()
        for line in runs:
            assert re.search(r"--train-data data/fineweb10B/\*train_\*.bin .* --resume --seed 7$", line)
        return result.code, len(runs)

    return start


@pytest.mark.parametrize("codes, code, starts", [
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
    (tmp_path / "requeued").touch()
    job = {"SLURM_JOB_ID": 5, "SLURM_JOB_NUM_NODES": 2, "SLURM_SUBMIT_DIR": tmp_path, "SLURM_RESTART_COUNT": restarts}
    assert recipe("run_gpt2_124M.sbatch", ended, **job) == (code, 1)
    assert (tmp_path / "requeued").read_text() == requeued
