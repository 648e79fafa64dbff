// plan.cpp: the command `plan`: prints the batch, memory, time and disk space of a training run without starting it.
#include "train/plan.h"

#include <cmath>

#include "base/host.h"
#include "checkpoint/checkpoint.h"
#include "commands/commands.h"
#include "data/dataloader.h"
#include "model/mfu.h"
#include "train/algorithms.h"

// Adds the time of a step and of the run, or of the remaining steps of a resumed run, and what that costs. The run is
// --steps or the data, else ten billion tokens. It measures a step here, or else assumes ASSUMED_MFU. peak: FLOP/s of
// this device; 0: unknown.
static void add_time(std::vector<Row>& rows, Dtype dtype, const Options& o, const GPT2Config& config,
                     const BatchPlan& batch, double peak, int64_t steps_done) {
    load_kept_algorithms(o, single_rank_groups().world);
    const int ranks = batch.world_size * o.tensor_parallel;
    std::optional<MeasuredStep> measured;
    if (o.measure) measured = measure_step(dtype, config, batch.B, batch.T, memory_options_of(o, 1), peak);
    peak = std::max(peak, device_measure_peak(dtype));
    if (!measured && peak == 0) return rows.push_back({"time", "unknown: no step was measured, and no peak is known"});
    const double flops = flops_per_token(config, batch.T) * double(batch.tokens_per_step) / ranks;
    double seconds = flops / (ASSUMED_MFU * peak);
    if (measured) seconds = measured->micro_step * batch.grad_accum_steps * batch.B / measured->B + measured->update;

    const double steps =
        o.steps > 0 ? double(std::max<int64_t>(0, o.steps - steps_done)) : 1e10 / batch.tokens_per_step;
    std::string run = o.steps > 0 ? with_commas(o.steps) + " steps" : "10 billion tokens";
    if (o.steps > 0 && steps_done > 0) run = format("the remaining %s of ", with_commas(int64_t(steps)).c_str()) + run;
    std::string text = (seconds < 600.0 ? plain_number(seconds) + " s" : duration_text(seconds)) + " per step, " +
                       duration_text(steps * seconds) + " for " + run;
    if (measured) {
        text += format(": measured here with %d x %d tokens", measured->B, batch.T);
        if (measured->of_two_layers) text += " in models of 1 and 2 layers";
        text += format(", %s tokens/s", with_commas(int64_t(double(batch.tokens_per_step) / seconds)).c_str());
        if (peak > 0) text += format(", %.0f %% of the peak", 100.0 * flops / (seconds * peak));
        if (ranks > 1) text += ", on one rank alone, without the network";
    } else {
        text += format(", estimated at %.0f %% of the peak: ", 100.0 * ASSUMED_MFU);
        text += o.measure ? "a step is too large to be measured here" : "--measure is off";
    }
    rows.push_back({"time", text});
    if (o.dollars_per_hour == 0) return;
    const double dollars = steps * seconds / 3600 * ranks * o.dollars_per_hour;
    const std::string price = dollars < 100 ? format("%.2f", dollars) : with_commas(std::llround(dollars));
    rows.push_back({"cost", format("$%s for %s: %s at $%g an hour", price.c_str(), run.c_str(),
                                   counted(ranks, "rank").c_str(), o.dollars_per_hour)});
}

// The row `disk`.
static std::string describe_disk(const Options& o, const GPT2Config& config) {
    if (o.checkpoint_every == 0) return "no checkpoints";
    std::string text = format("at most %s per checkpoint, ",
                              human_bytes(checkpoint_bytes(ParamLayout(config), checkpoint_format(o))).c_str());
    if (o.keep == 0) return text + "all kept";
    text += format("%d kept", o.keep);
    if (keeps_best(o)) text += ", and the best";
    if (o.keep_every > 0) text += format(", and those of every %s steps", with_commas(o.keep_every).c_str());
    return text;
}

