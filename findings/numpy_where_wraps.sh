#!/usr/bin/env bash
# numpy_where_wraps.sh: numpy's where and pad wrap a number that does not fit tokens of 16 bits; assignment refuses it.
#
# Guess: since numpy 2 an integer that does not fit the type of an array raises OverflowError, and no function makes
# another token of it silently. Labels of -100 for padding either fail in uint16 or turn the array into int64.
# Behaviour: tokens[mask] = -100, full, full_like, insert, putmask, maximum and + raise. where(mask, -100, tokens), pad,
# select (its default) and choose return 65436, and 4464 for token 70000. They first make an array of the number and
# then cast it to uint16 without a check; a where with two numbers returns int64. append and concatenate go to int64.
# array([70000], uint16) raises, but not if the 70000 is a numpy.int64, as when ids come from another array; assignment
# of such a number wraps as well. A token that was wrapped is another valid token, and a wrapped -100 is a label that
# no ignore_index knows. uint32 is the same.
# Versions: numpy 2.4.6 (2.1.3 too), Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/wraps.py" <<'CODE'
import numpy

tokens = numpy.array([10, 20], dtype=numpy.uint16)
mask = tokens == 20


def assigned(index, number):
    copy = tokens.copy()
    copy[index] = number
    return copy


ways = {
    "tokens[mask] = n": lambda n: assigned(mask, n),
    "insert": lambda n: numpy.insert(tokens, 1, n),
    "full_like": lambda n: numpy.full_like(tokens, n),
    "maximum": lambda n: numpy.maximum(tokens, n),
    "array([n])": lambda n: numpy.array([n], dtype=numpy.uint16),
    "where": lambda n: numpy.where(mask, n, tokens),
    "pad": lambda n: numpy.pad(tokens, (0, 1), constant_values=n),
    "select, default": lambda n: numpy.select([~mask], [tokens], n),
    "choose": lambda n: numpy.choose(mask, [tokens, n]),
    "append": lambda n: numpy.append(tokens, n),
    "array([int64(n)])": lambda n: numpy.array([numpy.int64(n)], dtype=numpy.uint16),
    "tokens[0] = int64(n)": lambda n: assigned(0, numpy.int64(n)),
}
for name, way in ways.items():
    for number in (-100, 70000):
        try:
            result = way(number)
            print(f"{name}, n = {number}: {result.tolist()} {result.dtype}")
        except OverflowError as error:
            print(f"{name}, n = {number}: {error}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy==2.4.6
"$folder/env/bin/python" "$folder/wraps.py" 2>"$folder/log" | tee "$folder/got"

want="tokens[mask] = n, n = -100: Python integer -100 out of bounds for uint16
tokens[mask] = n, n = 70000: Python integer 70000 out of bounds for uint16
insert, n = -100: Python integer -100 out of bounds for uint16
insert, n = 70000: Python integer 70000 out of bounds for uint16
full_like, n = -100: Python integer -100 out of bounds for uint16
full_like, n = 70000: Python integer 70000 out of bounds for uint16
maximum, n = -100: Python integer -100 out of bounds for uint16
maximum, n = 70000: Python integer 70000 out of bounds for uint16
array([n]), n = -100: Python integer -100 out of bounds for uint16
array([n]), n = 70000: Python integer 70000 out of bounds for uint16
where, n = -100: [10, 65436] uint16
where, n = 70000: [10, 4464] uint16
pad, n = -100: [10, 20, 65436] uint16
pad, n = 70000: [10, 20, 4464] uint16
select, default, n = -100: [10, 65436] uint16
select, default, n = 70000: [10, 4464] uint16
choose, n = -100: [10, 65436] uint16
choose, n = 70000: [10, 4464] uint16
append, n = -100: [10, 20, -100] int64
append, n = 70000: [10, 20, 70000] int64
array([int64(n)]), n = -100: [65436] uint16
array([int64(n)]), n = 70000: [4464] uint16
tokens[0] = int64(n), n = -100: [65436, 20] uint16
tokens[0] = int64(n), n = 70000: [4464, 20] uint16"
diff <(echo "$want") "$folder/got" && echo "as it was"
