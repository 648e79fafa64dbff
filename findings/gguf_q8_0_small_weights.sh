#!/usr/bin/env bash
# gguf_q8_0_small_weights.sh: Q8_0 of gguf is coarser than Q4_0 for weights of 1e-5, and stores zeros for those of 1e-6.
#
# Guess: a block of 32 weights has a scale of its own, so Q8_0 has the same relative error for weights of any size,
# 0.5 %, and always a smaller one than Q5_0 and Q4_0.
# Behaviour: the scale is a half-precision number, the largest weight divided by 127. Below 127 * 2^-14 = 0.0078 it is
# denormal and loses bits, and it is zero, with the whole block, if no weight is above 127 * 2^-25 = 3.8e-6. Q4_0
# divides by 8 and Q5_0 by 16, so they reach that far later, and are finer for small weights. Matrices that begin with
# zeros are so small after a few steps: the second one of a LoRA adapter, or output projections of a residual branch.
# Nothing warns. Weights above 127 * 65504 become infinite.
# Versions: gguf 0.19.0, numpy 2.3.5, Python 3.11. The bytes are llama.cpp's: the format has this scale.
# Output seen: that of `want` below, the root mean square of the error over that of the weights. Exit code 1 if it has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/errors.py" <<'CODE'
import numpy
from gguf import GGMLQuantizationType, quants

weights = numpy.random.default_rng(0).standard_normal((1000, 64)).astype(numpy.float32)
for deviation in (1e-2, 1e-3, 1e-4, 1e-5, 3e-6, 1e-6):
    scaled = weights * numpy.float32(deviation)
    line = f"{deviation:.0e}:"
    for name in ("Q8_0", "Q5_0", "Q4_0"):
        kind = GGMLQuantizationType[name]
        back = quants.dequantize(quants.quantize(scaled, kind), kind)
        error = numpy.sqrt(((back - scaled) ** 2).mean()) / deviation
        line += f" {name} {error:.1%}, zeros {(back == 0).mean():.0%};"
    print(line)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q gguf==0.19.0 numpy==2.3.5
"$folder/env/bin/python" "$folder/errors.py" 2>"$folder/log" | tee "$folder/got"

want="1e-02: Q8_0 0.5%, zeros 1%; Q5_0 4.3%, zeros 6%; Q4_0 8.6%, zeros 12%;
1e-03: Q8_0 0.5%, zeros 1%; Q5_0 4.3%, zeros 6%; Q4_0 8.6%, zeros 12%;
1e-04: Q8_0 1.1%, zeros 1%; Q5_0 4.3%, zeros 6%; Q4_0 8.6%, zeros 12%;
1e-05: Q8_0 9.5%, zeros 1%; Q5_0 4.4%, zeros 6%; Q4_0 8.6%, zeros 12%;
3e-06: Q8_0 21.2%, zeros 1%; Q5_0 5.8%, zeros 6%; Q4_0 8.9%, zeros 12%;
1e-06: Q8_0 99.9%, zeros 99%; Q5_0 12.5%, zeros 6%; Q4_0 10.5%, zeros 12%;"
diff <(echo "$want") "$folder/got" && echo "as it was"
