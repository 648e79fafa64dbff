#!/usr/bin/env bash
# test_layouts.sh: runs layouts.cpp on four CPU ranks: models of random shapes, trained in random layouts of tensor
# parallelism, ZeRO and data parallelism, must have the results of one rank.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "layouts of ranks" "$reason" && exit 0; fi
several_ranks_here
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1  # four ranks share the machine

make build/release/layouts || exit 1
mpirun --timeout 800 -np 4 build/release/layouts
