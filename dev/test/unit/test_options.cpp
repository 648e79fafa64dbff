// test_options.cpp: tests the command line: the arguments that are accepted, the messages of those that are refused,
// and that the help and the settings come from the same declarations.
#include "options/options.h"

#include <doctest/doctest.h>

#include <set>

#include <nlohmann/json.hpp>

#include "support/parse.h"

TEST_CASE("the command is the first argument, and train by default") {
    CHECK(train({}).command == Command::train);
    CHECK(parse({"train", "--train-data", "x"}).command == Command::train);
    CHECK(parse({"generate", "--init", "d"}).command == Command::generate);
    CHECK(parse({"eval", "--init", "d", "--val-data", "x"}).command == Command::eval);
    CHECK(parse({"plan"}).command == Command::plan);
    CHECK(parse({"tokenize", "a.txt", "--output", "d", "--train-bpe", "300"}).command == Command::tokenize);
    CHECK(parse({"explain", "out"}).command == Command::explain);
    CHECK(parse({"explain", "out"}).inputs == std::vector<std::string>{"out"});
    CHECK(contains(refusal({"explain"}), "explain needs one DIR"));
    CHECK(contains(refusal({"explain", "a", "b"}), "explain needs one DIR"));
}

TEST_CASE("the defaults of training are GPT-2's recipe") {
    const Options o = train({});
    CHECK(o.model == "d12");
    CHECK(o.default_model);
    CHECK(o.global_batch_tokens == 524288);
    CHECK(o.micro_batch == 4);
    CHECK(o.lr == 6e-4);
    CHECK(o.weight_decay == 0.1);
    CHECK(o.beta1 == 0.9);
    CHECK(o.beta2 == 0.95);
    CHECK(o.eps == 1e-8);
    CHECK(o.grad_clip == 1.0);
    CHECK(o.schedule == "cosine");
    CHECK(o.precision == "auto");
    CHECK(o.master_weights == "on");
    CHECK(o.output == "out");
    CHECK(o.steps == 0);
    CHECK_FALSE(o.resume);
    CHECK_FALSE(o.quiet);
}

TEST_CASE("the global batch is by default 524,288 tokens for named sizes, one micro-batch for others") {
    CHECK(train({"--model", "gpt2-xl"}).global_batch_tokens == 524288);
    CHECK(train({"--layers", "2", "--heads", "2", "--channels", "64"}).global_batch_tokens == 0);
    CHECK(train({"--init", "d"}).global_batch_tokens == 0);
    CHECK(train({"--model", "d12", "--global-batch", "0"}).global_batch_tokens == 0);
    CHECK(train({"--init", "d", "--global-batch", "8192"}).global_batch_tokens == 8192);
    CHECK(train({"--resume"}).global_batch_tokens == train({}).global_batch_tokens);  // a restart does not change it
}

TEST_CASE("a value follows a space or an equals sign, and the last value is used") {
    CHECK(train({"--micro-batch", "auto"}).micro_batch == 0);
    CHECK(train({"--lr", "1e-3"}).lr == 1e-3);
    CHECK(train({"--lr=1e-3"}).lr == 1e-3);
    CHECK(train({"--lr=1e-3", "--lr", "2e-3"}).lr == 2e-3);
    CHECK(train({"--output="}).output == "");
    CHECK(train({"--output=", "--lr", "2"}).lr == 2.0);
    CHECK(train({"--output", ""}).output == "");
    CHECK(train({"--sample-prompt", "-5 degrees"}).sample_prompt == "-5 degrees");
    CHECK(train({"--sample-prompt=a=b"}).sample_prompt == "a=b");
    CHECK(train({"--sample-prompt", "[1,2]"}).sample_prompt == "[1,2]");
    CHECK(train({"--seed", "18446744073709551615"}).seed == 18446744073709551615u);
    CHECK(parse({"generate", "--init", "d", "--prompt", "--"}).prompt == "--");
}

