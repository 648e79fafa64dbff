#!/usr/bin/env bash
# torch_sdpa_low_masks.sh: on a CPU a row masked with -1e9 has a gradient as many times too large as there are keys.
#
# Guess: a row of attention whose keys are all masked by a finite number, as that of a token of padding on the left is
# with -1e9 or torch.finfo(dtype).min, gives the mean of the values, and the gradient of a mean, in each backend.
# Behaviour: the output of scaled_dot_product_attention is that mean. But the CPU's flash kernel, which is the default,
# keeps the logarithm of the row's sum in float: -1e9 + log(1024) is -1e9, and its backward takes each of the 1,024
# weights for 1. The gradient of the row's query, and what the row adds to those of keys and values, is 1,024 times that
# of the math backend, in float and in bfloat16. One such row makes the gradients of a head 8 to 10 times as large here,
# if the row's output has a gradient, as in a loss that does not leave padding out. No warning comes. With -1e4 it is
# right; booleans and minus infinity give zeros.
# Versions: torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/masks.py" <<'CODE'
import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

T, C = 1024, 64
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = [torch.randn(1, 1, T, C) for _ in range(3)]
upstream = torch.randn(1, 1, T, C)


def run(backends, dtype, mask):
    """Returns the output, and the gradients of queries, keys and values."""
    tensors = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
    with sdpa_kernel(backends) if backends else contextlib.nullcontext():
        out = scaled_dot_product_attention(*tensors, attn_mask=mask)
    out.backward(upstream.to(dtype))
    return [tensor.double()[0, 0] for tensor in (out.detach(), *(tensor.grad for tensor in tensors))]


hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
hidden[:, 0] = True  # one token of padding on the left; its own row has nothing to look at
for dtype in (torch.float32, torch.bfloat16):
    for low in (torch.finfo(dtype).min, -1e9, -1e4, float("-inf"), "booleans"):
        mask = ~hidden if low == "booleans" else torch.zeros(T, T, dtype=dtype).masked_fill(hidden, low)
        math = run(SDPBackend.MATH, dtype, mask)
        default = run(None, dtype, mask)
        out = "same" if (math[0] - default[0]).abs().max() < 0.02 else "other"
        ratios = [(a.norm() / b.norm()).item() for a, b in zip(default[1:], math[1:])]
        row = f"{default[1][0].norm() / math[1][0].norm():.0f}" if math[1][0].any() else f"{default[1][0].norm():.0f}/0"
        name = low if low == "booleans" else format(low, ".3g")
        print(f"{str(dtype)[6:]} {name}: {out} output, gradients, default / math: row {row}, all queries "
              f"{ratios[0]:.1f}, keys {ratios[1]:.1f}, values {ratios[2]:.1f}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0
"$folder/env/bin/python" "$folder/masks.py" 2>"$folder/log" | tee "$folder/got"

want="float32 -3.4e+38: same output, gradients, default / math: row 1024, all queries 9.0, keys 9.6, values 7.7
float32 -1e+09: same output, gradients, default / math: row 1024, all queries 9.0, keys 9.6, values 7.7
float32 -1e+04: same output, gradients, default / math: row 1, all queries 1.0, keys 1.0, values 1.0
float32 -inf: same output, gradients, default / math: row 0/0, all queries 1.0, keys 1.0, values 1.0
float32 booleans: same output, gradients, default / math: row 0/0, all queries 1.0, keys 1.0, values 1.0
bfloat16 -3.39e+38: same output, gradients, default / math: row 1024, all queries 9.0, keys 9.6, values 7.7
bfloat16 -1e+09: same output, gradients, default / math: row 1024, all queries 9.0, keys 9.6, values 7.7
bfloat16 -1e+04: same output, gradients, default / math: row 1, all queries 1.0, keys 1.0, values 1.0
bfloat16 -inf: same output, gradients, default / math: row 0/0, all queries 1.0, keys 1.0, values 1.0
bfloat16 booleans: same output, gradients, default / math: row 0/0, all queries 1.0, keys 1.0, values 1.0"
diff <(echo "$want") "$folder/got" && echo "as it was"
