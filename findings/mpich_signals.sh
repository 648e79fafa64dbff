#!/usr/bin/env bash
# mpich_signals.sh: mpiexec of MPICH passes SIGTERM on and waits for ever; SIGHUP and SIGUSR2 end it and its ranks.
#
# Guess: as Open MPI's mpirun, a SIGTERM to mpiexec ends the ranks after a short wait, at the latest by SIGKILL, and
# SIGUSR1 and SIGUSR2 are forwarded. A job script that sends SIGTERM or SIGUSR2 before its limit reaches the ranks.
# Behaviour: SIGTERM, SIGINT and SIGUSR1 reach the rank at once, and nothing follows them: a rank that handles the
# signal runs on, and mpiexec then ends with its exit code. SIGUSR2 and SIGHUP are not forwarded: they end mpiexec, and
# the rank is killed with it before it can save. So a run under MPICH is to be stopped by SIGTERM or SIGUSR1, and a lost
# terminal costs the steps since the last checkpoint.
# Versions: MPICH 5.0.2, as packaged on PyPI; Python 3.11 for the rank.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/rank.py" <<'END'
import signal
import sys
import time

log = open(sys.argv[1], "w", buffering=1)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda got, _: print(signal.Signals(got).name, file=log))
for _ in range(60):
    print("alive", file=log)
    time.sleep(0.05)
print("end", file=log)
END
# A shell starts background processes with SIGINT ignored.
cat >"$folder/start.py" <<'END'
import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
END
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q mpich==5.0.2
for name in TERM INT USR1 USR2 HUP; do
    rm -f "$folder/log"
    python3 "$folder/start.py" "$folder/env/bin/mpiexec" -n 1 python3 "$folder/rank.py" "$folder/log" \
        >"$folder/out" 2>&1 &
    until [ -s "$folder/log" ]; do sleep 0.1; done
    sleep 0.5
    kill -$name $!
    code=0
    wait $! 2>"$folder/waited" || code=$?
    sleep 0.5
    got=$(grep SIG "$folder/log" || true)
    ran=$(grep -q end "$folder/log" && echo "ran to its end" || echo "was killed")
    echo "SIG$name: the rank got ${got:-nothing} and $ran; exit code $code"
done | tee "$folder/got"

want="SIGTERM: the rank got SIGTERM and ran to its end; exit code 0
SIGINT: the rank got SIGINT and ran to its end; exit code 0
SIGUSR1: the rank got SIGUSR1 and ran to its end; exit code 0
SIGUSR2: the rank got nothing and was killed; exit code 140
SIGHUP: the rank got nothing and was killed; exit code 129"
diff <(echo "$want") "$folder/got" && echo "as it was"
