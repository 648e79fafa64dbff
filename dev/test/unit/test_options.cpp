// test_options.cpp: tests the command line: the arguments that are accepted, the messages of those that are refused,
// the files of --config and --resume, and that the help and the settings come from the same declarations.
#include "train/options.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "support/parse.h"
#include "support/temporary.h"

TEST_CASE("the command is the first argument, and train by default") {
    CHECK(train({}).command == Command::train);
    CHECK(parse({"train", "--train-data", "x"}).command == Command::train);
    CHECK(parse({"generate", "--init", "d"}).command == Command::generate);
    CHECK(parse({"eval", "--init", "d", "--val-data", "x"}).command == Command::eval);
    CHECK(parse({"plan"}).command == Command::plan);
    CHECK(parse({"tokenize", "a.txt", "--output", "d", "--train-bpe", "300"}).command == Command::tokenize);
    CHECK(contains(refusal({"trian"}), "unknown command 'trian'; the commands are train, generate, eval, plan"));
}

TEST_CASE("the defaults of training are GPT-2's recipe") {
    const Options o = train({});
    CHECK((o.model == "d12" && o.default_model && o.precision == "auto" && o.master_weights == "on"));
    CHECK((o.global_batch == 524288 && o.micro_batch == 4 && o.steps == 0));
    CHECK((o.lr == 6e-4 && o.weight_decay == 0.1 && o.beta1 == 0.9 && o.beta2 == 0.95 && o.eps == 1e-8));
    CHECK((o.grad_clip == 1.0 && o.schedule == "cosine" && o.spike_z == 0.0 && o.on_nan == "halt"));
    CHECK((o.output == "out" && o.checkpoint_async == "on" && o.timeout == 600.0 && o.check_replicas == 1000));
    CHECK_FALSE((o.resume || o.quiet));
}

TEST_CASE("the global batch is by default 524,288 tokens for named sizes, one micro-batch for others") {
    CHECK(train({"--model", "gpt2-xl"}).global_batch == 524288);
    CHECK(train({"--layers", "2", "--heads", "2", "--channels", "64"}).global_batch == 0);
    CHECK(train({"--init", "d"}).global_batch == 0);
    CHECK(train({"--model", "d12", "--global-batch", "0"}).global_batch == 0);
}

TEST_CASE("a value follows a space or an equals sign, and the last value is used") {
    CHECK(train({"--micro-batch", "auto"}).micro_batch == 0);
    CHECK(train({"--ranks", "all"}).ranks == -1);
    CHECK(train({"--lr=1e-3", "--lr", "2e-3"}).lr == 2e-3);
    CHECK(train({"--output=", "--lr", "2"}).output == "");
    CHECK(train({"--output", ""}).output == "");
    CHECK(train({"--sample-prompt", "-5 degrees"}).sample_prompt == "-5 degrees");
    CHECK(train({"--sample-prompt=a=b"}).sample_prompt == "a=b");
    for (const char* text : {"[1,2]", "{}", "%%", "", "true", "-nk"})
        CHECK(train({"--sample-prompt", text}).sample_prompt == text);
    CHECK(train({"--seed", "18446744073709551615"}).seed == 18446744073709551615u);
    CHECK(train({"--seq-len", "010"}).seq_len == 10);
    CHECK(parse({"generate", "--init", "d", "--prompt", "--"}).prompt == "--");
}

TEST_CASE("a flag alone is on, and takes a value after an equals sign") {
    CHECK(train({"--quiet", "--quiet"}).quiet);
    CHECK(train({"--quiet=1"}).quiet);
    CHECK_FALSE(train({"--quiet=0"}).quiet);
    CHECK_FALSE(train({"--quiet=false"}).quiet);
    CHECK(refusal({"-i", "x", "--keep-best=maybe"}) == "--keep-best: 'maybe' is neither true nor false");
}

