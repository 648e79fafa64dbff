// test_options.cpp: tests the command line: the arguments that are accepted, the messages of those that are refused,
// the files of --config and --resume, and that the help and the settings come from the same declarations.
#include "train/options.h"

#include <doctest/doctest.h>

#include <cmath>
#include <iterator>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/json.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"
#include "text/text_reader.h"

static std::vector<const char*> pointers(const std::vector<std::string>& words) {
    std::vector<const char*> pointers;
    for (const std::string& word : words) pointers.push_back(word.c_str());
    return pointers;
}

// rows: arguments, which blanks separate, and a part of the message.
static void expect_refused(const std::string& first_words,
                           const std::vector<std::pair<std::string, std::string>>& rows) {
    for (const auto& [more_words, message_part] : rows) {
        std::istringstream text(first_words + more_words);
        const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
        const std::string message = refusal(pointers(words)), part = message_part;
        CHECK_MESSAGE(contains(message, part), message << " instead of " << part);
    }
}

static nlohmann::json settings(const Options& options) {
    return nlohmann::json::parse(json_text(options_json(options)));
}

TEST_CASE("the first argument is the command, train by default, and the defaults are GPT-2's recipe") {
    CHECK(parse({"plan"}).command == Command::plan);
    CHECK(contains(refusal({"trian"}), "unknown command 'trian'; the commands are train, generate, eval, plan"));
    const Options o = train({});
    CHECK((o.command == Command::train && o.model == "d12" && o.precision == Precision::automatic && o.master_weights));
    CHECK((o.micro_batch == 4 && o.lr == 6e-4 && o.weight_decay == 0.1 && o.beta1 == 0.9 && o.beta2 == 0.95));
    CHECK((o.eps == 1e-8 && o.grad_clip == 1.0 && o.schedule == Decay::cosine && o.on_nan == OnNan::halt &&
           o.output == "out"));
    CHECK(run_toml(train({"--recipe", "gpt2"})) == run_toml(o));
    CHECK(o.global_batch == 524288);  // the default of named sizes only; others have one micro-batch
    CHECK(train({"--layers", "2", "--heads", "2", "--channels", "64"}).global_batch == 0);
    CHECK(train({"--init", "d"}).global_batch == 0);
}

TEST_CASE("a value follows a space or an equals sign, and the last value is used") {
    CHECK(train({"--micro-batch", "auto"}).micro_batch == 0);
    CHECK(train({"--ranks", "all"}).ranks == -1);
    CHECK(train({"--lr=1e-3", "--lr", "2e-3"}).lr == 2e-3);
    CHECK(train({"--output=", "--lr", "2"}).output == "");
    for (const char* text : {"-5 degrees", "[1,2]", "a=b", "", "-nk", "{}"})
        CHECK(train({"--sample-prompt", text}).sample_prompt == text);
    CHECK(train({"--seed", "18446744073709551615"}).seed == 18446744073709551615u);
    CHECK(train({"--seq-len", "010"}).seq_len == 10);
    CHECK(train({"--quiet"}).quiet);  // a flag
    CHECK_FALSE(train({"--quiet=0"}).quiet);
    CHECK(train({"--lr", "0.0e-400"}).lr == 0.0);
    CHECK(parse({"-i", "a", "--lr", "2", "--train-data", "b/*.bin"}).train_data == "a\nb/*.bin");  // these add up
    CHECK(parse({"generate", "--init", "d", "--stop", "a\n", "--stop=b"}).stop == std::vector<std::string>{"a\n", "b"});
    setenv("HOME", "/home/x", 1);
    CHECK(train({"--output=~/out"}).output == "/home/x/out");
    CHECK(train({"--sample-prompt=~/out"}).sample_prompt == "~/out");
}

