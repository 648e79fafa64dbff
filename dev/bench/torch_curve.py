#!/usr/bin/env python3
"""Trains a run again in PyTorch, with the same initial weights, tokens and learning rates, and compares the losses.

    ./train_gpt2 ... --steps 1 --warmup 0 --lr 0 --output first     the initial weights
    ./train_gpt2 ... --init first --output run                      the run
    dev/bench/torch_curve.py run                                    its steps in PyTorch
    dev/bench/torch_curve.py run --noise other                      other: the same run with another --seed

The model, the options and the learning rate of each step come from the run's log.jsonl, the weights from its --init.
The order of the tokens is computed as in data/dataloader.cpp.

In bf16 the two programs round differently, and small differences grow with the steps. Two runs with different seeds
differ more. Only the first losses must agree; --first and --tolerance say how many and how closely. The last line
printed has their largest difference, and each program's mean loss over the last tenth of the steps. Exit code 0: the
first losses agree; 1: they do not, or the run cannot be read; 77: PyTorch is not installed.
"""
import argparse
import glob
import json
import os
import sys

try:
    import numpy as np
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from torch_baseline import GPT2

MASK = np.uint64(0xffffffff)


def philox(seed, stream, index):
    """The first word of Philox4x32-10 for an array of indices (base/random.h)."""
    x = [index & MASK, index >> np.uint64(32)]
    x += [np.full_like(index, stream >> shift & 0xffffffff) for shift in (0, 32)]
    key = [seed & 0xffffffff, seed >> 32]
    for _ in range(10):
        p0, p1 = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [p1 >> np.uint64(32) ^ x[1] ^ np.uint64(key[0]), p1 & MASK, p0 >> np.uint64(32) ^ x[3] ^ np.uint64(key[1]),
             p0 & MASK]
        key = [key[0] + 0x9E3779B9 & 0xffffffff, key[1] + 0xBB67AE85 & 0xffffffff]
    return x[0]


def epoch_order(windows, epoch, seed):
    """The windows of an epoch in the order of window_at (data/dataloader.cpp)."""
    half = 1
    while 1 << 2 * half < windows:
        half += 1
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    x, outside = np.arange(windows, dtype=np.uint64), np.arange(windows)
    while len(outside):
        left, right = x[outside] >> shift, x[outside] & mask
        for step in range(8):
            mixed = philox(seed, 0xda7a000000000000 + epoch, np.uint64(step << 32) | right)
            left, right = right, left ^ mixed & mask
        x[outside] = left << shift | right
        outside = outside[x[outside] >= windows]
    return x.astype(np.int64)


