// trainer.h: model, optimizer and data of a run, and what happens around a step. The step is in train_gpt2.cu.
#pragma once
#include <optional>
#include <string>

#include "base/device.h"
#include "model/gpt2.h"
#include "train/monitor.h"
#include "train/optimizer.h"
#include "train/run.h"
#include "train/saver.h"

// Results of a step, which the device copies to the host asynchronously.
struct StepResults {
    struct Values {
        float loss, grad_norm, factor;  // factor: not finite if the optimizer has left the weights unchanged
        RankStatus statuses[MAX_RANKS];
    };
    int64_t step = -1;  // -1: no step is pending
    Values& values = *static_cast<Values*>(host_allocate(sizeof(Values)));
    Event done = create_event();
    int64_t comm_bytes = 0;         // bytes that this rank sent in the step
    Groups::Waits comm_waits = {};  // at the end of the step

    StepResults() = default;
    StepResults(const StepResults&) = delete;
    ~StepResults() {
        if (step >= 0) wait_ignoring_errors(done);  // after an error: the device may still write the values
        host_free(&values);
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

// The place of a micro-step among those that accumulate into the same gradients.
struct MicroStep {
    int virtual_rank, index;
    bool last;  // of its virtual rank: each bucket is summed over the ranks as soon as backward has completed it
};

template <class floatX>
struct Trainer {
    Run& run;
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    StepResults results[2];    // of even and odd steps
    MicroStepGraph graphs[2];  // of the first micro-step, which overwrites gradients, and of the others
    std::optional<Saver<floatX>> saver;  // made when the state is loaded
    Outliers outliers;
    Stragglers stragglers;
    std::string failure;  // why training cannot continue, such as a loss that is not finite; run.stop is then true
    float own_ms = 0.0f;  // time of the last finished step, without waits for other ranks
    double clock = 0.0;   // seconds_now() at the start of the step that is being timed
    double loader_waited = 0.0, comm_exposed = 0.0;  // seconds of the whole run, up to `clock`
    int64_t bytes_sent = 0;                          // by this rank, up to the start of the step that is being queued

    // Allocates the model, and gives it the checkpoint's weights and state, the weights of --init, or GPT-2's
    // initialization. Called by all ranks.
    explicit Trainer(Run& run);

    MicroStep micro_step(int n);
    bool captures(const MicroStep& m) const;  // whether a CUDA graph may hold this micro-step
    void queue_results(int64_t step);         // queues the copies of the step's results to the host
    // Waits for the results of a step, if they are pending, logs them, and counts the step in run.state. All ranks
    // finish the same steps at the same point, so that they come to the same decisions.
    void finish_step(int64_t step);
    void finish_steps();  // all pending steps
    bool has_replicas() const;
    void check_replicas(int64_t step);
    void validate(int64_t step);
    void sample(int64_t step);
    void save(bool wait);  // the state of run.state.step; wait: returns when the checkpoint is on disk, or throws
    int end();             // called after the loop; returns the exit code

  private:
    void load_state();
    void start_clock(int64_t step);
    void log_step(int64_t step, const StepResults& results, const std::string& skipped);
};
