#!/usr/bin/env bash
# tokenizers_train_lines.sh: Tokenizer.train() of files learns no token that goes on after a line end.
#
# Guess: train([file]) and train_from_iterator([text of the file]) learn the same merges, up to ties.
# Behaviour: train() gives each line of a file, with its line end, to the pre-tokenizer by itself. GPT-2's split has
# empty lines and the indentation behind them in one word, so an iterator learns tokens of two line feeds and of a line
# feed with spaces, and files do not: a text of code has more tokens then.
# Versions: tokenizers 0.23.3, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/merges.py" <<'CODE'
import json
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def line_ends(text, as_file):
    """Returns the learned tokens that contain a line feed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=1000, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if as_file:
        with open(sys.argv[1], "w", newline="") as file:
            file.write(text)
        tokenizer.train([sys.argv[1]], trainer)
    else:
        tokenizer.train_from_iterator([text], trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [a + b for a, b in merges if "Ċ" in a + b]


for name, text in (("Python", "def f(x):\n    return x\n\n\n"), ("Windows", "one\r\n\r\n two\r\n\r\n")):
    print(name, "file", line_ends(text * 20, True), "iterator", line_ends(text * 20, False))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q tokenizers==0.23.3
"$folder/env/bin/python" "$folder/merges.py" "$folder/text" | tee "$folder/got"

want="Python file [] iterator ['ĊĊ', 'ĊĠĠ', 'ĊĠĠĠ', 'ĊĊĊ']
Windows file ['čĊ'] iterator ['čĊ', 'čĊčĊ', 'čĊč']"
diff <(echo "$want") "$folder/got" && echo "as it was"
