#!/usr/bin/env bash
# lm_eval_bf16_sums.sh: lm-eval rounds the sum of a choice's log-probabilities to 8 bits if the model is in bfloat16.
#
# Guess: log-probabilities and their sums are computed in float whatever the model's dtype is, as in the losses of
# transformers, so a model in bfloat16 is scored as exactly as its logits are.
# Behaviour: log_softmax returns bfloat16, so each token's log-probability is rounded, and then the sum. Sums from
# 128 to 256 nats are whole numbers, those of a window of 1,024 tokens here multiples of 32. Of pairs of choices with
# 40 tokens 6 % have the same score, where acc takes the first, and 3 % another winner. The default dtype "auto" is
# that of config.json. softmax_dtype=float32 in --model_args scores the same model exactly.
# Versions: lm-eval 0.4.13, transformers 5.24.0, torch 2.15.0 on a CPU, Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/sums.py" <<'CODE'
import random

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

# A model that gives a token the same probability everywhere: the hidden state is 1, 0, 0, ..., so that the
# logits are the first column of the embeddings.
model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=1024, n_embd=8, n_layer=1, n_head=1, bos_token_id=256,
                                   eos_token_id=256)).bfloat16().eval()
torch.manual_seed(1)
with torch.no_grad():
    model.transformer.wte.weight.normal_()
    model.transformer.ln_f.weight.zero_()
    model.transformer.ln_f.bias.copy_(torch.eye(8)[0])
    exact = model.transformer.wte.weight[:, 0].double().log_softmax(0)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: i for i, token in enumerate(letters + ["<|endoftext|>"])}
bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, bos_token="<|endoftext|>", eos_token="<|endoftext|>")

rng = random.Random(1)
text = lambda length: "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
pairs = [[text(40), text(40)] for _ in range(1000)]
long = text(4096)
true = lambda string: exact[tokenizer(string).input_ids].sum().item()


def ask(lm, kind, arguments):
    return getattr(lm, kind)([Instance(kind, {}, each, i) for i, each in enumerate(arguments)], disable_tqdm=True)


for name, options in (("auto", {}), ("softmax_dtype=float32", {"softmax_dtype": "float32"})):
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=16, **options)
    sums = [value for value, _ in ask(lm, "loglikelihood", [("a", choice) for pair in pairs for choice in pair])]
    ties = sum(a == b for a, b in zip(sums[::2], sums[1::2]))
    wrong = sum((a > b) != (true(pair[0]) > true(pair[1])) for pair, a, b in zip(pairs, sums[::2], sums[1::2]))
    worst = max(abs(value - true(choice)) for value, choice in zip(sums, sum(pairs, [])))
    print(f"{name}: {ties} ties and {wrong} other winners in {len(pairs)} pairs, sums up to {worst:.1f} off")
    print(f"  {len(long)} tokens: {ask(lm, 'loglikelihood_rolling', [(long,)])[0]:.1f} for {true(long):.1f}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 transformers==5.24.0 lm-eval[hf]==0.4.13
HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/sums.py" 2>"$folder/log" | tee "$folder/got"

want="auto: 62 ties and 30 other winners in 1000 pairs, sums up to 1.2 off
  4096 tokens: -25312.0 for -25331.7
softmax_dtype=float32: 0 ties and 0 other winners in 1000 pairs, sums up to 0.0 off
  4096 tokens: -25331.7 for -25331.7"
diff <(echo "$want") "$folder/got" && echo "as it was"
