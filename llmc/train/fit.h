// fit.h: the layouts of a training run that fit into the memory of the ranks' devices, for `plan --fit`.
//
// A layout is the number of tensor-parallel ranks, with or without sequence parallelism, a ZeRO stage, what backward
// recomputes, and the micro-batch. Its time is computed, not measured: the
// FLOPs of a step at ASSUMED_MFU (model/mfu.h), and after them the bytes that a rank sends. In a run, most
// communication overlaps with computation, so the order of the layouts is more reliable than their times.
#pragma once
#include <string>
#include <vector>

#include "train/options.h"
#include "train/plan.h"
#include "train/traffic.h"

struct Layout {
    int tensor_parallel;
    bool sequence_parallel;
    int zero;
    std::string recompute;  // as in --recompute
    BatchPlan batch;
    int64_t bytes;   // of a rank's device
    SentBytes sent;  // by a rank per step
    double seconds;  // per step

    double tokens_per_second() const { return double(batch.tokens_per_step) / seconds; }
};

// The devices of the ranks.
struct FitDevices {
    RankPlaces places;
    int64_t memory;
    double peak_flops;
    double bandwidth, network = 0.0;  // bytes per second that a rank sends inside its host, and to other hosts
};

// The layouts that fit, the fastest first; for each of the other choices the one with the largest micro-batch. o: the
// options of the run. If an option of layout_options is on the command line, all layouts have its value. Refuses a
// global batch that one sequence per rank, or the given micro-batch, does not divide.
std::vector<Layout> fitting_layouts(Dtype dtype, const Options& o, const GPT2Config& config, int T,
                                    const FitDevices& devices);
// The layout with the given options that needs the least memory, whether it fits or not.
Layout smallest_layout(Dtype dtype, const Options& o, const GPT2Config& config, int T, const FitDevices& devices);
// The options that a layout consists of, by long name without dashes.
inline constexpr const char* LAYOUT_OPTIONS[] = {"tensor-parallel", "sequence-parallel", "zero", "recompute",
                                                 "micro-batch"};
// The options of a layout for a command line: "--tensor-parallel 2 --zero 3 --recompute none --micro-batch 4".
std::string layout_options(const Layout& layout);
