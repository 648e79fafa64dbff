// plan.cpp: the command `plan`: prints the batch, memory, time and disk space of a training run without starting it.
#include <omp.h>
#include <unistd.h>

#include <algorithm>

#include "base/common.h"
#include "base/terminal.h"
#include "base/threads.h"
#include "checkpoint/checkpoint.h"
#include "commands/commands.h"
#include "model/mfu.h"
#include "train/algorithms.h"
#include "train/fit.h"
#include "train/keep.h"
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

// The part of this process's FLOP/s that a rank has when `sharing` ranks run on this machine.
static double share_of_cores(int sharing, const Launch& launch) {
    if (!device_memory_is_host()) return 1.0;
    const bool bound = launch.local_world_size > 1 && omp_get_num_procs() < int(sysconf(_SC_NPROCESSORS_ONLN));
    return bound ? 1.0 : std::min(1.0, double(omp_get_num_procs()) / (double(openmp_threads()) * sharing));
}

// Describes the time of a step and of the run. It measures a step here, or else assumes ASSUMED_MFU. `peak` is the
// peak FLOP/s of this process, of which a rank has `share`.
static std::string plan_time(Dtype dtype, const Options& o, const GPT2Config& config, const BatchPlan& batch,
                             double peak, double share, int64_t steps_done) {
    if (o.autotune == "on") recall_algorithms();
    const auto measured = measure_step(dtype, config, batch.B, batch.T, memory_options_of(o, 1), peak, o.optimizer);
    const double flops =
        flops_per_token(config, batch.T) * double(batch.tokens_per_step) / (batch.world_size * o.tensor_parallel);
    double seconds = flops / (ASSUMED_MFU * peak);
    if (measured) seconds = measured->micro_step * batch.grad_accum_steps * batch.B / measured->B + measured->update;
    seconds /= share;
    std::string text = (seconds < 600.0 ? plain_number(seconds) + " s" : duration_text(seconds)) + " per step";
    if (o.steps > 0) text += ", " + describe_steps(o.steps, steps_done, seconds);
    if (!measured)
        return text + format(", estimated at %.0f %% of the peak: a step is too large to be measured here",
                             100.0 * ASSUMED_MFU);
    text += format(": measured here with %d x %d tokens, %s tokens/s, %.0f %% of the peak", measured->B, batch.T,
                   with_commas(int64_t(double(batch.tokens_per_step) / seconds)).c_str(),
                   100.0 * flops / (seconds * share * peak));
    if (batch.world_size * o.tensor_parallel == 1) return text;
    return text + (share < 1.0 ? ", on one rank alone with all cores, which the ranks share, without the network"
                               : ", on one rank alone, without the network");
}

// Places the ranks on machines. CPU ranks that were not launched, but are only asked for by --world-size, have a
// machine each.
static RankPlaces places_of(const Options& o, int world_size, const Launch& launch) {
    return rank_places_of(o, world_size, world_size == launch.world_size ? launch.local_world_size : 0);
}

// Says which hardware a rank is assumed to have, and how much memory, unless that is "".
static std::string describe_places(const RankPlaces& places, const std::string& memory = "") {
    const int world_size = places.world_size, together = world_size / places.hosts;
    const std::string each = memory.empty() ? "" : ", each with " + memory;
    if (!device_memory_is_host())
        return format("%d, each with a GPU like this one", world_size) +
               (places.hosts == 1 ? "" : format(", on %d machines", places.hosts));
    if (places.hosts == 1) return format("%d, which share this machine", world_size) + each;
    if (together > 1) return format("%d, of which %d share a machine like this one", world_size, together) + each;
    return format("%d, each with a machine like this one to itself%s; --ranks %d plans for ranks that share this one",
                  world_size, memory.empty() ? "" : (" and " + memory).c_str(), world_size);
}

// ---- plan --fit

// Memory of a GPU that CUDA, NCCL and the other libraries take.
constexpr int64_t LIBRARY_BYTES = int64_t(1) << 30;
// Bytes per second that a rank sends: over the NVLink of an A100 or H100, half of what the data sheets name for both
// directions; over a network card of 400 Gbit/s; between CPU ranks that share a machine; over a network of 10 Gbit/s.
constexpr double NVLINK = 300e9, NETWORK = 50e9, SHARED_MEMORY = 5e9, ETHERNET = 1.25e9;

static int fit_world_size(const Options& o, int launched) {
    if (o.gpus.empty()) return o.world_size > 0 ? o.world_size : launched;
    ENSURE(!device_memory_is_host(), "--gpus is for train_gpt2cu; this is the program for the CPU: give --world-size");
    const bool number = o.gpus.size() <= 5 && o.gpus.find_first_not_of("0123456789") == std::string::npos;
    ENSURE(number && std::stoi(o.gpus) > 0, "--fit plans for a number of GPUs, as in --gpus 8; --gpus is %s",
           shell_word(o.gpus).c_str());
    return std::stoi(o.gpus) * o.nnodes;
}

