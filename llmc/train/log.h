// log.h: the output of a run: lines on the terminal, and log.jsonl and run.json in the output directory.
//
// log.jsonl has one JSON object per line, flushed line by line. The field "kind" is one of:
//   run          first line of each start: the content of run.json
//   step         step, tokens, loss, grad_norm, lr, if the step did not change the weights `skipped` (why), then the
//   fields that depend on time: step_ms, tokens_per_s, mfu,
//                loader_wait_ms, and with several ranks comm_exposed_ms and comm_bytes, all of rank 0,
//                and on GPUs the fields of GpuSummary that are known (train/gpu_health.h)
//   val          step, val_loss                        sample      step, text
//   checkpoint   step, dir, then ms, stall_ms          warning     text
// Steps count from 0; val, sample and checkpoint at step s see the weights before step s, after s updates. The line of
// a checkpoint is written when it is complete, which may be some steps later. NaN and infinity, which JSON lacks,
// become null, and "non_finite" names the field. Of two runs that computed the same, the lines of kind step, val and
// sample are equal byte for byte once everything from ,"step_ms" on is cut.
//
// A write error of the log does not stop the run: one warning goes to stderr. The lines are kept, up to MAX_UNWRITTEN
// bytes, and written as soon as that is possible again. finish() says how many are missing at the end. A log that was
// removed or renamed during the run is created again, with a warning, without the lines before.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/terminal.h"
#include "train/gpu_health.h"

struct LogOptions {
    std::string output;              // existing directory; empty: no files
    std::string progress = "plain";  // auto, tty, plain
    bool quiet = false;              // only warnings on the terminal
    bool silent = false;             // no warnings either: for ranks other than rank 0
    int64_t log_every = 1;           // steps per plain line
    int64_t total_steps = 0;
    int64_t resume_step = -1;                        // >= 0: continue log.jsonl from this step
    double flops_per_token = 0.0, peak_flops = 0.0;  // for MFU; 0: left out
};

struct StepRecord {
    int64_t step = 0;
    int64_t tokens = 0;       // tokens of the run up to and including this step
    int64_t step_tokens = 0;  // tokens of this step
    float loss = 0.0f, grad_norm = 0.0f, lr = 0.0f;
    double step_ms = 0.0;
    double loader_wait_ms = 0.0, comm_exposed_ms = 0.0;  // the parts of step_ms in which this rank waited
    int64_t comm_bytes = -1;                             // bytes sent by this rank; -1: single rank
    GpuSummary gpu = {};
    std::string skipped = {};  // why the step did not change the weights; empty: it did
};

// Content of run.json. Strings are plain text, except that options is JSON.
struct RunInfo {
    std::string options;                  // options_json
    std::string command_line, directory;  // directory: working directory at the start
    std::string version, device, driver, precision, libraries, data, data_fingerprint;
    int layers = 0, heads = 0, channels = 0, vocab_size = 0, positions = 0;
    int64_t parameters = 0, tokens_per_step = 0, steps = 0, train_tokens = 0;
    int world_size = 1;
    int threads = 0;      // OpenMP threads of rank 0
    std::string cpu_isa;  // value of CPU_ISA that the operations use; empty, and left out of run.json, on a GPU
    uint64_t seed = 0;
    double flops_per_token = 0.0;
    double peak_flops = 0.0;  // of one rank's device in `precision`; 0: unknown
    std::string peak_source;
};

// A part of the live line, "lr 5.93e-04". If the parts do not fit into the terminal, those of lowest priority are left
// out first.
struct LinePart {
    std::string text;
    int priority;
};

struct Log {
    LogOptions options;
    bool live = false;  // the last line on stderr is rewritten in place
    bool stdout_broken = false;
    bool above_peak = false;  // the warning that MFU exceeds 100 % was printed
    int fd = -1;              // log.jsonl
    int64_t written = 0;      // bytes of log.jsonl that were written without an error
    // Lines that could not be written yet, their number, and the number of lines that did not fit into `unwritten`.
    std::string unwritten;
    int64_t unwritten_lines = 0, lost_lines = 0;
    double smoothed_ms = 0.0, smoothed_tokens = 0.0, weight = 0.0;  // exponential means over about 20 steps
    double last_drawn = 0.0;                                        // seconds_now()
    double last_step = 0.0;                                         // seconds_now() of the last step or working line
    std::vector<LinePart> live_line, last_step_line;                // the line as drawn; the line of the last step
    std::string short_line;                                         // drawn where live_line has no room for the loss
    std::vector<std::string> of_resume_step;                        // lines of resume_step that log.jsonl already has

    // Opens log.jsonl. A new run moves an older log.jsonl aside, to log.1.jsonl and so on; a resumed run removes
    // the lines that it will write again (steps from resume_step on; validation, samples and checkpoints after
    // resume_step) and an incomplete last line. Validation and sample of resume_step may run again: a line that
    // log.jsonl already has is not written twice.
    explicit Log(const LogOptions& options);
    ~Log();
    Log(const Log&) = delete;

    void begin_run(const RunInfo& info);  // run.json and the first line
    void table(const std::vector<Row>& rows);
    void note(const std::string& text);  // an informational line
    void warn(const std::string& text);  // on stderr, also when quiet, and in log.jsonl

    void step(const StepRecord& record);
    // Shows progress within a step that takes long: "micro-step 37/512" behind the live line after a second, or a plain
    // line each minute.
    void working(int64_t step, const char* what, int64_t done, int64_t of);
    void val(int64_t step, double val_loss);
    void sample(int64_t step, const std::string& text);
    void checkpoint(int64_t step, const std::string& dir, double ms, double stall_ms);
    // Leaves the last live line on the terminal, and warns of lines that log.jsonl lacks. Returns the number of
    // these lines.
    int64_t finish();
};

// "step  1200/19560 | loss  3.8121 | norm  0.41 | lr 5.93e-04 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 43m"
std::string step_line(const LogOptions& options, const StepRecord& record, double tokens_per_s, double eta_seconds);
