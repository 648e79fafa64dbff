#include "train/options.h"

#include <algorithm>
#include <cfloat>
#include <charconv>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <set>

#include <CLI/CLI.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "base/print.h"
#include "base/toml.h"

static constexpr const char* command_names[] = {"train", "generate", "eval", "plan", "tokenize", "export", "help"};

const char* command_name(Command command) { return command_names[int(command)]; }

// ---- declarations

namespace {
enum Kind : unsigned {
    ONE_START = 1,         // never stored in run.toml, so every start has its own
    FREE = 2,              // a resume accepts another value without a warning
    SHAPE = 4,             // if one such option is given, a file sets none of them
    PATH = 8,              // relative to the directory in which the run was started
    PATHS = 8 | 16,        // such paths, one in each line
    PATTERN = 8 | 16 | 32  // such paths that are shell patterns
};

// An option of the command. CLI11 has its names, section, unit, default, help and values, and sets the field.
struct Declared {
    std::string name;  // name without dashes
    unsigned kind;
    CLI::Option* option;
    std::function<Json()> json;  // the field's value
    bool from_run = false;       // run.toml decides, also about options of newer versions

    bool is_set() const { return option->count() > 0; }  // by the command line or a file
    std::string value() const;                           // text for the command line
    bool has(const std::string& text) const;             // whether a file's text is the value: 2e-3 is 0.002
    std::string toml() const;
};

// The help, whose usage names the commands.
struct Help : CLI::Formatter {
    Command command;

    explicit Help(Command command) : command(command) {}
    std::string make_usage(const CLI::App*, std::string program) const override {
        if (command == Command::train)
            return "usage: " + program + " [train] [options]\n       " + program +
                   " generate | eval | plan | tokenize | export [options]    each with its own --help\n";
        const char* inputs = command == Command::tokenize       ? " INPUT...    files, folders of them, or - (stdin),"
                             : command == Command::export_model ? " DIR FILE.gguf    a model as --init has it,"
                                                                : "";
        return "usage: " + program + " " + command_names[int(command)] + inputs + " [options]\n";
    }
};

// The options of o.command.
struct Parser {
    Options o;
    CLI::App app;
    std::deque<Declared> all;
    std::vector<std::string> known;  // names of all
    bool in_file = false;            // values come from a file, not from the command line

    explicit Parser(const Options& options);

    template <class T>
    void add(const char* section, unsigned kind, const char* letter, const char* field_name, T& field, const char* unit,
             const char* help, double least = 0, double most = HUGE_VAL);
    Declared* find(const std::string& name);  // "--lr" or "-l"; null if there is none
    bool has_shape() const {
        return std::ranges::any_of(all, [](auto& d) { return d.is_set() && d.kind & SHAPE; });
    }
    void read_command_line(int argc, const char* const* argv);
    void read_text(const std::string& path, const std::string& text, bool saved);
    void read_saved();
};
}  // namespace

// ---- values

// Returns the words of a unit: "none" of "FILE|DIR|none". A number alone is none.
static std::vector<std::string> words_of(const std::string& unit) {
    std::vector<std::string> words = CLI::detail::split(unit, '|');
    std::erase_if(words, [](const std::string& word) {
        return word.empty() || isupper(word[0]) || std::ranges::none_of(word, [](char c) { return islower(c); });
    });
    return words;
}

std::string Declared::value() const {
    const Json value = json();
    if (value.type == Json::string) return value.text;
    const std::string text = json_text(value);
    return text.ends_with(".0") ? text.substr(0, text.size() - 2) : text;
}

bool Declared::has(const std::string& text) const {
    const Json now = json();
    return now.type == Json::number ? now.get<double>() == strtod(text.c_str(), nullptr) : value() == text;
}

std::string Declared::toml() const { return json().type == Json::string ? toml_quoted(value()) : value(); }

