#include "options/arguments.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include <CLI/CLI.hpp>

// ---- values

// std::from_chars, also with libraries that lack it for floating-point numbers.
template <class T>
static std::from_chars_result read_number(const std::string& text, T& value) {
#if !defined(__cpp_lib_to_chars)  // LLVM's C++ library supports integers only
    if constexpr (std::is_floating_point_v<T>) {
        if (text.empty() || !strchr("-.0123456789", text[0]) || text.find_first_not_of("+-.0123456789eE") < text.size())
            return {text.data(), std::errc::invalid_argument};
        char* stop;
        errno = 0;
        value = T(std::is_same_v<T, float> ? strtof(text.c_str(), &stop) : strtod(text.c_str(), &stop));
        return {stop, errno == ERANGE ? std::errc::result_out_of_range : std::errc()};
    } else
#endif
        return std::from_chars(text.data(), text.data() + text.size(), value);
}

template <class T>
T parse_value(const std::string& name, const std::string& text) {
    if constexpr (std::is_same_v<T, std::string>) {
        return text;
    } else if constexpr (std::is_same_v<T, bool>) {
        ENSURE(text == "0" || text == "1" || text == "true" || text == "false", "%s: '%s' is neither 0 nor 1",
               name.c_str(), text.c_str());
        return text == "1" || text == "true";
    } else {
        T value{};
        const char* end = text.data() + text.size();
        const auto [stop, error] = read_number(text, value);
        ENSURE(error != std::errc::result_out_of_range, "%s: %s is out of range", name.c_str(), text.c_str());
        ENSURE(error == std::errc() && stop == end, "%s: '%s' is not a %s", name.c_str(), text.c_str(),
               std::is_floating_point_v<T> ? "number"
               : std::is_signed_v<T>       ? "whole number"
                                           : "whole number, 0 or more");
        return value;
    }
}

template <class T>
std::string value_text(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
        return value;
    } else if constexpr (std::is_same_v<T, bool>) {
        return value ? "1" : "0";
    } else if constexpr (std::is_floating_point_v<T>) {
        std::string text;
        for (int digits = 6; digits <= 17; digits++)
            if (text = format("%.*g", digits, value); std::stod(text) == value) break;
        return text;
    } else {
        return std::to_string(value);
    }
}

#define INSTANTIATE_VALUE(T)                                           \
    template T parse_value<T>(const std::string&, const std::string&); \
    template std::string value_text<T>(const T&)
INSTANTIATE_VALUE(std::string);
INSTANTIATE_VALUE(bool);
INSTANTIATE_VALUE(int);
INSTANTIATE_VALUE(int64_t);
INSTANTIATE_VALUE(uint64_t);
INSTANTIATE_VALUE(double);

double parse_duration(const std::string& name, const std::string& text) {
    constexpr std::pair<char, double> units[] = {{'d', 86400}, {'h', 3600}, {'m', 60}, {'s', 1}};
    const auto is_number = [](const std::string& digits, double& value) {
        const auto [stop, error] = read_number(digits, value);
        return error == std::errc() && stop == digits.data() + digits.size();
    };
    double seconds = 0.0, shortest = std::numeric_limits<double>::infinity();
    if (double number; is_number(text, number)) return number;
    bool valid = !text.empty();
    for (size_t at = 0; valid && at < text.size();) {
        const size_t letter = std::min(text.find_first_not_of("0123456789.", at), text.size());
        double number = 0.0, length = 0.0;
        for (const auto& [unit, seconds_of_unit] : units)
            if (text[letter] == unit) length = seconds_of_unit;
        valid = is_number(text.substr(at, letter - at), number) && length > 0.0 && length < shortest;
        seconds += number * length;
        shortest = length;  // each unit once, and the longest first
        at = letter + 1;
    }
    ENSURE(valid, "%s: '%s' is not a time; give days, hours, minutes or seconds, as in 1d, 3h50m or 90s", name.c_str(),
           text.c_str());
    return seconds;
}

// ---- the command line

