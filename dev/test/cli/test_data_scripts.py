"""test_data_scripts.py: the scripts of data/: messages for bad arguments and texts, before anything is fetched, and the
training command that text.sh prints."""

import os
import shutil

import pytest
from harness import PROGRAM, ROOT, execute, run

CORPORA = ["bible_austen", "tinyshakespeare", "tinystories"]


@pytest.fixture
def tree(tmp_path):
    """A folder with data/ and the program, where curl, apt-get and make fail and leave a file `fetched`."""
    shutil.copytree(ROOT / "data", tmp_path / "tree/data", ignore=shutil.ignore_patterns("*.bin", "*.txt"))
    (tmp_path / "tree/train_gpt2").symlink_to(PROGRAM)
    (tmp_path / "tree/bin").mkdir()
    for command in ("curl", "apt-get", "make"):
        (tmp_path / "tree/bin" / command).write_text(f"#!/bin/sh\ntouch '{tmp_path}/fetched'\nexit 1\n")
        (tmp_path / "tree/bin" / command).chmod(0o755)
    return tmp_path / "tree"


def fails(code, text, tree, *command):
    result = execute(*command, cwd=tree / "data", env={"PATH": f"{tree}/bin:{os.environ['PATH']}"})
    assert result.code == code and text in result.err, result
    assert not (tree.parent / "fetched").exists()


@pytest.mark.parametrize("script", [*CORPORA, "fineweb10B", "text"])
def test_bad_arguments_are_refused_before_anything_is_fetched(script, tree):
    command = f"./{script}.sh"
    assert f"{script}.sh " in run(command, "--help", cwd=tree / "data").out
    fails(2, f"{script}.sh: unknown option --vocab-size", tree, command, "--vocab-size 300")
    if script in CORPORA:
        fails(2, f"{script}.sh: unexpected argument foo", tree, command, "foo")
        fails(2, "--vocab needs a value", tree, command, "--vocab")
        fails(2, "--vocab 10 must be a number of tokens, 257", tree, command, "--vocab 10")
    elif script == "fineweb10B":
        fails(2, "104: the number of training shards is 1 to 103", tree, command, 104)
    else:
        fails(2, "name a file or folder of text", tree, command)
        fails(66, "nothing.txt: there is no such file", tree, command, "nothing.txt")


@pytest.mark.parametrize("kb", [6, 20])
def test_the_command_that_text_sh_prints_trains_in_any_folder(kb, tree, tmp_path):
    text, shards = tmp_path / "it's my text.txt", tmp_path / "with space/it's"
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    text.write_bytes(pages.encode()[:kb * 1000 - 10] + b"\n")
    printed = run(tree / "data/text.sh", text, "--out", shards, cwd=tmp_path).out
    command = "\n".join(line for line in printed.splitlines() if line.startswith("  "))
    short = "--steps 1 --warmup 0 --quiet --checkpoint-every 0 --val-every 1 --sample-every 0"
    run(["bash", "-c", f"{command} {short}"], cwd=tree)
    assert (tree / "out/it's/log.jsonl").exists()


README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("text, options, message", [
    ("ten bytes\n", "", "10 bytes: the text is too short to train on; bring at least 10 kB"),
    (README[:1500], "", "to validate on: the text is too short to train on; bring at least 10 kB"),
    ("hello world\n" * 1700, "", "text.sh: --vocab N sets the size of the vocabulary"),
    (README[:6000], "--vocab 1200", "to validate on: the text is too short to train on"),
], ids=["ten bytes", "a page", "uniform", "less than two steps"])
def test_text_sh_refuses_a_text_that_is_too_short(text, options, message, tree, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    fails(65, message, tree, "./text.sh", tmp_path / "text.txt", options)


@pytest.mark.parametrize("content, message", [
    (b"", "0 bytes of tokens are too few"),
    (b"\0" * 3, "3 bytes are not a whole number of 2-byte tokens"),
    (b"\x93NUMPY\x01", "its header is damaged"),
    (b"\x93NUMPY\x01\x00\x04\x00{]}\n", "its header is damaged"),
    (b"BIN.TOK\n\x02", "its header is damaged"),
    (None, "No such file"),
])
def test_to_shard_refuses_a_bad_input_in_one_line(content, message, tmp_path):
    suffix = {b"\x93N": "npy", b"BI": "tok"}.get((content or b"")[:2], "bin")
    tokens = tmp_path / f"tokens.{suffix}"
    if content is not None:
        tokens.write_bytes(content)
    result = execute("python3 data/to_shard.py", tokens, tmp_path / "shard.bin")
    assert result.code == 1 and result.out == "" and result.err.count("\n") == 1, result
    assert f"{tokens.name}: {message}" in result.err


def test_to_shard_writes_a_header_and_the_tokens(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"\1\0\2\0")
    run("python3 data/to_shard.py", tmp_path / "tokens.bin", tmp_path / "shard.bin")
    shard = (tmp_path / "shard.bin").read_bytes()
    assert len(shard) == 1028 and shard[1024:] == b"\1\0\2\0"
