#!/usr/bin/env python3
"""GPT-2 in PyTorch, in float64 with autograd: the reference of test_gpt2.

Writes dev/test/support/reference.safetensors, which is committed, because tests need no PyTorch. Needs PyTorch and
numpy; Debian's python3-torch is enough (run it by /usr/bin/python3). Another BLAS may move the last bits.

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
import math
import os
import struct

import numpy as np
import torch

L, NH, C, V, MAX_T = 2, 3, 48, 67, 24
B, T = 3, 17
STEPS = 10
OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
CONFIG = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": V, "n_positions": MAX_T,
          "n_ctx": MAX_T, "n_embd": C, "n_layer": L, "n_head": NH, "n_inner": None, "activation_function": "gelu_new",
          "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
          "attn_pdrop": 0.0, "bos_token_id": V - 1, "eos_token_id": V - 1, "tie_word_embeddings": True,
          "torch_dtype": "float32"}
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reference.safetensors")


def round_to_bf16(x):
    """float32 values that bf16 holds exactly: the upper 16 bits, to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def make_weights(rng):
    """name -> float64 leaf tensor. RandomState's stream is frozen, so these are the same with every numpy."""
    weights = {}

    def add(name, *shape, scale, offset=0.0):
        values = round_to_bf16(offset + scale * rng.standard_normal(shape))
        weights[name] = torch.tensor(values, dtype=torch.float64, requires_grad=True)

    def add_layernorm(name):
        add(name + ".weight", C, scale=0.2, offset=1.0)
        add(name + ".bias", C, scale=0.1)

    def add_conv1d(name, inputs, outputs):
        add(name + ".weight", inputs, outputs, scale=1.0 / math.sqrt(inputs))
        add(name + ".bias", outputs, scale=0.1)

    add("wte.weight", V, C, scale=0.2)
    add("wpe.weight", MAX_T, C, scale=0.1)
    for l in range(L):
        add_layernorm(f"h.{l}.ln_1")
        add_conv1d(f"h.{l}.attn.c_attn", C, 3 * C)
        add_conv1d(f"h.{l}.attn.c_proj", C, C)
        add_layernorm(f"h.{l}.ln_2")
        add_conv1d(f"h.{l}.mlp.c_fc", C, 4 * C)
        add_conv1d(f"h.{l}.mlp.c_proj", 4 * C, C)
    add_layernorm("ln_f")
    return weights


def forward(weights, tokens, targets):
    """Logits (B, T, V) and the mean loss, written from the definition of the network."""
    def layernorm(name, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * weights[name + ".weight"] + weights[name + ".bias"]

    def conv1d(name, x):
        return x @ weights[name + ".weight"] + weights[name + ".bias"]

    def gelu(x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x ** 3)))

    def attention(qkv):
        q, k, v = (x.view(B, T, NH, C // NH).transpose(1, 2) for x in qkv.split(C, dim=-1))  # (B, NH, T, HS)
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // NH)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return out.transpose(1, 2).reshape(B, T, C)

    x = weights["wte.weight"][tokens] + weights["wpe.weight"][:T]
    for l in range(L):
        x = x + conv1d(f"h.{l}.attn.c_proj", attention(conv1d(f"h.{l}.attn.c_attn", layernorm(f"h.{l}.ln_1", x))))
        x = x + conv1d(f"h.{l}.mlp.c_proj", gelu(conv1d(f"h.{l}.mlp.c_fc", layernorm(f"h.{l}.ln_2", x))))
    logits = layernorm("ln_f", x) @ weights["wte.weight"].T
    loss = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    return logits, loss


def backward(weights, loss):
    for w in weights.values():
        w.grad = None
    loss.backward()
    return math.sqrt(sum(float((w.grad ** 2).sum()) for w in weights.values()))


def train(weights, tokens, targets):
    """STEPS AdamW steps on one batch; changes weights. Decay is decoupled and for matrices and embeddings only."""
    o = OPTIMIZER
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        _, loss = forward(weights, tokens, targets)
        norm = backward(weights, loss)
        losses.append(loss.item())
        norms.append(norm)
        factor = min(1.0, o["grad_clip"] / norm)
        with torch.no_grad():
            for name, w in weights.items():
                grad = w.grad * factor
                m[name] = o["beta1"] * m[name] + (1 - o["beta1"]) * grad
                v[name] = o["beta2"] * v[name] + (1 - o["beta2"]) * grad ** 2
                m_hat, v_hat = m[name] / (1 - o["beta1"] ** step), v[name] / (1 - o["beta2"] ** step)
                decay = o["weight_decay"] if w.dim() == 2 else 0.0
                w -= o["lr"] * (m_hat / (torch.sqrt(v_hat) + o["eps"]) + decay * w)
    return losses, norms


def compute():
    rng = np.random.RandomState(1337)
    weights = make_weights(rng)
    tokens, targets = (torch.tensor(rng.randint(0, V, (B, T))) for _ in range(2))
    logits, loss = forward(weights, tokens, targets)
    backward(weights, loss)
    tensors = {"transformer." + name: w.detach().numpy().astype(np.float32) for name, w in weights.items()}
    tensors |= {"grad." + name: w.grad.numpy().astype(np.float32) for name, w in weights.items()}
    tensors |= {"tokens": tokens.numpy().astype(np.float32), "targets": targets.numpy().astype(np.float32),
                "logits": logits.detach().numpy().astype(np.float32), "loss": np.float32([loss.item()])}
    losses, norms = train(weights, tokens, targets)
    tensors |= {"losses": np.float32(losses), "grad_norms": np.float32(norms)}
    return tensors


def write_safetensors(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def main():
    tensors = compute()
    metadata = {"format": "pt", "config": json.dumps(CONFIG), "optimizer": json.dumps(OPTIMIZER)}
    write_safetensors(FILE, tensors, metadata)
    print(f"{FILE}: {len(tensors)} tensors, {os.path.getsize(FILE):,} bytes, loss {tensors['loss'][0]:.6f}")


if __name__ == "__main__":
    main()
