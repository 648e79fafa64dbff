#!/usr/bin/env python3
"""sweep.py: trains a grid of options over seeds, and compares the validation losses.

  sweep.py run RESULTS --corpus gcide --seeds 1-4 --base "--layers 4 ..." --grid "--lr 1e-3,2e-3" --grid "..."
  sweep.py compare RESULTS [--baseline "--lr 1e-3"]
  sweep.py plot RESULTS

RESULTS has a JSON line per run; a run that is there is not run again, so a sweep that was stopped goes on. The
candidates of a seed run after each other, so that a slow hour meets all of them. --grid "--program A,B" compares two
builds. Losses are compared in bits per byte, because the loss of a token depends on the vocabulary. Seconds are those
of training steps, and are compared only if all runs had the same device to themselves (--jobs 1).
"""
import argparse
import fcntl
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from corpora import ROOT, shards

def options_of(text):
    """Returns {option: value} of "--lr 1e-3 --keep-best"; the later one of an option counts."""
    return dict(re.findall(r"(--[\w-]+)(?:[ =](?!--)(\S+))?", text))


def text_of(options):
    return " ".join(f"{name} {value}".rstrip() for name, value in options.items())


def read_lines(path):
    """Returns the JSON lines of a file, without a last one that is incomplete."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


class Training:
    """A run in the background, in a folder of its own."""

    def __init__(self, run, data, args):
        self.run, self.folder, self.begin = run, tempfile.mkdtemp(prefix="sweep"), time.time()
        options = options_of(run["options"])
        words = [options.pop("--program", args.program), *text_of(options).split(), *data, "--seed", str(run["seed"]),
                 *f"--output {self.folder} --checkpoint-every 0 --sample-every 0 --reference none --quiet".split()]
        with open(f"{self.folder}/errors", "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                                            env={**os.environ, "OMP_NUM_THREADS": str(run["threads"])})

    def lines(self, kind):
        return [line for line in read_lines(f"{self.folder}/log.jsonl") if line["kind"] == kind]

    def result(self):
        """Returns the line of the results. A loss that is not finite is a result, too: val_loss is null then."""
        steps, validations = self.lines("step"), [line for line in self.lines("val") if line["val_loss"] is not None]
        diverged = bool(steps) and steps[-1]["loss"] is None
        if self.process.returncode and not diverged or not validations:
            with open(f"{self.folder}/errors", encoding="utf-8") as errors:
                sys.exit(f"sweep.py: {shlex.join(self.process.args)} ended with exit code {self.process.returncode} "
                         f"and {len(validations)} validations: {errors.read()[-1000:]}")
        header, last = self.lines("run")[0], {} if diverged else validations[-1]
        times = [0.0, *itertools.accumulate(line["step_ms"] / 1000 for line in steps)]
        curve = [[line["step"], line["step"] * header["tokens_per_step"], round(times[line["step"]], 3),
                  line["val_loss"]] for line in validations]
        return {**self.run, "version": header["version"], "device": header["device"],
                "parameters": header["model"]["parameters"], "val_loss": last.get("val_loss"),
                "bits_per_byte": last.get("bits_per_byte"), "curve": curve,
                "wall_seconds": round(time.time() - self.begin, 1)}

    def remove(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_all(waiting, data, results, args):
    """Runs what waits, at most args.jobs at once, and appends a line to the results as each one ends."""
    running, done, total, clear = [], 0, len(waiting), "\r\x1b[K" * sys.stdout.isatty()
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                running.append(Training(waiting.pop(0), data, args))
            time.sleep(0.1)
            if clear:
                text = "".join(f" | seed {t.run['seed']} {t.run['name']} step {len(t.lines('step'))}" for t in running)
                print(f"{clear}{done}/{total}{text}"[:shutil.get_terminal_size().columns], end="", flush=True)
            for training in [training for training in running if training.process.poll() is not None]:
                line, done = training.result(), done + 1
                results.write(json.dumps(line) + "\n")
                results.flush()
                running.remove(training)
                training.remove()
                print(f"{clear}{done}/{total} seed {line['seed']} {line['name']}: loss {line['val_loss']}, "
                      f"{line['wall_seconds']} s", flush=True)
    finally:
        for training in running:
            training.remove()


def run(args):
    os.makedirs(os.path.dirname(os.path.abspath(args.results)), exist_ok=True)
    results = open(args.results, "a+", encoding="utf-8")
    fcntl.flock(results, fcntl.LOCK_EX)  # waits for another sweep into this file
    with open(args.results, "rb") as file:
        results.truncate(file.read().rfind(b"\n") + 1)  # removes a line that was cut
    have = [(line["corpus"], line["vocab"], line["options"], line["seed"]) for line in read_lines(args.results)]
    axes = [[(name, value) for name, values in options_of(item).items() for value in values.split(",")]
            for item in args.grid]
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last) + 1) if last else [int(seed) for seed in args.seeds.split(",")]
    waiting = []
    for seed, choice in itertools.product(seeds, itertools.product(*axes)):
        options = text_of({**options_of(args.base), **dict(choice)})
        if (args.corpus, args.vocab, options, seed) not in have:
            waiting.append({"corpus": args.corpus, "vocab": args.vocab, "options": options, "seed": seed,
                            "name": text_of(dict(choice)), "jobs": args.jobs,
                            "threads": max(1, os.cpu_count() // args.jobs)})
    print(f"{len(waiting)} runs to do, {len(have)} in {args.results}", flush=True)
    if waiting:
        run_all(waiting, shards(args.corpus, args.vocab, args.program), results, args)


def standard_error(values):
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


class Candidate:
    """The runs of the same options on the same corpus. The curve is a mean over seeds, in bits per byte."""

    def __init__(self, runs):
        self.runs, self.finished = runs, [run for run in runs if run["val_loss"] is not None]
        self.losses, self.bits = [[run[key] for run in self.finished] for key in ("val_loss", "bits_per_byte")]
        self.mean = statistics.fmean(self.bits) if self.bits else math.nan
        self.error = standard_error(self.bits)
        curves = [[[*point[:3], point[3] * run["bits_per_byte"] / run["val_loss"]] for point in run["curve"]]
                  for run in self.finished]
        self.points = list(zip(*curves))  # for each validation [step, tokens, seconds, bits per byte] of each seed
        self.curve = [[statistics.fmean(values) for values in zip(*point)] for point in self.points]

    def differences(self, other):
        """Bits per byte less the other's, of each seed that both have: they began with the same weights and data."""
        theirs = {run["seed"]: bits for run, bits in zip(other.finished, other.bits)}
        return [bits - theirs[run["seed"]] for run, bits in zip(self.finished, self.bits) if run["seed"] in theirs]

    def reaches(self, bits, column):
        """Returns the step (column 0) or the seconds (2) at which the mean curve, with lines between validations, falls
        to so many bits per byte; None if it does not."""
        for before, after in zip(self.curve, self.curve[1:]):
            if after[3] <= bits < before[3]:
                return before[column] + (after[column] - before[column]) * (before[3] - bits) / (before[3] - after[3])
        return None


