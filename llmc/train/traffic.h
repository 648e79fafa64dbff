// traffic.h: computes the bytes that a rank sends in a training step, inside its host and to other hosts.
//
// A reduce-scatter or an all-gather of a buffer of M bytes over n ranks makes each rank send (n-1)/n M; an all-reduce
// is one of each. Ranks are numbered host by host, r to a host, so H = n/r hosts. Of the (n-1)/n M of a rank, these go
// to other hosts:
//
//     recursive halving (MPI, n a power of two)   (H-1)/n M
//     ring (NCCL; MPI with other n)               (n-1)/(n r) M
//
// Recursive halving exchanges with the ranks at distance 1, 2, 4, ..., and each exchange halves what is left. Only the
// distances from r on leave the host, when each rank holds 1/r of the buffer. In a ring, each rank sends to the next
// one. One rank of a host has its next on another host, and sends it all of its (n-1)/n M. NCCL has several rings, in
// which different ranks leave the host, so (n-1)/(n r) M is the average over a host's ranks. A ring sends up to twice
// as much to other hosts as recursive halving. NCCL may choose trees instead of rings, for small buffers or many hosts.
//
// Tensor-parallel ranks are neighbours on one host. They exchange activations in every micro-step; the ranks with the
// same place in their groups exchange gradients and weights.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "model/params.h"
#include "parallel/comm.h"

enum class CollectiveAlgorithm { halving, ring };

struct RankPlaces {
    int world_size = 1;
    int hosts = 1;  // each with world_size / hosts ranks
    CollectiveAlgorithm algorithm = CollectiveAlgorithm::ring;
};

struct TrafficOptions {
    Dtype dtype = Dtype::bf16;  // of weights and activations
    GradDtype grad_dtype = GradDtype::fp32;
    int zero = 0;
    int virtual_ranks = 0;  // 0: one per data-parallel rank
    int grad_accum_steps = 1;
    int64_t tokens = 0;       // of a micro-batch, B x T; only tensor parallelism depends on it
    int tensor_parallel = 1;  // divides the ranks of a host
    bool sequence_parallel = false, recompute_layer = false;
};

struct SentBytes {
    int64_t inside = 0, between = 0;  // hosts
    int64_t total() const { return inside + between; }
};

// The bytes that a rank sends, averaged over the ranks of a host. With ZeRO-3 the first step, and a step after
// validation or a sample, send up to two layers' weights more or less.
struct Traffic {
    SentBytes per_step;        // with all micro-steps
    SentBytes per_micro_step;  // on average, if not every micro-step sums gradients (--deterministic-ranks)
};

Traffic traffic_of(const GPT2Config& config, const TrafficOptions& options, const RankPlaces& places);
