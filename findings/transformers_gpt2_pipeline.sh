#!/usr/bin/env bash
# transformers_gpt2_pipeline.sh: transformers 5 ignores the normalizer and pre-tokenizer of a GPT-2's tokenizer.json.
#
# Guess: AutoTokenizer gives a text the tokens that tokenizers.Tokenizer gives it from the same tokenizer.json, as in
# transformers 4.
# Behaviour: 5.24 takes only vocabulary and merges of the file if config.json says gpt2, and puts GPT-2's pipeline
# beside them. A model trained with single digits gets its numbers merged, and one trained on lower case gets capitals,
# without a warning. "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json makes 5.24 obey the file;
# "GPT2Tokenizer", "GPT2TokenizerFast" or no tokenizer_config.json do not.
# Versions: transformers 5.24.0 and 4.57.6, tokenizers as they require it, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/pipeline.py" <<'END'
import json
import pathlib
import sys

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

folder = pathlib.Path(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ab", "12", "<|endoftext|>"]
tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=[("a", "b"), ("1", "2")]))
tokenizer.normalizer = normalizers.Lowercase()
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "config.json").write_text('{"model_type": "gpt2"}')
for name in (None, "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"):
    if name:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    tokens = transformers.AutoTokenizer.from_pretrained(folder).tokenize("AB12")
    print(transformers.__version__, name, *tokens, "as in the file:", tokens == tokenizer.encode("AB12").tokens)
END
for version in 4.57.6 5.24.0; do
    "$folder/env/bin/pip" install -q transformers==$version
    mkdir "$folder/$version"
    "$folder/env/bin/python" "$folder/pipeline.py" "$folder/$version" 2>/dev/null
done | tee "$folder/got"

want="4.57.6 None ab 1 2 as in the file: True
4.57.6 GPT2Tokenizer ab 1 2 as in the file: True
4.57.6 GPT2TokenizerFast ab 1 2 as in the file: True
4.57.6 PreTrainedTokenizerFast ab 1 2 as in the file: True
5.24.0 None A B 12 as in the file: False
5.24.0 GPT2Tokenizer A B 12 as in the file: False
5.24.0 GPT2TokenizerFast A B 12 as in the file: False
5.24.0 PreTrainedTokenizerFast ab 1 2 as in the file: True"
diff <(echo "$want") "$folder/got" && echo "as it was"
