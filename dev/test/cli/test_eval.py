"""test_eval.py: eval --task and --text, bits per byte, tasks during training, the table of CORE, and the scripts that
fetch tasks."""

import json
import math
import os
import random
import re
import struct
import zipfile

import pytest
from harness import PROGRAM, ROOT, Launch, execute, make_text, refused, run, train, train_command

WORDS = make_text(3000).split()
CHOICES = "choices.jsonl"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of each kind: 60 choices, 40 continuations, 30 schemas; lengths up to 30 tokens."""
    folder, rng = tmp_path_factory.mktemp("a,task"), random.Random(5)

    def words(most):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most)))

    rows = {CHOICES: [{"query": words(20), "choices": [words(6) for _ in range(4)], "gold": i % 4} for i in range(60)],
            "words.jsonl": [{"context": words(20), "continuation": rng.choice(WORDS)} for _ in range(40)],
            "schema.jsonl": [{"context_options": [words(4), words(4)], "continuation": words(6), "gold": i % 2}
                             for i in range(30)]}
    for name, task in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in task))
    return folder


def evaluate(model, *options):
    return run(PROGRAM, "eval --precision fp32 --init", model, *options)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.isa
def test_any_number_of_ranks_and_sequences_per_batch_prints_the_same_digits(trained, tasks, tmp_path):
    files = ",".join(str(tasks / name) for name in (CHOICES, "words.jsonl", "schema.jsonl"))

    rows = tmp_path / "rows.jsonl"
    rows.write_text("old")
    (tmp_path / "link").symlink_to("rows.jsonl")

    def both(options):
        return evaluate(trained, "--task", files, "--rows", tmp_path / "link", options).out, rows.read_bytes()

    table, of_rows = both("")
    assert re.search(r"^choices  60 rows, acc 0\.\d{4} \+- 0\.\d{4}, acc_mean .*, acc_norm .*, \d+ rows cut to", table)
    assert len(of_rows.splitlines()) == 130
    for options in ("--ranks 2", "--ranks 4 --micro-batch 2", "--micro-batch 1", "--ranks 2 --tensor-parallel 2"):
        other, other_rows = both(options)
        assert table == other
        if "tensor" not in options:  # sums over ranks round differently
            assert of_rows == other_rows


def test_tasks_and_texts_are_read_in_every_form(trained, tasks, tmp_path):
    rows = rows_of(tasks / CHOICES)
    want = evaluate(trained, "--task", tasks / CHOICES).out
    for row in rows:
        row["gold"] = str(row["gold"])
    (tmp_path / "choices.json").write_text(json.dumps(rows, indent=1))
    run("gzip -k", tmp_path / "choices.json")
    for name in ("choices.json", "choices.json.gz"):
        assert evaluate(trained, "--task", tmp_path / name).out == want
    texts = ["the old king", "saw a river"]
    (tmp_path / "a.csv").write_text("body\n" + "\n".join(texts))
    (tmp_path / "a").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    run("gzip -k", tmp_path / "a")
    (tmp_path / "b").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    want = evaluate(trained, "--text", tmp_path / "b").out.replace(f"{tmp_path}/b", "")
    assert want.endswith(" of 2 documents\n")
    for name in ("a.csv", "a", "a.gz"):
        out = evaluate(trained, "--text", tmp_path / name, "--text-key body").out
        assert out.replace(f"{tmp_path}/{name}", "") == want
    (tmp_path / "b.tar").write_bytes(b"a".ljust(257, b"\0") + b"ustar\0")
    said = refused(65, "a:1: has no text under the key \"no\"", PROGRAM, "eval --init", trained.folder, "--text-key no",
                   "--text", tmp_path / "a").err
    assert said.endswith("there is no such key; keys with text: body\n")  # no word of tokenize's --skip-bad-lines
    refused(65, "b.tar: is a tar archive, not text; unpack it with tar -xf", PROGRAM, "eval --init", trained.folder,
            "--text", tmp_path / "b.tar")
    (tmp_path / "empty.txt").touch()
    refused(65, "/empty.txt has no text", PROGRAM, "eval --init", trained.folder, "--text", tmp_path / "empty.txt")


def test_a_task_in_parquet_may_have_columns_that_are_no_text(trained, tasks, tmp_path):
    write = ("import json, pyarrow, sys; from pyarrow import parquet; rows = list(map(json.loads, open(sys.argv[1]))); "
             "table = pyarrow.Table.from_pylist([{**row, 'image': b'\\xff'} for row in rows]); "
             "parquet.write_table(table, sys.argv[2])")
    if execute("python3 -c 'import pyarrow'").code:
        pytest.skip("python3 has no pyarrow (pip install pyarrow)")
    for name in (CHOICES, "words.jsonl", "schema.jsonl"):
        run(["python3", "-c", write], tasks / name, tmp_path / name)
        table = evaluate(trained, "--task", tasks / name).out
        assert evaluate(trained, "--task", tmp_path / name).out == table


@pytest.mark.isa
def test_a_text_is_scored_like_the_same_text_as_a_row_and_counts_its_words_and_bytes(trained, tmp_path):
    text = "the old king saw a\n river \n"
    (tmp_path / "text").write_text(text)
    (tmp_path / "with_empty").write_text("".join(json.dumps({"text": part}) + "\n" for part in ("", text, "")))
    (tmp_path / "row").write_text(json.dumps({"context": "", "continuation": text, "delimiter": ""}))
    evaluate(trained, "--task", tmp_path / "row", "--rows", tmp_path / "rows")
    [row] = rows_of(tmp_path / "rows")
    loss, words = -row["logprobs"][0], len(re.split(r"\s+", text))
    for name, more in (("text", 0), ("with_empty", 2)):  # an empty document counts as a word
        out = evaluate(trained, "--text", tmp_path / name).out
        found = re.search(r": (\S+) bits per byte, word perplexity (\S+), loss (\S+) nats .*, over (\d+) tokens", out)
        assert row["tokens"] == [int(found[4])]
        values = loss / 27 / math.log(2), math.exp(loss / (words + more)), loss / row["tokens"][0]
        for printed, value in zip(found.groups(), values):
            assert abs(float(printed) / value - 1) < 1e-5


def test_a_text_that_is_not_utf_8_gives_one_warning(trained, data, tmp_path):
    (tmp_path / "text").write_bytes(b"the old caf\xe9\n")
    for command in (["tokenize --output", tmp_path / "out", "--tokenizer", data],
                    ["eval --ranks 2 --init", trained.folder, "--text"],
                    ["generate --max-tokens 2 --init", trained.folder, "--prompt-file"]):
        said = run(PROGRAM, *command, tmp_path / "text").err
        assert said.count(f"warning: {tmp_path}/text: is not UTF-8 text (byte 12), and its bytes are tokenized") == 1


def test_stride_gives_each_token_of_a_text_more_context(trained, tmp_path):
    (tmp_path / "text").write_text(make_text(600))
    losses = [float(re.search("loss ([0-9.]+)", evaluate(trained, "--text", tmp_path / "text", options).out)[1])
              for options in ("", "--stride 4", "--stride 16")]
    assert losses[0] == losses[2] != losses[1]  # 16 is the context: windows share nothing, as without the option


def test_validation_lines_have_bits_per_byte_by_the_tokenizer(trained, data):
    tokenizer = json.loads((data / "vocab.json").read_text())
    texts = {token: text for text, token in tokenizer.items()}
    [shard] = data.glob("val_*.bin")
    tokens = struct.unpack(f"<{shard.stat().st_size // 2 - 512}H", shard.read_bytes()[1024:])
    windows = min(80, (len(tokens) - 1) // 16)
    targets = [texts[token] for token in tokens[1:16 * windows + 1]]
    size = sum(len(text) for text in targets if text != "<|endoftext|>")  # a character stands for a byte
    for line in trained.lines("val"):
        bits = line["val_loss"] * len(targets) / size / math.log(2)
        assert abs(line["bits_per_byte"] / bits - 1) < 1e-6


def test_training_evaluates_tasks_as_eval_does(tasks, tmp_path, data):
    options = f"--precision fp32 --steps 6 --val-every 2 --checkpoint-every 4 --eval-every 4 " \
              f"--eval-task {tasks / CHOICES},{tasks / 'words.jsonl'}"
    out = train(options, out=tmp_path / "run", data=data)
    assert [(line["step"], line["task"]) for line in out.lines("eval")] == \
        [(step, task) for step in (0, 4, 6) for task in ("choices", "words")]
    for line in out.lines("eval")[2:]:
        table = evaluate(out.checkpoint(line["step"]), "--task", tasks / f"{line['task']}.jsonl").out
        for name in ("rows", "acc", "acc_mean", "acc_norm", "perplexity"):
            if name in line:
                found = re.search(rf"(?:{name} ([0-9.]+)| (\d+) {name})", table)
                assert abs(float(found[1] or found[2]) - line[name]) < 1e-4
    assert list(out.lines("eval")[0]) == ["kind", "step", "task", "rows", "acc", "acc_stderr", "acc_mean", "acc_norm"]
    assert list(out.lines("eval")[1]) == ["kind", "step", "task", "rows", "acc", "acc_stderr", "perplexity"]
    three = train(options, "--zero 3 --global-batch 96", out=tmp_path / "3", data=data, by=Launch(options="--ranks 3"))
    assert three.lines("eval")[:2] == out.lines("eval")[:2] and len(three.lines("eval")) == 6


def test_bad_rows_and_files_are_refused_before_the_model_is_loaded(trained, tasks, tmp_path, data):
    (tmp_path / "bad.jsonl").write_text((tasks / CHOICES).read_text() + '{"query": "q", "choices": ["a", "b"]}\n')
    task = [PROGRAM, "eval", "--init", trained, "--task"]
    refused(65, f"{tmp_path}/bad.jsonl:61: \"gold\" is missing, and must be", task, tmp_path / "bad.jsonl", "--rows",
            tmp_path / "rows")
    assert not (tmp_path / "rows").exists()
    refused(66, "none.jsonl", task, f"{tasks / CHOICES},{tmp_path}/none.jsonl")
    os.mkfifo(tmp_path / "pipe")
    refused(73, f"--rows {tmp_path}/pipe is no regular file", task, tasks / CHOICES, "--rows", tmp_path / "pipe")
    (tmp_path / "link").symlink_to("none")
    refused(73, f"--rows {tmp_path}/link is no regular file", task, tasks / CHOICES, "--rows", tmp_path / "link")
    command = f"{PROGRAM} eval --init {trained.folder} --task {tasks / CHOICES} --rows /dev/stdout >{tmp_path}/out"
    refused(73, "--rows /dev/stdout is no regular file, or stdout", ["bash", "-c", command])
    refused(2, "is a file of --task", task, f"{tasks}/words.jsonl,{tasks / CHOICES}", "--rows", tasks / CHOICES)
    text = "--eval-task is evaluated after a validation: give --val-data, and an --eval-every that is a multiple of " \
           "--val-every "
    for options in ("--val-every 4 --eval-every 6", "--val-every 0"):
        refused(2, text, train_command("--eval-task", tasks / CHOICES, options, out="", data=data))


# ---- scripts


def test_core_py_renders_the_examples_that_nanochat_draws_and_prints_the_table(trained, tasks, tmp_path):
    pytest.importorskip("yaml")
    bundle = tmp_path / "core/eval_bundle"
    (bundle / "eval_data").mkdir(parents=True)
    config = [("mc", CHOICES, 3, "multiple_choice", "\nAnswer: "), ("lm", "words.jsonl", 0, "language_modeling", " ")]
    (bundle / "core.yaml").write_text("icl_tasks:\n" + "".join(
        f"-\n  label: {label}\n  dataset_uri: {file}\n  num_fewshot: [{shots}]\n  icl_task_type: {kind}\n"
        f"  continuation_delimiter: {json.dumps(delimiter)}\n" for label, file, shots, kind, delimiter in config))
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nmc,25\nlm,0\n")
    for name in (CHOICES, "words.jsonl"):
        (bundle / "eval_data" / name).write_bytes((tasks / name).read_bytes())
    (tmp_path / "program").write_text(f'#!/bin/sh\nfor a; do case $a in */mc.jsonl,*) cp "${{a%%,*}}" {tmp_path}/mc;; '
                                      f'esac; done\nexec {PROGRAM} "$@"\n')
    (tmp_path / "program").chmod(0o755)
    out = run(ROOT / "scripts/core.py", trained.folder, "--precision fp32",
              env={"DATA": tmp_path, "PROGRAM": tmp_path / "program"}).out
    missing = execute(ROOT / "scripts/core.py", trained.folder, env={"DATA": tmp_path, "PROGRAM": "none"})
    assert missing.err == "core.py: none: No such file or directory; run make, or name the program with PROGRAM=...\n"
    lines = re.findall(r"^(mc|lm) +\d+ +(\S+) +(\S+)$", out, re.M)
    found = {name: (float(accuracy), float(centered)) for name, accuracy, centered in lines}
    assert found["lm"][0] == found["lm"][1] and abs(found["mc"][1] - (found["mc"][0] - 0.25) / 0.75) < 1e-4
    core = float(re.search(r"^CORE +(\S+) +0\.1139 +0\.1849 +0\.2146 +0\.2565 ", out, re.M)[1])
    assert abs(core - (found["mc"][1] + found["lm"][1]) / 2) < 1e-4

    rows = rows_of(tasks / CHOICES)
    random.Random(1337).shuffle(rows)
    drawn = random.Random(1234 + 7).sample([i for i in range(60) if i != 7], 3)
    examples = "".join(f"{rows[i]['query']}\nAnswer: {rows[i]['choices'][rows[i]['gold']]}\n\n" for i in drawn)
    assert rows_of(tmp_path / "mc")[7] == {"query": f"{examples}{rows[7]['query']}\nAnswer: ", "delimiter": "",
                                           "choices": rows[7]["choices"], "gold": rows[7]["gold"]}


def test_tasks_are_fetched_and_checked(tree, tmp_path):
    bundle, core = tmp_path / "bundle.zip", tree / "data/core/eval_bundle"

    def script(name, **urls):
        return execute(tree / f"data/{name}.sh", env={**urls, "no_proxy": "*"})

    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("eval_bundle/core.yaml", "icl_tasks: []" * 100)
    whole = bundle.read_bytes()
    bundle.write_bytes(whole.replace(b"icl_tasks", b"ICL_tasks", 3))
    damaged = script("core", CORE_URL=bundle.as_uri())
    assert damaged.code == 1 and "eval_bundle.zip was damaged and was removed; run this again" in damaged.err
    assert not core.exists()
    bundle.write_bytes(whole)
    assert "scripts/core.py out/my" in script("core", CORE_URL=bundle.as_uri()).out
    assert (core / "core.yaml").exists() and os.listdir(tree / "data/core") == ["eval_bundle"]
    (tmp_path / "rows").write_text("{}")
    wrong = script("hellaswag", HELLASWAG_URL=(tmp_path / "rows").as_uri())
    assert wrong.code == 1 and "instead of 0aa3b888" in wrong.err
    for name, variable in (("core", "CORE_URL"), ("hellaswag", "HELLASWAG_URL")):
        (core / "core.yaml").unlink(missing_ok=True)
        missing = script(name, **{variable: "http://127.0.0.1:1/x"})
        assert missing.code == 1 and "By hand: download http://127.0.0.1:1/x, store it as data/" in missing.err
