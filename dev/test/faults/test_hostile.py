"""test_hostile.py: HOSTILE_COUNT [100] random hostile inputs, of the seeds HOSTILE_SEED [1] and on: damaged files,
odd options, texts, variables and limits. Under sanitizers each command succeeds, or ends with one sentence and the
exit code of what is wrong; it changes no other checkpoint. Builds the program."""

import json
import os
import random
import re
import shutil

import pytest
from harness import TINY, Launch, execute, make_text, train, words
from test_programs import build_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]
FIRST = int(os.environ.get("HOSTILE_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("HOSTILE_COUNT", "100")))
ODD = ["", "-1", "0", "1e-320", "1e999", "nan", "-nan", "inf", "4294967296", "18446744073709551616", "0x10", "1_000",
       "²", "\\", "\n", "~", "~/x", "/", "/dev/null", "/dev/zero", "[1]", "{a,b", "*", "%s%n", "<|endoftext|>",
       "\x1b[2J", "auto", "all", "a" * 5000, "--", "-"]
NUMBERS = [-1, 0, 0.5, 1 << 20, 1 << 31, 1 << 63, 1e308, "12", None, [], {}, True]
TEXTS = ['"', '{"text": "\\ud800"}', '{"text": null}', '{"text": 7}', "[" * 3000, '{"a": 1}', "\0" * 9, "\xff"]
COMMANDS = {  # and the files that may be damaged
    "train": (f"--train-data data/train_*.bin --val-data data/val_*.bin {TINY} --steps 2 --output new --sample-every 1 "
              "--sample-tokens 3", "data/*"),
    "resume": ("--resume --output run --steps 34 --checkpoint-every 2 --keep 0",
               "run/run.toml run/latest run/step_000030/*"),
    "init": ("--init hf --train-data data/train_*.bin --steps 1 --warmup 0 --output '' --quiet", "hf/* data/*"),
    "generate": ("generate --init hf --max-tokens 3 --prompt 'the king'", "hf/*"),
    "eval": ("eval --init hf --val-data data/val_*.bin --val-tokens 64 -b 2", "hf/* data/*"),
    "plan": ("plan --train-data data/train_*.bin --layers 2 --heads 2 --channels 32 --seq-len 16 -d 64", "data/*"),
    "tokenize": ("tokenize text.txt lines.jsonl --tokenizer data --output tokens --quiet",
                 "data/* text.txt lines.jsonl"),
}


@pytest.fixture(scope="module")
def program():
    return build_for("address,undefined", "train_gpt2") / "train_gpt2"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    return train("--steps 30 --checkpoint-every 15 --val-every 15", data=data, out=out)


def damage(path, rng):
    """Changes a file as a disk, a network or a person would. Returns what it did."""
    bytes_ = path.read_bytes()
    at = rng.randrange(len(bytes_) + 1) if rng.random() < 0.3 else rng.randrange(min(len(bytes_), 2000) + 1)
    kinds = {
        "cut": bytes_[:at],
        "overwritten": bytes_[:at] + rng.randbytes(rng.choice([1, 8])) + bytes_[at + 1:],
        "longer": bytes_[:at] + rng.randbytes(rng.choice([1, 300])) + bytes_[at:],
        "empty": b"",
        "of another file": rng.choice([other for other in path.parent.iterdir() if other.is_file()]).read_bytes(),
        "gone": None,
        "a folder": None,
    }
    values = [*re.finditer(rb"-?\b\d+(\.\d+)?\b|true|false|\"[^\"]*\"", bytes_[:20000])]
    if path.suffix in (".json", ".toml", ".safetensors") and values:
        where = rng.choice(values)
        kinds["odd value"] = bytes_[:where.start()] + json.dumps(rng.choice(NUMBERS)).encode() + bytes_[where.end():]
    kind = rng.choice([*kinds, *["odd value"] * 4 * ("odd value" in kinds)])
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind != "gone":
        path.write_bytes(kinds[kind])
    return f"{path.name}: {kind} at {at}"


def write_texts(folder, rng):
    """Writes a text and JSON lines, sometimes with something odd in them."""
    odd = rng.choice([*TEXTS, "", "", "", rng.randbytes(40).decode("latin-1")])
    lines = [json.dumps({"text": make_text(40)}) for _ in range(20)] + [odd]
    (folder / "text.txt").write_bytes((make_text(200) + odd).encode("latin-1"))
    (folder / "lines.jsonl").write_bytes("\n".join(lines).encode("latin-1"))


def attack(command, rng, folder, options, env):
    """Returns the options, the shell command of a limit, and a description."""
    name, targets = command
    kind = rng.choice("file file file option option variable limit".split())
    if kind == "file":
        files = sorted(path for target in targets.split() for path in folder.glob(target) if path.is_file())
        return options, "", damage(rng.choice(files), rng)
    if kind == "option":
        at, value = rng.choice([i for i, word in enumerate(options) if word.startswith("-")]), rng.choice(ODD)
        options = rng.choice([options[:at] + [options[at], value] + options[at + 2:], options + [value],
                              options + [options[at] + "=" + value], options[:at] + options[at + 1:]])
    elif kind == "variable":
        env[rng.choice("OMP_NUM_THREADS CPU_ISA RANK WORLD_SIZE LOCAL_RANK MASTER_PORT SLURM_PROCID HOME LC_ALL TMPDIR "
                       "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE".split())] = rng.choice(ODD)
    else:
        limit = rng.choice(["ulimit -f 8", "ulimit -f 200", "ulimit -n 8", "ulimit -n 20", "exec <&-", "exec >&-"])
        return options, limit, limit
    return options, "", kind


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_input_ends_in_one_sentence_or_does_no_harm(seed, program, trained, data, tmp_path):
    rng = random.Random(seed)
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(data, tmp_path / "data")
    shutil.copytree(trained.checkpoint(30), tmp_path / "hf")
    (tmp_path / "hf/trainer.json").unlink()  # it has the checksums of the others
    write_texts(tmp_path, rng)
    name = rng.choice(list(COMMANDS))
    env = {"OMP_NUM_THREADS": 1, "UBSAN_OPTIONS": "halt_on_error=1"}
    options, limit, what = attack((name, COMMANDS[name][1]), rng, tmp_path, words(COMMANDS[name][0]), env)
    command = ["bash", "-c", f'{limit}\nexec "$@"', "bash"]
    result = execute(command, Launch(program).command(options), env=env, cwd=tmp_path, limit=600)
    shown = f"seed {seed}, {name}, {what}, {env}: {result}"
    wrong = "Sanitizer|runtime error|what\\(\\)|bad_alloc|std::|sto[dil]\\b|json.exception"
    assert not re.search(wrong, result.out + result.err), shown
    assert result.code in (0, 2, 65, 66, 73, 74), shown
    assert len(result.errors) == (result.code != 0) and len("".join(result.errors)) < 6000, shown
    assert result.code or name == "tokenize" or "nan" not in result.out.lower(), shown
    for file in trained.checkpoint(15).iterdir():
        assert file.read_bytes() == (tmp_path / "run/step_000015" / file.name).read_bytes(), shown
