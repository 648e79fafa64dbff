"""test_tokenize_inputs.py: texts as people have them: packed, as Parquet, in folders with links. The unpacked text
decides the shards; a file that cannot be read whole ends `tokenize`."""

import csv
import io
import json
import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from harness import PROGRAM, ROOT, execute, make_script, make_text, refused, run

PACK = {"gz": "gzip -k", "zst": "zstd -qk", "xz": "xz -k0", "lzma": "xz -k0 --format=lzma", "bz2": "bzip2 -k"}
PARQUET = ("import json, pyarrow, sys; from pyarrow import parquet; texts = json.load(open(sys.argv[1])); "
           "parquet.write_table(pyarrow.table({'n': range(len(texts)), sys.argv[3]: texts}), sys.argv[2], "
           "row_group_size=5, write_page_checksum=True)")


def pack(path, kind):
    """Packs a file; returns the packed one beside it."""
    if not shutil.which(PACK[kind].split()[0]):
        pytest.skip(f"there is no {PACK[kind].split()[0]}")
    run(PACK[kind], path)
    return path.with_name(f"{path.name}.{kind}")


def parquet(path, texts, key="text"):
    """Writes a text in each row."""
    if execute("python3 -c 'import pyarrow'").code:
        pytest.skip("python3 has no pyarrow (pip install pyarrow)")
    path.with_suffix(".json").write_text(json.dumps(texts))
    run(["python3", "-c", PARQUET], path.with_suffix(".json"), path, [key])
    return path


def tokenize(out, *parts, by=run, **keywords):
    return by(PROGRAM, "tokenize", *parts, "--output", out, "--quiet", **keywords)


def shards(out, *parts):
    """Tokenizes; returns {name: bytes} of shards and tokenizer."""
    tokenize(out, *parts)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def texts():
    """60 documents of 100 bytes to 300 kB; the ends of the long ones are held out."""
    choose, text = random.Random(1), "é 😀 \\ \" " + make_text(200000)
    lengths = [100, 1000, 30000, 300000]
    return [text[choose.randrange(100000):][:choose.choice(lengths)].strip() + "." for _ in range(60)]


@pytest.mark.parametrize("kind", [*PACK, "parquet"])
@pytest.mark.parametrize("many", [True, False], ids=["many documents", "one document"])
def test_a_text_gives_the_same_shards_and_vocabulary_however_it_is_packed(many, kind, tmp_path):
    documents = texts() if many else [make_text(60000)]
    plain = tmp_path / "a.txt"
    plain.write_text("\n<|endoftext|>".join(documents))
    options = f"--train-bpe 290 --val-fraction 0.1 --text-key 'a\nbody' --split {'end-of-text' if many else 'none'}"
    want = shards(tmp_path / "plain", plain, options)
    packed = parquet(tmp_path / "a.parquet", documents, "a\nbody") if kind == "parquet" else pack(plain, kind)
    assert len(want["val_000000.bin"]) > 5000 and shards(tmp_path / "packed", packed, options) == want


