#include "options/options.h"

#include <algorithm>
#include <memory>

#include <nlohmann/json.hpp>

#include "base/terminal.h"
#include "options/foreign_options.h"
#include "options/option_table.h"

using Json = nlohmann::ordered_json;

static constexpr const char* command_names[] = {"train",    "generate", "eval",    "plan",
                                                "tokenize", "verify",   "explain", "help"};

const char* command_name(Command command) { return command_names[int(command)]; }

// ---- the table of each command

namespace {
// The options of a command with fields that keep their defaults, and its command line. Made once, because a program
// parses its options, prints them and saves them.
struct CommandTable {
    Options defaults{};
    OptionSpecs specs;
    ArgumentSplitter splitter;

    explicit CommandTable(Command command);
};
}  // namespace

static const std::vector<Command> commands = {Command::train,    Command::generate, Command::eval,   Command::plan,
                                              Command::tokenize, Command::verify,   Command::explain};

// What --help says about the arguments of a command that are no options; empty if there are none.
static std::string inputs_of(Command command) {
    if (command == Command::tokenize) return "INPUT... [options]    files, or folders of them";
    if (command == Command::verify)
        return "DIR... [options]    a checkpoint, a run's output, or a Hugging Face directory";
    if (command == Command::explain) return "DIR    the output of a run that ended with exit code 124";
    return "";
}

// The default of a field that several commands declare is that of the command itself, which is set last.
CommandTable::CommandTable(Command command)
    : specs(declare(command, defaults)), splitter(specs, !inputs_of(command).empty()) {
    for (Command other : {Command::tokenize, Command::eval, Command::generate, Command::train, command})
        for (const OptionSpec& d : declare(other, defaults)) d.reset();
    defaults.command = command;
}

static CommandTable& table_of(Command command) {
    static std::unique_ptr<CommandTable> tables[int(Command::help) + 1];
    std::unique_ptr<CommandTable>& table = tables[int(command)];
    if (!table) table = std::make_unique<CommandTable>(command);
    return *table;
}

// ---- parsing

static const OptionSpec* find_spec(const OptionSpecs& all, const std::string& name) {
    for (const OptionSpec& d : all)
        if (d.is_called(name)) return &d;
    return nullptr;
}

// Refuses an option of another trainer if this command has the counterpart, which the error names, or if no command
// has one.
static void refuse_foreign(const OptionSpecs& all, const std::string& name) {
    const ForeignOption* foreign = find_foreign_option(name);
    if (!foreign) return;
    const std::string own = own_option(*foreign);
    if (own.empty() || find_spec(all, own))
        fail(EXIT_USAGE, "unknown option %s, known from %s: here %s (see --help)", name.c_str(), foreign->whose,
             foreign->here);
}

// Refuses llm.c's options of two letters, which would be read as a letter and its value (-nk 5 as -n k), and its -h 1,
// which would be read as --help.
static void refuse_llmc_pairs(const OptionSpecs& all, const std::vector<std::string>& arguments) {
    for (size_t i = 0; i < arguments.size(); i++) {
        const std::string& name = arguments[i];
        const OptionSpec* before = i > 0 ? find_spec(all, arguments[i - 1]) : nullptr;
        const bool is_value = before && before->kind != ValueKind::flag;
        if (is_value || !name.starts_with("-") || name.starts_with("--")) continue;
        if (name.size() == 3) refuse_foreign(all, name);
        if (name == "-h" && i + 1 < arguments.size()) refuse_foreign(all, name + " " + arguments[i + 1]);
    }
}

static Command find_command(const std::string& first_argument) {
    if (first_argument.empty() || first_argument[0] == '-') return Command::train;
    std::vector<std::string> names;
    for (Command command : commands) {
        if (first_argument == command_name(command)) return command;
        names.push_back(command_name(command));
    }
    const std::string nearest = nearest_name(names, first_argument);
    ENSURE(
        !nearest.empty() || first_argument.find_first_of("./") == std::string::npos,
        "'%s' is not a command: every option has its name, as in --train-data 'data/x/train_*.bin', and tokenize FILE "
        "makes such data from text (see --help)",
        first_argument.c_str());
    std::string list;
    for (const std::string& name : names) {
        if (!list.empty()) list += name == names.back() ? " and " : ", ";
        list += name;
    }
    fail(EXIT_USAGE, "unknown command '%s'%s (the commands are %s, each with its own --help; train needs no name)",
         first_argument.c_str(), nearest.empty() ? "" : ("; did you mean " + nearest + "?").c_str(), list.c_str());
}

