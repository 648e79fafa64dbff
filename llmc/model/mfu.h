// mfu.h: model FLOPs utilization (MFU): FLOP/s that the model's formula counts, divided by the device's peak FLOP/s.
//
// The definition is llm.c's, so that figures are comparable: 6 N + 6 L C T FLOPs per token. 6 N: each parameter takes
// one multiplication and one addition in forward, and twice as many in backward. N counts the tied embedding once, as
// the head, and no padding. 6 L C T: the two matmuls of attention (queries times keys, weights times values) take
// 12 L C T in forward and backward, halved because attention is causal. Recomputed work does not count.
#pragma once
#include <cctype>
#include <string>

#include "model/params.h"

inline double flops_per_token(const GPT2Config& config, int T) {
    return 6.0 * double(count_parameters(config)) + 6.0 * config.L * config.C * double(T);
}

// A fraction, 0 to 1; 0 if the peak (FLOP/s) is unknown.
inline double mfu(double tokens_per_s, double flops_per_token, double peak_flops) {
    return peak_flops > 0 ? tokens_per_s * flops_per_token / peak_flops : 0.0;
}

// The MFU that `plan` assumes for a step that it does not measure. llm.c's published speeds (docs/performance.md) are
// 38 % on H100 and 56 % on A100; a CPU, whose peak is measured, may reach 60 %.
constexpr double ASSUMED_MFU = 0.4;

// Data-sheet peaks in TFLOP/s without sparsity: half of the figures printed "with sparsity". bf16 is with fp32
// accumulation, which GeForce cards do at half the rate of fp16.
struct GpuPeak {
    const char* name;  // the driver's name without "NVIDIA", "GeForce" and suffixes
    double bf16, tf32, fp32;
};

// The first match wins, so a longer name comes before a name that it contains.
constexpr GpuPeak gpu_peaks[] = {
    {"B200", 2250, 1125, 75},
    {"GB200", 2500, 1250, 80},
    {"GH200", 989, 494, 67},
    {"H200 NVL", 835, 417, 60},
    {"H200", 989, 494, 67},
    {"H100 PCIe", 756, 378, 51},
    {"H100 NVL", 835, 417, 60},
    {"H100", 989, 494, 67},
    {"H800 PCIe", 756, 378, 51},
    {"H800", 989, 494, 67},
    {"H20", 148, 74, 44},
    {"A100", 312, 156, 19.5},
    {"A800", 312, 156, 19.5},
    {"A30", 165, 82, 10.3},
    {"A40", 149.7, 74.8, 37.4},
    {"A10", 125, 62.5, 31.2},
    {"L40S", 362, 183, 91.6},
    {"L40", 181, 90.5, 90.5},
    {"L4", 121, 60, 30.3},
    {"RTX A6000", 154.8, 77.4, 38.7},
    {"RTX 6000 Ada", 364.2, 182.1, 91.1},
    {"RTX 5090 D", 0, 0, 0},
    {"RTX 5090", 209.5, 104.8, 104.8},
    {"RTX 5080", 112.6, 56.3, 56.3},
    {"RTX 4090 D", 147, 73.5, 73.5},
    {"RTX 4090", 165.2, 82.6, 82.6},
    {"RTX 4080 SUPER", 104.4, 52.2, 52.2},
    {"RTX 4080", 97.5, 48.7, 48.7},
    {"RTX 3090 Ti", 80, 40, 40},
    {"RTX 3090", 71, 35.6, 35.6},
};

// The first row whose name occurs in the device's name as whole words: "NVIDIA A100-SXM4-80GB" matches A100, "NVIDIA
// L40S" does not match L40. Returns zeros for a GPU that is not listed, for laptop parts (their names are those of
// faster desktop cards) and for MIG slices.
inline GpuPeak gpu_peak(const std::string& device) {
    const auto has_words = [&](const std::string& words) {
        for (size_t at = device.find(words); at != std::string::npos; at = device.find(words, at + 1)) {
            const size_t end = at + words.size();
            const bool begins = at == 0 || !std::isalnum(static_cast<unsigned char>(device[at - 1]));
            if (begins && (end == device.size() || !std::isalnum(static_cast<unsigned char>(device[end])))) return true;
        }
        return false;
    };
    const GpuPeak unknown = {"", 0, 0, 0};
    if (has_words("Laptop") || has_words("Max-Q") || has_words("MIG")) return unknown;
    for (const GpuPeak& peak : gpu_peaks)
        if (has_words(peak.name)) return peak;
    return unknown;
}
