#!/usr/bin/env bash
# ctranslate2_int8_saturates.sh: on a CPU without VNNI, CTranslate2's int8 models add pairs of products in 16 bits.
#
# Guess: integers have no rounding, so a model in int8 gives the same logits on each CPU, and quantization is all that
# it loses against float32.
# Behaviour: without VNNI (AVX2, or AVX-512 as in Skylake), both libraries that CTranslate2 multiplies with, oneDNN and
# MKL, add two products of an unsigned and a signed byte in 16 bits and stop at 32,767. CTranslate2 adds 128 to
# activations and has weights up to 127, so a positive activation at two large weights side by side is too much. Nothing
# is said, and the same file is exact on a CPU with VNNI. With weights from a normal distribution the error of the
# logits is almost three times that of quantization, and the largest 13 times. int16 and float32 do not have it.
# Versions: ctranslate2 4.8.5, numpy 2.3.5, Python 3.11, an Intel CPU with AVX512-VNNI (others: nothing is run).
# The model is GPT-2's with layers of zeros, so that one matrix product, the head's, makes the logits.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

grep -q GenuineIntel /proc/cpuinfo && grep -qw avx512_vnni /proc/cpuinfo || {
    echo "this machine is no Intel CPU with AVX512-VNNI"
    exit 0
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/model.py" <<'CODE'
import os
import sys

import numpy
from ctranslate2.specs import common_spec, transformer_spec

WIDTH, VOCABULARY, POSITIONS = 256, 500, 64


def weights():
    """Returns embeddings of tokens, which are the head too, and of positions."""
    rng = numpy.random.default_rng(0)
    return [rng.normal(0, 0.1, (rows, WIDTH)).astype(numpy.float32) for rows in (VOCABULARY, POSITIONS)]


def save(folder, quantization):
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        1, 4, pre_norm=True, activation=common_spec.Activation.GELUTanh)
    decoder, (tokens, positions) = spec.decoder, weights()
    decoder.scale_embeddings = False
    decoder.embeddings.weight, decoder.position_encodings.encodings = tokens, positions
    decoder.projection.weight = tokens
    layer = decoder.layer[0]
    for norm in (decoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
        norm.gamma, norm.beta = numpy.ones(WIDTH, numpy.float32), numpy.zeros(WIDTH, numpy.float32)
    for linear, rows, columns in ((layer.self_attention.linear[0], 3, 1), (layer.self_attention.linear[1], 1, 1),
                                  (layer.ffn.linear_0, 4, 1), (layer.ffn.linear_1, 1, 4)):
        linear.weight = numpy.zeros((rows * WIDTH, columns * WIDTH), numpy.float32)
        linear.bias = numpy.zeros(rows * WIDTH, numpy.float32)
    spec.register_vocabulary([f"t{i}" for i in range(VOCABULARY)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize(quantization)
    os.mkdir(folder)
    spec.save(folder)


if __name__ == "__main__":
    save(sys.argv[1] + "/int8", "int8")
    save(sys.argv[1] + "/int16", "int16")
CODE
cat >"$folder/logits.py" <<'CODE'
import sys

import ctranslate2
import numpy
from model import POSITIONS, weights

folder, kind, name = sys.argv[1:]
ids = numpy.arange(POSITIONS) * 7 % 500
got = numpy.array(ctranslate2.Generator(f"{folder}/{kind}").forward_batch([[f"t{i}" for i in ids]]))[0]


def norm(x):
    return (x - x.mean(1, keepdims=True)) / numpy.sqrt(x.var(1, keepdims=True) + 1e-5)


def quantize(x):
    scales = 127 / abs(x).max(1, keepdims=True)
    return numpy.rint(x * scales).astype(numpy.int64), scales


tokens, positions = weights()
float32 = norm(tokens[ids] + positions) @ tokens.T
bytes_, scales = quantize(tokens)
x, x_scales = quantize(norm((bytes_ / scales)[ids].astype(numpy.float32) + positions))
exact = x @ bytes_.T
pairs = numpy.zeros_like(exact)
for k in range(0, x.shape[1], 2):
    products = (x[:, k, None] + 128) * bytes_[None, :, k] + (x[:, k + 1, None] + 128) * bytes_[None, :, k + 1]
    pairs += products.clip(-32768, 32767)
pairs -= 128 * bytes_.sum(1)
error = got - float32
line = f"{name}: error of logits {numpy.sqrt((error ** 2).mean()):.3f}, largest {abs(error).max():.2f}"
for what, integers in ("exact sums", exact), ("saturated pairs", pairs):
    if abs(got - integers / x_scales / scales.T).max() < 1e-4:
        line += f", those of {what}"
print(line)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q ctranslate2==4.8.5 numpy==2.3.5
python="$folder/env/bin/python"
"$python" "$folder/model.py" "$folder" 2>"$folder/log"
{
    CT2_USE_MKL=0 "$python" "$folder/logits.py" "$folder" int8 "int8, oneDNN, VNNI"
    CT2_USE_MKL=0 ONEDNN_MAX_CPU_ISA=AVX512_CORE "$python" "$folder/logits.py" "$folder" int8 "int8, oneDNN, AVX-512"
    CT2_USE_MKL=0 ONEDNN_MAX_CPU_ISA=AVX2 "$python" "$folder/logits.py" "$folder" int8 "int8, oneDNN, AVX2"
    "$python" "$folder/logits.py" "$folder" int8 "int8, MKL, VNNI"
    MKL_ENABLE_INSTRUCTIONS=AVX2 "$python" "$folder/logits.py" "$folder" int8 "int8, MKL, AVX2"
    MKL_ENABLE_INSTRUCTIONS=AVX2 "$python" "$folder/logits.py" "$folder" int16 "int16, MKL, AVX2"
} 2>"$folder/log" | tee "$folder/got"

want="int8, oneDNN, VNNI: error of logits 0.018, largest 0.09, those of exact sums
int8, oneDNN, AVX-512: error of logits 0.051, largest 1.22, those of saturated pairs
int8, oneDNN, AVX2: error of logits 0.051, largest 1.22, those of saturated pairs
int8, MKL, VNNI: error of logits 0.018, largest 0.09, those of exact sums
int8, MKL, AVX2: error of logits 0.051, largest 1.22, those of saturated pairs
int16, MKL, AVX2: error of logits 0.003, largest 0.01"
diff <(echo "$want") "$folder/got" && echo "as it was"