TEST_CASE("a flag alone is on, and takes a value after an equals sign") {
    CHECK(train({"--resume"}).resume);
    CHECK(train({"--resume", "--resume"}).resume);
    CHECK(train({"--resume=1"}).resume);
    CHECK_FALSE(train({"--resume=0"}).resume);
    CHECK_FALSE(train({"--resume=false"}).resume);
    CHECK(train({"--quiet"}).quiet);
    CHECK(contains(refusal({"--train-data", "x", "--share-gpu=maybe"}), "--share-gpu: 'maybe' is neither 0 nor 1"));
}

TEST_CASE("--rendezvous-timeout is 300 s by default, and --print-launch needs no data") {
    CHECK(train({}).rendezvous_timeout == 300.0);
    CHECK(train({"--rendezvous-timeout", "0.5e3"}).rendezvous_timeout == 500.0);
    CHECK(contains(refusal({"--train-data", "x", "--rendezvous-timeout", "0"}), "--rendezvous-timeout 0 must be"));
    CHECK(parse({"--print-launch"}).print_launch);
    CHECK_FALSE(train({}).print_launch);
    CHECK(contains(refusal({"--rendezvous-timeout", "9"}), "--train-data is missing"));
}

TEST_CASE("llm.c's one-letter options mean the same here") {
    const Options o = parse({"-i", "a",     "-j", "b",    "-o", "c",  "-e", "d24", "-b", "8",   "-t", "512",
                             "-d", "16384", "-l", "3e-4", "-u", "7",  "-q", "0.2", "-c", "0.3", "-v", "11",
                             "-s", "12",    "-g", "13",   "-x", "14", "-n", "15",  "-y", "1",   "-k", "wsd"});
    CHECK(o.train_data == "a");
    CHECK(o.val_data == "b");
    CHECK(o.output == "c");
    CHECK(o.model == "d24");
    CHECK(o.micro_batch == 8);
    CHECK(o.seq_len == 512);
    CHECK(o.global_batch_tokens == 16384);
    CHECK(o.lr == 3e-4);
    CHECK(o.given_warmup == 7);
    CHECK(o.final_lr_fraction == 0.2);
    CHECK(o.weight_decay == 0.3);
    CHECK(o.val_every == 11);
    CHECK(o.sample_every == 12);
    CHECK(o.sample_tokens == 13);
    CHECK(o.steps == 14);
    CHECK(o.checkpoint_every == 15);
    CHECK(o.resume);
    CHECK(o.schedule == "wsd");
    CHECK_FALSE(train({"-y", "0"}).resume);
    CHECK(contains(refusal({"-i", "a", "-y", "2"}), "--resume: '2' is neither"));
    CHECK(train({"-x", "-1"}).steps == 0);  // one epoch
    CHECK(train({"-e", "gpt2:d36"}).model == "d36");
}

TEST_CASE("--model takes a directory too, as -e of llm.c does") {
    const Options o = train({"-e", "out/d12/step_001000"});
    CHECK(o.init == "out/d12/step_001000");
    CHECK(o.model == "");
    CHECK_FALSE(o.default_model);
    CHECK(contains(refusal({"-i", "a", "-e", "gpt2_124M_bf16.bin"}), "llm.c's model files cannot be read"));
    CHECK(contains(refusal({"-i", "a", "-e", "a/b", "--init", "c"}), "two places to start from"));
}

