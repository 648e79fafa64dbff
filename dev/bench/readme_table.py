#!/usr/bin/env python3
"""readme_table.py [--check]: writes the README's table of speeds from the table of dev/bench/RESULTS.md.

A cell of RESULTS.md has the tokens/s of several runs, the README's cell has the best of them. --check changes nothing,
and fails if the README's table is not the one that RESULTS.md gives.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The beginning of a row in RESULTS.md, and its name in the README.
ROWS = [
    ("124M, bf16, `-b 4 -t 256`", "GPT-2 124M, 4 x 256 tokens, bf16"),
    ("124M, bf16, `-b 1 -t 1024`", "GPT-2 124M, 1 x 1024 tokens, bf16"),
    ("124M, `-b 4 -t 256 --precision fp32`", "GPT-2 124M, 4 x 256 tokens, fp32"),
    ("the same, 4 x 256, AVX2 alone", "the same, restricted to AVX2"),
    ("12.3M, bf16, `-b 16 -t 256", "12.3M parameters, 16 x 256 tokens, bf16"),
    ("12.3M, the same with `--precision fp32`", "12.3M parameters, 16 x 256 tokens, fp32"),
]


def best(cell):
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d{1,3}(?:,\d{3})+|\d+", cell)]
    return max(numbers, default=0)


def table(results):
    block = re.search(r"<!-- speed -->\n(.*?)<!-- /speed -->", results, re.S).group(1)
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
    lines = ["| AMD EPYC (Zen 5), 2 cores | train_gpt2 | PyTorch 2.15, torch.compile | llm.c |", "|---|---|---|---|"]
    for begin, name in ROWS:
        cells = next(row for row in rows if row[0].startswith(begin))
        ours, torch, llmc = (best(cell) for cell in cells[1:4])
        others = [f"{n:,} ({ours / n:.2f} x slower)" if n else "" for n in (torch, llmc)]
        lines.append(f"| {name} | **{ours:,}** | {others[0]} | {others[1]} |")
    return "\n".join(lines) + "\n"


def main():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = table((ROOT / "dev/bench/RESULTS.md").read_text(encoding="utf-8"))
    marked = re.compile(r"(<!-- speed: [^\n]*-->\n).*?(<!-- /speed -->)", re.S)
    changed = marked.sub(lambda m: m.group(1) + new + m.group(2), text)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if changed == text else "README.md: its table of speeds is not that of dev/bench/RESULTS.md: "
                                           "run dev/bench/readme_table.py")
    readme.write_text(changed, encoding="utf-8")


main()