static FitDevices fit_devices(Dtype dtype, const Options& o, const RankPlaces& places, const Launch& launch) {
    const DeviceInfo device = device_info();
    const double known = dtype == Dtype::fp32 ? device.peak_flops_fp32 : device.peak_flops_bf16;
    const GpuPeak h100 = gpu_peak("H100");  // the order of the layouts hardly depends on the peak
    double peak = known > 0.0 ? known : 1e12 * (dtype == Dtype::fp32 ? h100.tf32 : h100.bf16);
    const int64_t asked = int64_t(o.gpu_memory * double(int64_t(1) << 30)) - LIBRARY_BYTES;
    ENSURE(o.gpu_memory == 0.0 || asked > 0, "--gpu-memory %g: more than 1 GiB is needed, which libraries take",
           o.gpu_memory);
    const int sharing = places.world_size / places.hosts;
    peak *= share_of_cores(sharing, launch);  // the peak was measured with the threads of this process
    return {places, o.gpu_memory > 0.0 ? asked : device_bytes_free(sharing), peak,
            device_memory_is_host() ? SHARED_MEMORY : NVLINK, device_memory_is_host() ? ETHERNET : NETWORK};
}

constexpr size_t MOST_LAYOUTS = 12;  // in the table

static bool is_one_of(const std::string& name, const std::vector<const char*>& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

// The command that starts training with this layout on these machines, below a line that explains its words in
// capitals.
static std::string fit_command(const Options& o, const Layout& layout, const RankPlaces& places) {
    const bool gpus = !device_memory_is_host();
    const int world_size = places.world_size, hosts = places.hosts, together = world_size / hosts;
    std::string text = gpus ? "./train_gpt2cu" : "./train_gpt2";
    if (hosts > 1 && gpus)
        text = "on each machine, with its number from 0 as N, and a port of the first as HOST:PORT:\n" + text;
    if (hosts > 1 && !gpus)
        text = format(
            "HOSTS is a file with the names of the %d machines:\n"
            "mpirun -np %d --hostfile HOSTS --map-by ppr:%d:node --bind-to none %s",
            hosts, world_size, together, text.c_str());
    for (const Setting& setting : settings(o)) {
        const std::string& name = setting.name;
        const bool of_layout = is_one_of(name, {std::begin(LAYOUT_OPTIONS), std::end(LAYOUT_OPTIONS)});
        const bool of_ranks = is_one_of(name, {"gpus", "ranks", "nnodes", "world-size"});
        if (of_layout || of_ranks || is_one_of(name, {"fit", "gpu-memory"})) continue;
        text += format(" --%s", name.c_str());
        text += format("=%s", message_text(shell_word(setting.value)).c_str());
    }
    if (gpus && world_size > 1) text += format(" --gpus %d", together);
    if (gpus && hosts > 1) text += format(" --nnodes %d --node-rank N --rendezvous HOST:PORT", hosts);
    if (!gpus && hosts == 1 && world_size > 1) text += format(" --ranks %d", world_size);
    return text + " " + layout_options(layout);
}

static std::string describe_fit(const FitDevices& devices) {
    const RankPlaces& places = devices.places;
    const std::string memory = human_bytes(devices.memory) + " for the run";
    if (device_memory_is_host() && places.world_size > 1) return describe_places(places, memory);
    const std::string on = places.hosts == 1 ? "" : format(" on %d machines", places.hosts);
    return format("%d%s, each with %s", places.world_size, on.c_str(), memory.c_str());
}

static int run_fit(Dtype dtype, const Options& o, const RunSource& source, int T, const FitDevices& devices) {
    const std::vector<Layout> layouts = fitting_layouts(dtype, o, source.config, T, devices);
    if (layouts.empty()) {
        const Layout least = smallest_layout(dtype, o, source.config, T, devices);
        std::string given;
        for (const char* name : LAYOUT_OPTIONS)
            if (is_given(o, name)) given += format("%s--%s", given.empty() ? ", or leave out " : " and ", name);
        fail(EXIT_USAGE, "nothing fits into %s per rank: the least, %s, needs %s; try %s or a smaller model%s",
             human_bytes(devices.memory).c_str(), layout_options(least).c_str(), human_bytes(least.bytes).c_str(),
             device_memory_is_host() ? "more machines (--world-size)" : "more ranks", given.c_str());
    }
    const int hosts = devices.places.hosts;
    std::vector<Row> rows = {
        {"model", describe_model(source.config)},
        {"ranks", describe_fit(devices)},
        {"time",
         format("computed, not measured: %.0f %% of %s TFLOP/s, and then the bytes sent at %s GB/s",
                100.0 * ASSUMED_MFU, plain_number(1e-12 * devices.peak_flops, 4).c_str(),
                plain_number(1e-9 * devices.bandwidth).c_str()) +
             (hosts == 1 ? ""
                         : format(", to other machines at %s GB/s", plain_number(1e-9 * devices.network).c_str()))}};
    for (const std::string& line : table_lines(rows)) print_stdout(line + "\n");
    print_stdout(
        "\ntensor-parallel  sequence-parallel  zero  recompute  micro-batch  micro-steps      memory        sent  "
        "seconds per step     tokens/s\n");
    const size_t shown = std::min(layouts.size(), MOST_LAYOUTS);
    for (size_t i = 0; i < shown; i++) {
        const Layout& l = layouts[i];
        print_stdout(format("%15d  %17s  %4d  %-9s  %11d  %11d  %10s  %10s  %16s  %11s\n", l.tensor_parallel,
                            l.sequence_parallel ? "yes" : "no", l.zero, l.recompute.c_str(), l.batch.B,
                            l.batch.grad_accum_steps, human_bytes(l.bytes).c_str(), human_bytes(l.sent.total()).c_str(),
                            plain_number(l.seconds).c_str(), with_commas(int64_t(l.tokens_per_second())).c_str()));
    }
    if (layouts.size() > shown) print_stdout(format("%zu slower layouts fit, too\n", layouts.size() - shown));
    print_stdout(format("\n%s\n", fit_command(o, layouts[0], devices.places).c_str()));
    return 0;
}

int run_plan(const Options& options, Dtype dtype, const Launch& launch) {
    Options o = options;
    const RunSource source = find_training_start(o);
    const int T = o.seq_len ? o.seq_len : source.config.max_T;
    if (o.fit) {
        const int world_size = fit_world_size(o, launch.world_size);
        if (o.tensor_parallel > 1) check_tensor_parallel(o, source.config, T, world_size);
        const RankPlaces places = places_of(o, world_size, launch);
        return run_fit(dtype, o, source, T, fit_devices(dtype, o, places, launch));
    }
    const int world_size = o.world_size > 0 ? o.world_size : launch.world_size;
    const int data_parallel = count_data_parallel(world_size, o.tensor_parallel, source.config.NH);
    check_tensor_parallel(o, source.config, T, world_size);
    const RankPlaces places = places_of(o, world_size, launch);
    const int sharing = world_size / places.hosts;  // of ranks, a machine
    Comm single_rank;
    resolve_micro_batch(dtype, o, source, T, make_groups(single_rank, 1, false), data_parallel, sharing);
    check_tokens_at_once(o.micro_batch, T);
    const BatchPlan batch = plan_batch(o.micro_batch, T, o.global_batch_tokens, data_parallel, o.default_global_batch);
    check_virtual_ranks(o, batch);
    const DeviceInfo device = device_info();
    std::vector<Row> rows = plan_table(dtype, o, source, batch, device, device_bytes_free(sharing));
    if (world_size > 1) rows.push_back({"ranks", describe_places(places)});
    if (!o.train_data.empty()) {
        const Corpus corpus = open_corpus(o.train_data, "--train-data", T);
        rows.push_back({"data", describe_data(corpus, batch.tokens_per_step / T)});
        resolve_steps(o, corpus.num_windows * T / batch.tokens_per_step);
    }
    const double flops = flops_per_token(source.config, T), per_step = flops * double(batch.tokens_per_step);
    const double peak = dtype == Dtype::fp32 ? device.peak_flops_fp32 : device.peak_flops_bf16;
    rows.push_back({"work", plain_number(flops / 1e9, 4) + " GFLOP per token, " + plain_number(per_step / 1e12, 4) +
                                " TFLOP per step"});
    const int64_t done = source.resume.empty() ? 0 : read_trainer_state(source.resume).step;
    if (peak > 0)
        rows.push_back(
            {"time", plan_time(dtype, o, source.config, batch, peak, share_of_cores(sharing, launch), done)});
    if (world_size > 1) rows.push_back({"network", describe_traffic(dtype, source.config, o, batch, places)});
    const CheckpointFormat saved = checkpoint_format(o, find_update_rule<float>(o.optimizer).state);
    const int64_t checkpoint = checkpoint_bytes(ParamLayout(source.config), saved);
    rows.push_back({"disk", describe_disk(o, checkpoint)});
    const std::string background = describe_background_saves(o, ParamLayout(source.config), 1 + int(saved.state.size()),
                                                             o.tensor_parallel * (o.zero > 0 ? data_parallel : 1));
    if (!background.empty()) rows.push_back({"checkpoints", background});
    for (const std::string& line : table_lines(rows)) print_stdout(line + "\n");
    for (const std::string& line : source.notes) print_stdout(message_text(line) + "\n");
    return 0;
}
