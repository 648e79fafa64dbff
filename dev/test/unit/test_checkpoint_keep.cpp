// test_checkpoint_keep.cpp: tests which checkpoints the rules --keep, --keep-every and --keep-best keep, and that the
// file `best` names the best one.
#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support/small_checkpoint.h"

// Saves a step that was validated at val_step; -1: at this step. Returns the warnings.
static Names save_validated(const std::string& output, const KeepRules& keep, int64_t step, double loss,
                            int64_t val_step = -1) {
    TrainerState trainer = trainer_state(step);
    trainer.val_loss = loss, trainer.val_step = val_step < 0 ? step : val_step;
    return save(save_options(output, keep), trainer, uint64_t(step)).warnings;
}

TEST_CASE_FIXTURE(Output, "--keep N keeps the newest N checkpoints, --keep-every those of its steps for ever") {
    for (int64_t step = 10; step <= 100; step += 10) save(save_options(out, {2, 40, false}), step);
    CHECK(list_directory(out) == Names{"latest", "step_000040", "step_000080", "step_000090", "step_000100"});
    save(save_options(out, {1, 0, false}), 110);  // a resume without the rule
    CHECK(list_directory(out) == Names{"latest", "step_000110"});
    save(save_options(out, {0}), 1'000'000);  // sorted by number; --keep 0 keeps all
    save(save_options(out, {2}), 1'000'001);
    CHECK(list_directory(out) == Names{"latest", "step_1000000", "step_1000001"});
    CHECK(find_latest(out).dir == out + "/step_1000001");
    CHECK(read_bytes(out + "/latest") == "step_1000001\n");
}

TEST_CASE_FIXTURE(Output, "--keep-best keeps the checkpoint with the lowest validation loss, and `best` names it") {
    const KeepRules keep = {1, 0, true};
    save(save_options(out, keep), 1);
    CHECK(best_checkpoint(out) == "");  // not validated
    CHECK(list_directory(out) == Names{"latest", "step_000001"});
    CHECK(save_validated(out, keep, 2, 3.0).empty());
    CHECK(save_validated(out, keep, 3, 2.5).empty());
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003"});
    save_validated(out, keep, 4, 2.75);
    save_validated(out, keep, 5, NAN);
    save_validated(out, keep, 6, 2.5);     // the older one of two equal ones is the best
    save_validated(out, keep, 7, 0.5, 6);  // validated before: this is not the loss of its own weights
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003", "step_000007"});
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    save_validated(out, keep, 8, 1.0);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000008"});
    CHECK(read_bytes(out + "/best") == "step_000008\n");
}

TEST_CASE_FIXTURE(Output, "a trainer.json without the step of its validation is read, and is not the best") {
    const std::string saved = out + "/step_000001";
    save_validated(out, {}, 1, 1.5);
    CHECK(best_checkpoint(out) == saved);
    write_changed_state(saved, [](nlohmann::json& state) { state.erase("val_step"); });
    CHECK(read_trainer_state(saved).val_step == -1);
    CHECK(read_trainer_state(saved).val_loss == 1.5);
    CHECK(best_checkpoint(out) == "");
}

TEST_CASE_FIXTURE(Output, "other rules take effect at the next save, and `best` never names a deleted checkpoint") {
    for (int step : {1, 2, 3}) save_validated(out, {1, 2, true}, step, step);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000001", "step_000002", "step_000003"});
    save(save_options(out, {2, 0, false}), 4);
    CHECK(list_directory(out) == Names{"latest", "step_000003", "step_000004"});
    save(save_options(out, {2, 0, true}), 5);
    CHECK(read_bytes(out + "/best") == "step_000003\n");  // its loss is in its trainer.json
    save(save_options(out, {2, 0, true}), 6);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003", "step_000005", "step_000006"});
}

TEST_CASE_FIXTURE(Output,
                  "a directory `best` of the user stays, and a file `best` that cannot be written is a warning") {
    make_directories(out + "/best/mine");
    CHECK(save(save_options(out, {1, 0, false}), 1).warnings.empty());
    const Names warnings = save_validated(out, {1, 0, true}, 2, 1.0);
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].starts_with("the file best does not name the best checkpoint: "));
    CHECK(is_directory(out + "/best/mine"));
    CHECK(verify_error(out + "/step_000002") == "");
}
