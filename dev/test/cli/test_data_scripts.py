"""test_data_scripts.py: the scripts of data/: messages for bad arguments and texts, before anything is fetched, and the
training command that text.sh prints."""

import os

import pytest
from harness import ROOT, execute, make_script, run

CORPORA = ["bible_austen", "tinyshakespeare", "tinystories"]
README = (ROOT / "README.md").read_text()


def fails(code, text, tree, *command):
    """Runs a script that must print this error before it fetches anything."""
    for name in ("curl", "apt-get", "make"):
        make_script(tree / "bin" / name, f"touch '{tree}/fetched'; exit 1")
    result = execute(*command, cwd=tree / "data", env={"PATH": f"{tree}/bin:{os.environ['PATH']}"})
    assert result.code == code and text in result.err, result
    assert not (tree / "fetched").exists()


@pytest.mark.parametrize("script, options, text", [
    *[(script, "--vocab-size 300", f"{script}.sh: unknown option --vocab-size") for script in CORPORA],
    *[(script, "--vocab 10", "--vocab 10 must be a number of tokens, 257") for script in CORPORA],
    ("tinystories", "foo", "tinystories.sh: unexpected argument foo"),
    ("tinystories", "--vocab", "--vocab needs a value"),
    ("fineweb10B", "104", "104: the number of training shards is 1 to 103"),
    ("text", "", "name a file or folder of text"),
])
def test_bad_arguments_are_refused_before_anything_is_fetched(script, options, text, tree):
    fails(2, text, tree, f"./{script}.sh", options)
    assert f"{script}.sh " in run(f"./{script}.sh --help", cwd=tree / "data").out


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


@pytest.mark.parametrize("text, options, message", [
    ("ten bytes\n", "", "10 bytes: the text is too short to train on; bring at least 10 kB"),
    ("hello world\n" * 1700, "", "text.sh: --vocab N sets the size of the vocabulary"),
    (README[:6000], "--vocab 1200", "to validate on: the text is too short to train on"),
], ids=["ten bytes", "uniform", "less than two steps"])
def test_text_sh_refuses_a_text_that_is_too_short(text, options, message, tree, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    fails(65, message, tree, "./text.sh", tmp_path / "text.txt", options)


def test_text_sh_makes_the_shards_of_a_changed_text_anew_but_never_replaces_those_of_another_text(tree, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.txt").write_text(folder.upper() + README)

    def text_sh(folder):
        return execute(tree / "data/text.sh", tmp_path / folder / "my.txt", "--vocab 300")

    shard = tree / "data/my/train_000001.bin"
    assert text_sh("a").code == 0
    first = shard.read_bytes()
    other = text_sh("b")
    assert other.code == 1 and "data/my has shards of another text; give another --out" in other.err
    assert shard.read_bytes() == first
    (tmp_path / "a/my.txt").write_text(README + "More.")
    assert text_sh("a").code == 0 and shard.read_bytes() != first
    (tree / "data/my/made_of").unlink()  # as if the shards were made by hand
    assert "has shards of another text" in text_sh("a").err


def test_text_sh_takes_an_existing_tokenizer(tree, tmp_path, data):
    (tmp_path / "my.txt").write_text(README)
    run(tree / "data/text.sh", "my.txt --tokenizer", data, cwd=tmp_path)
    assert (tree / "data/my/merges.txt").read_text() == (data / "merges.txt").read_text()
    both = execute(tree / "data/text.sh", "my.txt --vocab 300 --tokenizer", data, cwd=tmp_path)
    assert both.code == 2 and "--vocab trains a tokenizer and --tokenizer names one; give one" in both.err


@pytest.mark.parametrize("name, content, message", [
    ("tokens.bin", b"\0" * 3, "3 bytes are not a whole number of 2-byte tokens"),
    ("tokens.npy", b"\x93NUMPY\x01\x00\x04\x00{]}\n", "its header is damaged"),
    ("tokens.tok", b"BIN.TOK\n\x02", "its header is damaged"),
])
def test_to_shard_refuses_a_bad_input_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    result = execute("python3 data/to_shard.py", tmp_path / name, tmp_path / "shard.bin")
    assert result.code == 1 and result.out == "" and result.err.count("\n") == 1, result
    assert f"{name}: {message}" in result.err


def test_to_shard_writes_a_header_and_the_tokens(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"\1\0\2\0")
    run("python3 data/to_shard.py", tmp_path / "tokens.bin", tmp_path / "shard.bin")
    shard = (tmp_path / "shard.bin").read_bytes()
    assert len(shard) == 1028 and shard[1024:] == b"\1\0\2\0"
