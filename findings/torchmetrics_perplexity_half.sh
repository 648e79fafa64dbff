#!/usr/bin/env bash
# torchmetrics_perplexity_half.sh: one unlikely token makes torchmetrics' Perplexity of float16 logits infinite.
#
# Guess: Perplexity is exp of the mean cross-entropy, computed from a log-softmax, so a single token that the model
# takes for unlikely adds its loss and no more. Logits in half precision cost the digits that the logits have lost.
# Behaviour: it computes softmax in the type of the logits, takes the target's probability, then the logarithm. In
# float16 a probability below 3e-8 is zero: one token with a loss above 17.3 makes the result infinite, for the whole
# data set. In float32 that takes a loss of 104. The logarithms of one update are added to one number of the logits'
# type, too. In bfloat16 that sum is rounded to 8 bits: of 1,000 tokens, one whose loss is 18 instead of 3 changes
# nothing, and the perplexity is off by about 1 %. In float16 sums above 65504 are infinite, so 32 rows of 1,024 tokens
# with a mean loss of 3 are too, in one update. Nothing warns. logits.float() in the call avoids all but the limit of
# 104.
# Versions: torchmetrics 1.9.0, torch 2.15.0, numpy 2.3.5, Python 3.11, CPU. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/perplexity.py" <<'CODE'
import math

import torch
from torchmetrics.text import Perplexity

torch.set_num_threads(1)
VOCABULARY = 100


def logits(losses):
    """Returns logits of tokens whose target, number 0, has these losses."""
    losses = torch.tensor(losses, dtype=torch.float64)
    others = torch.log(torch.expm1(losses) / (VOCABULARY - 1))
    result = others[None, :, None].repeat(1, 1, VOCABULARY)
    result[..., 0] = 0
    return result


cases = {"1,000 of 3": [3.0] * 1000, "one of 16": [3.0] * 999 + [16.0], "one of 18": [3.0] * 999 + [18.0],
         "one of 33": [3.0] * 999 + [33.0], "one of 110": [3.0] * 999 + [110.0], "32,768 of 3": [3.0] * 32768}
for name, losses in cases.items():
    exact = math.exp(sum(losses) / len(losses))
    line = f"{name}: exact {exact:.2f},"
    target = torch.zeros(1, len(losses), dtype=torch.long)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        given = logits(losses).to(kind)
        metric = Perplexity()
        metric.update(given, target)
        upcast = Perplexity()
        upcast.update(given.float(), target)
        line += f" {str(kind)[6:]} {metric.compute():.2f} (float {upcast.compute():.2f}),"
    print(line)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torchmetrics==1.9.0 torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/perplexity.py" 2>"$folder/log" | tee "$folder/got"

want="1,000 of 3: exact 20.09, float32 20.09 (float 20.09), bfloat16 20.25 (float 20.04), float16 20.09 (float 20.08),
one of 16: exact 20.35, float32 20.35 (float 20.35), bfloat16 20.25 (float 20.30), float16 20.33 (float 20.34),
one of 18: exact 20.39, float32 20.39 (float 20.39), bfloat16 20.25 (float 20.35), float16 inf (float 20.38),
one of 33: exact 20.70, float32 20.70 (float 20.70), bfloat16 20.57 (float 20.65), float16 inf (float 20.69),
one of 110: exact 22.35, float32 inf (float inf), bfloat16 inf (float inf), float16 inf (float inf),
32,768 of 3: exact 20.09, float32 20.09 (float 20.09), bfloat16 20.09 (float 20.04), float16 inf (float 20.08),"
diff <(echo "$want") "$folder/got" && echo "as it was"