def read_results(path):
    """Yields a corpus, {name: Candidate}, and whether seconds can be compared. A name has the options that differ."""
    corpora = {}
    for line in read_lines(path):
        options = f"{line['options']} --vocab {line['vocab']}"
        corpora.setdefault(line["corpus"], {}).setdefault(options, []).append(line)
    for corpus, groups in corpora.items():
        shared = set.intersection(*(set(options_of(options).items()) for options in groups))
        found = {text_of(dict(item for item in options_of(options).items() if item not in shared)) or "all":
                 Candidate(runs) for options, runs in groups.items()}
        alone = {(run["device"], run["threads"], run["jobs"]) for c in found.values() for run in c.runs}
        yield corpus, found, len(alone) == 1 and alone.pop()[2] == 1


def compare(args):
    """Prints a table in Markdown for each corpus."""
    for corpus, found, timed in read_results(args.results):
        name = next(iter(found)) if args.baseline is None else args.baseline
        if name not in found:
            sys.exit(f"sweep.py: {corpus}: --baseline {name!r} is none of {list(found)}")
        base = found[name]
        print(f"{corpus}, against {name}\n\n| candidate | runs | loss | bits per byte | standard error | difference | "
              "in standard errors | steps to its loss | seconds to its loss |\n|" + "---|" * 9)
        for label, c in found.items():
            differences = c.differences(base)
            difference, error = statistics.fmean(differences or [math.nan]), standard_error(differences)
            cells = [len(c.runs), statistics.fmean(c.losses or [math.nan]), c.mean, c.error, difference,
                     difference / error if error > 0 else math.nan, c.reaches(base.mean, 0),
                     c.reaches(base.mean, 2) if timed else None]
            forms = ["{}", "{:.4f}", "{:.4f}", "{:.4f}", "{:+.4f}", "{:+.1f}", "{:.0f}", "{:.0f}"]
            shown = ["-" if v is None or v != v else form.format(v) for form, v in zip(forms, cells)]
            shown[0] += f", {len(c.runs) - len(c.bits)} not finite" * (len(c.bits) < len(c.runs))
            print(f"| {label} | " + " | ".join(shown) + " |")
        print()


