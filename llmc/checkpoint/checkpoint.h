// checkpoint.h: the state of a run, in directories that cannot be lost.
//
//   OUTPUT/step_005000/  config.json  generation_config.json  model.safetensors  tokenizer files
//                        optimizer.safetensors  m.*, v.* and, where model.safetensors is bf16, the fp32 master.*
//                        trainer.json           TrainerState, size and checksum of every other file; written last
//   OUTPUT/latest        the name of the newest directory, for people and scripts
//
// transformers loads the directory as it is. Tensors are whole and in Hugging Face's names and layout (Conv1D matrices
// transposed, wte without its padded rows), so nothing depends on the number of ranks, the precision of training or the
// padding. The weights are the fp32 masters, or bf16 weights without masters, widened: a resumed run continues with the
// same bits.
//
// A directory is written as step_N.tmp, brought to disk, renamed; `latest` moves after that, and older directories go
// last. So a crash at any instruction leaves the newest complete checkpoint loadable.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/hf_weights.h"

// What a run must remember beside its tensors.
struct TrainerState {
    int64_t step = 0;      // optimizer steps taken
    int64_t position = 0;  // samples taken from the data order: position g of the next one
    int64_t tokens = 0;    // tokens trained on
    uint64_t seed = 0;
    double val_loss = -1;        // the last one; -1: not measured yet
    std::string options = "{}";  // JSON object: the options of the run
    std::string data = "{}";     // JSON object: what identifies the training data
    std::string extra = "{}";    // JSON object: whatever else the trainer wants back as it was
};

// What the tensor files of a checkpoint hold.
struct CheckpointFormat {
    bool bf16_weights = false;                    // model.safetensors in BF16, fp32 masters in optimizer.safetensors
    std::vector<std::string> state = {"m", "v"};  // the optimizer's state tensors (slots 1, 2, ...), which prefix names
};

struct SaveOptions {
    std::string output;  // OUTPUT above, made if it is missing
    int keep = 0;        // newest directories to keep; 0 = all
    CheckpointFormat format;
    int end_of_text = 50256;                                      // for config.json
    std::function<void(const std::string& dir)> write_tokenizer;  // writes its files into dir; may be empty
    std::function<void(const std::string& line)> note;  // prints what was renamed or deleted, and what could not be
};
struct SavedCheckpoint {
    std::string dir;
    int64_t bytes;
};

// OUTPUT/step_N.
std::string checkpoint_directory(const std::string& output, int64_t step);

// Where fewer than so many bytes are free, or fewer files than a save makes, deletes what a save of this step would
// delete after it: the checkpoints that `keep` gives up, the oldest first, but not the newest that verifies. Refuses
// (EXIT_IO), with what would help, where that does not free the bytes, and deletes nothing then. One that cannot be
// deleted is passed over, and the next one goes, if the rest is enough. save_checkpoint begins with it; so should a run
// that resumes, because its log needs room too. `note` prints what was deleted, and what could not be.
void make_room(const std::string& output, int keep, int64_t step, int64_t needed,
               const std::function<void(const std::string& line)>& note);

// Writes OUTPUT/step_N of state.step; one that is there already is replaced. Fails with EXIT_IO or EXIT_CANNOT_CREATE,
// the path and the system's reason, and then every checkpoint that was there still is, but for those that make_room
// deleted: training may go on and try again later. A `latest` that cannot be replaced is no failure, for nothing here
// reads it: a note says so, and the older checkpoints stay. Checkpoints of later steps (a run that was continued from
// an older one) are renamed to step_N.stale.
//
// `read` is called for all weights (twice with bf16_weights), then for each slot of the optimizer.
SavedCheckpoint save_checkpoint(const SaveOptions& options, const ParamLayout& layout, const TensorReader& read,
                                const TrainerState& state);
// f for each of those reads, in their order.
void for_each_read(const ParamLayout& layout, const CheckpointFormat& format,
                   const std::function<void(Slot slot, Param p, int l)>& f);
// Bytes that a save will write. Its tokenizer counts as 128 bytes per token of the vocabulary (GPT-2's files take 72).
int64_t checkpoint_bytes(const ParamLayout& layout, const CheckpointFormat& format);

// To be called before a run that writes to OUTPUT (and by nobody else): removes what an interrupted save left behind.
// Returns a line to print for each, also for what cannot be removed, which stays.
std::vector<std::string> remove_leftovers(const std::string& output);

// Compares size and checksum of every file; names the first that is damaged or missing (EXIT_BAD_DATA), or says that
// the directory is no checkpoint (EXIT_NO_INPUT).
void verify_checkpoint(const std::string& dir);

struct DamagedCheckpoint {
    std::string dir, what;  // what: a sentence that names the file
};
struct FoundCheckpoint {
    std::string dir;                         // empty: there is none
    std::vector<DamagedCheckpoint> damaged;  // newer ones, newest first
};
// A run that goes on in OUTPUT may delete a checkpoint while it is read: then its next one is read, so many times.
constexpr int READ_ATTEMPTS = 20;
// The checkpoint of the highest step in OUTPUT that verifies.
FoundCheckpoint find_latest(const std::string& output);
// The same, but an OUTPUT whose checkpoints are all damaged is refused (EXIT_BAD_DATA): the error says what is wrong
// with each, and whether --init can still read its weights.
FoundCheckpoint find_resumable(const std::string& output);
// The newest directory in OUTPUT with the name of a checkpoint, damaged or not; empty: there is none.
std::string newest_directory(const std::string& output);

// Whether config.json and weights are in the directory itself: it is a Hugging Face directory or a checkpoint.
bool holds_model(const std::string& dir);
// The directory whose weights `path` means: itself if it is a Hugging Face directory (a checkpoint is one), or the
// newest checkpoint if it is a run's OUTPUT. Neither: EXIT_NO_INPUT. Both, so that nobody knows which weights are
// meant: EXIT_USAGE. Weights of a checkpoint that are not those that were saved: EXIT_BAD_DATA.
FoundCheckpoint find_model(const std::string& path);

// All of a (verified) checkpoint; state: the names of CheckpointFormat. The layout is that of
// read_hf_config(dir).model; another shape is refused.
TrainerState load_checkpoint(const std::string& dir, const ParamLayout& layout, const std::vector<std::string>& state,
                             const TensorWriter& write);
TrainerState read_trainer_state(const std::string& dir);
// For a validation that comes after the save: trainer.json is replaced whole, nothing else changes.
void set_val_loss(const std::string& dir, double val_loss);