TEST_CASE("numbers with other characters after them or outside of their range are refused") {
    const auto bad = [](const char* name, const char* value) { return refusal({"--train-data", "x", name, value}); };
    CHECK(bad("--lr", "0.1x") == "--lr: '0.1x' is not a number");
    CHECK(bad("--lr", "") == "--lr: '' is not a number");
    CHECK(bad("--lr", " 1") == "--lr: ' 1' is not a number");
    CHECK(bad("--lr", "nan") == "--lr nan must be at least 0 and at most 100");
    CHECK(bad("--lr", "inf") == "--lr inf must be at least 0 and at most 100");
    for (const char* limit : {"--timeout-start", "--timeout-step", "--timeout-validation", "--timeout-checkpoint"}) {
        const std::string range = " must be 0, or at least 1 and at most 1e+09";
        for (const char* value : {"1e-09", "0.5", "-1", "nan", "2e+09"})
            CHECK(bad(limit, value) == std::string(limit) + " " + value + range);
        for (const char* value : {"0", "1", "7.5", "1e9"}) CHECK(bad(limit, value).empty());
    }
    CHECK(bad("--lr", "-1e-3") == "--lr -0.001 must be at least 0 and at most 100");
    CHECK(bad("--lr", "1e999") == "--lr: 1e999 is out of range");
    CHECK(bad("--beta1", "1") == "--beta1 1 must be at least 0 and below 1");
    CHECK(bad("--steps", "1e3") == "--steps: '1e3' is not a whole number");
    CHECK(bad("--steps", "1.5") == "--steps: '1.5' is not a whole number");
    CHECK(bad("--steps", "-2") == "--steps -2 must be at least -1 and at most 2147483647");
    CHECK(bad("--steps", "3000000000") == "--steps 3000000000 must be at least -1 and at most 2147483647");
    CHECK(bad("--steps", "99999999999999999999") == "--steps: 99999999999999999999 is out of range");
    CHECK(bad("--micro-batch", "automatic") == "--micro-batch: 'automatic' is not a whole number");
    CHECK(bad("--micro-batch", "0") == "--micro-batch 0 must be at least 1 and at most 1048576");
    CHECK(bad("--micro-batch", "4294967297") == "--micro-batch: 4294967297 is out of range");
    CHECK(bad("--global-batch", "9223372036854775807") ==
          "--global-batch 9223372036854775807 must be at least 0 and at most 1099511627776");
    CHECK(bad("--seed", "-1") == "--seed: '-1' is not a whole number, 0 or more");
    const auto bad_tokenize = [](const char* name, const char* value) {
        return refusal({"tokenize", "a", "--output", "d", "--train-bpe", "300", name, value});
    };
    CHECK(bad_tokenize("--val-fraction", "0.6") == "--val-fraction 0.6 must be at least 0 and at most 0.5");
    CHECK(bad_tokenize("--val-fraction", "-1") == "--val-fraction -1 must be at least 0 and at most 0.5");
    CHECK(bad_tokenize("--val-tokens", "-1") == "--val-tokens -1 must be at least 0");
    CHECK(bad_tokenize("--split", "words") == "--split words is not known; give none|blank-lines|end-of-text");
    CHECK(bad("--precision", "fp16") == "--precision fp16 is not known; give fp32|bf16|fp8|auto");
    CHECK(refusal({"eval", "--init", "d", "--val-data", "v", "--precision", "fp8"}) ==
          "--precision fp8 is not known; give fp32|bf16|auto");
    CHECK(bad("--schedule", "cosine|linear") ==
          "--schedule 'cosine|linear' is not known; give cosine|linear|constant|wsd");
    CHECK(bad("--schedule", "") == "--schedule '' is not known; give cosine|linear|constant|wsd");
}

TEST_CASE("an unknown option is refused, and the message suggests the nearest one") {
    CHECK(refusal({"--mirco-batch", "4"}) == "unknown option --mirco-batch; did you mean --micro-batch? (see --help)");
    CHECK(contains(refusal({"--mirco-batch=4"}), "unknown option --mirco-batch; did you mean --micro-batch?"));
    CHECK(contains(refusal({"--stesp", "4"}), "did you mean --steps?"));
    CHECK(contains(refusal({"--rl", "4"}), "did you mean --lr?"));  // two swapped letters count as one mistake
    CHECK(contains(refusal({"--weight-decy", "4"}), "did you mean --weight-decay?"));
    CHECK(contains(refusal({"-output=x"}), "-output=x: a long option takes two dashes: --output"));
    CHECK(contains(refusal({"-lr", "1e-3"}), "-lr: a long option takes two dashes: --lr"));
    CHECK(contains(refusal({"--warm", "4"}), "did you mean --warmup?"));
    CHECK(contains(refusal({"--batch", "4"}), "did you mean --micro-batch?"));
    CHECK(contains(refusal({"generate", "--temp", "0.5"}), "did you mean --temperature?"));  // --help is nearer
    CHECK(contains(refusal({"--hlep"}), "did you mean --help?"));
    CHECK(refusal({"--xyzzy"}) == "unknown option --xyzzy (see --help)");
    CHECK(refusal({"-Q"}) == "unknown option -Q (see --help)");
    CHECK(contains(refusal({"generate", "--micro-batch", "4"}),
                   "generate has no option --micro-batch, which belongs to train"));
    CHECK(contains(refusal({"tokenize", "--steps", "4"}),
                   "tokenize has no option --steps, which belongs to train, plan"));
}

