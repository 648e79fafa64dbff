// saver.h: saves checkpoints while training goes on. All ranks gather the state on rank 0, which copies it to host
// memory; a thread of rank 0 writes the copy. At most one save is in flight.
#pragma once
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "train/trainer.h"

// Result of a save. The thread that writes may not print, so it leaves its warnings to the training thread.
struct SaveResult {
    int64_t step = -1;
    std::string dir;
    double ms = 0.0, stall_ms = 0.0;  // time to gather and write the state; time in which training waited
    std::vector<std::string> warnings;
    std::optional<Error> error;  // reason why nothing was saved
};

template <class floatX>
struct Saver {
    Trainer<floatX>& trainer;
    const Run& run;
    Optimizer<floatX>& optimizer;
    std::vector<float*> copy;         // weights and optimizer state, in pinned memory; rank 0, with `background`
    bool background = false;          // saves between steps are written by a thread; the same on all ranks
    std::future<SaveResult> writing;  // save in flight; rank 0
    int64_t saved_step = -1;          // step of the last complete checkpoint, -1 if none; rank 0
    int64_t begun_step = -1;          // step of the last call of save(); the same on all ranks
    int failures = 0;                 // failed saves in a row; the third ends the run

    // Called by all ranks. Allocates the copy if the run will save between steps (--checkpoint-async) and it fits.
    explicit Saver(Trainer<floatX>& trainer);
    Saver(const Saver&) = delete;
    ~Saver() {
        if (writing.valid()) writing.wait();
        for (float* slot : copy) host_free(slot);
    }
    // All ranks call it alike; trainer.state is that of `step`. wait: returns on all ranks when the checkpoint is on
    // disk; rank 0 throws if it failed. Else a failure is a warning, and a second call for a step does nothing.
    void save(int64_t step, bool wait);
    void poll() {  // logs a save that has ended. A deferred future is not ready either: get() then writes.
        if (writing.valid() && writing.wait_for(std::chrono::seconds(0)) != std::future_status::timeout)
            report(writing.get(), false);
    }
    void finish(bool before_last);  // waits for the save in flight

  private:
    SlotLayout in_copy(Slot slot) const {
        return {optimizer.full_layout, 1, 0, optimizer.slot_layout(slot).without_matrices};
    }
    std::string allocate_copy(int64_t bytes);
    void save_in_background(double begin);
    SaveResult save_now();
    void report(const SaveResult& result, bool last);
};

bool saves_checkpoints(const Options& options);
