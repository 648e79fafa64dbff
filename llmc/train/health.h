// health.h: finds steps whose loss or gradient norm is not finite or far above those before, and decides what to do
// about them (--on-nan, --on-spike).
//
// Every rank sees the same losses and norms, which are sums over all ranks, so all ranks decide alike. The device
// decides whether a step changes the weights, by StepLimits (ops/ops.h) that it is given when the step is queued. At
// that time the step before may not be finished, so the limits of step s come from the steps up to s - 2.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ops/ops.h"

// The last values of the loss or of the norm. A step that does not change the weights is not among them.
struct OutlierWindow {
    static constexpr size_t SIZE = 128;
    std::vector<float> values;  // the oldest first

    void add(float value);
    // The mean plus z standard deviations. Without a full window, or if all values are the same: FLT_MAX.
    float limit(double z) const;
};

enum class Verdict { good, warn, skip, rollback, halt };

struct HealthOptions {
    std::string on_nan = "halt", on_spike = "warn";  // values of the options
    double spike_z = 0.0;                            // 0: off
};

// A step as the device has computed it.
struct StepResult {
    int64_t step;
    float loss, norm, factor;
};

struct Finding {
    Verdict verdict;
    std::string skipped;  // why the step did not change the weights: non_finite, spike, left_out; empty: it did
    std::string text;     // "step 7: loss nan, gradient norm nan"; empty: a good step
};

struct Health {
    static constexpr int MOST_SKIPPED = 10;   // steps in a row that do not change the weights; then the run ends
    static constexpr int MOST_ROLLBACKS = 3;  // of a start of the run

    HealthOptions options;
    OutlierWindow losses, norms;
    StepLimits limits[2];           // [step % 2]: the limits of the next two steps
    std::vector<int64_t> left_out;  // steps that will not change the weights, because they failed before a rollback
    int skipped_in_row = 0;
    int rollbacks = 0;

    bool leaves_out(int64_t step) const;
    // For the device: a step that exceeds these limits does not change the weights.
    StepLimits limits_of(int64_t step) const;
    // Called for each finished step in order. Counts it, and says what to do about it.
    Finding examine(const StepResult& result);
    void roll_back(int64_t failed_step);  // called after a restore: this step will be left out

    std::string json() const;                                         // what a checkpoint keeps
    void restore(const std::string& json, const std::string& where);  // refuses (EXIT_BAD_DATA) what json cannot be

  private:
    bool is_spike(const StepResult& result) const;
    Verdict judge(const StepResult& result) const;
    std::string skipped(const StepResult& result) const;
    std::string describe(const StepResult& result) const;
};