class Tokens:
    """Windows of T + 1 tokens of the shards, in a run's order."""

    def __init__(self, pattern, T, seed):
        self.T, self.seed, self.order, self.epoch = T, seed, None, None
        self.windows = []
        for path in sorted(glob.glob(pattern)):
            header = np.fromfile(path, dtype="<i4", count=256)
            if header[0] != 20240520:
                sys.exit(f"{path}: no token shard")
            shard = np.memmap(path, dtype="<u2" if header[1] == 1 else "<u4", mode="r", offset=1024)
            self.windows += [(shard, w * T) for w in range((len(shard) - 1) // T)]

    def window(self, position):
        epoch, place = divmod(position, len(self.windows))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, epoch_order(len(self.windows), epoch, self.seed)
        shard, begin = self.windows[self.order[place]]
        return shard[begin:begin + self.T + 1].astype(np.int64)

    def batch(self, first, count, device):
        rows = torch.from_numpy(np.stack([self.window(first + i) for i in range(count)])).to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_safetensors(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        tensors = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "F32":
                sys.exit(f"{path}: {name} is {about['dtype']}, F32 is needed (--export-dtype fp32)")
            file.seek(begin + about["data_offsets"][0])
            count = (about["data_offsets"][1] - about["data_offsets"][0]) // 4
            tensors[name] = torch.from_numpy(np.fromfile(file, dtype="<f4", count=count).reshape(about["shape"]))
    return tensors


def load(model, tensors):
    """Copies weights that have Hugging Face's names. Its Conv1D matrices are the transposes of nn.Linear's."""
    def copy(module, name, transposed=False):
        weight = tensors[f"transformer.{name}.weight"]
        module.weight.copy_(weight.T if transposed else weight)
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(tensors[f"transformer.{name}.bias"])
    with torch.no_grad():
        copy(model.wte, "wte"), copy(model.wpe, "wpe"), copy(model.lnf, "ln_f")
        for i, block in enumerate(model.blocks):
            copy(block.ln1, f"h.{i}.ln_1"), copy(block.ln2, f"h.{i}.ln_2")
            for module, name in ((block.qkv, "attn.c_attn"), (block.attproj, "attn.c_proj"), (block.fc, "mlp.c_fc"),
                                 (block.fcproj, "mlp.c_proj")):
                copy(module, f"h.{i}.{name}", transposed=True)


def read_log(run):
    """The description of the run, and its step lines."""
    path = os.path.join(run, "log.jsonl")
    try:
        with open(path) as file:
            lines = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        sys.exit(f"torch_curve.py: {path}: {error}")
    descriptions = [line for line in lines if line["kind"] == "run"]
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}  # a resumed run may have repeated some
    if not descriptions or not steps:
        sys.exit(f"torch_curve.py: {path} has no steps of a run")
    return descriptions[0], list(steps.values())


def newest_weights(directory):
    """model.safetensors of a directory, or of the newest checkpoint in it."""
    found = sorted(glob.glob(os.path.join(directory, "step_*", "model.safetensors")))
    return found[-1] if found else os.path.join(directory, "model.safetensors")


class Training:
    def __init__(self, description, device, compiled):
        self.options, shape = description["options"], description["model"]
        if self.options["optimizer"] != "adamw" or not self.options["init"]:
            sys.exit("the run must have been started with --init and --optimizer adamw")
        self.T, self.device = self.options["seq-len"] or shape["positions"], device
        self.windows = description["tokens_per_step"] // self.T
        self.precision = description["precision"]
        self.model = GPT2(shape["layers"], shape["heads"], shape["channels"], shape["vocab_size"],
                          shape["positions"]).to(device)
        load(self.model, read_safetensors(newest_weights(os.path.join(description["directory"], self.options["init"]))))
        self.forward = torch.compile(self.model) if compiled else self.model
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.options["weight-decay"]},
             {"params": others, "weight_decay": 0.0}],
            betas=(self.options["beta1"], self.options["beta2"]), eps=self.options["eps"])
        self.tokens = Tokens(os.path.join(description["directory"], self.options["train-data"]), self.T,
                             self.options["seed"])

    def step(self, line, micro_batch):
        """One optimizer step on the tokens of the logged step; returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = line["lr"]
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for first in range(0, self.windows, micro_batch):
            count = min(micro_batch, self.windows - first)
            tokens, targets = self.tokens.batch(line["step"] * self.windows + first, count, self.device)
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision != "fp32"):
                loss = self.forward(tokens, targets) * (count / self.windows)
            loss.backward()
            total += loss.detach()
        if self.options["grad-clip"] > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options["grad-clip"])
        self.optimizer.step()
        return float(total)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="the --output of the run")
    parser.add_argument("--noise", metavar="RUN", help="a run like it with another --seed")
    parser.add_argument("--steps", type=int, help="how many of its steps [all]")
    parser.add_argument("--micro-batch", type=int, help="windows at a time [as in the run]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--first", type=int, help="how many of the first losses must agree [a tenth]")
    parser.add_argument("--tolerance", type=float, default=0.01, help="their largest relative difference [0.01]")
    args = parser.parse_args()

    description, lines = read_log(args.run)
    lines = lines[:args.steps] if args.steps else lines
    training = Training(description, args.device, args.compile)
    micro_batch = args.micro_batch or training.options["micro-batch"]
    if not isinstance(micro_batch, int) or micro_batch < 1:
        sys.exit(f"torch_curve.py: the run has --micro-batch {micro_batch}; "
                 "give a number of windows with --micro-batch")
    ours, theirs, every = [line["loss"] for line in lines], [], max(1, len(lines) // 20)
    tenth = max(1, len(lines) // 10)
    for line in lines:
        theirs.append(training.step(line, micro_batch))
        if line["step"] % every == 0:
            print(f"step {line['step']:5d}  train_gpt2 {line['loss']:.6f}  PyTorch {theirs[-1]:.6f}  "
                  f"difference {theirs[-1] - line['loss']:+.6f}", flush=True)
    first = args.first or tenth
    worst = max(abs(a - b) / b for a, b in zip(theirs[:first], ours))
    means = {"train_gpt2": ours, "PyTorch": theirs}
    if args.noise:
        means["another seed"] = [line["loss"] for line in read_log(args.noise)[1]][:len(lines)]
    print(f"the first {first} losses differ by at most {worst:.1e}; mean of the last {tenth}: "
          + ", ".join(f"{name} {sum(losses[-tenth:]) / tenth:.4f}" for name, losses in means.items()))
    return 0 if worst <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
