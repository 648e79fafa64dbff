#!/usr/bin/env bash
# transformers_role_flags.sh: lstrip and rstrip of a GPT-2's special tokens differ between transformers 4 and 5.
#
# Guess: in a folder with vocab.json and merges.txt, lstrip of "mask_token" or "eos_token" in tokenizer_config.json
# holds, in both versions; where two roles name one token, the first role's flags hold.
# Behaviour: a token of two roles has the flags of the first in 4 and of the last in 5, and a name without flags counts
# as one. GPT-2's bos_token is <|endoftext|> by default, so flags of eos_token alone are lost in 4 and hold in 5. If
# added_tokens.json lists the token, the flags of its role hold in 4 and are lost in 5. Each of these changes the tokens
# of a prompt: the space in front of the token is its own or is swallowed.
# Why: 4 leaves out a special token whose text it has seen. 5 leaves out only equal ones, and adds the rest one after
# the other, so the last one replaces the others. For added_tokens.json 5 makes new tokens without flags.
# Versions: transformers 4.57.6 and 5.24.0, numpy 2.3.5; Python 3.11, without torch.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/roles.py" <<'CODE'
import json
import os
import sys

import transformers

shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
characters = [chr(b) for b in shown] + [chr(256 + i) for i in range(68)]
vocab = {c: i for i, c in enumerate(characters)} | {"<|endoftext|>": 256, "<mask>": 257}
version = transformers.__version__[0]


def show(name, config, **others):
    folder = f"{sys.argv[1]}/{version} {name}"
    os.mkdir(folder)
    files = {"vocab": vocab, "config": {"model_type": "gpt2"}, "tokenizer_config": config} | others
    for file, content in files.items():
        with open(f"{folder}/{file}.json", "w") as out:
            json.dump(content, out)
    with open(f"{folder}/merges.txt", "w") as out:
        out.write("#version: 0.2\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("a <mask> b <|endoftext|>", add_special_tokens=False)
    print(f"{version}, {name}:", *tokenizer.convert_ids_to_tokens(ids))


def flagged(content, flag):
    return {"__type": "AddedToken", "content": content, "single_word": False, "normalized": False,
            "lstrip": flag == "lstrip", "rstrip": flag == "rstrip"}


mask = {"mask_token": flagged("<mask>", "lstrip")}
show("mask", mask)
show("mask, and pad with rstrip", mask | {"pad_token": flagged("<mask>", "rstrip")})
show("mask, and sep without flags", {"sep_token": "<mask>"} | mask)
show("mask in added_tokens.json", mask, added_tokens={"<mask>": 257})
show("eos", {"mask_token": "<mask>", "eos_token": flagged("<|endoftext|>", "lstrip")})
CODE
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q transformers==$version numpy==2.3.5
    TRANSFORMERS_VERBOSITY=error "$folder/$version/bin/python" "$folder/roles.py" "$folder" 2>"$folder/log"
done | tee "$folder/got"

want="4, mask: a <mask> Ġ b Ġ <|endoftext|>
4, mask, and pad with rstrip: a Ġ <mask> b Ġ <|endoftext|>
4, mask, and sep without flags: a Ġ <mask> Ġ b Ġ <|endoftext|>
4, mask in added_tokens.json: a <mask> Ġ b Ġ <|endoftext|>
4, eos: a Ġ <mask> Ġ b Ġ <|endoftext|>
5, mask: a <mask> Ġ b Ġ <|endoftext|>
5, mask, and pad with rstrip: a <mask> Ġ b Ġ <|endoftext|>
5, mask, and sep without flags: a <mask> Ġ b Ġ <|endoftext|>
5, mask in added_tokens.json: a Ġ <mask> Ġ b Ġ <|endoftext|>
5, eos: a Ġ <mask> Ġ b <|endoftext|>"
diff <(echo "$want") "$folder/got" && echo "as it was"
