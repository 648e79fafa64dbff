#!/usr/bin/env bash
# transformers_gelu_new_bf16.sh: GPT-2's activation of transformers is 60 % off at -3, and zero below -3.05, in bf16.
#
# Guess: gelu_new and gelu_pytorch_tanh are one formula, so a GPT-2 that is loaded in bfloat16 gets either within one
# rounding (0.4 %), and its activation_function is only a question of speed.
# Behaviour: gelu_new, the one in each GPT-2's config.json, takes seven steps and rounds each to bfloat16. 1 + tanh of a
# negative number then has multiples of 2^-8, so the result is a multiple of x / 512: 0.0059 for 0.0036 at -3, and zero
# below -3.05, where the derivative is zero too and nothing is learned. float16 is 39 % off at -3.5.
# gelu_pytorch_tanh computes in float and rounds once; over normally distributed x the errors of gelu_new are 1.4 times
# as large (root of mean squares), and the logits of 12 random layers 2 % less exact. It matters where single values are
# compared. activation_function="gelu_pytorch_tanh" takes the same weights.
# Versions: transformers 5.24.0, torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/gelu.py" <<'CODE'
import torch
from transformers import GPT2Config
from transformers.activations import ACT2FN

print("default", GPT2Config().activation_function)
for dtype in (torch.bfloat16, torch.float16):
    for name in ("gelu_new", "gelu_pytorch_tanh"):
        for value in (-1, -2, -3, -3.5, -4):
            x = torch.tensor([value], dtype=dtype, requires_grad=True)
            y = ACT2FN[name](x)
            y.backward()
            exact = torch.tensor([value], dtype=torch.double, requires_grad=True)
            true = torch.nn.functional.gelu(exact, approximate="tanh")
            true.backward()
            print(f"{str(dtype)[6:]} {name}({value}): {y.item():.3g} for {true.item():.3g}, "
                  f"derivative {x.grad.item():.3g} for {exact.grad.item():.3g}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 transformers==5.24.0
"$folder/env/bin/python" "$folder/gelu.py" 2>"$folder/log" | tee "$folder/got"

want="default gelu_new
bfloat16 gelu_new(-1): -0.158 for -0.159, derivative -0.082 for -0.083
bfloat16 gelu_new(-2): -0.0469 for -0.0454, derivative -0.0889 for -0.0861
bfloat16 gelu_new(-3): -0.00586 for -0.00364, derivative -0.0187 for -0.0116
bfloat16 gelu_new(-3.5): -0 for -0.000616, derivative 0 for -0.00242
bfloat16 gelu_new(-4): -0 for -7.02e-05, derivative 0 for -0.000335
bfloat16 gelu_pytorch_tanh(-1): -0.159 for -0.159, derivative -0.083 for -0.083
bfloat16 gelu_pytorch_tanh(-2): -0.0454 for -0.0454, derivative -0.0859 for -0.0861
bfloat16 gelu_pytorch_tanh(-3): -0.00363 for -0.00364, derivative -0.0116 for -0.0116
bfloat16 gelu_pytorch_tanh(-3.5): -0.000618 for -0.000616, derivative -0.00243 for -0.00242
bfloat16 gelu_pytorch_tanh(-4): -7.01e-05 for -7.02e-05, derivative -0.000336 for -0.000335
float16 gelu_new(-1): -0.159 for -0.159, derivative -0.0829 for -0.083
float16 gelu_new(-2): -0.0454 for -0.0454, derivative -0.0861 for -0.0861
float16 gelu_new(-3): -0.00366 for -0.00364, derivative -0.0117 for -0.0116
float16 gelu_new(-3.5): -0.000854 for -0.000616, derivative -0.00336 for -0.00242
float16 gelu_new(-4): -0 for -7.02e-05, derivative 0 for -0.000335
float16 gelu_pytorch_tanh(-1): -0.159 for -0.159, derivative -0.0829 for -0.083
float16 gelu_pytorch_tanh(-2): -0.0454 for -0.0454, derivative -0.0861 for -0.0861
float16 gelu_pytorch_tanh(-3): -0.00364 for -0.00364, derivative -0.0116 for -0.0116
float16 gelu_pytorch_tanh(-3.5): -0.000616 for -0.000616, derivative -0.00242 for -0.00242
float16 gelu_pytorch_tanh(-4): -7.02e-05 for -7.02e-05, derivative -0.000335 for -0.000335"
diff <(echo "$want") "$folder/got" && echo "as it was"
