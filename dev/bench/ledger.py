#!/usr/bin/env python3
"""Predicts the time of every kernel launch of a training step on a GPU, from its bytes and FLOPs. Needs no GPU.

    dev/bench/ledger.py --gpu h100-sxm --model d12 --micro-batch 64
    dev/bench/ledger.py --gpu h100-sxm --model d48 --micro-batch 16 --precision fp8
    dev/bench/ledger.py --gpu h100-sxm --measured results.jsonl    figures of bench_ops beside the predictions
    dev/bench/ledger.py --update-docs                                           writes the tables of docs/performance.md

The floor of a launch is the larger of two times: of its bytes at the memory's data-sheet speed, and of its FLOPs at the
data-sheet peak. The prediction divides these by shares of the two speeds that kernels reach, and adds a time
per launch. Matmuls also pay for the tiles of their last wave and for a short inner dimension. `--shares` prints
the shares with their sources.

The launches are those of one rank without recomputation, with AdamW, master weights and cuDNN's deterministic
attention. A bias gradient is a kernel of its own, although --autotune may choose cuBLASLt's epilogue for it. bench_ops
has the same operations, calls, bytes and FLOPs: `ledger.py --operations` and `bench_ops --list` print the same lines.
`train_gpt2 plan` counts the same FLOPs per token and the same batch; its time is measured on the machine where it runs,
or stands for 30 % of the peak, and it does not read this script.
"""
import argparse
import math
import pathlib
import re
import sys
import textwrap
from dataclasses import dataclass

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
    gb: int           # GB of memory
    hopper: bool      # cuBLASLt fuses GELU (gelu_fusion_by_gpu in llmc/cuda/matmul.cpp), cuDNN has kernels for Hopper
    source: str

    def peak(self, precision):
        """Dense FLOP/s from the data sheet."""
        if precision.startswith("fp8"):
            return 1e12 * self.fp8
        bf16, fp32 = MFU_PEAKS[self.name]
        return 1e12 * (fp32 if precision == "fp32" else bf16)


MFU_PEAKS = {name: (float(bf16), float(fp32)) for name, bf16, fp32 in
             in_source("llmc/model/mfu.h", r'\{"([^"]+)", ([\d.]+), [\d.]+, ([\d.]+)\}')}
GPUS = {
    "h100-sxm": Gpu("H100 SXM", "H100", 132, 3350, 1979, 80, True,
                    "NVIDIA H100 data sheet; the H100 white paper for SMs"),
    "h100-pcie": Gpu("H100 PCIe", "H100 PCIe", 114, 2000, 1513, 80, True,
                     "NVIDIA H100 data sheet; the H100 white paper for SMs"),
    "h200": Gpu("H200 SXM", "H200", 132, 4800, 1979, 141, True, "NVIDIA H200 data sheet"),
    "a100": Gpu("A100 SXM 80 GB", "A100", 108, 2039, 0, 80, False,
                "NVIDIA A100 data sheet; the A100 white paper for SMs"),
    "rtx-4090": Gpu("RTX 4090", "RTX 4090", 128, 1008, 330.3, 24, False, "NVIDIA Ada white paper, appendix A"),
}

# ---- shares of the peak that kernels reach

