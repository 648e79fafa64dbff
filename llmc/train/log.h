// log.h: the output of a run: lines on the terminal, and log.jsonl in the output directory.
//
// log.jsonl has one JSON object per line, flushed line by line. The field "kind" is one of:
//   run          first line of each start: version, command line, device, libraries, model, data, options
//   step         step, tokens, loss, grad_norm, lr, if the step did not change the weights `skipped` (why), then the
//                fields that depend on time: step_ms, tokens_per_s, mfu, peak_flops if it is no longer that of the
//                line `run`, loader_wait_ms, and with several ranks comm_exposed_ms and comm_bytes, all of rank 0
//   val          step, val_loss, with a tokenizer bits_per_byte, and with a reference its loss at this step,
//                reference_loss                                    sample      step, text
//   eval         step, task, rows, acc, acc_stderr, with choices acc_mean and acc_norm, else perplexity
//   checkpoint   step, dir, then ms, stall_ms          warning     text
// Steps count from 0; val, eval, sample and checkpoint at step s see the weights before step s, after s updates. The
// line of a checkpoint is written when it is complete, which may be some steps later. NaN and infinity, which JSON
// lacks, become null, and "non_finite" names the field. Of two runs that computed the same, the lines of kind step,
// val, eval and sample are equal byte for byte once everything from ,"step_ms" on is cut.
//
// With --tensorboard the numbers of the kinds step, val and eval also go to an event file per start (tensorboard.h).
//
// A write error does not stop the run: one warning goes to stderr, and the lines are written with a later one.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/print.h"

struct TaskResult;  // infer/tasks.h

// The curve of another run, with which a run compares its validation losses, in the form of log.jsonl. Its lines of
// kind val count. Its first line has name, source, and match: the fields that the first line of a run's log must have,
// too. The files of data/curves are part of the program.
struct Reference {
    std::string name, source;          // no name: there is no curve
    std::map<int64_t, double> losses;  // step, validation loss

    // The loss of the curve at this step, between two points linear in the logarithm of the step. There is none after
    // the last point, nor between step 0 and the first point above it.
    std::optional<double> loss_at(int64_t step) const;
};

// Returns the curve of --reference: the curve of a log.jsonl or of a run's output directory, none for "none", or for
// "" the curve of data/curves that matches `run`, the first line of a log. Refuses one without losses (EXIT_BAD_DATA).
Reference find_reference(const std::string& option, const std::string& run);

struct LogOptions {
    std::string output;     // existing directory; empty: no files
    bool quiet = false;     // the terminal gets only warnings
    bool silent = false;    // the terminal gets nothing: set on ranks other than rank 0
    int64_t log_every = 1;  // steps per plain line
    int64_t total_steps = 0;
    int64_t resume_step = -1;  // 0 or more: continue log.jsonl from this step
    bool tensorboard = false;
    Reference reference = {};                        // validations are compared with it
    double flops_per_token = 0.0, peak_flops = 0.0;  // factors of MFU; peak_flops 0: it is left out
};

// Kinds of work between two steps. Each is done every N steps, and after the last step.
enum class Pause { validation, tasks, sample, save };
struct PauseTime {
    int64_t every = 0;     // N
    double seconds = 0.0;  // sum of all so far
    int count = 0;
};
using PauseTimes = std::array<PauseTime, 4>;

// Returns the seconds that a run still needs after `step`, with the pauses to come: without them a run that validates
// often said 10 s and took 24.5. A kind of pause that has not occurred yet takes no time.
double seconds_left(int64_t total_steps, int64_t step, double step_seconds, const PauseTimes& pauses);

struct StepRecord {
    int64_t step = 0;
    int64_t tokens = 0;       // tokens of the run up to and including this step
    int64_t step_tokens = 0;  // tokens of this step
    float loss = 0.0f, grad_norm = 0.0f, lr = 0.0f;
    double step_ms = 0.0;
    double loader_wait_ms = 0.0, comm_exposed_ms = 0.0;  // parts of step_ms in which this rank waited
    int64_t comm_bytes = -1;                             // bytes sent by this rank; -1: single rank
    std::string skipped = {};                            // why the step did not change the weights; empty: it did
};

// A file that grows. Bytes that could not be written are kept, and written before later ones.
struct GrowingFile {
    std::string path;
    int fd = -1;
    std::string unwritten = {};

    // Returns whether all bytes are written.
    bool append(const std::string& bytes);
};

struct Log {
    LogOptions options;
    PauseTimes pauses = {};  // times so far, for the ETA

    // Changes no file. If the start fails, for example for lack of memory, the log of the earlier run stays whole.
    explicit Log(const LogOptions& options);
    ~Log();
    Log(const Log&) = delete;

    // Opens log.jsonl, and writes the lines that came before. A new run renames an older log.jsonl to log.1.jsonl and
    // so on. A resumed run removes the lines that it writes again (from resume_step on), those of later checkpoints,
    // and an incomplete last line.
    void open();
    void begin_run(const std::string& info);  // the first line; info: a JSON object
    // A peak (FLOP/s, of all ranks) that is higher than the one so far counts from now on. A CPU that is busy when it
    // is measured seems slow: MFU then read 84 % for 51 %.
    void raise_peak(double flops) { options.peak_flops = std::max(options.peak_flops, flops); }
    void table(const std::vector<Row>& rows);
    void note(const std::string& text) { print_line(message_text(text)); }  // an informational line
    void warn(const std::string& text);  // a line on stderr, also when quiet, and in log.jsonl

    void step(const StepRecord& record);
    void val(int64_t step, double val_loss, double bytes_per_token = 0.0);  // 0: unknown
    void eval(int64_t step, const TaskResult& result);
    void sample(int64_t step, const std::string& text);
    void checkpoint(int64_t step, const std::string& dir, double ms, double stall_ms);
    // Leaves the last live line on the terminal, and warns if log.jsonl lacks lines. Returns whether it has all.
    bool finish();

  private:
    void open_lines();
    void open_events();
    void print_line(const std::string& text);
    void append(GrowingFile& file, const std::string& bytes);
    void append(const std::string& object);
    void draw();
    void clear();

    double first_peak;   // FLOP/s, of the line `run`
    bool live;           // stderr is a terminal, and its last line shows the last step
    std::string line;    // the live line
    double drawn = 0.0;  // seconds_now() when it was drawn
    bool stdout_broken = false, opened = false;
    std::vector<std::string> early;           // objects before open()
    GrowingFile lines, events;                // log.jsonl, and with --tensorboard an event file
    int64_t steps = 0;                        // steps of this start
    double mean_ms = 0.0, mean_tokens = 0.0;  // exponential means over about 20 steps
};

// Measures a pause until the end of a scope.
struct PauseTimer {
    Log& log;
    Pause kind;
    int64_t every;
    double begin = seconds_now();

    ~PauseTimer() {
        PauseTime& sum = log.pauses[size_t(kind)];
        sum = {every, sum.seconds + seconds_now() - begin, sum.count + 1};
    }
};

// "step  1200/19560 | loss  3.8121 | norm  0.41 | lr 5.93e-04 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 43m",
// without some of its columns if it would be wider than `width`.
std::string step_line(const LogOptions& options, const StepRecord& record, double tokens_per_s, double eta_seconds,
                      size_t width = 1000);
