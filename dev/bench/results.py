#!/usr/bin/env python3
"""Makes the Markdown tables of RESULTS.md from results of benchmarks, one JSON object per line.

    dev/bench/results.py results.jsonl              Markdown on stdout
    dev/bench/results.py --run NAME log.jsonl       prints one such object for a training run
    dev/bench/results.py --llmc d12:64 llmc.log     prints one for the output of llm.c with -e d12 -b 64 -t 1024

bench_ops --json, torch_baseline.py --json, --run and --llmc write such objects. If a figure was measured several
times, the best one counts.
"""
import argparse
import json
import re
import statistics
import sys


def read_lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def run_summary(name, path):
    """Loss and speed of a run: the median of the steps after the first ten, which compile, tune and fill caches."""
    records = read_lines(path)
    steps = [r for r in records if r.get("kind") == "step"]
    settled = steps[10:] or steps
    return {
        "bench": "run", "run": name, "steps": len(steps),
        "losses": [r["loss"] for r in steps[:20]], "last_loss": steps[-1]["loss"] if steps else None,
        "ms": statistics.median(r["step_ms"] for r in settled) if settled else None,
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in settled) if settled else None,
    }


def llmc_summary(shape, path):
    """llm.c's fastest step; its line is "step 3/30 | loss ... | 140.00 ms | 38.0% bf16 MFU | 468000 tok/s". shape:
    d12:64."""
    model, B = shape.split(":")[0], int(shape.split(":")[1])
    with open(path, errors="replace") as file:
        text = file.read()
    ms = [float(x) for x in re.findall(r"^step +[0-9]+/[0-9]+ .*\| *([0-9.]+) ms \|", text, re.M)]
    if len(ms) < 3:
        sys.exit(f"results.py: {path}: no steps of llm.c")
    device = re.search(r"\| device +\| (.*?) *\|", text)
    memory = re.search(r"device memory usage: *([0-9]+) MiB", text)
    fastest = min(ms[1:])
    return {"bench": "other", "name": "llm.c", "device": device.group(1) if device else "", "model": model,
            "dtype": "bf16", "B": B, "T": 1024, "ms": fastest, "tokens_per_s": 1024 * B / fastest * 1e3,
            **({"bytes": int(memory.group(1)) << 20} if memory else {})}


def best(results, key, figure):
    """The results with the smallest figure for each key, in the order in which the keys first appear."""
    found = {}
    for r in results:
        k = tuple(r.get(name) for name in key)
        if k not in found or r[figure] < found[k][figure]:
            found[k] = r
    return list(found.values())


def table(head, rows):
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def mfu_of(r, rows):
    """The result's MFU. Of another program: that of our rows of the same model and T, in proportion to the speed."""
    same = [o for o in rows if o.get("mfu") and (o["model"], o["dtype"], o["T"]) == (r["model"], r["dtype"], r["T"])]
    return r.get("mfu") or (same and same[0]["mfu"] * r["tokens_per_s"] / same[0]["tokens_per_s"])


def steps_table(results):
    rows = best([r for r in results if r["bench"] in ("step", "other")],
                ("bench", "name", "variant", "model", "dtype", "B", "T"), "ms")
    if not rows:
        return
    print("### Whole training steps\n")
    ratios(rows)
    table(["program", "device", "model", "dtype", "B", "T", "ms", "ms for 65,536 tokens", "tokens/s", "MFU",
           "memory, GB"],
          [[r.get("name", f"train_gpt2 {r.get('variant', '')}".strip()), r["device"], r["model"], r["dtype"], r["B"],
            r["T"], f"{r['ms']:.2f}",
            f"{65536e3 / r['tokens_per_s']:.1f}", f"{r['tokens_per_s']:,.0f}",
            f"{100 * mfu_of(r, rows):.1f} %" if mfu_of(r, rows) else "",
            f"{1e-9 * r['bytes']:.1f}" if "bytes" in r else ""]
           for r in rows])


def ratios(rows):
    """Ours against each other program, both at the B that suits them best."""
    others = [r for r in rows if r["bench"] == "other"]
    for name, model, dtype, T in dict.fromkeys((r["name"], r["model"], r["dtype"], r["T"]) for r in others):
        theirs = max((r for r in others if r["name"] == name and (r["model"], r["dtype"], r["T"]) == (model, dtype, T)),
                     key=lambda r: r["tokens_per_s"])
        same = [r for r in rows if r["bench"] == "step" and not r.get("variant")
                and (r["model"], r["dtype"], r["T"]) == (model, dtype, T)]
        if same:
            ours = max(same, key=lambda r: r["tokens_per_s"])
            print(f"{model}, {dtype}, T {T}: {ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} x {name} "
                  f"(ours B {ours['B']}, theirs B {theirs['B']})\n")


def operations_table(results):
    operations = [r for r in results if r["bench"] == "ops"]

    def setting_of(r):
        return r["device"], r["model"], r["dtype"], r["B"], r["T"], r.get("variant", "")

    for setting in dict.fromkeys(setting_of(r) for r in operations):
        rows = best([r for r in operations if setting_of(r) == setting], ("op",), "us")
        device, model, dtype, B, T, variant = setting
        print(f"### Operations: {model}, {dtype}, B {B}, T {T}, {device} {variant}".strip() + "\n")
        copy, product = rows[0]["copy_gbs"], rows[0]["product_tflops"]
        print(f"Copy {copy:,.0f} GB/s, matmul {product:.1f} TFLOP/s in the same run.\n")
        rows.sort(key=lambda r: -r["count"] * (r["us"] - r["floor_us"]))
        table(["operation", "runs a step", "us", "GB/s", "TFLOP/s", "ms a step", "floor, ms", "gap, ms"],
              [[r["op"], r["count"], f"{r['us']:.1f}", f"{1e-3 * r['bytes'] / r['us']:,.0f}",
                f"{1e-6 * r['flop'] / r['us']:.1f}",
                f"{1e-3 * r['count'] * r['us']:.2f}", f"{1e-3 * r['count'] * r['floor_us']:.2f}",
                f"{1e-3 * r['count'] * (r['us'] - r['floor_us']):.2f}"] for r in rows])


def runs_table(results):
    runs = [r for r in results if r["bench"] == "run"]
    if not runs:
        return
    print("### Training runs\n")
    table(["run", "steps", "first losses", "last loss", "ms a step", "tokens/s"],
          [[r["run"], r["steps"], ", ".join(f"{x:.4f}" for x in r["losses"][:5]),
            f"{r['last_loss']:.4f}" if r["last_loss"] is not None else "", f"{r['ms']:.2f}" if r["ms"] else "",
            f"{r['tokens_per_s']:,.0f}" if r["tokens_per_s"] else ""] for r in runs])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", metavar="NAME", help="FILE is a training run's log.jsonl: print one object")
    parser.add_argument("--llmc", metavar="MODEL:B", help="FILE is what llm.c printed: print one object")
    parser.add_argument("file")
    args = parser.parse_args()
    try:
        if args.run:
            print(json.dumps(run_summary(args.run, args.file)))
            return
        if args.llmc:
            print(json.dumps(llmc_summary(args.llmc, args.file)))
            return
        results = read_lines(args.file)
    except (OSError, ValueError) as error:
        sys.exit(f"results.py: {args.file}: {error}")
    steps_table(results)
    operations_table(results)
    runs_table(results)


if __name__ == "__main__":
    main()