TEST_CASE("llm.c's one-letter options mean the same here") {
    const Options o = parse({"-i", "a",     "-j", "b",    "-o", "c",  "-e", "gpt2:d24", "-b", "8",   "-t", "512",
                             "-d", "16384", "-l", "3e-4", "-u", "7",  "-q", "0.2",      "-c", "0.3", "-v", "11",
                             "-s", "12",    "-g", "13",   "-x", "14", "-n", "15",       "-z", "1",   "-k", "wsd"});
    CHECK((o.train_data == "a" && o.val_data == "b" && o.output == "c" && o.model == "d24"));
    CHECK((o.micro_batch == 8 && o.seq_len == 512 && o.global_batch == 16384));
    CHECK((o.lr == 3e-4 && o.warmup == 7 && o.final_lr_fraction == 0.2 && o.weight_decay == 0.3));
    CHECK((o.val_every == 11 && o.sample_every == 12 && o.sample_tokens == 13 && o.steps == 14));
    CHECK((o.checkpoint_every == 15 && o.zero == 1 && o.schedule == "wsd"));
    CHECK(parse({"-i", "a", "-y", "1", "-o", "no/such"}).resume);
    CHECK_FALSE(train({"-y", "0"}).resume);
    CHECK(train({"-x", "-1"}).steps == 0);  // one epoch
    CHECK(train({"-e", "out/d12/step_001000"}).init == "out/d12/step_001000");
    CHECK(contains(refusal({"-i", "a", "-e", "gpt2_124M_bf16.bin"}), "llm.c's model files cannot be read"));
}

TEST_CASE("numbers with other characters after them or outside of their range, and unknown words, are refused") {
    const auto bad = [](const char* name, const char* value) { return refusal({"--train-data", "x", name, value}); };
    CHECK(bad("--lr", "0.1x") == "--lr: '0.1x' is not a number");
    for (const char* text : {"", " 1", "nan", "inf", "0x1"})
        CHECK(bad("--lr", text) == format("--lr: '%s' is not a number", text));
    CHECK(bad("--lr", "-1e-3") == "--lr -1e-3 must be at least 0 and at most 1e+30");
    CHECK(bad("--lr", "1e999") == "--lr 1e999 must be at least 0 and at most 1e+30");
    CHECK(bad("--beta1", "1") == "--beta1 1 must be at least 0 and at most 0.999999999");
    CHECK(bad("--steps", "1e3") == "--steps: '1e3' is not a whole number");
    CHECK(bad("--steps", "3000000000") == "--steps 3000000000 must be at least -1 and at most 2147483647");
    CHECK(bad("--steps", "99999999999999999999") == "--steps: 99999999999999999999 is out of range");
    CHECK(bad("--micro-batch", "automatic") == "--micro-batch: 'automatic' is not a whole number");
    CHECK(bad("--micro-batch", "SEQUENCES") == "--micro-batch: 'SEQUENCES' is not a whole number");
    CHECK(bad("--micro-batch", "4294967297") == "--micro-batch: 4294967297 is out of range");
    CHECK(bad("--check-replicas", "-1") == "--check-replicas -1 must be at least 0");
    CHECK(bad("--seed", "-1") == "--seed: '-1' is not a whole number, 0 or more");
    CHECK(bad("--zero", "4") == "--zero 4 must be at least 0 and at most 3");
    CHECK(bad("--precision", "fp16") == "--precision fp16 is not known; give fp32|bf16|fp8|auto");
    CHECK(bad("--schedule", "cosine|linear") ==
          "--schedule 'cosine|linear' is not known; give cosine|linear|constant|wsd");
    CHECK(bad("--schedule", "") == "--schedule '' is not known; give cosine|linear|constant|wsd");
    CHECK(bad("--on-nan", "rollback") == "--on-nan rollback is not known; give halt|skip");
    CHECK(refusal({"eval", "--init", "d", "--val-data", "v", "--precision", "fp8"}) ==
          "--precision fp8 is not known; give fp32|bf16|auto");
}

TEST_CASE("an unknown option is refused, and the message suggests the nearest one") {
    CHECK(refusal({"--mirco-batch", "4"}) == "unknown option --mirco-batch; did you mean --micro-batch? (see --help)");
    CHECK(contains(refusal({"--mirco-batch=4"}), "unknown option --mirco-batch; did you mean --micro-batch?"));
    CHECK(contains(refusal({"--stesp", "4"}), "did you mean --steps?"));
    CHECK(contains(refusal({"--weight_decay", "4"}), "did you mean --weight-decay?"));
    CHECK(contains(refusal({"--batch", "4"}), "did you mean --micro-batch?"));
    CHECK(refusal({"-output=x"}) == "-output=x: a long option takes two dashes: --output");
    CHECK(refusal({"-lr", "1e-3"}) == "-lr: a long option takes two dashes: --lr");
    CHECK(refusal({"--xyzzy"}) == "unknown option --xyzzy (see --help)");
    CHECK(refusal({"-Q"}) == "unknown option -Q (see --help)");
    CHECK(contains(refusal({"tokenize", "a", "--steps", "4"}), "unknown option --steps"));
}

