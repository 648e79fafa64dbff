#!/usr/bin/env python3
"""The GPT-2 of Hugging Face's transformers in float64, by PyTorch's autograd: the reference of test_gpt2.

Writes dev/test/support/reference.safetensors, which is committed, because tests need no PyTorch. Needs torch,
transformers and safetensors. Another BLAS may move the last bits.

The file holds, as safetensors:
    transformer.*       the weights, under Hugging Face's names and in its layout: Conv1D matrices are (in, out)
    tokens, targets     (B, T), whole numbers
    logits              (B, T, V)
    loss                (1)              mean over all positions
    grad.*              d loss / d weight of every tensor, named and laid out like the weights
    losses, grad_norms  (STEPS)          of AdamW steps on the same batch: before each step's update, before clipping
    metadata            config: the config.json of the model; optimizer: the settings of the steps

The weights are rounded to bf16, so that fp32 and bf16 models start from the same numbers. Biases and layernorm weights
are not the 0 and 1 of an initialization, and weights are large enough that no gradient vanishes: an operation that
drops one of them fails. The one exception: the gradient of the keys' bias (the middle third of c_attn.bias) is zero,
because softmax does not see a constant. T < max_T and V is no multiple of 128, so padding and unused rows have their
part too.
"""
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

L, NH, C, V, MAX_T = 2, 3, 48, 67, 24
B, T = 3, 17
STEPS = 10
OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
CONFIG = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": V, "n_positions": MAX_T,
          "n_ctx": MAX_T, "n_embd": C, "n_layer": L, "n_head": NH, "n_inner": None, "activation_function": "gelu_new",
          "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
          "attn_pdrop": 0.0, "bos_token_id": V - 1, "eos_token_id": V - 1, "tie_word_embeddings": True,
          "torch_dtype": "float32"}
FILE = Path(__file__).with_name("reference.safetensors")


def make_model(rng):
    """RandomState's stream is frozen, so the weights are the same with every numpy."""
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, attn_implementation="eager")).double()
    for name, weight in model.named_parameters():
        is_matrix, is_norm = weight.dim() == 2 and ".h." in name, ".ln_" in name and name.endswith(".weight")
        scale = weight.shape[0] ** -0.5 if is_matrix else 0.2 if is_norm or ".wte." in name else 0.1
        values = torch.tensor(is_norm + scale * rng.standard_normal(weight.shape))
        weight.data.copy_(values.float().bfloat16())
    return model


def backward(model, tokens, targets):
    """Returns the logits and the loss; the gradients are the parameters' then."""
    model.zero_grad()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, V), targets.view(-1))
    loss.backward()
    return logits, loss


def train(model, tokens, targets):
    """STEPS AdamW steps on one batch; changes weights. Decay is for matrices and embeddings only."""
    o, parameters = OPTIMIZER, list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() == dim], "weight_decay": decay}
              for dim, decay in ((2, o["weight_decay"]), (1, 0.0))]
    adamw = torch.optim.AdamW(groups, o["lr"], (o["beta1"], o["beta2"]), o["eps"])
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(backward(model, tokens, targets)[1].item())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, o["grad_clip"]).item())
        adamw.step()
    return {"losses": losses, "grad_norms": norms}


def main():
    rng = np.random.RandomState(1337)
    model = make_model(rng)
    tokens, targets = (torch.tensor(rng.randint(0, V, (B, T))) for _ in range(2))
    logits, loss = backward(model, tokens, targets)
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    tensors |= {name.replace("transformer.", "grad."): weight.grad for name, weight in model.named_parameters()}
    tensors |= {"tokens": tokens, "targets": targets, "logits": logits.detach(), "loss": loss.detach().view(1)}
    tensors = {name: values.float().clone() for name, values in tensors.items()}
    tensors |= {name: torch.tensor(values).float() for name, values in train(model, tokens, targets).items()}
    save_file(tensors, FILE, {"format": "pt", "config": json.dumps(CONFIG), "optimizer": json.dumps(OPTIMIZER)})
    print(f"{FILE}: {len(tensors)} tensors, {FILE.stat().st_size:,} bytes, loss {loss:.6f}")


if __name__ == "__main__":
    main()
