#!/usr/bin/env bash
# gpt2_config_keys.sh: CTranslate2 and keras-hub read a GPT-2's config.json without the keys that change its results.
#
# Guess: a converter of GPT-2 computes what config.json says, as transformers does, or refuses what it has no code for.
# Behaviour: CTranslate2's converter ignores scale_attn_by_inverse_layer_idx (true in models made as Mistral, Levanter
# and CodeParrot made theirs), scale_attn_weights and layer_norm_epsilon. keras-hub ignores these, activation_function
# and tie_word_embeddings: it takes the embedding for the head, and leaves out the model's own. The model loads and
# writes text, without a warning. CTranslate2 does read a head of its own, and the activation.
# Versions: transformers 5.24.0, torch 2.15.0, ctranslate2 4.8.5, keras-hub 0.32.0, keras 3.15.1, numpy 2.3.5; Python
# 3.11.
# Output seen: that of `want` below, the largest difference of a log-probability to transformers. Exit code 1 if it has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/keys.py" <<'CODE'
import json
import os
import sys

os.environ.update(KERAS_BACKEND="torch", CUDA_VISIBLE_DEVICES="")
import ctranslate2
import keras_hub
import numpy
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
END = "<|endoftext|>"
vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()) + [END])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = transformers.GPT2TokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)
ids = torch.arange(60)[None] * 7 % 257


def differences(folder, **keys):
    """Returns the largest differences of log-probabilities: CTranslate2's and keras-hub's."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=257, n_positions=128, n_embd=64, n_layer=3, n_head=4, bos_token_id=256,
                                     eos_token_id=256, **keys)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        want = model(ids).logits.log_softmax(-1)[0].numpy()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with open(folder + "/vocab.json", "w") as file:
        json.dump(vocabulary, file)
    with open(folder + "/merges.txt", "w") as file:
        file.write("#version: 0.2\n")
    ctranslate2.converters.TransformersConverter(folder).convert(folder + "/converted")
    generator = ctranslate2.Generator(folder + "/converted")
    got = generator.forward_batch([tokenizer.convert_ids_to_tokens(ids[0].tolist())], return_log_probs=True)
    yield abs(numpy.array(got)[0] - want).max()
    language_model = keras_hub.models.GPT2CausalLM.from_preset(folder, dtype="float32", preprocessor=None)
    logits = language_model({"token_ids": ids.numpy(), "padding_mask": numpy.ones(ids.shape, bool)})
    yield abs(logits.log_softmax(-1)[0].detach().numpy() - want).max()


for keys in ({}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False},
             {"layer_norm_epsilon": 1e-2}, {"activation_function": "relu"}, {"tie_word_embeddings": False}):
    name = "".join(keys) or "GPT-2"
    print(name, "CTranslate2 {:.1f}, keras-hub {:.1f}".format(*differences(f"{sys.argv[1]}/{name}", **keys)))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.24.0 torch==2.15.0 ctranslate2==4.8.5 numpy==2.3.5 keras==3.15.1 \
    kagglehub sentencepiece
"$folder/env/bin/pip" install -q --no-deps keras-hub==0.32.0
"$folder/env/bin/python" "$folder/keys.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="GPT-2 CTranslate2 0.0, keras-hub 0.0
scale_attn_by_inverse_layer_idx CTranslate2 1.8, keras-hub 1.8
scale_attn_weights CTranslate2 4.9, keras-hub 4.9
layer_norm_epsilon CTranslate2 0.8, keras-hub 0.8
activation_function CTranslate2 0.0, keras-hub 1.0
tie_word_embeddings CTranslate2 0.0, keras-hub 8.6"
diff <(echo "$want") "$folder/got" && echo "as it was"
