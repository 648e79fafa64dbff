#include "commands/saved_options.h"

#include <cstring>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"

// Whether a path or pattern is relative. Opening braces are skipped: "{/a,/b}/train_*.bin" is absolute.
static bool is_relative(const std::string& path) {
    const size_t start = path.find_first_not_of('{');
    return start != std::string::npos && path[start] != '/' && path[start] != '~';
}

// Escapes a path, so that as a shell pattern it matches only itself.
static std::string as_pattern(const std::string& path) {
    std::string out;
    for (const char c : path) out += std::string(strchr("*?[]{}\\", c) ? "\\" : "") + c;
    return out;
}

// Makes the relative paths in saved options absolute if the run was started in another directory. If that directory
// does not exist here, the run comes from another machine, or was moved together with its data: paths stay relative.
static void resolve_paths(const Options& o, nlohmann::json& saved, const std::string& directory) {
    if (!is_directory(directory) || directory == current_directory()) return;
    for (const Setting& setting : settings(o)) {
        const auto path = saved.find(setting.name);
        if (!setting.is_path || path == saved.end() || !path->is_string()) continue;
        const std::string text = path->get<std::string>();
        if (!is_relative(text)) continue;
        *path = (setting.is_pattern ? as_pattern(directory) : directory) + "/" + text;
    }
}

std::string parse_run_json(const std::string& text, const std::string& path, const Options& o) {
    nlohmann::json run = parse_json_object(text, path);
    const auto options = run.find("options");
    if (options == run.end() || !options->is_object())
        fail(EXIT_BAD_DATA, "%s: has no options; give --train-data and the other options", path.c_str());
    if (const auto directory = run.find("directory"); directory != run.end() && directory->is_string())
        resolve_paths(o, *options, directory->get<std::string>());
    return options->dump();
}

std::string saved_options(const Options& o) {
    const std::string path = o.output + "/run.json";
    if (!path_exists(path) && (o.command == Command::plan || o.print_launch || !o.train_data.empty())) return "";
    ENSURE(path_exists(path),
           "--train-data is missing, and %s, from which --resume takes options, does not exist: give the --output of a "
           "run, or all options",
           path.c_str());
    return parse_run_json(read_file(path, 16 << 20), path, o);
}
