"""test_data_scripts.py: the scripts of data/: messages for bad arguments and texts, before anything is fetched, and the
training command that text.sh prints."""

import os
import struct

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


def npy(kind, *tokens):
    """The bytes that numpy.save writes for an array of these whole numbers."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({len(tokens)},), }}\n".encode()
    values = b"".join(token.to_bytes(int(kind[2]), "little", signed=token < 0) for token in tokens)
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values


@pytest.mark.parametrize("name, content, message", [
    ("tokens.bin", b"\0" * 3, "3 bytes are not a whole number of 2-byte tokens"),
    ("tokens.npy", b"\x93NUMPY\x01\x00\x04\x00{]}\n", "its header is damaged"),
    ("tokens.tok", b"BIN.TOK\n\x02", "its header is damaged"),
    ("a.txt", "It is a café.\n".encode(), "is text, not tokens; tokenize it with train_gpt2 tokenize"),
    ("long.txt", "é".encode() * 3000 + b"\0", "is text, not tokens"),  # its 4096th byte is within a character
    ("tokens.npz", b"PK\3\4....", "is a zip archive"),
    ("signed.npy", npy("<i8", 5, -1), "has tokens -1 to 5, which are not all in a vocabulary of 65536"),
    ("large.npy", npy("<i8", 1, 1 << 32), "has tokens 1 to 4294967296, which are not all"),
    ("float.npy", npy("<f8", 0, 0), "is an array (2,) of <f8"),
])
def test_to_shard_refuses_a_bad_input_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    result = execute("python3 data/to_shard.py", tmp_path / name, tmp_path / "shard.bin")
    assert result.code == 1 and result.out == "" and result.err.count("\n") == 1, result
    assert f"{name}: {message}" in result.err


@pytest.mark.parametrize("content, options, header, tokens", [
    (b"\1\0\2\0", "", [20240520, 1, 2, 0], b"\1\0\2\0"),
    (npy("<i8", 1, 50256), "", [20240520, 1, 2, 0], b"\1\0\x50\xc4"),
    (npy("<u8", 1, 99999), "--vocab-size 100000", [20240520, 2, 2, 100000], b"\1\0\0\0\x9f\x86\1\0"),
    (npy("<i4", 1, 2), "", [20240520, 1, 2, 0], b"\1\0\2\0"),
], ids=["bare", "int64", "uint64", "int32"])
def test_to_shard_writes_a_header_and_the_tokens(content, options, header, tokens, tmp_path):
    (tmp_path / "tokens").write_bytes(content)
    run("python3 data/to_shard.py", tmp_path / "tokens", tmp_path / "shard.bin", options)
    shard = (tmp_path / "shard.bin").read_bytes()
    assert [*struct.unpack("<4i", shard[:16])] == header and shard[1024:] == tokens
