// save.h: saves the checkpoints of a run, and handles failed saves.
#pragma once
#include "checkpoint/hf_weights.h"
#include "train/run.h"

// How a save reads the weights and the optimizer's state.
struct StateReader {
    const ParamLayout& layout;
    std::vector<std::string> state;  // names of the optimizer's slots
    TensorReader read;
    bool sharded;  // every rank holds a part of the state: all ranks must make the same reads
};

CheckpointFormat checkpoint_format(const Options& options, const std::vector<std::string>& state);

// Called by all ranks. Saves the state of run.state.step, unless it is already saved or the run saves nothing. If rank
// 0 cannot write, rank 0 throws; with sharded state every rank throws.
void save(Run& run, const StateReader& reader);
// Like save, but a failed save is a warning: the older checkpoints are intact, and training continues. The third
// failure in a row is an error.
void save_or_warn(Run& run, const StateReader& reader);
// Writes the validation loss into the checkpoint of this step, which was saved before its validation, and deletes the
// best checkpoint before it if no other rule keeps that one.
void save_val_loss(Run& run);
