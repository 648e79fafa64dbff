// state_collector.h: saves in the background if each rank has only a part of the weights and of the optimizer's state
// (ZeRO, tensor parallelism).
//
// At the end of a step each rank copies its own part into host memory, without communication. Then a thread of each
// rank sends the copy to rank 0 (parallel/part_channel.h). There the thread that writes the checkpoint first puts the
// parts together.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "checkpoint/hf_weights.h"
#include "parallel/part_channel.h"
#include "train/state_part.h"

// Copies a slot of this rank's part into host memory: StatePart::floats elements.
using PartReader = std::function<void(float* host, Slot slot)>;

int64_t part_bytes(const StatePart& part, int num_slots);  // of a copy

struct StateCollector {
    // Called by all ranks, with the same silence (PartChannel).
    StateCollector(Comm& comm, const ParamLayout& whole, const StatePart& own, int num_slots, double silence);
    StateCollector(const StateCollector&) = delete;
    ~StateCollector();
    std::string why_not;  // why the ranks cannot reach rank 0; the same on all ranks; empty: they can

    // Called by the training thread. Waits until this rank has sent its part of the save before. Returns why it could
    // not. Rank 0 sends nothing.
    std::optional<Error> finish();
    // Called by the training threads of all ranks in the same saves, after finish. Copies the part, and on ranks other
    // than 0 starts the thread that sends it.
    void copy(const PartReader& read);
    // Called by the thread of rank 0 that writes the checkpoint. slots: flat buffers in the layout `whole`. Throws
    // (EXIT_IO) if a part does not come.
    void collect(const std::vector<float*>& slots);

  private:
    float* slot(Slot s) const { return memory + s * own.floats(); }
    void send();

    const StatePart own;
    const int num_slots, rank;
    float* memory;                             // this rank's copy, slot after slot
    std::map<int, std::vector<PartRun>> runs;  // on rank 0: of each rank that has a part
    std::map<int, int64_t> bytes;              // on rank 0: that each other rank sends
    int64_t saves = 0;
    PartChannel channel;
    std::thread sender;           // on the other ranks
    std::optional<Error> failed;  // why it could not send
};
