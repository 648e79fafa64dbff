#!/usr/bin/env bash
# transformers_position_ids.sh: without a cache, position_ids that do not count up by one cut GPT-2's attention.
#
# Guess: position_ids choose the rows of GPT-2's wpe and nothing else, and use_cache decides whether keys and values are
# returned; the logits of a forward pass do not depend on it.
# Behaviour: without an attention_mask and without a cache, transformers takes each token whose position is not that of
# the token before plus one for the beginning of another text, and hides what is before it. So packed texts are apart
# with use_cache=False, and see each other by default; gradient checkpointing, which turns the cache off in training,
# changes logits and losses; and whoever skips positions (to train for longer contexts), repeats them or counts down
# trains tokens that see few others or only themselves. With an attention_mask of ones each row is one text, also a
# packed row.
# There is no warning. transformers 5's Trainer sets use_cache=False, so its texts are apart.
# Versions: transformers 5.24.0, torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/positions.py" <<'CODE'
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=64, vocab_size=256, bos_token_id=0,
                                   eos_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
tokens = torch.randint(256, (1, 32))
other = tokens.clone()
other[0, 3] += 1
ones = torch.ones_like(tokens)
POSITIONS = {"counted": torch.arange(32), "two texts": torch.arange(32) % 16,
             "skipped": torch.arange(32) + 24 * (torch.arange(32) >= 16), "each twice": torch.arange(32) // 2}


def sight(positions, **options):
    """Returns the last token whose logits depend on token 3."""
    a, b = (model(each, position_ids=positions[None], **options).logits[0] for each in (tokens, other))
    return (a != b).any(-1).nonzero().max().item()


for name, positions in POSITIONS.items():
    model.eval()
    seen = [sight(positions), sight(positions, use_cache=False),
            sight(positions, use_cache=False, attention_mask=ones)]
    model.train()
    seen.append(sight(positions))
    model.gradient_checkpointing_enable()
    seen.append(sight(positions))
    model.gradient_checkpointing_disable()
    print("{}: token 3 is seen up to {}; use_cache=False {}, with a mask of ones {}; training {}, "
          "with checkpointing {}".format(name, *seen))
positions = POSITIONS["two texts"][None]
labels = tokens.clone()
labels[0, 0] = -100  # else the Trainer divides by 32 and not by 31
loss = [model(tokens, labels=labels, position_ids=positions, use_cache=cache).loss.item() for cache in (True, False)]
row = {"input_ids": tokens[0], "labels": labels[0], "position_ids": positions[0]}
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True)
by_trainer = Trainer(model=model, args=arguments, eval_dataset=[row]).evaluate()["eval_loss"]
print(f"two texts: loss {loss[0]:.4f}, with use_cache=False {loss[1]:.4f}, Trainer.evaluate() {by_trainer:.4f}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 transformers==5.24.0 accelerate==1.15.0
"$folder/env/bin/python" "$folder/positions.py" "$folder" 2>"$folder/log" | grep -v '^{' | tee "$folder/got"

want="counted: token 3 is seen up to 31; use_cache=False 31, with a mask of ones 31; training 31, with checkpointing 31
two texts: token 3 is seen up to 31; use_cache=False 15, with a mask of ones 31; training 31, with checkpointing 15
skipped: token 3 is seen up to 31; use_cache=False 15, with a mask of ones 31; training 31, with checkpointing 15
each twice: token 3 is seen up to 31; use_cache=False 4, with a mask of ones 31; training 31, with checkpointing 4
two texts: loss 5.5938, with use_cache=False 5.5849, Trainer.evaluate() 5.5849"
diff <(echo "$want") "$folder/got" && echo "as it was"