TEST_CASE("missing values and stray arguments are refused") {
    CHECK(refusal({"--train-data", "x", "--lr"}) == "--lr needs a value (see --help)");
    CHECK(refusal({"--train-data", "x", "-n"}) == "--checkpoint-every needs a value (see --help)");
    CHECK(refusal({"--train-data", "x", "--output", "--lr", "3"}) ==
          "--output needs a value (DIR), but the option --lr follows");
    CHECK(contains(refusal({"--train-data", "x", "stray"}), "unexpected argument 'stray'"));
    CHECK(
        contains(refusal({"--train-data", "x", "generate"}), "unexpected argument 'generate'; a command comes first"));
    CHECK(contains(refusal({""}), "unexpected argument ''"));
    CHECK(contains(refusal({"-"}), "unexpected argument '-'"));
}

TEST_CASE("options that contradict each other or need another one are refused") {
    const auto bad = [](std::vector<const char*> arguments) {
        arguments.insert(arguments.begin(), {"--train-data", "x"});
        return refusal(arguments);
    };
    CHECK(bad({"--layers", "2"}) == "give --layers, --heads and --channels together (missing: --heads, --channels)");
    CHECK(bad({"--heads", "2", "--layers", "0"}) ==
          "give --layers, --heads and --channels together (missing: --layers, --channels)");
    CHECK(bad({"--model", "d12", "--layers", "3"}) ==
          "--model d12 and --layers 3 are two ways to choose the shape; give one");
    CHECK(contains(bad({"--model", "d12", "--layers", "2", "--heads", "2", "--channels", "64"}),
                   "--model d12 and --layers 2 --heads 2 --channels 64 are two ways"));
    CHECK(contains(bad({"--init", "d", "--layers", "2"}), "has its own shape"));
    CHECK(contains(bad({"--init", "d", "--layers", "2", "--heads", "2", "--channels", "64"}), "has its own shape"));
    CHECK(contains(bad({"--init", "d", "--model", "d12"}), "has its own shape"));
    CHECK(contains(bad({"--layers", "2", "--heads", "3", "--channels", "64"}),
                   "not a multiple of 3 heads; try --channels 66"));
    CHECK(contains(bad({"--model", "d13"}), "--model d13 is not known"));
    CHECK(contains(bad({"--resume", "--output", ""}), "--resume needs the --output"));
    CHECK(bad({"--precision", "fp32", "--master-weights", "off"}) ==
          "--master-weights off needs bf16 weights; give --precision bf16");
    CHECK(bad({"--precision", "bf16", "--master-weights", "off"}) == "");
    CHECK(bad({"--precision", "fp8", "--master-weights", "off"}) == "");
    CHECK(bad({"--precision", "fp32", "--master-weights", "on"}) == "");
    CHECK(contains(bad({"--master-weights", "no"}), "--master-weights no is not known; give on|off"));
    CHECK(contains(refusal({}), "--train-data is missing"));
    CHECK(contains(refusal({"generate"}), "--init is missing"));
    CHECK(contains(refusal({"eval", "--init", "d"}), "--val-data is missing"));
    CHECK(contains(refusal({"eval", "--val-data", "x"}), "--init is missing"));
    CHECK(contains(refusal({"tokenize", "--output", "d", "--train-bpe", "300"}), "no INPUT"));
    CHECK(contains(refusal({"tokenize", "a", "--train-bpe", "300"}), "--output is missing"));
    CHECK(contains(refusal({"tokenize", "a", "--output", "d"}), "give one of --train-bpe"));
    CHECK(
        contains(refusal({"tokenize", "a", "--output", "d", "--train-bpe", "300", "--tokenizer", "t"}), "give one of"));
    CHECK(refusal({"tokenize", "a", "--output", "d", "--train-bpe", "300", "--val-tokens", "9", "--val-fraction",
                   "0.05"}) == "--val-tokens 9 and --val-fraction 0.05 are two ways to hold out text; give one");
    CHECK(contains(
        refusal({"tokenize", "a", "--output", "d", "--train-bpe", "300", "--val-tokens", "9", "--val-fraction", "0"}),
        "two ways to hold out text"));
}

