// comm_mpi.h: MPI between CPU ranks: the thread that makes all MPI calls of a rank, and the algorithms of collectives.
//
// The thread makes the calls in their order, so that the training thread can continue. It sleeps while it waits: Open
// MPI would spin on the core that training needs. While training itself waits for activations, the thread tests for
// messages without pause.
//
// Reduce-scatter is recursive halving: at distance 1, 2, 4, ... a rank exchanges halves with rank XOR distance and adds
// the received half to the half that it keeps. All-gather is the same exchanges in reverse (Thakur, Rabenseifner and
// Gropp 2005). In an all-reduce every rank sends 2 (n-1)/n of a buffer, which is the minimum. If ranks of a host are
// adjacent, the first exchanges stay inside hosts, and 2 (H-1) buffers in total leave the H hosts. The sum is the tree
// ((0+1)+(2+3))+... for any n, and a + b = b + a, so the bits of the sum do not depend on how many leaves of the tree
// one rank has. If the number of ranks is not a power of two, MPI's own collectives are used, with their own order of
// summation.
#pragma once

#define OMPI_SKIP_MPICXX 1  // no C++ bindings: MPI has removed them
#include <mpi.h>

#include <bit>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm.h"

// The thread and its queue of jobs.
struct MpiThread {
    using Ticket = Comm::Ticket;

    std::mutex mutex;  // guards jobs, posted and done
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;  // an empty one ends the thread
    Ticket posted = 0, done = 0;
    std::exception_ptr error;      // from the first job that failed; the jobs after it are not run
    double stopped_seconds = 0.0;  // time in which this process was not running while the training thread waited
    std::vector<char> outgoing, incoming[2];  // memory for messages; used by jobs, which run one after the other
    std::vector<float> sums;
    std::thread thread;

    MpiThread() : thread([this] { work(); }) {}
    MpiThread(const MpiThread&) = delete;
    ~MpiThread() {
        post(nullptr);
        thread.join();
    }
    Ticket post(std::function<void()> job);
    void wait_for(Ticket ticket);  // throws the error of the first job that failed
    bool wait_for(Ticket ticket, double seconds);  // returns whether the job was done within the time
    void run(const std::function<void()>& job) { wait_for(post(job)); }

  private:
    void work();
};

// A group of ranks, and its collectives. Everything here runs on the MPI thread.
struct MpiGroup {
    MPI_Comm comm = MPI_COMM_NULL;
    int rank = 0, size = 1, shard_index = 0;
    MpiThread& thread;
    bool votes[2] = {};  // results of the last two calls of any_rank, with an even and with an odd number

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
