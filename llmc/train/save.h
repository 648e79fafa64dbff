// save.h: saves the checkpoints of a run, and handles failed saves.
#pragma once
#include "checkpoint/hf_weights.h"
#include "train/run.h"
#include "train/state_collector.h"

// How a save reads the weights and the optimizer's state.
struct StateReader {
    const ParamLayout& layout;
    std::vector<std::string> state;  // names of the optimizer's slots
    TensorReader read;
    bool sharded;          // every rank holds a part of the state: all ranks must make the same reads
    StatePart part;        // this rank's
    PartReader read_part;  // reads it without the other ranks
};

CheckpointFormat checkpoint_format(const Options& options, const std::vector<std::string>& state);
bool saves_checkpoints(const Options& options);

// Called by all ranks before the first step. Allocates the memory for saves that are written while training goes on
// (--checkpoint-async), if this run will make one.
void prepare_background_saves(Run& run, const StateReader& reader);
// What `plan` says about these saves; empty: the options turn them off. parts: the ranks that have a part of the state
// each; 1: rank 0 has all of it.
std::string describe_background_saves(const Options& options, const ParamLayout& layout, int num_slots, int parts);

// Called by all ranks at the end of the run. Saves the state of run.state.step, unless it is already saved or the run
// saves nothing. Returns when the checkpoint is complete. If rank 0 cannot write, rank 0 throws; with sharded state
// every rank throws.
void save_last(Run& run, const StateReader& reader);
// Like save_last, but a failed save is a warning: the older checkpoints are intact, and training continues. The third
// failure in a row is an error.
void save_or_warn(Run& run, const StateReader& reader);
// Like save_or_warn, but returns when the state is copied, if there is memory for the copy. report_background_save then
// tells the result.
void save_in_background(Run& run, const StateReader& reader);
// Called by the training thread between steps. If the save in flight is complete (wait: as soon
// as it is), prints its lines into the log, and counts a failure as save_or_warn does.
void report_background_save(Run& run, bool wait = false);
