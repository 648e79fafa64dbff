#!/usr/bin/env bash
# torch_fp8_saturates.sh: torch turns infinity into 448 in float8_e4m3fn, and into infinity in float8_e5m2.
#
# Guess: E4M3 has no infinity, so what is above its range becomes NaN, as in ml_dtypes (JAX, ONNX, TensorFlow), and an
# activation that overflows is found by looking for NaN.
# Behaviour: .to(torch.float8_e4m3fn) on a CPU gives 448 for 465, for 1e6 and for infinity; only NaN stays NaN.
# ml_dtypes gives NaN for all of them from 465 on. float8_e5m2 of both has infinity from 61440 on. So in torch the
# check for values that are not finite works after a conversion to E5M2, and never after one to E4M3, and tensors that
# both libraries convert differ. Look for infinity before the conversion.
# Versions: torch 2.15.0 on a CPU (AVX-512, AVX2 and ATEN_CPU_CAPABILITY=default), ml_dtypes 0.6.0, numpy 2.3.5,
# Python 3.11. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/saturates.py" <<'CODE'
import ml_dtypes
import numpy
import torch

values = [448, 464, 465, 1e6, float("inf"), float("-inf"), float("nan"), 61439, 61440]
for name in ("float8_e4m3fn", "float8_e5m2"):
    by_torch = torch.tensor(values).to(getattr(torch, name)).float().tolist()
    with numpy.errstate(all="ignore"):
        by_ml_dtypes = numpy.array(values, numpy.float32).astype(getattr(ml_dtypes, name)).astype(float).tolist()
    for value, *both in zip(values, by_torch, by_ml_dtypes):
        print(f"{name} of {value:g}: torch {both[0]:g}, ml_dtypes {both[1]:g}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 ml_dtypes==0.6.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/saturates.py" | tee "$folder/got"

want="float8_e4m3fn of 448: torch 448, ml_dtypes 448
float8_e4m3fn of 464: torch 448, ml_dtypes 448
float8_e4m3fn of 465: torch 448, ml_dtypes nan
float8_e4m3fn of 1e+06: torch 448, ml_dtypes nan
float8_e4m3fn of inf: torch 448, ml_dtypes nan
float8_e4m3fn of -inf: torch -448, ml_dtypes nan
float8_e4m3fn of nan: torch nan, ml_dtypes nan
float8_e4m3fn of 61439: torch 448, ml_dtypes nan
float8_e4m3fn of 61440: torch 448, ml_dtypes nan
float8_e5m2 of 448: torch 448, ml_dtypes 448
float8_e5m2 of 464: torch 448, ml_dtypes 448
float8_e5m2 of 465: torch 448, ml_dtypes 448
float8_e5m2 of 1e+06: torch inf, ml_dtypes inf
float8_e5m2 of inf: torch inf, ml_dtypes inf
float8_e5m2 of -inf: torch -inf, ml_dtypes -inf
float8_e5m2 of nan: torch nan, ml_dtypes nan
float8_e5m2 of 61439: torch 57344, ml_dtypes 57344
float8_e5m2 of 61440: torch inf, ml_dtypes inf"
diff <(echo "$want") "$folder/got" && echo "as it was"