// The table of --fits: for each model the cheapest options that fit, and their tokens/s. If no model fits, a smaller
// one.
static std::vector<Row> fits_table(const Options& o, Dtype dtype, const GPT2Config& given, int world_size,
                                   const Room& room) {
    const int ranks = count_data_parallel(world_size, o.tensor_parallel, given.NH);
    std::vector<Row> rows = {{"memory", human_bytes(room.device) + (world_size > 1 ? " per rank" : "")}};
    const std::vector<std::string> names = {"d12", "d24", "d36", "d48"};
    bool one_fits = false;
    for (const std::string& name : o.default_model ? names : std::vector<std::string>{""}) {
        GPT2Config config = name.empty() ? given : config_by_name(name);
        config.V = given.V;
        const int T = o.seq_len ? o.seq_len : config.max_T;
        config.max_T = std::max(config.max_T, T);
        const SavingSet set = cheapest_savings(dtype, o, config, ranks, room);
        one_fits |= set.missing == 0;
        const int B = largest_micro_batch(dtype, config, T, o.global_batch, ranks, set.options, room.device);
        const int64_t bytes = device_bytes(training_memory(dtype, config, plan_batch(B, T, 0, ranks), set.options));
        const int64_t offloaded = offloaded_bytes(dtype, config, set.options, ranks);
        const std::string bus = offloaded ? format(" but for %.0f ms a step", 1e3 * bus_seconds(offloaded)) : "";
        rows.push_back({name.empty() ? "model" : name,
                        format("%s%s, %.0f %% of the fastest tokens/s%s: %s--micro-batch %d%s",
                               set.missing ? "does not fit; at least " : "", human_bytes(bytes).c_str(),
                               100.0 * relative_speed(config, T, set.options.recompute), bus.c_str(),
                               name.empty() ? "" : ("--model " + name + " ").c_str(), B, set.text.c_str())});
    }
    if (!one_fits) rows.push_back({"instead", advise_memory(dtype, o, given, {1, given.max_T, ranks, 1, 0}, room)});
    return rows;
}

int run_plan(const Options& options, Dtype dtype, const Launch& launch) {
    Options o = options;
    const RunStart source = find_training_start(o, Comm());
    const int world_size = o.ranks == -1 ? device_count() : o.ranks > 0 ? o.ranks : launch.world_size;
    // CPU ranks are planned as on machines of their own (docs/distributed.md).
    const int local_ranks = device_memory_is_host() ? 1 : std::min(world_size, device_count());
    if (o.fits)
        return print_stdout(table_text(fits_table(o, dtype, source.config, world_size, find_room(o, local_ranks)))), 0;
    const BatchPlan batch = resolve_batch(o, dtype, source.config, single_rank_groups(), world_size, local_ranks);
    std::optional<Corpus> corpus;
    if (!o.train_data.empty()) {
        corpus = open_corpus(o.train_data, "--train-data", batch.T);
        check_vocabulary(*corpus, "--train-data", source, o);
    }
    if (corpus || o.steps > 0) resolve_steps(o, corpus ? corpus->num_windows * batch.T / batch.tokens_per_step : 0);
    const Room room = find_room(o, local_ranks);
    const int64_t done = source.resume.empty() ? 0 : read_trainer_state(source.resume).step;
    std::vector<Row> time;  // measured first: a CPU's peak, of which it has more samples, is in the table
    add_time(time, dtype, o, source.config, batch, device_info().peak_flops(dtype), done);
    DeviceInfo device = device_info();
    if (!o.memory.empty()) device.memory_bytes = room.device;
    std::vector<Row> rows = plan_table(dtype, o, source, batch, device, room, corpus ? &*corpus : nullptr);
    if (device_memory_is_host()) rows.push_back({"threads", describe_threads()});
    const double flops = flops_per_token(source.config, batch.T);
    rows.push_back({"work", plain_number(flops / 1e9, 4) + " GFLOP per token, " +
                                plain_number(flops * double(batch.tokens_per_step) / 1e12, 4) + " TFLOP per step"});
    rows.insert(rows.end(), time.begin(), time.end());
    rows.push_back({"disk", describe_disk(o, source.config)});
    print_stdout(table_text(rows));
    for (const std::string& line : source.notes) print_stdout(message_text(line) + "\n");
    return 0;
}