TEST_CASE("tokenize holds out 5 % for validation, unless a fraction or a number of tokens is given") {
    const auto tokenize = [](std::vector<const char*> arguments) {
        arguments.insert(arguments.begin(), {"tokenize", "a", "--output", "d", "--train-bpe", "300"});
        return parse(arguments);
    };
    CHECK(tokenize({}).val_fraction == 0.05);
    CHECK(tokenize({}).val_tokens == 0);
    CHECK(tokenize({"--val-fraction", "0.5"}).val_fraction == 0.5);
    CHECK(tokenize({"--val-fraction", "0"}).val_fraction == 0.0);
    CHECK(tokenize({"--val-tokens", "32768"}).val_tokens == 32768);
    CHECK(tokenize({"--val-tokens", "32768"}).val_fraction == 0.0);
    CHECK(tokenize({"--val-tokens", "0"}).val_fraction == 0.05);
    CHECK(tokenize({"--val-tokens", "0", "--val-fraction", "0.1"}).val_fraction == 0.1);
    CHECK(tokenize({"--split", "end-of-text"}).split == "end-of-text");
}

TEST_CASE("--shard-tokens of tokenize is 1 to 2147483647, the largest number in the header of a shard") {
    const auto tokens = [](const char* value) {
        return std::vector<const char*>{"tokenize",    "x",   "--output",       "d",
                                        "--train-bpe", "384", "--shard-tokens", value};
    };
    CHECK(parse(tokens("1")).shard_tokens == 1);
    CHECK(parse(tokens("2147483647")).shard_tokens == 2147483647);
    for (const char* value : {"-1", "0", "2147483648"}) {
        INFO("--shard-tokens ", std::string(value));
        CHECK(contains(refusal(tokens(value)), std::string("--shard-tokens ") + value));
    }
}

TEST_CASE("tokenize takes any number of inputs, and after -- names that look like options") {
    const Options o = parse({"tokenize", "a.txt", "--output", "d", "[b,c]", "--train-bpe=300", "d e"});
    CHECK(o.inputs == std::vector<std::string>{"a.txt", "[b,c]", "d e"});
    CHECK(o.train_bpe == 300);
    CHECK(o.val_fraction == 0.05);
    CHECK(o.shard_tokens == 100000000);
    CHECK(o.text_key == "text");
    CHECK(o.split == "none");
    const Options dashes = parse({"tokenize", "--output", "d", "--train-bpe", "300", "a", "--", "--b", "-"});
    CHECK(dashes.inputs == std::vector<std::string>{"a", "--b", "-"});
}

