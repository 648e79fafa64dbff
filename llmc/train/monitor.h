// monitor.h: looks at each finished step: steps that must not count, slow ranks, and replicas that differ.
//
// All ranks have the same losses and norms, which are sums over the ranks, so all come to the same result.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "train/gradients.h"

// Outlier detection by z-score over the last 128 steps, as in llm.c (--on-nan, --spike-z). The device skips the
// update of a step whose loss or norm is not finite or exceeds the limits. The limits of step s follow from the steps
// up to s - 2, because the host may be a step behind.
struct Outliers {
    static constexpr size_t WINDOW = 128;    // steps; a step that was skipped is not among them
    static constexpr int MOST_SKIPPED = 10;  // skipped steps in a row that end the run

    bool skip_nan = false;  // --on-nan skip
    double z = 0.0;         // --spike-z; 0: there are no spikes
    std::vector<float> losses, norms;
    StepLimits limits[2];
    int skipped_in_row = 0;

    struct Finding {
        std::string skipped;  // "non_finite" or "spike": why the step did not change the weights; empty: it did
        std::string text;     // "step 7: loss nan, gradient norm nan"; empty: the step did change the weights
        bool ends_run = false;
    };
    StepLimits limits_of(int64_t step) const { return limits[step % 2]; }
    // Counts a finished step. factor: by which the device scaled the gradients, as ops::clip_factor says.
    Finding add(int64_t step, float loss, float norm, float factor);

    Json json() const;  // a checkpoint stores it
    void restore(const Json& saved, const std::string& where);
};

// Finds a slow rank. All ranks end a step together, so a slow rank costs the others its own time minus that of the
// median rank. Differences of a few percent, or of milliseconds in all, are noise.
struct Stragglers {
    static constexpr int STEPS = 20;          // steps over which times are summed
    static constexpr int SILENT_STEPS = 100;  // steps after a warning without another one
    static constexpr double SHARE = 0.1;      // least cost that is reported, as a fraction of the time of these steps
    static constexpr double LEAST_MS = 50;    // least cost that is reported, in ms over these steps

    std::vector<double> own_ms;  // sum over `steps` for each rank
    double all_ms = 0.0;
    int steps = 0, silent = 0;

    // Counts a step that took step_ms. Returns a warning if one rank held up the others in the last STEPS steps, or "".
    // statuses: of all ranks.
    std::string add(const RankStatus* statuses, int world_size, double step_ms);
};

// All ranks call it. Ends the run (EXIT_WEIGHTS_DIFFER) if data-parallel ranks' weights differ, and names the minority.
void check_replicas(const Groups& groups, const void* weights, int64_t bytes, int64_t step, Stream stream);
