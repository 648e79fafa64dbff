#!/usr/bin/env python3
"""wandb_log.py OUTPUT [--follow] [--project NAME]: sends a run's log.jsonl to Weights & Biases (pip install wandb).

A row has the numbers of all lines of a step, under TensorBoard's names: step/loss, val/val_loss, eval/TASK/acc. The
first line of the log is the configuration. OUTPUT/wandb.json keeps the id of the run and the last step that was sent: a
second start continues there, and so it does when training was resumed. --follow waits for new lines until training
ends. With WANDB_MODE=offline nothing is sent, until `wandb sync OUTPUT/wandb/offline-run-*`.
"""
import argparse
import json
import os
import sys
import time


def runs(output):
    return os.path.exists(os.path.join(output, "run.lock"))


def log_lines(output, follow):
    """Yields the lines of OUTPUT/log.jsonl. A resumed run replaces the file by one with fewer lines: it is then read
    from its beginning."""
    path = os.path.join(output, "log.jsonl")
    file, rest = open(path, "rb"), b""
    while True:
        running = runs(output)
        text = file.read()
        *lines, rest = (rest + text).split(b"\n")
        yield from map(json.loads, lines)
        if text:
            continue
        if os.stat(path).st_ino != os.fstat(file.fileno()).st_ino:
            file.close()
            file, rest = open(path, "rb"), b""
        elif follow and running:
            time.sleep(1)
        else:
            return


def rows(lines, sent, output):
    """Yields (step, numbers) for each step after `sent` whose lines are all there."""
    step, numbers = sent, {}
    for line in lines:
        kind = line.get("kind")
        if kind not in ("step", "val", "eval") or line["step"] < max(step, sent + 1):
            continue
        if line["step"] > step and numbers:
            yield step, numbers
            numbers = {}
        step = line["step"]
        prefix = f"{kind}/{line['task']}" if "task" in line else kind
        numbers.update({f"{prefix}/{name}": value for name, value in line.items()
                        if name != "step" and isinstance(value, (int, float))})
    if numbers and not runs(output):
        yield step, numbers


class State:
    """OUTPUT/wandb.json: of which run of the log, under which id, and the last step that was sent."""

    def __init__(self, output, started):
        self.path = os.path.join(output, "wandb.json")
        self.values = {"started": started, "id": None, "sent": -1}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                saved = json.load(file)
            if saved["started"] == started:  # else another run has begun in this folder
                self.values = saved

    def save(self, **changes):
        self.values.update(changes)
        with open(self.path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(self.values, file)
        os.replace(self.path + ".tmp", self.path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--follow", action="store_true", help="until training ends")
    parser.add_argument("--project", default="train_gpt2")
    args = parser.parse_args()
    try:
        import wandb
        lines = log_lines(args.output, args.follow)
        first = next(lines, None)
    except ImportError as error:
        sys.exit(f"wandb_log.py: {error}; pip install wandb")
    except OSError as error:
        sys.exit(f"wandb_log.py: {args.output}: {error.strerror}; name the output folder of a run")
    except ValueError as error:
        sys.exit(f"wandb_log.py: {error}")
    if first is None or first.get("kind") != "run":
        sys.exit(f"wandb_log.py: {args.output}/log.jsonl has no first line yet, with the configuration of a run")
    state = State(args.output, first["started"])
    run = wandb.init(project=args.project, name=os.path.basename(os.path.abspath(args.output)), dir=args.output,
                     config=first, id=state.values["id"], resume="allow")
    state.save(id=run.id)
    for step, numbers in rows(lines, state.values["sent"], args.output):
        run.log(numbers, step=step)
        state.save(sent=step)
    run.finish()


if __name__ == "__main__":
    main()
