"""test_checkpoints.py: which checkpoints a run keeps, and the warnings about other data and another seed,
and the model card."""

import re
import shutil

import pytest
from harness import ONE, Run, assert_same_run, ranks, run, train, train_command

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


@pytest.mark.parametrize("layout", ["", "--zero 1", "--tensor-parallel 2"])
def test_patience_ends_a_run_and_keeps_its_best_checkpoint_over_a_resume(layout, tmp_path, data):
    # The learning rate grows until it ruins the weights.
    options = f"--precision fp32 --val-tokens 128 --val-every 2 --steps 60 --warmup 60 --lr 0.3 --patience 3 {layout}"
    rules, by = f"--keep 1 --checkpoint-every {5 if layout else 1000}", ranks(2) if layout else ONE
    command = train_command(options, rules, "--quiet=0", out=tmp_path / "whole", data=data, by=by)
    said, whole = run(command, env=by.env), Run(tmp_path / "whole")
    best, last = best_step(whole), max(whole.val_losses())
    assert 2 < best < 40 and last == best + 6 == whole.last_step() + 1
    assert f"the run ends: no validation since step {best} has a loss below " in said.out
    assert (whole / "best").read_text().strip() == whole.checkpoint(best).name
    assert sorted(path.name for path in whole.folder.glob("step_*")) == [f"step_{best:06d}", f"step_{last:06d}"]
    for stop in (best - 2, best + 2, best + 3):
        out = train(options, rules, "--stop-after", stop, out=tmp_path / f"stopped{stop}", data=data, by=by)
        for _ in range(2):  # a run that has ended ends at once
            train(options, rules, "--resume", out=out, data=data, by=by)
            assert_same_run(whole, out, last)


def test_patience_begins_anew_where_it_was_off(tmp_path, data):
    options = f"{RUN} --keep 1 --steps 60 --warmup 60 --lr 0.3"
    out = train(options, "--patience 3 --stop-after 8", out=tmp_path / "run", data=data)
    train(options, "--patience 0 --stop-after 8 --resume", out=out, data=data)
    train(options, "--patience 2 --resume", out=out, data=data)
    best, last = (int(path.name.removeprefix("step_")) for path in sorted(out.folder.glob("step_*")))
    assert 16 <= best == last - 4 and (out / "best").read_text().strip() == out.checkpoint(best).name


# A resume validates its first step again, and --keep-best does not save that step again.
@pytest.mark.parametrize("rule, begin", [("--keep-best", 10), ("--patience 9", 8)])
def test_the_best_loss_is_sought_anew_on_other_validation_tokens(rule, begin, tmp_path, data):
    options = f"--precision fp32 --val-every 2 --checkpoint-every 2 --warmup 1 --keep 1 {rule}"
    out = train(options, "--steps 8 --val-tokens 16", out=tmp_path / "run", data=data)
    before = min(out.val_losses().values())
    ruin = "--lr 1"  # no later loss is below the first ones
    said = run(train_command(options, "--resume --steps 12 --val-tokens 128", ruin, out=out, data=data)).err
    assert "--val-tokens are not those of the checkpoint: the losses cannot be compared" in said
    loss, best = min((loss, step) for step, loss in out.val_losses().items() if step >= begin)
    assert loss > before and (out / "best").read_text().strip() == out.checkpoint(best).name
    more = run(train_command(options, "--resume --steps 14 --val-tokens 128", ruin, out=out, data=data)).err
    assert "cannot be compared" not in more


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


def test_the_model_card_tells_of_the_run_and_may_be_edited(tmp_path, data):
    out = train(RUN, "--steps 4", out=tmp_path / "run", data=data)
    card = (out.checkpoint(4) / "README.md").read_text()
    front, text = re.fullmatch("---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()
    assert {"library_name: transformers", "pipeline_tag: text-generation", "tags:", "- gpt2"} < set(front.splitlines())
    assert "# license: mit" in front  # the Hub refuses an empty licence, and shows none for a comment
    facts = dict(re.findall(r"^\* (.*?): (.*)$", text, re.MULTILINE))
    assert facts["trained on"] == "256 tokens in 4 steps" and facts["training data"] == f"{data}/train_*.bin"
    loss = out.val_losses()[4]
    bits = out.by_step("val", "bits_per_byte")[4]
    assert facts["validation loss"].startswith(f"{loss:.4f} nats per token, perplexity ")
    assert f", {bits:.4f} bits per byte, at step 4" in facts["validation loss"]
    assert f"--train-data '{data}/train_*.bin'" in text and 'pipeline("text-generation", ".")' in text
    (out.checkpoint(4) / "README.md").write_text(card.replace("# license: mit", "license: mit"))
    assert "damaged" not in run(train_command(RUN, "--steps 6 --resume", out=out, data=data)).err
    assert "256 tokens" in (out.checkpoint(4) / "README.md").read_text() and out.latest() == "step_000006"