TEST_CASE("the help of a command lists each of its options once, with unit, text and default") {
    for (const char* command : {"train", "generate", "eval", "plan", "tokenize"}) {
        CAPTURE(command);
        const Options help = parse({command, "--help"});
        CHECK(help.command == Command::help);
        CHECK(help.text.starts_with("usage: train_gpt2 "));
        Options o = train({});
        for (Command c : {Command::train, Command::generate, Command::eval, Command::plan, Command::tokenize})
            if (std::string(command) == command_name(c)) o.command = c;
        const auto all = settings(o);
        CHECK(all.size() >= 6);
        std::set<std::string> names;
        for (const Setting& s : all) {
            CAPTURE(s.name);
            CHECK(names.insert(s.name).second);
            if (o.command == Command::plan) continue;  // its help lists only a part of its options
            CHECK(contains(help.text, "--" + s.name));
            CHECK(contains(help.text, "\n" + s.section + ":\n"));
        }
    }
    const std::string help = parse({"--help"}).text;
    CHECK(contains(
        help,
        "  -b,--micro-batch SEQUENCES|auto   sequences per rank and forward pass (B); auto = fast, and fits [4]\n"));
    CHECK(contains(help, "  -l,--lr RATE                      peak learning rate [0.0006]\n"));
    CHECK(contains(help, "  --eps VALUE                       AdamW's epsilon [1e-08]\n"));
    CHECK(parse({"-h"}).text == help);
}

TEST_CASE("the help of plan lists the options that it uses, and plan accepts all others of train") {
    const std::string help = parse({"plan", "--help"}).text;
    int shown = 0;
    for (const Setting& s : settings(parse({"plan"})))
        shown += contains(help, "--" + s.name + " ") || contains(help, "--" + s.name + "[=");
    CHECK(shown == 37);
    for (const char* name : {"--model", "--micro-batch", "--global-batch", "--recompute", "--world-size", "--steps"})
        CHECK(contains(help, name));
    for (const char* name : {"--lr", "--val-every", "--sample-prompt", "--rendezvous", "--trace"})
        CHECK_FALSE(contains(help, name));
    CHECK(contains(help, "The other options of train_gpt2 train are accepted and have no effect."));
    CHECK(parse({"plan", "--lr", "3e-3"}).lr == 3e-3);
}

TEST_CASE("an unknown command is refused, and the message lists all and suggests the nearest") {
    CHECK(contains(refusal({"trian"}),
                   "unknown command 'trian'; did you mean train? (the commands are train, generate, eval, plan, "
                   "tokenize, verify and explain, each with its own --help; train needs no name)"));
    CHECK(contains(refusal({"tokenise", "x.txt"}), "did you mean tokenize?"));
    CHECK(contains(refusal({"help"}), "unknown command 'help' (the commands are train"));
    CHECK(contains(refusal({"my.txt"}), "'my.txt' is not a command: every option has its name"));
}

TEST_CASE("an empty value of any option is quoted in messages") {
    const std::vector<std::vector<const char*>> commands = {{"train", "--train-data", "x.bin"},
                                                            {"plan"},
                                                            {"generate", "--init", "d"},
                                                            {"eval", "--init", "d", "--val-data", "x.bin"},
                                                            {"tokenize", "a", "--output", "d", "--train-bpe", "300"}};
    int refused = 0;
    for (const std::vector<const char*>& command : commands)
        for (const Setting& setting : settings(parse(command))) {
            const std::string option = "--" + setting.name;
            std::vector<const char*> arguments = command;
            const std::string empty = option + "=";
            arguments.push_back(empty.c_str());
            const std::string text = refusal(arguments);
            CAPTURE(text);
            CHECK_FALSE(contains(text, "  "));
            CHECK_FALSE(contains(text, option + " must "));
            refused += contains(text, "''");
        }
    CHECK(refused > 50);
}

TEST_CASE("--help and --version work despite errors in other options") {
    CHECK(parse({"--model", "d13", "--help"}).command == Command::help);
    CHECK(contains(parse({"--version"}).text, "train_gpt2 0.1.0"));
    CHECK(parse({"--version"}).text.ends_with("\n"));
}

