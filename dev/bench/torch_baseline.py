#!/usr/bin/env python3
"""Tokens/s of a full training step of GPT-2 in PyTorch, on the CPU or a GPU, to compare train_gpt2 with.

    OMP_NUM_THREADS=2 dev/bench/torch_baseline.py --B 4 --T 256 --precision bf16
    dev/bench/torch_baseline.py --compile            uses torch.compile (PyTorch 2)
    dev/bench/torch_baseline.py --device cuda --B 64 --T 1024 --compile --json results.jsonl

A step does the same as in train_gpt2: forward with a tied head over the padded vocabulary, cross entropy, backward,
clipping to norm 1, AdamW with decay on matrices only. bf16 is autocast, as PyTorch's users run it: fp32 weights, bf16
matmuls. Attention is scaled_dot_product_attention where PyTorch has it, else written out. AdamW is fused where PyTorch
has that for the device. The best of the timed steps counts. Two steps before them, which compile and fill caches, are
not timed. On a GPU fp32 matmuls are fp32, not TF32, and the loss is read once per step, as in a training loop.
"""
import argparse
import json
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

# Layers, heads, channels, vocabulary: 50257 padded to 50304, as in train_gpt2. small: the model of the quick start.
SIZES = {"d12": (12, 12, 768, 50304), "d24": (24, 16, 1024, 50304), "d36": (36, 20, 1280, 50304),
         "d48": (48, 25, 1600, 50304), "small": (6, 6, 384, 4096)}


def attention(q, k, v):
    """Causal; q, k, v are (B, NH, T, HS)."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    T = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, C // self.NH).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(C, -1))
        x = x + self.attproj(attention(q, k, v).transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, L, NH, C, V, T):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block(C, NH) for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.view(-1))


def make_optimizer(model):
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    settings = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    try:
        optimizer = torch.optim.AdamW(groups, fused=True, **settings)
        return optimizer, "fused AdamW"
    except (RuntimeError, TypeError):  # no fused AdamW on the CPU before PyTorch 2.4
        return torch.optim.AdamW(groups, **settings), "AdamW"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="d12")
    parser.add_argument("--B", type=int, default=4)
    parser.add_argument("--T", type=int, default=256)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", metavar="FILE", help="append the result as a line")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    model = GPT2(*SIZES[args.model], args.T).to(args.device)
    optimizer, optimizer_name = make_optimizer(model)
    forward = torch.compile(model) if args.compile else model
    vocabulary = SIZES[args.model][3] - 47
    tokens, targets = (torch.randint(0, vocabulary, (args.B, args.T), device=args.device) for _ in range(2))

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    times = []
    for i in range(2 + args.steps):
        begin = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - begin)
    best, median = min(times[2:]), sorted(times[2:])[args.steps // 2]
    tokens_per_step = args.B * args.T
    name = f"PyTorch {torch.__version__}{' compiled' if args.compile else ''}"
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} threads"
    print(f"{name}, {optimizer_name}, {args.model} {args.precision} B={args.B} T={args.T}, {device}: "
          f"{tokens_per_step / best:.0f} tokens/s best, {tokens_per_step / median:.0f} median of {args.steps} steps, "
          f"loss {loss:.3f}")
    if args.json:
        with open(args.json, "a") as file:
            print(json.dumps({"bench": "other", "name": name, "device": device, "model": args.model, "B": args.B,
                              "T": args.T, "dtype": args.precision, "ms": 1e3 * best,
                              "tokens_per_s": tokens_per_step / best,
                              **({"bytes": torch.cuda.max_memory_reserved()} if args.device == "cuda" else {})}),
                  file=file)


if __name__ == "__main__":
    main()
