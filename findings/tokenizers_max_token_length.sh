#!/usr/bin/env bash
# tokenizers_max_token_length.sh: BpeTrainer's max_token_length is one more than the longest token.
#
# Guess: max_token_length=4 learns tokens of at most 4 bytes, as its documentation says: it "prevents creating tokens
# longer than the specified size".
# Behaviour: a merge is left out unless its token is shorter than max_token_length, so the longest tokens have one byte
# less. Pairs of single bytes are not compared with the limit: with 1 tokens have two bytes. A run of 24 letters has
# tokens of 8 bytes with a limit of 16, and of 16 with 17.
# Versions: tokenizers 0.23.3, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/lengths.py" <<'CODE'
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def longest(text, limit):
    """Returns the number of bytes of the longest token that is learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=1000, max_token_length=limit, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text] * 100, trainer)
    return max(map(len, tokenizer.get_vocab()))


for text in (" internationalization", "a" * 24):
    for limit in (None, 1, 2, 3, 4, 5, 16, 17):
        print(f"{text!r}, max_token_length {limit}: {longest(text, limit)}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q tokenizers==0.23.3
"$folder/env/bin/python" "$folder/lengths.py" | tee "$folder/got"

want="' internationalization', max_token_length None: 21
' internationalization', max_token_length 1: 2
' internationalization', max_token_length 2: 2
' internationalization', max_token_length 3: 2
' internationalization', max_token_length 4: 3
' internationalization', max_token_length 5: 4
' internationalization', max_token_length 16: 13
' internationalization', max_token_length 17: 16
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length None: 24
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 1: 2
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 2: 2
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 3: 2
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 4: 2
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 5: 4
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 16: 8
'aaaaaaaaaaaaaaaaaaaaaaaa', max_token_length 17: 16"
diff <(echo "$want") "$folder/got" && echo "as it was"
