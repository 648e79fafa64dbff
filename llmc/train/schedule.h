// schedule.h: the learning rate of a step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

enum class Decay { cosine, linear, constant, wsd };  // wsd: warmup, stable, decay

struct Schedule {
    Decay decay;
    double peak;
    double final_fraction;  // the last step's rate as a fraction of `peak`; unused by Decay::constant
    int64_t warmup, steps;
    double cooldown;  // Decay::wsd: fraction of the steps in which the rate goes down
};

// Returns the number of steps before the rate goes down; of Decay::constant the warmup. A longer run of Decay::wsd is
// the same up to there.
inline int64_t steps_to_peak_end(const Schedule& s) {
    const int64_t warmup = std::max<int64_t>(s.warmup, 1);
    if (s.decay != Decay::wsd) return warmup;
    const int64_t cooldown = int64_t(double(s.steps) * s.cooldown + 1e-9);  // 0.29 * 100 is less than 29
    return std::max(warmup, s.steps - std::max<int64_t>(cooldown, 1));
}

// Learning rate of step 0 ... steps - 1. During warmup the rate rises in equal parts to the peak: the first step's rate
// is peak / warmup, not 0. The last step's is peak * final_fraction exactly, unless warmup fills the whole run.
inline double learning_rate(const Schedule& s, int64_t step) {
    if (step < s.warmup) return s.peak * double(step + 1) / double(s.warmup);
    const int64_t last = s.steps - 1, at_peak = steps_to_peak_end(s) - 1;
    if (s.decay == Decay::constant || step <= at_peak) return s.peak;
    const double progress = double(std::min(step, last) - at_peak) / double(std::max<int64_t>(last - at_peak, 1));
    double left = 1.0 - progress;  // fraction of the range from the final rate to the peak
    if (s.decay == Decay::cosine) left = 0.5 * (1.0 + std::cos(M_PI * progress));
    return s.peak * (s.final_fraction + (1.0 - s.final_fraction) * left);
}
