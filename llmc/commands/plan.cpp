// plan.cpp: the command `plan`: prints the batch, memory, time and disk space of a training run without starting it.
#include <algorithm>

#include "base/common.h"
#include "base/terminal.h"
#include "checkpoint/checkpoint.h"
#include "commands/commands.h"
#include "model/mfu.h"
#include "train/algorithms.h"
#include "train/measure.h"
#include "train/plan.h"
#include "train/report.h"
#include "train/run_checks.h"
#include "train/save.h"
#include "train/update_rule.h"

// The time of a run, or of the remaining steps of a resumed run.
static std::string describe_steps(int64_t steps, int64_t steps_done, double step_seconds) {
    const int64_t left = std::max<int64_t>(0, steps - steps_done);
    std::string text = duration_text(double(left) * step_seconds) + " for ";
    if (steps_done > 0) text += format("the remaining %s of ", with_commas(left).c_str());
    return text + with_commas(steps) + " steps";
}

// Describes the time of a step and of the run. It measures a step here, or else assumes 30 % of the peak. `peak` is the
// peak FLOP/s of one rank.
static std::string plan_time(Dtype dtype, const Options& o, const GPT2Config& config, const BatchPlan& batch,
                             double peak, int64_t steps_done) {
    if (o.autotune == "on") recall_algorithms();
    const auto measured = measure_step(dtype, config, batch.B, batch.T, memory_options_of(o, 1), peak, o.optimizer);
    const double flops = flops_per_token(config, batch.T) * double(batch.tokens_per_step) / batch.world_size;
    double seconds = flops / (0.3 * peak);
    if (measured) seconds = measured->micro_step * batch.grad_accum_steps * batch.B / measured->B + measured->update;
    std::string text = (seconds < 600.0 ? format("%.3g s", seconds) : duration_text(seconds)) + " per step";
    if (o.steps > 0) text += ", " + describe_steps(o.steps, steps_done, seconds);
    if (!measured) return text + ", estimated at 30 % of the peak: a step is too large to be measured here";
    text +=
        format(": measured here with %d x %d tokens, %s tokens/s, %.0f %% of the peak", measured->B, batch.T,
               with_commas(int64_t(double(batch.tokens_per_step) / seconds)).c_str(), 100.0 * flops / (seconds * peak));
    return batch.world_size == 1 ? text : text + ", on one rank alone, without the network";
}

// Says which hardware a rank is assumed to have. local_ranks: the number of ranks that share this machine; 0: unknown.
static std::string describe_places(int world_size, int local_ranks) {
    if (!device_memory_is_host()) return format("%d, each with a GPU like this one", world_size);
    if (local_ranks == world_size) return format("%d, which share this machine", world_size);
    if (local_ranks > 0) return format("%d, of which %d share this machine", world_size, local_ranks);
    return format("%d, each with a machine like this one to itself; mpirun -np %d plans for ranks that share one",
                  world_size, world_size);
}

int run_plan(const Options& options, Dtype dtype, const Launch& launch) {
    Options o = options;
    const RunSource source = find_training_start(o);
    const int T = o.seq_len ? o.seq_len : source.config.max_T;
    const int world_size = o.world_size > 0 ? o.world_size : launch.world_size;
    const int local_ranks = world_size == launch.world_size ? launch.local_world_size : 0;
    Comm single_rank;
    resolve_micro_batch(dtype, o, source, T, single_rank, world_size, local_ranks);
    check_tokens_at_once(o.micro_batch, T);
    const BatchPlan batch = plan_batch(o.micro_batch, T, o.global_batch_tokens, world_size);
    check_virtual_ranks(o, batch);
    const DeviceInfo device = device_info();
    std::vector<Row> rows = plan_table(dtype, o, source, batch, device, device_bytes_free(std::max(1, local_ranks)));
    if (world_size > 1) rows.push_back({"ranks", describe_places(world_size, local_ranks)});
    if (!o.train_data.empty()) {
        const Corpus corpus = open_corpus(o.train_data, "--train-data", T);
        rows.push_back({"data", describe_data(corpus, batch.tokens_per_step / T)});
        resolve_steps(o, corpus.num_windows * T / batch.tokens_per_step);
    }
    const double flops = flops_per_token(source.config, T), per_step = flops * double(batch.tokens_per_step);
    const double peak = world_size * (dtype == Dtype::fp32 ? device.peak_flops_fp32 : device.peak_flops_bf16);
    rows.push_back({"work", format("%.4g GFLOP per token, %.4g TFLOP per step", flops / 1e9, per_step / 1e12)});
    const int64_t done = source.resume.empty() ? 0 : read_trainer_state(source.resume).step;
    if (peak > 0) rows.push_back({"time", plan_time(dtype, o, source.config, batch, peak / world_size, done)});
    if (world_size > 1) rows.push_back({"network", describe_traffic(dtype, source.config, o, batch)});
    const CheckpointFormat saved = checkpoint_format(o, find_update_rule<float>(o.optimizer).state);
    const int64_t checkpoint = checkpoint_bytes(ParamLayout(source.config), saved);
    rows.push_back({"disk", format("at most %s per checkpoint, %s", human_bytes(checkpoint).c_str(),
                                   o.keep ? format("%d kept", o.keep).c_str() : "all kept")});
    for (const std::string& line : table_lines(rows)) print_stdout(line + "\n");
    for (const std::string& line : source.notes) print_stdout(line + "\n");
    return 0;
}
