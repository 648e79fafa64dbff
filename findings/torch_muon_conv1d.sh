#!/usr/bin/env bash
# torch_muon_conv1d.sh: torch.optim.Muon moves transformers' GPT-2 by half in c_fc, and twice as far in mlp.c_proj.
#
# Guess: Muon makes the update of a matrix orthogonal. That does not depend on whether a matrix is stored as (out, in),
# as in nn.Linear and nanoGPT, or as (in, out), as in the Conv1D of transformers' GPT-2: both train alike at one rate.
# Behaviour: the direction is the same, but the default adjust_lr_fn ("original") multiplies by the root of
# max(1, rows / columns) and takes the rows for outputs. Of the same gradient, transposed, GPT-2's c_attn gets 0.58 of
# the step that nn.Linear gets, c_fc 0.5 and mlp.c_proj 2. adjust_lr_fn="match_rms_adamw" does not depend on the order.
# Muon's weight_decay is 0.1 by default, ten times AdamW's, and it takes the embeddings, which it is not made for,
# without a word: it refuses only what is not a matrix.
# Versions: torch 2.15.0, transformers 5.24.0, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/muon.py" <<'CODE'
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=4, n_embd=128, n_positions=64, vocab_size=256))
tokens = torch.randint(256, (8, 64))
model(tokens, labels=tokens).loss.backward()
block = model.transformer.h[0]
matrices = {"c_attn": block.attn.c_attn, "attn.c_proj": block.attn.c_proj, "c_fc": block.mlp.c_fc,
            "mlp.c_proj": block.mlp.c_proj}


def step(weight, gradient, adjust):
    """Returns how far one step at the rate 1 moves the weight."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=1, weight_decay=0, adjust_lr_fn=adjust).step()
    return parameter.detach() - weight


for adjust in ("original", "match_rms_adamw"):
    for name, layer in matrices.items():
        conv1d = step(layer.weight.detach(), layer.weight.grad, adjust)
        linear = step(layer.weight.detach().T, layer.weight.grad.T, adjust).T
        cosine = (conv1d * linear).sum() / conv1d.norm() / linear.norm()
        print(f"{adjust} {name} {tuple(layer.weight.shape)}: {conv1d.norm() / linear.norm():.2f} of the step of "
              f"nn.Linear, cosine {cosine:.2f}")
group = torch.optim.Muon([model.transformer.wte.weight]).param_groups[0]
print("embeddings are taken, weight_decay", group["weight_decay"], "adjust_lr_fn", group["adjust_lr_fn"])
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 transformers==5.24.0
"$folder/env/bin/python" "$folder/muon.py" 2>"$folder/log" | tee "$folder/got"

want="original c_attn (128, 384): 0.58 of the step of nn.Linear, cosine 1.00
original attn.c_proj (128, 128): 1.00 of the step of nn.Linear, cosine 1.00
original c_fc (128, 512): 0.50 of the step of nn.Linear, cosine 1.00
original mlp.c_proj (512, 128): 2.00 of the step of nn.Linear, cosine 1.00
match_rms_adamw c_attn (128, 384): 1.00 of the step of nn.Linear, cosine 1.00
match_rms_adamw attn.c_proj (128, 128): 1.00 of the step of nn.Linear, cosine 1.00
match_rms_adamw c_fc (128, 512): 1.00 of the step of nn.Linear, cosine 1.00
match_rms_adamw mlp.c_proj (512, 128): 1.00 of the step of nn.Linear, cosine 1.00
embeddings are taken, weight_decay 0.1 adjust_lr_fn None"
diff <(echo "$want") "$folder/got" && echo "as it was"
