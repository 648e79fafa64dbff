"""test_tokenizers.py: which tokenizer a run has, that data of another one are refused, and special tokens in texts."""

import re
import shutil

import pytest
from harness import PROGRAM, Run, make_shards, make_text, refused, run

SHORT = "--steps 1 --warmup 0 --sample-every 0"
MODEL = "plan --layers 1 --heads 1 --channels 16 --seq-len 16 --train-data"


def copies(data, folder, names):
    for name in names:
        shutil.copytree(data, folder / name)
    return folder


@pytest.fixture
def other(tmp_path):
    """The folder of a data set with another tokenizer, of as many tokens."""
    return make_shards(tmp_path / "other", make_text(3000).replace("king", "fish"))


@pytest.mark.parametrize("pattern", ["*/train_*.bin", "{a,b}/train_*.bin", "[ab]/train_*.bin", "~/a/train_*.bin"])
def test_the_tokenizer_is_beside_the_files_that_match(pattern, data, tmp_path):
    home = copies(data, tmp_path / "home", ["a", "b"])
    pattern = pattern if pattern.startswith("~") else home / pattern
    result = run(PROGRAM, MODEL, [pattern], env={"HOME": home})
    assert re.search(r"tokenizer.*/home/a, 300 tokens", result.out), result


def test_the_same_tokenizer_may_be_in_other_files(data, tmp_path):
    folder = copies(data, tmp_path / "copies", ["a", "b"])
    (folder / "b/tokenizer.json").unlink()  # leaves vocab.json and merges.txt
    run(PROGRAM, MODEL, folder / "*/train_*.bin")


def test_data_of_different_tokenizers_are_refused(data, other, tmp_path):
    folder = copies(data, tmp_path / "both", ["a"])
    shutil.copytree(other, folder / "b")
    options = f"{SHORT} --layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --output"
    for given in (["--train-data", folder / "*/train_*.bin"],
                  ["--train-data", folder / "a/train_*.bin", "--val-data", folder / "b/val_*.bin"]):
        refused(65, f"{folder}/a and {folder}/b hold different tokenizers, of 300 and 300 tokens", PROGRAM, options,
                tmp_path / "run", *given)


def test_weights_are_trained_and_evaluated_on_data_of_their_tokenizer(trained, other, tmp_path):
    options = ["--init", trained.folder, "--val-data", other / "val_*.bin"]
    more = ["--train-data", other / "train_*.bin", f"{SHORT} --micro-batch 2 --global-batch 64", "--output",
            tmp_path / "run"]
    for command in (["eval", *options], [*options, *more]):
        refused(65, "hold different tokenizers", PROGRAM, *command)
        run(PROGRAM, *command, "--allow-other-tokenizer")


def test_a_tokenizer_that_may_not_be_that_of_the_weights_is_neither_used_nor_saved(trained, data, tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained.folder / trained.latest() / name, weights)
    more = make_shards(tmp_path / "more", make_text(3000), vocab=290)
    options = f"{SHORT} --micro-batch 2 --global-batch 64"
    out = Run(tmp_path / "run")
    said = run(PROGRAM, "--init", weights, "--train-data", more / "train_*.bin", options, "--output", out).err
    assert re.search("warning: the tokenizer .*more has 290 tokens, the weights .* have 300 and no tokenizer", said)
    assert not (out.checkpoint(1) / "tokenizer.json").exists()
    out = Run(tmp_path / "same")
    run(PROGRAM, "--init", weights, "--train-data", data / "train_*.bin", options, "--output", out)
    assert (out.checkpoint(1) / "tokenizer.json").exists()


def test_tokenize_counts_special_tokens_and_takes_them_as_tokens_on_request(data, tmp_path):
    (tmp_path / "text.txt").write_text("the king<|endoftext|>the queen<|endoftext|>")

    def tokenize(*options):
        out = tmp_path / f"out{len(options)}"
        result = run(PROGRAM, "tokenize", tmp_path / "text.txt", "--val-fraction 0 --tokenizer", data, "--output", out,
                     *options)
        shard = (out / "train_000001.bin").read_bytes()[1024:]
        return result.out, [int.from_bytes(shard[i:i + 2], "little") for i in range(0, len(shard), 2)]

    said, tokens = tokenize()
    assert "the special token <|endoftext|> occurs 2 times: taken as text" in said and tokens.count(299) == 1
    said, tokens = tokenize("--special-tokens")
    assert "occurs 2 times: taken as that token" in said and tokens.count(299) == 3


def test_tokenize_says_how_many_bad_lines_it_skipped(data, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "king", "n": ""}\n' * 98 + '{"text": ""}\n{"text": "half \\ud83d"}\n')
    command = [PROGRAM, "tokenize", tmp_path / "a.jsonl", "--tokenizer", data, "--output", tmp_path / "out"]
    refused(65, "followed by U+DC00..U+DFFF; --skip-bad-lines skips such lines", command)
    said = run(command, "--skip-bad-lines").out
    assert f"skipped 1 bad line; the first: {tmp_path}/a.jsonl:100: is not valid JSON" in said
    assert "\n98 documents, 392 B, " in said  # bytes of text: no syntax of JSON, and no row that is empty


def test_a_replaced_tokenizer_leaves_no_file(data, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "king"}\n' * 9)
    shutil.copytree(data, tmp_path / "more")
    (tmp_path / "more/added_tokens.json").write_text('{"<new>": 300}')
    (tmp_path / "more/tokenizer.json").unlink()
    (tmp_path / "more/additional_chat_templates").mkdir()
    (tmp_path / "more/additional_chat_templates/a.jinja").write_text("{{ messages }}")
    command = [PROGRAM, "tokenize", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer"]
    run(command, tmp_path / "more")
    assert {"added_tokens.json", "additional_chat_templates"} <= {path.name for path in (tmp_path / "out").iterdir()}
    run(command, data, "--replace")
    of_data = {path.name for path in data.iterdir() if path.suffix != ".bin"}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".bin"} == of_data


def test_the_validation_loss_does_not_depend_on_the_micro_batch(trained, data):
    def loss(batch):
        return float(re.search(r"loss ([0-9.]+)", run(
            PROGRAM, "eval --precision fp32 --val-tokens 100 --micro-batch", batch, "--init", trained.folder,
            "--val-data", data / "val_*.bin").out)[1])

    losses = [loss(batch) for batch in (1, 3, 4, 8)]
    assert max(losses) - min(losses) < 2e-6
