// tensor_collectives.h: what a model needs of the ranks that share its layers (tensor parallelism). The communicators
// of parallel/comm.h provide it.
#pragma once
#include <cstdint>

#include "base/device.h"
#include "base/trace.h"

struct TensorCollectives {
    using Ticket = int64_t;
    virtual ~TensorCollectives() = default;
    // Sum of x (count elements) over the ranks, in place. all_reduce: all of x. reduce_scatter: this rank's shard of x;
    // the other shards become undefined. count is a multiple of the number of ranks.
    virtual Ticket all_reduce(float* x, int64_t count, Stream) = 0;
    virtual Ticket all_reduce(bf16* x, int64_t count, Stream) = 0;
    virtual Ticket reduce_scatter(float* x, int64_t count, Stream) = 0;
    virtual Ticket reduce_scatter(bf16* x, int64_t count, Stream) = 0;
    // Copies every rank's shard of x (bytes) to all ranks.
    virtual Ticket gather_activations(void* x, int64_t bytes, Stream) = 0;
    // Work queued on the stream after this call runs after the ticket's collective. The trace records the wait
    // as a span of the training track.
    virtual void wait(Ticket, Stream, SpanLabel) = 0;
    // Sets the trace label of the next collective.
    virtual void label_next(const char* name) = 0;
};
