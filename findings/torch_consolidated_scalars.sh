#!/usr/bin/env bash
# torch_consolidated_scalars.sh: consolidated safetensors of torch's distributed checkpoints have 0 for each scalar.
#
# Guess: HuggingFaceStorageWriter of torch.distributed.checkpoint, with which torchtitan and others export their models,
# stores every tensor bit for bit. enable_consolidation=True only joins the files of the ranks, and what it cannot join
# is an error.
# Behaviour: a tensor without dimensions, such as a learned temperature, a gate or a scale, is whole in the files of the
# ranks and 0.0 in the consolidated one, without a warning. Its name, shape and dtype are right, so a loader cannot
# notice. A tensor of one element with one dimension stays whole. The consolidated file also loses the metadata "format"
# that the files of the ranks have, without which transformers 4.46 does not read it (4.57 does).
# Versions: torch 2.15.0, safetensors 0.8.0, numpy 2.3.5; Python 3.11, one process.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 safetensors==0.8.0 numpy==2.3.5
cat >"$folder/save.py" <<'END'
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

folder = Path(sys.argv[1])
tensors = {"scalar": torch.tensor(2.5), "bfloat16 scalar": torch.tensor(2.5).bfloat16(),
           "one element": torch.tensor([2.5]), "vector": torch.arange(4.0)}
writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True, enable_consolidation=True)
dcp.save(tensors, storage_writer=writer, no_dist=True)
for what, name in ("rank", "sharded/shard-00001-model-00001-of-00001"), ("consolidated", "model-00001-of-00001"):
    with safe_open(folder / f"{name}.safetensors", "pt") as file:
        print(f"{what}:", {key: file.get_tensor(key).tolist() for key in sorted(file.keys())},
              "format" in (file.metadata() or {}))
END
"$folder/env/bin/python" "$folder/save.py" "$folder/saved" 2>"$folder/log" | tee "$folder/got"

want="rank: {'bfloat16 scalar': 2.5, 'one element': [2.5], 'scalar': 2.5, 'vector': [0.0, 1.0, 2.0, 3.0]} True
consolidated: {'bfloat16 scalar': 0.0, 'one element': [2.5], 'scalar': 0.0, 'vector': [0.0, 1.0, 2.0, 3.0]} False"
diff <(echo "$want") "$folder/got" && echo "as it was"
