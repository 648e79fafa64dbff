#!/usr/bin/env bash
# keras_hub_gpt2_splits.sh: keras-hub's GPT2Tokenizer does not split text into words, and does so otherwise in tf.data.
#
# Guess: with GPT-2's vocab.json and merges.txt it gives GPT-2's tokens, as tokenizers and transformers do from the same
# files, and the same ones in a tf.data pipeline as in a call.
# Behaviour: a call uses the library tokenizers with the pattern of Llama 3, but as a string to look for and not as a
# regular expression, so it is never found and the whole text is one word. Merges then go across words: spaces in front
# of a word are merged with each other, which takes the word's own space from it, and line ends too. In indented code
# this is nearly each line. In tf.data another implementation is used, which is right for spaces, but takes two line
# ends in front of a word, as between paragraphs, for one token. GPT-2's has a token of two line ends, but never there.
# GPT-2's weights meet tokens in places where they have not been trained on them; fit() of texts uses tf.data and
# generate() a call, so a model is trained and used with different tokens.
# Versions: keras-hub 0.32.0, keras 3.15.1, tensorflow 2.21.0, tensorflow-text 2.21.1, tokenizers 0.23.3; Python 3.11.
# Output seen: that of `want` below, with Ġ for a space and Ċ for a line end. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/splits.py" <<'CODE'
import os

os.environ.update(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="")
import keras_hub
import numpy
import tensorflow
from tokenizers import Tokenizer, models, pre_tokenizers

# Bytes and a few merges, with tokens of spaces and of line ends as GPT-2 has them.
end, merges = "<|endoftext|>", [("Ġ", "t"), ("Ġ", "a"), ("i", "n"), ("r", "e"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("ĠĠ", "ĠĠ"),
                                ("Ġ", "re"), ("Ġ", "in"), ("'", "s"), ("Ġ", "x")]
tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges] + [end]
vocabulary = {token: i for i, token in enumerate(tokens)}
gpt2 = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
keras = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=[" ".join(merge) for merge in merges])
for text in ("a in x", "a  in", "f:\n    re", "a\n\nx", "a\n\n\nx", "a\n\n  x"):
    ids = {"GPT-2": gpt2.encode(text).ids, "call": numpy.array(keras(text)).tolist(),
           "tf.data": next(iter(tensorflow.data.Dataset.from_tensors(text).map(keras))).numpy().tolist()}
    lines = {name: " ".join(tokens[i] for i in found) for name, found in ids.items()}
    print(repr(text), *(f"{name}: {line}" for name, line in lines.items() if name == "GPT-2" or line != lines["GPT-2"]),
          sep="; ")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q keras-hub==0.32.0 keras==3.15.1 tensorflow==2.21.0 tensorflow-text==2.21.1 \
    tokenizers==0.23.3
"$folder/env/bin/python" "$folder/splits.py" 2>"$folder/log" | tee "$folder/got"

want="'a in x'; GPT-2: a Ġin Ġx
'a  in'; GPT-2: a Ġ Ġin; call: a ĠĠ in
'f:\n    re'; GPT-2: f : Ċ ĠĠ Ġ Ġre; call: f : Ċ ĠĠĠĠ re
'a\n\nx'; GPT-2: a Ċ Ċ x; call: a ĊĊ x; tf.data: a ĊĊ x
'a\n\n\nx'; GPT-2: a ĊĊ Ċ x
'a\n\n  x'; GPT-2: a ĊĊ Ġ Ġx; call: a ĊĊ ĠĠ x"
diff <(echo "$want") "$folder/got" && echo "as it was"