# Values are (share, depth, source). Share: of the peak FLOP/s (for matmuls, at an infinitely long inner dimension) or
# of the memory's speed. Depth: the cost of starting and ending a matmul tile, in elements of its inner dimension; see
# matmul_seconds. Other GPUs are assumed to reach the same shares as an H100.
SHARES = {
    "matmul bf16": (0.86, 283, "fitted to two matmuls on H100: 8192 x 8192 x 8192 at 798 TFLOP/s (PyTorch, once), "
                               "65536 x 6656 x 1664 at 726 (nanochat, dev/LOG.md, 2026-02-02)"),
    "matmul fp32": (0.75, 0, "an estimate: without tensor cores, and no figure of cuBLAS was found"),
    "matmul fp8": (0.81, 640,
                   "one scale per tensor; fitted to two: 65536 x 6656 x 1664 at 1160 TFLOP/s (nanochat, the same, "
                              "1.45 ms of which 0.2 ms are an estimate for the cast), inner dimension 16384 at 1550 "
                              "(DeepGEMM's README)"),
    "matmul fp8-block": (0.83, 1020, "scales for 1 x 128 and 128 x 128 elements; fitted to DeepGEMM's tables on H800: "
                                     "590 TFLOP/s at an inner dimension of 512, 990 at 1536, 1550 at 16384"),
    "attention_forward": (0.29, 0, "cuDNN, causal, heads of 64 channels, T 1024: 288 TFLOP/s on H100 (FlashAttention-3 "
                                   "paper, figure 5)"),
    "attention_backward": (0.25, 0, "cuDNN 9.19, the same heads, T 2048: 264 TFLOP/s on H200 (cudnn-frontend's "
                                    "benchmarks); T 1024 is taken as 247"),
    "attention_forward, no Hopper": (0.38, 0,
                                     "an estimate: FlashAttention-2 reaches 0.50 to 0.73 of an A100 (its paper), "
                                              "less with 64 channels and T 1024"),
    "attention_backward, no Hopper": (0.33, 0, "an estimate, as above"),
    "attention fp32": (0.15, 0, "an estimate: our own kernels on the FMA units, never timed"),
    "memory": (0.80, 0,
               "copies: 3.0 of 3.35 TB/s on H100, 4.3 of 4.8 on H200 (PyTorch, once); kernels 0.88 to 0.92 of a copy "
                        "(cuDNN's norms, cudnn-frontend's benchmarks)"),
}
LAUNCH_SECONDS = 2e-6  # an estimate: about 1 us between nodes of a CUDA graph, and as much to fill and drain a kernel
TILE = (128, 256)      # rows and columns of a matmul's result that an SM computes at a time
MAX_SPLITS = 32


def matmul_seconds(launch, gpu, splits=MAX_SPLITS):
    """SMs compute the tiles of the result in whole waves. A weight's gradient has few tiles and a long inner dimension,
    so up to `splits` SMs share a tile (split-K); each writes float partial sums, which are read again to be added."""
    m, n, k = launch.shape
    share, depth, _ = SHARES["matmul " + launch.precision]
    rate = share * gpu.peak(launch.precision)
    times = []
    for rows, columns in (TILE, TILE[::-1]):
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        for split in range(1, splits + 1 if launch.may_split else 2):
            waves = math.ceil(tiles * split / gpu.sms)
            seconds = waves * gpu.sms * 2 * rows * columns * (k / split + depth) / rate
            partial_sums = 8 * split * m * n if split > 1 else 0
            times.append(seconds + partial_sums / memory_rate(gpu))
    return min(times)


def memory_rate(gpu):
    return SHARES["memory"][0] * 1e9 * gpu.memory


def attention_share(kernel, gpu, precision):
    if precision == "fp32":
        return SHARES["attention fp32"][0]
    return SHARES[kernel if gpu.hopper else kernel + ", no Hopper"][0]


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
    may_split: bool = False
    begins: bool = True  # False: this launch continues a call that an earlier launch began

    def floor(self, gpu):
        return self.calls * max(self.moved / (1e9 * gpu.memory), self.flop / gpu.peak(self.precision))

    def seconds(self, gpu, splits=MAX_SPLITS):
        compute = 0.0
        if self.shape:
            compute = matmul_seconds(self, gpu, splits)
        elif self.flop:
            compute = self.flop / (attention_share(self.kernels, gpu, self.precision) * gpu.peak(self.precision))
        return self.calls * (max(compute, self.moved / memory_rate(gpu)) + self.launches * LAUNCH_SECONDS)