template <class T>
static T number(const std::string& name, const std::string& text) {
    T value{};
    const char *begin = text.c_str(), *end = begin + text.size();
    if constexpr (std::is_floating_point_v<T>) {
        char* stop = nullptr;
        if (text.find_first_not_of("+-.0123456789eE") == text.npos) value = strtod(begin, &stop);
        ENSURE(stop == end && !text.empty(), "%s: '%s' is not a number", name.c_str(), text.c_str());
        const bool is_zero = text.substr(0, text.find_first_of("eE")).find_first_of("123456789") == text.npos;
        // Most values become floats.
        ENSURE(is_zero || (std::isfinite(value) && std::fabs(value) >= FLT_MIN), "%s: %s is too %s", name.c_str(),
               text.c_str(), std::isinf(value) ? "large" : "small");
    } else {
        const auto [stop, error] = std::from_chars(begin, end, value);
        ENSURE(error != std::errc::result_out_of_range, "%s: %s is out of range", name.c_str(), text.c_str());
        ENSURE(error == std::errc() && stop == end, "%s: '%s' is not a whole number%s", name.c_str(), text.c_str(),
               std::is_signed_v<T> ? "" : ", 0 or more");
    }
    return value;
}

// Sets a field. CLI11's conversions (2.1.2 and 2.4.1) read 010 as 8, nan as a number, 1 as the second word of a choice
// and 17 as true, and its messages name no value to try.
template <class T>
static void set(T& field, const std::string& name, unsigned kind, const std::string& unit, double least, double most,
                const std::string& text) {
    const std::vector<std::string> words = words_of(unit);
    const auto word = std::ranges::find(words, text) - words.begin();
    const bool is_word = word < std::ssize(words);
    if constexpr (std::is_same_v<T, std::string>) {
        // The shell leaves --output=~/out as it is.
        const bool is_path = unit.find("DIR") != unit.npos || unit.find("FILE") != unit.npos;
        const char* home = is_path && text.starts_with("~/") ? getenv("HOME") : nullptr;
        const bool adds_up = kind & PATHS & ~PATH && !field.empty();  // -i A -i B; else the last one counts
        field = (adds_up ? field + "\n" : "") + (home ? home + text.substr(1) : text);
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
        ENSURE(!text.empty(), "%s: the text is empty", name.c_str());
        field.push_back(text);  // each value counts
    } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
        field = is_word ? T(least) : number<T>(name, text);
        const double value = double(field);
        const std::string at_most = most < HUGE_VAL ? format(" and at most %.15g", most) : "";
        ENSURE(value >= least && value <= most, "%s %s must be at least %.15g%s", name.c_str(), text.c_str(), least,
               at_most.c_str());
    } else if (!unit.empty()) {
        ENSURE(is_word, "%s %s is not known; give %s", name.c_str(), shell_word(text).c_str(), unit.c_str());
        field = T(std::is_enum_v<T> ? word : !word);  // "on" of "on|off" is true
    } else {
        field = T(text == "1" || text == "true");
        ENSURE(bool(field) || text == "0" || text == "false", "%s: '%s' is neither true nor false", name.c_str(),
               text.c_str());
    }
}

// ---- declarations

template <class T>
void Parser::add(const char* section, unsigned kind, const char* letter, const char* field_name, T& field,
                 const char* given_unit, const char* given_help, double least, double most) {
    std::string name = field_name, unit = given_unit, help = given_help;
    std::ranges::replace(name, '_', '-');
    const std::string dashed = "--" + name, names = letter + std::string(*letter ? "," : "") + dashed;
    CLI::Option* option = unit.empty() ? app.add_flag(names) : app.add_option(names);
    option->take_last()->group(section)->option_text(unit);
    option->each([=, this, &field](const std::string& text) {
        ENSURE(in_file || !text.starts_with("--") || !find(text), "%s needs a value (%s), but the option %s follows",
               dashed.c_str(), unit.c_str(), text.c_str());
        const bool may_be_empty = !std::is_same_v<T, std::string> || unit == "TEXT" || kind & PATHS & ~PATH;
        ENSURE(!text.empty() || in_file || may_be_empty || name == "output",
               "%s '': the %s is missing (an unset variable of the shell?)", dashed.c_str(), unit.c_str());
        set(field, dashed, kind, unit, least, most, text);
    });
    const auto json = [&field, unit]() -> Json {
        if constexpr (std::is_enum_v<T>)
            return words_of(unit).at(size_t(field));
        else if constexpr (std::is_same_v<T, bool>)
            return unit.empty() ? Json(field) : Json(words_of(unit).at(!field));
        else
            return field;
    };
    all.push_back({name, kind, option, json});
    known.push_back(name);
    const std::string initial = all.back().value();
    const bool has_default = unit.empty() || initial.empty() || help.ends_with(']');
    option->default_str(initial)->description(help + (has_default ? "" : " [" + initial + "]"));
}

