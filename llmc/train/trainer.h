// trainer.h: a run with its model and optimizer, and everything that happens between two steps. The step itself is in
// train_gpt2.cu.
#pragma once
#include "base/contention.h"
#include "base/device.h"
#include "model/gpt2.h"
#include "train/log.h"
#include "train/optimizer.h"
#include "train/run.h"
#include "train/save.h"
#include "train/silent_errors.h"

// The results of a step, which the device copies to the host asynchronously.
struct PendingStep {
    struct Results {
        float loss, grad_norm, factor;  // factor: NaN if the optimizer has left the weights unchanged
        RankStatus statuses[MAX_RANKS];
    };
    StepRecord record;
    Results& results = *static_cast<Results*>(host_allocate(sizeof(Results)));
    Event done = create_event();
    Groups::Waits comm_waits = {};  // at the end of this step
    bool waiting = false;

    PendingStep() = default;
    PendingStep(const PendingStep&) = delete;
    ~PendingStep() {
        if (waiting) wait_ignoring_errors(done);  // after an error: the device may still write the results
        host_free(&results);
        destroy_event(done);
    }
};

// CUDA graph of a micro-step: run 1 is eager and chooses the matmul algorithms, run 2 is captured, later runs replay.
struct MicroStepGraph {
    int runs = 0;
    Graph graph = nullptr;

    MicroStepGraph() = default;
    MicroStepGraph(const MicroStepGraph&) = delete;
    ~MicroStepGraph() { destroy_graph(graph); }

    template <class Calls>
    void call_or_replay(bool as_graph, Stream stream, const Calls& calls) {
        if (!as_graph || runs++ == 0) return calls();
        if (!graph) {
            begin_graph(stream);
            try {
                calls();
            } catch (...) {
                abandon_graph(stream);
                throw;
            }
            graph = end_graph(stream);
        }
        run_graph(graph, stream);
    }
};

template <class floatX>
struct Trainer {
    Run& run;
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    PendingStep pending[2];    // results of even and of odd steps
    MicroStepGraph graphs[2];  // graph of the first micro-step, which overwrites gradients; graph of the others
    StateReader reader;
    RecomputeCheck recompute_check;
    ContentionGuard contention;
    bool rolled_back = false;  // a step that was finished has made the run go back: the next step is run.state.step
    double last_own_ms = 0.0;  // own time of the last finished step, as in RankStatus

    // Allocates the model, and gives it the checkpoint's weights and state, the weights of --init, or GPT-2's
    // initialization. Called by all ranks.
    explicit Trainer(Run& run);

    // Waits for the results of a step, logs them, and counts the step in run.state. If the step did not change the
    // weights, does what --on-nan or --on-spike says: throws an error, or goes back to a checkpoint. All ranks finish
    // the same steps at the same point, so that they make the same decisions.
    void finish_step(PendingStep& step);
    void finish_steps(int64_t step);  // finishes all pending steps, which are before step `step`
    // Does what is due before step `step` begins, after `step` updates: comparison of the ranks' weights, checkpoint,
    // validation, generated text, trace.
    // The checkpoint comes first, so that a later crash loses nothing. A run that was asked to stop does not validate
    // or sample; the resumed run does. first: the step with which this start of the run began.
    void between_steps(int64_t step, int64_t first, bool stop);

  private:
    void load_state();
    void describe_run();
    [[noreturn]] void halt(const std::string& why);
    void roll_back(int64_t failed_step, const std::string& why);
    bool compares_weights() const;
    void check_weights(int64_t step);
    void validate(int64_t step);
    void sample(int64_t step);
};
