#!/usr/bin/env python3
"""How soon a run reaches the loss that nanoGPT's training, in PyTorch, has after some minutes on the same machine.

    TRAIN_SECONDS=240 scripts/quickstart.sh
    dev/bench/nanogpt_minutes.py out/quickstart_bible_austen --seconds 240 --lr 3e-3
    dev/bench/nanogpt_minutes.py out/quickstart_bible_austen --seconds 240 --lr 3e-3,6e-3 --tokens 1024,2048    tunes

Trains the model of a run of train_gpt2 again: the same shape, vocabulary and text, but nanoGPT's initial weights, AdamW
(beta2 0.99, weight decay 0.1, clipping to 1) and cosine to a tenth of --lr, with a tenth of the steps as warmup. The
speed of 20 steps, at a rate near 0, says how many fit into the seconds. Then it prints the first time at which the
run's validation loss is as low. Both programs' times are those of training steps alone: neither validation nor
compilation counts. Both losses are those of the run's --val-tokens. Run nothing else at the same time. Exit code 77:
PyTorch is not installed.
"""
import argparse
import itertools
import json
import math
import os
import sys
import time

from torch_curve import Tokens, read_log, torch  # exits with 77 without PyTorch
from torch_baseline import GPT2, make_optimizer


def curve_of(run):
    """[(seconds, validation loss)] of a run's log."""
    with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    ms = {line["step"]: line["step_ms"] for line in lines if line["kind"] == "step"}
    ends = [0.0, *itertools.accumulate(ms[step] / 1000 for step in sorted(ms))]
    return [(ends[line["step"]], line["val_loss"]) for line in lines if line["kind"] == "val"]


def time_of(curve, loss):
    """The seconds at which the curve has fallen to the loss, between two validations in a line; None: never."""
    for (begin, above), (end, below) in itertools.pairwise(curve):
        if below <= loss:
            return begin + (end - begin) * (above - loss) / (above - below) if above > loss else begin
    return None


class NanoGPT:
    """nanoGPT's training of the run's model on its text."""

    def __init__(self, description, rate, tokens_per_step):
        options, shape = description["options"], description["model"]
        torch.manual_seed(options["seed"])
        self.T, self.rate = options["seq-len"] or shape["positions"], rate
        self.rows = tokens_per_step // self.T
        self.model = GPT2(shape["layers"], shape["heads"], shape["channels"], shape["vocab_size"], self.T)
        for name, p in self.model.named_parameters():
            if name.endswith(("attproj.weight", "fcproj.weight")):
                torch.nn.init.normal_(p, std=0.02 / math.sqrt(2 * shape["layers"]))
            elif name.endswith("bias"):
                torch.nn.init.zeros_(p)
        self.forward = torch.compile(self.model)
        self.optimizer, _ = make_optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.99)
        self.train, self.val = (Tokens(os.path.join(description["directory"], options[key]), self.T, options["seed"])
                                for key in ("train-data", "val-data"))
        self.val_windows = min(len(self.val.windows), options["val-tokens"] // self.T or len(self.val.windows))
        self.bf16 = description["precision"] != "fp32"

    def loss(self, tokens, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            return self.forward(tokens, targets)

    def step(self, step, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(*self.train.batch(step * self.rows, self.rows, "cpu")).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def rate_of(self, step, steps):
        warmup = steps // 10 + 1
        if step < warmup:
            return self.rate * (step + 1) / warmup
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    def val_loss(self):
        """The mean over the first windows, as the run's validations have it."""
        self.val.order, self.val.epoch = range(len(self.val.windows)), 0
        total, whole = 0.0, self.val_windows // self.rows * self.rows
        with torch.no_grad():
            for first in range(0, whole, self.rows):
                total += float(self.loss(*self.val.batch(first, self.rows, "cpu"))) * self.rows
        return total / whole

    def seconds_of_steps(self, begin, end, steps):
        started = time.perf_counter()
        for step in range(begin, end):
            self.step(step, self.rate_of(step, steps))
        return time.perf_counter() - started

    def run(self, seconds):
        """Returns (steps, seconds of training, validation loss)."""
        many = 1 << 30  # the rate stays near 0
        self.seconds_of_steps(0, 3, many)  # compiles
        steps = max(10, int(20 * seconds / self.seconds_of_steps(3, 23, many)))
        return steps, self.seconds_of_steps(0, steps, steps), self.val_loss()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="the --output of a run of train_gpt2 with validations")
    parser.add_argument("--seconds", type=float, default=240, help="how long PyTorch trains [240]")
    parser.add_argument("--lr", default="3e-3", help="its peak rate, or several [3e-3]")
    parser.add_argument("--tokens", default="1024", help="its tokens per step, or several [1024]")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    description, _ = read_log(args.run)
    best, seconds = math.inf, 0.0
    for rate, tokens in itertools.product(args.lr.split(","), args.tokens.split(",")):
        steps, spent, loss = NanoGPT(description, float(rate), int(tokens)).run(args.seconds)
        print(f"PyTorch {torch.__version__}, rate {rate}, {steps} steps of {tokens} tokens: loss {loss:.4f} after "
              f"{spent:.1f} s", flush=True)
        best, seconds = min((best, seconds), (loss, spent))
    curve = curve_of(args.run)
    reached = time_of(curve, best)
    if reached is None:
        print(f"train_gpt2 ends at {curve[-1][1]:.4f} after {curve[-1][0]:.1f} s and does not reach {best:.4f}")
        return 1
    print(f"train_gpt2 has {best:.4f} after {reached:.1f} s, {reached / seconds:.2f} of the time; it ends at "
          f"{curve[-1][1]:.4f} after {curve[-1][0]:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
