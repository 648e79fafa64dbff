// test_checkpoint_keep.cpp: tests which checkpoints the rules --keep, --keep-every and --keep-best keep, and that the
// file `best` names the best one.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/faults.h"
#include "support/small_checkpoint.h"

namespace fs = std::filesystem;

static SaveOptions with_rules(const std::string& output, const KeepRules& keep) {
    SaveOptions options = save_options(output);
    options.keep = keep;
    return options;
}

// Saves a step and then stores its validation loss, as a run does. Returns the warnings.
static Names save_and_validate(const std::string& output, const KeepRules& keep, int64_t step, double loss) {
    Saved saved = save(with_rules(output, keep), step);
    set_val_loss(saved.dir, loss);
    apply_keep_rules(output, keep, step, [&](const std::string& line) { saved.warnings.push_back(line); });
    return saved.warnings;
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
    CHECK(best_checkpoint(out) == "");  // not validated yet
    CHECK(list_directory(out) == Names{"latest", "step_000001"});
    CHECK(save_and_validate(out, keep, 2, 3.0).empty());
    CHECK(save_and_validate(out, keep, 3, 2.5).empty());
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003"});
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    save_and_validate(out, keep, 4, 2.75);
    save_and_validate(out, keep, 5, NAN);
    save_and_validate(out, keep, 6, 2.5);  // the older one of two equal ones is the best
    save(with_rules(out, keep), 7);        // as long as this one has no loss, the best one stays
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003", "step_000007"});
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    CHECK(read_bytes(out + "/latest") == "step_000007\n");
    CHECK(holds(out + "/step_000007", 7));
    set_val_loss(out + "/step_000007", 1.0);
    apply_keep_rules(out, keep, 7, [](const std::string&) {});
    CHECK(list_directory(out) == Names{"best", "latest", "step_000007"});
    CHECK(read_bytes(out + "/best") == "step_000007\n");
}

TEST_CASE("the loss of an earlier step's weights does not make a checkpoint the best") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", first = out + "/step_000001";
    save_and_validate(out, {1, 0, true}, 1, 1.5);
    CHECK(read_trainer_state(first).val_step == 1);
    TrainerState later = trainer_state(2);
    later.val_loss = 0.5, later.val_step = 1;  // the run continues from step 1 and saves before its next validation
    const FlatState state(small_model, 2);
    save_checkpoint(with_rules(out, {1, 0, true}), state.layout, state.view(), later);
    CHECK(read_trainer_state(out + "/step_000002").val_step == 1);
    CHECK(best_checkpoint(out) == first);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000001", "step_000002"});
}

TEST_CASE("a trainer.json without the step of its validation is read, and is not the best") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save_and_validate(out, {}, 1, 1.5);
    write_changed_state(out + "/step_000001", [](nlohmann::json& state) { state.erase("val_step"); });
    CHECK(read_trainer_state(out + "/step_000001").val_step == -1);
    CHECK(read_trainer_state(out + "/step_000001").val_loss == 1.5);
    CHECK(best_checkpoint(out) == "");
    set_val_loss(out + "/step_000001", 1.5);  // the resumed run repeats the validation
    CHECK(best_checkpoint(out) == out + "/step_000001");
    for (const nlohmann::json& bad : {nlohmann::json(2), nlohmann::json(-2), nlohmann::json("1")}) {
        write_changed_state(out + "/step_000001", [&](nlohmann::json& state) { state["val_step"] = bad; });
        CHECK(refusal([&] { read_trainer_state(out + "/step_000001"); }).find("val_step is ") != std::string::npos);
    }
}

TEST_CASE("other rules on resume take effect at the next save, and `best` never names a deleted checkpoint") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    for (int step : {1, 2, 3}) save_and_validate(out, {1, 2, true}, step, step);
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

TEST_CASE("a run that continues from an older checkpoint takes the best of what is left") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    for (int step : {1, 2, 3}) save_and_validate(out, {3, 0, true}, step, 5 - step);
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    save(with_rules(out, {3, 0, true}), 2);  // step 3 becomes .stale, and step 2 has no loss yet
    CHECK(read_bytes(out + "/best") == "step_000001\n");
}

TEST_CASE("a directory `best` of the user stays, and a file `best` that cannot be written is a warning") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    make_directories(out + "/best/mine");
    CHECK(save(with_rules(out, {1, 0, false}), 1).warnings.empty());
    const Names warnings = save_and_validate(out, {1, 0, true}, 2, 1.0);
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].starts_with("the file best does not name the best checkpoint: "));
    CHECK(is_directory(out + "/best/mine"));
    CHECK(holds(out + "/step_000002", 2) == false);  // it has another loss than save() wrote
    CHECK(verify_error(out + "/step_000002") == "");
}

TEST_CASE("a validation interrupted at any system call loses neither the newest nor the best checkpoint") {
    save_in_memory();
    const KeepRules keep = {1, 0, true};
    const FaultTest validation = {
        .least_calls = 10,
        .prepare =
            [&](const TemporaryDirectory& dir) {
                save_and_validate(dir / "out", keep, 1, 2.0);
                save(with_rules(dir / "out", keep), 2);
            },
        .run =
            [&](const TemporaryDirectory& dir) {
                set_val_loss(dir / "out/step_000002", 1.0);
                apply_keep_rules(dir / "out", keep, 2, [](const std::string&) {});
            },
        .check =
            [&](const TemporaryDirectory& dir, const FaultResult&) {
                const std::string out = dir / "out", best = best_checkpoint(out);
                CHECK(find_latest(out).dir == out + "/step_000002");
                CHECK(find_latest(out).damaged.empty());
                REQUIRE(best != "");
                CHECK(verify_error(best) == "");
                CHECK(verify_error(out + "/" + read_bytes(out + "/best").substr(0, 11)) == "");
            },
        .codes = {EXIT_IO, EXIT_CANNOT_CREATE, EXIT_NO_INPUT, EXIT_BAD_DATA},  // of a read or a stat that failed
    };
    for (int error : {0, EIO, ENOSPC})
        if (!fault_at_each_call(error, validation)) return;
}
