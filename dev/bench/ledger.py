#!/usr/bin/env python3
"""Predicts the time of every kernel launch of a training step on a GPU, from its bytes and FLOPs. Needs no GPU.

    dev/bench/ledger.py --gpu h100-sxm --model d12 --micro-batch 64
    dev/bench/ledger.py --gpu h100-sxm --model d48 --micro-batch 8 --ranks 64          with NCCL's and the host's time
    dev/bench/ledger.py --micro-batch 64 --micro-steps 8 --optimizer muon                    with Newton-Schulz's share
    dev/bench/ledger.py --gpu h100-sxm --measured results.jsonl    figures of bench_ops beside the predictions
    dev/bench/ledger.py --update-docs                                           writes the tables of docs/performance.md

The floor of a launch is the larger of two times: of its bytes at the memory's data-sheet speed, and of its FLOPs at the
data-sheet peak. The prediction divides these by shares of the two speeds that kernels reach, and adds a time per
launch. Matmuls also pay for the tiles of their last wave and for other tensors of their epilogue. `--assumptions`
prints each assumption with its range, its source and the command that measures it.

The launches are those of one rank without recomputation, with master weights and cuDNN's deterministic attention, or,
with --attention wgmma and --head wgmma, our kernels for Hopper. bench_ops has the same operations, calls, bytes and
FLOPs: `ledger.py --operations` and `bench_ops --list` print the same lines.
"""
import argparse
import math
import pathlib
import re
import sys
import textwrap
from dataclasses import dataclass, replace

import results

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/performance.md"


def fail(message):
    print(f"ledger.py: {message}", file=sys.stderr)
    sys.exit(2)


def in_source(path, pattern):
    """Matches of the pattern in a source file of the trainer. Figures that are in the source are not repeated here."""
    return re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"))


# ---- GPUs

@dataclass
class Gpu:
    title: str
    name: str         # its row in llmc/model/mfu.h, which has the peaks in bf16 and fp32
    sms: int
    memory: float     # GB/s
    fp8: float        # dense TFLOP/s; 0: the GPU has no FP8
    hopper: bool      # cuBLASLt fuses GELU (gelu_fusion_by_gpu, llmc/cuda/cublaslt.cpp), cuDNN has kernels for Hopper

    def peak(self, precision):
        """Dense FLOP/s from the data sheet."""
        return 1e12 * (self.fp8 if precision == "fp8" else MFU_PEAKS[self.name][precision == "fp32"])


MFU_PEAKS = {name: (float(bf16), float(fp32)) for name, bf16, fp32 in
             in_source("llmc/model/mfu.h", r'\{"([^"]+)", ([\d.]+), [\d.]+, ([\d.]+)\}')}
GPUS = {  # NVIDIA's data sheets; its white papers for SMs, and for all of the RTX 4090
    "h100-sxm": Gpu("H100 SXM", "H100", 132, 3350, 1979, True),
    "h100-pcie": Gpu("H100 PCIe", "H100 PCIe", 114, 2000, 1513, True),
    "h200": Gpu("H200 SXM", "H200", 132, 4800, 1979, True),
    "a100": Gpu("A100 SXM 80 GB", "A100", 108, 2039, 0, False),
    "rtx-4090": Gpu("RTX 4090", "RTX 4090", 128, 1008, 330.3, False),
}

# ---- assumptions

@dataclass
class Assumption:
    value: float
    low: float     # the range in which the true value is expected
    high: float
    measure: str   # command that measures it
    source: str
    tile: int = 0  # cost of starting and ending a matmul tile, in elements of its inner dimension


