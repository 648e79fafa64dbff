#!/usr/bin/env bash
# torch_layernorm_gradients.sh: on a CPU, torch's LayerNorm adds its bias' gradient in bfloat16, and stays at 256.
#
# Guess: sums over the rows of a batch are taken in float and rounded once, as torch's sum, linear and RMSNorm do, and
# with float weights under autocast the gradient of a LayerNorm is a float's in content, too.
# Behaviour: layer_norm's backward adds rows of bfloat16 into an accumulator of bfloat16, one for each thread. 10,000
# ones give 256 with one thread and 512 with two, and under autocast with float weights, too: the gradient is a float
# tensor that holds 256. In float16 it stays at 2048. Embedding's gradient stays there with any number of threads. Of
# random gradients over 8,192 rows, with a mean of a tenth of their deviation, the bias' gradient is 24 % off with one
# thread. So a GPT-2 that is trained in bfloat16 on a CPU learns other LayerNorms with other numbers of threads.
# Versions: torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/gradients.py" <<'CODE'
import torch

ROWS, COLUMNS = 10000, 64


def last_gradient(module, x):
    """Returns the gradient of the last parameter, in its type: the rows' number, if it is summed exactly."""
    module(x).sum().backward()
    *_, gradient = (parameter.grad for parameter in module.parameters())
    return f"{type(module).__name__} {gradient.flatten()[0].item():g} in {str(gradient.dtype)[6:]}"


for threads in (1, 2):
    torch.set_num_threads(threads)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(ROWS, COLUMNS, dtype=dtype)
        for module in (torch.nn.LayerNorm(COLUMNS), torch.nn.RMSNorm(COLUMNS), torch.nn.Linear(COLUMNS, COLUMNS)):
            print(threads, "threads:", last_gradient(module.to(dtype), x))
        tokens = torch.zeros(ROWS, dtype=torch.long)
        print(threads, "threads:", last_gradient(torch.nn.Embedding(2, COLUMNS, dtype=dtype), tokens))
    with torch.autocast("cpu", torch.bfloat16):
        print(threads, "threads, autocast:", last_gradient(torch.nn.LayerNorm(COLUMNS), x.bfloat16()))
    torch.manual_seed(0)
    norm, gradient = torch.nn.LayerNorm(768, dtype=torch.bfloat16), (torch.randn(8192, 768) + 0.1).bfloat16()
    norm(torch.randn(8192, 768).bfloat16()).backward(gradient)
    exact = gradient.double().sum(0)
    error = (norm.bias.grad.double() - exact).norm() / exact.norm()
    print(threads, f"threads, random gradients of 8192 rows: {100 * error:.0f} % off")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/gradients.py" | tee "$folder/got"

want="1 threads: LayerNorm 256 in bfloat16
1 threads: RMSNorm 9984 in bfloat16
1 threads: Linear 9984 in bfloat16
1 threads: Embedding 256 in bfloat16
1 threads: LayerNorm 2048 in float16
1 threads: RMSNorm 10000 in float16
1 threads: Linear 10000 in float16
1 threads: Embedding 2048 in float16
1 threads: LayerNorm 10000 in float32
1 threads: RMSNorm 10000 in float32
1 threads: Linear 10000 in float32
1 threads: Embedding 10000 in float32
1 threads, autocast: LayerNorm 256 in float32
1 threads, random gradients of 8192 rows: 24 % off
2 threads: LayerNorm 512 in bfloat16
2 threads: RMSNorm 9984 in bfloat16
2 threads: Linear 9984 in bfloat16
2 threads: Embedding 256 in bfloat16
2 threads: LayerNorm 4096 in float16
2 threads: RMSNorm 10000 in float16
2 threads: Linear 10000 in float16
2 threads: Embedding 2048 in float16
2 threads: LayerNorm 10000 in float32
2 threads: RMSNorm 10000 in float32
2 threads: Linear 10000 in float32
2 threads: Embedding 10000 in float32
2 threads, autocast: LayerNorm 512 in float32
2 threads, random gradients of 8192 rows: 4 % off"
diff <(echo "$want") "$folder/got" && echo "as it was"
