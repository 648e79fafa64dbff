#!/usr/bin/env bash
# grain_shuffle_seeds.sh: epoch two of Grain's shuffle(seed=1) is epoch one of shuffle(seed=2).
#
# Guess: runs with the seeds 1, 2 and 3 see the data in unrelated orders, in each of their epochs.
# Behaviour: MapDataset.shuffle adds the number of the epoch to the seed. Runs of three epochs with the seeds 1, 2 and 3
# have five orders in all, and not nine. Seeds that are far apart help, or seed() in front of shuffle(), which mixes its
# number.
# Versions: grain 0.2.18, numpy 2.3.5, Python 3.11.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/seeds.py" <<'CODE'
import grain

RECORDS = 1000
data = grain.MapDataset.source(list(range(RECORDS)))


def epochs(shuffled):
    repeated = shuffled.repeat(3)
    return [tuple(repeated[i] for i in range(start, start + RECORDS)) for start in range(0, 3 * RECORDS, RECORDS)]


for name, shuffle in (("shuffle(seed=n)", lambda n: data.shuffle(seed=n)),
                      ("seed(n).shuffle()", lambda n: data.seed(n).shuffle())):
    one, two, three = (epochs(shuffle(n)) for n in (1, 2, 3))
    same = [(i + 1, j + 1) for i, a in enumerate(one) for j, b in enumerate(two) if a == b]
    print(f"{name}: epochs of 1 equal to epochs of 2: {same}, orders of three seeds: {len({*one, *two, *three})}")
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q grain==0.2.18 numpy==2.3.5
"$folder/env/bin/python" "$folder/seeds.py" 2>"$folder/log" | tee "$folder/got"

want="shuffle(seed=n): epochs of 1 equal to epochs of 2: [(2, 1), (3, 2)], orders of three seeds: 5
seed(n).shuffle(): epochs of 1 equal to epochs of 2: [], orders of three seeds: 9"
diff <(echo "$want") "$folder/got" && echo "as it was"
