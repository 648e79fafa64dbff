// mpi_group.h: a group of ranks that make collectives by MPI, and the algorithms. Everything here runs on the MPI
// thread.
//
// Reduce-scatter is recursive halving: at distance 1, 2, 4, ... a rank exchanges halves with rank XOR distance and adds
// the received half to the half that it keeps. All-gather is the same exchanges in reverse (Thakur, Rabenseifner and
// Gropp 2005). In an all-reduce every rank sends 2 (n-1)/n of a buffer, which is the minimum. If ranks of a host are
// adjacent, the first exchanges stay inside hosts, and 2 (H-1) buffers in total leave the H hosts. The sum is the tree
// ((0+1)+(2+3))+... for any n, and a + b = b + a, so the bits of the sum do not depend on how many leaves of the tree
// one rank has. If the number of ranks is not a power of two, MPI's own collectives are used, with their own order of
// summation.
#pragma once

#include <bit>
#include <string>
#include <vector>

#include "parallel/mpi_thread.h"

struct MpiGroup {
    MPI_Comm comm = MPI_COMM_NULL;
    int rank = 0, size = 1, shard_index = 0;
    MpiThread& thread;
    bool votes[2] = {};  // results of the last two calls of any_rank: of an even and of an odd call number

    explicit MpiGroup(MpiThread& thread) : thread(thread) {}

    void open(MPI_Comm of_ranks);

    bool uses_halving() const { return std::has_single_bit(unsigned(size)); }

    // Sums of gradients, sent in this dtype, or of activations in fp32. x: `count` elements, of which this rank's shard
    // is then the sum over ranks. prompt: see finish.
    void reduce_shards(float* x, int64_t count, GradDtype dtype, bool prompt);
    // Sums of activations in bf16. If the number of ranks is not a power of two, each rank receives its shard from all
    // ranks, adds in the order of ranks in fp32, and rounds once.
    void reduce_shards(bf16* x, int64_t count, bool prompt);

    // x: the shards of all ranks, `bytes` in all, of which this rank's is given.
    void gather_all(char* x, int64_t bytes, bool prompt = false);
    // Rounds this rank's shard of the sums to bf16, all-gathers the bf16 values, and converts them to float.
    void gather_rounded(float* x, int64_t shard);

    // from: the shard index of the rank that sends.
    void broadcast(char* x, int64_t bytes, int from);
    std::vector<std::string> all_gather_text(const std::string& text);
    void vote(bool yes, int64_t call);

  private:
    template <class Sent, class Element, class Take>
    void exchange_with(const Element* x, int64_t count, int partner, bool prompt, const Take& take);
    template <class Sent, class Element>
    void reduce_by_halving(Element* x, int64_t count, bool prompt);
    void gather_shards(char* x, int64_t bytes, bool prompt);
    int rank_of(int shard) const;
};