OPS = "bench_ops --precision bf16"
RANKS, NODES = "train_gpt2cu --ranks 8 --zero 1", "srun --ntasks-per-node 8 train_gpt2cu --zero 1"
# Kernels reach shares of the data sheet's dense FLOP/s and of the memory's speed. Other GPUs are assumed to reach those
# of an H200, which were measured (RESULTS.md). Times are in us.
ASSUMPTIONS = {
    "matmul bf16": Assumption(0.75, 0.71, 0.79, OPS, "fitted, with epilogue, to 18 operations of 124M and 1558M on "
                              "H200 (-9 to 10 %); the largest matmul had 729 TFLOP/s on one H200 and 812 on another"),
    "matmul by wgmma": Assumption(0.72, 0.6, 0.79, OPS + " --op 'head forward'", "an estimate, never timed; a "
                                  "prototype of its main loop: 360 us, cuBLASLt 368 (qkv forward, H200)"),
    "matmul fp32": Assumption(0.75, 0.5, 0.9, OPS, "an estimate: no tensor cores, no figure of cuBLAS was found"),
    "matmul fp8": Assumption(0.81, 0.7, 0.9, OPS, "one scale per tensor; fitted to 65536 x 6656 x 1664 at 1160 TFLOP/s "
                             "(nanochat, dev/LOG.md: 1.45 ms, 0.2 of them an estimate for the cast) and an inner "
                             "dimension of 16384 at 1550 (DeepGEMM)", 640),
    "epilogue": Assumption(1.5, 1, 2, OPS, "time of a tensor that a matmul's epilogue reads or writes besides, as a "
                           "multiple of the memory's time; fitted"),
    "epilogue GELU'": Assumption(1.7, 1.5, 2.5, OPS, "the same, by kernels older than Hopper: H200 571 us, plain 390"),
    "attention_forward": Assumption(0.325, 0.29, 0.35, OPS, "cuDNN, causal, 64 channels a head, T 1024: 331 and 314 "
                                    "TFLOP/s on H200; 288 on H100 (FlashAttention-3 paper, figure 5)"),
    "attention_backward": Assumption(0.225, 0.20, 0.25, OPS + " --op attention_backward", "deterministic, which stores "
                                     "dS: 221 and 224 TFLOP/s on H200; about 255 with --deterministic off"),
    "attention_forward by wgmma": Assumption(0.39, 0.37, 0.42, OPS + " --attention wgmma --op attention_forward",
                                             "386 TFLOP/s in a row on H200, 412 alone"),
    "attention_backward by wgmma": Assumption(0.32, 0.29, 0.33, OPS + " --attention wgmma --op attention_backward",
                                              "316 TFLOP/s in a row on H200, 319 alone; 284 at 1558M"),
    "attention, no Hopper": Assumption(0.35, 0.3, 0.5, OPS, "an estimate: FlashAttention-2 has 0.50 to 0.73 of an A100 "
                                       "(its paper), less with 64 channels and T 1024"),
    "attention fp32": Assumption(0.15, 0.1, 0.3, OPS, "an estimate: our own kernels on the FMA units, never timed"),
    "memory": Assumption(0.80, 0.70, 0.88, OPS + " --op layernorm_backward",
                         "LayerNorm 0.66 to 0.79, AdamW 0.82, cross entropy 0.87 on H200"),
    "launch": Assumption(2, 1, 4, OPS, "an estimate: between nodes of a CUDA graph, and to fill and drain a kernel"),
    "GB/s of 8 GPUs": Assumption(360, 310, 370, RANKS, "bus bandwidth of a reduce-scatter: 349 to 362 from 1 GB on "
                                 "(H100, NVIDIA/nccl #1047), 370 at most (nccl-tests #212)"),
    "latency of 8 GPUs": Assumption(50, 30, 100, RANKS, "134 MB took 377 in #1047, 326 of them by the bandwidth"),
    "GB/s of 64 GPUs": Assumption(345, 200, 376, NODES, "eight nodes of H100 (NVIDIA/nccl #1229); at most 8 x 47 by "
                                  "400 Gb/s adapters (nccl-tests #290)"),
    "latency of 64 GPUs": Assumption(150, 100, 300, NODES, "NCCL's own model (src/graph/tuning.cc): a ring of 56 steps "
                                     "of 1.9 by NVLink and 7 of 4 by the network (LL128); 300 by Simple"),
    "speed beside NCCL": Assumption(0.74, 0.7, 0.95, NODES, "of kernels during a collective: matmuls on 8 H100 were 30 "
                                    "to 40 % slower (pytorch #179937)"),
    "host per launch": Assumption(5, 3, 10, RANKS, "an estimate, without CUDA graph"),
    "host per collective": Assumption(100, 30, 200, RANKS, "an estimate: with blocking = 0 NCCL starts a thread each"),
}
TILE = (128, 256)  # rows and columns of a matmul's result that an SM computes at a time
MAX_SPLITS = 32


def assumed(name):
    return ASSUMPTIONS[name].value


def matmul_seconds(launch, gpu):
    """SMs compute the tiles of the result in whole waves. A weight's gradient has few tiles and a long inner dimension,
    so up to MAX_SPLITS SMs share a tile (split-K); each writes float partial sums, which are read again to be added."""
    m, n, k = launch.shape
    matmul = ASSUMPTIONS["matmul " + ("by wgmma" if "by wgmma" in launch.kernels else launch.precision)]
    times = []
    for rows, columns in (TILE, TILE[::-1]):
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        for split in range(1, MAX_SPLITS + 1 if launch.may_split else 2):
            waves = math.ceil(tiles * split / gpu.sms)
            flop = waves * gpu.sms * 2 * rows * columns * (k / split + matmul.tile)
            partial_sums = 8 * split * m * n if split > 1 else 0
            times.append(flop / matmul.value / gpu.peak(launch.precision) + partial_sums / memory_rate(gpu))
    return min(times)


def memory_rate(gpu):
    return assumed("memory") * 1e9 * gpu.memory


@dataclass
class Launch:
    """A kernel, or several short kernels in a row, that belong to an operation of bench_ops."""
    phase: str
    operation: str
    kernels: str
    group: str
    calls: int           # calls of the operation per step
    moved: float         # bytes per call
    flop: float = 0.0    # FLOPs per call
    launches: int = 1    # per call
    extra: float = 0.0   # bytes that a fused kernel would not move; bench_ops does not count them
    precision: str = "bf16"
    shape: tuple = ()    # rows, columns and inner dimension of a matmul
    epilogue: str = "epilogue"
    beside: float = 0.0  # bytes, among those moved, of a tensor that the epilogue reads or writes besides
    may_split: bool = False
    begins: bool = True  # False: this launch continues a call that an earlier launch began

    def floor(self, gpu):
        return self.calls * max(self.moved / (1e9 * gpu.memory), self.flop / gpu.peak(self.precision))

    def seconds(self, gpu):
        compute = 0.0
        if self.shape:
            compute = matmul_seconds(self, gpu) + assumed(self.epilogue) * self.beside / memory_rate(gpu)
        elif self.flop:
            name = self.kernels if gpu.hopper else "attention, no Hopper"
            share = assumed("attention fp32" if self.precision == "fp32" else name)
            compute = self.flop / share / gpu.peak(self.precision)
        return self.calls * (max(compute, self.moved / memory_rate(gpu)) + 1e-6 * self.launches * assumed("launch"))