def forms(documents):
    """{name: bytes} of the same documents: as JSON and CSV under names that say it, or not, or in other letters."""
    rows = [{"id": i, "text": text, "score": float("nan")} for i, text in enumerate(documents)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    tables = {}
    for kind, delimiter in (("csv", ","), ("tsv", "\t")):
        writer = csv.writer(table := io.StringIO(), delimiter=delimiter)
        writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
        tables[kind] = table.getvalue()
    named = {"a.jsonl": lines, "b.JSONL": lines.replace("\n", "\r\n"), "c.jsonlines": "\ufeff" + lines, "d.json": lines,
             "e": lines, "f.dat": lines.strip(), "g.Json": json.dumps(rows), "h.jsonl": json.dumps(rows, indent=2),
             "i": json.dumps(rows), "j": "\n".join(json.dumps(row, indent=1, ensure_ascii=False) for row in rows),
             "k.CSV": tables["csv"], "l.csv": "\ufeff" + tables["csv"], "m.tsv": tables["tsv"],
             "n.txt": "<|endoftext|>\n".join(documents)}
    return {name: text.encode() for name, text in named.items()}


def test_a_corpus_gives_the_same_shards_in_every_form(tmp_path, data):
    documents = [f'{text[:2000].strip()} "x",\t\n\r\n{i}.' for i, text in enumerate(texts())]
    options = ["--split", "end-of-text", "--val-fraction", "0.1", "--tokenizer", data]
    want = None
    for name, content in forms(documents).items():
        plain, other, wrong = tmp_path / name, tmp_path / f"{name}.of", tmp_path / f"{name}.XZ"
        for path in (plain, other, wrong):
            path.write_bytes(content)
        want = want or shards(tmp_path / "first", plain, options)
        packed = [pack(plain, kind) for kind in ("gz", "bz2")]
        shutil.copy(packed[0], other)  # its name does not say what it is
        # Only JSON tells what it is without a name, and a packed name that is none is no hint either.
        inputs = [plain, wrong, *packed, *([other] if name[0] in "abcdefghij" else [])]
        for path in inputs:
            assert shards(tmp_path / f"{path.name}.out", path, options) == want, path
    for command in ('cat "$0" | "$@" -', 'cat "$0" | "$@" /dev/stdin', '"$@" - <"$0"', '"$@" <(gzip -c "$0")'):
        piped = ["bash", "-c", command, tmp_path / "j", PROGRAM, "tokenize", *options,
                 "--output", tmp_path / "pipe", "--quiet", "--replace"]
        run(piped, env={"TMPDIR": str(tmp_path)})
        assert {path.name: path.read_bytes() for path in (tmp_path / "pipe").iterdir()} == want, command


def test_a_folder_of_c4_or_dolma_is_read_as_it_is(tmp_path, data):
    folder = tmp_path / "c4"
    folder.mkdir()
    for i, text in enumerate(texts()[:4]):
        (folder / f"c4-train.0000{i}-of-01024.json").write_text(json.dumps({"text": text, "url": "x"}) + "\n")
        pack(folder / f"c4-train.0000{i}-of-01024.json", "gz")
        (folder / f"c4-train.0000{i}-of-01024.json").unlink()
    (folder / "metadata.json").write_text('{\n "language": "en"\n}\n')
    said = run(PROGRAM, "tokenize", folder, "--output", tmp_path / "out", "--tokenizer", data)
    assert said.out.count("4 documents, ") == 1
    assert said.err == f'left out: 1 file without text under "text" (--text-key): {folder}/metadata.json\n'


def test_a_binary_column_of_parquet_is_utf_8_or_is_refused(tmp_path, data):
    want = shards(tmp_path / "text", parquet(tmp_path / "a.parquet", ["é", "b"]), "--val-fraction 0 --tokenizer", data)
    convert = ("import pyarrow, sys; from pyarrow import parquet; t = parquet.read_table(sys.argv[1])['text']; "
               "t = pyarrow.table({'text': [x.encode(sys.argv[3]) for x in t.to_pylist()]}); "
               "parquet.write_table(t, sys.argv[2])")
    for encoding in ("utf-8", "latin-1"):
        run(["python3", "-c", convert, tmp_path / "a.parquet", tmp_path / f"{encoding}.parquet", encoding])
    assert shards(tmp_path / "utf-8", tmp_path / "utf-8.parquet", "--val-fraction 0 --tokenizer", data) == want
    tokenize(tmp_path / "no", tmp_path / "latin-1.parquet", "--tokenizer", data, by=lambda *command: refused(
        65, "a column is binary, and a value of it is not UTF-8 text: ", *command))


@pytest.mark.parametrize("options", ["--val-fraction 0", "--val-fraction 0.1", "--split blank-lines"])
@pytest.mark.parametrize("kind, message", [
    ("gz", "gzip cannot read all of it: gzip: stdin: unexpected end of file"), ("zst", "zstd cannot read all of it: "),
    ("xz", "xz cannot read all of it: xz: (stdin): Unexpected end of input"),
    ("bz2", "bzip2 cannot read all of it: bzip2: Compressed file ends unexpectedly")])
def test_a_file_that_is_cut_off_ends_tokenize_and_leaves_no_shard(kind, message, options, tmp_path, data):
    (tmp_path / "a.txt").write_text("".join(f"{random.Random(i).random()}\n" for i in range(70000)))
    packed = pack(tmp_path / "a.txt", kind)
    os.truncate(packed, packed.stat().st_size - 1000)
    tokenize(tmp_path / "out", packed, options, "--tokenizer", data, by=lambda *command: refused(
        65, f"a.txt.{kind}: {message}", *command))
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_a_file_whose_size_is_said_to_be_0_is_read(tmp_path, data):
    (tmp_path / "version").write_bytes(Path("/proc/version").read_bytes())
    options = ["--val-fraction", "0", "--tokenizer", data]
    assert shards(tmp_path / "proc", "/proc/version", options) == \
        shards(tmp_path / "plain", tmp_path / "version", options)


def test_what_is_missing_or_wrong_is_named(tmp_path, data):
    def fails(code, text, name, **env):
        tokenize(tmp_path / "out", tmp_path / name, "--tokenizer", data, by=lambda *command: refused(
            code, text, *command, env=env))

    (tmp_path / "no").mkdir()
    (tmp_path / "a").write_text("the king")
    for kind, program, package in (("gz", "gzip", "gzip"), ("zst", "zstd", "zstd"), ("xz", "xz", "xz-utils")):
        name = pack(tmp_path / "a", kind).name
        fails(66, f"{name}: {program}, which unpacks it, cannot be started: apt-get install {package}", name,
              PATH=tmp_path / "no")
    (tmp_path / "a.parquet").write_text("PAR1\x15")
    (tmp_path / "no/pyarrow.py").write_text("raise ImportError('none here')")
    fails(66, "a.parquet: pyarrow is needed for .parquet files: pip install pyarrow (none here)", "a.parquet",
          PYTHONPATH=tmp_path / "no")
    parquet(tmp_path / "b.parquet", ["one", None, "three"])
    (tmp_path / "a.txt").write_bytes((tmp_path / "a.parquet").read_bytes())
    fails(65, "a.txt: ", "a.txt")
    fails(65, "b.parquet:2: has no text under the key \"text\" (--text-key): its type is null; --skip", "b.parquet")
    parquet(tmp_path / "c.parquet", ["one"], "body" * 200)
    fails(65, "c.parquet: there is no column \"text\" (--text-key); columns: n, body", "c.parquet")
    os.truncate(tmp_path / "c.parquet", 300)
    fails(65, "c.parquet: Parquet magic bytes not found", "c.parquet")


def test_a_parquet_file_with_a_wrong_checksum_is_refused(tmp_path, data):
    path = parquet(tmp_path / "a.parquet", ["a long text without any repetition " + "".join(map(chr, range(97, 123)))])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"xyz", b"xYz"))
    assert path.read_bytes() != content
    tokenize(tmp_path / "out", path, "--tokenizer", data,
             by=lambda *command: refused(65, "CRC checksum verification failed", *command))


