// test_reference.cpp: tests the curves with which a run compares its validation losses.
#include "train/log.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"

using Nlohmann = nlohmann::json;

static const char run_of_124M[] = R"({"model":{"layers":12,"heads":12,"channels":768,"vocab_size":50257,"more":1},
    "seq_len":1024,"tokens_per_step":524288,"options":{"init":"","lr":1.0},
    "data":{"first_shard":"fineweb_train_000001.bin","fingerprint":"0"},
    "val_data":{"first_shard":"fineweb_val_000000.bin"}})";

TEST_CASE("between two points a curve is linear in the logarithm of the step, and beyond them there is nothing") {
    const Reference curve = {"it", "", {{0, 11.0}, {100, 6.0}, {400, 4.0}}};
    CHECK(curve.loss_at(0) == 11.0);
    CHECK(curve.loss_at(100) == 6.0);
    CHECK(curve.loss_at(400) == 4.0);
    CHECK(*curve.loss_at(200) == doctest::Approx(5.0));
    for (const int step : {-1, 1, 99, 401}) CHECK_FALSE(curve.loss_at(step));
    CHECK_FALSE(Reference().loss_at(0));
}

TEST_CASE("the published curve is that of a run with its shape, batch and data") {
    const Nlohmann run = Nlohmann::parse(run_of_124M);
    const Reference curve = find_reference("", run.dump());
    CHECK(curve.name == "llm.c's GPT-2 124M");
    CHECK(curve.source.starts_with("https://"));
    for (const auto& [step, loss] : {std::pair(250, 6.171), {1000, 4.317}, {5000, 3.554}, {19560, 3.2722}})
        CHECK(*curve.loss_at(step) == doctest::Approx(loss).epsilon(2e-4));
    for (const auto& [field, value] : {std::pair("/model/layers", Nlohmann(24)),
                                       {"/seq_len", 512},
                                       {"/tokens_per_step", 262144},
                                       {"/options/init", "gpt2"},
                                       {"/data/first_shard", "edu_fineweb_train_000001.bin"},
                                       {"/val_data", "none"}}) {
        Nlohmann other = run;
        other[Nlohmann::json_pointer(field)] = value;
        CHECK(find_reference("", other.dump()).name == "");
    }
    CHECK(find_reference("none", run.dump()).name == "");
}

TEST_CASE("another run's log is a reference, without losses that are not finite and a line that is being written") {
    const TemporaryDirectory dir;
    write_bytes(dir / "log.jsonl",
                "{\"kind\":\"run\",\"started\":\"\"}\n{\"kind\":\"step\",\"step\":0,\"loss\":9}\n"
                "{\"kind\":\"val\",\"step\":5,\"val_loss\":4.5}\n{\"kind\":\"val\",\"step\":6,\"val_loss\":null}\n"
                "{\"kind\":\"val\",\"step\":9,\"val_loss\":3");
    const Reference curve = find_reference(dir.path, "{}");
    CHECK(curve.name == dir / "log.jsonl");
    CHECK(curve.losses == std::map<int64_t, double>{{5, 4.5}});
    const auto refused = [&](const std::string& text) {
        write_bytes(dir / "bad", text);
        return refusal([&] { find_reference(dir / "bad", "{}"); });
    };
    CHECK(contains(refused("text\n"), "65 --reference " + (dir / "bad") + " has no validation losses; give the log"));
    CHECK(contains(refused("\n{\"kind\":\"val\",\"step\":}\n"), "bad, line 2: "));
    for (const char* fields : {"\"step\":1", "\"step\":\"1\",\"val_loss\":2", "\"step\":1,\"val_loss\":2,\"name\":3"})
        CHECK(
            contains(refused(format("{\"kind\":\"val\",%s}\n", fields)), "bad has a line that is not one of a log: "));
    CHECK(contains(refusal([&] { find_reference(dir / "none", "{}"); }), "66 "));
}
