"""test_data_scripts.py: the scripts of data/: messages for bad arguments and texts, before anything is fetched,
downloads from a server on this machine, and the training command that text.sh prints."""

import bz2
import gzip
import hashlib
import http.server
import io
import json
import lzma
import pickle
import random
import re
import shutil
import struct
import tarfile
import threading

import pytest
from harness import PROGRAM, ROOT, execute, make_script, make_shards, make_text, on_path, run

CORPORA = ["bible_austen", "linux", "tinyshakespeare", "tinystories", "climbmix"]
README = (ROOT / "README.md").read_text()


def fails(code, text, tree, *command):
    """Runs a script that must print this error before it fetches anything."""
    for name in ("curl", "apt-get", "make"):
        make_script(tree / "bin" / name, f"touch '{tree}/fetched'; exit 1")
    result = execute(*command, cwd=tree / "data", env=on_path(tree / "bin"))
    assert result.code == code and text in result.err, result
    assert not (tree / "fetched").exists()


@pytest.mark.parametrize("script, options, text", [
    *[(script, "--vocab-size 300", f"{script}.sh: unknown option --vocab-size") for script in CORPORA],
    *[(script, "--vocab 10", "--vocab 10 must be a number of tokens, 257") for script in CORPORA],
    ("tinystories", "foo", "tinystories.sh: unexpected argument foo"),
    ("tinystories", "--vocab", "--vocab needs a value"),
    ("fineweb10B", "104", "104: the number of training shards is 1 to 103"),
    ("fineweb_edu", "1002", "1002: the number of training shards is 1 to 1001"),
    ("climbmix", "0", "0: the number of training shards is 1 to 6542"),
    ("text", "", "name a file or folder of text"),
    ("text", "text.sh --out a[1]", "--out data/a[1]: --train-data takes one of []*?{}\\ in its name as a pattern"),
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
    ("hello world\n" * 1700, "", "the text is too short for a vocabulary of 512 tokens"),
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


def test_text_sh_takes_an_existing_tokenizer_and_a_name_like_an_option(tree, tmp_path, data):
    (tmp_path / "-my.txt").write_text(README)
    run(tree / "data/text.sh", "--tokenizer", data, "-- -my.txt", cwd=tmp_path)
    assert (tree / "data/-my/merges.txt").read_text() == (data / "merges.txt").read_text()
    both = execute(tree / "data/text.sh", "my.txt --vocab 300 --tokenizer", data, cwd=tmp_path)
    assert both.code == 2 and "--vocab trains a tokenizer and --tokenizer names one; give one" in both.err


@pytest.mark.parametrize("command", ["cat a.md | data/text.sh -", "data/text.sh - <a.md", "data/text.sh <(cat a.md)"])
def test_text_sh_takes_pipes_and_stdin(command, tree, tmp_path):
    (tree / "a.md").write_text(README)

    def text_sh():
        return execute(["bash", "-c", f"{command} --vocab 300 --out shards"], cwd=tree, env={"TMPDIR": tmp_path})

    out = text_sh().out
    assert "a vocabulary of 300 tokens; --vocab N sets another size" in out and not any(tmp_path.glob("tmp.*"))
    run(PROGRAM, "tokenize a.md --train-bpe 300 --quiet --output plain", cwd=tree)
    assert (tree / "shards/train_000001.bin").read_bytes() == (tree / "plain/train_000001.bin").read_bytes()
    assert "the shards in shards already exist" in text_sh().out
    (tree / "a.md").write_text(README + "More.")
    assert "shards has shards of another text; give another --out" in text_sh().err


@pytest.mark.parametrize("name, content", [
    ("my.d.csv", ('text\r\n"' + README.replace('"', "'").replace("\n", '"\r\n"') + '"\r\n').encode()),
    ("d.TXT.Gz", gzip.compress(b'{"text": 1}\n' + README.encode()))], ids=["csv", "gzip"])
def test_text_sh_keeps_the_endings_of_a_named_pipe(name, content, tree, tmp_path):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / name).write_bytes(content)
    run(PROGRAM, "tokenize", tmp_path / "file" / name, "--train-bpe 300 --quiet --output", tmp_path / "plain")
    run(["mkfifo", name], cwd=tree)
    for said in ("--train-data 'data/text/train_*.bin'", "the shards in data/text already exist"):
        command = f"cat '{tmp_path}/file/{name}' >{name} & data/text.sh {name} --vocab 300; wait"
        assert said in run(["bash", "-c", command], cwd=tree).out
    assert (tree / "data/text/train_000001.bin").read_bytes() == (tmp_path / "plain/train_000001.bin").read_bytes()


def test_text_sh_keeps_the_ending_of_a_link_to_a_file_without_one(tree, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0f3e").write_text("text\n" + '"a row, of words"\n' * 1000)
    (tmp_path / "d.csv").symlink_to("blobs/0f3e")
    said = run(tree / "data/text.sh", "d.csv --vocab 262 --out", tmp_path / "shards", cwd=tmp_path).out
    assert "1,000 documents" in said


def test_text_sh_passes_the_key_of_the_text_and_skips_bad_lines(tree, tmp_path, data):
    rows = [json.dumps({"data": f"{line} {i}"}) for i in range(20) for line in README.splitlines()]
    (tmp_path / "k.jsonl").write_text("\n".join(rows + ["{}"]))

    def text_sh(*options):
        return execute(tree / "data/text.sh", tmp_path / "k.jsonl", "--tokenizer", data, *options, cwd=tree)

    assert 'no text under the key "data"' in text_sh("--text-key data").err
    assert "1 bad line" in text_sh("--text-key data --skip-bad-lines").out
    assert "already exist" in text_sh("--skip-bad-lines --text-key data").out  # although there is a folder data
    assert 'no text under the key "text"' in text_sh("--skip-bad-lines").err
    assert "--text-key needs a value" in text_sh("--text-key").err
    assert "--text-key needs a value" in text_sh(["--text-key", ""]).err


def test_the_scripts_know_the_names_of_packed_files_that_the_program_knows(tree, tmp_path):
    source = (ROOT / "llmc/text/input.cpp").read_text()
    endings = re.findall('"([.a-z0-9]+)"', re.search("PACKED = {(.*?)}", source)[1])
    assert ".lzma" in endings
    packed = lzma.compress(random.Random(1).randbytes(125000).hex(" ", 2).encode())
    assert 100000 < len(packed) < 300000
    for ending in [*endings, ".LZMA"]:
        path = tmp_path / ending / f"my book.TXT{ending}"
        path.parent.mkdir()
        path.write_bytes(packed)
        said = run(tree / "data/text.sh", path).out
        assert "a vocabulary of 2048 tokens" in said and "data/my_book is ready" in said
        shutil.rmtree(tree / "data/my_book")


def test_text_sh_takes_packed_text_and_folders_whose_links_go_round_in_a_circle(tree, tmp_path):
    folder = tmp_path / "texts/more"
    folder.mkdir(parents=True)
    (folder / "round").symlink_to("..")
    packed = folder / "a book.txt.gz"
    packed.write_bytes(gzip.compress(README.encode()))
    run(tree / "data/text.sh", packed, "--vocab 300")
    run(tree / "data/text.sh", tmp_path / "texts", "--vocab 300")
    assert {path.name for path in (tree / "data").iterdir() if path.is_dir()} == {"a_book", "texts"}
    assert "already exist" in run(tree / "data/text.sh", tmp_path / "texts", "--vocab 300").out
    run(PROGRAM, "tokenize", ROOT / "README.md", "--train-bpe 300 --quiet --output", tmp_path / "plain")
    for name in ("train_000001.bin", "val_000000.bin", "merges.txt"):
        assert (tree / "data/texts" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


# ---- downloads


@pytest.fixture
def hub():
    """Data sets as huggingface.co serves them. `files` has {DATASET/NAME: bytes}, `asked` each request of a file with
    its range. A file in `cut` is sent once only to its half."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            dataset, kind, name = re.fullmatch("/datasets/(.*)/(raw|resolve)/main/(.*)", self.path).groups()
            content = server.files[f"{dataset}/{name}"]
            asked = self.headers.get("Range", "")
            if kind == "raw":  # a pointer of git-lfs
                content = f"x\noid sha256:{hashlib.sha256(content).hexdigest()}\nsize {len(content)}\n".encode()
            else:
                content = server.changed.get(name, content)
                server.asked.append((name, asked))
            size, first = len(content), int(asked.removeprefix("bytes=").removesuffix("-") or 0)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(size - first))
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
            self.end_headers()
            cut = kind == "resolve" and name in server.cut
            self.wfile.write(content[first:size // 2 if cut else size])
            server.cut -= {name} if cut else set()
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.cut, server.changed = {}, [], set(), {}
    server.env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "127.0.0.1"}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


EDU = "karpathy/fineweb-edu-100B-gpt2-token-shards"


@pytest.fixture
def edu(hub, tree, tmp_path):
    """fineweb_edu.sh with two small training shards on the server; GPT-2's tokenizer is there already."""
    made = make_shards(tmp_path / "made", make_text(60000))
    (tree / "data/fineweb_edu").mkdir()
    for name in ("vocab.json", "merges.txt"):
        (tree / "data/fineweb_edu" / name).write_bytes((made / name).read_bytes())
    for name in ("train_000001", "train_000002", "val_000000"):
        hub.files[f"{EDU}/edu_fineweb_{name}.bin"] = (made / f"{name.replace('2', '1')}.bin").read_bytes()
    hub.folder = tree / "data/fineweb_edu"
    hub.fetch = lambda by=run, **env: by(tree / "data/fineweb_edu.sh", 2, env={**hub.env, **env})
    return hub


def test_a_download_that_is_cut_off_continues_and_finished_files_are_not_fetched_again(edu, tree):
    second = "edu_fineweb_train_000002.bin"
    edu.cut.add(second)
    cut = edu.fetch(execute)
    size = len(edu.files[f"{EDU}/{second}"])
    assert cut.code == 1 and not (edu.folder / second).exists()
    assert "the download failed (curl: 18); run this again to continue. By hand: download http" in cut.err
    assert f"store it as data/fineweb_edu/{second}" in cut.err
    edu.asked.clear()
    said = edu.fetch().out
    assert edu.asked == [(second, f"bytes={size // 2}-")] and f"file 3 of 3: {second}" in said
    for name, content in edu.files.items():
        assert (edu.folder / name.rpartition("/")[2]).read_bytes() == content
    edu.asked.clear()
    assert "--train-data 'data/fineweb_edu/edu_fineweb_train_*.bin'" in edu.fetch().out and not edu.asked


def test_a_download_of_another_size_or_sum_is_removed(edu):
    name = "edu_fineweb_train_000001.bin"
    content = edu.files[f"{EDU}/{name}"]
    for wrong, message in ((content + b"\0", f"had {len(content) + 1} bytes instead of {len(content)} and was removed"),
                           (b"\0" + content[1:], "and was removed; run this again")):
        edu.changed[name] = wrong
        failed = edu.fetch(execute)
        assert failed.code == 1 and message in failed.err and not list(edu.folder.glob(f"{name}*")), failed
    edu.changed.clear()
    edu.fetch()


def test_without_a_network_a_script_names_the_file_to_download_by_hand(edu):
    failed = edu.fetch(execute, HF_ENDPOINT="http://127.0.0.1:1")
    assert failed.code == 1 and (
        f"by hand: download http://127.0.0.1:1/datasets/{EDU}/resolve/main/edu_fineweb_val_000000.bin, store it as "
        "data/fineweb_edu/edu_fineweb_val_000000.bin, run this again") in failed.err


@pytest.fixture
def mirror(tree, tmp_path):
    """mirror(VERSION, FILES) stands in for apt-get: its mirror's linux-source has these texts by name."""

    def package(name, version, depends=""):
        control = tmp_path / name / "DEBIAN/control"
        control.parent.mkdir(parents=True, exist_ok=True)
        control.write_text(f"Package: {name}\nVersion: {version}-1\nArchitecture: all\nMaintainer: a\nDescription: b\n"
                           + depends)
        run(["dpkg-deb", "--build", tmp_path / name, tmp_path / f"mirror/{name}_{version}-1_all.deb"])

    def make(version, files):
        name = f"linux-source-{version}"
        archive = tmp_path / name / f"usr/src/{name}.tar.xz"
        archive.parent.mkdir(parents=True)
        shutil.rmtree(tmp_path / "mirror", ignore_errors=True)
        (tmp_path / "mirror").mkdir()
        with tarfile.open(archive, "w:xz") as tar:
            for path, content in files.items():
                info = tarfile.TarInfo(f"{name}/{path}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        package(name, version)
        package("linux-source", version, f"Depends: {name} (= {version}-1)\n")
        make_script(tree / "bin/apt-get", f"cp '{tmp_path}/mirror/'${{!#}}_* .")

    return make


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")
def test_files_of_linux_are_held_out_by_name_whatever_the_version(mirror, tree):
    held_out = []
    for version in ["6.1", "6.12"]:
        text = {f"fs/{i}.c": f"int text_{i} = {i};\n".encode() * 3 for i in range(900)}
        mirror(version, text | {"logo.ppm": b"\0\1", "old.c": b"\xe4", "empty.c": b""})
        run(tree / "data/linux.sh", "--vocab 300", cwd=tree, env=on_path(tree / "bin"))
        folder = tree / "data/linux"
        lines = {name: (folder / f"text/{name}.jsonl").read_text().splitlines() for name in ["held_out", "train"]}
        held_out.append(lines["held_out"])
        assert sorted(json.loads(line)["text"].encode() for line in sum(lines.values(), [])) == sorted(text.values())
        assert not (folder / "packages").exists() and list(folder.glob("train_*.bin")) + list(folder.glob("val_*.bin"))
        shutil.rmtree(folder)
    assert held_out[0] == held_out[1] and len(held_out[0]) in range(1, 10)


def test_climbmix_is_tokenized_from_parquet_with_nanochats_validation_file_first(hub, tree, tmp_path):
    if execute("python3 -c 'import pyarrow'").code:
        pytest.skip("python3 has no pyarrow (pip install pyarrow)")
    for name, text in (("06542", "the queen saw "), ("00000", "the king went "), ("00001", "a river came ")):
        run(["python3", "-c", "import pyarrow, sys; from pyarrow import parquet; parquet.write_table(pyarrow.table("
             "{'text': [sys.argv[2] * 4000] * 9}), sys.argv[1])", str(tmp_path / "table"), text])
        hub.files[f"karpathy/climbmix-400b-shuffle/shard_{name}.parquet"] = (tmp_path / "table").read_bytes()
    script = tree / "data/climbmix.sh"
    script.write_text(script.read_text().replace("--val-tokens 20971520", "--val-tokens 1000"))
    said = run(script, "2 --vocab 270", env=hub.env).out
    assert "27 documents, " in said and "--train-data 'data/climbmix/train_*.bin'" in said
    assert (tree / "data/climbmix/made_of").read_text().startswith("data/climbmix/parquet/shard_06542.parquet\n")
    assert [name for name, _ in hub.asked] == [f"shard_{i}.parquet" for i in ("06542", "00000", "00001")]
    make_script(tree / "bin/python3", "exit 1")
    failed = execute(script, env=on_path(tree / "bin", **hub.env))
    assert failed.code == 1 and "pyarrow, which reads Parquet files, is missing: pip install pyarrow" in failed.err


def npy(kind, *tokens):
    """The bytes that numpy.save writes for an array of these whole numbers."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({len(tokens)},), }}\n".encode()
    values = b"".join(token.to_bytes(int(kind[2]), "little", signed=token < 0) for token in tokens)
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values


def llmq(count, masks):
    """A file of LLM.Q's scripts/tokenize_data.py with the tokens 0, 1, ..., without the masks behind them."""
    header = b"BIN.TOK\n" + struct.pack("<5i", 2, 4, count, 50257, masks)
    return header.ljust(1023, b"*") + b"\n" + struct.pack(f"<{count}i", *range(count))


@pytest.mark.parametrize("name, content, message", [
    ("tokens.bin", b"\1" * 3, "3 bytes are not a whole number of 2-byte tokens"),
    ("short.bin", b"\1\0\2\0", "may have tokens of 2 or of 4 bytes; give --dtype uint16 or --dtype uint32"),
    ("cut.npy", npy("<u2", 1, 2)[:-2], "is cut off or too long: its header says 2 tokens, and 2 bytes follow"),
    ("lfs.bin", b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer (run git lfs pull)"),
    ("tokens.npy", b"\x93NUMPY\x01\x00\x04\x00{]}\n", "its header is damaged"),
    ("tokens.tok", b"BIN.TOK\n\x02", "its header is damaged"),
    ("table.npy", b"\x93NUMPY\1\0\x44\0" + b"{'descr': [('a', '<u2')], 'shape': (9,)}".ljust(68),
     "is an array (9,) of [('a', '<u2')]; tokens must be one-dimensional uint16"),
    ("cut.tok", llmq(3, False)[:-4], "is cut off or too long: its header says 3 tokens, and 8 bytes follow"),
    ("masks.tok", llmq(3, True) + b"\7", "version 2 with 4 bytes per token and masks is not supported"),
    ("model.bin", struct.pack("<3i", 20240326, 3, 1024), "is llm.c's model, not tokens"),
    ("llama.bin", struct.pack("<256i", 20240801, 7, 3, *[0] * 253) + bytes(8), "is cut off or too long: its header"),
    ("new.bin", struct.pack("<3i", 20240801, 8, 0), "version 8 of llm.c's tokens for Llama 3 is not supported"),
    ("a.txt", "It is a café.\n".encode(), "is text, not tokens; tokenize it with train_gpt2 tokenize"),
    ("long.txt", "é".encode() * 3000 + b"\0", "is text, not tokens"),  # its 4096th byte is within a character
    ("tokens.npz", b"PK\3\4....", "is a zip archive"),
    ("model.gguf", b"GGUF\3\0\0\0", "is a model of llama.cpp (GGUF), not tokens"),
    ("model.safetensors", b"\x08\0\0\0\0\0\0\0" b'{"a":{}}' + bytes(4), "is a safetensors file, not tokens"),
    ("shard.00000.mds", struct.pack("<3I", 1, 33, 34) + b'{"column_encodings":[' b"]}", "is a shard of MosaicML's"),
    *[(f"file{n}", content + bytes(99), f"is {what}, not tokens") for n, (content, what) in enumerate([
        (b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a Python pickle (PyTorch's .pt)"),
        (bytes(257) + b"ustar", "a tar archive"), (lzma.compress(b"a"), "compressed (xz)"),
        (bz2.compress(b"a"), "compressed (bzip2)"), (bz2.compress(b""), "compressed (bzip2)"),
        (b"PK\5\6", "an empty zip archive"), (b"7z\xbc\xaf'\x1c", "a 7z archive"), (b"Rar!\x1a\7", "a rar archive"),
        (b"\4\"M\x18", "compressed (lz4)"), (b"ARROW1", "an Arrow or Feather file"), (b"FEA1", "a Feather file"),
        (b"\xff\xff\xff\xff", "an Arrow stream"), (b"Obj\1", "an Avro file"), (b"\x89HDF\r\n", "an HDF5 file"),
        (b"SQLite format 3\0", "an SQLite database"), (b"%PDF-1.4\n", "a PDF document"),
        (b"\x89PNG\r\n\x1a\n", "a PNG picture"), (b"\xff\xd8\xff\xe0", "a JPEG picture")])],
    *[(f"{n}.pkl", pickle.dumps([1, 2], n), "is a Python pickle, not tokens") for n in range(2, 6)],
    ("big-endian.bin", struct.pack(">3I", 1, 2, 3), "may have tokens of 2 or of 4 bytes"),
    ("signed.npy", npy("<i8", 5, -1), "has tokens -1 to 5, which are not all in a vocabulary of 65536"),
    ("large.npy", npy("<i8", 1, 1 << 32), "has tokens 1 to 4294967296, which are not all"),
    ("float.npy", npy("<f8", 0, 0), "is an array (2,) of <f8"),
])
def test_to_shard_refuses_a_bad_input_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    result = execute("python3 data/to_shard.py", tmp_path / name, tmp_path / "shard.bin")
    assert result.code == 1 and result.out == "" and result.err.count("\n") == 1, result
    assert f"{name}: {message}" in result.err


def test_to_shard_refuses_a_pipe_and_a_folder_for_the_shard(tmp_path):
    (tmp_path / "tokens").write_bytes(npy("<u2", 1, 2))
    for command, message in (('"$@" <(cat tokens) a.bin', ": is a pipe or a device; write its content to a file"),
                             ('"$@" tokens .', ".: is a folder; name a file in it")):
        failed = execute(["bash", "-c", command, "bash", "python3", ROOT / "data/to_shard.py"], cwd=tmp_path)
        assert failed.code == 1 and message in failed.err and failed.err.count("\n") == 1, failed
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.parametrize("content, options, header, tokens", [
    (b"\1\0\2\0", "--dtype uint16", [20240520, 1, 2, 0], b"\1\0\2\0"),
    (b"\1\0\xff\0", "", [20240520, 1, 2, 0], b"\1\0\xff\0"),
    (b"\1\0\0\0\2\0\0\0", "", [20240520, 1, 2, 0], b"\1\0\2\0"),
    (b"\1\0\1\0\2\0\0\0", "--vocab-size 65538", [20240520, 2, 2, 65538], b"\1\0\1\0\2\0\0\0"),
    (struct.pack("<3q", 1, 2, 50256), "", [20240520, 1, 3, 0], b"\1\0\2\0\x50\xc4"),
    (struct.pack("<2q", 640, 0x227b), "", [20240520, 1, 2, 0], b"\x80\2{\""),  # as a pickle and safetensors begin
    (npy("<i8", 1, 50256), "", [20240520, 1, 2, 0], b"\1\0\x50\xc4"),
    (npy("<u8", 1, 99999), "--vocab-size 100000", [20240520, 2, 2, 100000], b"\1\0\0\0\x9f\x86\1\0"),
    (npy("<i4", 1, 2), "", [20240520, 1, 2, 0], b"\1\0\2\0"),
    (llmq(3, False), "", [20240520, 1, 3, 0], b"\0\0\1\0\2\0"),
    (struct.pack("<258i", 20240801, 7, 2, *[0] * 253, 1, 2), "", [20240520, 1, 2, 0], b"\1\0\2\0"),
    (b"\x1f\x8b\2\xff", "--dtype uint16", [20240520, 1, 2, 0], b"\x1f\x8b\2\xff"),  # as gzip begins
], ids=["bare", "2 bytes", "4 bytes", "a wide vocabulary", "8 bytes", "others", "int64", "uint64", "int32", "LLM.Q",
        "Llama 3", "35615"])
def test_to_shard_writes_a_header_and_the_tokens(content, options, header, tokens, tmp_path):
    (tmp_path / "tokens").write_bytes(content)
    run("python3 data/to_shard.py", tmp_path / "tokens", tmp_path / "shard.bin", options)
    shard = (tmp_path / "shard.bin").read_bytes()
    assert [*struct.unpack("<4i", shard[:16])] == header and shard[1024:] == tokens


def test_to_shard_takes_the_size_of_tokens_from_megatrons_and_datatroves_index(tmp_path):
    def tokens(name):
        run("python3 data/to_shard.py", tmp_path / name, tmp_path / "shard.bin", "--vocab-size 100000")
        return struct.unpack("<3I", (tmp_path / "shard.bin").read_bytes()[1024:])

    for code, kind in ((1, "B"), (8, "H")):
        (tmp_path / "a.bin").write_bytes(struct.pack(f"<3{kind}", 1, 2, 3))
        index = struct.pack("<9sQBQQ2i2q3q", b"MMIDIDX\0\0", 1, code, 2, 3, 1, 2, 0, 2, 0, 1, 2)
        (tmp_path / "a.idx").write_bytes(index)
        assert tokens("a.bin") == (1, 2, 3)
    for kind in "HI":
        (tmp_path / "b.ds").write_bytes(struct.pack(f"<3{kind}", 1, 2, 3))
        (tmp_path / "b.ds.index").write_bytes(struct.pack("<2Q", 1, 3))
        assert tokens("b.ds") == (1, 2, 3)
    (tmp_path / "a.bin").write_bytes(struct.pack("<2H", 1, 2))
    failed = execute("python3 data/to_shard.py", tmp_path / "a.bin", tmp_path / "shard.bin")
    assert failed.code == 1 and "has 4 bytes, and the index beside it 3 tokens; is one of them cut off?" in failed.err
    for name, index in (("a.bin", "a.idx"), ("b.ds", "b.ds.index"), ("chunk.bin", "index.json")):
        (tmp_path / "chunk.bin").write_bytes(struct.pack("<3I2H", 1, 12, 16, 5, 6))
        (tmp_path / index).write_bytes(b"MMIDI")
        failed = execute("python3 data/to_shard.py", tmp_path / name, tmp_path / "shard.bin")
        assert failed.code == 1 and failed.err.startswith(f"{tmp_path / index}: the index is damaged: "), failed


def test_to_shard_reads_litgpts_chunks_without_their_header(tmp_path):
    chunk, index = tmp_path / "chunk-0-0.bin", tmp_path / "index.json"
    convert = ["python3 data/to_shard.py", chunk, tmp_path / "shard.bin"]
    for code, kind in ((20, "H"), (16, "i"), (18, "q")):
        tokens = struct.pack(f"<4{kind}", 5, 6, 7, 8)
        chunk.write_bytes(struct.pack("<4I", 2, 16, 16 + len(tokens) // 4, 16 + len(tokens)) + tokens)
        index.write_text(json.dumps({"config": {"data_format": [f"no_header_tensor:{code}"]}}))
        run(*convert)
        assert (tmp_path / "shard.bin").read_bytes()[1024:] == struct.pack("<4H", 5, 6, 7, 8)
    chunk.write_bytes(chunk.read_bytes()[:-2])
    assert "has 46 bytes, and litgpt's" in execute(*convert).err
    chunk.write_bytes(struct.pack("<3I2H", 1, 12, 16, 5, 6))
    index.write_text('{"config": {"data_format": ["jpeg"]}}')
    assert "with 16 bytes of jpeg" in execute(*convert).err
    index.unlink()
    assert "a chunk of litdata, whose index.json is missing; give --dtype" in execute(*convert).err
    assert "2 tokens" in run(*convert, "--dtype uint16").out


def test_to_shard_writes_all_shards_of_a_file_or_none_and_no_mixture_with_those_of_another(tmp_path):
    script, tokens = tmp_path / "to_shard.py", tmp_path / "tokens.npy"
    script.write_text((ROOT / "data/to_shard.py").read_text().replace("20240520, 100_000_000", "20240520, 2"))

    def convert(*values):
        tokens.write_bytes(npy("<i8", *values))
        return execute(["python3", script, tokens, ".//a[1].bin"], cwd=tmp_path)

    def shards():
        return {path.name: [*path.read_bytes()[1024::2]] for path in tmp_path.glob("a*")}

    failed = convert(1, 2, 70000)
    assert failed.code == 1 and "not all in a vocabulary of 65536, so no shard is written; give another" in failed.err
    assert not shards()
    for first in (1, 7):
        assert convert(first, 2, 3).code == 0
        assert shards() == {"a[1]_000001.bin": [first, 2], "a[1]_000002.bin": [3]}
    assert convert(1, 2, -1).code == 1
    assert shards()["a[1]_000001.bin"] == [7, 2] and len(shards()) == 2
    assert convert(1, 2, 3, 4, 5).code == 0
    for values, stays, new in (((1, 2, 3), "a[1]_000003.bin", "a[1]_000002.bin"),
                               ((1, 2), "a[1]_000001.bin", "a[1].bin")):
        message = f"{stays}: is there already, and would stay beside the new .//{new}; move it away, or give another"
        failed = convert(*values)
        assert failed.code == 1 and message in failed.err and len(shards()) == 3, failed
    for path in tmp_path.glob("a*"):
        path.unlink()
    assert convert(1, 2).code == 0
    assert "a[1].bin: is there already, and would stay beside the new" in convert(1, 2, 3).err
    assert shards() == {"a[1].bin": [1, 2]}