// Refuses an unknown argument. The error suggests the other commands that have such an option, or the nearest option of
// this command.
[[noreturn]] static void refuse_unknown(Command command, const OptionSpecs& all, const std::string& argument) {
    for (const OptionSpec& d : all)
        if (*d.word && argument == d.word)
            fail(EXIT_USAGE, "unexpected argument '%s'; did you mean %s=%s?", argument.c_str(), d.long_name(),
                 argument.c_str());
    if (argument.size() < 2 || argument[0] != '-')
        fail(EXIT_USAGE, "unexpected argument '%s'; a command comes first, values follow their option (see --help)",
             argument.c_str());
    const std::string name = argument.substr(0, argument.find('='));
    std::string others;
    for (Command other : commands)
        for (const OptionSpec& d : table_of(other).specs)
            if (other != command && d.is_called(name))
                others += (others.empty() ? "" : ", ") + std::string(command_name(other));
    if (!others.empty())
        fail(EXIT_USAGE, "%s has no option %s, which belongs to %s (see %s --help)", command_name(command),
             name.c_str(), others.c_str(), command_name(command));
    refuse_foreign(all, name);
    const std::string nearest = nearest_option(all, name);
    if (name.starts_with("--") && !nearest.empty())
        fail(EXIT_USAGE, "unknown option %s; did you mean %s? (see --help)", name.c_str(), nearest.c_str());
    fail(EXIT_USAGE, "unknown option %s (see --help)", name.c_str());
}

static std::string help_text(Command command, const std::string& program, const OptionSpecs& all) {
    const std::string shown_name = message_text(program);
    const char* p = shown_name.c_str();
    std::string out;
    if (command == Command::train) {
        out = format("usage: %s [train] [options]\n", p);
        out += format(
            "       %s generate | eval | plan | tokenize | verify | explain [options]    each with its own --help\n",
            p);
    } else {
        const std::string inputs = inputs_of(command);
        out = format("usage: %s %s %s\n", p, command_name(command), inputs.empty() ? "[options]" : inputs.c_str());
    }
    OptionSpecs shown = all;
    if (command == Command::plan) std::erase_if(shown, [](const OptionSpec& d) { return !d.planned; });
    out += list_options(shown);
    if (command == Command::plan)
        out += format("\nThe other options of %s train are accepted and have no effect.\n", p);
    return out +
           "\n  -h,--help, --version\nA value in [] is the default. --name VALUE and --name=VALUE are the same.\n";
}

// Resolves the ways to choose a model. --model is also llm.c's -e: "d12", "gpt2:d12", or a directory to start from.
static void sort_out_model(Options& o) {
    if (o.model.starts_with("gpt2:")) o.model.erase(0, 5);
    ENSURE(!o.model.ends_with(".bin"),
           "--model %s: llm.c's model files cannot be read; give --init a Hugging Face directory", o.model.c_str());
    const bool directory = o.model.find('/') != std::string::npos || o.model == "." || o.model == "..";
    if (directory) {
        ENSURE(o.init.empty() || o.init == o.model, "--model %s and --init %s are two places to start from; give one",
               o.model.c_str(), o.init.c_str());
        o.init = o.model;
        o.model.clear();
    }
    const bool custom = o.layers || o.heads || o.channels;
    std::string given, missing;
    for (const auto& [name, value] :
         {std::pair("--layers", o.layers), {"--heads", o.heads}, {"--channels", o.channels}})
        if (value)
            given += format("%s%s %d", given.empty() ? "" : " ", name, value);
        else
            missing += format("%s%s", missing.empty() ? "" : ", ", name);
    ENSURE(!custom || o.model.empty(), "--model %s and %s are two ways to choose the shape; give one", o.model.c_str(),
           given.c_str());
    ENSURE(o.init.empty() || (o.model.empty() && !custom),
           "--init %s has its own shape; leave out --model, --layers, --heads and --channels", o.init.c_str());
    ENSURE(!custom || missing.empty(), "give --layers, --heads and --channels together (missing: %s)%s",
           missing.c_str(), o.resume ? "; or leave them out, for --resume keeps the run's shape" : "");
    o.default_model = o.model.empty() && o.init.empty() && !custom;
    if (o.default_model) o.model = "d12";
    if (!o.model.empty() || custom) check_config(model_config(o));
}

