#!/usr/bin/env python3
"""core.py DIR [OPTIONS]: prints CORE and HellaSwag's accuracy of a model beside the published values of GPT-2.

DIR is a Hugging Face directory, a checkpoint or the output of a run. OPTIONS are those of `train_gpt2 eval`, such as
--ranks 2. data/core.sh and data/hellaswag.sh fetch the tasks; without HellaSwag its lines are left out. The variables
PROGRAM and DATA name another program than ./train_gpt2 and another folder than data/.

CORE is the mean of 22 tasks of (accuracy - baseline) / (1 - baseline), as nanochat and DCLM compute it: rows shuffled
by random.Random(1337), the examples in front of row i drawn from the others by random.Random(1234 + i), and
<|endoftext|> first.
"""

import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DATA", ROOT / "data"))
BUNDLE = DATA / "core/eval_bundle"
HELLASWAG = DATA / "hellaswag/hellaswag_val.jsonl"
PUBLISHED = [("CORE", "mean of 22 centered accuracies, nanochat",
              {"124M": "0.1139", "350M": "0.1849", "774M": "0.2146", "1558M": "0.2565"}),
             ("HellaSwag acc", "lowest loss of the ending, llm.c", {"124M": "0.2859", "1558M": "0.3842"}),
             ("HellaSwag acc_mean", "lowest loss per token, llm.c", {"124M": "0.2955", "1558M": "0.4893"})]


def render(rows, shots, delimiter):
    """Returns the rows of a task with `shots` examples in front of each, as `train_gpt2 eval` reads them."""
    random.Random(1337).shuffle(rows)
    rendered = []
    for i, row in enumerate(rows):
        others = [k for k in range(len(rows)) if k != i]
        drawn = random.Random(1234 + i).sample(others, shots) if shots else []
        examples = "".join(text(rows[k], delimiter) + "\n\n" for k in drawn)
        row = dict(row, delimiter="")  # it is part of the context, so it is not scored
        if "context_options" in row:
            row["context_options"] = [examples + context + delimiter for context in row["context_options"]]
        elif "query" in row:
            row["query"] = examples + row["query"] + delimiter
        else:
            row["context"] = examples + row["context"].strip() + delimiter
        rendered.append(row)
    return rendered


def text(row, delimiter):
    """Returns a row with the right answer."""
    if "context_options" in row:
        return row["context_options"][row["gold"]] + delimiter + row["continuation"]
    if "query" in row:
        return row["query"] + delimiter + row["choices"][row["gold"]]
    return row["context"].strip() + delimiter + row["continuation"]


def read_bundle():
    """Returns {label: (rendered rows, accuracy of chance)}."""
    try:
        import yaml
    except ImportError:
        sys.exit("core.py: PyYAML is missing: apt-get install python3-yaml")
    if not (BUNDLE / "core.yaml").exists():
        sys.exit(f"core.py: {BUNDLE}/core.yaml is missing; data/core.sh fetches it")
    with open(BUNDLE / "eval_meta_data.csv", encoding="utf-8") as file:
        baselines = {line["Eval Task"]: float(line["Random baseline"]) / 100 for line in csv.DictReader(file)}
    tasks = {}
    for task in yaml.safe_load((BUNDLE / "core.yaml").read_text("utf-8"))["icl_tasks"]:
        lines = (BUNDLE / "eval_data" / task["dataset_uri"]).read_text("utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        rendered = render(rows, task["num_fewshot"][0], task.get("continuation_delimiter", " "))
        tasks[task["label"]] = rendered, baselines[task["label"]]
    return tasks


def evaluate(model, files, *options):
    """Returns {task: {"acc": .., "acc_mean": ..}}, as the program prints them."""
    program = os.environ.get("PROGRAM", str(ROOT / "train_gpt2"))
    command = [program, "eval", "--init", model, "--task", ",".join(map(str, files)), *options]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        sys.exit(f"core.py: {program}: {error.strerror}; run make, or name the program with PROGRAM=...")
    if done.returncode:
        sys.exit(done.returncode)
    sys.stderr.write(done.stdout)
    lines = (line.split(None, 1) for line in done.stdout.splitlines())
    return {name: {key: float(value) for key, value in re.findall(r", (\w+) ([0-9.]+)", rest)} for name, rest in lines}


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__.strip())
    model, options = sys.argv[1], sys.argv[2:]
    tasks = read_bundle()
    with tempfile.TemporaryDirectory() as folder:
        for label, (rows, _) in tasks.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            Path(folder, f"{label}.jsonl").write_text(lines, "utf-8")
        results = evaluate(model, [Path(folder, f"{label}.jsonl") for label in tasks], "--prepend-eot", *options)
    print(f"{'task':36} {'rows':>6} {'accuracy':>9} {'centered':>9}")
    centered = []
    for label, (rows, baseline) in tasks.items():
        accuracy = results[label].get("acc_mean", results[label]["acc"])
        centered.append((accuracy - baseline) / (1 - baseline))
        print(f"{label:36} {len(rows):6} {accuracy:9.4f} {centered[-1]:9.4f}")
    ours = {"CORE": sum(centered) / len(centered)}
    if HELLASWAG.exists():
        result = evaluate(model, [HELLASWAG], *options)[HELLASWAG.stem]
        ours |= {"HellaSwag acc": result["acc"], "HellaSwag acc_mean": result["acc_mean"]}
    sizes = ["124M", "350M", "774M", "1558M"]
    print(f"\n{'':19} {'this model':>10}" + "".join(f"{'GPT-2 ' + size:>12}" for size in sizes) + "  protocol")
    for name, protocol, published in PUBLISHED:
        if name in ours:
            values = "".join(f"{published.get(size, ''):>12}" for size in sizes)
            print(f"{name:19} {ours[name]:10.4f}{values}  {protocol}")


if __name__ == "__main__":
    main()
