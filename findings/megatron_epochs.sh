#!/usr/bin/env bash
# megatron_epochs.sh: Megatron's GPTDataset shuffles the documents of all epochs together, so the first has repetitions.
#
# Guess: a training of four epochs takes each document once before it takes one a second time, as shuffled epochs do in
# PyTorch's samplers, and the first epoch of it has the documents of a training of one epoch.
# Behaviour: one list with a copy of each document per epoch is shuffled as a whole. After as many samples as an epoch
# has, a quarter of the documents of a run of two epochs is unseen, and a third of those of four, while others were read
# up to four times. Only a last epoch of which less than four fifths are needed is shuffled apart. Repetition thus
# begins at once, and losses of runs of other lengths are over other data from the first sample on.
# Versions: megatron-core 0.16.1, torch 2.15.0, numpy 2.3.5; Python 3.11, one process.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/epochs.py" <<'CODE'
import sys
from collections import Counter

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

DOCUMENTS, TOKENS = 1000, 8
prefix = sys.argv[1] + "/data"


class Tokenizer:
    vocab_size, eod, unique_identifiers, special_tokens_dict = 2000, 1999, {"class": "numbers"}, {}


builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
for document in range(DOCUMENTS):
    builder.add_document(torch.tensor([document] * TOKENS), [TOKENS])
builder.finalize(prefix + ".idx")
for samples in (999, 1990, 2990, 3990, 9990):
    config = GPTDatasetConfig(random_seed=1, sequence_length=TOKENS, reset_position_ids=False, tokenizer=Tokenizer(),
                              reset_attention_mask=False, eod_mask_loss=False, split="1,0,0", blend=([prefix], None),
                              path_to_cache=f"{prefix}-{samples}")
    data = GPTDataset(IndexedDataset(prefix), prefix, numpy.arange(DOCUMENTS, dtype=numpy.int32), samples,
                      Split.train, config)
    seen = Counter(int(data[i]["tokens"][0]) for i in range(999))
    print(f"{samples} samples: of the first 999, {len(seen)} documents, one {max(seen.values())} times, first",
          *(int(data[i]["tokens"][0]) for i in range(3)))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q megatron-core==0.16.1 torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/epochs.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="999 samples: of the first 999, 999 documents, one 1 times, first 495 286 934
1990 samples: of the first 999, 749 documents, one 2 times, first 464 55 656
2990 samples: of the first 999, 706 documents, one 3 times, first 122 846 127
3990 samples: of the first 999, 683 documents, one 4 times, first 957 873 58
9990 samples: of the first 999, 656 documents, one 5 times, first 9 654 258"
diff <(echo "$want") "$folder/got" && echo "as it was"