TEST_CASE("a word of a choice is the value of its name, in the files as well") {
    const Options o = train({"--precision=fp8", "--recompute=layer", "--master-weights=off", "--grad-dtype=bf16",
                             "--optimizer=muon", "--schedule=wsd", "--on-nan=skip", "--checkpoint-async=off",
                             "--export-dtype=bf16", "--attention=wgmma", "--autotune=off", "--cuda-graph=on"});
    CHECK((o.precision == Precision::fp8 && o.recompute == Recompute::layer && o.grad_dtype == Dtype::bf16));
    CHECK((o.optimizer == UpdateRule::muon && o.schedule == Decay::wsd && o.on_nan == OnNan::skip));
    CHECK((o.export_dtype == Dtype::bf16 && o.attention == AttentionBackend::wgmma));
    CHECK((!o.master_weights && !o.checkpoint_async && !o.autotune && o.cuda_graph));
    for (const char* line : {"precision = \"fp8\"\n", "recompute = \"layer\"\n", "master-weights = \"off\"\n"})
        CHECK(contains(run_toml(o), line));
    CHECK((option_text(o, "optimizer") == "muon" && option_text(o, "cuda-graph") == "on"));
    CHECK(train({"--schedule=linear"}).schedule == Decay::linear);
    CHECK(train({"--recompute=gelu"}).recompute == Recompute::gelu);
    CHECK(train({"--attention=cudnn"}).attention == AttentionBackend::cudnn);
    const Options tokenize = parse({"tokenize", "a", "--output=d", "--train-bpe=300", "--split=end-of-text"});
    CHECK(tokenize.split == SplitAt::end_of_text);
    CHECK(parse({"export", "a", "b.gguf", "--type=bf16"}).type == GGUFMatrices::bf16);
    expect_refused("--train-data x ", {{"--schedule 1", "--schedule 1 is not known; give cosine|linear|constant|wsd"},
                                       {"--autotune yes", "--autotune yes is not known; give on|off"}});
}

TEST_CASE("llm.c's one-letter options mean the same here") {
    const std::string help = parse({"--help"}).answer;
    for (const char* names :
         {"i,--train-data", "j,--val-data", "o,--output", "e,--model", "b,--micro-batch", "t,--seq-len",
          "d,--global-batch", "l,--lr", "u,--warmup", "q,--final-lr-fraction", "c,--weight-decay", "v,--val-every",
          "s,--sample-every", "g,--sample-tokens", "x,--steps", "n,--checkpoint-every", "z,--zero", "k,--schedule"})
        CHECK(contains(help, format("\n  -%s ", names)));
    const Options o = parse({"-i", "a", "-e", "gpt2:d24", "-l", "3e-4", "-x", "-1", "-y", "1", "-o", "no/such"});
    CHECK((o.train_data == "a" && o.model == "d24" && o.lr == 3e-4 && o.resume));
    CHECK(o.steps == 0);  // one epoch
    CHECK(train({"-e", "out/d12/step_001000"}).init == "out/d12/step_001000");
    CHECK(train({"-e", "gpt2_124M_bf16.bin"}).init == "gpt2_124M_bf16.bin");
}