bool OptionSpec::is_called(std::string_view name) const {
    for (std::string_view rest = names;;) {
        const size_t comma = rest.find(',');
        if (rest.substr(0, comma) == name) return true;
        if (comma == rest.npos) return false;
        rest.remove_prefix(comma + 1);
    }
}

// Refuses "--output --steps 5": CLI11 would take --steps for the value of --output.
static void check_values_follow(const OptionSpecs& all, const ParsedArgs& given) {
    for (const auto& [i, text] : given.values)
        for (const OptionSpec& other : all)
            ENSURE(text != other.long_name(), "%s needs a value (%s), but the option %s follows", all[i].long_name(),
                   all[i].unit, text.c_str());
}

// Refuses "-output=x": CLI11 would read it as -o with the value "utput=x".
static void refuse_single_dash(const OptionSpecs& all, const std::string& argument) {
    if (argument.size() < 3 || argument[0] != '-' || argument[1] == '-') return;
    const std::string name = "-" + argument.substr(0, argument.find('='));
    for (const OptionSpec& d : all)
        ENSURE(name != d.long_name(), "%s: a long option takes two dashes: %s", argument.c_str(), name.c_str());
}

// The option that the argument names, if the option was a flag in earlier releases and no value follows. Else null.
static const OptionSpec* flag_without_value(const OptionSpecs& all, const std::string& argument,
                                            const std::string& next) {
    if (!next.starts_with("-")) return nullptr;
    for (const OptionSpec& d : all)
        if (d.was_flag && d.is_called(argument)) return &d;
    return nullptr;
}

// The arguments as CLI11 takes them, from the last to the first. Adds "on" after a former flag without a value, with a
// note in `renamed`, and "" after "--name=".
static std::vector<std::string> prepare_arguments(const OptionSpecs& all, const char* const* argv,
                                                  const char* const* end, std::vector<std::string>& renamed) {
    std::vector<std::string> arguments;
    for (const char* const* argument = argv; argument < end; argument++) {
        arguments.push_back(*argument);
        refuse_single_dash(all, *argument);
        if (const OptionSpec* flag = flag_without_value(all, *argument, argument + 1 < end ? argument[1] : "--")) {
            arguments.push_back("on");
            renamed.push_back(format("%s is now %s on; the next release will accept only this form", flag->long_name(),
                                     flag->long_name()));
        }
        std::string& name = arguments.back();
        if (!name.starts_with("--") || name.size() == 3 || name.find('=') != name.size() - 1) continue;
        name.pop_back();  // otherwise CLI11 would take the next argument for the value
        arguments.push_back("");
    }
    std::reverse(arguments.begin(), arguments.end());
    return arguments;
}

static void parse_or_refuse(CLI::App& app, std::vector<std::string> arguments) {
    try {
        app.parse(arguments);
    } catch (const CLI::ArgumentMismatch& error) {
        const std::string text = error.what();
        fail(EXIT_USAGE, "%s needs a value (see --help)", text.substr(0, text.find(':')).c_str());
    } catch (const CLI::ParseError& error) {
        fail(EXIT_USAGE, "%s (see --help)", error.what());
    }
}

struct ArgumentSplitter::Names {
    CLI::App app;
    struct Target {
        size_t spec;
        bool by_old_name;
        CLI::Option* option = nullptr;
        std::string text = {};
    };
    std::deque<Target> targets;  // CLI11 keeps references to the texts
    CLI::Option *help, *version;

    void add(const OptionSpecs& all, size_t i, const char* names, bool flag) {
        Target& target = targets.emplace_back(Target{i, names == all[i].old_name});
        target.option = flag ? app.add_flag(names, target.text) : app.add_option(names, target.text);
        target.option->take_last()->type_name(all[i].unit);
    }
};

ArgumentSplitter::ArgumentSplitter(const OptionSpecs& all, bool takes_inputs)
    : all(all), takes_inputs(takes_inputs), names(new Names) {
    names->app.set_help_flag();
    names->app.allow_extras();
    for (size_t i = 0; i < all.size(); i++) {
        names->add(all, i, all[i].names, all[i].kind == ValueKind::flag);
        if (*all[i].llmc_alias) names->add(all, i, all[i].llmc_alias, false);
        if (*all[i].old_name) names->add(all, i, all[i].old_name, all[i].kind == ValueKind::flag);
    }
    names->help = names->app.add_flag("-h,--help");
    names->version = names->app.add_flag("--version");
}

