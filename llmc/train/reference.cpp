#include "train/reference.h"

#include <cmath>
#include <sstream>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"

using nlohmann::json;

static constexpr const char* curves[] = {
#include <curves.inc>  // the files of data/curves, by mk/version.mk
};

std::optional<double> Reference::loss_at(int64_t step) const {
    const auto next = losses.lower_bound(step);
    if (next == losses.end()) return {};
    if (next->first == step) return next->second;
    if (next == losses.begin() || std::prev(next)->first <= 0) return {};
    const auto [x, loss] = *std::prev(next);
    const double part = std::log(double(step) / double(x)) / std::log(double(next->first) / double(x));
    return loss + part * (next->second - loss);
}

// Leaves out an incomplete last line, and losses that are not finite, which are null.
static Reference read_curve(const std::string& text, const std::string& path) {
    Reference curve = {path, "", {}};
    std::istringstream lines(text.substr(0, text.rfind('\n') + 1));
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        const bool is_val = line.starts_with("{\"kind\":\"val\""), is_run = line.starts_with("{\"kind\":\"run\"");
        if (!is_val && !is_run) continue;
        const json object = parse_json_object(line, format("%s, line %d", path.c_str(), number));
        curve.name = object.value("name", curve.name);
        curve.source = object.value("source", curve.source);
        if (is_val && !object.at("val_loss").is_null()) curve.losses[object.at("step")] = object["val_loss"];
    }
    if (curve.losses.empty())
        fail(EXIT_BAD_DATA, "--reference %s has no validation losses; give the log of a run that has", path.c_str());
    return curve;
}

Reference find_reference(const std::string& option, const json& run) try {
    if (option == "none") return {};
    const std::string path = option + (is_directory(option) ? "/log.jsonl" : "");
    if (!option.empty()) return read_curve(read_file(path, int64_t(1) << 34), path);
    for (const std::string text : curves) {
        json merged = run;
        merged.merge_patch(parse_json_object(text.substr(0, text.find('\n')), "data/curves").at("match"));
        if (merged == run) return read_curve(text, "data/curves");
    }
    return {};
} catch (const json::exception& error) {
    fail(EXIT_BAD_DATA, "--reference %s has a line that is not one of a log: %s", option.c_str(), error.what());
}
