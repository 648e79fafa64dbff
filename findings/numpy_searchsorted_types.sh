#!/usr/bin/env bash
# numpy_searchsorted_types.sh: numpy's searchsorted copies the whole array first if the number has another type.
#
# Guess: finding the document of a token in sorted offsets takes a binary search, about a microsecond for ten million
# offsets. A Python integer adopts the array's type, as it does in arithmetic since numpy 2, so it costs nothing.
# Behaviour: searchsorted makes one type of both arguments, and a Python integer counts as int64 there. An array of
# int32, uint32, uint64 or float32 is first copied as int64 or float64, in each call: 10 to 30 ms instead of some
# microseconds, and all of a memory-mapped file is read. A float wanted in an array of int64 does the same. Such arrays
# are common: datatrove's .index files are uint64, and int32 halves an index. For uint64 the common type is float64,
# so offsets above 2^53 are found at a wrong place. Converting the number to the array's type (offsets.dtype.type(n))
# avoids all of it. bisect.bisect_right takes the array as it is, and its number too.
# Versions: numpy 2.4.6, Python 3.11, x86-64.
# Output seen: that of `want` below; "slow" is more than 100 times the search with the array's own type (seen: 5,000 to
# 15,000 times). Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/search.py" <<'CODE'
import time
import tracemalloc
from bisect import bisect_right

import numpy

OFFSETS = 10_000_000


def seconds(search):
    """Returns the shortest time of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        search()
        times.append(time.perf_counter() - start)
    return min(times)


def peak(search):
    """Returns the MB that a search allocates."""
    tracemalloc.start()
    search()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(size / 1e6)


for kind in ("int32", "uint32", "int64", "uint64", "float32"):
    offsets = numpy.arange(OFFSETS, dtype=kind)
    own = seconds(lambda: numpy.searchsorted(offsets, offsets.dtype.type(5)))
    line = f"{kind}:"
    for name, wanted in (("own type", offsets.dtype.type(5)), ("int", 5), ("numpy.int64", numpy.int64(5)),
                         ("float", 5.0)):
        ratio = seconds(lambda: numpy.searchsorted(offsets, wanted)) / own
        line += f" {name} {'slow' if ratio > 100 else 'fast' if ratio < 30 else ratio}"
        line += f" {peak(lambda: numpy.searchsorted(offsets, wanted))} MB,"
    bisected = seconds(lambda: bisect_right(offsets, 5)) / own
    print(f"{line} bisect {'slow' if bisected > 100 else 'fast'}")
offsets = numpy.array([2**53, 2**53 + 1, 2**53 + 2], dtype=numpy.uint64)
print("2^53 + 1 of uint64: int", numpy.searchsorted(offsets, 2**53 + 1), "own type",
      numpy.searchsorted(offsets, numpy.uint64(2**53 + 1)))
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy==2.4.6
"$folder/env/bin/python" "$folder/search.py" 2>"$folder/log" | tee "$folder/got"

want="int32: own type fast 0 MB, int slow 80 MB, numpy.int64 slow 80 MB, float slow 80 MB, bisect fast
uint32: own type fast 0 MB, int slow 80 MB, numpy.int64 slow 80 MB, float slow 80 MB, bisect fast
int64: own type fast 0 MB, int fast 0 MB, numpy.int64 fast 0 MB, float slow 80 MB, bisect fast
uint64: own type fast 0 MB, int slow 80 MB, numpy.int64 slow 80 MB, float slow 80 MB, bisect fast
float32: own type fast 0 MB, int slow 80 MB, numpy.int64 slow 80 MB, float slow 80 MB, bisect fast
2^53 + 1 of uint64: int 0 own type 1"
diff <(echo "$want") "$folder/got" && echo "as it was"