# ---- the launches of a step

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

    def __post_init__(self):
        self.N = self.B * self.T
        self.Vp = round_up(self.V, 128)
        self.chunks = math.ceil(self.N / self.logit_rows)
        self.rows = math.ceil(self.N / self.chunks)
        # The dtype of all tensors but the operands of the layers' matmuls.
        self.dtype = "fp32" if self.precision == "fp32" else "bf16"
        self.element = 4 if self.precision == "fp32" else 2  # bytes of an element of dtype
        self.operand = 1 if self.precision.startswith("fp8") else self.element  # bytes, in the layers' matmuls

    def padded_parameters(self):
        """ParamLayout::total: each tensor begins at a multiple of 64 elements."""
        C, tensors = self.C, lambda *sizes: sum(round_up(size, 64) for size in sizes)
        layer = tensors(3 * C * C, C * C, 4 * C * C, 4 * C * C, C, C, 3 * C, C, C, C, 4 * C, C)
        return tensors(self.Vp * C, self.max_T * C, C, C) + self.L * layer

    def zeroed(self):
        """Elements that a step zeroes, because kernels add to them: gradients of wpe, biases
        and LayerNorms, and the loss."""
        C, tensors = self.C, lambda *sizes: sum(round_up(size, 64) for size in sizes)
        return 1 + self.max_T * C + tensors(C, C) + self.L * tensors(C, C, 3 * C, C, C, C, 4 * C, C)

    def parameters(self):
        """count_parameters: without padding."""
        return self.V * self.C + self.max_T * self.C + 2 * self.C + self.L * (12 * self.C**2 + 13 * self.C)

    def flops_per_token(self):
        """The FLOPs that MFU counts, as in llmc/model/mfu.h."""
        return 6 * self.parameters() + 6 * self.L * self.C * self.T


def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


def gelu_is_fused(s, gpu):
    return gpu.hopper and s.precision != "fp32"


def matmul_forward(s, name, IC, OC, gpu, gelu=False, residual=False):
    """gelu: also writes the values before GELU. Where the library's GELU is slow, our own kernel follows. residual:
    adds the residual stream, which has the size of the result."""
    fused = gelu and gelu_is_fused(s, gpu)
    calls, result = s.L * s.micro_steps, s.element * s.N * OC
    moved = s.operand * (s.N * IC + IC * OC) + (2 if fused or residual else 1) * result
    kernels = "matmul + bias" + (" + GELU" if fused else "") + (" + residual" if residual else "")
    yield Launch("forward", name + " forward", kernels, "layers' matmuls, forward", calls, moved, 2 * s.N * IC * OC,
                 precision=s.precision, shape=(s.N, OC, IC))
    if gelu and not fused:
        yield Launch("forward", name + " forward", "gelu_forward", "passes of GELU and bias", calls, 2 * result,
                     extra=result, begins=False)


def matmul_backward(s, name, IC, OC, gpu, gelu=False, bias=False):
    """The gradients of the input, of the weight (in float) and of the bias. gelu: the input is GELU's output."""
    fused = gelu and gelu_is_fused(s, gpu)
    calls, result, operation = s.L * s.micro_steps, s.element * s.N * IC, name + " backward"
    moved = s.operand * (s.N * OC + IC * OC) + (2 if fused else 1) * result
    yield Launch("backward", operation, "input gradient" + (" x GELU'" if fused else ""),
                 "layers' matmuls, input gradients",
                 calls, moved, 2 * s.N * IC * OC, precision=s.precision, shape=(s.N, IC, OC))
    if gelu and not fused:
        yield Launch("backward", operation, "gelu_backward", "passes of GELU and bias", calls, 3 * result,
                     extra=2 * result, begins=False)
    yield weight_gradient(s, operation, "layers' matmuls, weight gradients", calls, s.N, IC, OC, 1)
    if bias and s.precision.startswith("fp8"):  # the pass that makes the FP8 copies also adds up blocks of 128 rows
        moved = 2 * 4 * s.N / 128 * OC
        yield Launch("backward", operation, "sum_rows", "passes of GELU and bias", calls, moved, extra=moved,
                     begins=False)
    elif bias:
        moved = s.element * s.N * OC
        yield Launch("backward", operation, "bias_backward, sum_rows", "passes of GELU and bias", calls, moved,
                     launches=2, extra=moved, begins=False)


def weight_gradient(s, operation, group, calls, N, IC, OC, chunks):
    """All calls in a step except the first also read the gradient, to add to it. bench_ops counts one micro-step."""
    in_layer = group.startswith("layers")
    reads = 4 * IC * OC * (s.micro_steps - 1) / s.micro_steps if chunks == 1 else 4 * IC * OC
    operand = s.operand if in_layer else s.element
    phase = "backward" if in_layer else "head"
    return Launch(phase, operation, "weight gradient", group, calls, operand * N * (IC + OC) + 4 * IC * OC + reads,
                  2 * N * IC * OC, extra=reads if chunks == 1 else 0, precision=s.precision if in_layer else s.dtype,
                  shape=(IC, OC, N), may_split=True, begins=False)


