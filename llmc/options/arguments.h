// arguments.h: a table of options, and reading a command line by it. What the options are is in options.cpp.
#pragma once
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "base/common.h"

enum class ValueKind { text, flag, number };

// One option: everything there is to know about it, and the field that it sets.
struct OptionSpec {
    std::string section;
    std::string names;  // "-b,--micro-batch"
    std::string unit;   // "SEQUENCES", "fp32|bf16|auto"; a flag has none
    std::string help;
    std::string default_text;  // as the help shows it
    ValueKind kind;
    std::string old_name;                          // "--head-chunks"; still taken, with a note
    std::string llmc_alias;                        // of a flag, as llm.c has it: -y 0, -y 1
    std::function<void()> reset;                   // the field becomes its default
    std::function<void(const std::string&)> read;  // text to the field, or refused
    std::function<std::string()> text;             // the field as text that reads back as the same value
    std::vector<std::function<void()>> checks;     // of the field; a refused value throws

    std::string long_name() const { return names.substr(names.find("--")); }
    bool is_called(const std::string& name) const {
        return ("," + names + ",").find("," + name + ",") != std::string::npos;
    }
};

using OptionSpecs = std::deque<OptionSpec>;  // Section::add hands out references, so they must stay where they are

// For std::string, bool, int, int64_t, uint64_t and double. A number is the whole text and fits, or it is refused.
template <class T>
T parse_value(const std::string& name, const std::string& text);
// Text that reads back as the same value: 0.0006, 1e-08, 524288.
template <class T>
std::string value_text(const T& value);

// What an added value must satisfy, and how the help shows its default where that is not a value.
template <class T>
struct OptionBuilder {
    OptionSpec& spec;
    T& field;

    OptionBuilder& shown(const std::string& as) { return spec.default_text = as, *this; }
    OptionBuilder& renamed_from(const char* name) { return spec.old_name = name, *this; }
    OptionBuilder& between(T least, T most) { return check_range(least, most, true), *this; }
    OptionBuilder& from_to_below(T least, T below) { return check_range(least, below, false), *this; }
    OptionBuilder& at_least(T least) { return check_range(least, std::numeric_limits<T>::max(), true), *this; }

    // One of the choices that the unit lists: "fp32|bf16|auto".
    OptionBuilder& one_of_unit() {
        spec.checks.push_back([name = spec.long_name(), choices = spec.unit, &value = field] {
            const bool known = !value.empty() && value.find('|') == std::string::npos &&
                               ("|" + choices + "|").find("|" + value + "|") != std::string::npos;
            ENSURE(known, "%s %s is not known: %s", name.c_str(), value.c_str(), choices.c_str());
        });
        return *this;
    }

    // A word beside the numbers, for a value that the checks before this one refuse.
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
        spec.text = [text = spec.text, word, value, &field = field] {
            return field == value ? word : text();
        };
        return *this;
    }

    // NaN is in no range.
    void check_range(T least, T most, bool most_too) {
        spec.checks.push_back([name = spec.long_name(), least, most, most_too, &value = field] {
            std::string upper;
            if (most < std::numeric_limits<T>::max())
                upper = format(" and %s %s", most_too ? "at most" : "below", value_text(most).c_str());
            ENSURE(value >= least && (most_too ? value <= most : value < most), "%s %s must be at least %s%s",
                   name.c_str(), value_text(value).c_str(), value_text(least).c_str(), upper.c_str());
        });
    }
};

// What a function that declares a section of options fills.
struct Section {
    OptionSpecs& all;
    std::string title;

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

    // On without a value, off by default.
    void add_flag(const char* names, bool& field, const char* help, const char* llmc_alias = "") {
        add(names, field, false, "", help).shown("").spec.llmc_alias = llmc_alias;
    }
};

// What was given: the text of each option, by its place in the specs.
struct ParsedArgs {
    std::map<size_t, std::string> values;
    std::vector<std::string> inputs;   // what belongs to no option, where a command takes inputs
    std::vector<std::string> renamed;  // notes on options that were given by an old name
    std::vector<std::string> unknown;  // options and arguments that nobody declared
    bool help = false, version = false;
};

// Takes the arguments apart without reading values. The last of several values counts. Refuses an option without a
// value.
ParsedArgs split_arguments(const OptionSpecs& all, bool takes_inputs, int argc, const char* const* argv);
// Sets the fields of what was given, and refuses what their checks refuse.
void read_values(const OptionSpecs& all, const ParsedArgs& given);
// Of the known names the one that a mistyped name is nearest to; empty when none looks like it.
std::string nearest_name(const std::vector<std::string>& known, const std::string& name);
// The same of the options, but one that begins with the name comes first, and one that contains it last.
std::string nearest_option(const OptionSpecs& all, const std::string& name);
// The part of the help that lists the options, section by section.
std::string list_options(const OptionSpecs& all);
