#!/usr/bin/env bash
# mpirun.sh ARGUMENT...: Open MPI's mpirun, whose ranks save at Ctrl-C, SIGTERM and a closed terminal (exit code 75).
#
# mpirun itself kills the ranks within 2 s (Open MPI 4) or 0.5 s (Open MPI 5) of such a signal. So it is blocked in
# mpirun, which gets SIGUSR1 instead, and passes that on at once. It drops a signal that comes before its ranks exist,
# or hangs at its end; so the first one waits until a rank asks for it by SIGURG. A second ends the ranks without a
# save.
set -uo pipefail

trap 'if [ -v joined ] || [ -v asked ]; then kill -USR1 ${!-} 2>/dev/null; fi; asked=1' INT TERM HUP USR1 USR2 XCPU
trap 'if [ -v asked ] && [ ! -v joined ]; then kill -USR1 $!; fi; joined=1' URG
setpriv --pdeathsig USR1 env --block-signal=INT,TERM,HUP \
  mpirun -x TRAIN_GPT2_SAVES="$(uname -n):$$" "$@" <&0 &
while kill -0 $! 2>/dev/null; do wait $!; done  # a signal ends the wait
wait $!