TEST_CASE("bad values, unknown options, and those of other trainers are refused, with what may be meant") {
    expect_refused("--train-data x ",
                   {{"--lr=", "--lr: '' is not a number"},
                    {"--init=", "--init '': the DIR is missing (an unset variable of the shell?)"},
                    {"--lr nan", "--lr: 'nan' is not a number"},
                    {"--lr 1e-320", "--lr: 1e-320 is too small"},
                    {"--lr 1e-400", "--lr: 1e-400 is too small"},
                    {"--lr 1e400", "--lr: 1e400 is too large"},
                    {"--grad-clip 1e-300", "--grad-clip: 1e-300 is too small"},
                    {"data/b.bin", "unexpected argument 'data/b.bin'; quote a pattern of shards"},
                    {"--beta1 1", "--beta1 1 must be at least 0 and at most 0.99999994"},
                    {"--steps 1e3", "--steps: '1e3' is not a whole number"},
                    {"--micro-batch 4294967297", "--micro-batch: 4294967297 is out of range"},
                    {"--seed -1", "--seed: '-1' is not a whole number, 0 or more"},
                    {"--schedule=", "--schedule '' is not known; give cosine|linear|constant|wsd"},
                    {"--quiet=maybe", "--quiet: 'maybe' is neither true nor false"},
                    {"-n", "--checkpoint-every needs a value (see --help)"},
                    {"--output --lr 3", "--output needs a value (DIR), but the option --lr follows"},
                    {"--mirco-batch 4", "unknown option --mirco-batch; did you mean --micro-batch? (see --help)"},
                    {"--weight_decay 4", "did you mean --weight-decay?"},
                    {"-lr 1e-3", "-lr: a long option takes two dashes: --lr"},
                    {"--xyzzy", "unknown option --xyzzy (see --help)"},
                    {"generate", "unexpected argument 'generate'"}});
    expect_refused("eval --init d --val-data v ", {{"--precision fp8", "give fp32|bf16|auto"},
                                                   {"--task t", "--val-data, --task and --text are three things"},
                                                   {"--rows r", "--rows and --prepend-eot need --task FILE"},
                                                   {"--stride 3", "--stride needs --text FILE"}});
    expect_refused("eval --init d ",
                   {{"--rows r", "--val-data is missing: quote a pattern of token shards to evaluate"},
                    {"--text t --val-tokens 9", "--val-tokens needs --val-data; tasks and texts are read whole"}});
    expect_refused("--train-data x ", {{"--eval-every 50", "--eval-every needs --eval-task FILE"}});
    expect_refused("--train-data x ",
                   {{"--cooldown 0.3", "--cooldown 0.3 needs --schedule wsd; with --schedule cosine leave it at 0.2"},
                    {"--schedule wsd --cooldown 0", "--cooldown 0 must be at least 1e-09 and at most 1"},
                    {"--schedule wsd --cooldown 1.5", "--cooldown 1.5 must be at least 1e-09 and at most 1"}});
    CHECK(train({"--schedule=wsd", "--cooldown=1"}).cooldown == 1.0);
    expect_refused("tokenize a ", {{"--steps 4", "unknown option --steps"}});
    expect_refused("",
                   {{"--max_iters 5", "there is no --max_iters; use --steps"},
                    {"--cudnn off", "there is no --cudnn; use --attention auto in place of on, mma in place of off"},
                    {"-m 5", "use --val-tokens"}});
}

#ifdef __OPTIMIZE__
constexpr int COUNT = 10000;
#else
constexpr int COUNT = 1000;  // a build with sanitizers is not optimized
#endif

TEST_CASE("10,000 odd spellings of options are read, or refused in one sentence") {
    const std::vector<std::vector<std::string>> commands = {{"-i", "x.bin"},
                                                            {"plan"},
                                                            {"generate", "--init", "d"},
                                                            {"eval", "--init", "d", "-j", "x.bin"},
                                                            {"tokenize", "x", "--output", "d", "--train-bpe", "300"}};
    const std::vector<std::string> pieces = {
        "",    "-",   "--", "=",    "0",    "1",      "-1", "+7",   "e",   "e5",    "1e-320",    "1e999", "0x1p",
        "nan", "inf", ".",  "1_0",  "\xff", "\n",     " ",  "auto", "all", "on",    "~/x",       "[1]",   "{a,b",
        "2.5", "'",   "\"", "fp32", "none", "\u00b2", "\\", "|",    "%s",  "false", "9999999999"};
    std::vector<nlohmann::json> options;
    for (const auto& words : commands) options.push_back(settings(parse(pointers(words))));
    std::mt19937 random(36);
    int accepted = 0;
    for (int i = 0; i < COUNT; i++) {
        const size_t c = random() % commands.size();
        std::vector<std::string> words = commands[c];
        std::string option = "--" + std::next(options[c].begin(), int(random() % options[c].size())).key(), value;
        if (random() % 8 == 0) option.insert(random() % option.size(), pieces[random() % pieces.size()]);
        for (auto count = random() % 3; count > 0; count--) value += pieces[random() % pieces.size()];
        words.push_back(random() % 2 ? option + "=" + value : option);
        if (words.back() == option) words.push_back(value);
        CAPTURE(words.back());
        CAPTURE(option);
        const std::string refused = refusal([&] {
            for (const auto& setting : settings(parse(pointers(words))))
                CHECK((!setting.is_number_float() || std::isfinite(setting.get<double>())));
            accepted++;
        });
        const bool reads_file = contains(option, "config") || contains(option, "resume");
        CHECK((refused.empty() || refused.starts_with("2 ") || (reads_file && refused.starts_with("6"))));
    }
    CHECK((accepted > COUNT / 10 && accepted < COUNT * 9 / 10));
}

