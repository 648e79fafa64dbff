#!/usr/bin/env bash
# transformers_trainer_resume.sh: a Trainer that resumes ignores another learning_rate, weight_decay or adam_beta2.
#
# Guess: trainer.train(resume_from_checkpoint=...) with other TrainingArguments goes on with these, or says that they
# differ from the checkpoint's, as it does with per_device_train_batch_size.
# Behaviour: the optimizer's groups and the schedule's peak are those of the checkpoint's optimizer.pt and scheduler.pt,
# so learning_rate, weight_decay, adam_beta2 and adam_epsilon keep their old values, and no message says so.
# lr_scheduler_type and max_steps are obeyed, also without a message: their curve is multiplied by the old peak, and the
# first step still has the rate of the old curve. So "constant" at 1e-5, given to a run of 1e-3 whose rate has fallen
# to 5e-4, trains on at 1e-3. Another batch size is obeyed, with a warning. For another rate start anew from weights.
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.15.0 on a CPU, Python 3.11. It installs several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/resume.py" <<'CODE'
import logging
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

folder = sys.argv[1]
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(256, (64, 16))]
FIRST = {"max_steps": 8, "learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
         "lr_scheduler_type": "linear", "per_device_train_batch_size": 4}


def train(name, output, checkpoint=None, **changes):
    arguments = TrainingArguments(output_dir=f"{folder}/{output}", use_cpu=True, report_to=[], disable_tqdm=True,
                                  logging_steps=1, save_steps=4, seed=1, **(FIRST | changes))
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=16, vocab_size=256, bos_token_id=0,
                                       eos_token_id=0))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    messages.clear()
    trainer.train(resume_from_checkpoint=checkpoint)
    group = trainer.optimizer.param_groups[0]
    differences = [line.split(":")[0].strip() for text in messages if "do not match" in text
                   for line in text.splitlines()[1:] if line.strip()]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry][4:8]
    print(f"{name}; told: {' '.join(differences) or 'nothing'}\n ", *(f"{rate:.4g}" for rate in rates),
          f"decay {group['weight_decay']}, beta2 {group['betas'][1]}, epsilon {group['eps']}")


train("rates of steps 5 to 8", "first")
for change in ({}, {"learning_rate": 1e-5, "weight_decay": 0.5}, {"adam_beta2": 0.95, "adam_epsilon": 1e-6},
               {"lr_scheduler_type": "constant", "learning_rate": 1e-5}, {"max_steps": 16},
               {"per_device_train_batch_size": 8}):
    train(", ".join(f"{key}={value}" for key, value in change.items()) or "resumed", "second",
          f"{folder}/first/checkpoint-4", **change)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 transformers==5.24.0 accelerate==1.15.0
"$folder/env/bin/python" "$folder/resume.py" "$folder" 2>"$folder/log" | grep -v '^{' | tee "$folder/got"

want="rates of steps 5 to 8; told: nothing
  0.0005 0.000375 0.00025 0.000125 decay 0.1, beta2 0.999, epsilon 1e-08
resumed; told: nothing
  0.0005 0.000375 0.00025 0.000125 decay 0.1, beta2 0.999, epsilon 1e-08
learning_rate=1e-05, weight_decay=0.5; told: nothing
  0.0005 0.000375 0.00025 0.000125 decay 0.1, beta2 0.999, epsilon 1e-08
adam_beta2=0.95, adam_epsilon=1e-06; told: nothing
  0.0005 0.000375 0.00025 0.000125 decay 0.1, beta2 0.999, epsilon 1e-08
lr_scheduler_type=constant, learning_rate=1e-05; told: nothing
  0.0005 0.001 0.001 0.001 decay 0.1, beta2 0.999, epsilon 1e-08
max_steps=16; told: nothing
  0.0005 0.0006875 0.000625 0.0005625 decay 0.1, beta2 0.999, epsilon 1e-08
per_device_train_batch_size=8; told: per_device_train_batch_size
  0.0005 0.000375 0.00025 0.000125 decay 0.1, beta2 0.999, epsilon 1e-08"
diff <(echo "$want") "$folder/got" && echo "as it was"
