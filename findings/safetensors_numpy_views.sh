#!/usr/bin/env bash
# safetensors_numpy_views.sh: safetensors 0.8.0 saves a transposed numpy array in the order of its memory.
#
# Guess: save() of safetensors.numpy makes a view contiguous, as 0.7.0 does, or refuses it, as safetensors.torch does.
# Behaviour: 0.8.0 writes the bytes of the view's memory from its first element on, under the view's shape. A transposed
# array, an array in Fortran's order and a slice of columns load with their elements at other places, without an error.
# np.ascontiguousarray before save() avoids it. Converters of GPT-2's weights save transposed matrices.
# Versions: safetensors 0.8.0 and 0.7.0, numpy 2.3.5, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/views.py" <<'END'
import numpy
import safetensors
from safetensors.numpy import load, save

matrix = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
views = {"transposed": matrix.T, "columns": matrix[:, :2], "Fortran": numpy.asfortranarray(matrix)}
for name, view in views.items():
    loaded = load(save({"x": view}))["x"]
    right = numpy.array_equal(loaded, view)
    print(safetensors.__version__, name, "right" if right else f"wrong: {loaded.tolist()} for {view.tolist()}")
END
for version in 0.7.0 0.8.0; do
    "$folder/env/bin/pip" install -q safetensors==$version numpy==2.3.5
    "$folder/env/bin/python" "$folder/views.py"
done | tee "$folder/got"

want="0.7.0 transposed right
0.7.0 columns right
0.7.0 Fortran right
0.8.0 transposed wrong: [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] for [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
0.8.0 columns wrong: [[0.0, 1.0], [2.0, 3.0]] for [[0.0, 1.0], [3.0, 4.0]]
0.8.0 Fortran wrong: [[0.0, 3.0, 1.0], [4.0, 2.0, 5.0]] for [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"
diff <(echo "$want") "$folder/got" && echo "as it was"
