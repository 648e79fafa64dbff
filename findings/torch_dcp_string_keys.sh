#!/usr/bin/env bash
# torch_dcp_string_keys.sh: an optimizer saved by torch.distributed.checkpoint comes back without moments, in two ways.
#
# Guess: dcp_to_torch_save gives back the dictionaries that were saved, so a plain load_state_dict takes AdamW's state
# from them. dcp.load fills the state of a new optimizer as it fills its model, or says which keys do not fit.
# Behaviour: names of a checkpoint are paths of strings, so the numbers 0, 1, ... of parameters in the optimizer's state
# come back as "0", "1", ... Optimizer.load_state_dict finds no parameter of that name, and keeps such entries as they
# are, without a word: it does so with any state that does not belong to a parameter. Learning rates do arrive. The next
# step begins with moments of zero and a bias correction of step 1, so it moves each weight by the whole rate, here
# against the direction of the 100 steps before. The unused copies stay in the state, and are saved again.
# dcp.load reads only the names that the given dictionary has. A new optimizer has no moments, so none are read.
# In a dictionary with numbers as keys, dcp.load fills tensors, which it reads in place, but writes a plain value beside
# the old one, under the string. Turning the keys into int helps, as do get_ and set_optimizer_state_dict.
# Versions: torch 2.15.0, numpy 2.3.5, Python 3.11, one process, CPU. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/keys.py" <<'CODE'
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

folder = sys.argv[1]


def training(steps):
    """Returns a model of one weight and its optimizer after some steps with the gradient 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if steps else 0.5, weight_decay=0)
    for _ in range(steps):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    return model, optimizer


def report(name, model, optimizer):
    keys, before = list(optimizer.state_dict()["state"]), model.weight.item()
    moments = "with" if optimizer.state.get(model.weight) else "without"
    model.weight.grad = torch.full((1, 1), -0.01)
    optimizer.step()
    print(f"{name}: keys {keys}, {moments} moments, rate {optimizer.param_groups[0]['lr']}, step",
          f"{model.weight.item() - before:.4f}, then keys {list(optimizer.state_dict()['state'])}")


model, optimizer = training(100)
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
dcp.save(saved, checkpoint_id=folder + "/checkpoint")
torch.save(saved, folder + "/plain.pt")
dcp_to_torch_save(folder + "/checkpoint", folder + "/converted.pt")
for name in ("plain", "converted"):
    loaded = torch.load(f"{folder}/{name}.pt")
    model, optimizer = training(0)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    report(name, model, optimizer)
model, optimizer = training(0)
loaded = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
dcp.load(loaded, checkpoint_id=folder + "/checkpoint")
optimizer.load_state_dict(loaded["optimizer"])
report("dcp.load", model, optimizer)
dcp.save({"best": {1: torch.ones(1), 2: 0.5, "three": 0.7}}, checkpoint_id=folder + "/numbers")
loaded = {"best": {1: torch.zeros(1), 2: 0.0, "three": 0.0}}
dcp.load(loaded, checkpoint_id=folder + "/numbers")
print(loaded)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/keys.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="plain: keys [0], with moments, rate 0.1, step -0.0904, then keys [0]
converted: keys ['0'], without moments, rate 0.1, step 0.1000, then keys ['0', 0]
dcp.load: keys [], without moments, rate 0.1, step 0.1000, then keys [0]
{'best': {1: tensor([1.]), 2: 0.0, 'three': 0.7, '2': 0.5}}"
diff <(echo "$want") "$folder/got" && echo "as it was"