Parser::Parser(const Options& options) : o(options) {
    app.formatter(std::make_shared<Help>(o.command));
    app.get_formatter()->column_width(36);
    app.footer("  -h,--help, --version\nA value in [] is the default. --name VALUE and --name=VALUE are the same.");
    app.allow_extras();
    // CLI11's own flag for help comes after errors in other options; this one comes first.
    app.set_help_flag();
    app.add_flag_callback("-h,--help", [] { throw CLI::CallForHelp(); })->group("");
    app.set_version_flag("--version", version())->group("");
    enum : unsigned { TRAINING = 1 | 8, GENERATE = 2, EVAL = 4, PLAN = 8, TOKENIZE = 16, EXPORT = 32 };  // 1 << Command
    const unsigned own = 1u << int(o.command);
    const char* section = "";
    bool listed = false;
#define SECTION(commands, title) section = title, listed = own & (commands);
#define OPTION(kind, letter, field, initial, ...) AGAIN(kind, letter, field, __VA_ARGS__)
#define AGAIN(kind, letter, field, ...) \
    if (listed) add(section, kind, letter, #field, o.field, __VA_ARGS__);
#include "train/options.inc"
    if (own & TRAINING)
        app.add_option("-y")->take_last()->group("")->each(
            [this](const std::string& text) { o.resume = number<int>("-y", text) > 0; });
}

// ---- run.toml and --config

// Returns the path, or the patterns, that a file's option has here. A relative one belongs to the directory in which
// the run was started; if that is not here, the run was moved together with its data, and the path stays relative.
static std::string resolve_path(const std::string& path, const std::string& directory, unsigned kind) {
    if (const size_t line = kind & PATHS & ~PATH ? path.find('\n') : path.npos; line != path.npos)
        return resolve_path(path.substr(0, line), directory, kind) + "\n" +
               resolve_path(path.substr(line + 1), directory, kind);
    const char first = path[std::min(path.find_first_not_of('{'), path.size())];  // "{/a,/b}/train_*.bin" is absolute
    if (strchr("/~", first) || directory == current_directory() || !is_directory(directory)) return path;
    std::string out;
    for (const char c : directory) out += std::string(kind & PATTERN & ~PATHS && strchr("*?[]{}\\", c) ? "\\" : "") + c;
    return out + "/" + path;
}

// Takes a file's options that are not set. saved: it is run.toml of the run that is resumed, which no recipe changes.
void Parser::read_text(const std::string& path, const std::string& text, bool saved) {
    in_file = true;
    const bool shape_is_set = has_shape();
    const Declared* schedule = find("--schedule");
    // The file's cooldown belongs to its own schedule.
    const bool leaves_cooldown = schedule && schedule->is_set() && o.schedule != Decay::wsd;
    std::string directory, taken, kept;
    std::set<std::string> found;
    for (Declared& d : all) d.from_run |= saved && !d.is_set();
    for (auto& [name, value] : parse_toml(text, path)) {
        if (saved && name == "cudnn") name = "attention", value = value == "off" ? "mma" : "auto";  // version 0.3.0
        if (!found.insert(name).second)
            fail(EXIT_BAD_DATA, "%s: %s is there twice", path.c_str(), printable(name).c_str());
        if (name == "config")
            fail(EXIT_BAD_DATA, "%s: config = %s: a file names no further one; put its options here", path.c_str(),
                 shell_word(value).c_str());
        if (name == "directory") {
            directory = value;
            continue;
        }
        Declared* d = find("--" + name);
        if (!d) fail(EXIT_BAD_DATA, "%s: %s", path.c_str(), unknown_option("--" + name, known).c_str());
        const bool is_path = d->kind & PATH && !std::ranges::count(words_of(d->option->get_option_text()), value);
        const std::string here = is_path ? resolve_path(value, directory, d->kind) : value;
        if (name == "cooldown" && leaves_cooldown) continue;
        if (!saved && d->from_run && !d->has(value)) kept += " --" + name + " " + shell_word(d->value());
        const bool not_here = saved ? d->kind & ONE_START : d->from_run;
        if (d->is_set() || not_here || (shape_is_set && d->kind & SHAPE)) continue;
        try {
            d->option->add_result(here)->run_callback();
            if (name == "recipe") recipe_text(here);  // refuses an unknown one, with the file's name
        } catch (const Error& error) {
            fail(EXIT_BAD_DATA, "%s (from %s; --%s on the command line comes first)", error.what(), path.c_str(),
                 name.c_str());
        }
        if (d->value() != d->option->get_default_str()) taken += " --" + name + " " + shell_word(d->value());
    }
    if (!taken.empty()) o.taken.push_back("options from " + path + ":" + taken);
    if (!kept.empty())
        o.taken.push_back("the run keeps" + kept + ", which " + path + " has otherwise; give an option to change it");
}

void Parser::read_saved() {
    const std::string here = o.output == "." ? current_directory() : o.output;
    const std::string run = parent_directory(here), name = here.substr(here.rfind('/') + 1);
    if (name.starts_with("step_") && path_exists(run + "/run.toml")) {
        std::string newest = "not saved yet";
        for (const std::string& entry : list_directory(run))
            if (entry.starts_with("step_") && !entry.ends_with(".tmp")) newest = entry;
        if (!is_directory(here))
            fail(EXIT_NO_INPUT, "%s: there is no such checkpoint; the newest is %s", here.c_str(), newest.c_str());
        o.taken.push_back(here + " is a checkpoint of a run, which continues from its newest one");
        o.output = run;
    }
    const std::string path = o.output + "/run.toml";
    if (path_exists(path)) return read_text(path, read_file(path, 1 << 20), true);
    ENSURE(o.command == Command::plan || !o.train_data.empty(),
           "--train-data is missing, and so is %s, which --resume reads: give the --output of a run, or all options",
           path.c_str());
}

// ---- the command line

Declared* Parser::find(const std::string& name) {
    const auto d = std::find_if(all.begin(), all.end(), [&](auto& d) { return d.option->check_name(name); });
    return d == all.end() ? nullptr : &*d;
}

// Returns the arguments as CLI11 takes them, last first.
static std::vector<std::string> reversed(Parser& p, const char* const* begin, const char* const* end) {
    std::vector<std::string> arguments;
    for (const char* const* at = end; at-- > begin;) {
        const std::string text = *at, name = text.substr(0, text.find('='));
        // CLI11 would read "-output=x" as -o utput=x.
        ENSURE(!text.starts_with("-") || text.starts_with("--") || text.size() < 3 || !p.find("-" + name),
               "%s: a long option takes two dashes: -%s", text.c_str(), name.c_str());
        const bool is_empty = name.starts_with("--") && name.size() > 2 && text == name + "=";
        if (is_empty) arguments.emplace_back();  // CLI11 would take the next argument
        arguments.push_back(is_empty ? name : text);
    }
    return arguments;
}

void Parser::read_command_line(int argc, const char* const* argv) {
    // Everything after "--" is an input, also if it looks like an option.
    const bool has_inputs = o.command == Command::tokenize || o.command == Command::export_model;
    const char* const* end = has_inputs ? std::find(argv, argv + argc, std::string("--")) : argv + argc;
    try {
        app.parse(reversed(*this, argv, end));
    } catch (const CLI::CallForHelp&) {
        o.answer = CLI::detail::find_and_replace(app.help(), "\n\n\n", "\n\n");  // between sections
    } catch (const CLI::CallForVersion& version) {
        o.answer = version.what() + std::string("\n");
    } catch (const CLI::ArgumentMismatch& error) {
        const std::string text = error.what();
        fail(EXIT_USAGE, "%s needs a value (see --help)", text.substr(0, text.find(':')).c_str());
    } catch (const CLI::ParseError& error) {
        fail(EXIT_USAGE, "%s (see --help)", error.what());
    }
    if (!o.answer.empty()) return void(o.command = Command::help);
    for (const std::string& extra : app.remaining()) {
        ENSURE(extra.size() < 2 || extra[0] != '-', "%s",
               unknown_option(extra.substr(0, extra.find('=')), known).c_str());
        ENSURE(has_inputs, "unexpected argument '%s'; %s (see --help)", extra.c_str(),
               extra.ends_with(".bin") ? "quote a pattern of shards, so that the shell leaves it as it is"
                                       : "a command comes first, values follow their option");
        o.inputs.push_back(extra);
    }
    if (end < argv + argc) o.inputs.insert(o.inputs.end(), end + 1, argv + argc);
}

static Command find_command(const std::string& first) {
    if (first.empty() || first[0] == '-') return Command::train;
    for (int i = 0; i < int(Command::help); i++)
        if (first == command_names[i]) return Command(i);
    fail(EXIT_USAGE,
         "unknown command '%s'; the commands are train, generate, eval, plan, tokenize and export (see --help)",
         first.c_str());
}

Options parse_options(int argc, const char* const* argv) {
    const std::string first = argc > 1 ? argv[1] : "";
    Options defaults;
    defaults.command = find_command(first);
    if (defaults.command == Command::tokenize) defaults.output.clear();
    if (defaults.command == Command::train || defaults.command == Command::plan) defaults.val_tokens = -1;
    Parser parser(defaults);
    Options& o = parser.o;
    for (int i = 0; i < argc; i++) o.command_line.append(i ? " " : "").append(shell_word(argv[i]));
    const std::string program = argc > 0 ? argv[0] : "train_gpt2";
    parser.app.name(message_text(program.substr(program.rfind('/') + 1)));
    const int skip = std::min(argc, first == command_names[int(o.command)] ? 2 : 1);
    parser.read_command_line(argc - skip, argv + skip);
    if (o.command == Command::help) return o;
    if (!o.config.empty()) parser.read_text(o.config, read_file(o.config, 1 << 20, true), false);
    while (o.output.size() > 1 && (o.output.ends_with('/') || o.output.ends_with("/.")))
        o.output.pop_back();  // as shells complete it
    ENSURE(!o.resume || !o.output.empty(), "--resume needs the --output that holds the checkpoints");
    const bool has_shape = parser.has_shape();
    if (o.resume) parser.read_saved();
    if (const Declared* recipe = parser.find("--recipe"); recipe && recipe->is_set())
        parser.read_text("recipe " + o.recipe, recipe_text(o.recipe), false);
    const bool has_file = !o.prompt_file.empty() && o.prompt_file != "-" && o.prompt_file != "/dev/stdin";
    o.reads_stdin = o.command == Command::generate && !has_file && !parser.find("--prompt")->is_set();
    check_options(o);
    o.default_model |= o.resume && !has_shape;  // the checkpoint's shape is used
    return o;
}

// ---- the current values

std::string run_toml(const Options& options) {
    const Parser parser(options);
    std::string text = "# The options of this run, which --resume reads. A new run may take them with --config.\n";
    text += "directory = " + toml_quoted(current_directory()) + "\n";
    for (const Declared& d : parser.all)
        if (!(d.kind & ONE_START)) text += d.name + " = " + d.toml() + "\n";
    return text;
}

Json options_json(const Options& options) {
    const Parser parser(options);
    Json json;
    for (const Declared& d : parser.all) json[d.name] = d.json();
    return json;
}

std::string option_text(const Options& options, const std::string& name) {
    return Parser(options).find("--" + name)->value();
}

std::string changed_options(const Options& options, const Json& before) {
    const Parser parser(options);
    std::string text;
    for (const Declared& d : parser.all) {
        const Json* was = before.find(d.name);
        if (!was || d.kind & (FREE | ONE_START) || d.json() == *was || d.has(was->text)) continue;
        text += (text.empty() ? "--" : ", --") + d.name + " " + d.toml() + " (was " + json_text(*was) + ")";
    }
    return text;
}