# ---- the launches of a step

ITERATIONS = int(in_source("llmc/train/muon.h", r"ITERATIONS = (\d+)")[0])  # iterations of Newton-Schulz
STACK_MATRICES = int(in_source("llmc/ops/ops.h", r"MOST = (\d+)")[0])
STACK_ELEMENTS = int(in_source("llmc/train/muon.cpp", r"enough = .* : (\d+) << 20")[0]) << 20


@dataclass
class Shape:
    L: int
    NH: int
    C: int
    max_T: int
    V: int
    B: int
    T: int
    precision: str
    micro_steps: int
    logit_rows: int
    ranks: int = 1  # with ZeRO-1
    muon: bool = False
    wgmma: bool = False  # attention by our kernels for Hopper
    head_wgmma: bool = False  # the head's forward by our matmul for Hopper, which writes exponentials

    def __post_init__(self):
        self.N = self.B * self.T
        self.Vp = 128 * math.ceil(self.V / 128)
        self.chunks = math.ceil(self.N / self.logit_rows)
        self.rows = math.ceil(self.N / self.chunks)
        # The dtype of all tensors but the operands of the layers' matmuls.
        self.dtype = "fp32" if self.precision == "fp32" else "bf16"
        self.element = 4 if self.precision == "fp32" else 2  # bytes of an element of dtype
        self.operand = 1 if self.precision == "fp8" else self.element  # bytes, in the layers' matmuls

    def buckets(self):
        """Parameters of each ParamLayout::bucket: of the embeddings and lnf, then of each layer."""
        C = self.C
        layer = padded(3 * C * C, C * C, 4 * C * C, 4 * C * C, C, C, 3 * C, C, C, C, 4 * C, C)
        return [padded(self.Vp * C, self.max_T * C, C, C)] + self.L * [layer]

    def zeroed(self):
        """Elements that a step zeroes, as kernels add to them: gradients of wpe, biases and LayerNorms, the loss."""
        C = self.C
        return 1 + self.max_T * C + padded(C, C) + self.L * padded(C, C, 3 * C, C, C, C, 4 * C, C)

    def flops_per_token(self):
        """The FLOPs that MFU counts, as in llmc/model/mfu.h, by the parameters without padding."""
        parameters = self.V * self.C + self.max_T * self.C + 2 * self.C + self.L * (12 * self.C**2 + 13 * self.C)
        return 6 * parameters + 6 * self.L * self.C * self.T


def padded(*sizes):
    """Elements of tensors that begin at multiples of 64 elements."""
    return sum(64 * math.ceil(size / 64) for size in sizes)


def gelu_is_fused(s, gpu):
    return gpu.hopper and s.precision != "fp32"


def matmul_forward(s, name, IC, OC, gpu, gelu=False, residual=False):
    """gelu: also writes the values before GELU. Where the library's GELU is slow, our own kernel follows. residual:
    adds the residual stream, which has the size of the result."""
    fused = gelu and gelu_is_fused(s, gpu)
    calls, result = s.L * s.micro_steps, s.element * s.N * OC
    beside = result if fused or residual else 0
    moved = s.operand * (s.N * IC + IC * OC) + result + beside
    kernels = "matmul + bias" + (" + GELU" if fused else "") + (" + residual" if residual else "")
    yield Launch("forward", name + " forward", kernels, "layers' matmuls, forward", calls, moved, 2 * s.N * IC * OC,
                 precision=s.precision, shape=(s.N, OC, IC), beside=beside)
    if gelu and not fused:
        yield Launch("forward", name + " forward", "gelu_forward", "passes of GELU and bias", calls, 2 * result,
                     extra=result, begins=False)


def matmul_backward(s, name, IC, OC, gpu, gelu=False, bias=False):
    """The gradients of the input, of the weight (in float) and of the bias. gelu: the input is GELU's output."""
    fused = gelu and gelu_is_fused(s, gpu)
    calls, result, operation = s.L * s.micro_steps, s.element * s.N * IC, name + " backward"
    beside = result if fused else 0
    moved = s.operand * (s.N * OC + IC * OC) + result + beside
    yield Launch("backward", operation, "input gradient" + (" x GELU'" if fused else ""),
                 "layers' matmuls, input gradients", calls, moved, 2 * s.N * IC * OC, precision=s.precision,
                 shape=(s.N, IC, OC), epilogue="epilogue GELU'", beside=beside)
    if gelu and not fused:
        yield Launch("backward", operation, "gelu_backward", "passes of GELU and bias", calls, 3 * result,
                     extra=2 * result, begins=False)
    yield weight_gradient(s, operation, "layers' matmuls, weight gradients", calls, s.N, IC, OC, 1)
    if bias:  # in FP8 the pass that makes the copies also adds up blocks of 128 rows
        in_copies = s.precision == "fp8"
        moved = 8 / 128 * s.N * OC if in_copies else s.element * s.N * OC
        yield Launch("backward", operation, "sum_rows" if in_copies else "bias_backward, sum_rows",
                     "passes of GELU and bias", calls, moved, launches=2 - in_copies, extra=moved, begins=False)


