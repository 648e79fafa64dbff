#!/usr/bin/env python3
"""plot.py LOG... [-o FILE]: loss curves of one or several runs, from their log.jsonl (or output directories).

Prints the curves as text and, where matplotlib is installed, for this python3 or another one, draws them: training loss
thin and smoothed, validation loss with dots. FILE is loss.png beside the log of one run, or out/loss.png for several.
"""
import argparse
import json
import math
import os
import subprocess
import sys

BARS = "▁▂▃▄▅▆▇█"


def read_log(path):
    """The (step, loss) pairs of training and of validation. If a step was repeated after a
    restart, its last loss counts."""
    losses = {"step": {}, "val": {}}
    keys = {"step": "loss", "val": "val_loss"}
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that is being written
            if not isinstance(entry, dict) or entry.get("kind") not in losses:
                continue
            step, loss = entry.get("step"), entry.get(keys[entry["kind"]])
            if isinstance(step, int) and isinstance(loss, (int, float)) and math.isfinite(loss):
                losses[entry["kind"]][step] = loss
    return [sorted(losses[kind].items()) for kind in ("step", "val")]


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


def print_curves(name, train, val):
    print(name)
    for title, points in (("training loss", train), ("validation loss", val)):
        if points:
            (first, start), (last, end) = points[0], points[-1]
            print(f"  {title:15} {start:7.4f} {text_curve(points)} {end:.4f}   steps {first} to {last}")


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


def draw(runs, path):
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        print(f"no picture: {error}; apt-get install python3-matplotlib")
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    for number, (name, train, val) in enumerate(runs):
        color = f"C{number}"
        if train:
            window = max(1, len(train) // 100)
            label = f"{name}: training, mean of {window}" if window > 1 else f"{name}: training"
            axes.plot(*zip(*train), color=color, alpha=0.15, linewidth=0.8)
            axes.plot(*zip(*smoothed(train, window)), color=color, alpha=0.6, linewidth=1.0, label=label)
        if val:
            axes.plot(*zip(*val), color=color, marker="o", markersize=4, label=f"{name}: validation {val[-1][1]:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main():
    sys.stdout.reconfigure(errors="replace")  # terminals without the characters of BARS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("-o", "--output", metavar="FILE")
    args = parser.parse_args()
    runs = []
    for path in args.logs:
        if os.path.isdir(path):
            path = os.path.join(path, "log.jsonl")
        try:
            train, val = read_log(path)
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"plot.py: {error}")
        if not train and not val:
            sys.exit(f"plot.py: {path}: the log has no losses")
        runs.append((os.path.basename(os.path.dirname(os.path.abspath(path))), train, val))
    use_python_with_matplotlib()
    for run in runs:
        print_curves(*run)
    beside = os.path.join(os.path.dirname(path), "loss.png") if len(runs) == 1 else "out/loss.png"
    draw(runs, args.output or beside)


if __name__ == "__main__":
    main()
