// test_foreign_options.cpp: tests the table of other trainers' options, and the messages made from it.
#include "options/foreign_options.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "support/parse.h"

// The names of a row; "-h 0" is one name.
static std::vector<std::string> names_of(const ForeignOption& foreign) {
    const std::string text = foreign.names;
    std::vector<std::string> names;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find(" -", begin), text.size());
        names.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return names;
}

TEST_CASE("an option of another trainer is refused, and the message names ours") {
    const auto hint = [](const char* name) { return refusal({"--train-data", "x", name, "7"}); };
    CHECK(hint("--max_iters") == "unknown option --max_iters, known from nanoGPT: here it is --steps (see --help)");
    CHECK(contains(hint("--max-iters"), "here it is --steps"));
    CHECK(
        contains(hint("--batch-size"), "here it is --micro-batch in sequences per rank; --global-batch is in tokens"));
    CHECK(contains(hint("--learning_rate"), "here it is --lr"));
    CHECK(contains(hint("--out-dir"), "here it is --output"));
    CHECK(contains(hint("--device"), "train_gpt2cu on GPUs"));
    CHECK(contains(hint("--n-layer"), "here it is --layers"));
    CHECK(contains(hint("--num_train_epochs"), "here it is --steps; --steps 0 is one epoch"));
    CHECK(
        hint("--nproc-per-node") ==
        "unknown option --nproc-per-node, known from torchrun: here it is --gpus, and --ranks on the CPU (see --help)");
    CHECK(contains(hint("--global-batch-size"), "Megatron-LM: here it is --global-batch, in tokens: sequences times"));
    CHECK(contains(hint("--tensor-model-parallel-size"), "here it is --tensor-parallel"));
    CHECK(contains(hint("--load_best_model_at_end"), "here it is --keep-best"));
    CHECK(contains(hint("--exit-duration-in-mins"), "here it is --max-time"));
    CHECK(contains(refusal({"-i", "x", "-np", "2"}), "known from mpirun: here it is --ranks on the CPU"));
    CHECK(contains(hint("--zero_stage"), "here it is --zero 1, 2 or 3"));
    CHECK(contains(hint("-m"), "known from llm.c: here it is --val-batches"));
    CHECK(contains(hint("-nk"), "here it is --keep"));  // not -n, with the value k
    CHECK(
        contains(refusal({"-i", "x", "-h", "1"}), "unknown option -h 1, known from llm.c: here there is no HellaSwag"));
    CHECK(parse({"-i", "x", "-h"}).command == Command::help);
    CHECK(train({"--sample-prompt", "-nk"}).sample_prompt == "-nk");
    CHECK(contains(refusal({"generate", "--init", "d", "--max_new_tokens", "9"}), "here it is --max-tokens"));
    CHECK_FALSE(contains(refusal({"generate", "--init", "d", "--max_iters", "9"}), "--steps"));
}

TEST_CASE("every hint for another trainer's option names an option of ours") {
    std::set<std::string> own;
    for (const Command command : {Command::train, Command::generate}) {
        Options o = train({});
        o.command = command;
        for (const Setting& s : settings(o)) own.insert("--" + s.name);
    }
    for (const ForeignOption& foreign : foreign_options()) {
        CAPTURE(foreign.names);
        const std::string option = own_option(foreign);
        CHECK((option.empty() || own.count(option) == 1));
        CHECK(option.empty() == !contains(foreign.here, "--"));
    }
}

TEST_CASE("another trainer's option is in one row of the table, and is no option of train") {
    std::set<std::string> own;
    for (const Setting& s : settings(train({}))) own.insert("--" + s.name);
    for (const ForeignOption& foreign : foreign_options())
        for (std::string name : names_of(foreign)) {
            CAPTURE(name);
            CHECK(find_foreign_option(name) == &foreign);
            std::replace(name.begin(), name.end(), '_', '-');
            CHECK(own.count(name) == 0);
        }
    CHECK(find_foreign_option("--xyzzy") == nullptr);
    CHECK(find_foreign_option("--gpus") == nullptr);  // is an option of train itself
}