def weight_gradient(s, operation, group, calls, N, IC, OC, chunks):
    """All calls in a step except the first also read the gradient, to add to it. bench_ops counts one micro-step."""
    in_layer = group.startswith("layers")
    reads = 4 * IC * OC * (s.micro_steps - 1) / s.micro_steps if chunks == 1 else 4 * IC * OC
    phase, operand, precision = ("backward", s.operand, s.precision) if in_layer else ("head", s.element, s.dtype)
    return Launch(phase, operation, "weight gradient", group, calls, operand * N * (IC + OC) + 4 * IC * OC + reads,
                  2 * N * IC * OC, extra=reads if chunks == 1 else 0, precision=precision, shape=(IC, OC, N),
                  may_split=True, begins=False)


def cast(s, phase, operation, elements, calls, what, copies, amax=False):
    """Conversion of a tensor to FP8. cuBLASLt's FP8 matmuls on Hopper need the inner dimension of both operands
    contiguous. Forward reads rows of its input. Backward reads a transposed copy of the input, and both layouts of the
    output's gradient. A pass reads bf16 and writes 1 or 2 copies. The scale needs the largest magnitude (amax) first.
    LayerNorm and GELU kernels find it as they write the tensor. amax: a library writes it, so another pass does."""
    passes = [(f"amax of {what}", 2 * elements)] * amax + [(f"FP8 copies of {what}", (2 + copies) * elements)]
    for kernels, moved in passes if s.precision == "fp8" else []:
        yield Launch(phase, operation, kernels, "FP8 casts", calls, moved, extra=moved, begins=False)


def attention(s, phase, moved, flop, launches=1, extra=0.0):
    """moved: tensors of N x C elements. flop: for each causal pair of tokens and channel. Our kernel for Hopper is one
    launch, and stores no gradients of scores."""
    name = "attention_" + phase
    kernels = name + " by wgmma" * s.wgmma
    if s.wgmma:
        launches, extra = 1, 0.0
    yield Launch(phase, name, kernels, "attention", s.L * s.micro_steps, moved * s.element * s.N * s.C + extra,
                 flop * 0.5 * s.N * s.T * s.C, launches, extra, s.dtype)


def forward(s, gpu):
    C, NC, calls, rows = s.C, s.N * s.C, s.L * s.micro_steps, "LayerNorm, embeddings"

    def layernorm(what, calls):
        return Launch("forward", "layernorm_forward", f"layernorm_forward ({what})", rows, calls, 2 * s.element * NC)
    yield Launch("forward", "embedding_forward", "embedding_forward", rows, s.micro_steps, 3 * s.element * NC)
    yield layernorm("ln1 of the first layer", s.micro_steps)
    yield from cast(s, "forward", "qkv forward", NC, calls, "ln1", 1)
    yield from matmul_forward(s, "qkv", C, 3 * C, gpu)
    yield from attention(s, "forward", 4, 4)
    yield from cast(s, "forward", "attproj forward", NC, calls, "att", 1, amax=True)
    yield from matmul_forward(s, "attproj", C, C, gpu, residual=True)
    yield layernorm("ln2", calls)
    yield from cast(s, "forward", "fc forward", NC, calls, "ln2", 1)
    yield from matmul_forward(s, "fc", C, 4 * C, gpu, gelu=True)
    yield from cast(s, "forward", "fcproj forward", 4 * NC, calls, "gelu", 1, amax=gelu_is_fused(s, gpu))
    yield from matmul_forward(s, "fcproj", 4 * C, C, gpu, residual=True)
    yield layernorm("ln1 of the next layer, lnf", calls)


def sort_passes(s):
    return 1 if s.V <= 256 else 2 if s.V <= 65536 else 3  # passes of the radix sort of tokens, 8 bits each


def head_and_losses(s):
    """The pass over the logits, and those over rows of C channels, are bytes that a fused kernel would not move."""
    C, Vp, rows, calls, beside = s.C, s.Vp, s.rows, s.chunks * s.micro_steps, "head, beside its matmuls"
    logits, weight, row = s.element * rows * Vp, s.element * Vp * C, s.element * rows * C
    target_rows = s.element * min(rows, s.V) * C

    def matmul(operation, kernels, shape):
        return Launch("head", operation, kernels, "head's matmuls", calls, row + weight + logits, 2 * rows * Vp * C,
                      precision=s.dtype, shape=shape)

    def other(operation, kernels, moved, launches=1):
        return Launch("head", operation, kernels, beside, calls, moved, launches=launches, extra=moved, begins=False)
    yield Launch("head", "head targets", "head_targets", beside, calls, row + target_rows)
    if s.head_wgmma:
        yield matmul("head forward", "matmul and exponentials by wgmma", (rows, Vp, C))
        yield other("head forward", "sum_of_shards", 4 * rows * math.ceil(Vp / 192))
    else:
        yield matmul("head forward", "matmul", (rows, Vp, C))
        yield other("head forward", "head_exponentials", 2 * logits)
    yield Launch("head", "head losses", "head_losses", beside, calls, 12 * rows)
    yield matmul("head backward", "input gradient", (rows, C, Vp))
    yield other("head backward", "head_factors", 8 * rows * C + 2 * row + target_rows)  # between: in float
    yield weight_gradient(s, "head backward", "head's matmuls", calls, rows, C, Vp, s.chunks)
    yield other("head backward", "sort, token_parts, token_join", row + 8 * C * min(rows, s.V),
                launches=2 + 3 * sort_passes(s))
    yield Launch("head", "accumulate_loss", "accumulate_loss", beside, s.micro_steps, 4 * s.N)


