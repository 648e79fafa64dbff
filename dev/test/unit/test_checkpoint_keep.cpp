// test_checkpoint_keep.cpp: tests which checkpoints the rules --keep, --keep-every and --keep-best keep, that the file
// `best` names the best one, and how many of them a plan counts.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/faults.h"
#include "support/parse.h"
#include "support/small_checkpoint.h"
#include "train/keep.h"

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

// The most checkpoints at the same time, by going through the saves of a run whose validation loss falls until the step
// `best_step` and rises after it.
static int64_t count_checkpoints(const Options& o, int64_t best_step) {
    std::vector<int64_t> kept;
    size_t most = 0;
    const auto is_older_best = [&](int64_t step) {
        int64_t best = kept[0];
        for (const int64_t other : kept)
            if (std::abs(other - best_step) < std::abs(best - best_step)) best = other;
        return o.keep_best && step == best;
    };
    for (int64_t saved = o.checkpoint_every;; saved += o.checkpoint_every) {
        const int64_t step = std::min(saved, o.steps);
        kept.push_back(step);
        most = std::max(most, kept.size());
        std::vector<int64_t> next;
        for (size_t i = 0; i < kept.size(); i++) {
            const bool newest = o.keep == 0 || i + size_t(o.keep) >= kept.size();
            if (newest || (o.keep_every && kept[i] % o.keep_every == 0) || is_older_best(kept[i]))
                next.push_back(kept[i]);
        }
        kept = next;
        if (step == o.steps) return int64_t(most);
    }
}

TEST_CASE("a plan counts the most checkpoints that are on the disk at the same time") {
    Options o = train({});
    int exact = 0, cases = 0;
    for (o.steps = 1; o.steps < 40; o.steps += 3)
        for (o.checkpoint_every = 1; o.checkpoint_every < 9; o.checkpoint_every += 2)
            for (o.keep = 0; o.keep < 4; o.keep++)
                for (o.keep_every = 0; o.keep_every < 13; o.keep_every += 4)
                    for (const bool best : {false, true}) {
                        o.keep_best = best;
                        int64_t most = 0;
                        for (int64_t step = 1; step <= o.steps; step++)
                            most = std::max(most, count_checkpoints(o, step));
                        CAPTURE(o.steps);
                        CAPTURE(o.checkpoint_every);
                        CAPTURE(o.keep);
                        CAPTURE(o.keep_every);
                        CAPTURE(o.keep_best);
                        CHECK(most_checkpoints(o) >= most);
                        CHECK(most_checkpoints(o) <= most + 1);
                        exact += most_checkpoints(o) == most, cases++;
                    }
    CHECK(exact > cases * 9 / 10);
    o.checkpoint_every = 0;
    CHECK(most_checkpoints(o) == 0);
}

TEST_CASE("a plan describes the disk space of a run") {
    const auto disk = [](std::vector<const char*> arguments) {
        arguments.insert(arguments.begin(), "plan");
        return describe_disk(parse(arguments), 1 << 30);
    };
    CHECK(disk({"--steps", "20000"}) == "at most 1.00 GiB per checkpoint, 3 kept: 4.00 GiB for 4 at the same time");
    CHECK(
        disk({"--steps", "20000", "--keep-every", "5000", "--keep-best"}) ==
        "at most 1.00 GiB per checkpoint, 3 kept, and the best, and those of every 5,000 steps: 8.00 GiB for 8 at the "
        "same time");
    CHECK(disk({"--steps", "500"}) == "at most 1.00 GiB per checkpoint, 3 kept: 1.00 GiB for 1 at the same time");
    CHECK(disk({"--steps", "20000", "--keep", "0", "--keep-every", "10"}) ==
          "at most 1.00 GiB per checkpoint, all kept: 20.0 GiB for 20 at the same time");
    CHECK(disk({}) == "at most 1.00 GiB per checkpoint, 3 kept");
    CHECK(disk({"--checkpoint-every", "0"}) == "no checkpoints");
    const Options all = train({"--keep", "0", "--checkpoint-every", "1", "--steps", "2147483647"});
    CHECK(describe_disk(all, int64_t(1) << 40).find(": 8192 PiB for 2,147,483,647") != std::string::npos);
}
