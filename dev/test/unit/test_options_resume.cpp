// test_options_resume.cpp: tests the options that a resume takes from run.json, also those of an older run, and the
// names and forms of options that the next release will not accept.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "options/options.h"
#include "support/parse.h"

TEST_CASE("every option that names a file and that a resume takes from the run is declared as a path") {
    const std::string help = parse({"--help"}).text;
    for (const Setting& s : settings(train({}))) {
        CAPTURE(s.name);
        const auto has_unit = [&](const char* unit) { return contains(help, "--" + s.name + " " + unit); };
        const bool of_one_start = s.name == "output" || s.name == "trace";
        CHECK(s.is_pattern == has_unit("GLOB"));
        CHECK(s.is_path == (!of_one_start && (has_unit("GLOB") || has_unit("DIR") || has_unit("FILE"))));
    }
}

TEST_CASE("--resume takes options that are not given from the run") {
    const std::string saved = options_json(train({"--layers",   "2",
                                                  "--heads",    "2",
                                                  "--channels", "64",
                                                  "--seq-len",  "32",
                                                  "--lr",       "1e-3",
                                                  "--steps",    "700",
                                                  "--rank",     "1",
                                                  "--quiet",    "--stop-after",
                                                  "5",          "--output",
                                                  "a",          "--trace",
                                                  "t",          "--trace-steps",
                                                  "7"}));
    CHECK(parse({"--resume", "--output", "b"}).needs_saved);
    CHECK(train({"--resume"}).needs_saved);
    CHECK_FALSE(train({}).needs_saved);
    CHECK(parse({"plan", "--resume", "--output", "b"}).needs_saved);
    CHECK_FALSE(parse({"plan", "--output", "b"}).needs_saved);
    const std::vector<const char*> given = {"train_gpt2", "--resume", "--output", "b", "--steps", "900"};
    const Options o = parse_options(int(given.size()), given.data(), saved);
    CHECK_FALSE(o.needs_saved);
    CHECK(o.train_data == "x.bin");
    CHECK(o.layers == 2);
    CHECK(o.lr == 1e-3);
    CHECK(o.steps == 900);
    CHECK(o.output == "b");
    CHECK(o.resume);
    CHECK(o.rank == -1);  // --rank applies to one start only
    CHECK_FALSE(o.quiet);
    CHECK(o.stop_after == 0);
    CHECK(o.trace == "");
    CHECK(o.trace_steps == 20);
    CHECK(o.default_model);  // the model is in the checkpoint
    CHECK(o.global_batch_tokens == 0);
    CHECK(o.taken == "--train-data x.bin --layers 2 --heads 2 --channels 64 --seq-len 32 --global-batch 0 --lr 0.001");
    const std::vector<const char*> other = {"train_gpt2", "--resume", "--output", "b", "--model", "d24"};
    const Options d24 = parse_options(int(other.size()), other.data(), saved);
    CHECK(d24.model == "d24");
    CHECK(d24.layers == 0);
    CHECK_FALSE(d24.default_model);
}

// The error of a resume that takes this run.json, as "65 message".
static std::string resume_error(std::vector<const char*> arguments, const std::string& saved) {
    arguments.insert(arguments.begin(), {"train_gpt2", "--resume", "--output", "b"});
    try {
        parse_options(int(arguments.size()), arguments.data(), saved);
    } catch (const Error& error) {
        return std::to_string(error.exit_code) + " " + error.what();
    }
    return "";
}

TEST_CASE("--resume reports a refused value as an error of run.json or of the command line, where it is from") {
    const auto saved = [](const char* name, const nlohmann::json& value) {
        nlohmann::json options = nlohmann::json::parse(options_json(train({})));
        options[name] = value;
        return options.dump();
    };
    const auto of_file = [](const std::string& what, const std::string& option) {
        return "65 " + what + " (from b/run.json; give " + option + " on the command line)";
    };
    const std::string rate = "--lr 1000 must be at least 0 and at most 100";
    CHECK(resume_error({}, saved("lr", 1000)) == of_file(rate, "--lr"));
    CHECK(resume_error({"--lr", "1"}, saved("lr", 1000)) == "");
    CHECK(resume_error({"--lr", "1000"}, saved("lr", 1)) == "2 " + rate);
    CHECK(resume_error({}, saved("lr", nullptr)) == of_file("--lr: 'null' is not a number", "--lr"));
    CHECK(resume_error({}, saved("lr", "fast")) == of_file("--lr: 'fast' is not a number", "--lr"));
    CHECK(resume_error({}, saved("train-data", 7)) == of_file("--train-data: 7 is not a text", "--train-data"));
    CHECK(resume_error({}, saved("schedule", "")) ==
          of_file("--schedule '' is not known; give cosine|linear|constant|wsd", "--schedule"));
    CHECK(resume_error({}, saved("share-gpu", 3)) == of_file("--share-gpu: '3' is neither 0 nor 1", "--share-gpu"));
    CHECK(resume_error({}, saved("val-data", "\xef\xbf\xbd")) ==
          of_file("--val-data \xef\xbf\xbd: run.json cannot hold bytes that are not UTF-8", "--val-data"));

    // Two values that contradict each other.
    const std::string no_bf16 = "--master-weights off needs bf16 weights; give --precision bf16";
    nlohmann::json both = nlohmann::json::parse(saved("precision", "fp32"));
    both["master-weights"] = "off";
    CHECK(resume_error({}, both.dump()) == of_file(no_bf16, "these options"));
    CHECK(resume_error({"--precision", "fp32"}, saved("master-weights", "off")) ==
          "2 " + no_bf16 + " (options that are not given come from b/run.json)");
}

