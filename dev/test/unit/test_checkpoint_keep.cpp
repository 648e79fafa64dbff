// test_checkpoint_keep.cpp: tests which checkpoints the rules --keep, --keep-every and --keep-best keep, and that the
// file `best` names the best one.
#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support/small_checkpoint.h"

static SaveOptions with_rules(const std::string& output, const KeepRules& keep) {
    SaveOptions options = save_options(output);
    options.keep = keep;
    return options;
}

// Saves a step that was validated at val_step. Returns the warnings.
static Names save_validated(const std::string& output, const KeepRules& keep, int64_t step, double loss,
                            int64_t val_step = -1) {
    SaveOptions options = save_options(output);
    options.keep = keep;
    Names warnings;
    options.warn = [&](const std::string& line) { warnings.push_back(line); };
    const FlatState state(small_model, uint64_t(step));
    TrainerState trainer = trainer_state(step);
    trainer.val_loss = loss, trainer.val_step = val_step < 0 ? step : val_step;
    save_checkpoint(options, state.layout, state.view(), trainer);
    return warnings;
}

TEST_CASE("--keep-every keeps the checkpoints of its steps for ever") {
    const TemporaryDirectory dir;
    for (int64_t step = 10; step <= 100; step += 10) save(with_rules(dir / "out", {2, 40, false}), step);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000040", "step_000080", "step_000090", "step_000100"});
    save(with_rules(dir / "out", {1, 0, false}), 110);  // a resume without the rule
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000110"});
}

TEST_CASE("--keep-best keeps the checkpoint with the lowest validation loss, and `best` names it") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    const KeepRules keep = {1, 0, true};
    save(with_rules(out, keep), 1);
    CHECK(best_checkpoint(out) == "");  // not validated
    CHECK(list_directory(out) == Names{"latest", "step_000001"});
    CHECK(save_validated(out, keep, 2, 3.0).empty());
    CHECK(save_validated(out, keep, 3, 2.5).empty());
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003"});
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    save_validated(out, keep, 4, 2.75);
    save_validated(out, keep, 5, NAN);
    save_validated(out, keep, 6, 2.5);     // the older one of two equal ones is the best
    save_validated(out, keep, 7, 0.5, 6);  // validated before: this is not the loss of its own weights
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003", "step_000007"});
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    CHECK(read_bytes(out + "/latest") == "step_000007\n");
    save_validated(out, keep, 8, 1.0);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000008"});
    CHECK(read_bytes(out + "/best") == "step_000008\n");
}

TEST_CASE("a trainer.json without the step of its validation is read, and is not the best") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save_validated(out, {}, 1, 1.5);
    CHECK(best_checkpoint(out) == out + "/step_000001");
    write_changed_state(out + "/step_000001", [](nlohmann::json& state) { state.erase("val_step"); });
    CHECK(read_trainer_state(out + "/step_000001").val_step == -1);
    CHECK(read_trainer_state(out + "/step_000001").val_loss == 1.5);
    CHECK(best_checkpoint(out) == "");
    for (const nlohmann::json& bad : {nlohmann::json(2), nlohmann::json(-2), nlohmann::json("1")}) {
        write_changed_state(out + "/step_000001", [&](nlohmann::json& state) { state["val_step"] = bad; });
        CHECK(refusal([&] { read_trainer_state(out + "/step_000001"); }).starts_with("65 "));
    }
}

TEST_CASE("other rules on resume take effect at the next save, and `best` never names a deleted checkpoint") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    for (int step : {1, 2, 3}) save_validated(out, {1, 2, true}, step, step);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000001", "step_000002", "step_000003"});
    save(with_rules(out, {2, 0, false}), 4);
    CHECK(list_directory(out) == Names{"latest", "step_000003", "step_000004"});
    save(with_rules(out, {2, 0, true}), 5);
    CHECK(read_bytes(out + "/best") == "step_000003\n");  // its loss is in its trainer.json
    save(with_rules(out, {2, 0, true}), 6);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003", "step_000005", "step_000006"});
    save(with_rules(out, {0, 0, false}), 7);  // --keep 0 keeps all
    save(with_rules(out, {0, 5, true}), 8);
    CHECK(list_directory(out) ==
          Names{"best", "latest", "step_000003", "step_000005", "step_000006", "step_000007", "step_000008"});
}

TEST_CASE("a directory `best` of the user stays, and a file `best` that cannot be written is a warning") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    make_directories(out + "/best/mine");
    CHECK(save(with_rules(out, {1, 0, false}), 1).warnings.empty());
    const Names warnings = save_validated(out, {1, 0, true}, 2, 1.0);
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].starts_with("the file best does not name the best checkpoint: "));
    CHECK(is_directory(out + "/best/mine"));
    CHECK(verify_error(out + "/step_000002") == "");
}
