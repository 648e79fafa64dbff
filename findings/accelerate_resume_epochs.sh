#!/usr/bin/env bash
# accelerate_resume_epochs.sh: a run resumed by accelerate inside an epoch skips batches of another shuffle.
#
# Guess: save_state keeps the states of the random generators, so after load_state, skip_first_batches skips the batches
# that were seen, and the resumed epoch goes on as if nothing had happened. use_seedable_sampler makes that certain.
# Behaviour: the order of an epoch is drawn from torch's generator when the epoch begins. A state saved in the middle is
# that of afterwards, so the resumed epoch draws a new order and skips its first batches: stopped in the middle, a
# quarter of the samples is missing from that epoch and another quarter comes twice. A state saved between epochs is
# right. With use_seedable_sampler=True the order depends on the seed and a count of epochs, which is not saved: the new
# run begins with the order of epoch 0, also between epochs, unless the script calls set_epoch. Then the resumed epoch
# is exact, but the next one has the same order once more, as the loader does not notice that skip_first_batches ended
# an epoch; calling set_epoch before each epoch helps. Nothing warns in any of these cases.
# Versions: accelerate 1.15.0, torch 2.15.0, numpy 2.3.5, Python 3.11, one process. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/resume.py" <<'CODE'
import sys

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed

SAMPLES, BATCH = 1000, 10


def prepare(seedable):
    set_seed(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    loader = torch.utils.data.DataLoader(list(range(SAMPLES)), batch_size=BATCH, shuffle=True)
    return accelerator, accelerator.prepare(loader)


def epoch(loader):
    return [sample for batch in loader for sample in batch.tolist()]


for seedable, set_epoch in ((False, False), (True, False), (True, True)):
    _, loader = prepare(seedable)
    orders = [epoch(loader) for _ in range(3)]
    for batches in (0, 50, 90):
        accelerator, loader = prepare(seedable)
        epoch(loader)
        seen = []
        if batches:
            running = iter(loader)
            seen = [sample for _ in range(batches) for sample in next(running).tolist()]
        accelerator.save_state(sys.argv[1] + "/state")
        accelerator, loader = prepare(seedable)
        accelerator.load_state(sys.argv[1] + "/state")
        if set_epoch:
            loader.set_epoch(1)
        resumed = seen + epoch(skip_first_batches(loader, batches) if batches else loader)
        following = epoch(loader)
        print(f"seedable {seedable}, set_epoch {set_epoch}, resumed after {batches} batches:",
              "exact," if resumed == orders[1] else "other,", f"{SAMPLES - len(set(resumed))} samples missing;",
              "the next has the order of", orders.index(following) if following in orders else "none")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q accelerate==1.15.0 torch==2.15.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/resume.py" "$folder" 2>"$folder/log" | tee "$folder/got"

want="seedable False, set_epoch False, resumed after 0 batches: exact, 0 samples missing; the next has the order of 2
seedable False, set_epoch False, resumed after 50 batches: other, 251 samples missing; the next has the order of none
seedable False, set_epoch False, resumed after 90 batches: other, 90 samples missing; the next has the order of none
seedable True, set_epoch False, resumed after 0 batches: other, 0 samples missing; the next has the order of 1
seedable True, set_epoch False, resumed after 50 batches: other, 259 samples missing; the next has the order of 0
seedable True, set_epoch False, resumed after 90 batches: other, 90 samples missing; the next has the order of 0
seedable True, set_epoch True, resumed after 0 batches: exact, 0 samples missing; the next has the order of 2
seedable True, set_epoch True, resumed after 50 batches: exact, 0 samples missing; the next has the order of 1
seedable True, set_epoch True, resumed after 90 batches: exact, 0 samples missing; the next has the order of 1"
diff <(echo "$want") "$folder/got" && echo "as it was"
