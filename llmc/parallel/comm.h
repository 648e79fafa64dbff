// comm.h: collectives between the ranks of a run, and groups of ranks. Each call is asynchronous: it runs after the
// work already queued on the stream that it is given, overlaps with later work there, and returns a ticket to wait for.
// Buffers are device memory. All ranks make the same calls in the same order.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/device.h"
#include "parallel/launch.h"

struct Watchdog;  // watchdog.h

// The communicator of a single rank, whose collectives do nothing, and the base of the others.
struct Comm {
    using Ticket = int64_t;
    int rank = 0, world_size = 1;
    int shard_index = 0;  // index of this rank's shard after reduce_scatter: the rank, with MPI its bits reversed
    int64_t bytes_sent = 0, waits = 0;  // totals of this rank; waits: for collectives
    double exposed_seconds = 0.0;       // time in which the host or a stream was blocked in the waits that have ended
    // Watchdog of this rank, shared with the groups; null: none. It also guards the destructor, where ranks disconnect.
    std::shared_ptr<Watchdog> watchdog;

    virtual ~Comm() = default;
    virtual std::string describe() const { return "one rank"; }
    // Allocates memory for gradient collectives of this dtype and at most max_count elements; to be called before.
    virtual void reserve(Dtype, int64_t /*max_count*/) {}
    // Makes one small and one large call of each collective. At the first call NCCL connects the ranks and allocates
    // device memory; without connect() this would happen after memory was measured and filled. All ranks call it.
    virtual void connect() {}
    // Returns the communicator of the ranks that give the same color (0 or more), in the order of their ranks here. A
    // group of one rank is a plain Comm. All ranks call split() with the same collectives before it. The group has
    // counters of its own, and must not outlive this Comm. Collectives of several groups may be in flight at the same
    // time, if every rank makes its calls in the same order.
    virtual std::unique_ptr<Comm> split(int color);

    // Sum over all ranks, in place. all_reduce: all of x (count). reduce_scatter: this rank's shard of x; the other
    // shards become undefined. count is a multiple of world_size.
    virtual Ticket all_reduce(float* /*x*/, int64_t /*count*/, Dtype, Stream) { return 0; }
    virtual Ticket reduce_scatter(float* /*x*/, int64_t /*count*/, Dtype, Stream) { return 0; }
    // Sum activations in the same way (tensor parallelism). In bf16 the ranks send bf16; each addition is in float, and
    // its result is rounded to bf16. These sums are on the critical path, so the MPI thread polls instead of sleeping.
    virtual Ticket all_reduce(bf16* /*x*/, int64_t /*count*/, Stream) { return 0; }
    virtual Ticket reduce_scatter(bf16* /*x*/, int64_t /*count*/, Stream) { return 0; }
    virtual Ticket all_reduce(float* x, int64_t count, Stream stream) {
        return all_reduce(x, count, Dtype::fp32, stream);
    }
    virtual Ticket reduce_scatter(float* x, int64_t count, Stream stream) {
        return reduce_scatter(x, count, Dtype::fp32, stream);
    }
    // Copies every rank's shard of x (bytes) to all ranks.
    virtual Ticket all_gather(void* /*x*/, int64_t /*bytes*/, Stream) { return 0; }
    // Copies activations in the same way. They are on the critical path like their sums.
    virtual Ticket gather_activations(void* x, int64_t bytes, Stream stream) { return all_gather(x, bytes, stream); }
    // Copies x (bytes) to all ranks from the rank whose shard_index is `from`.
    virtual Ticket broadcast(void* /*x*/, int64_t /*bytes*/, int /*from*/, Stream) { return 0; }
    // Work queued on the stream after this call runs after the ticket's collective and all earlier ones.
    virtual void wait(Ticket, Stream) {}
    // Adds the durations of those of the first `first_waits` waits that have ended to exposed_seconds, and returns it.
    virtual double exposed(int64_t /*first_waits*/) { return exposed_seconds; }

    // Blocking all-gather of a text, in rank order. No rank returns before all ranks have called it.
    virtual std::vector<std::string> all_gather_text(const std::string& text) { return {text}; }
    // Logical OR over all ranks; every rank gets the same result. The result may be that of the previous call, so that
    // no rank waits for the slowest one. With NCCL it is always false: hosts do not communicate during a step.
    virtual bool any_rank(bool yes) { return world_size == 1 && yes; }
    // Ends this rank, and all other ranks where the launcher allows it.
    [[noreturn]] virtual void abort(int exit_code);
    // Progress of the training thread, for the watchdog. what: a string of static duration, "micro-step".
    void reached(const char* what, int64_t number = -1) const;
};

// Connects the ranks of the launch: GPUs by NCCL, CPU ranks by MPI. Refuses one whose library this build lacks.
std::unique_ptr<Comm> make_comm(const Launch& launch, std::shared_ptr<Watchdog> watchdog = nullptr);
bool built_with_nccl();  // false for the CPU
bool built_with_mpi();
std::unique_ptr<Comm> make_nccl_comm(const Launch& launch);  // comm_nccl.cpp; null if not built with NCCL
std::unique_ptr<Comm> make_mpi_comm(const Launch& launch);   // comm_mpi.cpp; null if not built with Open MPI

// Data- and tensor-parallel groups. world_size = dp x tp; tp ranks are adjacent: rank = dp_index * tp + tp_index.
struct Groups {
    Comm& world;
    std::unique_ptr<Comm> own_dp, own_tp;  // own_dp is null if dp is the world
    Comm& dp;  // the ranks with the same tp_index: they have the same part of the model and other data
    Comm& tp;  // the ranks with the same dp_index: they have the same data and other parts of the model

    // Bytes that this rank has sent in all communicators.
    int64_t bytes_sent() const { return world.bytes_sent + tp.bytes_sent + (own_dp ? dp.bytes_sent : 0); }
    struct Waits {
        int64_t world, dp, tp;
    };
    Waits waits() const { return {world.waits, dp.waits, tp.waits}; }
    double exposed(const Waits& first_waits) const;  // Comm::exposed of all communicators
};

// "1, 2 or 4": the numbers that --tensor-parallel may have: they divide the ranks and the heads. heads 0: unknown.
std::string possible_tensor_parallel(int world_size, int heads);
// Returns the number of data-parallel ranks. Refuses (EXIT_USAGE) a tensor_parallel that does not divide world_size,
// and says which numbers a model with this many heads can have.
int count_data_parallel(int world_size, int tensor_parallel, int heads = 0);

// All ranks of `world` call it. With tensor_parallel = 1, dp is the world, and no group is made. Refuses (EXIT_USAGE) a
// number that does not divide the ranks, and one that differs between ranks. Warns of a tensor-parallel group on
// several hosts, whose ranks exchange activations in every layer. Connects the ranks of all groups (Comm::connect),
// before memory is measured and filled. Groups must not outlive the world.
Groups make_groups(Comm& world, int tensor_parallel);
// Returns the warning; empty: each group is on one host. hosts: the host of each rank.
std::string warn_of_hosts(const std::vector<std::string>& hosts, int tensor_parallel);
