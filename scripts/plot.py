#!/usr/bin/env python3
"""plot.py LOG... [options]: curves of one or several runs, from their log.jsonl (or output directories).

Prints the curves as text and, where matplotlib is installed, for this python3 or another one, draws them: training loss
thin and smoothed, validation loss with dots, the reference that a run compares itself with dashed, and below them the
accuracies of --eval-task. FILE is loss.png beside the log of one run, or out/loss.png for several; its ending chooses
the format, as .svg. The published curves in data/curves are logs, too.
"""
import argparse
import json
import math
import os
import subprocess
import sys

BARS = "▁▂▃▄▅▆▇█"


class Run:
    """A log: (step, value) pairs of training, of validation and of each evaluation, and the reference. If a step was
    repeated after a restart, its last value counts."""

    def __init__(self, path):
        series = {"step": {}, "val": {}}
        self.name = os.path.basename(os.path.dirname(os.path.abspath(path)))
        self.reference, self.beside = {}, ""
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the last line of a run that is being written
                if isinstance(entry, dict):
                    self.add(entry, series)
        self.train, self.val = (sorted(series.pop(kind).items()) for kind in ("step", "val"))
        self.accuracies = {task: sorted(points.items()) for task, points in series.items()}

    def add(self, entry, series):
        kind, step = entry.get("kind"), entry.get("step")
        if kind == "run":
            self.name = entry.get("name", self.name)  # a curve has one
            self.reference = entry.get("reference", {})
        if kind == "val" and entry.get("val_loss") and entry.get("reference_loss"):
            difference = entry["val_loss"] - entry["reference_loss"]
            self.beside = f", {abs(difference):.3f} {'below' if difference < 0 else 'above'} the reference"
        keys = {"step": ("step", "loss"), "val": ("val", "val_loss"), "eval": (entry.get("task"), "acc")}
        name, key = keys.get(kind, (None, None))
        value = entry.get(key)
        if name and isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value):
            series.setdefault(name, {})[step] = value

    def last_step(self):
        return max(points[-1][0] for points in (self.train, self.val) if points)


def smoothed(points, window):
    """The mean of the last `window` points at each point."""
    out, total = [], 0.0
    for i, (step, loss) in enumerate(points):
        total += loss - (points[i - window][1] if i >= window else 0.0)
        out.append((step, total / min(i + 1, window)))
    return out


def text_curve(points, width=60):
    """Bars of the means of `width` groups of neighbouring points, scaled from the lowest to the highest."""
    width = min(width, len(points))
    edges = [len(points) * i // width for i in range(width + 1)]
    means = [sum(loss for _, loss in points[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def print_curves(run):
    print(run.name)
    named = [("training loss", run.train), ("validation loss", run.val), *run.accuracies.items()]
    for title, points in named:
        if points:
            (first, start), (last, end) = points[0], points[-1]
            print(f"  {title:15} {start:7.4f} {text_curve(points)} {end:.4f}   steps {first} to {last}" +
                  (run.beside if points is run.val else ""))


def use_python_with_matplotlib():
    """If this python3 has no matplotlib, restarts the script with one that has, from PATH or /usr/bin."""
    try:
        import matplotlib.pyplot  # noqa: F401
        return
    except ImportError:
        folders = os.environ.get("PATH", "").split(os.pathsep) + ["/usr/bin"]
    for python in [os.path.join(folder, "python3") for folder in folders if folder]:
        try:
            subprocess.run([python, "-c", "import matplotlib.pyplot"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue  # there is no python3, or it cannot draw either
        print(f"drawn by {python}: {sys.executable} has no matplotlib", flush=True)
        os.execv(python, [python, os.path.abspath(__file__)] + sys.argv[1:])


def draw_losses(axes, runs, smooth):
    for number, run in enumerate(runs):
        color = f"C{number}"
        if run.train:
            window = smooth or max(1, len(run.train) // 100)
            label = f"{run.name}: training, mean of {window}" if window > 1 else f"{run.name}: training"
            axes.plot(*zip(*run.train), color=color, alpha=0.15, linewidth=0.8)
            axes.plot(*zip(*smoothed(run.train, window)), color=color, alpha=0.6, linewidth=1.0, label=label)
        if run.val:
            axes.plot(*zip(*run.val), color=color, marker="o", markersize=4,
                      label=f"{run.name}: validation {run.val[-1][1]:.3f}{run.beside}")
    last = max(run.last_step() for run in runs)
    references = {run.reference["name"]: run.reference["losses"] for run in runs if run.reference}
    for name, losses in references.items():
        seen = [point for point in losses if point[0] <= last]
        axes.plot(*zip(*losses[:len(seen) + 1]), color="gray", linestyle="--", linewidth=1.0, label=name)


def draw_accuracies(axes, runs):
    tasks = sorted({task for run in runs for task in run.accuracies})
    for number, run in enumerate(runs):
        for task, points in run.accuracies.items():
            axes.plot(*zip(*points), color=f"C{number}", marker="os^Dv*"[tasks.index(task) % 6], markersize=4,
                      label=f"{run.name}: {task} {points[-1][1]:.3f}")
    axes.set_ylabel("accuracy")


def draw(runs, path, args):
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        print(f"no picture: {error}; apt-get install python3-matplotlib")
        return
    if args.dark:
        plt.style.use("dark_background")
    panels = 1 + any(run.accuracies for run in runs)
    figure, axes = plt.subplots(panels, figsize=(8, 5 + 3 * (panels - 1)), sharex=True, squeeze=False)
    draw_losses(axes[0][0], runs, args.smooth)
    axes[0][0].set_ylabel("loss (nats per token)")
    if panels > 1:
        draw_accuracies(axes[1][0], runs)
    axes[-1][0].set_xlabel("step")
    for panel in axes[:, 0]:
        if "x" in args.log:
            panel.set_xscale("log", nonpositive="mask")  # without step 0
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    if "y" in args.log:
        axes[0][0].set_yscale("log")
    figure.tight_layout()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main():
    sys.stdout.reconfigure(errors="replace")  # terminals without the characters of BARS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("-o", "--output", metavar="FILE")
    parser.add_argument("--log", choices=["x", "y", "xy"], default="", help="logarithmic axes")
    parser.add_argument("--smooth", type=int, metavar="STEPS", help="mean of so many steps [a hundredth of the run]")
    parser.add_argument("--dark", action="store_true", help="on a dark background")
    args = parser.parse_args()
    runs = []
    for path in args.logs:
        if os.path.isdir(path):
            path = os.path.join(path, "log.jsonl")
        try:
            run = Run(path)
        except OSError as error:
            sys.exit(f"plot.py: {path}: {error.strerror}; name the output folder of a run, or its log.jsonl")
        except UnicodeDecodeError as error:
            sys.exit(f"plot.py: {path}: {error}")
        if not run.train and not run.val:
            sys.exit(f"plot.py: {path}: the log has no losses")
        runs.append(run)
    use_python_with_matplotlib()
    for run in runs:
        print_curves(run)
    beside = os.path.join(os.path.dirname(path), "loss.png") if len(runs) == 1 else "out/loss.png"
    draw(runs, args.output or beside, args)


if __name__ == "__main__":
    main()
