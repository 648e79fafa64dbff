"""test_readme.py: runs the commands of README.md and docs/ as they are written there, followed by options for a small
model and a few steps. Downloads come from a folder on this machine. Commands that cannot run here are in blocks
```sh network, ```sh gpu or ```sh ci; every command of a block ```sh is in COMMANDS."""

import hashlib
import json
import os
import random
import re
import shutil
import struct
import zlib

import pytest
from harness import MPI_ENVIRONMENT, PROGRAM, ROOT, Run, make_text, no_mpi_because, run

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
SHORT = """--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --steps 2 --warmup 0
    --val-batches 1 --sample-every 0 --quiet""".replace("\n", "")
VALIDATED = f"{SHORT} --val-every 2"
COMMANDS = {  # the beginning of a command: the options that are put after it
    "data/fineweb10B.sh 1": "",
    "./train_gpt2 plan": "",
    "./train_gpt2 --model d12": VALIDATED,
    "./train_gpt2 --resume": "--steps 3 --quiet",
    "data/bible_austen.sh": "",
    "./train_gpt2 --train-data 'data/bible_austen": VALIDATED,
    "./train_gpt2 generate --init out/bible_austen": "--max-tokens 3",
    "./train_gpt2 --ranks 2": f"{SHORT} --val-every 0",
}


