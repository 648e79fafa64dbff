// plan.cpp: the command `plan`: prints the batch, memory, time and disk space of a training run without starting it.
#include "train/plan.h"
#include "train/run.h"
#include "train/saver.h"
#include "train/trainer.h"

#include "checkpoint/checkpoint.h"
#include "commands/commands.h"
#include "model/mfu.h"

// Describes the time of a step and of the run, or of the remaining steps of a resumed run. It measures a step here, or
// else assumes ASSUMED_MFU. peak: FLOP/s of this device.
static std::string plan_time(Dtype dtype, const Options& o, const GPT2Config& config, const BatchPlan& batch,
                             double peak, int64_t steps_done) {
    if (o.autotune == "on") load_kept_algorithms();
    const int ranks = batch.world_size * o.tensor_parallel;
    const auto measured = measure_step(dtype, config, batch.B, batch.T, memory_options_of(o, 1), peak);
    const double flops = flops_per_token(config, batch.T) * double(batch.tokens_per_step) / ranks;
    double seconds = flops / (ASSUMED_MFU * peak);
    if (measured) seconds = measured->micro_step * batch.grad_accum_steps * batch.B / measured->B + measured->update;
    std::string text = (seconds < 600.0 ? plain_number(seconds) + " s" : duration_text(seconds)) + " per step";
    if (o.steps > 0) {
        const int64_t left = std::max<int64_t>(0, o.steps - steps_done);
        const std::string remaining = steps_done > 0 ? "the remaining " + with_commas(left) + " of " : "";
        text += format(", %s for %s%s steps", duration_text(double(left) * seconds).c_str(), remaining.c_str(),
                       with_commas(o.steps).c_str());
    }
    if (!measured)
        return text + format(", estimated at %.0f %% of the peak: a step is too large to be measured here",
                             100.0 * ASSUMED_MFU);
    return text + format(": measured here with %d x %d tokens, %s tokens/s, %.0f %% of the peak%s", measured->B,
                         batch.T, with_commas(int64_t(double(batch.tokens_per_step) / seconds)).c_str(),
                         100.0 * flops / (seconds * peak),
                         ranks == 1 ? "" : ", on one rank alone, without the network");
}

int run_plan(const Options& options, Dtype dtype, const Launch& launch) {
    Options o = options;
    const RunStart source = find_training_start(o, Comm());
    const int world_size = o.ranks == -1 ? device_count() : o.ranks > 0 ? o.ranks : launch.world_size;
    Comm single_rank;
    const BatchPlan batch = resolve_batch(o, dtype, source.config, make_groups(single_rank, 1), world_size, 1);
    const int T = batch.T;
    std::optional<Corpus> corpus;
    if (!o.train_data.empty()) {
        corpus = open_corpus(o.train_data, "--train-data", T);
        check_vocabulary(*corpus, "--train-data", source, o);
        resolve_steps(o, corpus->num_windows * T / batch.tokens_per_step);
    }
    const DeviceInfo device = device_info();
    std::vector<Row> rows =
        plan_table(dtype, o, source, batch, device, device_bytes_free(), corpus ? &*corpus : nullptr);
    const double flops = flops_per_token(source.config, T), peak = peak_flops(device, dtype);
    rows.push_back({"work", plain_number(flops / 1e9, 4) + " GFLOP per token, " +
                                plain_number(flops * double(batch.tokens_per_step) / 1e12, 4) + " TFLOP per step"});
    const int64_t done = source.resume.empty() ? 0 : read_trainer_state(source.resume).step;
    if (peak > 0) rows.push_back({"time", plan_time(dtype, o, source.config, batch, peak, done)});
    const int64_t checkpoint = checkpoint_bytes(ParamLayout(source.config), checkpoint_format(o));
    rows.push_back({"disk", describe_disk(o, checkpoint)});
    for (const std::string& line : table_lines(rows)) print_stdout(line + "\n");
    for (const std::string& line : source.notes) print_stdout(message_text(line) + "\n");
    return 0;
}
