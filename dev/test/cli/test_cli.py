"""test_cli.py: the commands train, generate, eval, plan and tokenize, end to end on a tiny model."""

import re

import pytest
from harness import PROGRAM, TINY, Run, close, execute, refused, run, train, train_command


def test_the_loss_falls(trained):
    losses = trained.val_losses()
    assert losses[30] < 0.8 * losses[0]


def test_generate_writes_the_same_text_for_the_same_seed_only(trained):
    def text(seed):
        return run(PROGRAM, "generate --prompt 'the king' --max-tokens 40 --init", trained.folder, "--seed", seed).out

    assert text(3) == text(3) != text(4)


def test_eval_gives_the_validation_loss_of_training(trained, data):
    result = run(PROGRAM, "eval --precision fp32 --micro-batch 2 --val-tokens 1280 --init", trained.folder,
                 "--val-data", data / "val_*.bin")
    assert close(float(re.search(r"loss ([0-9.]+)", result.out)[1]), trained.val_loss(), 1e-4)


def test_init_may_be_latest_or_best_of_a_run_or_a_file_of_weights(tmp_path, data):
    out = train("--steps 4 --val-every 2 --checkpoint-every 2 --keep-best", out=tmp_path / "run", data=data)
    texts = {run(PROGRAM, "generate --max-tokens 9 --init", out.folder / name).out
             for name in ("latest", "best", "step_000004", "step_000004/model.safetensors")}
    assert (out / "best").read_text().strip() == "step_000004" and len(texts) == 1


def test_resume_takes_the_run_of_a_checkpoint(tmp_path, data):
    out = train("--steps 4 --stop-after 2", out=tmp_path / "run", data=data)
    for slash in ("", "/", "//", "/."):
        said = run(PROGRAM, "--resume --quiet=0 --output", f"{out}/step_000002{slash}").out
        assert f"{out}/step_000002 is a checkpoint of a run, which continues from its newest one" in said
    run(PROGRAM, "--resume --steps 5 --output .", cwd=out / "step_000004")
    assert out.latest() == "step_000005"
    refused(66, f"step_000009: there is no such checkpoint; the newest is step_000005", PROGRAM,
            f"--resume --steps 9 --output {out}/step_000009")


def test_init_starts_from_the_weights_which_lr_0_leaves_as_they_are(trained, tmp_path, data):
    options = ["--init", trained.folder, "--seq-len 16 --micro-batch 2 --global-batch 64 --lr 0 --warmup 0 --quiet"]
    options += ["--val-data", data / "val_*.bin", "--precision fp32 --steps 3 --val-every 3 --output", tmp_path / "run"]
    run(PROGRAM, "--train-data", data / "train_*.bin", *options)
    assert Run(tmp_path / "run").val_losses() == {0: trained.val_loss(), 3: trained.val_loss()}


@pytest.mark.parametrize("options, text", [
    (TINY, r"per step, .* for 10 billion tokens: measured here with 2 x 16 tokens, .* tokens/s, .* % of the peak\n"),
    ("--model d48 -t 1024 --measure off --steps 7", "for 7 steps, estimated at 40 % of the peak: --measure is off\n"),
    ("--layers 96 --heads 96 --channels 12288 -t 2048 -b 1 -d 0",  # GPT-3: two layers take 70 GiB
     "estimated at 40 % of the peak: a step is too large to be measured here\n"),
    ("--layers 2 --heads 2 --channels 512 --micro-batch 1 --memory 40MB --measure off",
     r"\nmemory .* of .* available: .*; does not fit: .* are needed with .*; try a smaller model"),
    (f"{TINY} --steps 20 --checkpoint-every 2 --keep-every 8 --keep-best",
     r"\ndisk .* per checkpoint, 3 kept, and the best, and those of every 8 steps\n"),
])
def test_plan_says(options, text):
    assert re.search(text, run(PROGRAM, "plan", options).out)


@pytest.mark.parametrize("memory", ["32GiB", "13GB", "7GiB", "2GiB"])
def test_the_options_that_plan_says_fit_do_and_the_speed_only_falls(memory):
    rows = run(PROGRAM, "plan --fits --memory", memory).out.splitlines()[1:]
    for name, row in zip(["d12", "d24", "d36", "d48"], rows, strict=True):
        label, misfit, bytes_, speed, options = re.match(
            r"(\w+) +(does not fit; at least )?([\d.]+ [MG]iB), (\d+) % of the fastest tokens/s: (.*)", row).groups()
        plan = run(PROGRAM, "plan --measure off --memory", memory, options).out
        assert label == name and options.startswith(f"--model {name} --micro-batch ")
        assert f"\nmemory     {bytes_} of " in plan and ("; does not fit: " in plan) == bool(misfit)
        assert (int(speed) < 100) == ("--recompute layer" in options)


@pytest.mark.parametrize("options", [
    "--model d12 --memory 3GiB", "--model d48 -b auto --memory 5GB", "--model d48 --ranks 4 --zero 1 --memory 15GiB",
    "--model d36 --ranks 2 -b 4 --memory 2GiB", "-b auto --memory 300MB", "--fits --memory 200MiB",
    "--model d48 --fits --memory 4GiB", "--layers 20 --heads 4 --channels 1024 -b auto --memory 1GB --moments bf16"])
def test_a_run_that_does_not_fit_is_told_a_command_that_does(options):
    result = execute(PROGRAM, "plan --measure off", options)
    command = re.search(r"(?:does not fit: |are free; |\ninstead ).*try (.*)\n", result.out + result.err)[1]
    assert options in command and "does not fit" not in run(command).out


def test_the_cost_of_a_run_is_that_of_all_ranks_and_steps():
    plan = run(PROGRAM, "plan", TINY, "-b 1 --steps 4000 --ranks 4 --dollars-per-hour 900").out
    seconds = float(re.search("^time +([0-9.]+) s per step, .* for 4,000 steps: .*, on one rank alone", plan, re.M)[1])
    cost = re.search(r"^cost +\$([0-9,.]+) for 4,000 steps: 4 ranks at \$900 an hour$", plan, re.M)[1]
    assert close(float(cost.replace(",", "")), 4000 * seconds, 0.01)


def test_training_on_the_validation_data_gives_a_warning(data):
    shard = next(data.glob("train_*.bin"))
    result = run(train_command("--steps 2", ["--val-data", shard], out="", data=data))
    assert f"warning: {shard} is in both --train-data and --val-data" in result.err


def test_tokenize_with_the_tokenizer_of_a_checkpoint_makes_its_shards_again(trained, tmp_path, data):
    run(PROGRAM, "tokenize --quiet", data.with_suffix(".txt"), "--output", tmp_path / "shards", "--tokenizer",
        trained.checkpoint(30))
    for shard in data.glob("*.bin"):
        assert (tmp_path / "shards" / shard.name).read_bytes() == shard.read_bytes()
