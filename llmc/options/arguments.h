// arguments.h: parses a command line with a table of options. The table is in option_table.cpp.
#pragma once
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/common.h"
#include "base/terminal.h"

enum class ValueKind { text, flag, number };

// The declaration of one option, with functions that access the field it sets. The texts are literals.
struct OptionSpec {
    const char* section;
    const char* names;  // "-b,--micro-batch"; the long name is the last
    const char* unit;   // "SEQUENCES", "fp32|bf16|auto"; a flag has none
    const char* help;
    std::string default_text;  // the default as --help shows it
    ValueKind kind;
    const char* old_name = "";                     // "--head-chunks"; still accepted, with a note
    const char* llmc_alias = "";                   // llm.c's letter for a flag, with a value: -y 0, -y 1
    const char* word = "";                         // "strict": a flag also takes this value, as --resume=strict
    std::function<void()> reset;                   // sets the field to its default
    std::function<void(const std::string&)> read;  // sets the field from text; throws if the text is not a value
    std::function<std::string()> text;             // the field as text, from which read() gives the same value
    std::vector<std::function<void()>> checks;     // checks of the field; each throws if it refuses the value

    bool was_flag = false;      // a flag in earlier releases: --autotune alone means --autotune on, with a note
    bool planned = false;       // `plan` uses the option; plan accepts the other options of `train` without effect
    bool of_one_start = false;  // a resume does not take the option's value from the earlier start of the run
    bool of_shape = false;    // belongs to the model's shape: if one such option is given, a resume takes none of them
    bool may_change = false;  // a resume accepts another value without a warning
    bool may_differ = false;  // the ranks of a run may have different values
    bool is_path = false;     // a resume reads a relative path from the directory in which the run was started
    bool is_pattern = false;  // the path is a shell pattern

    const char* long_name() const { return strstr(names, "--"); }
    const char* key() const { return long_name() + 2; }  // the name in run.json
    bool is_called(std::string_view name) const;
};

using OptionSpecs = std::deque<OptionSpec>;  // a deque, because Section::add returns references into it

// Converts text to std::string, bool, int, int64_t, uint64_t or double. Refuses text that is not entirely a number, and
// a number out of the type's range.
template <class T>
T parse_value(const std::string& name, const std::string& text);
// Text from which parse_value gives the same value: 0.0006, 1e-08, 524288.
template <class T>
std::string value_text(const T& value);
// Seconds of a duration: 3h50m, 1d12h, 90s, 1.5h, or 90. Refuses other text.
double parse_duration(const std::string& name, const std::string& text);

// Adds checks and properties to an option that was just declared, and changes how --help shows its default.
template <class T>
struct OptionBuilder {
    OptionSpec& spec;
    T& field;

    OptionBuilder& shown(const std::string& as) { return spec.default_text = as, *this; }
    OptionBuilder& renamed_from(const char* name) { return spec.old_name = name, *this; }
    OptionBuilder& was_flag() { return spec.was_flag = true, *this; }
    OptionBuilder& planned() { return spec.planned = true, *this; }
    OptionBuilder& of_one_start() { return spec.of_one_start = true, may_change(); }
    OptionBuilder& of_shape() { return spec.of_shape = true, *this; }
    // For an option that does not change the losses of the steps, or that has a check of its own.
    OptionBuilder& may_change() { return spec.may_change = true, *this; }
    OptionBuilder& may_differ() { return spec.may_differ = true, *this; }
    OptionBuilder& is_path() { return spec.is_path = true, *this; }
    OptionBuilder& is_pattern() { return spec.is_pattern = true, is_path(); }
    OptionBuilder& between(T least, T most) { return check_range(least, most, true), *this; }
    OptionBuilder& from_to_below(T least, T below) { return check_range(least, below, false), *this; }
    OptionBuilder& at_least(T least) { return check_range(least, std::numeric_limits<T>::max(), true), *this; }

    // 0 switches something off.
    OptionBuilder& zero_or_between(T least, T most) {
        spec.checks.push_back([name = spec.long_name(), least, most, &value = field] {
            ENSURE(value == 0 || (value >= least && value <= most), "%s %s must be 0, or at least %s and at most %s",
                   name, value_text(value).c_str(), value_text(least).c_str(), value_text(most).c_str());
        });
        return *this;
    }

    OptionBuilder& not_empty() {
        spec.checks.push_back([name = spec.long_name(), unit = spec.unit, &value = field] {
            ENSURE(!value.empty(), "%s is empty; give %s, or leave it out", name, unit);
        });
        return *this;
    }

    // The value must be one of the choices in the unit: "fp32|bf16|auto".
    OptionBuilder& one_of_unit() {
        spec.checks.push_back([name = spec.long_name(), choices = spec.unit, &value = field] {
            const bool known = !value.empty() && value.find('|') == std::string::npos &&
                               format("|%s|", choices).find("|" + value + "|") != std::string::npos;
            ENSURE(known, "%s %s is not known; give %s", name, shell_word(value).c_str(), choices);
        });
        return *this;
    }