TEST_CASE("an option that is gone, or another trainer's, is refused with what to use") {
    const auto use = [](std::vector<const char*> arguments) {
        const std::string text = refusal(arguments);
        return text.substr(std::min(text.size(), text.find("; use ") + 6));
    };
    CHECK(refusal({"--gpus", "2"}) ==
          "there is no --gpus; use --ranks N, or --ranks all; CUDA_VISIBLE_DEVICES chooses the GPUs");
    CHECK(use({"--hash-check=5"}) == "--check-replicas");
    CHECK(use({"generate", "--timeout-step", "5"}) == "--timeout");
    CHECK(refusal({"--max_iters", "5"}) == "there is no --max_iters; use --steps");
    CHECK(use({"--max-iters", "5"}) == "--steps");
    CHECK(use({"--learning_rate", "5"}) == "--lr");
    CHECK(use({"--block_size", "5"}) == "--seq-len");
    CHECK(contains(use({"--batch_size", "5"}), "--micro-batch, in sequences per rank"));
    CHECK(contains(use({"--gradient_accumulation_steps", "5"}), "--global-batch, in tokens per step"));
    CHECK(use({"-m", "5"}) == "--val-batches");
    CHECK(use({"--resume=strict"}).starts_with("--resume, which warns of a damaged checkpoint"));
    CHECK(contains(use({"verify", "out"}), "--resume or --init"));
    // Everything that the messages name exists.
    const std::string help = parse({"--help"}).text;
    for (const char* option : {"--ranks", "--check-replicas", "--timeout", "--spike-z", "--quiet", "--trace"})
        CHECK(contains(help, option));
}

TEST_CASE("missing values and stray arguments are refused") {
    CHECK(refusal({"--train-data", "x", "--lr"}) == "--lr needs a value (see --help)");
    CHECK(refusal({"--train-data", "x", "-n"}) == "--checkpoint-every needs a value (see --help)");
    CHECK(refusal({"--train-data", "x", "--output", "--lr", "3"}) ==
          "--output needs a value (DIR), but the option --lr follows");
    for (const char* stray : {"stray", "generate", "", "-"})
        CHECK(contains(refusal({"--train-data", "x", stray}), format("unexpected argument '%s'", stray)));
}

TEST_CASE("options that contradict each other or need another one are refused") {
    const auto bad = [](std::vector<const char*> arguments) {
        arguments.insert(arguments.begin(), {"--train-data", "x"});
        return refusal(arguments);
    };
    CHECK(contains(bad({"--layers", "2"}), "give --layers, --heads and --channels together, not --layers 2 --heads 0"));
    CHECK(contains(bad({"--model", "d12", "--layers", "2", "--heads", "2", "--channels", "64"}), "two ways"));
    CHECK(contains(bad({"--init", "d", "--model", "d12"}), "has its own shape"));
    CHECK(contains(bad({"-e", "a/b", "--init", "c"}), "two places to start from"));
    CHECK(contains(bad({"--layers", "2", "--heads", "3", "--channels", "64"}), "try --channels 66"));
    CHECK(contains(bad({"--model", "d13"}), "--model d13 is not known"));
    CHECK(contains(bad({"--resume", "--output", ""}), "--resume needs the --output"));
    CHECK(contains(bad({"--precision", "fp32", "--master-weights", "off"}), "needs bf16 weights"));
    CHECK(bad({"--precision", "fp8", "--master-weights", "off"}) == "");
    CHECK(contains(bad({"--sequence-parallel"}), "needs --tensor-parallel 2 or more"));
    CHECK(contains(bad({"--tensor-parallel", "2", "--precision", "fp8"}), "does not combine"));
    CHECK(contains(bad({"--keep-best"}), "--keep-best needs validation losses"));
    CHECK(bad({"--keep-best", "--val-data", "y"}) == "");
    CHECK(contains(refusal({}), "--train-data is missing"));
    CHECK(contains(refusal({"generate"}), "--init is missing"));
    CHECK(contains(refusal({"eval", "--init", "d"}), "--val-data is missing"));
    CHECK(contains(refusal({"tokenize", "--output", "d", "--train-bpe", "300"}), "no INPUT"));
    CHECK(contains(refusal({"tokenize", "a", "--train-bpe", "300"}), "--output is missing"));
    CHECK(contains(refusal({"tokenize", "a", "--output", "d"}), "give one of --train-bpe"));
    CHECK(contains(
        refusal({"tokenize", "a", "--output", "d", "--train-bpe", "300", "--val-tokens", "9", "--val-fraction", "0"}),
        "two ways to hold out text"));
}

