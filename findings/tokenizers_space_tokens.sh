#!/usr/bin/env bash
# tokenizers_space_tokens.sh: an added token of spaces that strips to the right covers the same spaces twice.
#
# Guess: in six spaces, an added token of two spaces occurs three times. lstrip and rstrip let it take spaces beside it
# that no token has; each character of the text lies in one token.
# Behaviour: with rstrip alone there are three tokens, and their offsets overlap: 0 to 6, 2 to 6, 4 to 6. Lengths taken
# from the offsets add up to 12 of 6 characters. With lstrip too there is one token, and decoding gives two spaces back.
# With lstrip alone the guess is right. GPT-2 models for code carry such tokens for runs of spaces.
# Versions: tokenizers 0.22.2 and 0.23.3, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/spaces.py" <<'CODE'
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
for strips in ("none", "lstrip", "rstrip", "lstrip+rstrip"):
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("  ", lstrip="lstrip" in strips, rstrip="rstrip" in strips)])
    encoded = tokenizer.encode(" " * 6)
    print(tokenizers.__version__, strips, *encoded.offsets, "decoded to", len(tokenizer.decode(encoded.ids)))
CODE
for version in 0.22.2 0.23.3; do
    "$folder/env/bin/pip" install -q tokenizers==$version
    "$folder/env/bin/python" "$folder/spaces.py"
done | tee "$folder/got"

want="0.22.2 none (0, 2) (2, 4) (4, 6) decoded to 6
0.22.2 lstrip (0, 2) (2, 4) (4, 6) decoded to 6
0.22.2 rstrip (0, 6) (2, 6) (4, 6) decoded to 6
0.22.2 lstrip+rstrip (0, 6) decoded to 2
0.23.3 none (0, 2) (2, 4) (4, 6) decoded to 6
0.23.3 lstrip (0, 2) (2, 4) (4, 6) decoded to 6
0.23.3 rstrip (0, 6) (2, 6) (4, 6) decoded to 6
0.23.3 lstrip+rstrip (0, 6) decoded to 2"
diff <(echo "$want") "$folder/got" && echo "as it was"
