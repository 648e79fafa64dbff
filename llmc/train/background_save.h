// background_save.h: writes a checkpoint in a thread of its own while training goes on (--checkpoint-async).
//
// At the end of a step the training thread copies the state into host memory, and continues. The thread writes the
// copy. At most one save is in flight, because there is one copy. If each rank has only a part of the state, the thread
// first collects the other ranks' parts (train/state_collector.h).
#pragma once
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/common.h"
#include "checkpoint/hf_weights.h"

// The result of a save. A thread may not print into the log, so it keeps its lines for the training thread.
struct SaveResult {
    struct Line {
        bool warning;
        std::string text;
    };
    int64_t step = 0;
    std::string dir;
    double ms = 0.0;                 // to copy and write the state
    double stall_ms = 0.0;           // in which training waited, also for the save before
    std::vector<Line> lines;         // notes and warnings, in order
    std::optional<Error> error;      // why nothing was saved
};

// A copy of the weights and the optimizer's state in host memory, which is pinned for a GPU.
struct Snapshot {
    ParamLayout layout;
    std::vector<float*> slots;  // the weights, then the optimizer's state; each (layout.total)

    Snapshot(const ParamLayout& layout, int num_slots);
    Snapshot(const Snapshot&) = delete;
    ~Snapshot();
    void take(const TensorReader& read);  // reads every tensor of every slot once
    TensorView view() const;
};
int64_t snapshot_bytes(const ParamLayout& layout, int num_slots);

struct BackgroundSave {
    Snapshot snapshot;
    int64_t step = -1;               // of the save in flight
    bool warned_of_wait = false;     // a save had to wait for the one before, and a warning has said so

    BackgroundSave(const ParamLayout& layout, int num_slots) : snapshot(layout, num_slots) {}
    ~BackgroundSave() { finish(true); }

    // Runs `write` in a thread: the save of step `step_of_save`. The previous save must have been finished. If no
    // thread can be started, `write` runs in this call.
    void start(int64_t step_of_save, std::function<SaveResult()> write);
    // Returns the result of the save in flight, once. Empty if there is no such save, or if it is still being written
    // and `wait` is false.
    std::optional<SaveResult> finish(bool wait);
    bool in_flight() const { return thread.joinable() || done; }

  private:
    std::thread thread;
    std::atomic<bool> done = false;
    SaveResult result;  // of the thread, once it is done
};
