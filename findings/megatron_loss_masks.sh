#!/usr/bin/env bash
# megatron_loss_masks.sh: if the padded sample is read first, Megatron's GPTDataset masks its padding in all samples.
#
# Guess: with drop_last_partial_validation_sequence=False the last sample is padded, and only its own loss leaves the
# padding out. eod_mask_loss leaves the end-of-document tokens out of the loss.
# Behaviour: the loss mask is kept for all samples unless positions or attention are reset or eod_mask_loss is on. It is
# kept without a copy before the padding of the first sample is taken out of it, so if the shuffle puts the padded
# sample first, each sample of the validation loses the loss at those positions: seven of eight tokens here. Whether it
# is first depends on the seed and on the amount of data. A worker of a DataLoader has a mask of its own, so the
# validation loss also depends on num_workers. eod_mask_loss masks the prediction of what follows an end-of-document
# token, the first token of the next document; the end itself remains in the loss.
# Versions: megatron-core 0.16.1, torch 2.15.0, numpy 2.3.5; Python 3.11, one process.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/masks.py" <<'CODE'
import sys

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

END = 99


class Tokenizer:
    vocab_size, eod, unique_identifiers, special_tokens_dict = 100, END, {"class": "numbers"}, {}


def samples(documents, seed, name, workers=0, **options):
    """Returns the samples of a validation in their order."""
    prefix = f"{sys.argv[1]}/{name}"
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(prefix + ".idx")
    options = {"eod_mask_loss": False, **options}
    config = GPTDatasetConfig(random_seed=seed, sequence_length=8, reset_position_ids=False, tokenizer=Tokenizer(),
                              reset_attention_mask=False, drop_last_partial_validation_sequence=False, split="0,1,0",
                              blend=([prefix], None), path_to_cache=f"{prefix}-{seed}", **options)
    data = GPTDataset(IndexedDataset(prefix), prefix, numpy.arange(len(documents), dtype=numpy.int32), None,
                      Split.valid, config)
    return list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers))


documents = [[10 * i + j for j in range(1, 7)] + [END] for i in range(9)] + [[91, 92, END]]
for seed, workers in (1, 0), (4, 0), (4, 2):
    found = [int(sample["loss_mask"].sum()) for sample in samples(documents, seed, "padded", workers)]
    print(f"seed {seed}, {workers} workers: tokens with a loss", *found)
sample = samples([[1, 2, END, 3, 4, 5, 6, 7, END]], 1, "end", eod_mask_loss=True)[0]
print("inputs", *sample["tokens"].tolist(), "labels", *sample["labels"].tolist(), "loss",
      *sample["loss_mask"].int().tolist())
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q megatron-core==0.16.1 torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/masks.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="seed 1, 0 workers: tokens with a loss 8 1 8 8 8 8 8 8 8
seed 4, 0 workers: tokens with a loss 1 1 1 1 1 1 1 1 1
seed 4, 2 workers: tokens with a loss 1 8 1 8 1 8 1 8 1
inputs 1 2 99 3 4 5 6 7 labels 2 99 3 4 5 6 7 99 loss 1 1 0 1 1 1 1 1"
diff <(echo "$want") "$folder/got" && echo "as it was"
