// comm.h: what the ranks of a run do together. Collectives move device memory and are queued, like work on a stream:
// each starts after what was queued on `after` before it, runs beside what is queued there later, and is waited for by
// its ticket. All ranks make the same calls in the same order.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/trace.h"
#include "parallel/launch.h"

enum class ReduceDtype { fp32, bf16 };  // of gradients on their way between ranks

struct Comm {
    int rank = 0, world_size = 1;
    int part = 0;  // which of the world_size equal parts of a buffer this rank has after reduce_scatter
    // Of this rank, in all: bytes it sent, collectives it took part in, its waits for them, and the seconds that its
    // host or a stream stood in those that are over.
    int64_t bytes_sent = 0, calls = 0, waits = 0;
    double exposed_seconds = 0.0;
    std::unique_ptr<Trace> trace;  // null: nobody wants one
    SpanLabel next = {};           // of the next collective, in the trace: its bytes are those sent before

    virtual ~Comm() = default;
    virtual std::string describe() const { return "one rank"; }
    virtual void check_reduce_dtype(ReduceDtype) const {}  // refuses what cannot be
    // Memory for collectives on gradients of that type, of at most so many at a time; before the first of them.
    virtual void reserve(ReduceDtype, int64_t) {}

    using Ticket = int64_t;
    // x (count) becomes the sum over all ranks, or this rank's part of x does and the rest is lost. count is a multiple
    // of world_size.
    virtual Ticket all_reduce(float*, int64_t, ReduceDtype, Stream) { return 0; }
    virtual Ticket reduce_scatter(float*, int64_t, ReduceDtype, Stream) { return 0; }
    // Every rank's part of x (bytes) comes to all ranks.
    virtual Ticket all_gather(void*, int64_t, Stream) { return 0; }
    // x (bytes) of the rank that has part `from`.
    virtual Ticket broadcast(void*, int64_t, int, Stream) { return 0; }
    // What is queued on the stream later runs after the collective of that ticket and all before it.
    virtual void wait(Ticket, Stream) {}
    // The same, in the trace as time that the stream has lost.
    void wait(Ticket ticket, Stream stream, SpanLabel label);
    // What the collective that is queued next is called in the trace; and that name, for who queues it.
    void call_next(const char* name, int64_t number = -1);
    SpanLabel take_name();

    // exposed_seconds, with those of the first so many waits, if they are over by now.
    virtual double exposed(int64_t) { return exposed_seconds; }

    // Blocks: what each rank said, in the order of ranks. Every rank returns only when all have come.
    virtual std::vector<std::string> exchange(const std::string& text) { return {text}; }
    // Whether some rank said yes: the same answer on all ranks. It may be that of their call before this one, so that
    // nobody waits for the slowest. Ranks joined by NCCL always get no: their hosts do not talk
    // during a step.
    virtual bool any_rank(bool yes) { return world_size == 1 && yes; }
    // Ends all ranks, where the launcher lets one do that; and this one.
    [[noreturn]] virtual void abort(int exit_code);
};

// Joins the ranks of the launch: by NCCL between GPUs, else by MPI; through host memory, also between GPUs, if staged.
// Refuses a launch that this build has no library for.
std::unique_ptr<Comm> make_comm(const Launch& launch, bool staged);
// "meets the others by MPI", or "at h0:29500", as NCCL's ranks do without MPI; empty for a single process.
std::string describe_joining(const Launch& launch);
// The device's own collectives; null: it has none (cuda/comm_nccl.cpp, cpu/device.cpp).
std::unique_ptr<Comm> make_device_comm(const Launch& launch);
bool device_joins_ranks();                                  // whether it has them
std::unique_ptr<Comm> make_mpi_comm(const Launch& launch);  // comm_mpi.cpp, where Open MPI is there

// Each rank's rank_info, a JSON object of strings, must say the same but for the names in `may_differ`: else every rank
// fails (EXIT_USAGE) with the sentence that names the first rank that differs from rank 0, and the field.
void check_same(const std::vector<std::string>& rank_infos, const std::vector<std::string>& may_differ);

// What a rank says of its device before the ranks join, and the refusal (EXIT_USAGE) of two that have the same one.
std::string device_identity();
void check_own_devices(const std::vector<std::string>& rank_infos);