static void check_start(const Options& o, bool plan) {
    const bool gpus = !o.gpus.empty();
    ENSURE(!gpus || o.ranks == 0, "--gpus %s starts GPU ranks and --ranks %d CPU ranks; give one", o.gpus.c_str(),
           o.ranks);
    ENSURE(gpus || o.node_rank < 0, "--node-rank needs --gpus and --nnodes");
    ENSURE(gpus || o.nnodes == 1 || (plan && o.world_size > 0),
           "--nnodes %d needs --gpus; CPU ranks of several machines start by mpirun --host, or by srun", o.nnodes);
    ENSURE(o.max_restarts == 0 || gpus || o.ranks > 0, "--max-restarts needs --gpus or --ranks");
    ENSURE(o.max_restarts == 0 || o.nnodes == 1,
           "--max-restarts is for one machine; torchrun restarts the ranks of --nnodes %d together", o.nnodes);
    ENSURE(o.max_restarts == 0 || (!o.output.empty() && o.checkpoint_every > 0),
           "--max-restarts needs checkpoints to continue from: an --output, and --checkpoint-every above 0");
    ENSURE(o.recompute_check == 0 || o.deterministic == "on",
           "--recompute-check compares bits, which --deterministic off does not keep; give --deterministic on");
    ENSURE((o.on_nan != "rollback" && o.on_spike != "rollback") || (!o.output.empty() && o.checkpoint_every > 0),
           "--%s rollback needs checkpoints to go back to: an --output, and --checkpoint-every above 0",
           o.on_nan == "rollback" ? "on-nan" : "on-spike");
    ENSURE(!o.share_gpu || !gpus, "--share-gpu is for ranks that mpirun starts; --gpus gives each rank its own GPU");
}

static void check_tensor_parallel(const Options& o) {
    const bool several = o.tensor_parallel > 1;
    ENSURE(several || !o.sequence_parallel || (o.fit && !is_given(o, "tensor-parallel")),
           "--sequence-parallel needs --tensor-parallel 2 or more, on as many ranks; --sequence-parallel=false "
           "switches it "
           "off");
    ENSURE(several || !o.tp_across_hosts, "--tp-across-hosts needs --tensor-parallel 2 or more");
    ENSURE(!several || o.precision != "fp8",
           "--precision fp8 does not combine with --tensor-parallel %d; give --precision bf16", o.tensor_parallel);
}

static void check_training(Options& o, bool plan) {
    sort_out_model(o);
    if (o.steps == -1) o.steps = 0;
    o.default_global_batch = o.global_batch_tokens == -1;
    if (o.default_global_batch) o.global_batch_tokens = o.model.empty() ? 0 : 524288;
    ENSURE(plan || o.print_launch || o.needs_saved || !o.train_data.empty(),
           "--train-data is missing: quote a pattern of token shards, such as "
           "--train-data 'data/x/train_*.bin' (train_gpt2 tokenize makes them)");
    ENSURE(plan || !is_given(o, "val-every") || o.val_every == 0 || o.needs_saved || !o.val_data.empty(),
           "--val-every %lld needs --val-data, the shards to validate on", static_cast<long long>(o.val_every));
    ENSURE(o.master_weights == "on" || o.precision != "fp32",
           "--master-weights off needs bf16 weights; give --precision bf16");
    ENSURE(!o.resume || !o.output.empty(), "--resume needs the --output that holds the checkpoints");
    ENSURE(plan || o.max_time == 0.0 || (!o.output.empty() && o.checkpoint_every > 0),
           "--max-time saves before it ends the run: it needs an --output, and --checkpoint-every above 0");
    ENSURE(plan || !o.keep_best || o.needs_saved || (!o.val_data.empty() && o.val_every > 0),
           "--keep-best needs validation losses: give --val-data, and --val-every above 0");
    check_start(o, plan);
    check_tensor_parallel(o);
}

