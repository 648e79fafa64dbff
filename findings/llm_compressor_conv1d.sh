#!/usr/bin/env bash
# llm_compressor_conv1d.sh: llm-compressor quantizes no matrix of a GPT-2, whatever its targets are, without a word.
#
# Guess: the recipe of its README, targets "Linear", either quantizes the matrices of GPT-2's layers as it does those of
# a Llama, or says that it met no module; and where targets name GPT-2's modules, by class or by a pattern, these are
# quantized, or refused.
# Behaviour: matrices of GPT-2's layers are of transformers' class Conv1D. With each of these targets oneshot() ends
# without an error, no line of its log speaks of modules or targets, and save_pretrained() writes the weights as they
# were, bit for bit, in float, and no quantization_config. Who measures this "FP8" or "W8A16" model measures the one
# before. The same call quantizes all 14 matrices of two layers of a Llama.
# Versions: llm-compressor 0.14.0.1, transformers 5.17.0, torch 2.14.0 on a CPU, Python 3.11. The installation takes
# 6 GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/quantize.py" <<'CODE'
import json
import sys

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

folder, model, scheme, targets = sys.argv[1:]
if model == "GPT-2":
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4,
                                       bos_token_id=0, eos_token_id=0))
else:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                         num_attention_heads=4, bos_token_id=0, eos_token_id=0))
model.save_pretrained(folder + "/before")
model = model.from_pretrained(folder + "/before")
oneshot(model=model, recipe=QuantizationModifier(targets=targets, scheme=scheme, ignore=["lm_head"]))
model.save_pretrained(folder + "/after", save_compressed=True)
before, after = (load_file(f"{folder}/{name}/model.safetensors") for name in ("before", "after"))
same = sum(name in after and after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
           for name, tensor in before.items())
config = json.load(open(folder + "/after/config.json"))
print(f"result: {same} of {len(before)} tensors as they were, quantization_config: "
      f"{config.get('quantization_config') is not None}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.0 transformers==5.17.0 llmcompressor==0.14.0.1
while read -r arguments; do
    rm -rf "$folder/before" "$folder/after"
    # shellcheck disable=SC2086
    HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/quantize.py" "$folder" $arguments </dev/null \
        >"$folder/log" 2>&1 || echo "failed: $(tail -1 "$folder/log")"
    echo "$arguments: $(sed -n 's/^result: //p' "$folder/log"), lines on modules or targets:" \
        "$(grep -ciE 'conv1d|target|match|no modules|not quantized' "$folder/log")"
done <<'END' | tee "$folder/got"
Llama FP8_DYNAMIC Linear
GPT-2 FP8_DYNAMIC Linear
GPT-2 FP8_DYNAMIC Conv1D
GPT-2 W8A16 Conv1D
GPT-2 W8A16 re:.*c_fc$
END

want="Llama FP8_DYNAMIC Linear: 7 of 21 tensors as they were, quantization_config: True, lines on modules or targets: 0
GPT-2 FP8_DYNAMIC Linear: 28 of 28 tensors as they were, quantization_config: False, lines on modules or targets: 0
GPT-2 FP8_DYNAMIC Conv1D: 28 of 28 tensors as they were, quantization_config: False, lines on modules or targets: 0
GPT-2 W8A16 Conv1D: 28 of 28 tensors as they were, quantization_config: False, lines on modules or targets: 0
GPT-2 W8A16 re:.*c_fc$: 28 of 28 tensors as they were, quantization_config: False, lines on modules or targets: 0"
diff <(echo "$want") "$folder/got" && echo "as it was"
