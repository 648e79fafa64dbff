#!/usr/bin/env bash
# transformers_special_tokens_map.sh: a token changed by transformers 5 in a folder that transformers 4 wrote is lost.
#
# Guess: a tokenizer that is loaded, given another eos_token and saved in its own folder has that token when it is
# loaded again, and tokenizer_config.json, where the token is, counts for more than the older special_tokens_map.json.
# Behaviour: 5.24 writes the new token to tokenizer_config.json and leaves special_tokens_map.json of version 4 as it
# was. It also drops added_tokens_decoder from tokenizer_config.json, and without that entry the map wins over the
# configuration: the next load has the old token again, without a warning, and so it is with a tokenizer_config.json
# written by hand. 4.57.6 reads the two files by the same rule, but writes both. Deleting special_tokens_map.json
# before the save avoids it.
# Versions: transformers 5.24.0 and 4.57.6, tokenizers as they require it, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/write.py" <<'CODE'
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<|endoftext|>", "<|end|>"]
tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
end = "<|endoftext|>"
transformers.GPT2TokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end).save_pretrained(sys.argv[1])
CODE
cat >"$folder/change.py" <<'CODE'
import json
import pathlib
import sys

import transformers

folder = pathlib.Path(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
before = tokenizer.eos_token
tokenizer.eos_token = "<|end|>"
tokenizer.save_pretrained(folder)
config = json.loads((folder / "tokenizer_config.json").read_text())
tokens = json.loads((folder / "special_tokens_map.json").read_text())
print(transformers.__version__, "loaded", before, "configuration", config["eos_token"],
      "with" if "added_tokens_decoder" in config else "without", "decoder, map", tokens["eos_token"], "loaded again",
      transformers.AutoTokenizer.from_pretrained(folder).eos_token)
CODE
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q transformers==$version
    "$folder/4.57.6/bin/python" "$folder/write.py" "$folder/tokenizer" 2>"$folder/log"
    "$folder/$version/bin/python" "$folder/change.py" "$folder/tokenizer" 2>"$folder/log"
    rm -r "$folder/tokenizer"
done | tee "$folder/got"

want="4.57.6 loaded <|endoftext|> configuration <|end|> with decoder, map <|end|> loaded again <|end|>
5.24.0 loaded <|endoftext|> configuration <|end|> without decoder, map <|endoftext|> loaded again <|endoftext|>"
diff <(echo "$want") "$folder/got" && echo "as it was"
