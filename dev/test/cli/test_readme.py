"""test_readme.py: runs the commands of README.md and docs/ as they are written there, followed by options for a small
model and a few steps. Downloads come from a folder on this machine. Commands that cannot run here are in blocks
```sh network, ```sh gpu, ```sh elsewhere or ```sh ci; every command of a block ```sh is in COMMANDS."""

import hashlib
import json
import random
import re
import shutil

import pytest
from harness import (MPI_ENVIRONMENT, ROOT, Run, execute, make_script, make_shards, make_text, no_mpi_because, on_path,
                     run)

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
SHORT = "--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --steps 2 --warmup 0 " \
        "--val-tokens 32 --sample-every 0 --quiet"
COMMANDS = {  # the beginning of a command: the options that are put after it
    "data/fineweb10B.sh 1": "",
    "./train_gpt2 plan": "--measure off",
    "./train_gpt2 --model d12": f"{SHORT} --val-every 2",
    "./train_gpt2 --resume": "--steps 3 --quiet",
    "data/bible_austen.sh": "",
    "./train_gpt2 --train-data 'data/bible_austen": f"{SHORT} --val-every 2",
    "./train_gpt2 generate --init out/bible_austen": "--max-tokens 3",
    "./train_gpt2 export out/bible_austen": "",
    "./train_gpt2 --ranks 2": f"{SHORT} --val-every 0",
}


def commands():
    """Returns the commands of all pages."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    blocks = re.findall("^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return re.sub(r"\\\n *", "", "".join(blocks)).splitlines()


def as_written(beginning, tree, **env):
    """Runs the command of a page that begins so."""
    command = next(command for command in commands() if command.startswith(beginning))
    if COMMANDS[beginning]:
        command = command.replace("--model d12", "")
    run(["bash", "-c", f"{command} {COMMANDS[beginning]}"], cwd=tree,
        env=on_path(tree / "bin", HF_ENDPOINT=f"file://{tree}/hub", **env))


def test_every_command_of_the_pages_is_tested_here():
    assert commands() and not [command for command in commands() if not command.startswith(tuple(COMMANDS))]


def test_gpt2_on_web_text(tree):
    shards = tree / "hub/datasets/kjj0/fineweb10B-gpt2"
    for folder in (shards / "raw/main", shards / "resolve/main", tree / "data/fineweb10B"):
        folder.mkdir(parents=True)
    made = make_shards(tree / "web", make_text(600000))
    for name in ("vocab.json", "merges.txt"):  # GPT-2's are so long that they are there already
        shutil.copy(made / name, tree / "data/fineweb10B")
    for shard in made.glob("*.bin"):
        shutil.copy(shard, shards / "resolve/main" / f"fineweb_{shard.name}")
        sha = hashlib.sha256(shard.read_bytes()).hexdigest()
        (shards / "raw/main" / f"fineweb_{shard.name}").write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {shard.stat().st_size}\n")
    for command in ("data/fineweb10B.sh 1", "./train_gpt2 plan", "./train_gpt2 --model d12", "./train_gpt2 --resume"):
        as_written(command, tree)
    fetched = tree / "data/fineweb10B/fineweb_train_000001.bin"
    assert fetched.read_bytes() == (made / "train_000001.bin").read_bytes()
    out = Run(tree / "out/d12")
    assert out.last_step() == 2 and (out.checkpoint(2) / "tokenizer.json").exists()
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if '"kind":"step"' in line)
    assert list(json.loads(line)) == list(out.lines("step")[0])


def test_the_quick_start(tree):
    choose = random.Random(1)
    words = ["".join(choose.choices("ba ke lo mi nu ra se to vi zu da fe go hi ju pa".split(), k=choose.randint(1, 5)))
             for _ in range(6000)]
    (tree / "verses").write_text("".join(
        f"Ge{i // 30 + 1}:{i % 30 + 1} {' '.join(choose.choices(words, k=9))}\n" for i in range(31102)))
    make_script(tree / "bin/bible", f"cat '{tree}/verses'")
    make_script(tree / "bin/apt-get", "exit 100")  # it continues with the Bible alone
    for command in ("data/bible_austen.sh", "./train_gpt2 --train-data 'data/bible_austen",
                    "./train_gpt2 generate --init out/bible_austen", "./train_gpt2 export out/bible_austen"):
        as_written(command, tree)
    assert (tree / "bible.gguf").read_bytes()[:4] == b"GGUF"
    text = (tree / "data/bible_austen/text/king_james_bible.txt").read_text()
    assert len([line for line in text.splitlines() if line]) == 31102


@pytest.mark.skipif(bool(no_mpi_because()), reason=no_mpi_because())
def test_two_ranks(tree, data):
    shutil.copytree(data, tree / "data/x")
    as_written("./train_gpt2 --ranks 2", tree, **MPI_ENVIRONMENT)
    assert Run(tree / "out/two").last_step() == 1


def test_the_quotes_of_a_step_are_from_the_sources(tmp_path):
    run("dev/quotes.py --check")
    for folder in ("dev", "docs"):
        (tmp_path / folder).mkdir()
    for name in ("llmc", "train_gpt2.cu"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "dev/quotes.py", tmp_path / "dev")
    page, text = tmp_path / "docs/step.md", (ROOT / "docs/step.md").read_text()
    page.write_text(text.replace("const float m = sum / C;", "const float m = sum;"))
    assert "run dev/quotes.py" in execute(tmp_path / "dev/quotes.py", "--check").err
    run(tmp_path / "dev/quotes.py")
    assert page.read_text() == text and text.count("<!-- source: ") == text.count("```cpp") > 5
    page.write_text(text.replace("float sum = 0.0f, ", "float "))
    assert "has 0 lines" in execute(tmp_path / "dev/quotes.py", "--check").err


def test_every_link_of_the_pages_names_a_file():
    for path in [ROOT / "CONTRIBUTING.md", ROOT / "dev/simt/README.md", *(ROOT / page for page in PAGES)]:
        text = re.sub("^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\(([^)#]+)", text)
        assert not [link for link in links if not link.startswith("http") and not (path.parent / link).exists()], path