def test_the_program_that_unpacks_ends_when_tokenize_ends_early(tmp_path, data):
    make_script(tmp_path / "gzip", f"echo $$ >'{tmp_path}/pid'; while echo 'not JSON'; do :; done; >'{tmp_path}/on'")
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b packed")
    tokenize(tmp_path / "out", tmp_path / "a.jsonl.gz", "--tokenizer", data, by=lambda *command: refused(
        65, "a.jsonl.gz:1: is not valid JSON", *command, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}") and not (tmp_path / "on").exists()


def test_a_text_that_changes_before_it_is_read_is_refused(tmp_path, data):
    text, packed = tmp_path / "a.txt", tmp_path / "b.txt"
    text.write_text("the king went\n")
    packed.write_text("the queen\n")
    make_script(tmp_path / "gzip", f"echo more >'{text}'; exec {shutil.which('gzip')} \"$@\"")
    tokenize(tmp_path / "out", text, pack(packed, "gz"), "--tokenizer", data, by=lambda *command: refused(
        65, "a.txt: changed since the start: it had 14 bytes, and now has 5; start again", *command,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}))


def test_many_packed_files_need_few_descriptors(tmp_path, data):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.txt").write_text("the king\n")
    pack(folder / "0.txt", "gz")
    for i in range(1, 60):
        shutil.copy(folder / "0.txt.gz", folder / f"{i}.txt.gz")
    command = [PROGRAM, "tokenize", folder, "--output", tmp_path / "out", "--val-fraction", 0, "--tokenizer", data]
    assert "61 documents" in run(["bash", "-c", 'ulimit -n 20; exec "$@"', "-"], command).out


