// checkpoint.h: saves, verifies, finds and loads checkpoints, the state of a run in directories that survive a crash.
//
//   OUTPUT/step_005000/  config.json  generation_config.json  model.safetensors  tokenizer files
//                        optimizer.safetensors  m.*, v.* in F32, BF16 or U8 (hf.h); the fp32 master.*, where the
//                                               weights in model.safetensors are bf16
//                        README.md              the model card, for people to edit, so without a checksum
//                        trainer.json           TrainerState, size and checksum of every other file; written last
//   OUTPUT/latest        the name of the newest directory, for people, scripts and load_tokenizer()
//   OUTPUT/best          with KeepRules::best: the name of the directory with the lowest validation loss
//
// transformers loads the directory unchanged. Tensors are whole and have Hugging Face's names and layout (Conv1D
// matrices transposed, wte without its padded rows), whatever the ranks, the precision and the padding. The weights are
// the fp32 masters, or bf16 weights without masters, widened to fp32. A resumed run continues with the same bits.
//
// A save writes step_N.tmp, syncs it to disk and renames it. Then it updates `latest`, and last it deletes older
// directories. A crash at any instruction therefore leaves the newest complete checkpoint loadable.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/json.h"
#include "checkpoint/hf.h"

// The state of a run other than its tensors.
struct TrainerState {
    int64_t step = 0;      // optimizer steps taken
    int64_t position = 0;  // training windows taken: the position of the next window in the data order
    int64_t tokens = 0;    // tokens trained on
    uint64_t seed = 0;
    double val_loss = -1;    // the last validation loss; -1: not measured yet
    int64_t val_step = -1;   // the step of that validation; -1: unknown
    double val_bytes = 0;    // mean bytes of a token that is validated, for the model card; 0: unknown; not saved
    double best_loss = 0;    // the lowest validation loss since --patience was given; infinity: it was NaN
    int64_t best_step = -1;  // the step of that validation; -1: there is none
    Json options;            // object: the options of the run
    Json data;               // object: what identifies the training data
    Json health;             // object: Outliers::json (train/monitor.h); null: nothing is known
    MomentDtype moments = MomentDtype::fp32;  // load_checkpoint sets it to that of the checkpoint
    bool by_muon = false;                     // that checkpoint has no second moments of the layers' matrices
};

// Contents of the tensor files of a checkpoint.
struct CheckpointFormat {
    bool bf16_weights = false;  // model.safetensors in BF16, fp32 masters in optimizer.safetensors
    MomentDtype moments = MomentDtype::fp32;
    bool muon = false;  // second moments without the layers' matrices
};

// Retention policy. After a save, checkpoints that no rule keeps are deleted.
struct KeepRules {
    int newest = 0;     // the newest ones, as many as this; 0: all checkpoints are kept
    int64_t every = 0;  // interval of steps whose checkpoints are kept, too; 0: none
    bool best = false;  // true: best_checkpoint(OUTPUT) is kept, too, and named in OUTPUT/best
};

struct SaveOptions {
    std::string output;  // the OUTPUT directory, created if missing
    KeepRules keep;
    CheckpointFormat format;
    HFConfig config;  // configuration of the weights that the run started from
    std::function<void(const std::string& dir)> write_tokenizer;  // writes the tokenizer's files into dir; may be empty
    std::string model_card;                                       // README.md; empty: there is none
    // Prints what could not be done after the checkpoint was saved, and which directories were renamed; may be empty.
    std::function<void(const std::string& line)> warn;
};

// OUTPUT/step_N.
std::string checkpoint_directory(const std::string& output, int64_t step);

// Writes OUTPUT/step_N for state.step, and replaces an existing one; returns its name. Fails with EXIT_IO or
// EXIT_CANNOT_CREATE, the path and the system's reason, and if the disk has less space than checkpoint_bytes. After a
// failure every earlier checkpoint is still there, so training may continue and try again later. If `latest` cannot be
// replaced, the save still succeeds with a warning, because checkpoints are found by their directories' names.
// Checkpoints of later steps (of a run that was continued from an older one) are renamed to step_N.stale.
//
// `view` is called for every weight tensor (twice with bf16_weights), then for each slot of the optimizer.
std::string save_checkpoint(const SaveOptions& options, const ParamLayout& layout, const TensorView& view,
                            const TrainerState& state);
// Calls f for each of the views of save_checkpoint, in the same order.
void for_each_read(const ParamLayout& layout, const CheckpointFormat& format,
                   const std::function<void(Slot slot, Param p, int l)>& f);
// Bytes that a save will write. The tokenizer counts as 128 bytes per token of the vocabulary (GPT-2's files take 72).
int64_t checkpoint_bytes(const ParamLayout& layout, const CheckpointFormat& format);

// Removes what an interrupted save left. Call it only in a run that writes to OUTPUT. Returns a line for each leftover.
std::vector<std::string> remove_leftovers(const std::string& output);

// Called for each part of a file that was read.
using VerifyProgress = std::function<void()>;
// Compares the size and checksum of every file. The error names the first file that is damaged or missing
// (EXIT_BAD_DATA), or says that the directory is not a checkpoint (EXIT_NO_INPUT).
void verify_checkpoint(const std::string& dir, const VerifyProgress& progress = {});

struct FoundCheckpoint {
    std::string dir;                   // empty: no checkpoint was found
    std::vector<std::string> damaged;  // sentences on damaged checkpoints newer than dir, newest first
    bool replaced = false;  // transformers has saved a model over dir, which is a Hugging Face directory only
};
// The newest checkpoint in OUTPUT that verifies. Refuses (EXIT_BAD_DATA) an OUTPUT whose checkpoints are all damaged,
// and (EXIT_USAGE) one over which transformers has saved a model.
FoundCheckpoint find_latest(const std::string& output, const VerifyProgress& progress = {});
// Returns the directories in OUTPUT that are named like checkpoints, damaged or not, by their steps, newest first.
std::map<int64_t, std::string, std::greater<>> list_checkpoints(const std::string& output);

// Whether the directory itself contains config.json and weights: a Hugging Face directory or a checkpoint.
bool holds_model(const std::string& dir);
// The directory whose weights `path` denotes: `path` itself if it is a Hugging Face directory (a checkpoint is one), or
// the newest checkpoint if `path` is a run's OUTPUT or that of transformers' Trainer, or the snapshot if it is a folder
// models--* of the Hub's cache. Fails with EXIT_NO_INPUT if `path` is neither, with EXIT_USAGE if
// it is both (the choice would be ambiguous), and with EXIT_BAD_DATA if a checkpoint's weights are not the saved ones,
// unless transformers has saved others over it.
FoundCheckpoint find_model(const std::string& path, const VerifyProgress& progress = {});

// Loads all of a (verified) checkpoint. The layout must be that of read_hf_config(dir). Second moments that it lacks
// are estimated from the first ones.
TrainerState load_checkpoint(const std::string& dir, const ParamLayout& layout, const TensorWriter& write);
TrainerState read_trainer_state(const std::string& dir);
// Returns whether both states have losses of the same validation tokens, so that they can be compared.
bool same_validation(const TrainerState& a, const TrainerState& b);
// The checkpoint in OUTPUT with the lowest validation loss of its weights, the older one of two equal ones, or "".
// Those with another validation than the newest are left out.
std::string best_checkpoint(const std::string& output);
