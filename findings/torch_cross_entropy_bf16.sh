#!/usr/bin/env bash
# torch_cross_entropy_bf16.sh: on a CPU, torch's cross_entropy adds up the losses of bfloat16 logits in bfloat16.
#
# Guess: the losses of a batch's rows are added in float, and their mean is rounded to bfloat16 once, as mean() of
# bfloat16 and F.cross_entropy of a GPU do; label smoothing changes nothing of that.
# Behaviour: nll_loss keeps partial sums in the type of the logits. Rows whose losses are alike, as those of a model
# before its first step, are off by up to 2 %: 1024 rows of 50257 equal logits have a loss of 10.875 (log(50257) is
# 10.825, the nearest bfloat16 10.8125), rows of 50 logits 3.96875 for 3.912. In float16 the loss of 65536 rows is NaN,
# and with label smoothing that of 1000 rows is infinite. Gradients are right. The mean of reduction="none",
# logits.float() and autocast are right, too.
# Versions: torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/losses.py" <<'CODE'
import math

import torch
from torch.nn.functional import cross_entropy

for dtype, rows, classes in ((torch.bfloat16, 16, 50), (torch.bfloat16, 1000, 50), (torch.bfloat16, 16384, 50),
                             (torch.bfloat16, 1024, 50257), (torch.float16, 1000, 50), (torch.float16, 65536, 50)):
    logits, targets = torch.zeros(rows, classes, dtype=dtype), torch.zeros(rows, dtype=torch.long)
    print(f"{str(dtype)[6:]}, {rows} rows, log({classes}) = {math.log(classes):.4f}:", end=" ")
    print(cross_entropy(logits, targets).item(), end=", ")
    print("one by one", cross_entropy(logits, targets, reduction="none").mean().item(), end=", ")
    print("smoothed", cross_entropy(logits, targets, label_smoothing=0.1).item())

logits = torch.zeros(8192, 50, dtype=torch.bfloat16, requires_grad=True)
cross_entropy(logits, torch.zeros(8192, dtype=torch.long)).backward()
print(f"gradient {logits.grad[0, 0] * 8192:.3f} for {1 / 50 - 1:.3f}")
with torch.autocast("cpu", torch.bfloat16):
    print(f"autocast {cross_entropy(logits, torch.zeros(8192, dtype=torch.long)).item():.4f}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/losses.py" | tee "$folder/got"

want="bfloat16, 16 rows, log(50) = 3.9120: 3.9375, one by one 3.90625, smoothed 3.9375
bfloat16, 1000 rows, log(50) = 3.9120: 3.96875, one by one 3.90625, smoothed 3.96875
bfloat16, 16384 rows, log(50) = 3.9120: 3.984375, one by one 3.90625, smoothed 3.984375
bfloat16, 1024 rows, log(50257) = 10.8249: 10.875, one by one 10.8125, smoothed 10.875
float16, 1000 rows, log(50) = 3.9120: 3.908203125, one by one 3.912109375, smoothed inf
float16, 65536 rows, log(50) = 3.9120: nan, one by one 3.912109375, smoothed nan
gradient -0.980 for -0.980
autocast 3.9120"
diff <(echo "$want") "$folder/got" && echo "as it was"
