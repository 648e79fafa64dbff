#!/usr/bin/env bash
# transformers_trainer_losses.sh: the Trainer's losses of GPT-2 are (T - 1) / T of the mean, and depend on the batch.
#
# Guess: since num_items_in_batch (transformers 4.46) the Trainer's loss is the sum over the predicted tokens divided by
# their number, with any accumulation, and eval_loss is that mean over the evaluation set.
# Behaviour: the number counts each label that is not -100, also the first of a row, which nothing predicts. A row of T
# tokens gets (T - 1) / T of its loss and of its gradient: 3/4 with 4 tokens, 15/16 with 16, in training and in
# evaluate(), where the perplexity of short texts comes out far too low; model(..., labels=...).loss is right. With -100
# as the first label, as where prompts are masked, the Trainer's are right, too, so losses of both kinds of data are not
# comparable. Moreover, eval_loss is the mean of the batches' losses: where rows have different numbers of labels, it
# depends on per_device_eval_batch_size and on the order of the rows.
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.15.0 on a CPU, Python 3.11. It installs
# several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/losses.py" <<'CODE'
import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)


def untrained():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=64, vocab_size=256, bos_token_id=0,
                                       eos_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
    with torch.no_grad():
        model.transformer.wte.weight[:4] *= 3  # so that rows of these tokens have another loss
    return model


def mean_loss(model, rows):
    """Returns the mean over all predicted tokens, and the norm of its gradient."""
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    loss = cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.item(), torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()


def arguments(**options):
    return TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1,
                             logging_steps=1, save_strategy="no", learning_rate=0, max_grad_norm=1e9, **options)


for length, first in ((4, "token"), (4, "-100"), (16, "token"), (16, "-100")):
    rows = [{"input_ids": torch.randint(4, 256, (length,))} for _ in range(16)]
    for row in rows:
        row["labels"] = row["input_ids"].clone()
        if first == "-100":
            row["labels"][0] = -100
    true = mean_loss(untrained(), rows)
    got = []
    for size in (16, 4):
        trainer = Trainer(model=untrained(), train_dataset=rows, eval_dataset=rows,
                          args=arguments(per_device_train_batch_size=size, gradient_accumulation_steps=16 // size))
        trainer.train()
        log = trainer.state.log_history[0]
        got += [log["loss"] / true[0], log["grad_norm"] / true[1], trainer.evaluate()["eval_loss"] / true[0]]
    print("{} tokens, first label {}: {:.3f} of loss, {:.3f} of gradient, {:.3f} of eval_loss; 4 batches: "
          "{:.3f}, {:.3f}, {:.3f}".format(length, first, *got))

rows = []
for i in range(32):  # rows of 4 and of 32 tokens in turn
    row = {"input_ids": torch.randint(*((4, 256) if i % 2 else (0, 4)), (32,))}
    row["labels"] = row["input_ids"].clone()
    row["labels"][0] = -100
    if i % 2:
        row["labels"][4:] = -100
    rows.append(row)
print(f"rows of two lengths: mean {mean_loss(untrained(), rows)[0]:.4f}")
for name, size, each in (("", 1, rows), ("", 8, rows), (", sorted", 8, rows[::2] + rows[1::2])):
    trainer = Trainer(model=untrained(), eval_dataset=each, args=arguments(per_device_eval_batch_size=size))
    print(f"  eval_loss in batches of {size}{name}: {trainer.evaluate()['eval_loss']:.4f}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 transformers==5.24.0 accelerate==1.15.0
"$folder/env/bin/python" "$folder/losses.py" "$folder" 2>"$folder/log" | grep -v '^{' | tee "$folder/got"

want="4 tokens, first label token: 0.750 of loss, 0.750 of gradient, 0.750 of eval_loss; 4 batches: 0.750, 0.750, 0.750
4 tokens, first label -100: 1.000 of loss, 1.000 of gradient, 1.000 of eval_loss; 4 batches: 1.000, 1.000, 1.000
16 tokens, first label token: 0.938 of loss, 0.938 of gradient, 0.938 of eval_loss; 4 batches: 0.938, 0.938, 0.938
16 tokens, first label -100: 1.000 of loss, 1.000 of gradient, 1.000 of eval_loss; 4 batches: 1.000, 1.000, 1.000
rows of two lengths: mean 4.8913
  eval_loss in batches of 1: 5.1999
  eval_loss in batches of 8: 4.8913
  eval_loss in batches of 8, sorted: 5.1999"
diff <(echo "$want") "$folder/got" && echo "as it was"
