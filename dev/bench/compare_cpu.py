#!/usr/bin/env python3
"""Whole training steps of train_gpt2, PyTorch and llm.c on this machine's CPU, one program after the other.

    make -j2 bench
    dev/bench/compare_cpu.py --torch .venv/bin/python --llmc ../llm.c
    dev/bench/compare_cpu.py --torch .venv/bin/python --rounds 1 12.3M       the rows with that text in their names

Prints the tokens/s of each run. At the end it prints a table for RESULTS.md, where a cell has one figure for each
round. --torch names a Python that has PyTorch. --llmc names a folder with the sources of llm.c. The script copies the
folder and builds llm.c in the copy. llm.c's CPU program has only fp32. The column of a program that is not named stays
empty. Run nothing else at the same time.
"""
import argparse
import array
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
THREADS = len(os.sched_getaffinity(0))
# For each model: the options of bench_step, and what llm.c's checkpoint says of it: the longest sequence, V,
# L, NH, C, Vp.
MODELS = {
    "d12": ("--model d12", (1024, 50257, 12, 12, 768, 50304)),
    "small": ("--layers 6 --heads 6 --channels 384 --vocab-size 4096", (256, 4096, 6, 6, 384, 4096)),
}
# Each of these variables restricts one library to AVX2: train_gpt2, oneDNN, MKL, and PyTorch's own kernels.
AVX2 = {"CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2"}
# A row's name, model, B, T, precision, and the environment variables that both programs get.
# readme_table.py knows the names.
ROWS = [
    ("124M, bf16, `-b 4 -t 256`", "d12", 4, 256, "bf16", {}),
    ("124M, bf16, `-b 1 -t 1024`", "d12", 1, 1024, "bf16", {}),
    ("124M, `-b 4 -t 256 --precision fp32`", "d12", 4, 256, "fp32", {}),
    ("the same, 4 x 256, AVX2 alone", "d12", 4, 256, "fp32", AVX2),
    (f"12.3M, bf16, `-b 16 -t 256 {MODELS['small'][0]}`", "small", 16, 256, "bf16", {}),
    ("12.3M, the same with `--precision fp32`", "small", 16, 256, "fp32", {}),
]


def run(command, variables=None, **more):
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(THREADS), **(variables or {})}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, **more)
    if done.returncode:
        output = done.stdout[-1000:] + done.stderr[-3000:]
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{output}")
    return done.stdout


def ours(row, steps):
    _, model, B, T, precision, variables = row
    text = run([ROOT / "build/release/bench_step", *MODELS[model][0].split(), "-b", str(B), "-t", str(T), "--precision",
                precision, "--steps", str(steps)], variables)
    return float(re.search(r"ms = (\d+) tok/s", text).group(1))


def torch(python, row, steps):
    _, model, B, T, precision, variables = row
    text = run([python, ROOT / "dev/bench/torch_baseline.py", "--model", model, "--B", str(B), "--T", str(T),
                "--precision", precision, "--compile", "--steps", str(steps), "--threads", str(THREADS)], variables)
    return float(re.search(r"(\d+) tokens/s best", text).group(1))


def prepare_llmc(sources, folder, model, B, T, steps):
    """Copies llm.c, sets B, T and the number of steps in its source, and writes random weights and tokens."""
    shutil.copytree(sources, folder, ignore=shutil.ignore_patterns(".git", "*.bin"))
    path = folder / "train_gpt2.c"
    text = path.read_text()
    for old, new in [("int B = 4;", f"int B = {B};"), ("int T = 64;", f"int T = {T};"),
                     ("step <= 40", f"step < {steps}"), ("int val_num_batches = 5;", "int val_num_batches = 1;")]:
        if old not in text:
            sys.exit(f"{path} has no text \"{old}\"; take llm.c of commit f1e2ace")
        text = text.replace(old, new)
    path.write_text(text)
    run(["make", "train_gpt2"], cwd=folder)

    max_T, V, L, _, C, Vp = model
    block = array.array("f", [random.gauss(0, 0.02) for _ in range(1 << 16)])
    parameters = Vp * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
    with open(folder / "gpt2_124M.bin", "wb") as file:
        array.array("i", [20240326, 3, *model, *[0] * 248]).tofile(file)
        for begin in range(0, parameters, len(block)):
            block[:parameters - begin].tofile(file)
    count = (steps + 1) * B * T + 1
    data = folder / "dev/data/tinyshakespeare"
    data.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        with open(data / f"tiny_shakespeare_{split}.bin", "wb") as file:
            array.array("i", [20240520, 1, count, *[0] * 253]).tofile(file)
            array.array("H", [random.randrange(V) for _ in range(count)]).tofile(file)


def llmc(sources, row, steps):
    _, model, B, T, _, _ = row
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "llm.c"
        prepare_llmc(sources, folder, MODELS[model][1], B, T, steps)
        text = run([folder / "train_gpt2"], cwd=folder)
    return B * T / (min(float(ms) for ms in re.findall(r"\(took ([\d.]+) ms\)", text)) / 1e3)


def positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="words in the names of the rows to measure (all)")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--llmc", metavar="FOLDER")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=4)
    args = parser.parse_args()
    rows = [row for row in ROWS if all(word in row[0] for word in args.rows)]
    if not rows:
        parser.error(f"no row has {' and '.join(args.rows)} in its name")
    for path, need in [(ROOT / "build/release/bench_step", "run make bench"),
                       (args.llmc, "--llmc names a folder with llm.c"),
                       (args.torch and shutil.which(args.torch) or args.torch,
                        "--torch names a Python that has PyTorch")]:
        if path and not os.path.exists(path):
            sys.exit(f"error: {path} does not exist; {need}")

    table = ["| | train_gpt2, each run | PyTorch compiled | llm.c |", "|---|---|---|---|"]
    for row in rows:
        name, _, _, _, precision, variables = row
        programs = {"train_gpt2": lambda: ours(row, args.steps)}
        if args.torch:
            programs["PyTorch"] = lambda: torch(args.torch, row, args.steps)
        if args.llmc and precision == "fp32" and not variables:
            programs["llm.c"] = lambda: llmc(args.llmc, row, args.steps)
        rates = {program: [] for program in ("train_gpt2", "PyTorch", "llm.c")}
        for _ in range(args.rounds):
            for program, measure in programs.items():
                rates[program].append(measure())
                print(f"{name}: {program} {rates[program][-1]:,.0f}", flush=True)
        cells = [", ".join(f"{rate:,.0f}" for rate in cell) for cell in rates.values()]
        table.append(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(["", *table]))


if __name__ == "__main__":
    main()
