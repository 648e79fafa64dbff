"""test_checkpoints.py: which checkpoints a run keeps, and the warnings about other data and another seed."""

import shutil

from harness import Run, run, train, train_command

RUN = "--precision fp32 --val-tokens 128 --val-every 2 --checkpoint-every 2"


def best_step(out):
    return min((loss, step) for step, loss in out.val_losses().items() if step > 0)[1]


def test_the_best_checkpoint_and_those_of_keep_every_are_kept_over_a_resume(tmp_path, data):
    rules = f"{RUN} --warmup 1 --keep 1 --keep-every 6 --keep-best"
    out = train(rules, "--steps 8", out=tmp_path / "run", data=data)
    best = best_step(out)
    assert (out / "best").read_text().strip() == out.checkpoint(best).name
    train(rules, "--steps 20 --lr 1 --resume", out=out, data=data)  # this learning rate ruins the weights
    assert best_step(out) == best
    assert (out / "best").read_text().strip() == out.checkpoint(best).name
    kept = [int(path.name.removeprefix("step_")) for path in sorted(out.folder.glob("step_*"))]
    assert kept == sorted({best, 6, 12, 18, 20})


def test_a_resume_with_other_data_or_another_seed_gives_one_warning(tmp_path, data):
    def warnings(*options):
        result = run(train_command(RUN, *options, "--resume", out=out, data=changed))
        return [line for line in result.err.splitlines() if "data differ" in line or "--seed" in line]

    changed, out = shutil.copytree(data, tmp_path / "data"), Run(tmp_path / "run")
    train(RUN, "--steps 2", out=out, data=changed)
    shutil.copy(data / "val_000000.bin", changed / "train_000001.bin")
    of_seed, of_data = warnings("--steps 4 --seed 7")
    assert of_data.startswith("warning: the train data differ from those of the checkpoint")
    assert of_seed.startswith("warning: changed since the checkpoint: ") and "--seed 7 (was 42)" in of_seed
    assert warnings("--steps 6 --seed 7") == []
    shutil.copy(data / "train_000001.bin", changed / "val_000000.bin")
    assert [line[:26] for line in warnings("--steps 8 --seed 7")] == ["warning: the val data diff"]