def cast(s, phase, operation, elements, calls, what, copies, amax=False):
    """Conversion of a tensor to FP8. cuBLASLt's FP8 matmuls on Hopper need the inner dimension of both operands
    contiguous. Forward reads rows of its input. Backward reads a transposed copy of the input, and both layouts of the
    output's gradient. A pass reads bf16 and writes 1 or 2 copies. One scale per tensor needs the largest magnitude
    (amax) first; one scale per block does not. LayerNorm and GELU kernels find amax as they write the tensor.
    amax=True: a library writes the tensor, so another pass finds it."""
    if s.precision == "fp8" and amax:
        yield Launch(phase, operation, f"amax of {what}", "FP8 casts", calls, 2 * elements, extra=2 * elements,
                     begins=False)
    if s.precision.startswith("fp8"):
        moved = (2 + copies) * elements
        yield Launch(phase, operation, f"FP8 copies of {what}", "FP8 casts", calls, moved, extra=moved, begins=False)


def attention(s, phase, gpu):
    calls, NC = s.L * s.micro_steps, s.N * s.C
    pairs = 0.5 * s.N * s.T * s.C  # causal: half of all pairs, C numbers each
    if phase == "forward":
        yield Launch(phase, "attention_forward", "attention_forward", "attention", calls, 4 * s.element * NC, 4 * pairs,
                     precision=s.dtype)
        return
    # cuDNN's deterministic backward writes and reads the gradient of the scores. Causal attention has
    # half of the scores.
    scores = 2 * 0.5 * 2 * s.B * s.NH * s.T * s.T if s.dtype == "bf16" else 0
    yield Launch(phase, "attention_backward", "attention_backward", "attention", calls, 8 * s.element * NC + scores,
                 10 * pairs, extra=scores, precision=s.dtype, launches=3 * attention_parts(s, gpu))


