#!/usr/bin/env bash
# datatrove_end_of_text.sh: datatrove's DocumentTokenizer puts nothing between documents, against its docstring.
#
# Guess: eos_token is "<|endoftext|>" by default, as the class's docstring says, so GPT-2's tokens of several documents
# are apart, and a document has its token at the end.
# Behaviour: the parameter's default is None, and the documents of a .ds file then run together. Only the .ds.index has
# their ends, which readers of bare tokens do not read, and an empty document leaves no token at all. With eos_token
# each document ends with it; none begins with it. In both cases the characters <|endoftext|> within a document become
# that token, so a reader that splits by it finds other documents than there were.
# Versions: datatrove 0.10.1, tokenizers 0.22.2, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/documents.py" <<'CODE'
import inspect
import sys

import numpy
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

folder, end = sys.argv[1], "<|endoftext|>"
vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()) + [end])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.add_special_tokens([end])
tokenizer.save(folder + "/tokenizer.json")
names = {i: token for token, i in vocabulary.items()}
help_line = next(line for line in inspect.getdoc(DocumentTokenizer).splitlines() if "eos_token" in line)
print("docstring:", help_line.split("(default:")[1].strip(" )"))
print("default:", inspect.signature(DocumentTokenizer).parameters["eos_token"].default)
for options in ({}, {"eos_token": end}):
    out = f"{folder}/{len(options)}"
    documents = (Document(text=text, id=text) for text in ("ab", "", "c" + end + "d"))
    DocumentTokenizer(out, folder + "/tokenizer.json", shuffle_documents=False, **options).run(documents)
    tokens = numpy.fromfile(out + "/00000_unshuffled.ds", numpy.uint16)
    print(options, *(names[token] for token in tokens.tolist()), "ends",
          *numpy.fromfile(out + "/00000_unshuffled.ds.index", numpy.uint64).tolist())
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datatrove==0.10.1 tokenizers==0.22.2 numpy==2.3.5
"$folder/env/bin/python" "$folder/documents.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="docstring: \"<|endoftext|>\"
default: None
{} a b c <|endoftext|> d ends 2 2 5
{'eos_token': '<|endoftext|>'} a b <|endoftext|> <|endoftext|> c <|endoftext|> d <|endoftext|> ends 3 4 8"
diff <(echo "$want") "$folder/got" && echo "as it was"
