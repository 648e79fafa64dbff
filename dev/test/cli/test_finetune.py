"""test_finetune.py: scripts/finetune.sh, word for word on a tiny model in place of GPT-2."""

import hashlib
import re
import shlex
import shutil

import pytest
from harness import ROOT, Run, execute, make_script, on_path, run, train

WORSE = "-- --lr 3 --steps 200 --val-every 5"  # a rate that ruins the weights


@pytest.fixture
def finetune(tree, tmp_path, data):
    """finetune(OPTION...) runs the script on a folder of text, in a tree whose weights of GPT-2 are a tiny model's."""
    shutil.copytree(ROOT / "scripts", tree / "scripts")
    for stand_in in ("scripts/install.sh", "bin/make"):
        make_script(tree / stand_in, "")
    options = "--layers 1 --seq-len 256 --global-batch 512 --warmup 0 --steps 1 --val-every 0"
    model = train(options, out=tmp_path / "run", data=data)
    model.checkpoint(1).rename(tree / "tiny")
    shutil.copytree(ROOT / "docs", tmp_path / "my pages", ignore=shutil.ignore_patterns("*.png"))

    def begin(*options, by=execute, text="my pages", **env):
        return by(tree / "scripts/finetune.sh", [tmp_path / text], *options, cwd=tmp_path,
                  env=on_path(tree / "bin", HF_ENDPOINT=f"file://{tree}/hub", **env))

    begin.tree = tree
    begin.run = Run(tree / "out/finetune_my_pages")
    return begin


def test_a_folder_of_text_lowers_the_loss_of_the_weights_and_the_commands_that_come_next_work(finetune):
    said = finetune("--init tree/tiny --prompt 'the king'")
    assert said.code == 0 and said.out.count("\nthe king") == 2, said
    assert "has no checkpoint yet: a new run starts" in said.out and "warning: " not in said.err
    losses = finetune.run.val_losses()
    assert losses[max(losses)] < losses[0] and finetune.run.lines("run")[-1]["options"]["lr"] == 3e-5
    best = f"out/finetune_my_pages/{(finetune.run / 'best').read_text().strip()}"
    after = said.out[said.out.index("== what next"):]
    commands = [line.split("     ")[0] for line in after.splitlines() if line.startswith("  ./train_gpt2")]
    assert [shlex.split(command)[1:4] for command in commands] == [
        ["generate", "--init", best], ["eval", "--init", best], ["export", best, "finetune_my_pages.gguf"]]
    for command in commands[:2]:
        run(command, cwd=finetune.tree)
    again = finetune("--init tree/tiny --prompt 'the king'")
    assert again.code == 0 and "nothing to do: the run is at step " in again.out and finetune.run.val_losses() == losses


def test_the_loss_of_a_text_of_a_few_pages_is_evaluated_with_its_short_windows(finetune):
    (finetune.tree.parent / "blob").write_bytes((ROOT / "README.md").read_bytes()[:5000])
    (finetune.tree.parent / "few.md").symlink_to("blob")
    said = finetune("--init tree/tiny -- --steps 2", text="few.md")
    assert (finetune.tree / "data/finetune_few/made_of").read_text().startswith(f"{finetune.tree.parent}/few.md\n")
    run(re.search("^  (./train_gpt2 eval .*)", said.out, re.MULTILINE)[1], cwd=finetune.tree)


def test_it_ends_early_without_a_better_loss_and_shows_the_best_weights(finetune):
    said = finetune("--init tree/tiny", WORSE)
    steps = sorted(finetune.run.val_losses())
    assert said.code == 0 and "the run ends: " in said.out and steps[-1] < 200, said
    best = (finetune.run / "best").read_text().strip()
    assert int(best.removeprefix("step_")) == steps[-4]  # three validations before the last
    assert f"generate --init out/finetune_my_pages/{best} " in said.out
    (finetune.tree.parent / "my pages/more.md").write_text("One more page.")
    assert "it is renamed to out/finetune_my_pages." in finetune("--init tree/tiny", WORSE).out


def test_weights_are_fetched_or_the_files_to_fetch_by_hand_are_named(finetune):
    tree, hub = finetune.tree, finetune.tree / "hub/openai-community/gpt2-medium"
    missing = finetune("--init gpt2-medium")
    by_hand = f"By hand: download {hub.parent.as_uri()}/gpt2/resolve/main/vocab.json, store it as data/gpt2-medium/"
    assert missing.code == 1 and by_hand in missing.err, missing
    (hub / "raw/main").mkdir(parents=True)
    (tree / "data/gpt2-medium").mkdir(exist_ok=True)
    for name in ("vocab.json", "merges.txt"):  # GPT-2's are so long that they are there already
        shutil.copy(tree / "tiny" / name, tree / "data/gpt2-medium")
    shutil.copytree(tree / "tiny", hub / "resolve/main")
    weights = (tree / "tiny/model.safetensors").read_bytes()
    for size in (1, len(weights)):
        (hub / "raw/main/model.safetensors").write_text(
            f"version 1\noid sha256:{hashlib.sha256(weights).hexdigest()}\nsize {size}\n")
        said = finetune("--init gpt2-medium", WORSE)
        assert said.code == (0 if size > 1 else 1), said
    assert (tree / "data/gpt2-medium/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("code, text, arguments", [
    (2, "name a file or folder of text", ""),
    (2, "unknown option --lr; see --help. Options of train_gpt2 follow after --", "README.md --lr 1"),
    (2, "--init needs a value", "README.md --init"),
    (66, "no/such: there is no such file or folder", "no/such"),
    (66, "--init gpt3: there is no such folder; the names of weights to fetch are gpt2,", "README.md --init gpt3"),
])
def test_bad_arguments_are_refused(code, text, arguments):
    result = execute("scripts/finetune.sh", arguments)
    assert result.code == code and f"finetune.sh: {text}" in result.err and not result.out, result
    assert "OPTIONS are those of train_gpt2" in run("scripts/finetune.sh --help").out
