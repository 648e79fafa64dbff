// test_background_save.cpp: tests saves that a thread writes while training goes on. Each case is a mistake that
// asynchronous checkpoints of other programs have made.
#include <doctest/doctest.h>

#include <condition_variable>
#include <filesystem>
#include <mutex>

#include "support/small_checkpoint.h"
#include "train/background_save.h"

// A place where a thread waits until the test lets it go on.
struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false, opened = false;

    void pass() {
        std::unique_lock lock(mutex);
        reached = true;
        changed.notify_all();
        changed.wait(lock, [&] { return opened; });
    }
    void wait_until_reached() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return reached; });
    }
    void open() {
        const std::lock_guard lock(mutex);
        opened = true;
        changed.notify_all();
    }
};

constexpr int SLOTS = 3;  // weights, m, v

// Starts a save of the state with seed `step`. If there is a gate, the thread stops there before it writes the tensors.
static void start_save(BackgroundSave& background, const std::string& output, FlatState& state, int64_t step,
                       Gate* gate = nullptr) {
    background.snapshot.take(state.reader());
    background.start(step, [&background, output, step, gate] {
        if (gate) gate->pass();
        const Snapshot& copy = background.snapshot;
        SaveResult result;
        result.step = step;
        result.dir = save_checkpoint(save_options(output, 1), copy.layout, copy.view(), trainer_state(step)).dir;
        return result;
    });
}

TEST_CASE("a step that changes weights and moments during a save does not change what is saved") {
    const TemporaryDirectory dir;
    FlatState state(small_model, 7);
    BackgroundSave background(state.layout, SLOTS);
    Gate gate;
    start_save(background, dir / "out", state, 7, &gate);
    gate.wait_until_reached();
    state = FlatState(small_model, 8);  // the next step
    gate.open();
    const std::optional<SaveResult> result = background.finish(true);
    REQUIRE(result);
    CHECK(result->dir == dir / "out/step_000007");
    CHECK(holds(result->dir, 7));
}

TEST_CASE("each save has the state of its own step, in the same memory") {
    const TemporaryDirectory dir;
    FlatState state(small_model, 1);
    BackgroundSave background(state.layout, SLOTS);
    const std::vector<float*> memory = background.snapshot.slots;
    for (int64_t step : {1, 2, 3}) {
        state = FlatState(small_model, uint64_t(step));
        start_save(background, dir / "out", state, step);
        CHECK(background.finish(true)->step == step);
        CHECK(holds(checkpoint_directory(dir / "out", step), step));
    }
    CHECK(background.snapshot.slots == memory);
}

TEST_CASE("during a save, the checkpoint before and `latest` are whole, and there is no result") {
    const TemporaryDirectory dir;
    FlatState state(small_model, 1);
    BackgroundSave background(state.layout, SLOTS);
    start_save(background, dir / "out", state, 1);
    background.finish(true);
    Gate gate;
    start_save(background, dir / "out", state, 2, &gate);
    gate.wait_until_reached();
    CHECK_FALSE(background.finish(false));
    CHECK(background.in_flight());
    CHECK(read_bytes(dir / "out/latest") == "step_000001\n");
    CHECK(find_latest(dir / "out").dir == dir / "out/step_000001");
    gate.open();
    CHECK(background.finish(true)->step == 2);
    CHECK_FALSE(background.in_flight());
    CHECK_FALSE(background.finish(true));
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000002"});
}

TEST_CASE("a save does not begin while another is in flight: both would use the same memory") {
    const TemporaryDirectory dir;
    FlatState state(small_model, 1);
    BackgroundSave background(state.layout, SLOTS);
    Gate gate;
    start_save(background, dir / "out", state, 1, &gate);
    gate.wait_until_reached();
    CHECK_THROWS_AS(background.start(2, [] { return SaveResult(); }), Error);
    gate.open();
    CHECK(background.finish(true)->step == 1);
    CHECK(holds(dir / "out/step_000001", 1));
}

TEST_CASE("the destructor waits for the save in flight") {
    const TemporaryDirectory dir;
    FlatState state(small_model, 1);
    {
        BackgroundSave background(state.layout, SLOTS);
        start_save(background, dir / "out", state, 1);
    }
    CHECK(holds(dir / "out/step_000001", 1));
}

TEST_CASE("a copy takes as much memory as snapshot_bytes says, and reads each tensor once") {
    const FlatState state(small_model, 1);
    Snapshot snapshot(state.layout, SLOTS);
    CHECK(snapshot_bytes(state.layout, SLOTS) == SLOTS * state.layout.total * 4);
    int64_t floats = 0;
    const TensorReader read = state.reader();
    snapshot.take([&](float* host, Slot slot, Param p, int l) {
        floats += state.layout.size(p);
        read(host, slot, p, l);
    });
    int64_t expected = 0;
    for_each_tensor(state.layout, [&](Param p, int) { expected += SLOTS * state.layout.size(p); });
    CHECK(floats == expected);
}
