#!/usr/bin/env bash
# torch_scheduler_resume.sh: a warm-up built after the optimizer was loaded divides the rates of the whole resumed run.
#
# Guess: a run is resumed exactly if optimizer and scheduler are built as before and both load their state, whichever is
# built or loaded first. At worst the first rate is wrong, until the scheduler's next step sets it.
# Behaviour: building LinearLR, ConstantLR or a SequentialLR that begins with one sets the optimizer's rate, and
# scheduler.load_state_dict does not set it back. If the optimizer was loaded before, its rate is now the one of step 0,
# or a factor of the loaded one. LambdaLR computes each rate anew, and is right after one step. LinearLR, ConstantLR,
# CosineAnnealingLR and PolynomialLR multiply the rate that stands in the optimizer, so the error stays: after a warm-up
# from 1 %, a resumed cosine decay runs at a hundredth of the peak's rates until its end. scheduler.get_last_lr() shows
# the right rate until the first step. A lone CosineAnnealingLR sets nothing when it is built, and is right in both
# orders. The docstring of Optimizer.load_state_dict has a warning of overwritten rates, but it does not say that they
# stay so. Building all schedulers first, then loading the optimizer, is exact.
# Versions: torch 2.15.0, numpy 2.3.5, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below, rates of steps 40 to 100 of 100. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/rates.py" <<'CODE'
import math

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, PolynomialLR, SequentialLR

STEPS, WARM, STOP = 100, 10, 40
schedules = {
    "cosine alone": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: min((step + 1) / WARM, 1) * (1 - step / STEPS)),
    "LinearLR alone": lambda optimizer: LinearLR(optimizer, start_factor=0.01, total_iters=WARM),
    "warm-up, cosine": lambda optimizer: SequentialLR(optimizer, [
        LinearLR(optimizer, start_factor=0.01, total_iters=WARM), CosineAnnealingLR(optimizer, STEPS - WARM)], [WARM]),
    "warm-up, polynomial": lambda optimizer: SequentialLR(optimizer, [
        LinearLR(optimizer, start_factor=0.01, total_iters=WARM), PolynomialLR(optimizer, STEPS - WARM)], [WARM]),
}


def new_optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def rates(optimizer, scheduler, steps):
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def line(values):
    return " ".join(f"{values[i]:.4f}" for i in (0, 1, 20, 40, 59))


for name, build in schedules.items():
    optimizer = new_optimizer()
    scheduler = build(optimizer)
    rates(optimizer, scheduler, STOP)
    states = optimizer.state_dict(), scheduler.state_dict()
    right = rates(optimizer, scheduler, STEPS - STOP)
    optimizer = new_optimizer()
    scheduler = build(optimizer)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert all(math.isclose(a, b) for a, b in zip(right, rates(optimizer, scheduler, STEPS - STOP)))
    optimizer = new_optimizer()
    optimizer.load_state_dict(states[0])
    scheduler = build(optimizer)
    scheduler.load_state_dict(states[1])
    print(f"{name}: {line(right)}; optimizer loaded first: {line(rates(optimizer, scheduler, STEPS - STOP))}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/rates.py" 2>"$folder/log" | tee "$folder/got"

want="cosine alone: 0.6545 0.6395 0.3455 0.0955 0.0002; optimizer loaded first: 0.6545 0.6395 0.3455 0.0955 0.0002
LambdaLR: 0.6000 0.5900 0.4000 0.2000 0.0100; optimizer loaded first: 0.1000 0.5900 0.4000 0.2000 0.0100
LinearLR alone: 1.0000 1.0000 1.0000 1.0000 1.0000; optimizer loaded first: 0.0100 0.0100 0.0100 0.0100 0.0100
warm-up, cosine: 0.7500 0.7347 0.4132 0.1170 0.0003; optimizer loaded first: 0.0100 0.0098 0.0055 0.0016 0.0000
warm-up, polynomial: 0.6667 0.6556 0.4444 0.2222 0.0111; optimizer loaded first: 0.0100 0.0098 0.0067 0.0033 0.0002"
diff <(echo "$want") "$folder/got" && echo "as it was"