def test_a_large_packed_text_takes_little_memory_and_its_progress_is_that_of_the_file(tmp_path, data, start):
    """A text of 200 MB; its shards do not count, because they are written as they are made."""
    if not shutil.which("zstd"):
        pytest.skip("there is no zstd")
    with open(tmp_path / "a.txt.zst", "wb") as out:
        pipe = subprocess.Popen(["zstd", "-q"], stdin=subprocess.PIPE, stdout=out)
        text = make_text(200000).encode()
        for _ in range(200_000_000 // len(text)):
            pipe.stdin.write(text)
        pipe.stdin.close()
        assert pipe.wait() == 0
    # The first line of progress comes after a second. A fast machine would have read all by then.
    (tmp_path / "bin").mkdir()
    make_script(tmp_path / "bin/zstd", f'sleep 1.1; exec {shutil.which("zstd")} "$@"')
    process = start(PROGRAM, "tokenize", tmp_path / "a.txt.zst", "--output", tmp_path / "out", "--tokenizer", data,
                    env={"OMP_NUM_THREADS": 32, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    kib = []  # not ru_maxrss, in which pytest's own memory counts until the exec
    while process.lives():
        kib += re.findall(r"^VmHWM:\s+([0-9]+) kB", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        time.sleep(0.02)
    assert process.wait() == 0 and kib and int(kib[-1]) < 150 * 1024, (process.output, kib[-1:])
    megabytes = (tmp_path / "a.txt.zst").stat().st_size / 1e6
    seen = re.findall("^(?:unpacking|encoding) [|] ([0-9.]+) of ([0-9.]+) MB ", process.output, re.MULTILINE)
    assert seen and all(0 < float(done) <= float(whole) == round(megabytes, 1) for done, whole in seen)


def test_links_are_followed_to_each_folder_once_and_other_files_are_named(tmp_path, data):
    folder, beside = tmp_path / "in", tmp_path / "beside"
    for path in (folder / "b", beside / "deep", folder / ".hidden"):
        path.mkdir(parents=True)
    for name, text in (("in/a.txt", "one "), ("in/b/c.md", "two "), ("beside/d.txt", "three "),
                       ("beside/deep/e.txt", "four "), ("in/.hidden/f.txt", "no "), ("in/x.bin", ""), ("in/y.pdf", ""),
                       ("in/b/z.png", "")):
        (tmp_path / name).write_text(text)
    for name, target in (("in/0", "b"), ("in/up", ".."), ("in/b/loop", "../b"), ("in/v", "../beside"),
                         ("in/w", "../beside"), ("beside/deep/back", "../../in"), ("in/none.txt", "nowhere")):
        (tmp_path / name).symlink_to(target)
    options = ["--val-fraction", "0", "--tokenizer", data]
    said = run(PROGRAM, "tokenize", folder, "--output", tmp_path / "out", options)
    assert "\n4 documents, " in said.out
    assert said.err == (f"left out: 4 files of other kinds: {folder}/b/z.png, {folder}/none.txt, {folder}/x.bin "
                        "...\n")
    named = [folder / "a.txt", folder / "b/c.md", beside / "d.txt", beside / "deep/e.txt"]
    assert (shards(tmp_path / "named", named, options)["train_000001.bin"] ==
            (tmp_path / "out/train_000001.bin").read_bytes())


def test_an_installed_program_finds_the_reader_of_parquet(tmp_path, data):
    path = parquet(tmp_path / "a.parquet", ["one", "two"])
    (tmp_path / "bin").mkdir()
    shutil.copy(PROGRAM, tmp_path / "bin")
    command = [tmp_path / "bin/train_gpt2", "tokenize", path, "--tokenizer", data, "--output", tmp_path / "out"]
    refused(66, "table_rows.py, which reads .parquet, .csv and .tsv files, is neither in the sources nor", command)
    (tmp_path / "share/train_gpt2").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/table_rows.py", tmp_path / "share/train_gpt2")
    run(command)


def test_the_vocabulary_is_learned_from_the_training_text_alone(tmp_path):
    merges = []
    for name, end in (("a", "z" * 1000), ("b", "x" * 1000)):
        (tmp_path / name).write_text(make_text(6000) + end)
        merges.append(shards(tmp_path / f"{name}.out", tmp_path / name, "--train-bpe 300")["merges.txt"])
    assert merges[0] == merges[1]
