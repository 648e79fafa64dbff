#!/usr/bin/env python3
"""Whole training steps of train_gpt2, PyTorch and llm.c on this machine's CPU, one program after the other.

    make -j2 bench
    dev/bench/compare_cpu.py --torch .venv/bin/python --llmc ../llm.c
    dev/bench/compare_cpu.py --torch .venv/bin/python --rounds 1 12.3M       the rows with that text in their names

Prints the tokens/s of each run, and at the end a table for RESULTS.md: a cell has the runs of all rounds. --torch names a
Python that has PyTorch. --llmc names a folder with llm.c's sources, which it builds in a copy; llm.c's CPU program has
fp32 only. Without one of the two its column stays empty. Let nothing else run meanwhile.
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
# What llm.c's checkpoint says of a model: the longest sequence, V, L, NH, C, Vp.
D12, SMALL = (1024, 50257, 12, 12, 768, 50304), (256, 4096, 6, 6, 384, 4096)
SMALL_SHAPE = "--layers 6 --heads 6 --channels 384 --vocab-size 4096"
AVX2 = {"CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
# Name, options of bench_step, options of torch_baseline.py, variables, model of llm.c.
ROWS = [
    ("124M, bf16, `-b 4 -t 256`", "-b 4 -t 256", "--B 4 --T 256", {}, None),
    ("124M, bf16, `-b 1 -t 1024`", "-b 1 -t 1024", "--B 1 --T 1024", {}, None),
    ("124M, `-b 4 -t 256 --precision fp32`", "-b 4 -t 256 --precision fp32", "--B 4 --T 256 --precision fp32", {}, D12),
    ("the same, 4 x 256, AVX2 alone", "-b 4 -t 256 --precision fp32", "--B 4 --T 256 --precision fp32", AVX2, None),
    (f"12.3M, bf16, `-b 16 -t 256 {SMALL_SHAPE}`", f"-b 16 -t 256 {SMALL_SHAPE}", "--model small --B 16", {}, None),
    ("12.3M, the same with `--precision fp32`", f"-b 16 -t 256 --precision fp32 {SMALL_SHAPE}",
     "--model small --B 16 --precision fp32", {}, SMALL),
]


def run(command, variables=None, **more):
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(THREADS), **(variables or {})}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, **more)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def ours(options, steps, variables):
    text = run([ROOT / "build/release/bench_step", *options.split(), "--steps", str(steps), "--threads", str(THREADS)], variables)
    return float(re.search(r"ms = (\d+) tok/s", text).group(1))


def torch(python, options, steps, variables):
    text = run([python, ROOT / "dev/bench/torch_baseline.py", *options.split(), "--steps", str(steps), "--compile", "--threads",
                str(THREADS)], variables)
    return float(re.search(r"(\d+) tokens/s best", text).group(1))


def prepare_llmc(sources, folder, model, B, T, steps):
    """Copies llm.c, sets B, T and the number of steps in its source, and writes random weights and tokens."""
    shutil.copytree(sources, folder, ignore=shutil.ignore_patterns(".git", "*.bin"))
    path = folder / "train_gpt2.c"
    text = path.read_text()
    for old, new in [("int B = 4;", f"int B = {B};"), ("int T = 64;", f"int T = {T};"), ("step <= 40", f"step < {steps}"),
                     ("int val_num_batches = 5;", "int val_num_batches = 1;")]:
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


def llmc(sources, model, options, steps):
    B, T = (int(re.search(rf"-{letter} (\d+)", options).group(1)) for letter in "bt")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "llm.c"
        prepare_llmc(sources, folder, model, B, T, steps)
        text = run([folder / "train_gpt2"], cwd=folder)
    return B * T / (min(float(ms) for ms in re.findall(r"\(took ([\d.]+) ms\)", text)) / 1e3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="words in the names of the rows to measure (all)")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--llmc", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    rows = [row for row in ROWS if all(word in row[0] for word in args.rows)]
    if not rows:
        parser.error(f"no row has {' and '.join(args.rows)} in its name")

    table = ["| | train_gpt2, each run | PyTorch compiled | llm.c |", "|---|---|---|---|"]
    for name, step_options, torch_options, variables, model in rows:
        programs = {"train_gpt2": lambda: ours(step_options, args.steps, variables)}
        if args.torch:
            programs["PyTorch"] = lambda: torch(args.torch, torch_options, args.steps, variables)
        if args.llmc and model:
            programs["llm.c"] = lambda: llmc(args.llmc, model, step_options, args.steps)
        rates = {program: [] for program in ("train_gpt2", "PyTorch", "llm.c")}
        for _ in range(args.rounds):
            for program, measure in programs.items():
                rates[program].append(measure())
                print(f"{name}: {program} {rates[program][-1]:,.0f}", flush=True)
        table.append(f"| {name} | " + " | ".join(", ".join(f"{rate:,.0f}" for rate in cell) for cell in rates.values()) + " |")
    print("\n".join(["", *table]))


if __name__ == "__main__":
    main()