ArgumentSplitter::~ArgumentSplitter() = default;

ParsedArgs ArgumentSplitter::split(int argc, const char* const* argv) {
    ParsedArgs given;
    // Everything after "--" is an input, also if it looks like an option.
    const char* const* end = takes_inputs ? std::find(argv, argv + argc, std::string("--")) : argv + argc;
    parse_or_refuse(names->app, prepare_arguments(all, argv, end, given.renamed));
    given.help = names->help->count() > 0, given.version = names->version->count() > 0;
    for (const Names::Target& target : names->targets)
        if (target.option->count() > 0) {
            const OptionSpec& spec = all[target.spec];
            given.values[target.spec] = target.text;
            if (target.by_old_name)
                given.renamed.push_back(format("%s is now %s; the next release will accept only the new name",
                                               spec.old_name, spec.long_name()));
        }
    for (const std::string& extra : names->app.remaining())
        (takes_inputs && !extra.starts_with("-") ? given.inputs : given.unknown).push_back(extra);
    if (end < argv + argc) given.inputs.insert(given.inputs.end(), end + 1, argv + argc);
    check_values_follow(all, given);
    return given;
}

void read_value(const OptionSpec& spec, const std::string& text) {
    spec.read(text);
    for (const auto& check : spec.checks) check();
}

void read_values(const OptionSpecs& all, const ParsedArgs& given) {
    for (const auto& [i, text] : given.values) read_value(all[i], text);
}

// ---- help

// The number of insertions, deletions, substitutions and swaps of neighbours that turn a into b.
static int edit_distance(const std::string& a, const std::string& b) {
    std::vector<int> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) above[j] = int(j);
    for (size_t i = 1; i <= a.size(); i++) {
        row[0] = int(i);
        for (size_t j = 1; j <= b.size(); j++) {
            row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
        before.swap(above);
        above.swap(row);
    }
    return above[b.size()];
}

std::string nearest_name(const std::vector<std::string>& known, const std::string& name) {
    std::string nearest;
    int distance = std::max(2, (int(name.size()) - 2) / 3) + 1;  // a name at a larger distance is not similar
    if (name.size() < 6) distance = 2;
    for (const std::string& candidate : known) {
        if (std::abs(int(name.size()) - int(candidate.size())) >= distance) continue;  // the least that they differ
        if (const int e = edit_distance(name, candidate); e < distance) {
            distance = e;
            nearest = candidate;
        }
    }
    return nearest;
}

std::string nearest_option(const OptionSpecs& all, const std::string& name) {
    std::vector<std::string> known = {"--help", "--version"};
    for (const OptionSpec& d : all) known.push_back(d.long_name());
    if (name.size() > 4)
        for (const std::string& candidate : known)  // the start of a name was given: --warm, --temp
            if (candidate.starts_with(name)) return candidate;
    const std::string nearest = nearest_name(known, name);
    if (!nearest.empty() || name.size() <= 4) return nearest;
    for (const std::string& candidate : known)  // another part of a name was given: --batch
        if (candidate.find(name.substr(2)) != std::string::npos) return candidate;
    return nearest;
}

std::string list_options(const OptionSpecs& all) {
    std::string out;
    constexpr int column = 36;
    std::string section;
    for (const OptionSpec& d : all) {
        if (d.section != section) out += format("\n%s:\n", d.section);
        section = d.section;
        const std::string word = *d.word ? format("[=%s]", d.word) : "";
        const std::string left = format("  %s%s%s%s", d.names, word.c_str(), *d.unit ? " " : "", d.unit);
        out += left + (int(left.size()) + 2 > column ? "\n" + std::string(column, ' ')
                                                     : std::string(column - left.size(), ' '));
        out += d.help;
        if (!d.default_text.empty()) out += (*d.help ? " [" : "[") + d.default_text + "]";
        out += "\n";
    }
    return out;
}
