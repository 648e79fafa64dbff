#include "train/health.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"

void OutlierWindow::add(float value) {
    if (values.size() == SIZE) values.erase(values.begin());
    values.push_back(value);
}

// Sums are computed anew: running sums would round differently after a resume.
float OutlierWindow::limit(double z) const {
    if (z == 0.0 || values.size() < SIZE) return FLT_MAX;
    double sum = 0.0, squares = 0.0;
    for (float value : values) sum += double(value);
    const double mean = sum / double(SIZE);
    for (float value : values) squares += (double(value) - mean) * (double(value) - mean);
    if (squares == 0.0) return FLT_MAX;
    return float(std::min(double(FLT_MAX), mean + z * std::sqrt(squares / double(SIZE))));
}

bool Health::leaves_out(int64_t step) const {
    return std::find(left_out.begin(), left_out.end(), step) != left_out.end();
}

StepLimits Health::limits_of(int64_t step) const {
    if (leaves_out(step)) return SKIP_STEP;
    return options.on_spike == "warn" ? StepLimits() : limits[step % 2];
}

// A warning needs a spike of the loss: norms far above the mean are common in small models, and clipping limits them.
bool Health::is_spike(const StepResult& r) const {
    const bool of_norm = r.norm > limits[r.step % 2].norm && options.on_spike != "warn";
    return r.loss > limits[r.step % 2].loss || of_norm;
}

Verdict Health::judge(const StepResult& r) const {
    const bool finite = !std::isnan(r.factor);
    if (!finite && options.on_nan == "halt") return Verdict::halt;
    if (leaves_out(r.step)) return Verdict::skip;
    if (finite && !is_spike(r)) return Verdict::good;
    const std::string& policy = finite ? options.on_spike : options.on_nan;
    if (policy == "warn") return Verdict::warn;
    return policy == "rollback" ? Verdict::rollback : Verdict::skip;
}

Finding Health::examine(const StepResult& r) {
    Finding finding = {judge(r), skipped(r), ""};
    if (finding.verdict != Verdict::good) finding.text = describe(r);
    if (finding.skipped.empty()) {
        if (std::isfinite(r.loss) && std::isfinite(r.norm)) {  // an infinite mean has no spikes, and JSON no infinity
            losses.add(r.loss);
            norms.add(r.norm);
        }
        skipped_in_row = 0;
    } else if (++skipped_in_row >= MOST_SKIPPED && finding.verdict != Verdict::halt) {
        finding.verdict = Verdict::halt;
        finding.text += format(", the last of %d steps in a row that did not change the weights", MOST_SKIPPED);
    } else if (finding.verdict == Verdict::rollback && rollbacks == MOST_ROLLBACKS) {
        finding.verdict = Verdict::halt;
        finding.text += format(", after %d rollbacks", MOST_ROLLBACKS);
    }
    limits[r.step % 2] = {losses.limit(options.spike_z), norms.limit(options.spike_z)};
    return finding;
}

std::string Health::skipped(const StepResult& r) const {
    if (std::isfinite(r.factor)) return "";
    if (std::isnan(r.factor)) return "non_finite";
    return leaves_out(r.step) ? "left_out" : "spike";
}

std::string Health::describe(const StepResult& r) const {
    const long long step = r.step;
    if (!std::isfinite(r.loss) || !std::isfinite(r.norm))
        return format("step %lld: loss %g, gradient norm %g", step, std::fabs(double(r.loss)),
                      std::fabs(double(r.norm)));
    if (leaves_out(r.step)) return format("step %lld is left out, because it has failed before", step);
    const StepLimits& limit = limits[r.step % 2];
    const bool of_loss = r.loss > limit.loss;
    return format("step %lld: the %s is %g, above %g, the limit of the last %zu steps (--spike-z %g)", step,
                  of_loss ? "loss" : "gradient norm", double(of_loss ? r.loss : r.norm),
                  double(of_loss ? limit.loss : limit.norm), OutlierWindow::SIZE, options.spike_z);
}

void Health::roll_back(int64_t failed_step) {
    left_out.push_back(failed_step);
    rollbacks++;
}

std::string Health::json() const {
    const auto limit = [](const StepLimits& l) { return nlohmann::json{l.loss, l.norm}; };
    return nlohmann::json{{"losses", losses.values},
                          {"norms", norms.values},
                          {"limits", {limit(limits[0]), limit(limits[1])}},
                          {"left_out", left_out},
                          {"skipped_in_row", skipped_in_row}}
        .dump();
}

// Functions that read a part of the health in a checkpoint. They throw json::exception if its type is wrong.

static float finite_number(const nlohmann::json& value, const std::string& where) {
    const double number = value.get<double>();
    if (!(std::fabs(number) <= double(FLT_MAX)))
        fail(EXIT_BAD_DATA, "%s: the health of the run has the number %g", where.c_str(), number);
    return float(number);
}

static std::vector<float> finite_numbers(const nlohmann::json& list, const std::string& where) {
    std::vector<float> numbers;
    for (const nlohmann::json& value : list.get_ref<const nlohmann::json::array_t&>())
        numbers.push_back(finite_number(value, where));
    return numbers;
}

static int64_t count_of(const nlohmann::json& value, const std::string& where) {
    if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<int>::max())
        fail(EXIT_BAD_DATA, "%s: the health of the run has the number of steps %s", where.c_str(),
             printable(value.dump()).c_str());
    return value.get<int64_t>();
}

void Health::restore(const std::string& text, const std::string& where) {
    const nlohmann::json saved = parse_json_object(text, where);
    if (saved.empty()) return;  // of a version without it
    try {
        Health read;
        read.losses.values = finite_numbers(saved.at("losses"), where);
        read.norms.values = finite_numbers(saved.at("norms"), where);
        for (const nlohmann::json& step : saved.at("left_out").get_ref<const nlohmann::json::array_t&>())
            read.left_out.push_back(count_of(step, where));
        read.skipped_in_row = int(std::min<int64_t>(count_of(saved.at("skipped_in_row"), where), MOST_SKIPPED));
        for (int i : {0, 1}) {
            const nlohmann::json& limit = saved.at("limits").at(size_t(i));
            read.limits[i] = {finite_number(limit.at(0), where), finite_number(limit.at(1), where)};
        }
        const size_t count = read.losses.values.size();
        if (count > OutlierWindow::SIZE || read.norms.values.size() != count)
            fail(EXIT_BAD_DATA, "%s: %zu losses and %zu norms; at most %zu, and as many of both", where.c_str(), count,
                 read.norms.values.size(), OutlierWindow::SIZE);
        for (int64_t step : left_out)  // by a rollback that the checkpoint is older than
            if (!read.leaves_out(step)) read.left_out.push_back(step);
        read.options = options;
        read.rollbacks = rollbacks;
        if (options.spike_z == 0.0) read.limits[0] = read.limits[1] = {};
        *this = read;
    } catch (const nlohmann::json::exception&) {
        fail(EXIT_BAD_DATA, "%s: the health of the run is damaged", where.c_str());
    }
}
