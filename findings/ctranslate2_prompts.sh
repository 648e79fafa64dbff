#!/usr/bin/env bash
# ctranslate2_prompts.sh: include_prompt_in_result=False of CTranslate2 hides prompts from the repetition penalty, and
# beside a prompt of one token the others are in the results all the same.
#
# Guess: include_prompt_in_result decides what is returned, and the new tokens are the same. repetition_penalty and
# no_repeat_ngram_size look at the prompt, as those of transformers do. A batch gives each prompt the tokens that it
# gives it alone, max_length of them.
# Behaviour: with False, which the documentation advises for long prompts, the penalties do not see the part of the
# prompt that is computed at once: the whole prompt, or in a batch as many tokens as the shortest prompt has. The new
# tokens are then other ones than with True, and depend on the other prompts of the batch. If the shortest prompt has
# one token, nothing is computed at once, and each result begins with the rest of its prompt, which counts towards
# max_length: a prompt that is longer than max_length gets no new token at all, without a warning. max_batch_size puts
# prompts of like length together. With True the results are right in each of these cases.
# Versions: ctranslate2 4.8.5, numpy 2.3.5, Python 3.11.
# The model is GPT-2's with layers of zeros, whose best next token is the last one again. A letter is a token.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/prompts.py" <<'CODE'
import os
import sys

import ctranslate2
import numpy
from ctranslate2.specs import common_spec, transformer_spec

WIDTH = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save(folder):
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        1, 1, pre_norm=True, activation=common_spec.Activation.GELUTanh)
    rng = numpy.random.default_rng(0)
    decoder, layer = spec.decoder, spec.decoder.layer[0]
    decoder.scale_embeddings = False
    decoder.embeddings.weight = decoder.projection.weight = rng.normal(0, 1, (27, WIDTH)).astype(numpy.float32)
    decoder.position_encodings.encodings = rng.normal(0, 0.1, (64, WIDTH)).astype(numpy.float32)
    for norm in (decoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
        norm.gamma, norm.beta = numpy.ones(WIDTH, numpy.float32), numpy.zeros(WIDTH, numpy.float32)
    for linear, rows, columns in ((layer.self_attention.linear[0], 3, 1), (layer.self_attention.linear[1], 1, 1),
                                  (layer.ffn.linear_0, 4, 1), (layer.ffn.linear_1, 1, 4)):
        linear.weight = numpy.zeros((rows * WIDTH, columns * WIDTH), numpy.float32)
        linear.bias = numpy.zeros(rows * WIDTH, numpy.float32)
    spec.register_vocabulary(["."] + list(LETTERS))
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "."
    spec.validate()
    os.mkdir(folder)
    spec.save(folder)


def new_tokens(generator, prompts, inside, **options):
    """Generates four new tokens per prompt, and returns what is behind the prompts where they are in the result."""
    length = 4 + (max(map(len, prompts)) - 1 if inside else 0)
    results = generator.generate_batch([list(prompt) for prompt in prompts], max_length=length,
                                       include_prompt_in_result=inside, suppress_sequences=[["."]], **options)
    texts = ["".join(result.sequences[0]) for result in results]
    return [text[len(prompt):][:4] if inside else text for prompt, text in zip(prompts, texts)]


save(sys.argv[1] + "/model")
generator = ctranslate2.Generator(sys.argv[1] + "/model")
for options in ({}, {"repetition_penalty": 20}, {"no_repeat_ngram_size": 1}):
    for prompts in (["abcde"], ["xy", "abcde"], ["x", "abcde"]):
        print(*prompts, options, *(f"{inside}: {' '.join(new_tokens(generator, prompts, inside, **options))}"
                                   for inside in (True, False)))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q ctranslate2==4.8.5 numpy==2.3.5
"$folder/env/bin/python" "$folder/prompts.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="abcde {} True: eeee False: eeee
xy abcde {} True: yyyy eeee False: yyyy eeee
x abcde {} True: xxxx eeee False: xxxx bcde
abcde {'repetition_penalty': 20} True: tixk False: ewcs
xy abcde {'repetition_penalty': 20} True: fgdl tixk False: yfgd tixk
x abcde {'repetition_penalty': 20} True: xkny tixk False: xkny bcde
abcde {'no_repeat_ngram_size': 1} True: tixk False: ewcs
xy abcde {'no_repeat_ngram_size': 1} True: fgdl tixk False: yfgd tixk
x abcde {'no_repeat_ngram_size': 1} True: xkny tixk False: xkny bcde"
diff <(echo "$want") "$folder/got" && echo "as it was"
