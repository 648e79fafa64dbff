#!/usr/bin/env bash
# torchao_adamw_small_moments.sh: torchao's 8-bit AdamW throws elements beside large ones hundreds of steps away.
#
# Guess: where a block of 256 elements has one large gradient, the moments of the small ones are stored as zeros, so
# that these elements move less than with torch's AdamW, as they do with bitsandbytes' AdamW8bit and the same codes.
# Behaviour: the codes of both moments reach down to 3e-7 of the block's largest number, and the second moment is a
# square. With gradients of 1e-3 times the largest one it is often stored as zero while the first moment is not, and the
# next step divides by epsilon: in 100 steps elements move 16,000 learning rates, where AdamW moves them 46. FP8 moments
# (AdamWFp8) do so from 1e-2 on. bitsandbytes' move 13. No step warns.
# Versions: torchao 0.18.0, bitsandbytes 0.50.2, torch 2.15.0 on a CPU, Python 3.11, g++ 12 of Debian (torchao compiles
# its step). The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/moments.py" <<'CODE'
import torch
from bitsandbytes.optim import AdamW8bit
from torch.optim import AdamW
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim import AdamWFp8 as TorchaoAdamWFp8


def farthest(optimizer, ratio):
    """Returns how far an element with gradients of 10 * ratio moves, beside a column with gradients of 10."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(256, 256))
    adam = optimizer([weight], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        weight.grad = 10 * ratio * torch.randn(256, 256)
        weight.grad[:, 0] = 10.0
        adam.step()
    return weight[:, 1:].abs().max().item() / 1e-3


ratios = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
print("gradients:", *(f"{ratio:g}" for ratio in ratios))
for optimizer in (AdamW, AdamW8bit, TorchaoAdamW8bit, TorchaoAdamWFp8):
    print(optimizer.__module__.split(".")[0], optimizer.__name__, *(f"{farthest(optimizer, r):.1g}" for r in ratios))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 torchao==0.18.0 bitsandbytes==0.50.2 numpy==2.3.5 setuptools
TMPDIR="$folder" "$folder/env/bin/python" "$folder/moments.py" 2>/dev/null | tee "$folder/got"

want="gradients: 1 0.1 0.01 0.001 0.0001
torch AdamW 5e+01 5e+01 5e+01 5e+01 5e+01
bitsandbytes AdamW8bit 5e+01 5e+01 6e+01 1e+01 7
torchao AdamW8bit 5e+01 5e+01 9e+01 2e+04 8e+04
torchao AdamWFp8 4e+01 4e+01 1e+03 6e+05 6e+04"
diff <(echo "$want") "$folder/got" && echo "as it was"
