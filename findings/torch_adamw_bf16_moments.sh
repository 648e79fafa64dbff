#!/usr/bin/env bash
# torch_adamw_bf16_moments.sh: torch's three forms of AdamW stop at three values of a second moment in bfloat16.
#
# Guess: with weights in bfloat16 the second moment of a constant gradient stops below its square where (1 - beta2) of
# it is less than half a step of bfloat16, at the same value with foreach and fused, which are for speed.
# Behaviour: gradients of 1 should give 1. With beta2 0.99 the default stops at 0.98, foreach=True at 0.84, fused=True
# at 0.80; with 0.999 at 0.5, 0.5 and 0.25, so that steps are twice as long as in float. The forms round at other
# places: the more exact one, which rounds once, stops earliest.
# Versions: torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/moments.py" <<'CODE'
import torch

for beta2 in (0.95, 0.99, 0.999):
    for name, options in (("default", {}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        adam = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0, **options)
        weight.grad = torch.ones(64, dtype=torch.bfloat16)
        for _ in range(10000):
            adam.step()
        print(f"beta2 {beta2}, {name}: second moment {adam.state[weight]['exp_avg_sq'][0].item():g}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/moments.py" | tee "$folder/got"

want="beta2 0.95, default: second moment 0.980469
beta2 0.95, foreach: second moment 0.964844
beta2 0.95, fused: second moment 0.960938
beta2 0.99, default: second moment 0.980469
beta2 0.99, foreach: second moment 0.835938
beta2 0.99, fused: second moment 0.804688
beta2 0.999, default: second moment 0.5
beta2 0.999, foreach: second moment 0.5
beta2 0.999, fused: second moment 0.25"
diff <(echo "$want") "$folder/got" && echo "as it was"