def backward(s, gpu):
    C, NC, calls = s.C, s.N * s.C, s.L * s.micro_steps

    def layernorm(what, calls):
        return Launch("backward", "layernorm_backward", f"layernorm_backward ({what}), sum_rows",
                      "LayerNorm, embeddings", calls, 4 * s.element * NC, launches=2)
    yield from head_and_losses(s)
    yield layernorm("lnf", s.micro_steps)
    yield from cast(s, "backward", "fcproj backward", NC, calls, "dx", 2)
    yield from cast(s, "backward", "fcproj backward", 4 * NC, calls, "gelu", 1)
    yield from matmul_backward(s, "fcproj", 4 * C, C, gpu, gelu=True)
    yield from cast(s, "backward", "fc backward", 4 * NC, calls, "dfc", 2, amax=gelu_is_fused(s, gpu))
    yield from cast(s, "backward", "fc backward", NC, calls, "ln2", 1)
    yield from matmul_backward(s, "fc", C, 4 * C, gpu, bias=True)
    yield layernorm("ln2", calls)
    yield from cast(s, "backward", "attproj backward", NC, calls, "dx", 2)
    yield from cast(s, "backward", "attproj backward", NC, calls, "att", 1)
    yield from matmul_backward(s, "attproj", C, C, gpu)
    # cuDNN's deterministic backward, of the micro-batch in one part, writes and reads half of the scores' gradients.
    yield from attention(s, "backward", 8, 10, 3, 2 * s.B * s.NH * s.T * s.T if s.dtype == "bf16" else 0)
    yield from cast(s, "backward", "qkv backward", 3 * NC, calls, "dqkv", 2, amax=True)
    yield from cast(s, "backward", "qkv backward", NC, calls, "ln1", 1)
    yield from matmul_backward(s, "qkv", C, 3 * C, gpu, bias=True)
    yield layernorm("ln1", calls)
    yield Launch("backward", "embedding_backward", "position_sums, sort, token_parts, token_join",
                 "LayerNorm, embeddings", s.micro_steps, s.element * NC + 8 * C * (min(s.N, s.V) + s.T),
                 launches=3 + 3 * sort_passes(s))


