#!/usr/bin/env bash
# transformers_add_bos_token.sh: GPT-2's add_bos_token works with vocab.json and merges.txt, not with tokenizer.json.
#
# Guess: "add_bos_token": true in tokenizer_config.json puts the bos before each text, whichever files of the same
# vocabulary lie beside it.
# Behaviour: it does so only if the folder has no tokenizer.json. With one that has no template, the bos is missing
# without a warning, also if vocab.json and merges.txt are there. 4.57.6 then still says add_bos_token: True, and 5.24
# says False. Text encoded before and after tokenizer.json was added to a folder differs by a token. add_bos_token=True
# in the call of from_pretrained helps in 5.24 only. A template in tokenizer.json helps in both; 5.24 then says False.
# Versions: transformers 5.24.0 and 4.57.6, tokenizers as they require it, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/bos.py" <<'CODE'
import json
import pathlib
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

folder = pathlib.Path(sys.argv[1])
vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<|endoftext|>"])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def show(files, **options):
    loaded = transformers.AutoTokenizer.from_pretrained(folder, **options)
    print(transformers.__version__, files + ":", *loaded("ab").tokens(), "add_bos_token", loaded.add_bos_token)


(folder / "config.json").write_text('{"model_type": "gpt2"}')
(folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true}')
(folder / "vocab.json").write_text(json.dumps(vocabulary))
(folder / "merges.txt").write_text("#version: 0.2\n")
show("vocab.json and merges.txt")
tokenizer.save(str(folder / "tokenizer.json"))
show("all three")
(folder / "vocab.json").unlink()
(folder / "merges.txt").unlink()
show("tokenizer.json")
show("tokenizer.json, asked for", add_bos_token=True)
bos = "<|endoftext|>"
tokenizer.post_processor = processors.TemplateProcessing(single=bos + " $A", special_tokens=[(bos, vocabulary[bos])])
tokenizer.save(str(folder / "tokenizer.json"))
show("with a template")
CODE
for version in 4.57.6 5.24.0; do
    "$folder/env/bin/pip" install -q transformers==$version
    mkdir "$folder/$version"
    "$folder/env/bin/python" "$folder/bos.py" "$folder/$version" 2>"$folder/log"
done | tee "$folder/got"

want="4.57.6 vocab.json and merges.txt: <|endoftext|> a b add_bos_token True
4.57.6 all three: a b add_bos_token True
4.57.6 tokenizer.json: a b add_bos_token True
4.57.6 tokenizer.json, asked for: a b add_bos_token True
4.57.6 with a template: <|endoftext|> a b add_bos_token True
5.24.0 vocab.json and merges.txt: <|endoftext|> a b add_bos_token True
5.24.0 all three: a b add_bos_token False
5.24.0 tokenizer.json: a b add_bos_token False
5.24.0 tokenizer.json, asked for: <|endoftext|> a b add_bos_token True
5.24.0 with a template: <|endoftext|> a b add_bos_token False"
diff <(echo "$want") "$folder/got" && echo "as it was"