TEST_CASE("settings and their JSON have the values of the options") {
    Options o = train({"--lr", "1e-3", "--resume", "--sample-prompt", "say \"hi\"\n"});
    const auto json = nlohmann::json::parse(options_json(o));
    CHECK(json["lr"] == 1e-3);
    CHECK(json["resume"] == true);
    CHECK(json["micro-batch"] == 4);
    CHECK(json["master-weights"] == "on");
    CHECK(json["global-batch"] == 524288);
    CHECK(json["sample-prompt"] == "say \"hi\"\n");
    CHECK(json["train-data"] == "x.bin");
    CHECK(json.size() == settings(o).size());
    for (const Setting& s : settings(o)) {
        CAPTURE(s.name);
        if (s.name == "lr") CHECK((s.value == "0.001" && !s.is_default && s.section == "optimizer"));
        if (s.name == "micro-batch") CHECK((s.value == "4" && s.is_default));
    }
    o.steps = 77;  // values that are computed later are in the settings too
    CHECK(nlohmann::json::parse(options_json(o))["steps"] == 77);
    CHECK(nlohmann::json::parse(options_json(train({"--sample-prompt", "\xff"})))["sample-prompt"] == "\xef\xbf\xbd");
}

TEST_CASE("size and sequence length of the model follow from the options") {
    CHECK(model_config(train({})) == GPT2Config{1024, 50257, 12, 12, 768});
    CHECK(model_config(train({"--seq-len", "256"})) == GPT2Config{1024, 50257, 12, 12, 768});
    CHECK(model_config(train({"--seq-len", "2048", "--model", "d48"})) == GPT2Config{2048, 50257, 48, 25, 1600});
    const Options small = train({"--layers", "6", "--heads", "6", "--channels", "384", "--seq-len", "256"});
    CHECK(model_config(small, 4096) == GPT2Config{256, 4096, 6, 6, 384});
    CHECK(model_config(train({"--vocab-size", "300"}), 4096).V == 300);
}

TEST_CASE("steps and warmup that are not given follow from the data") {
    Options o = train({});
    resolve_steps(o, 18865);
    CHECK(o.steps == 18865);
    CHECK(o.warmup == 700);
    o = train({"--steps", "500"});
    resolve_steps(o, 18865);
    CHECK(o.steps == 500);
    CHECK(o.warmup == 50);
    o = train({"--steps", "500", "--warmup", "0"});
    resolve_steps(o, 0);
    CHECK(o.warmup == 0);
    o = train({"--steps", "500", "--warmup", "501"});
    CHECK_THROWS_WITH_AS(resolve_steps(o, 1), "--warmup 501 is longer than the run of 500 steps; try --warmup 50",
                         Error);
    o = train({});
    CHECK_THROWS_WITH_AS(resolve_steps(o, 0), doctest::Contains("too short for one step"), Error);
}

TEST_CASE("--gpus, --ranks, --nnodes and --max-restarts are checked together") {
    CHECK(train({"--gpus", "all", "--max-restarts", "3"}).max_restarts == 3);
    CHECK(train({"--gpus", "2", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "h0:1"}).node_rank == 1);
    const auto refused = [](std::vector<const char*> arguments, const char* text) {
        arguments.insert(arguments.begin(), {"--train-data", "x"});
        return contains(refusal(arguments), text);
    };
    CHECK(refused({"--gpus", ""}, "--gpus is empty"));
    CHECK(refused({"--gpus", "2", "--ranks", "2"}, "give one"));
    CHECK(refused({"--node-rank", "1"}, "--node-rank needs --gpus"));
    CHECK(refused({"--ranks", "2", "--nnodes", "2"}, "--nnodes 2 needs --gpus"));
    const std::vector<const char*> plan = {"train_gpt2", "plan", "--world-size", "4", "--nnodes", "2"};
    CHECK(parse_options(int(plan.size()), plan.data()).nnodes == 2);
    CHECK(refused({"--max-restarts", "1"}, "--max-restarts needs --gpus or --ranks"));
    CHECK(refused({"--gpus", "2", "--nnodes", "2", "--max-restarts", "1"}, "torchrun restarts"));
    CHECK(refused({"--gpus", "2", "--max-restarts", "1", "--output", ""}, "needs checkpoints"));
    CHECK(refused({"--ranks", "2", "--max-restarts", "1", "--checkpoint-every", "0"}, "needs checkpoints"));
    CHECK(refused({"--gpus", "2", "--share-gpu"}, "--share-gpu is for ranks that mpirun starts"));
}