TEST_CASE("tokenize takes any number of inputs, and after -- names that look like options") {
    const Options o = parse({"tokenize", "a.txt", "--output", "d", "[b,c]", "--train-bpe=300", "d e"});
    CHECK(o.inputs == std::vector<std::string>{"a.txt", "[b,c]", "d e"});
    CHECK((o.val_fraction == 0.05 && o.shard_tokens == 100000000 && o.text_key == "text" && o.split == "none"));
    const Options other =
        parse({"tokenize", "--output", "d", "--train-bpe", "300", "--val-tokens", "9", "a", "--", "--b", "-"});
    CHECK(other.inputs == std::vector<std::string>{"a", "--b", "-"});
    CHECK((other.val_fraction == 0.0 && other.val_tokens == 9));
    CHECK(contains(refusal({"tokenize", "a", "--output", "d", "--train-bpe", "300", "--shard-tokens", "2147483648"}),
                   "must be at least 1 and at most 2147483647"));
}

TEST_CASE("the help lists each option once, with unit, text and default, within 120 columns") {
    for (const char* command : {"train", "generate", "eval", "plan", "tokenize"}) {
        CAPTURE(command);
        const Options help = parse({command, "--model", "d13", "--help"});  // despite errors in other options
        CHECK(help.command == Command::help);
        CHECK(help.text.starts_with("usage: train_gpt2 "));
        std::istringstream lines(help.text);
        for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 120);
    }
    const std::string help = parse({"--help"}).text;
    CHECK(contains(help,
                   "  -b,--micro-batch SEQUENCES|auto   sequences per rank and forward pass (B); auto = fast, and "
                   "fits [4]\n"));
    CHECK(contains(help, "  --eps VALUE                       AdamW's epsilon [1e-08]\n"));
    CHECK(parse({"-h"}).text == help);
    const auto options = nlohmann::json::parse(options_json(train({})));
    for (const auto& [name, value] : options.items()) CHECK(contains(help, "--" + name));
    CHECK(options.size() <= 60);
    CHECK(parse({"--version"}).text.starts_with("train_gpt2 "));
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
    const auto resolved = [](Options o, int64_t epoch) {
        resolve_steps(o, epoch);
        return std::pair(o.steps, o.warmup_steps);
    };
    CHECK(resolved(train({}), 18865) == std::pair<int64_t, int64_t>(18865, 700));
    CHECK(resolved(train({"--steps", "500"}), 18865) == std::pair<int64_t, int64_t>(500, 50));
    CHECK(resolved(train({"--steps", "500", "--warmup", "0"}), 0) == std::pair<int64_t, int64_t>(500, 0));
    CHECK_THROWS_WITH_AS(resolved(train({"--steps", "500", "--warmup", "501"}), 1),
                         "--warmup 501 is longer than the run of 500 steps; try --warmup 50", Error);
    CHECK_THROWS_WITH_AS(resolved(train({}), 0), doctest::Contains("too short for one step"), Error);
}

// ---- run.toml, --config and --resume

// Returns the options that a resume of the run in `out` reads.
static Options resumed(const TemporaryDirectory& out, std::vector<const char*> more = {}) {
    more.insert(more.begin(), {"--resume", "--output", out.path.c_str()});
    return parse(more);
}

static Options with_run_toml(const std::string& text, std::vector<const char*> more = {}) {
    const TemporaryDirectory out;
    write_bytes(out / "run.toml", text);
    return resumed(out, more);
}