static void check_together(Options& o) {
    switch (o.command) {
        case Command::train:
            check_training(o, false);
            break;
        case Command::plan:
            check_training(o, true);
            ENSURE(o.fit || o.gpu_memory == 0.0, "--gpu-memory %g needs --fit", o.gpu_memory);
            break;
        case Command::eval:
            ENSURE(!o.val_data.empty(), "--val-data is missing: quote a pattern of token shards to evaluate on");
            [[fallthrough]];
        case Command::generate:
            ENSURE(!o.init.empty(),
                   "--init is missing: a checkpoint, a run's output directory, or a Hugging Face directory");
            check_start(o, false);
            check_tensor_parallel(o);
            break;
        case Command::tokenize:
            ENSURE(!o.inputs.empty(), "no INPUT: name files or folders of text, or .jsonl files");
            ENSURE(!o.output.empty(), "--output is missing: the directory for the token shards");
            ENSURE((o.train_bpe > 0) != !o.tokenizer.empty(),
                   "give one of --train-bpe TOKENS, to train a vocabulary, and --tokenizer, to use one that exists");
            ENSURE(o.val_tokens == 0 || o.val_fraction == -1,
                   "--val-tokens %lld and --val-fraction %g are two ways to hold out text; give one",
                   static_cast<long long>(o.val_tokens), o.val_fraction);
            if (o.val_fraction == -1) o.val_fraction = o.val_tokens > 0 ? 0.0 : 0.05;
            break;
        case Command::verify:
            ENSURE(!o.inputs.empty(), "no DIR: name a checkpoint, a run's output, or a Hugging Face directory");
            break;
        case Command::explain:
            ENSURE(o.inputs.size() == 1, "explain needs one DIR, the --output of a run that a watchdog has ended");
            break;
        case Command::help:
            break;
    }
}

// Saved options, also those of an older version, by the names and in the forms of this version.
static Json in_present_form(Json saved, const OptionSpecs& all) {
    for (const OptionSpec& spec : all) {
        const char* name = spec.key();
        const auto old = *spec.old_name ? saved.find(spec.old_name + 2) : saved.end();
        if (old != saved.end() && !saved.contains(name)) saved[name] = Json(*old);
        if (spec.was_flag && saved.contains(name) && saved[name].is_boolean())
            saved[name] = saved[name].get<bool>() ? "on" : "off";
    }
    return saved;
}

std::string in_present_form(const std::string& saved, const Options& options) {
    return in_present_form(Json::parse(saved), table_of(options.command).specs).dump();
}

// The saved value of an option as read_value takes it.
static std::string saved_text(const OptionSpec& spec, const Json& value) {
    if (value.is_boolean() && spec.kind == ValueKind::flag) return value.get<bool>() ? "1" : "0";
    if (value.is_string()) return value.get<std::string>();
    const std::string text = value.dump();
    ENSURE(spec.kind != ValueKind::text, "%s: %s is not a text", spec.long_name(), text.c_str());
    return text;
}

// Sets the field of an option to its saved value, unless that is the default, which the field has.
static void read_saved(const OptionSpec& spec, const Json& value, Options& o) {
    const std::string name = spec.long_name(), text = saved_text(spec, value);
    ENSURE(text.find("\xef\xbf\xbd") == std::string::npos, "%s %s: run.json cannot hold bytes that are not UTF-8",
           name.c_str(), text.c_str());
    ENSURE(text.find('\0') == std::string::npos, "%s %s: has a zero byte", name.c_str(), text.c_str());
    if (text == spec.text()) return;
    read_value(spec, text);
    o.taken += (o.taken.empty() ? "" : " ") + name;
    if (spec.kind != ValueKind::flag) o.taken += " " + shell_word(text);
}

// Adds the saved options to those given, whose fields are set; the other fields have their defaults. Returns whether
// the shape is the saved one.
static bool add_saved(const OptionSpecs& all, const std::string& saved, const ParsedArgs& given, Options& o) {
    bool shape_given = false;
    for (const auto& [i, text] : given.values) shape_given |= all[i].of_shape;
    const Json json = in_present_form(Json::parse(saved), all);
    for (size_t i = 0; i < all.size(); i++) {
        const auto found = json.find(all[i].key());
        if (found == json.end() || given.values.count(i) || all[i].of_one_start) continue;
        if (shape_given && all[i].of_shape) continue;
        try {
            read_saved(all[i], *found, o);
        } catch (const Error& error) {
            fail(EXIT_BAD_DATA, "%s (from %s/run.json; give %s on the command line)", error.what(), o.output.c_str(),
                 all[i].long_name());
        }
    }
    return !shape_given;
}

// Checks the options given together with the saved ones. If none of the options that a resume could take was given,
// run.json alone is to blame.
static void check_with_saved(const OptionSpecs& all, const ParsedArgs& given, Options& o) {
    const bool only_saved = std::all_of(given.values.begin(), given.values.end(),
                                        [&](const auto& value) { return all[value.first].of_one_start; });
    try {
        check_together(o);
    } catch (const Error& error) {
        if (only_saved)
            fail(EXIT_BAD_DATA, "%s (from %s/run.json; give these options on the command line)", error.what(),
                 o.output.c_str());
        fail(error.exit_code, "%s (options that are not given come from %s/run.json)", error.what(), o.output.c_str());
    }
}