TEST_CASE("options that contradict each other or need another one are refused") {
    expect_refused("--train-data x ",
                   {{"--layers 2", "give --layers, --heads and --channels together, not --layers 2 --heads 0"},
                    {"--model d12 --layers 2 --heads 2 --channels 64", "two ways"},
                    {"--init d --model d12", "has its own shape"},
                    {"-e a/b --init c", "two places to start from"},
                    {"--layers 2 --heads 3 --channels 64", "try --channels 66"},
                    {"--model d13", "--model d13 is not known"},
                    {"--resume --output=", "--resume needs the --output"},
                    {"--precision fp32 --master-weights off", "needs bf16 weights"},
                    {"--sequence-parallel", "needs --tensor-parallel 2 or more"},
                    {"--tensor-parallel 2 --precision fp8", "does not combine"},
                    {"--keep-best", "--keep-best needs validation losses"},
                    {"--patience 3", "--patience needs validation losses: give --val-data, and --val-every above 0"},
                    {"--patience 3 -j y -v 0", "--patience needs validation losses"},
                    {"--patience 3 -j y -n 0", "--patience keeps the best checkpoint: give --output, and --checkpo"},
                    {"--patience 3 -j y --output=", "--patience keeps the best checkpoint"}});
    CHECK_NOTHROW(train({"--precision", "fp8", "--master-weights", "off", "--keep-best", "--val-data", "y"}));
    CHECK(train({"--patience", "3", "--val-data", "y"}).patience == 3);
    expect_refused("generate --init d ", {{"--prompt a --prompt-file b", "are two texts to continue; give one"},
                                          {"--stop a --stop=", "--stop: the text is empty"},
                                          {"--repetition-penalty 0", "--repetition-penalty 0 must be at least 0.001"}});
    expect_refused("eval --init d --ranks 2 ", {{"--text /dev/fd/63", "--text /dev/fd/63: the ranks of --ranks cannot"},
                                                {"--text -", "cannot share a pipe or stdin; write its content to a"}});
    expect_refused("generate --init d --ranks 2 ", {{"--prompt-file /dev/fd/63", "cannot share a pipe or stdin"}});
    expect_refused("", {{"", "--train-data is missing"},
                        {"tokenize --output d --train-bpe 300", "no INPUT"},
                        {"tokenize a --output d", "give one of --train-bpe"},
                        {"tokenize a --output d --train-bpe 256", "--train-bpe 256 must be 257 (the 256 bytes"},
                        {"tokenize a --output d --train-bpe 300 --val-tokens 9 --val-fraction 0", "two ways to hold"}});
}

TEST_CASE("tokenize takes any number of inputs, and after -- names that look like options") {
    const Options o = parse({"tokenize", "a.txt", "--output", "d", "[b,c]", "--train-bpe=300", "--", "--b", "-"});
    CHECK(o.inputs == std::vector<std::string>{"a.txt", "[b,c]", "--b", "-"});
    CHECK(o.val_fraction == 0.05);
    CHECK(parse({"tokenize", "a", "--output", "d", "--train-bpe", "300", "--val-tokens", "9"}).val_fraction == 0.0);
}