TEST_CASE("every string that a shell can pass comes back through run.toml and through --config") {
    const std::string pieces[] = {"#",   "\"",      "'",      "\n", ",", "[",    "]",    "\\",   " ",
                                  "\t",  "\r",      "=",      "{",  "}", "%%",   "a",    "B",    "-",
                                  "\\n", "\\u0023", "\"\"\"", "é",  "😀", "\x01", "\x7f", "\xff", ";"};
    const TemporaryDirectory out;
    std::minstd_rand random;
    // Four strings at a time: the parser of a start has 60 options, and a sanitizer makes each start slow.
    const std::array<std::string Options::*, 4> fields = {&Options::sample_prompt, &Options::train_data,
                                                          &Options::val_data, &Options::tokenizer};
    const char* const names[] = {"--sample-prompt", "--train-data", "--val-data", "--tokenizer"};
    for (int i = 0; i < 1250; i++) {
        Options o = train({});
        std::vector<const char*> arguments;
        for (int k = 0; k < 4; k++) {
            std::string text;
            for (uint64_t left = random() % 8; left > 0; left--) text += pieces[random() % std::size(pieces)];
            if (text.empty() && k == 1) text = "x";  // --train-data must be given
            o.*fields[k] = text;
            if (!text.starts_with("--")) arguments.insert(arguments.end(), {names[k], (o.*fields[k]).c_str()});
        }
        write_bytes(out / "run.toml", run_toml(o));
        const Options back = resumed(out);
        const Options given = train(arguments);
        const Options config = i % 10 == 0 ? train({"--config", (out / "run.toml").c_str()}) : o;
        for (int k = 0; k < 4; k++) {
            const std::string& text = o.*fields[k];
            CAPTURE(text);
            CHECK(back.*fields[k] == text);
            if (k != 1) CHECK(config.*fields[k] == text);  // train() gives --train-data itself
            if (!text.starts_with("--")) CHECK(given.*fields[k] == text);
        }
    }
}

TEST_CASE("every option comes back through run.toml, but not those of one start") {
    const Options o = train({"--layers",    "2",
                             "--heads",     "2",
                             "--channels",  "64",
                             "--lr",        "0.00012345678901234567",
                             "--eps",       "1e-9",
                             "--seed",      "18446744073709551615",
                             "--keep-best", "--val-data",
                             "v",           "--schedule",
                             "wsd",         "--stop-after",
                             "5",           "--quiet",
                             "--trace",     "t",
                             "--ranks",     "2"});
    const Options back = with_run_toml(run_toml(o));
    CHECK(run_toml(back) == run_toml(o));
    const std::set<std::string> of_one_start = {"resume", "config", "stop-after", "ranks", "trace", "quiet", "output"};
    const auto options = nlohmann::json::parse(options_json(o));
    for (const auto& [name, value] : options.items()) {
        CAPTURE(name);
        CHECK(contains(run_toml(o), "\n" + name + " = ") == !of_one_start.contains(name));
    }
    CHECK((back.stop_after == 0 && !back.quiet && back.trace.empty() && back.ranks == 0));
    CHECK(back.lr == o.lr);
    CHECK(contains(back.taken, " --lr 0.00012345678901234567 "));
    CHECK((back.default_model && !back.default_global_batch));  // the shape is the checkpoint's
    CHECK(changed_options(back) == "");
    CHECK(with_run_toml("train-data = 'x'\noutput = 'y'\ntrace = 'z'\n").trace == "");
}

TEST_CASE("the command line comes before --config, and --config before run.toml") {
    const TemporaryDirectory out;
    write_bytes(out / "run.toml", "train-data = 'x'\nlr = 0.1\nsteps = 5\nseed = 7\nmodel = 'd12'\n");
    write_bytes(out / "more.toml",
                "# comment\n\n lr=0.2 # peak\nsteps = 1_000\nsample-prompt = \"a # \\u00e9\\n\" # b\r\n");
    const Options o = resumed(out, {"--config", (out / "more.toml").c_str(), "--lr", "0.3"});
    CHECK((o.lr == 0.3 && o.steps == 1000 && o.seed == 7 && o.sample_prompt == "a # é\n"));
    CHECK(changed_options(o) == "--steps 1000 (was 5), --lr 0.3 (was 0.1)");
    const Options other = resumed(out, {"--model", "d24"});
    CHECK((other.model == "d24" && !other.default_model));
    CHECK(resumed(out, {"--layers", "1", "--heads", "1", "--channels", "16"}).model == "");
}