def plot(args):
    """Draws RESULTS_CORPUS.svg: the mean and the range of the seeds, against tokens and, if they can be compared,
    against seconds."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        sys.exit(f"sweep.py: no picture: {error}; apt-get install python3-matplotlib")
    for corpus, found, timed in read_results(args.results):
        figure, axes = plt.subplots(1, 1 + timed, figsize=(8 * (1 + timed), 5), squeeze=False)
        for axis, column, unit in zip(axes[0], (1, 2), ("tokens", "seconds of training")):
            for label, c in found.items():
                x = [point[column] for point in c.curve]
                axis.plot(x, [point[3] for point in c.curve], label=f"{label}: {c.mean:.4f}, {len(c.bits)} seeds")
                low, high = ([pick(seed[3] for seed in seeds) for seeds in c.points] for pick in (min, max))
                axis.fill_between(x, low, high, alpha=0.2)
            axis.set(xlabel=unit, ylabel="bits per byte")
            axis.set_ylim(top=max((c.curve[len(c.curve) // 6 or -1][3] for c in found.values() if c.curve), default=1))
            axis.legend(fontsize="small")
        path = f"{os.path.splitext(args.results)[0]}_{os.path.basename(corpus)}.svg"
        figure.tight_layout()
        figure.savefig(path)
        print(f"picture: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "compare", "plot"):
        commands.add_parser(name).add_argument("results", metavar="RESULTS")
    add = commands.choices["run"].add_argument
    add("--corpus", required=True, metavar="bible_austen|gcide|DIR", help="DIR: shards and a tokenizer")
    add("--vocab", type=int, default=4096, metavar="TOKENS", help="vocabulary of the first two [4096]")
    add("--base", default="", metavar="OPTIONS", help="options of all candidates")
    add("--grid", action="append", default=[], metavar="'--OPTION A,B'", help="values to combine")
    add("--seeds", default="1", metavar="1-4|1,2")
    add("--jobs", type=int, default=1, help="runs at once [1]")
    add("--program", default=f"{ROOT}/train_gpt2")
    commands.choices["compare"].add_argument("--baseline", metavar="NAME", help="as in the table [the first one]")
    args = parser.parse_args()
    if args.command != "run" and not os.path.exists(args.results):
        sys.exit(f"sweep.py: {args.results}: there is no such file")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(75))
    {"run": run, "compare": compare, "plot": plot}[args.command](args)


if __name__ == "__main__":
    main()