TEST_CASE("the options that --resume takes are printed quoted for a shell") {
    const std::string saved =
        options_json(parse({"--train-data", "a b_*.bin", "--sample-prompt", "it's", "--share-gpu", "--tokenizer", ""}));
    const std::vector<const char*> given = {"train_gpt2", "--resume", "--output", "b"};
    CHECK(parse_options(int(given.size()), given.data(), saved).taken ==
          R"(--train-data 'a b_*.bin' --model d12 --global-batch 524288 --share-gpu --sample-prompt 'it'\''s')");
}

TEST_CASE("on resume a default warmup follows from --steps, and a given one stays") {
    const auto resumed_warmup = [](const std::string& saved, const char* steps) {
        const std::vector<const char*> resume = {"train_gpt2", "--resume", "--output", "x", "--steps", steps};
        Options o = parse_options(int(resume.size()), resume.data(), saved);
        resolve_steps(o, 18865);
        return o.warmup;
    };
    Options o = train({"--steps", "5000"});
    resolve_steps(o, 18865);
    CHECK(o.warmup == 500);
    CHECK(resumed_warmup(options_json(o), "500") == 50);
    CHECK(resumed_warmup(options_json(o), "5") == 0);
    CHECK(resumed_warmup(options_json(o), "6000") == 600);
    o = train({"--steps", "5000", "--warmup", "30"});
    resolve_steps(o, 18865);
    CHECK(resumed_warmup(options_json(o), "500") == 30);
    const std::string older = R"({"train-data":"x.bin","layers":1,"heads":1,"channels":16,"steps":200,"warmup":20})";
    CHECK(resumed_warmup(older, "500") == 20);
}

TEST_CASE("a renamed option is accepted by its old name with a note, also from an older run") {
    CHECK(train({"--logit-chunks", "3"}).renamed.empty());
    const Options o = train({"--head-chunks", "4"});
    CHECK(o.logit_chunks == 4);
    REQUIRE(o.renamed.size() == 1);
    CHECK(o.renamed[0] == "--head-chunks is now --logit-chunks; the next release will accept only the new name");
    const std::vector<const char*> resume = {"train_gpt2", "--resume", "--output", "x"};
    const std::string saved = R"({"train-data":"x.bin","layers":1,"heads":1,"channels":16,"head-chunks":5})";
    CHECK(parse_options(int(resume.size()), resume.data(), saved).logit_chunks == 5);
}

TEST_CASE("an option that was a flag is accepted without a value with a note, also from an older run") {
    CHECK(train({}).autotune == "on");
    CHECK(train({"--autotune", "off"}).autotune == "off");
    CHECK(train({"--autotune", "off"}).renamed.empty());
    for (const std::vector<const char*>& alone :
         {std::vector<const char*>{"--autotune"}, {"--autotune", "--steps", "3"}}) {
        const Options o = train(alone);
        CHECK(o.autotune == "on");
        REQUIRE(o.renamed.size() == 1);
        CHECK(o.renamed[0] == "--autotune is now --autotune on; the next release will accept only this form");
    }
    CHECK_THROWS_AS(train({"--autotune", "3"}), Error);
    for (const bool was_on : {true, false}) {
        const std::vector<const char*> resume = {"train_gpt2", "--resume", "--output", "x"};
        const std::string saved = format(R"({"train-data":"x.bin","layers":1,"heads":1,"channels":16,"autotune":%s})",
                                         was_on ? "true" : "false");
        CHECK(parse_options(int(resume.size()), resume.data(), saved).autotune == (was_on ? "on" : "off"));
    }
}

TEST_CASE("a resume takes no --gpus, --ranks or --max-restarts from the earlier start") {
    const std::string saved = options_json(train({"--gpus", "2", "--max-restarts", "3", "--lr", "0.5"}));
    const char* arguments[] = {"train_gpt2", "--resume"};
    const Options resumed = parse_options(2, arguments, saved);
    CHECK(resumed.lr == 0.5);
    CHECK(resumed.gpus == "");
    CHECK(resumed.max_restarts == 0);
}

TEST_CASE("a resume refuses a saved option with a zero byte, and takes no file to write from run.json") {
    const char* arguments[] = {"train_gpt2", "--resume", "--output", "out"};
    CHECK_THROWS_WITH_AS(parse_options(4, arguments, R"({"train-data": "a\u0000b"})"),
                         doctest::Contains("has a zero byte"), Error);
    const Options resumed = parse_options(4, arguments, R"({"train-data": "x", "output": "/a", "trace": "/b"})");
    CHECK(resumed.output == "out");
    CHECK(resumed.trace == "");
}