TEST_CASE("an invalid file is refused, and the message names it") {
    const auto error = [](const std::string& text, std::vector<const char*> more = {}) -> std::string {
        try {
            with_run_toml("train-data = 'x'\n" + text, more);
        } catch (const Error& e) {
            const std::string what = e.what();
            return std::to_string(e.exit_code) + " " + what;
        }
        return "";
    };
    CHECK(contains(error("lr = 1e31"), "65 --lr 1e31 must be at least 0 and at most 1e+30 (from /"));
    CHECK(error("lr = 1e31", {"--lr", "1"}) == "");
    CHECK(error("lr = 1", {"--lr", "1e31"}) == "2 --lr 1e31 must be at least 0 and at most 1e+30");
    for (const char* line : {"lr", "lr =", "lr = # 5", "= 5", "lr = 'x", "sample-prompt = \"x", "sample-prompt = \"x\\",
                             "sample-prompt = \"x\\q\"", "sample-prompt = \"\\u00\"", "sample-prompt = \"\\ud800\"",
                             "sample-prompt = \"\\u0000\"", "lr = '1' 2", "seed = -1", "schedule = ''",
                             "keep-best = maybe", "[train]", "xyzzy = 1", "hash-check = 5", "lr = 1\nlr = 1"}) {
        CAPTURE(line);
        CHECK(contains(error(line), "65 "));
        CHECK(contains(error(line), "run.toml"));
    }
    CHECK(contains(error("hash-check = 5"), "use --check-replicas"));
    CHECK(contains(refusal({"--resume", "--output", "no/such"}), "no/such/run.toml"));
    CHECK(train({"--resume", "--output", "no/such"}).resume);
    CHECK(parse({"plan", "--resume", "--output", "no/such"}).resume);
}

TEST_CASE("relative paths of a run that was started in another directory become absolute") {
    const TemporaryDirectory there;
    const std::string quoted = "directory = '" + there.path + "'\n";
    const Options o = with_run_toml(quoted + "train-data = 'a/*.bin'\nval-data = '/b'\ntokenizer = 't'\ninit = ''\n");
    CHECK(o.train_data == there.path + "/a/*.bin");
    CHECK(o.val_data == "/b");
    CHECK(o.tokenizer == there.path + "/t");
    CHECK(o.init == "");
    CHECK(with_run_toml("directory = '/no/such'\ntrain-data = 'a'\n").train_data == "a");
    const std::string odd = there / "[x]";
    std::filesystem::create_directory(odd);
    CHECK(with_run_toml("directory = '" + odd + "'\ntrain-data = 'a'\n").train_data == there / "\\[x\\]/a");
    // Every option that names a file is declared as a path.
    const std::string help = parse({"--help"}).text;
    const auto options = nlohmann::json::parse(options_json(train({})));
    for (const auto& [name, value] : options.items()) {
        CAPTURE(name);
        bool names_file = false;
        for (const char* unit : {" GLOB", " DIR", " FILE"}) names_file |= contains(help, "--" + name + unit);
        const bool stored = contains(run_toml(train({})), "\n" + name + " = ");
        if (stored && names_file)
            CHECK(contains(run_toml(with_run_toml(quoted + "train-data = 'y'\n" +
                                                  (name == "train-data" ? "" : name + " = 'rel'\n"))),
                           name + " = \"" + there.path + "/"));
    }
}

TEST_CASE("a run of version 0.2.0 is resumed from run.json") {
    const TemporaryDirectory out;
    write_bytes(out / "run.json",
                R"({"version": "0.2.0", "directory": "/no/such", "options": {"train-data": "x#\"'\u00e9",
        "layers": 1, "heads": 1, "channels": 16, "model": "", "lr": 1e-3, "hash-check": 50, "on-nan": "rollback",
        "spike-z": 6, "on-spike": "warn", "checkpoint-async": "auto", "gpus": "2", "keep-best": false, "warmup": -1,
        "timeout-step": -1, "output": "elsewhere", "resume": false, "micro-batch": "auto"}})");
    const Options o = resumed(out);
    CHECK((o.train_data == "x#\"'é" && o.layers == 1 && o.lr == 1e-3 && o.check_replicas == 50 && o.on_nan == "skip"));
    CHECK((o.spike_z == 0.0 && o.checkpoint_async == "on" && o.warmup == -1 && o.micro_batch == 0));
    CHECK(o.output == out.path);
    write_bytes(out / "run.json", R"({"options": {"train-data": 7, "lr": null}})");
    CHECK_THROWS_WITH_AS(resumed(out), doctest::Contains("run.json"), Error);
}

TEST_CASE("the settings as JSON have the values of the options") {
    const auto json =
        nlohmann::json::parse(options_json(train({"--sample-prompt", "say \"hi\"\n\xff", "--keep", "2"})));
    CHECK(json["sample-prompt"] == "say \"hi\"\n\xef\xbf\xbd");
    CHECK((json["keep"] == 2 && json["lr"] == 6e-4 && json["keep-best"] == false && json["schedule"] == "cosine"));
}
