// trainer.h: model, optimizer and data of a run, and what happens around a step. The step is in train_gpt2.cu.
#pragma once
#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "data/dataloader.h"
#include "model/gpt2.h"
#include "train/log.h"
#include "train/monitor.h"
#include "train/optimizer.h"
#include "train/run.h"

// Results of a step, which the device copies to the host asynchronously.
struct StepResults {
    struct Values {
        float loss, grad_norm, factor;  // factor: not finite if the optimizer has left the weights unchanged
        RankStatus statuses[MAX_RANKS];
    };
    int64_t step = -1;  // -1: no step is pending
    Values& values = *static_cast<Values*>(host_allocate(sizeof(Values)));
    Event done = create_timer();
    int64_t comm_bytes = 0;         // bytes that this rank sent in the step
    Groups::Waits comm_waits = {};  // waits up to the end of the step

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
    bool last;  // the last of its virtual rank: each bucket is reduced as soon as backward has completed it
};

template <class floatX>
struct Trainer {
    const Run& run;
    Log& log;
    OwnedStream stream;
    DataLoader loader;
    std::unique_ptr<DataLoader> val_loader;  // null without validation
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    MicroStepGraph graphs[2];  // the first micro-step's, which overwrites gradients, and that of the others
    StepResults results[3];    // results of a step and of the next one, and the end of the one before (end_of)
    Outliers outliers;
    Stragglers stragglers;
    TrainerState state;            // after the last step that counts: step, tokens, position in the data
    bool stop = false;             // all ranks stop after this step; the same on all ranks
    bool out_of_patience = false;  // `stop` is set because of --patience
    std::string failure;  // reason why training cannot continue, such as a loss that is not finite; `stop` is then set
    float own_ms = 0.0f;  // time of the last finished step, without waits for other ranks
    // Other programs may use the cores while a CPU's peak is measured, so it is measured again after 1, 3, 7, 15 ... s.
    double peak_wait = 1.0, peak_due = seconds_now() + peak_wait;
    struct {
        double begin, loader_waited, comm_exposed;  // values at the begin of the step that the host finishes next
        int64_t bytes_sent;                         // total at the begin of the step that is queued
    } clock;

    Trainer(const Run& run, Log& log);  // allocates the model; no collective is in flight then
    // All ranks call it once. Loads the checkpoint, --init's weights, or GPT-2's initialization.
    void start();

    MicroStep micro_step(int n);
    bool captures(const MicroStep& m) const;  // whether a CUDA graph may hold this micro-step
    // When the device has completed a step, from -1 on, or a pause after it (start_clock).
    Event end_of(int64_t step) const { return results[(step + 3) % 3].done; }
    void queue_results(int64_t step);  // queues the copies of the step's results to the host
    // Waits for the results of a step, if they are pending, logs them, and counts the step in `state`. All ranks finish
    // the same steps at the same point, so that they come to the same decisions.
    void finish_step(int64_t step);
    void finish_steps() {  // all pending steps
        const int64_t next = state.step;
        finish_step(next);
        finish_step(next + 1);
    }
    // Whether other ranks have the same weights. With ZeRO-3 each rank has a shard of its own.
    bool has_replicas() const {
        return run.groups.dp.world_size > 1 && run.differing.empty() && !optimizer.weights.sharded();
    }
    void check_replicas(int64_t step) {
        run.groups.world.reached("comparison of weights");
        optimizer.weights.finish();
        ::check_replicas(run.groups, model.weights.memory.data, model.weights.memory.bytes(), step, model.stream);
    }
    bool validate(int64_t step);  // returns whether the loss is the best so far, which is to be saved (--patience)
    void sample(int64_t step);
    void start_clock(int64_t step);  // step: the next one
    // All ranks call it after the loop. Returns the exit code, or throws `failure`. saved_step: rank 0's Saver's.
    int finish(int64_t saved_step);

  private:
    void load_state();
    bool compare_with_best(int64_t step);
    void log_step(int64_t step, const StepResults& results, const std::string& skipped);
};