def newton_schulz(s, operation):
    """Each call has a stack of matrices of one shape, whose shorter side is C. The extra bytes are those of the
    results, which go back to the memory of the matrices."""
    C, element = s.C, s.element

    def launch(kernels, calls, moved, **more):
        return Launch("update", operation, kernels, "Newton-Schulz", calls, moved, begins=False, **more)

    def matmul(kernels, calls, moved, m, n, k):
        return launch(kernels, calls, moved, flop=2 * m * n * k, precision=s.dtype, shape=(m, n, k))
    for name, matrices, columns in (("qkv, attproj", 4 * s.L, C), ("fc, fcproj", 2 * s.L, 4 * C)):
        size, square = C * columns, element * C * C
        calls = math.ceil(matrices / min(STACK_MATRICES, max(1, STACK_ELEMENTS // size)))
        stack = matrices / calls
        results = stack * 2 * element * size
        yield launch(f"{name}: muon_stack, muon_unstack", calls, stack * (8 + element) * size + results, launches=3,
                     extra=results)
        calls *= ITERATIONS
        yield matmul(f"{name}: X X^T", calls, stack * (element * size + square), C, stack * C, columns)
        yield matmul(f"{name}: A^2", calls, stack * 2 * square, C, stack * C, C)
        yield launch(f"{name}: muon_polynomial", calls, stack * 3 * square)
        yield matmul(f"{name}: polynomial X", calls, stack * (2 * element * size + square), C, stack * columns, C)


def update(s):
    """One rank updates all buckets at once, several ranks a shard of each."""
    parameters, parts = sum(s.buckets()) / s.ranks, 1 if s.ranks == 1 else s.L + 1
    adamw, matrices = 28 if s.dtype == "fp32" else 30, 12 * s.C**2 * s.L
    operation = "muon, all buckets" if s.muon else "adamw, all buckets"
    yield Launch("update", "norm and clip", "squares, sum_partials, clip_factor and small ones", "update", 1,
                 4 * parameters, launches=7 + 2 * parts)
    if s.muon:
        yield Launch("update", operation, "adamw", "update", 1, adamw * (parameters - matrices), launches=s.L + 1)
        yield Launch("update", operation, "muon_momentum, muon_update", "update", 1, (16 + 12) * matrices,
                     launches=s.L * (1 + 6), begins=False)
        yield from newton_schulz(s, operation)
    else:
        yield Launch("update", operation, "adamw", "update", 1, adamw * parameters, launches=parts)
    yield from cast(s, "update", operation, matrices, 1, "weights", 2, amax=True)


def step(s, gpu):
    yield Launch("start", "zero_gradients", "memset", "update", 1, 4 * s.zeroed(), launches=s.L + 3)
    yield from forward(s, gpu)
    yield from backward(s, gpu)
    yield from update(s)


# ---- several GPUs

def collective_seconds(s, moved):
    """A reduce-scatter or an all-gather of so many bytes."""
    sent = moved * (s.ranks - 1) / s.ranks
    return 1e-6 * assumed(f"latency of {s.ranks} GPUs") + 1e-9 * sent / assumed(f"GB/s of {s.ranks} GPUs")


def nccl_seconds(s, seconds):
    """The time for which the kernels of a step wait for collectives, and the collectives' own. seconds: kernels, by
    phase. NCCL sums a layer's fp32 gradients once backward has them, the embeddings' last; the norm needs all. It
    gathers each bucket's weights after their update; a layer of the next forward waits for its own."""
    sums, gathers = ([collective_seconds(s, size * bucket) for bucket in s.buckets()] for size in (4, s.element))
    forward, backward = (seconds[phase] / s.micro_steps / s.L for phase in ("forward", "backward"))
    norm = collective_seconds(s, 0)
    kernels = nccl = 0.0  # the ends of the last kernel and of the last collective
    for duration in sums[:0:-1]:
        kernels += backward
        nccl = max(nccl, kernels) + duration
    kernels = nccl = nccl + sums[0] + norm
    gathered = []
    for duration in gathers:
        kernels += seconds["update"] / len(gathers)
        nccl = max(nccl, kernels) + duration
        gathered.append(nccl)
    for end in gathered[1:]:
        kernels = max(kernels, end) + forward
    return kernels - s.L * (forward + backward) - seconds["update"], sum(sums + gathers) + norm


def step_seconds(s, gpu, launches):
    """The time of a step; the part of it that is not its kernels' alone: waits for NCCL, slower kernels beside it, and
    the host, if it queues a step more slowly than the GPU computes it; and the host's time. CUDA graphs replay all
    micro-steps of one rank; of several ranks not the first and the last, which have collectives."""
    seconds = {phase: sum(launch.seconds(gpu) for launch in own) for phase, own in by(launches, "phase").items()}
    alone = gpu_time = sum(seconds.values())
    replayed = max(0, 1 - 2 / s.micro_steps) if s.ranks > 1 else 1
    host = 1e-6 * assumed("host per launch") * sum(
        launch.calls * launch.launches * (launch.phase in ("start", "update") or 1 - replayed) for launch in launches)
    if s.ranks > 1:
        waits, collectives = nccl_seconds(s, seconds)
        gpu_time += waits + (collectives - waits) * (1 - assumed("speed beside NCCL"))
        host += 1e-6 * assumed("host per collective") * (2 * len(s.buckets()) + 1)
    total = max(gpu_time, host)
    return total, total - alone, host


# ---- output

def by(launches, field):
    """Lists of launches with the same value of a field, in the order in which the values first occur."""
    found = {}
    for launch in launches:
        found.setdefault(getattr(launch, field), []).append(launch)
    return found


def print_operations(launches):
    """As bench_ops --list: name, calls, bytes and FLOPs of a call, which may have several launches."""
    for name, own in by(launches, "operation").items():
        calls = sum(launch.calls for launch in own if launch.begins)
        moved = sum(launch.calls * (launch.moved - launch.extra) for launch in own)
        print(f"{name}\t{calls}\t{moved / calls:.0f}\t{sum(launch.calls * launch.flop for launch in own) / calls:.0f}")


def device_row(device):
    """The row of llmc/model/mfu.h for a driver's device name, as gpu_peak there."""
    return next((name for name in MFU_PEAKS if re.search(rf"(?<!\w){name}(?!\w)", device)), "")


def read_measured(path, model, s, gpu):
    """Milliseconds per step of each operation, and of "step", from results of bench_ops."""
    try:
        found = [r for r in results.read_lines(path) if r.get("bench") in ("ops", "step")]
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    variant = " ".join(["--attention wgmma"] * s.wgmma + ["--optimizer muon"] * s.muon)
    same = [r for r in found if (r["model"], r["dtype"], r["B"], r["T"]) == (model, s.dtype, s.B, s.T)
            and device_row(r["device"]) == gpu.name and r.get("variant", "") == variant]
    if not same:
        fail(f"{path} has no figures of bench_ops for {model} {s.dtype} B {s.B} T {s.T} on an {gpu.title}")
    ops = results.best([r for r in same if r["bench"] == "ops"], ("op",), "us")
    steps = results.best([r for r in same if r["bench"] == "step"], ("bench",), "ms")
    return {**{r["op"]: 1e-3 * r["count"] * r["us"] for r in ops}, **{"step": r["ms"] for r in steps}}


def launch_rows(launches, gpu, measured):
    """Cells of the table: a row per launch. The measured time of an operation stands in its first row."""
    head = ["phase", "operation", "kernels", "launches", "MB", "GFLOP", "floor, ms", "predicted, ms"]
    rows, unseen = [], dict(measured)
    for launch in launches:
        row = [launch.phase, launch.operation, launch.kernels, f"{launch.calls * launch.launches}",
               f"{1e-6 * launch.moved:,.1f}", f"{1e-9 * launch.flop:,.1f}", f"{1e3 * launch.floor(gpu):.2f}",
               f"{1e3 * launch.seconds(gpu):.2f}"]
        if measured:
            row.append(f"{unseen.pop(launch.operation):.2f}" if launch.operation in unseen else "")
        rows.append(row)
    return head + (["measured, ms"] if measured else []), rows


def group_rows(launches, gpu, measured):
    """Sums by group, and of everything."""
    total = sum(launch.seconds(gpu) for launch in launches)
    head = ["group", "launches", "floor, ms", "predicted, ms", "share"]
    rows = []
    for name, own in [*by(launches, "group").items(), ("all launches", launches)]:
        seconds = sum(launch.seconds(gpu) for launch in own)
        rows.append([name, f"{sum(launch.calls * launch.launches for launch in own)}",
                     f"{1e3 * sum(launch.floor(gpu) for launch in own):.2f}", f"{1e3 * seconds:.2f}",
                     f"{100 * seconds / total:.1f} %"])
    if measured:
        head.append("measured, ms")
        for row in rows:
            row.append(f"{measured['step']:.2f}" if row[0] == "all launches" and "step" in measured else "")
    return head, rows


def print_columns(head, rows):
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    numeric = [all(re.fullmatch(r"[\d.,% ]*", row[i]) for row in rows) for i in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.rjust(width) if right else cell.ljust(width)
                        for cell, width, right in zip(row, widths, numeric)).rstrip())
    print()


def markdown(head, rows):
    return "".join("| " + " | ".join(row) + " |\n" for row in [head, ["---"] * len(head), *rows])


def speed(s, gpu, launches):
    """Milliseconds of a step, tokens/s and MFU, as text."""
    seconds, tokens = step_seconds(s, gpu, launches)[0], s.N * s.micro_steps * s.ranks
    mfu = s.flops_per_token() * tokens / s.ranks / seconds / gpu.peak(s.dtype)
    return f"{1e3 * seconds:.1f}", f"{tokens / seconds:,.0f}", f"{100 * mfu:.1f} %"


def summary(launches, s, gpu):
    ms, tokens, mfu = speed(s, gpu, launches)
    return (f"Computed, not measured: {ms} ms for a step of {s.N * s.micro_steps * s.ranks:,} tokens, {tokens} "
            f"tokens/s, MFU {mfu} of {1e-12 * gpu.peak(s.dtype):,.0f} TFLOP/s.")


def describe(s, gpu):
    return (f"{s.L} layers, {s.NH} heads, {s.C} channels, vocabulary {s.V} ({s.Vp} in memory), {s.precision}, "
            f"{'Muon, ' * s.muon}{'attention by wgmma, ' * s.wgmma}{'head by wgmma, ' * s.head_wgmma}"
            f"B {s.B}, T {s.T}, {s.micro_steps} micro-step{'s' * (s.micro_steps > 1)}, "
            f"{s.ranks} GPU{'s' * (s.ranks > 1)}, {gpu.title}: {gpu.sms} SMs, {gpu.memory:,} GB/s")


# ---- docs/performance.md

def docs_step():
    s, gpu = shape_of(arguments(["--model", "d12", "--micro-batch", "64"])), GPUS["h200"]
    launches = list(step(s, gpu))
    return (textwrap.fill(f"GPT-2 124M: {describe(s, gpu)}. {summary(launches, s, gpu)}", 120) + "\n\n"
            + markdown(*group_rows(launches, gpu, {})))


def docs_lines():
    """Title, shape and launches: the recipe's micro-batch, or what the ranks leave of 512 sequences."""
    for title, model in (("124M", "d12"), ("350M", "d24"), ("774M", "d36"), ("1558M", "d48")):
        most = int(in_source(f"scripts/run_gpt2_{title}.sh", r"most_micro_batch=(\d+)")[0])
        for ranks in (1, 8, 64):
            B = min(most, 512 // ranks)
            s = replace(shape_of(arguments(["--model", model])), B=B, micro_steps=512 // ranks // B, ranks=ranks)
            yield title, s, list(step(s, GPUS["h100-sxm"]))


def changes_of_speed(lines):
    """For each assumption, the changes of the lines' tokens/s, in %, and of their mean, at both ends of its range."""
    def speeds():
        return [1 / step_seconds(s, GPUS["h100-sxm"], launches)[0] for _, s, launches in lines]
    before, changes = speeds(), {}
    for name, a in ASSUMPTIONS.items():
        kept, changes[name] = a.value, []
        for a.value in (a.low, a.high):
            changed = [100 * (new / old - 1) for new, old in zip(speeds(), before)]
            changes[name].append(changed + [sum(changed) / len(lines)])
        a.value = kept
    return changes


def most(changes, i, count):
    """The assumptions that change line i most, each with a text."""
    names = sorted(changes, key=lambda name: -abs(changes[name][0][i]) - abs(changes[name][1][i]))[:count]
    return {name: f"{name}: {changes[name][0][i]:+.1f}, {changes[name][1][i]:+.1f} %" for name in names}


def docs_ranks():
    """The table, and the three assumptions that change the mean of its lines most."""
    gpu, lines, rows = GPUS["h100-sxm"], list(docs_lines()), []
    changes = changes_of_speed(lines)
    for i, (title, s, launches) in enumerate(lines):
        parts = (f"{1e3 * part:.1f}" for part in step_seconds(s, gpu, launches)[1:])
        rows.append([title, f"{s.ranks}", f"{s.B} x {s.micro_steps}", *speed(s, gpu, launches), *parts,
                     "; ".join(most(changes, i, 2).values())])
    text = markdown(["model", "GPUs", "batch", "ms", "tokens/s", "MFU", "not hidden, ms", "host, ms", "moved by"], rows)
    for name, change in most(changes, len(lines), 3).items():
        a = ASSUMPTIONS[name]
        text += f"\n* **{change}**, at {a.low:g} and {a.high:g} in place of {a.value:g}: `{a.measure}`"
    return text + "\n"


def update_docs(check):
    text, blocks = DOCS.read_text(encoding="utf-8"), {"step": docs_step, "ranks": docs_ranks}
    new = re.sub(r"(<!-- ledger.py --update-docs: (\w+) -->\n).*?(<!-- /ledger -->)",
                 lambda m: m[1] + blocks[m[2]]() + "\n" + m[3], text, flags=re.S)
    if check:
        stale = "docs/performance.md: its tables are not the ledger's: run dev/bench/ledger.py --update-docs"
        sys.exit(0 if new == text else stale)
    DOCS.write_text(new, encoding="utf-8")


# ---- arguments

PRECISIONS = ("bf16", "fp32", "fp8")
MODELS = {name: tuple(map(int, sizes)) for name, *sizes in
          in_source("llmc/model/params.cpp", r'\{"([^"]+)", "[^"]*", (\d+), (\d+), (\d+), (\d+)\}')}


def arguments(args):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.error = fail
    add = parser.add_argument
    add("--gpu", default="h100-sxm", choices=GPUS, help="[h100-sxm]")
    add("--model", default="d12", choices=MODELS, help="[d12]")
    add("--micro-batch", type=int, default=64, help="sequences [64]")
    add("--seq-len", type=int, default=1024, help="tokens per sequence [1024]")
    add("--vocab-size", type=int, default=50257, help="[50257]")
    add("--micro-steps", type=int, default=1, help="micro-batches of a step [1]")
    add("--precision", default="bf16", choices=PRECISIONS, help="fp8: of the layers' matmuls [bf16]")
    add("--optimizer", default="adamw", choices=("adamw", "muon"), help="muon: on one GPU [adamw]")
    add("--attention", default="cudnn", choices=("cudnn", "wgmma"), help="wgmma: our kernels for Hopper [cudnn]")
    add("--head", default="cublaslt", choices=("cublaslt", "wgmma"), help="wgmma: our matmul for Hopper [cublaslt]")
    add("--logit-rows", type=int, help="tokens whose logits are in memory at a time [65536]; bench_ops on a CPU: 1024",
        default=int(in_source("llmc/cuda/ops.cu", r"preferred_logit_rows\(\) { return (\d+)")[0]))
    add("--measured", metavar="FILE", help="results of bench_ops --json: their times stand beside the predictions")
    add("--ranks", type=int, default=1, choices=[1, 8, 64], help="GPUs, with ZeRO-1; 8 in a node [1]")
    add("--operations", action="store_true", help="print the lines of bench_ops --list")
    add("--assumptions", action="store_true", help="print the tables of GPUs and assumptions, with ranges and sources")
    add("--update-docs", action="store_true", help="write the tables of docs/performance.md")
    add("--check-docs", action="store_true", help="fail if these tables are not the ledger's")
    return parser.parse_args(args)


def shape_of(a):
    for name in ("micro_batch", "seq_len", "vocab_size", "micro_steps", "logit_rows"):
        if getattr(a, name) < 1:
            fail(f"--{name.replace('_', '-')} {getattr(a, name)} must be at least 1")
    if a.optimizer == "muon" and a.ranks > 1:
        fail(f"--ranks {a.ranks}: --optimizer muon is predicted for one GPU; try --ranks 1")
    for name in ("attention", "head"):
        if getattr(a, name) == "wgmma" and (a.precision == "fp32" or not GPUS[a.gpu].hopper):
            fail(f"--{name} wgmma is bf16 on Hopper; try --gpu h200 --precision bf16")
    max_T, L, NH, C = MODELS[a.model]
    return Shape(L, NH, C, max(max_T, a.seq_len), a.vocab_size, a.micro_batch, a.seq_len, a.precision, a.micro_steps,
                 a.logit_rows, a.ranks, a.optimizer == "muon", a.attention == "wgmma", a.head == "wgmma")


def print_assumptions():
    print_columns(["--gpu", "name", "SMs", "GB/s", "bf16 TFLOP/s", "fp32", "fp8"],
                  [[key, g.title, f"{g.sms}", f"{g.memory:,}", *(f"{1e-12 * g.peak(p):,g}" for p in PRECISIONS)]
                   for key, g in GPUS.items()])
    print_columns(["assumption", "value", "from", "to", "measured by", "source"],
                  [[name, *(f"{x:g}" for x in (a.value, a.low, a.high)), a.measure, a.source]
                   for name, a in ASSUMPTIONS.items()])


def main():
    a = arguments(sys.argv[1:])
    if a.update_docs or a.check_docs:
        return update_docs(a.check_docs)
    if a.assumptions:
        return print_assumptions()
    s, gpu = shape_of(a), GPUS[a.gpu]
    if s.precision == "fp8" and not gpu.fp8:
        fail(f"--precision {s.precision}: an {gpu.title} has no FP8; try --gpu h100-sxm")
    launches = list(step(s, gpu))
    if a.operations:
        return print_operations(launches)
    if a.measured and s.precision == "fp8":
        fail("--measured compares with bench_ops, which has bf16 and fp32")
    measured = read_measured(a.measured, a.model, s, gpu) if a.measured else {}
    print(f"{describe(s, gpu)}\n{summary(launches, s, gpu)}\n")
    print_columns(*launch_rows(launches, gpu, measured))
    print_columns(*group_rows(launches, gpu, measured))


if __name__ == "__main__":
    main()