Options parse_options(int argc, const char* const* argv, const std::string& saved) {
    const std::string program =
        argc > 0 ? std::string(argv[0]).substr(std::string(argv[0]).rfind('/') + 1) : "train_gpt2";
    const Command command = find_command(argc > 1 ? argv[1] : "");
    const int first = argc > 1 && argv[1] == std::string(command_name(command)) ? 2 : 1;
    CommandTable& table = table_of(command);
    Options o = table.defaults;
    const OptionSpecs all = declare(command, o);
    if (o.command == Command::train || o.command == Command::plan)
        refuse_llmc_pairs(all, std::vector<std::string>(argv + std::min(first, argc), argv + argc));
    ParsedArgs given = table.splitter.split(std::max(0, argc - first), argv + first);
    if (given.help || given.version) {
        o.text = given.help ? help_text(o.command, program, all) : version() + "\n";
        o.command = Command::help;
        return o;
    }
    if (!given.unknown.empty()) refuse_unknown(o.command, all, given.unknown.front());
    for (const auto& [i, text] : given.values) o.given.push_back(all[i].key());
    read_values(all, given);
    const bool saved_shape = !saved.empty() && add_saved(all, saved, given, o);
    o.inputs = std::move(given.inputs);
    o.renamed = std::move(given.renamed);
    const bool trains = o.command == Command::train || o.command == Command::plan;
    o.needs_saved = trains && o.resume && saved.empty();
    saved.empty() ? check_together(o) : check_with_saved(all, given, o);
    o.default_model |= saved_shape;  // the user gave no shape, so the checkpoint's shape is used
    return o;
}

// ---- the current values

bool is_given(const Options& o, const std::string& name) {
    return std::find(o.given.begin(), o.given.end(), name) != o.given.end();
}

std::vector<Setting> settings(const Options& options) {
    Options now = options;
    const OptionSpecs all = declare(now.command, now), &defaults = table_of(now.command).specs;
    std::vector<Setting> out;
    for (size_t i = 0; i < all.size(); i++) {
        const std::string value = all[i].text();
        out.push_back({all[i].section, all[i].key(), value, value == defaults[i].text(), all[i].kind == ValueKind::flag,
                       all[i].may_change, all[i].may_differ, all[i].is_path, all[i].is_pattern});
    }
    return out;
}

std::string options_json(const Options& options) {
    Options o = options;
    Json json = Json::object();
    for (const OptionSpec& d : declare(o.command, o)) {
        Json& value = json[d.key()];
        if (d.kind == ValueKind::text) value = d.text();
        if (d.kind == ValueKind::flag) value = d.text() == "1";
        if (*d.word && d.text() == d.word) value = d.word;
        if (d.kind == ValueKind::number) value = Json::parse(d.text());
    }
    if (!o.inputs.empty()) json["inputs"] = o.inputs;
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // arguments need not be UTF-8
}

// ---- values that follow from the options

int heads_of(const Options& o) {
    const bool described = o.init.empty() && (!o.model.empty() || o.layers > 0);
    return described ? model_config(o).NH : 0;
}

GPT2Config model_config(const Options& o, int default_vocab) {
    GPT2Config config;
    if (o.layers > 0)
        config = {o.seq_len > 0 ? o.seq_len : 1024, 0, o.layers, o.heads, o.channels};
    else
        config = config_by_name(o.model.empty() ? "d12" : o.model);
    config.max_T = std::max(config.max_T, o.seq_len);
    config.V = o.vocab_size > 0 ? o.vocab_size : default_vocab;
    return config;
}

void resolve_steps(Options& o, int64_t steps_per_epoch) {
    if (o.steps == 0) {
        ENSURE(steps_per_epoch > 0,
               "the training data are too short for one step; lower --global-batch, or give --steps");
        o.steps = steps_per_epoch;
    }
    const int64_t usual = std::min<int64_t>(700, o.steps / 10);
    o.warmup = o.given_warmup == -1 ? usual : o.given_warmup;
    ENSURE(o.warmup <= o.steps, "--warmup %lld is longer than the run of %lld step%s; try --warmup %lld",
           static_cast<long long>(o.warmup), static_cast<long long>(o.steps), o.steps == 1 ? "" : "s",
           static_cast<long long>(usual));
}
