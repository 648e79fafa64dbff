#!/usr/bin/env bash
# mpirun.sh ARGUMENT...: Open MPI's mpirun, whose ranks save at Ctrl-C, SIGTERM and a closed terminal (exit code 75).
#
# mpirun itself kills the ranks within 2 s (Open MPI 4) or 0.5 s (Open MPI 5) of such a signal. So it is blocked in
# mpirun, which gets SIGUSR1 instead, and passes that on at once. A second signal ends the ranks without a save.
set -uo pipefail

trap 'kill -USR1 $!' INT TERM HUP USR1 USR2 XCPU
setpriv --pdeathsig USR1 env --block-signal=INT,TERM,HUP mpirun -x TRAIN_GPT2_SAVES=1 "$@" <&0 &
wait $!
code=$?
while kill -0 $! 2>/dev/null; do  # a signal has ended the wait
    wait $!
    code=$?
done
exit $code