def commands_of(page):
    blocks = re.findall("^```sh\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return re.sub(r"\\\n *", "", "".join(blocks)).splitlines()


@pytest.fixture
def tree(tmp_path):
    """A folder with data/, the program, and bin/ for stand-ins of other programs."""
    shutil.copytree(ROOT / "data", tmp_path / "tree/data", ignore=lambda folder, names: [
        name for name in names if not name.endswith((".sh", ".py"))])
    (tmp_path / "tree/train_gpt2").symlink_to(PROGRAM)
    (tmp_path / "tree/bin").mkdir()
    return tmp_path / "tree"


def as_written(beginning, tree, **env):
    """Runs the command of a page that begins so."""
    command = next(command for page in PAGES for command in commands_of(page) if command.startswith(beginning))
    if COMMANDS[beginning]:
        command = command.replace("--model d12", "")
    env = {"PATH": f"{tree}/bin:{os.environ['PATH']}", "HF_ENDPOINT": f"file://{tree}/hub", **env}
    run(["bash", "-c", f"{command} {COMMANDS[beginning]}"], cwd=tree, env=env)


def stand_in(tree, name, script):
    (tree / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (tree / "bin" / name).chmod(0o755)


def test_every_command_of_the_pages_is_tested_here():
    commands = [command for page in PAGES for command in commands_of(page)]
    assert commands and not [command for command in commands if not command.startswith(tuple(COMMANDS))]


def test_gpt2_on_web_text(tree):
    shards, vocabulary = tree / "hub/datasets/kjj0/fineweb10B-gpt2", tree / "hub/openai-community/gpt2/resolve/main"
    for folder in (shards / "raw/main", shards / "resolve/main", vocabulary, tree / "data/fineweb10B"):
        folder.mkdir(parents=True)
    (tree / "web.txt").write_text(make_text(600000))
    bpe = ROOT.parent / "shared/data/gpt2-bpe"
    if bpe.exists():  # GPT-2's vocabulary, which is fetched, too
        shutil.copy(bpe / "encoder.json", vocabulary / "vocab.json")
        shutil.copy(bpe / "vocab.bpe", vocabulary / "merges.txt")
    run(PROGRAM, "tokenize --quiet", tree / "web.txt", "--output", tree / "web",
        ["--tokenizer", vocabulary] if bpe.exists() else "--train-bpe 300")
    if not bpe.exists():
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(tree / "web" / name, tree / "data/fineweb10B")
    for shard in (tree / "web").glob("*.bin"):
        shutil.copy(shard, shards / "resolve/main" / f"fineweb_{shard.name}")
        sha = hashlib.sha256(shard.read_bytes()).hexdigest()
        (shards / "raw/main" / f"fineweb_{shard.name}").write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {shard.stat().st_size}\n")
    for command in ("data/fineweb10B.sh 1", "./train_gpt2 plan", "./train_gpt2 --model d12", "./train_gpt2 --resume"):
        as_written(command, tree)
    fetched = tree / "data/fineweb10B/fineweb_train_000001.bin"
    assert fetched.read_bytes() == (tree / "web/train_000001.bin").read_bytes()
    out = Run(tree / "out/d12")
    assert out.last_step() == 2 and (out.checkpoint(2) / "tokenizer.json").exists()
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if '"kind":"step"' in line)
    assert list(json.loads(line)) == list(out.lines("step")[0])


def make_novels(folder):
    """Writes a package of novels in R's format."""
    def characters(lines):
        head = b"X\n" + struct.pack(">iiiii", 2, 0, 0, 16, len(lines))
        return head + b"".join(struct.pack(">ii", 9, len(line)) + line.encode() for line in lines)

    data, control = folder / "usr/lib/R/site-library/janeaustenr/data", folder / "DEBIAN/control"
    data.mkdir(parents=True)
    control.parent.mkdir()
    control.write_text("Package: r-cran-janeaustenr\nVersion: 1\nArchitecture: all\n"
                       "Maintainer: nobody <nobody@localhost>\nDescription: novels\n")
    database = b""
    for name in ["emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility"]:
        lines = [f"It was said of {name}, line {i}." for i in range(5000)]
        content = characters([name.upper(), "", "CHAPTER I", "", *lines])
        database += struct.pack(">I", len(content)) + zlib.compress(content)
    (data / "Rdata.rdb").write_bytes(database)
    (data / "Rdata.rdx").write_bytes(b"")
    run("dpkg-deb --build", folder, folder.parent / "r-cran-janeaustenr_1_all.deb")


def test_the_quick_start(tree):
    if not shutil.which("dpkg-deb"):
        pytest.skip("there is no dpkg-deb")
    choose = random.Random(1)
    words = ["".join(choose.choices("ba ke lo mi nu ra se to vi zu da fe go hi ju pa".split(), k=choose.randint(1, 5)))
             for _ in range(6000)]
    (tree / "verses").write_text("".join(
        f"Ge{i // 30 + 1}:{i % 30 + 1} {' '.join(choose.choices(words, k=9))}\n" for i in range(31102)))
    stand_in(tree, "bible", f"cat '{tree}/verses'")
    make_novels(tree / "package")
    stand_in(tree, "apt-get", f"""case "$*" in
        *'download r-cran-janeaustenr') cp '{tree}'/r-cran-janeaustenr_1_all.deb . ;; *) exit 100 ;; esac""")
    for command in ("data/bible_austen.sh", "./train_gpt2 --train-data 'data/bible_austen",
                    "./train_gpt2 generate --init out/bible_austen"):
        as_written(command, tree)
    text = tree / "data/bible_austen/text"
    assert len([line for line in (text / "king_james_bible.txt").read_text().splitlines() if line]) == 31102
    for novel in ("emma", "mansfieldpark", "persuasion"):
        assert f"It was said of {novel}, line 4999." in (text / f"{novel}.txt").read_text()


def test_two_ranks(tree, data):
    if reason := no_mpi_because():
        pytest.skip(reason)
    shutil.copytree(data, tree / "data/x")
    as_written("./train_gpt2 --ranks 2", tree, **MPI_ENVIRONMENT)
    assert Run(tree / "out/two").last_step() == 1


def test_every_link_of_the_pages_names_a_file():
    for path in [ROOT / "CONTRIBUTING.md", *(ROOT / page for page in PAGES)]:
        links = re.findall(r"\]\(([^)#]+)", path.read_text())
        assert not [link for link in links if not link.startswith("http") and not (path.parent / link).exists()], path
