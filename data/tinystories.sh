#!/usr/bin/env bash
# tinystories.sh [--vocab N]: makes train and val shards from 2.7 million short stories in simple words.
# Downloads 2.2 GB and trains a vocabulary of N tokens (default 8192). A model of 10 to 30 million parameters
# learns to write whole stories.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

vocab=8192
parse_arguments 0 vocab "$@"
out=data/tinystories

# to_jsonl IN OUT: writes each story as a JSON object. In the download the stories are separated by <|endoftext|>, which
# the tokenizer would read as ordinary text.
to_jsonl() {
    python3 - "$1" "$2.part" <<'PYTHON'
import json
import sys

def stories(text):
    story = []
    for line in text:
        if line.strip() == "<|endoftext|>":
            yield "".join(story).strip()
            story = []
        else:
            story.append(line)
    yield "".join(story).strip()


with open(sys.argv[1], encoding="utf-8") as text, open(sys.argv[2], "w", encoding="utf-8") as out:
    for story in filter(None, stories(text)):
        print(json.dumps({"text": story}, ensure_ascii=False), file=out)
PYTHON
    mv "$2.part" "$2"
}

fetch_from_hub roneneldan/TinyStories TinyStoriesV2-GPT4-train.txt $out/stories.txt
if [ ! -f $out/stories.jsonl ]; then
    say "writing one line per story: $out/stories.jsonl"
    to_jsonl $out/stories.txt $out/stories.jsonl
fi
tokenize $out $out/stories.jsonl --train-bpe "$vocab" --val-fraction 0.01
print_train_command $out "$small_model"
