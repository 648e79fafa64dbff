#!/usr/bin/env python3
"""Two runs of train_gpt2 that take turns of some seconds, on a machine whose speed changes from minute to minute.

    dev/bench/turns.py './train_gpt2 --model d12 -b 1 -t 256 -d 256 -i "data/x/train_*.bin" --moments '{fp32,8bit}

Starts both commands and stops each with SIGSTOP while the other one trains. Prints the steps of each, the time it had,
and the second one's tokens/s as a ratio to the first one's. Each command gets a folder of its own, no validation, no
samples and no checkpoints. The runs must have equal batches. Run nothing else at the same time.
"""
import argparse
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time

WARMUP_STEPS = 4


def steps(log):
    """The times of the finished steps in ms."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["step_ms"] for line in lines if line.endswith("}") and "step_ms" in line]


def start(command, folder):
    """Starts a run, and stops it after its first steps. Returns the process and the path of its log."""
    log = folder / "log.jsonl"
    endless = ["--steps", "1000000", "-n", "0", "--val-every", "0", "--sample-every", "0", "-o", folder]
    run = subprocess.Popen([*shlex.split(command), *endless], stdout=subprocess.DEVNULL)
    while len(steps(log)) < WARMUP_STEPS:
        if run.poll() is not None:
            sys.exit(f"{command} ended with {run.returncode} before step {WARMUP_STEPS}")
        time.sleep(0.2)
    run.send_signal(signal.SIGSTOP)
    return run, log


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs=2, metavar="COMMAND")
    parser.add_argument("--seconds", type=float, default=2.5, help="the length of a turn")
    parser.add_argument("--turns", type=int, default=40, help="of each run")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for i, command in enumerate(options.commands):
                runs.append(start(command, pathlib.Path(scratch) / f"run{i}"))
            before, had = [len(steps(log)) for _, log in runs], [0.0, 0.0]
            for turn in range(2 * options.turns):
                i = (turn + turn // 2) % 2  # 0 1 1 0 0 1 1 0 ...: a machine that slows down favours neither run
                begin = time.monotonic()
                runs[i][0].send_signal(signal.SIGCONT)
                time.sleep(options.seconds)
                runs[i][0].send_signal(signal.SIGSTOP)
                had[i] += time.monotonic() - begin
            rates = []
            for i, (command, (_, log)) in enumerate(zip(options.commands, runs)):
                times = steps(log)[before[i]:]
                rates.append(len(times) / had[i])
                quarter = sorted(times)[len(times) // 4]
                print(f"{command}\n    {len(times)} steps in {had[i]:.1f} s: {1000 / rates[i]:.1f} ms a step, "
                      f"a quarter of them at most {quarter:.1f}")
            print(f"second / first: {rates[1] / rates[0]:.3f} of the tokens/s")
        finally:
            for run, _ in runs:
                run.kill()
                run.wait()


if __name__ == "__main__":
    main()