TEST_CASE("the help lists each option with unit, text and default, within 120 columns") {
    for (const char* command : {"train", "generate", "eval", "plan", "tokenize"}) {
        const Options help = parse({command, "--model", "d13", "--help"});  // despite errors in other options
        CHECK(help.command == Command::help);
        std::istringstream lines(help.answer);
        for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 120);
    }
    CHECK(contains(parse({"-h"}).answer, "  --eps VALUE                       AdamW's epsilon [1e-08]\n"));
}

TEST_CASE("size of the model, steps and warmup follow from the options and the data") {
    CHECK(model_config(train({"--seq-len", "2048", "--model", "d48"})) == GPT2Config{2048, 50257, 48, 25, 1600});
    const Options small = train({"--layers", "6", "--heads", "6", "--channels", "384", "--seq-len", "256"});
    CHECK(model_config(small, 4096) == GPT2Config{256, 4096, 6, 6, 384});
    CHECK(model_config(train({"--vocab-size", "300"}), 4096).V == 300);
    const auto resolved = [](Options o, int64_t epoch) {
        resolve_steps(o, epoch);
        return format("%d, %d", int(o.steps), int(o.warmup_steps));
    };
    CHECK(resolved(train({}), 18865) == "18865, 700");
    CHECK(resolved(train({"--steps", "500"}), 18865) == "500, 50");
    CHECK(resolved(train({"--steps", "500", "--warmup", "0"}), 0) == "500, 0");
    const Options longer = train({"--steps", "500", "--warmup", "501"});
    CHECK(contains(refusal([&] { resolved(longer, 1); }), "2 --warmup 501 is longer than the run of 500 steps; try"));
    CHECK(contains(refusal([&] { resolved(train({}), 0); }), "too short for one step"));
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

TEST_CASE("strings of special characters come back through run.toml and --config") {
    // Each piece beside each other piece. After a backslash "n" and "u0023" would be escapes.
    const std::vector<std::string> pieces = {"#", "\"", "'",     "\n",     ",", "[",    "]",    "\\",
                                             " ", "\t", "\r",    "=",      "{", "}",    "%%",   "-",
                                             ";", "n",  "u0023", "\"\"\"", "é", "\x7f", "\xff", ""};
    const TemporaryDirectory out;
    for (const std::string& piece : pieces) {
        Options o = train({});
        for (const std::string& other : pieces) o.sample_prompt += other + piece;
        for (const std::string& text : {piece, o.sample_prompt}) {
            CAPTURE(text);
            o.sample_prompt = text;
            write_bytes(out / "run.toml", run_toml(o));
            CHECK(resumed(out).sample_prompt == text);
            CHECK(train({"--config", (out / "run.toml").c_str()}).sample_prompt == text);
        }
    }
}

TEST_CASE("every option comes back through run.toml, but not those of one start") {
    const Options o = train({"--layers=2", "--heads=2", "--channels=64", "--lr=0.00012345678901234567", "--keep-best",
                             "--seed=18446744073709551615", "--val-data=v", "--schedule=wsd", "--cooldown=0.3",
                             "--stop-after=5", "--quiet", "--trace=t", "--ranks=2"});
    const Options back = with_run_toml(run_toml(o));
    CHECK(run_toml(back) == run_toml(o));
    const char* const of_0_3_0 = "train-data = 'x'\ncudnn = \"off\"\n";
    CHECK(with_run_toml(of_0_3_0).attention == AttentionBackend::mma);
    const std::set<std::string> of_one_start = {"resume", "config", "recipe", "stop-after",
                                                "ranks",  "trace",  "quiet",  "output"};
    const nlohmann::json options = settings(o);
    for (const auto& option : options.items()) {
        const std::string name = option.key();
        CAPTURE(name);
        CHECK(contains(run_toml(o), "\n" + name + " = ") == !of_one_start.contains(name));
    }
    CHECK((back.stop_after == 0 && !back.quiet && back.trace.empty() && back.ranks == 0));
    CHECK((back.default_model && !back.default_global_batch));  // the shape is the checkpoint's
    CHECK(changed_options(back, options_json(o)) == "");
}

TEST_CASE("the command line comes before --config, and --config before run.toml") {
    const TemporaryDirectory out;
    write_bytes(out / "run.toml", "train-data = 'x'\nlr = 0.1\nsteps = 5\nseed = 7\nmodel = 'd12'\n");
    write_bytes(out / "more.toml",
                "# comment\n\n lr=0.2 # peak\nsteps = 1_000\nsample-prompt = \"a # \\u00e9\\n\" # b\r\n");
    const Options o = resumed(out, {"--config", (out / "more.toml").c_str(), "--lr", "0.3"});
    CHECK((o.lr == 0.3 && o.steps == 1000 && o.seed == 7 && o.sample_prompt == "a # é\n"));
    CHECK(changed_options(o, options_json(resumed(out))) == "--steps 1000 (was 5), --lr 0.3 (was 0.1)");
    for (const char* line :
         {"steps = 7", "# comment\nsteps = 7", "\"step\\u0073\" = 7", "'steps'=7"}) {  // after a byte order mark
        write_bytes(out / "more.toml", "\xef\xbb\xbf" + std::string(line));
        CHECK(train({"--config", (out / "more.toml").c_str()}).steps == 7);
    }
    for (const char* mark : {"\xff\xfe", ""}) {
        write_bytes(out / "more.toml", mark + std::string("s\0=\0 \0"
                                                          "7\0",
                                                          8));
        const std::string said = refusal([&] { train({"--config", (out / "more.toml").c_str()}); });
        CHECK_MESSAGE(contains(said, "UTF-16, "), said);
        CHECK_MESSAGE(contains(said, "convert it with iconv -f UTF-16 -t UTF-8"), said);
    }
    CHECK(resumed(out, {"--model", "d24"}).model == "d24");
    CHECK(resumed(out, {"--layers", "1", "--heads", "1", "--channels", "16"}).model == "");
}

TEST_CASE("a recipe sets what neither the command line nor --config has, and nothing of a run that is resumed") {
    const std::vector<std::string> printed = {
        "options from recipe fast: --optimizer muon --lr 0.002 --schedule wsd --cooldown 0.5 --final-lr-fraction 0 "
        "--beta2 0.995"};
    const Options fast = train({"--recipe", "fast"});
    CHECK((fast.optimizer == UpdateRule::muon && fast.lr == 2e-3 && fast.schedule == Decay::wsd));
    CHECK((fast.cooldown == 0.5 && fast.final_lr_fraction == 0.0 && fast.beta2 == 0.995 && fast.taken == printed));
    const TemporaryDirectory out;
    write_bytes(out / "more.toml", "beta2 = 0.9\nrecipe = 'fast'\n");
    const Options o = train({"--config", (out / "more.toml").c_str(), "--lr", "0.3", "--schedule", "linear"});
    CHECK((o.beta2 == 0.9 && o.lr == 0.3 && o.schedule == Decay::linear && o.optimizer == UpdateRule::muon));
    CHECK(o.taken.at(1) == "options from recipe fast: --optimizer muon --final-lr-fraction 0");
    const auto said = [](const Options& run, std::vector<const char*> more) {
        const Options back = with_run_toml(run_toml(run), more);
        CHECK(run_toml(back) == run_toml(run));
        return back.taken.back();
    };
    CHECK(said(fast, {"--recipe", "fast"}).starts_with("options from /"));  // they are those of the run
    CHECK(said(fast, {"--recipe", "gpt2", "--lr", "2e-3"}) ==
          "the run keeps --optimizer muon --schedule wsd --final-lr-fraction 0 --beta2 0.995, which recipe gpt2 has "
          "otherwise; give an option to change it");
    CHECK(said(o, {"--recipe", "fast"}).starts_with("the run keeps --lr 0.3 --schedule linear --beta2"));
    const Options old = with_run_toml("train-data = 'x'\nlr = 2e-3\n", {"--recipe", "fast"});
    CHECK((old.optimizer == UpdateRule::adamw && contains(old.taken.back(), "the run keeps --optimizer adamw --sch")));
    CHECK(refusal({"--train-data", "x", "--recipe", "quick"}) ==
          "2 --recipe quick is not known; give fast|gpt2, or a file with --config");
    write_bytes(out / "more.toml", "recipe = 'quick'");
    CHECK(contains(refusal([&] {
                       train({"--config", (out / "more.toml").c_str()});
                   }),
                   "65 --recipe quick is not known; "
                   "give fast|gpt2, or a file with --config (from /"));
    CHECK(
        contains(refusal({"--train-data", "x", "--recipe="}), "2 --recipe '': the NAME is missing (an unset variable"));
}

TEST_CASE("an invalid file is refused, and the message names it") {
    const auto error = [](const std::string& text, std::vector<const char*> more = {}) {
        return refusal([&] { with_run_toml("train-data = 'x'\n" + text, more); });
    };
    CHECK(contains(error("lr = 1e31"), "65 --lr 1e31 must be at least 0 and at most 1e+30 (from /"));
    CHECK(error("lr = 1e31", {"--lr", "1"}) == "");
    CHECK(error("lr = 1", {"--lr", "1e31"}) == "2 --lr 1e31 must be at least 0 and at most 1e+30");
    for (const char* line : {"lr", "= 5", "lr = [1, 2]", "model = ['d12']", "lr = {a = 1}", "lr = 'x",
                             "sample-prompt = \"x\\q\"", "sample-prompt = \"\\ud800\"", "lr = '1' 2", "'lr'",
                             "\"lr\" x = 1", "keep-best = maybe", "[train]", "xyzzy = 1", "lr = 1\nlr = 1"}) {
        CAPTURE(line);
        CHECK(error(line).starts_with("65 "));
        CHECK(contains(error(line), "run.toml"));
    }
    CHECK(contains(error("val-data = ['a', 'b']"),
                   "run.toml, line 2: is a list or a table, and an option has one value"));
    CHECK(contains(error("max-iters = 5"), "use --steps"));
    CHECK(contains(error("config = 'a b'"), "run.toml: config = 'a b': a file names no further one; put its options"));
    CHECK(contains(refusal({"--resume", "--output", "no/such"}), "no/such/run.toml"));
    CHECK(train({"--resume", "--output", "no/such"}).resume);
}

TEST_CASE("relative paths of a run that was started in another directory become absolute") {
    const TemporaryDirectory there;
    // Every option that names a file is declared as a path.
    const std::string help = parse({"--help"}).answer, stored = run_toml(train({}));
    const nlohmann::json options = settings(train({}));
    for (const auto& option : options.items()) {
        const std::string name = option.key();
        CAPTURE(name);
        bool names_file = false;
        for (const char* unit : {" GLOB", " DIR", " FILE"}) names_file |= contains(help, "--" + name + unit);
        if (!names_file || !contains(stored, "\n" + name + " = ")) continue;
        std::string data = name == "train-data" ? "" : "train-data = '/b'\n";
        if (name == "reference") data += "val-data = '/c'\n";
        const Options back = with_run_toml("directory = '" + there.path + "'\n" + data + name + " = 'rel'\n");
        CHECK(contains(run_toml(back), name + " = \"" + there.path + "/rel\""));
        if (!data.empty()) CHECK(back.train_data == "/b");
    }
}