def attention_parts(s, gpu):
    """part_size in llmc/cuda/attention_cudnn.cpp: sequences whose scores' gradients take at most 1/32 of the memory."""
    return math.ceil(s.B / max(1, int(1e9 * gpu.gb / 32) // (2 * s.NH * s.T * s.T))) if s.dtype == "bf16" else 1


def forward(s, gpu):
    C, NC, micro_steps, rows = s.C, s.N * s.C, s.micro_steps, "LayerNorm, embeddings"
    calls = s.L * micro_steps

    def layernorm(what, calls):
        return Launch("forward", "layernorm_forward", f"layernorm_forward ({what})", rows, calls, 2 * s.element * NC)
    yield Launch("forward", "embedding_forward", "embedding_forward", rows, micro_steps, 3 * s.element * NC)
    yield layernorm("ln1 of the first layer", micro_steps)
    yield from cast(s, "forward", "qkv forward", NC, calls, "ln1", 1)
    yield from matmul_forward(s, "qkv", C, 3 * C, gpu)
    yield from attention(s, "forward", gpu)
    yield from cast(s, "forward", "attproj forward", NC, calls, "att", 1, amax=True)
    yield from matmul_forward(s, "attproj", C, C, gpu, residual=True)
    yield layernorm("ln2", calls)
    yield from cast(s, "forward", "fc forward", NC, calls, "ln2", 1)
    yield from matmul_forward(s, "fc", C, 4 * C, gpu, gelu=True)
    yield from cast(s, "forward", "fcproj forward", 4 * NC, calls, "gelu", 1, amax=gelu_is_fused(s, gpu))
    yield from matmul_forward(s, "fcproj", 4 * C, C, gpu, residual=True)
    yield layernorm("ln1 of the next layer, lnf", calls)


def backward_of_head(s, gpu):
    C, Vp, rows, calls = s.C, s.Vp, s.rows, s.chunks * s.micro_steps
    logits, weight = s.element * rows * Vp, s.element * Vp * C

    def matmul(operation, kernels, shape):
        return Launch("head", operation, kernels, "head's matmuls", calls, s.element * rows * C + weight + logits,
                      2 * rows * Vp * C, precision=s.dtype, shape=shape)
    yield matmul("head forward", "matmul", (rows, Vp, C))
    yield Launch("head", "cross_entropy", "cross_entropy", "cross entropy", calls, 2 * logits)
    yield matmul("head backward", "input gradient", (rows, C, Vp))
    yield weight_gradient(s, "head backward", "head's matmuls", calls, rows, C, Vp, s.chunks)
    yield Launch("head", "accumulate_loss", "accumulate_loss", "cross entropy", s.micro_steps, 4 * s.N)


def backward(s, gpu):
    C, NC, calls = s.C, s.N * s.C, s.L * s.micro_steps

    def layernorm(what, calls):
        return Launch("backward", "layernorm_backward", f"layernorm_backward ({what}), sum_rows",
                      "LayerNorm, embeddings", calls, 4 * s.element * NC, launches=2)
    yield from backward_of_head(s, gpu)
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
    yield from attention(s, "backward", gpu)
    yield from cast(s, "backward", "qkv backward", 3 * NC, calls, "dqkv", 2, amax=True)
    yield from cast(s, "backward", "qkv backward", NC, calls, "ln1", 1)
    yield from matmul_backward(s, "qkv", C, 3 * C, gpu, bias=True)
    yield layernorm("ln1", calls)
    passes = 1 if s.V <= 256 else 2 if s.V <= 65536 else 3  # of the radix sort of tokens, 8 bits each
    yield Launch("backward", "embedding_backward", "position_sums, sort, token_parts, token_join",
                 "LayerNorm, embeddings",
                 s.micro_steps, s.element * NC + 8 * C * (min(s.N, s.V) + s.T), launches=3 + 3 * passes)


def update(s):
    parameters = s.padded_parameters()
    adamw = 28 if s.dtype == "fp32" else 30
    yield Launch("update", "norm and clip", "squares, sum_partials, clip_factor and small ones", "update", 1,
                 4 * parameters, launches=9)
    yield Launch("update", "adamw, all buckets", "adamw", "update", 1, adamw * parameters)
    yield from cast(s, "update", "adamw, all buckets", 12 * s.C**2 * s.L, 1, "weights", 2, amax=True)


def step(s, gpu):
    yield Launch("start", "zero_gradients", "memset", "update", 1, 4 * s.zeroed(), launches=s.L + 3)
    yield from forward(s, gpu)
    yield from backward(s, gpu)
    yield from update(s)
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
    same = [r for r in found if (r["model"], r["dtype"], r["B"], r["T"]) == (model, s.dtype, s.B, s.T)
            and device_row(r["device"]) == gpu.name and not r.get("variant")]
    if not same:
        has = sorted({f"{r['model']} {r['dtype']} B {r['B']} T {r['T']} on {r['device']}" for r in found})
        fail(f"{path} has no figures of bench_ops for {model} {s.dtype} B {s.B} T {s.T} on an {gpu.title}; "
             f"it has {', '.join(has) or 'none at all'}")
    ops = results.best([r for r in same if r["bench"] == "ops"], ("op",), "us")
    steps = results.best([r for r in same if r["bench"] == "step"], ("bench",), "ms")
    return {**{r["op"]: 1e-3 * r["count"] * r["us"] for r in ops}, **{"step": r["ms"] for r in steps}}


def launch_rows(launches, gpu, measured):
    """Cells of the table: a row per launch. The measured time of an operation stands in its first row."""
    head = ["phase", "operation", "kernels", "launches", "MB", "GFLOP", "floor, ms", "predicted, ms"]
    rows, seen = [], set()
    for launch in launches:
        row = [launch.phase, launch.operation, launch.kernels, f"{launch.calls * launch.launches}",
               f"{1e-6 * launch.moved:,.1f}",
               f"{1e-9 * launch.flop:,.1f}", f"{1e3 * launch.floor(gpu):.2f}", f"{1e3 * launch.seconds(gpu):.2f}"]
        if measured:
            new = launch.operation not in seen and launch.operation in measured
            row.append(f"{measured[launch.operation]:.2f}" if new else "")
            seen.add(launch.operation)
        rows.append(row)
    return head + (["measured, ms"] if measured else []), rows


def group_rows(launches, gpu, measured):
    """Sums by group, and of everything."""
    total = sum(launch.seconds(gpu) for launch in launches)
    head = ["group", "launches", "floor, ms", "predicted, ms", "share"]
    rows = []
    for name, own in [*by(launches, "group").items(), ("the whole step", launches)]:
        seconds = sum(launch.seconds(gpu) for launch in own)
        rows.append([name, f"{sum(launch.calls * launch.launches for launch in own)}",
                     f"{1e3 * sum(launch.floor(gpu) for launch in own):.2f}", f"{1e3 * seconds:.2f}",
                     f"{100 * seconds / total:.1f} %"])
    if measured:
        head.append("measured, ms")
        for row in rows:
            row.append(f"{measured['step']:.2f}" if row[0] == "the whole step" and "step" in measured else "")
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


def summary(launches, s, gpu):
    """Two sentences: the predicted speed, and the time that split-K saves in the weights' gradients."""
    seconds, tokens = sum(launch.seconds(gpu) for launch in launches), s.N * s.micro_steps
    mfu = s.flops_per_token() * tokens / seconds / gpu.peak(s.dtype)
    unsplit = sum(launch.seconds(gpu, 1) for launch in launches) - seconds
    return (f"Predicted, not measured: {1e3 * seconds:.1f} ms for a step of {tokens:,} tokens, "
            f"{tokens / seconds:,.0f} tokens/s, MFU {100 * mfu:.1f} % of {1e-12 * gpu.peak(s.dtype):,.0f} TFLOP/s. "
            f"Without split-K the weights' gradients would take {1e3 * unsplit:.1f} ms more.")


def describe(s, gpu):
    return (f"{s.L} layers, {s.NH} heads, {s.C} channels, vocabulary {s.V} ({s.Vp} in memory), {s.precision}, "
            f"B {s.B}, T {s.T}, {s.micro_steps} micro-step{'s' * (s.micro_steps > 1)}, "
            f"{gpu.title}: {gpu.sms} SMs, {gpu.memory:,} GB/s")


# ---- docs/performance.md

def docs_table():
    s, gpu = shape_of(arguments(["--model", "d12", "--micro-batch", "64"])), GPUS["h200"]
    launches = list(step(s, gpu))
    return (textwrap.fill(f"GPT-2 124M: {describe(s, gpu)}. {summary(launches, s, gpu)}", 120) + "\n\n"
            + markdown(*group_rows(launches, gpu, {})) + "\n")


def update_docs(check):
    marked = re.compile(r"(<!-- ledger: [^\n]*-->\n).*?(<!-- /ledger -->)", re.S)
    text = DOCS.read_text(encoding="utf-8")
    new = marked.sub(lambda m: m.group(1) + docs_table() + m.group(2), text)
    if check:
        stale = "docs/performance.md: its table is not the ledger's: run dev/bench/ledger.py --update-docs"
        sys.exit(0 if new == text else stale)
    DOCS.write_text(new, encoding="utf-8")


# ---- arguments

def arguments(args):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.error = fail
    add = parser.add_argument
    add("--gpu", default="h100-sxm", help=f"{', '.join(GPUS)} [h100-sxm]")
    add("--model", help="d12, d24, d36, d48 [d12]; or --layers, --heads and --channels")
    for name in ("layers", "heads", "channels"):
        add(f"--{name}", type=int)
    add("--micro-batch", type=int, default=64, help="sequences [64]")
    add("--seq-len", type=int, default=1024, help="tokens per sequence [1024]")
    add("--vocab-size", type=int, default=50257, help="[50257]")
    add("--micro-steps", type=int, default=1, help="micro-batches of a step [1]")
    add("--precision", default="bf16",
        help="bf16, fp32; fp8: the layers' matmuls with a scale per tensor, fp8-block: with a "
                                            "scale per block, which the trainer does not have [bf16]")
    add("--logit-rows", type=int, default=int(in_source("llmc/cuda/ops.cu",
                                                        r"preferred_logit_rows\(\) { return (\d+)")[0]),
        help="tokens whose logits are in memory at a time [65536]; on a CPU bench_ops has 2048")
    add("--measured", metavar="FILE", help="results of bench_ops --json: their times stand beside the predictions")
    add("--operations", action="store_true", help="print the lines of bench_ops --list")
    add("--shares", action="store_true", help="print the table of GPUs and that of the shares, with sources")
    add("--update-docs", action="store_true", help="write the table of docs/performance.md")
    add("--check-docs", action="store_true", help="fail if this table is not the ledger's")
    return parser.parse_args(args)


def sizes_of(a):
    """Layers, heads, channels and positions."""
    custom = (a.layers, a.heads, a.channels)
    if all(custom) and not a.model:
        return *custom, a.seq_len
    if any(size is not None for size in custom):
        fail("give --model, or all three of --layers, --heads and --channels, each at least 1")
    named = {name: (int(L), int(NH), int(C), int(T)) for name, T, L, NH, C in
             in_source("llmc/model/params.cpp", r'\{"([^"]+)", "[^"]*", (\d+), (\d+), (\d+), (\d+)\}')}
    model = a.model or "d12"
    if model not in named:
        fail(f"--model {model} is not known; give one of {', '.join(named)}, or --layers, --heads and --channels")
    L, NH, C, max_T = named[model]
    return L, NH, C, max(max_T, a.seq_len)


def shape_of(a):
    L, NH, C, max_T = sizes_of(a)
    for name, value in (("--layers", L), ("--heads", NH), ("--channels", C), ("--micro-batch", a.micro_batch),
                        ("--seq-len", a.seq_len), ("--vocab-size", a.vocab_size), ("--micro-steps", a.micro_steps),
                        ("--logit-rows", a.logit_rows)):
        if value < 1:
            fail(f"{name} {value} must be at least 1")
    if C % NH != 0:
        fail(f"{C} channels are not a multiple of {NH} heads; try --channels {round_up(C, NH)}")
    if a.precision not in ("bf16", "fp32", "fp8", "fp8-block"):
        fail(f"--precision {a.precision} is not known; give bf16, fp32, fp8 or fp8-block")
    return Shape(L, NH, C, max_T, a.vocab_size, a.micro_batch, a.seq_len, a.precision, a.micro_steps, a.logit_rows)


def print_shares():
    rows = [[key, g.title, f"{g.sms}", f"{g.memory:,}", *(f"{1e-12 * g.peak(p):,g}" for p in ("bf16", "fp32", "fp8")),
             g.source] for key, g in GPUS.items()]
    print_columns(["--gpu", "name", "SMs", "GB/s", "bf16 TFLOP/s", "fp32", "fp8",
                   "source; bf16 and fp32: llmc/model/mfu.h"], rows)
    for name, (share, depth, source) in SHARES.items():
        print(f"{name:<30} {share:.2f}  {f'depth {depth}' if depth else '':<10}  {source}")
    print(f"{'launch':<30} {1e6 * LAUNCH_SECONDS:.0f} us             "
          "an estimate: about 1 us between nodes of a CUDA graph, and as much to fill and drain a kernel")


def main():
    a = arguments(sys.argv[1:])
    if a.update_docs or a.check_docs:
        return update_docs(a.check_docs)
    if a.shares:
        return print_shares()
    if a.gpu not in GPUS:
        fail(f"--gpu {a.gpu} is not known; give one of {', '.join(GPUS)}")
    s, gpu = shape_of(a), GPUS[a.gpu]
    if s.precision.startswith("fp8") and not gpu.fp8:
        fail(f"--precision {s.precision}: an {gpu.title} has no FP8; try --gpu h100-sxm")
    launches = list(step(s, gpu))
    if a.operations:
        return print_operations(launches)
    if a.measured and (not a.model or s.precision.startswith("fp8")):
        fail("--measured compares with bench_ops, which needs --model and bf16 or fp32")
    measured = read_measured(a.measured, a.model, s, gpu) if a.measured else {}
    print(f"{describe(s, gpu)}\n{summary(launches, s, gpu)}\n")
    print_columns(*launch_rows(launches, gpu, measured))
    print_columns(*group_rows(launches, gpu, measured))


if __name__ == "__main__":
    main()