    // Also accepts a word, which stands for a value that the checks before this one refuse: auto for 0.
    OptionBuilder& or_word(const std::string& word, T value) {
        spec.read = [read = spec.read, checks = std::move(spec.checks), word, value,
                     &field = field](const std::string& given) {
            if (given == word) {
                field = value;
                return;
            }
            read(given);
            for (const auto& check : checks) check();
        };
        spec.checks.clear();
        spec.text = [text = spec.text, word, value, &field = field] { return field == value ? word : text(); };
        return *this;
    }

    // For a number of seconds: also accepts a duration such as 3h50m.
    OptionBuilder& is_duration() {
        spec.read = [name = spec.long_name(), &field = field](const std::string& text) {
            field = parse_duration(name, text);
        };
        return *this;
    }

    // For a flag: --name=word sets the flag, and `with_word` too.
    OptionBuilder& or_equals(const char* word, bool& with_word) {
        spec.word = word;
        spec.reset = [reset = spec.reset, &with_word] {
            reset();
            with_word = false;
        };
        spec.read = [read = spec.read, name = spec.long_name(), word, &with_word](const std::string& text) {
            with_word = text == word;
            try {
                read(with_word ? "1" : text);
            } catch (const Error&) {
                fail(EXIT_USAGE, "%s: '%s' is neither 0, 1 nor %s", name, text.c_str(), word);
            }
        };
        spec.text = [text = spec.text, word, &with_word] { return with_word ? std::string(word) : text(); };
        return *this;
    }

    // Adds a check of the range, which also refuses NaN.
    void check_range(T least, T most, bool most_too) {
        spec.checks.push_back([name = spec.long_name(), least, most, most_too, &value = field] {
            std::string upper;
            if (most < std::numeric_limits<T>::max())
                upper = format(" and %s %s", most_too ? "at most" : "below", value_text(most).c_str());
            ENSURE(value >= least && (most_too ? value <= most : value < most), "%s %s must be at least %s%s", name,
                   value_text(value).c_str(), value_text(least).c_str(), upper.c_str());
        });
    }
};

// A section of options in --help; add() declares an option in it.
struct Section {
    OptionSpecs& all;
    const char* title;

    template <class T>
    OptionBuilder<T> add(const char* names, T& field, std::type_identity_t<T> initial, const char* unit,
                         const char* help) {
        OptionSpec& d = all.emplace_back();
        d.section = title, d.names = names, d.unit = unit, d.help = help, d.default_text = value_text<T>(initial);
        d.kind = std::is_same_v<T, std::string> ? ValueKind::text
                 : std::is_same_v<T, bool>      ? ValueKind::flag
                                                : ValueKind::number;
        d.reset = [&field, initial] { field = initial; };
        d.read = [&field, name = d.long_name()](const std::string& text) { field = parse_value<T>(name, text); };
        d.text = [&field] { return value_text(field); };
        return {d, field};
    }

    // A flag: off by default, on if given.
    OptionBuilder<bool> add_flag(const char* names, bool& field, const char* help, const char* llmc_alias = "") {
        OptionBuilder<bool> flag = add(names, field, false, "", help).shown("");
        flag.spec.llmc_alias = llmc_alias;
        return flag;
    }
};

// A command line, taken apart but not yet converted to values.
struct ParsedArgs {
    std::map<size_t, std::string> values;  // the text of each option that was given, by its index in OptionSpecs
    std::vector<std::string> inputs;       // arguments that belong to no option, if the command takes inputs
    std::vector<std::string> renamed;      // notes on options that were given by an old name
    std::vector<std::string> unknown;      // options that are not declared, and unexpected arguments
    bool help = false, version = false;
};

// Splits arguments into options and the text of each option's value. Refers to `all`.
struct ArgumentSplitter {
    const OptionSpecs& all;
    const bool takes_inputs;
    struct Names;  // CLI11's
    std::unique_ptr<Names> names;

    ArgumentSplitter(const OptionSpecs& all, bool takes_inputs);
    ~ArgumentSplitter();
    // If an option is given several times, the last one counts. Refuses an option without its value.
    ParsedArgs split(int argc, const char* const* argv);
};
// Sets the field of an option from text, and runs its checks.
void read_value(const OptionSpec& spec, const std::string& text);
// Calls read_value for each option that was given.
void read_values(const OptionSpecs& all, const ParsedArgs& given);
// The known name that is nearest to a mistyped one; empty if none is similar.
std::string nearest_name(const std::vector<std::string>& known, const std::string& name);
// The option that is nearest to a mistyped name. An option that begins with `name` is preferred; if no option is
// similar, one that contains `name` is returned.
std::string nearest_option(const OptionSpecs& all, const std::string& name);
// The part of the help that lists the options, section by section.
std::string list_options(const OptionSpecs& all);
