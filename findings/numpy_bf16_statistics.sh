#!/usr/bin/env bash
# numpy_bf16_statistics.sh: numpy's mean, std and sum of bfloat16 weights are up to 1,000 times too small.
#
# Guess: mean(), std() and sum() of the bfloat16 arrays that safetensors.numpy gives are computed in float32, as mean()
# and std() of float16 are, or fail; at worst they have few digits.
# Behaviour: the type of ml_dtypes has no sum of its own in numpy, so elements are added one by one into a bfloat16,
# which stops growing where an element is less than half of its last digit. Of 3072 x 768 weights of N(0, 0.02), as in
# GPT-2's c_proj, the mean of the absolute values is 1/1174 of the true one, the standard deviation 1/20, the sum of
# squares 1/403; a softmax's weights add up to 1.5. numpy.linalg.norm is right, as are products of matrices and
# dtype=numpy.float32. float16's mean and std are right; its norms of columns, like sums along the first axis, are 3 %
# off here, those of rows are not.
# Versions: numpy 2.3.5, ml_dtypes 0.6.0, safetensors 0.8.0, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/statistics.py" <<'CODE'
import sys

import ml_dtypes
import numpy
from safetensors.numpy import load_file, save_file

weights = numpy.random.default_rng(0).standard_normal((3072, 768), numpy.float32) * numpy.float32(0.02)
save_file({"weights": weights.astype(ml_dtypes.bfloat16)}, sys.argv[1])
weights = load_file(sys.argv[1])["weights"]
STATISTICS = {
    "mean of absolute values": lambda x: numpy.abs(x).mean(),
    "the same with dtype=float32": lambda x: numpy.abs(x).mean(dtype=numpy.float32),
    "std": lambda x: x.std(),
    "std, dtype=float32": lambda x: x.std(dtype=numpy.float32),
    "sum of squares": lambda x: (x * x).sum(),
    "x @ x": lambda x: x.ravel() @ x.ravel(),
    "norm": numpy.linalg.norm,
    "norm of the first row": lambda x: numpy.linalg.norm(x, axis=1)[0],
    "norm of the first column": lambda x: numpy.linalg.norm(x, axis=0)[0],
    "sum of the first row's softmax": lambda x: (numpy.exp(x[0]) / numpy.exp(x[0]).sum()).astype(float).sum(),
}
for name, function in STATISTICS.items():
    values = [float(function(weights.astype(kind))) for kind in (numpy.float64, numpy.float16, weights.dtype)]
    print("{}: {:.4g}, float16 {:.4g}, {} {:.4g}".format(name, *values[:2], weights.dtype, values[2]))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy==2.3.5 ml_dtypes==0.6.0 safetensors==0.8.0
"$folder/env/bin/python" "$folder/statistics.py" "$folder/weights.safetensors" | tee "$folder/got"

want="mean of absolute values: 0.01596, float16 0.01596, bfloat16 1.359e-05
the same with dtype=float32: 0.01596, float16 0.01596, bfloat16 0.01596
std: 0.02001, float16 0.02, bfloat16 0.0009918
std, dtype=float32: 0.02001, float16 0.02001, bfloat16 0.02001
sum of squares: 944.4, float16 944.5, bfloat16 2.344
x @ x: 944.4, float16 943, bfloat16 944.4
norm: 30.73, float16 30.7, bfloat16 30.73
norm of the first row: 0.563, float16 0.563, bfloat16 0.563
norm of the first column: 1.098, float16 1.068, bfloat16 1.098
sum of the first row's softmax: 1, float16 1, bfloat16 1.5"
diff <(echo "$want") "$folder/got" && echo "as it was"
