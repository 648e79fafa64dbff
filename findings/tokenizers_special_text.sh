#!/usr/bin/env bash
# tokenizers_special_text.sh: a trainer of tokenizers learns the letters of special tokens in the text, for nothing.
#
# Guess: <|endoftext|> between the documents of the training text, named in special_tokens, is one token from the start,
# so that nothing is learned from it.
# Behaviour: training does not look for special tokens. Their letters are frequent words in a text that has one per
# document, so early merges are theirs, and the vocabulary has fewer words of the text. Encoding then finds the special
# token first, so these tokens never occur. Leaving the separators out of what is given to the trainer avoids it.
# Versions: tokenizers 0.23.3, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/special.py" <<'CODE'
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

END = "<|endoftext|>"
DOCUMENTS = ["one fish two fish", "red fish blue fish", "this one has a little car"] * 10
for text in (END.join(DOCUMENTS), "\n".join(DOCUMENTS)):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=280, show_progress=False, special_tokens=[END],
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([text], trainer)
    learned = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
               if len(token) > 1 and token != END]
    used = set(tokenizer.encode(END.join(DOCUMENTS)).tokens)
    pieces = [token for token in learned if token in END and token not in used]
    print("with" if END in text else "without", "separators:", len(pieces), "of", len(learned),
          "tokens are pieces of one:", *pieces)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q tokenizers==0.23.3
"$folder/env/bin/python" "$folder/special.py" | tee "$folder/got"

want="with separators: 10 of 23 tokens are pieces of one: <| do en ex ft |> doft endoft ext endoftext
without separators: 0 of 23 tokens are pieces of one:"
diff <(echo "$want") "$folder/got" && echo "as it was"