TEST_CASE("--keep-best needs a validation") {
    CHECK(train({"--keep-best", "--val-data", "y"}).keep_best);
    CHECK(contains(refusal({"--train-data", "x", "--keep-best"}), "--keep-best needs validation losses"));
    CHECK(contains(refusal({"--train-data", "x", "--val-data", "y", "--val-every", "0", "--keep-best"}),
                   "--keep-best needs validation losses"));
    CHECK(parse({"plan", "--keep-best"}).keep_best);
}

TEST_CASE("verify takes directories") {
    const Options o = parse({"verify", "out", "other", "--quiet"});
    CHECK(o.command == Command::verify);
    CHECK(o.inputs == std::vector<std::string>{"out", "other"});
    CHECK(o.quiet);
    CHECK(refusal({"verify"}) == "no DIR: name a checkpoint, a run's output, or a Hugging Face directory");
    CHECK(contains(parse({"verify", "--help"}).text, "usage: train_gpt2 verify DIR... [options]"));
    CHECK(contains(refusal({"verify", "out", "--steps", "3"}), "verify has no option --steps"));
}

TEST_CASE("--resume also takes the word strict, after an equals sign only") {
    CHECK_FALSE(train({"--resume"}).resume_strict);
    const Options strict = train({"--resume=strict"});
    CHECK(strict.resume);
    CHECK(strict.resume_strict);
    CHECK(nlohmann::json::parse(options_json(strict))["resume"] == "strict");
    CHECK_FALSE(train({"--resume=strict", "--resume"}).resume_strict);  // the last one counts
    CHECK(train({"--resume", "--resume=strict"}).resume_strict);
    CHECK_FALSE(train({"--resume=strict", "--resume=0"}).resume);
    const Options next = train({"--resume=strict", "--steps", "7"});
    CHECK((next.resume_strict && next.steps == 7));
    CHECK(contains(refusal({"--train-data", "x", "--resume=maybe"}), "--resume: 'maybe' is neither 0, 1 nor strict"));
    CHECK(refusal({"--train-data", "x", "--resume", "strict"}) ==
          "unexpected argument 'strict'; did you mean --resume=strict?");
    CHECK(contains(parse({"--help"}).text, "--resume[=strict] "));
}

TEST_CASE("--max-time is a duration, or a number of seconds") {
    const std::pair<const char*, double> good[] = {{"3h50m", 13800}, {"90s", 90},         {"45m", 2700},  {"2h", 7200},
                                                   {"1d", 86400},    {"1d2h3m4s", 93784}, {"1.5h", 5400}, {"90", 90},
                                                   {"0", 0},         {"1e+06", 1e6},      {"0.5", 0.5}};
    for (const auto& [text, seconds] : good) CHECK(train({"--max-time", text}).max_time == seconds);
    CHECK(train({}).max_time == 0.0);
    for (const char* bad : {"", "h", "5x", "3:50:00", "3h50", "50m3h", "1h1h", "1.2.3h", "3H", "3 h", "-5m", "1h "}) {
        CAPTURE(bad);
        CHECK(refusal({"--train-data", "x", "--max-time", bad}) ==
              format("--max-time: '%s' is not a time; give days, hours, minutes or seconds, as in 1d, 3h50m or 90s",
                     bad));
    }
    CHECK(refusal({"--train-data", "x", "--max-time", "-5"}) == "--max-time -5 must be at least 0 and at most 1e+09");
    CHECK(contains(refusal({"--train-data", "x", "--max-time", "nan"}), "--max-time nan must be"));
    CHECK(contains(refusal({"--train-data", "x", "--max-time", "99999d"}), "must be at least 0 and at most 1e+09"));
    CHECK(contains(refusal({"--train-data", "x", "--max-time", "1h", "--output", ""}), "--max-time saves before"));
    CHECK(contains(refusal({"--train-data", "x", "--max-time", "1h", "--checkpoint-every", "0"}), "needs an --output"));
}
